"""Whole tensors under HF names, out of the shards of a running model."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_sao.megatron.mapping.architectures import ARCHITECTURES
from megatron_sao.megatron.mapping.hf_config import HFConfig
from megatron_sao.megatron.mapping.qwen3 import VALUE_HEAD
from megatron_sao.megatron.mapping.table import Binding, Shape, bind
from megatron_sao.megatron.parallel import Parallel


class MappedModel(Protocol):
    """A Megatron model (without DDP around it) that knows which HF checkpoint it is."""

    hf_config: HFConfig
    frozen_hf_names: frozenset[str]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class HFTensor:
    """One tensor of the whole, unsharded model."""

    name: str
    shape: Shape
    dtype: torch.dtype  # as the model holds it
    is_buffer: bool
    trained: bool
    expert_rank: int | None  # owner within an expert-parallel group; None: not an expert


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
            dtype=torch.float32 if name == VALUE_HEAD else dtype,
            is_buffer=False,
            trained=name not in model.frozen_hf_names,
            expert_rank=binding.expert_rank,
        )
        for binding in bindings_of(model, parallel)
        for name, shape in zip(binding.hf_names, binding.hf_shapes, strict=True)
    )


def parameter_hf_names(model: MappedModel, parallel: Parallel) -> dict[str, tuple[str, ...]]:
    """For each parameter of this rank's model, the HF tensors in it.

    Raises:
        AssertionError: a parameter that the architecture's table does not name: it would never be saved or published.
    """
    parameters = dict(model.named_parameters())
    local = [binding for binding in bindings_of(model, parallel) if is_local(binding, parallel)]
    names = {binding.find(parameters): binding.hf_names for binding in local}
    unnamed = sorted(parameters.keys() - names.keys())
    assert not unnamed, f"the table of {model.hf_config.architecture} does not name these parameters: {unnamed}"
    return names


def parameter_dtype(model: MappedModel) -> torch.dtype:
    """Type of all parameters but the value head."""
    return next(parameter.dtype for name, parameter in model.named_parameters() if name != VALUE_HEAD)


def is_local(binding: Binding, parallel: Parallel) -> bool:
    """Whether this rank holds the tensor, or a shard of it."""
    return binding.expert_rank is None or binding.expert_rank == parallel.expert_rank


def shard_place(binding: Binding, parallel: Parallel) -> tuple[int, int]:
    """(rank, size) of this rank's shard. Experts are not cut by tensor parallelism."""
    return (0, 1) if binding.expert_rank is not None else (parallel.tensor_rank, parallel.tensor_size)


def gather(
    model: MappedModel, parallel: Parallel, names: Sequence[str], dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Whole tensors by HF name on global rank 0, `{}` elsewhere. Collective: every rank calls it with the same names.

    Rank 0 gets one message from each rank that holds a part, so memory is about twice the named tensors: ask for as
    much as fits. `dtype` None keeps the model's own types. The tensors are copies, on the model's device.

    Raises:
        ValueError: a name that the model does not have.
    """
    needed = _needed(bindings_of(model, parallel), names)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    wire_dtype = dtype or parameter_dtype(model)
    if parallel.rank != 0:
        _send(needed, parameters, parallel, wire_dtype)
        return {}
    device = next(iter(parameters.values())).device
    inbox = _receive(needed, parallel, torch.empty(0, dtype=wire_dtype, device=device))
    found: dict[str, Tensor] = {}
    for binding in needed:
        own = [parameters[binding.find(parameters)].to(dtype)] if 0 in _holders(binding, parallel) else []
        whole = binding.layout.whole(own + inbox.get(binding, []), model.hf_config)
        found.update(zip(binding.hf_names, whole, strict=True))
    return {name: found[name] for name in names}


def _needed(bindings: Sequence[Binding], names: Sequence[str]) -> list[Binding]:
    by_name = {name: binding for binding in bindings for name in binding.hf_names}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise ValueError(f"the model has no tensors named {', '.join(unknown)}")
    return list(dict.fromkeys(by_name[name] for name in names))


def _holders(binding: Binding, parallel: Parallel) -> range:
    """Global ranks that hold the model's first copy of the tensor, in the order of its shards."""
    if binding.expert_rank is not None:
        return range(binding.expert_rank, binding.expert_rank + 1)
    return range(1) if binding.layout.dim is None else range(parallel.tensor_size)


def _send(needed: Sequence[Binding], parameters: Mapping[str, Tensor], parallel: Parallel, dtype: torch.dtype) -> None:
    held = [binding for binding in needed if parallel.rank in _holders(binding, parallel)]
    if held:
        pieces = [parameters[binding.find(parameters)].to(dtype).flatten() for binding in held]
        dist.send(torch.cat(pieces).view(torch.uint8), dst=0)


def _receive(needed: Sequence[Binding], parallel: Parallel, like: Tensor) -> dict[Binding, list[Tensor]]:
    """The shards of the other ranks, in rank order."""
    inbox: dict[Binding, list[Tensor]] = {}
    for rank in range(1, max((holder for binding in needed for holder in _holders(binding, parallel)), default=0) + 1):
        held = [binding for binding in needed if rank in _holders(binding, parallel)]
        shapes = [binding.shard_shape(shard_place(binding, parallel)[1]) for binding in held]
        if not held:
            continue
        message = like.new_empty(sum(math.prod(shape) for shape in shapes))
        dist.recv(message.view(torch.uint8), src=rank)
        pieces = message.split([math.prod(shape) for shape in shapes])
        for binding, shape, piece in zip(held, shapes, pieces, strict=True):
            inbox.setdefault(binding, []).append(piece.view(shape))
    return inbox
