"""Whole tensors under HF names, out of the shards of a running model."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_sao.megatron.mapping.architectures import ARCHITECTURES
from megatron_sao.megatron.mapping.hf_config import HFConfig
from megatron_sao.megatron.mapping.rows import VALUE_HEAD
from megatron_sao.megatron.mapping.table import Binding, Shape, bind
from megatron_sao.megatron.parallel import Parallel

EMBEDDING = "embedding.word_embeddings.weight"
_LEAST_S = 0.001  # of a wait: torch takes 0 for its default


class MappedModel(Protocol):
    """What this rank holds of a Megatron model, without DDP around it, that knows which HF checkpoint it is."""

    hf_config: HFConfig
    frozen_hf_names: frozenset[str]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """By Megatron's names, layers counted through the whole model; a copy of the tied embedding by its name."""
        ...

    def complete(self) -> None:
        """Bring in what an overlapped optimizer has not gathered yet. Collective."""
        ...

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class HFTensor:
    """One tensor of the whole, unsharded model."""

    name: str
    shape: Shape
    dtype: torch.dtype  # as the model holds it
    is_buffer: bool  # float32 in every model, file and publish
    trained: bool
    owner: int  # the first global rank that holds it, or its first shard
    joined: bool  # to the tensor before: both are loaded by an engine at once

    def exported(self, dtype: torch.dtype | None) -> torch.dtype:
        """Its type in an export of that type; None: the model's own types."""
        return self.dtype if dtype is None or self.is_buffer else dtype


def named_tensors(model: MappedModel) -> dict[str, Tensor]:
    """All that a table may name: parameters, and the buffers that are weights too (and others, which none names)."""
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}


def bindings_of(model: MappedModel, parallel: Parallel) -> tuple[Binding, ...]:
    """The table of this model: every tensor of the whole model, in the canonical order."""
    return bind(ARCHITECTURES[model.hf_config.architecture], model.hf_config, parallel.expert_size)


def hf_tensors(model: MappedModel, parallel: Parallel) -> tuple[HFTensor, ...]:
    """Every HF tensor of the whole model in the canonical order, identical on all ranks; tied tensors once.

    A critic's include `value_head.weight`, last. No communication.
    """
    dtype = parameter_dtype(model)
    return tuple(
        HFTensor(
            name=name,
            shape=shape,
            dtype=torch.float32 if name == VALUE_HEAD or binding.is_buffer else dtype,
            is_buffer=binding.is_buffer,
            trained=name not in model.frozen_hf_names and not binding.is_buffer,
            owner=_holders(binding, model.hf_config, parallel)[0],
            joined=binding.joined,
        )
        for binding in bindings_of(model, parallel)
        for name, shape in zip(binding.hf_names, binding.hf_shapes, strict=True)
    )


def parameter_bindings(model: MappedModel, parallel: Parallel) -> dict[str, Binding]:
    """For each parameter of this rank's model, its entry in the table.

    Raises:
        AssertionError: a parameter that the architecture's table does not name: it would never be saved or published.
    """
    parameters = dict(model.named_parameters())
    bindings = [binding for binding in bindings_of(model, parallel) if not binding.is_buffer]
    found = {each.find(parameters): each for each in bindings if is_local(each, model.hf_config, parallel)}
    unnamed = sorted(parameters.keys() - found.keys())
    assert not unnamed, f"the table of {model.hf_config.architecture} does not name these parameters: {unnamed}"
    return found


def parameter_hf_names(model: MappedModel, parallel: Parallel) -> dict[str, tuple[str, ...]]:
    """For each parameter of this rank's model, the HF tensors in it. Raises as `parameter_bindings`."""
    return {name: binding.hf_names for name, binding in parameter_bindings(model, parallel).items()}


def parameter_dtype(model: MappedModel) -> torch.dtype:
    """Type of all parameters but the value head."""
    return next(parameter.dtype for name, parameter in model.named_parameters() if name != VALUE_HEAD)


def is_local(binding: Binding, config: HFConfig, parallel: Parallel) -> bool:
    """Whether this rank holds the tensor, a shard of it, or the last stage's copy of the tied embedding."""
    if binding.expert_rank not in (None, parallel.expert_rank):
        return False
    owner = parallel.pipeline_rank_of(binding.layer, config.may_start_stage)
    has_copy = _is_copied(binding, config) and parallel.pipeline_rank == parallel.pipeline_size - 1
    return has_copy or parallel.pipeline_rank == owner


def _is_copied(binding: Binding, config: HFConfig) -> bool:
    """Whether the output layer of a policy is this tensor too: on a stage of its own Megatron keeps a copy of it."""
    return config.tied_embeddings and config.role == "policy" and EMBEDDING in binding.megatron_names


def shard_place(binding: Binding, parallel: Parallel) -> tuple[int, int]:
    """(rank, size) of this rank's shard."""
    if binding.expert_rank is not None:
        return parallel.expert_tensor_rank, parallel.expert_tensor_size
    return parallel.tensor_rank, parallel.tensor_size


def gather(
    model: MappedModel, parallel: Parallel, names: Sequence[str], dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Whole tensors by HF name on global rank 0, `{}` elsewhere. Collective: every rank calls it with the same names.

    `dtype` None keeps the model's own types; buffers always do. The tensors are copies, on the model's device.

    Raises:
        ValueError: a name that the model does not have.
    """
    shards = Shards(model, parallel)
    wholes: dict[str, Tensor] | None = None
    if parallel.rank == 0:
        known = {tensor.name: tensor for tensor in hf_tensors(model, parallel)}
        device = next(parameter.device for _, parameter in model.named_parameters())
        found = [known[name] for name in names if name in known]
        wholes = {each.name: torch.empty(each.shape, dtype=each.exported(dtype), device=device) for each in found}
    shards.receive(names, wholes, target=0, dtype=dtype)
    if wholes is not None:
        shards.copy_own(names, wholes)
    return wholes or {}


class Shards:
    """The shards of a model on all ranks, as pieces of whole HF tensors.

    Its tables are made once: a publish asks for every bucket, and a large model has many parameters.
    """

    def __init__(self, model: MappedModel, parallel: Parallel) -> None:
        self._model, self._config, self._parallel = model, model.hf_config, parallel
        self._parameters = named_tensors(model)
        self._device = next(iter(self._parameters.values())).device  # on which the world's messages are
        self._bindings = {name: binding for binding in bindings_of(model, parallel) for name in binding.hf_names}

    def receive(
        self,
        names: Sequence[str],
        wholes: Mapping[str, Tensor] | None,
        *,
        target: int,
        timeout_s: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> int:
        """Bring the pieces that other ranks hold to their places in `wholes` on global rank `target` (None elsewhere).

        Collective. Returns the bytes that this rank received. Each piece is one message, received where it belongs or,
        if that is no contiguous place on the model's device, by way of a copy: memory above `wholes` is one piece at
        most. What an overlapped optimizer has not brought in comes first, once after its step, by the group's own
        deadline.

        Raises:
            ValueError: a name that the model does not have.
            RuntimeError: not all pieces were there within `timeout_s` from then (None: the group's own deadline for
                each).
        """
        self._model.complete()
        own_rank, num_bytes, wanted = self._parallel.rank, 0, frozenset(names)
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        for binding in self._needed(names):
            for shard, holder in self._shards(binding):
                if own_rank == holder != target:
                    parameter = self._parameter(binding)
                    sent = parameter.dtype if dtype is None or binding.is_buffer else dtype
                    _send(shard.pieces(parameter, wanted), sent, target, end_s)
                elif own_rank == target != holder:
                    assert wholes is not None, "the target has the places"
                    num_bytes += _receive(shard.places(wholes), self._device, holder, end_s)
        return num_bytes

    def copy_own(self, names: Sequence[str], wholes: Mapping[str, Tensor]) -> int:
        """Copy the pieces that this rank itself holds to their places in `wholes`. Returns the bytes written.

        After a `receive` of them, which makes sure that an overlapped optimizer has brought them in.
        """
        wanted = frozenset(names)
        num_bytes = 0
        for binding in self._needed(names):
            for shard, holder in self._shards(binding):
                if holder == self._parallel.rank:
                    num_bytes += _copy(shard.pieces(self._parameter(binding), wanted), shard.places(wholes))
        return num_bytes

    def _needed(self, names: Sequence[str]) -> list[Binding]:
        unknown = [name for name in names if name not in self._bindings]
        if unknown:
            raise ValueError(f"the model has no tensors named {', '.join(unknown)}")
        return list(dict.fromkeys(self._bindings[name] for name in names))

    def _shards(self, binding: Binding) -> Iterator[tuple["_Shard", int]]:
        """Each shard of the tensor, and the global rank that holds it."""
        holders = _holders(binding, self._config, self._parallel)
        for rank, holder in enumerate(holders):
            yield _Shard(binding, self._config, rank, len(holders)), holder

    def _parameter(self, binding: Binding) -> Tensor:
        return self._parameters[binding.find(self._parameters)].detach()


@dataclass(frozen=True, slots=True)
class _Shard:
    """Shard number `rank` of the `size` that a tensor is cut into."""

    binding: Binding
    config: HFConfig
    rank: int
    size: int

    def pieces(self, parameter: Tensor, names: frozenset[str]) -> dict[str, Tensor]:
        """What it holds of each of the HF tensors `names`."""
        pieces = self.binding.layout.cut(parameter, self.config, rank=self.rank, size=self.size)
        return {name: piece for name, piece in zip(self.binding.hf_names, pieces, strict=True) if name in names}

    def places(self, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Where these pieces belong."""
        return {
            name: self.binding.layout.place(wholes[name], self.config, part=part, rank=self.rank, size=self.size)
            for part, name in enumerate(self.binding.hf_names)
            if name in wholes
        }


def _holders(binding: Binding, config: HFConfig, parallel: Parallel) -> range:
    """Global ranks that hold the model's first copy of the tensor, in the order of its shards."""
    first = parallel.first_rank(parallel.pipeline_rank_of(binding.layer, config.may_start_stage))
    if binding.expert_rank is not None:
        first += binding.expert_rank * parallel.expert_tensor_size
        return range(first, first + parallel.expert_tensor_size)
    return range(first, first + (1 if binding.layout.dim is None else parallel.tensor_size))


def _copy(pieces: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> int:
    for name, piece in pieces.items():
        assert places[name].shape == piece.shape, f"{name}: {places[name].shape} is not {piece.shape}"
        places[name].copy_(piece)
    return sum(place.nbytes for place in places.values())


def _send(pieces: Mapping[str, Tensor], dtype: torch.dtype, target: int, end_s: float | None) -> None:
    for name, piece in pieces.items():
        message = piece.to(dtype).contiguous().view(torch.uint8)
        _finish(dist.isend(message, dst=target), f"{name} for rank {target}", end_s)


def _receive(places: Mapping[str, Tensor], device: torch.device, holder: int, end_s: float | None) -> int:
    for name, place in places.items():
        is_there = place.is_contiguous() and place.device == device
        message = place if is_there else torch.empty(place.shape, dtype=place.dtype, device=device)
        _finish(dist.irecv(message.view(torch.uint8), src=holder), f"{name} of rank {holder}", end_s)
        if message is not place:
            place.copy_(message)
    return sum(place.nbytes for place in places.values())


def _finish(work: dist.Work | None, what: str, end_s: float | None) -> None:
    assert work is not None, "this rank belongs to the default group"
    try:
        work.wait() if end_s is None else work.wait(timedelta(seconds=max(_LEAST_S, end_s - time.monotonic())))
    except RuntimeError as error:
        raise RuntimeError(f"{what}: {error}") from error
