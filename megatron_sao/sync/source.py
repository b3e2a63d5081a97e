"""The Megatron actor as a source of whole tensors under HF names."""

from collections.abc import Mapping, Sequence

import torch

from megatron_sao.megatron.mapping.transfer import MappedModel, Shards, hf_tensors
from megatron_sao.megatron.parallel import Parallel
from megatron_sao.sync.plan import Publishable
from megatron_sao.types import TensorSpec


class MegatronSource:
    """`sync.send.TensorSource` over a model (without DDP around it), in the types that the model holds."""

    def __init__(self, model: MappedModel, parallel: Parallel) -> None:
        self._model, self._parallel = model, parallel
        self._shards = Shards(model, parallel)

    def tensors(self) -> Sequence[Publishable]:
        """In the mapping's canonical order. No communication."""
        return tuple(
            Publishable(
                spec=TensorSpec(
                    name=tensor.name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape)
                ),
                trained=tensor.trained,
                is_buffer=tensor.is_buffer,
                owner=tensor.owner,
            )
            for tensor in hf_tensors(self._model, self._parallel)
        )

    def gather(
        self, specs: Sequence[TensorSpec], places: Mapping[str, torch.Tensor] | None, *, target: int, timeout_s: float
    ) -> int:
        return self._shards.receive([spec.name for spec in specs], places, target=target, timeout_s=timeout_s)

    def flatten(self, specs: Sequence[TensorSpec], places: Mapping[str, torch.Tensor]) -> int:
        return self._shards.copy_own([spec.name for spec in specs], places)
