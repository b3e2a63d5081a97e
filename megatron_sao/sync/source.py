"""The Megatron actor as a source of whole tensors under HF names."""

from collections.abc import Mapping, Sequence

import torch

from megatron_sao.megatron.mapping.transfer import HFTensor, MappedModel, Shards, hf_tensors
from megatron_sao.megatron.parallel import Parallel
from megatron_sao.megatron.weight_files import CarriedTensor
from megatron_sao.sync.plan import Publishable
from megatron_sao.types import TensorSpec


class MegatronSource:
    """`sync.send.TensorSource` over a model (without DDP around it), in the types that the model holds.

    `carried`: what an engine holds and the model does not (indexers). A full publish restores it, from rank 0's disk:
    the first one follows on a reset of all the engine's tensors.
    """

    def __init__(self, model: MappedModel, parallel: Parallel, carried: Sequence[CarriedTensor] = ()) -> None:
        self._model, self._parallel = model, parallel
        self._shards = Shards(model, parallel)
        self._carried = {tensor.name: tensor for tensor in carried if tensor.in_engine}

    def tensors(self) -> Sequence[Publishable]:
        """In the mapping's canonical order, then the carried ones. No communication."""
        held = tuple(
            Publishable(
                spec=_spec(tensor),
                trained=tensor.trained,
                is_buffer=tensor.is_buffer,
                owner=tensor.owner,
                joined=tensor.joined,
            )
            for tensor in hf_tensors(self._model, self._parallel)
        )
        return held + tuple(
            Publishable(spec=_spec(tensor), trained=False, is_buffer=False) for tensor in self._carried.values()
        )

    def gather(
        self, specs: Sequence[TensorSpec], places: Mapping[str, torch.Tensor] | None, *, target: int, timeout_s: float
    ) -> int:
        return self._shards.receive(self._held(specs), places, target=target, timeout_s=timeout_s)

    def flatten(self, specs: Sequence[TensorSpec], places: Mapping[str, torch.Tensor]) -> int:
        num_bytes = self._shards.copy_own(self._held(specs), places)
        for tensor in (self._carried[spec.name] for spec in specs if spec.name in self._carried):
            places[tensor.name].copy_(tensor.read())
            num_bytes += tensor.num_bytes
        return num_bytes

    def _held(self, specs: Sequence[TensorSpec]) -> list[str]:
        return [spec.name for spec in specs if spec.name not in self._carried]


def _spec(tensor: HFTensor | CarriedTensor) -> TensorSpec:
    return TensorSpec(name=tensor.name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
