"""Which parameters are trained: glob patterns over HF names, so that one config means the same under every layer spec.

Call it before DDP wraps the model: frozen parameters then have no gradient buffer and no optimizer state.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from megatron_sao.megatron.mapping.table import Binding
from megatron_sao.megatron.mapping.transfer import (
    HFTensor,
    MappedModel,
    bindings_of,
    hf_tensors,
    parameter_hf_names,
)
from megatron_sao.megatron.parallel import Parallel

GRADIENT_BYTES = 4  # of a trained parameter
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class FreezeReport:
    """Counts over the whole model, in HF tensors and in numbers."""

    num_frozen_tensors: int
    num_trained_tensors: int
    num_frozen: int  # parameters, as numbers
    num_trained: int
    saved_bytes: int  # gradients, Adam moments and main copies that one whole model does without


def freeze(model: MappedModel, parallel: Parallel, patterns: Sequence[str]) -> FreezeReport:
    """Freeze every parameter whose HF name matches a pattern (`*.self_attn.*`) and those that are never trained, train
    all others. Same on all ranks.

    Raises:
        ValueError: a pattern that matches nothing, nothing left to train, a Megatron tensor (such as the fused query,
            key and value) of which one HF part is frozen and another trained, or experts of a layer of which some are.
    """
    tensors = [tensor for tensor in hf_tensors(model, parallel) if not tensor.is_buffer]  # no parameters
    frozen = frozen_hf_names(bindings_of(model, parallel), patterns)
    if len(frozen) == len(tensors):
        raise ValueError(f"the freeze patterns {list(patterns)} leave nothing to train: freeze less")
    _apply(model, parallel, frozen)
    model.frozen_hf_names = frozen
    return _report(tensors, frozen)


def frozen_hf_names(bindings: Sequence[Binding], patterns: Sequence[str]) -> frozenset[str]:
    """HF names of the parameters that are never trained, and of those that match. Raises ValueError as `freeze`."""
    parameters = [binding for binding in bindings if not binding.is_buffer]
    frozen = _matching_names([name for binding in parameters for name in binding.hf_names], patterns)
    frozen |= {name for binding in parameters if binding.is_constant for name in binding.hf_names}
    _check_whole(bindings, frozen)
    _check_experts(bindings, frozen)
    return frozen


def _matching_names(names: Sequence[str], patterns: Sequence[str]) -> frozenset[str]:
    matches = {pattern: [name for name in names if fnmatchcase(name, pattern)] for pattern in patterns}
    empty = [pattern for pattern, found in matches.items() if not found]
    if empty:
        raise ValueError(
            f"freeze patterns that match no tensor: {', '.join(map(repr, empty))}; names look like "
            f"{', '.join(_examples(names))}"
        )
    return frozenset(name for found in matches.values() for name in found)


def _examples(names: Sequence[str]) -> list[str]:
    first_layer = [
        name for name in names if ".layers.0." in name and (".experts." not in name or ".experts.0." in name)
    ]
    outside = [name for name in names if ".layers." not in name]
    return [*outside, *first_layer]


def _check_whole(bindings: Sequence[Binding], frozen: frozenset[str]) -> None:
    for binding in bindings:
        cold = [name for name in binding.hf_names if name in frozen]
        if cold and len(cold) < len(binding.hf_names):
            warm = [name for name in binding.hf_names if name not in frozen]
            raise ValueError(
                f"Megatron holds {', '.join(binding.hf_names)} in one tensor; the freeze patterns freeze "
                f"{', '.join(cold)} and train {', '.join(warm)}: give a pattern for all of them or for none"
            )


def _check_experts(bindings: Sequence[Binding], frozen: frozenset[str]) -> None:
    """Transformer Engine computes a layer's experts on a rank as one, and asks only the first whether it is trained:
    the others' gradients would be lost, or computed for nothing, by where the layout puts them."""
    layers: dict[str, list[str]] = defaultdict(list)
    for binding in bindings:
        if binding.expert_rank is not None:
            layers[_EXPERT.sub(".experts.*.", binding.hf_names[0])].append(binding.hf_names[0])
    for pattern, names in layers.items():
        cold = [name for name in names if name in frozen]
        if cold and len(cold) < len(names):
            warm = [name for name in names if name not in frozen]
            raise ValueError(
                f"the freeze patterns freeze {len(cold)} experts of a layer ({cold[0]}) and train {len(warm)} "
                f"({warm[0]}), which Transformer Engine computes as one: give a pattern for all, {pattern}, or for none"
            )


def _apply(model: MappedModel, parallel: Parallel, frozen: frozenset[str]) -> None:
    parameters = dict(model.named_parameters())
    for name, hf_names in parameter_hf_names(model, parallel).items():
        parameters[name].requires_grad_(hf_names[0] not in frozen)


def _report(tensors: Sequence[HFTensor], frozen: frozenset[str]) -> FreezeReport:
    sizes = {tensor.name: torch.Size(tensor.shape).numel() for tensor in tensors}
    cold = [tensor for tensor in tensors if tensor.name in frozen]
    num_frozen = sum(sizes[tensor.name] for tensor in cold)
    return FreezeReport(
        num_frozen_tensors=len(cold),
        num_trained_tensors=len(tensors) - len(cold),
        num_frozen=num_frozen,
        num_trained=sum(sizes.values()) - num_frozen,
        saved_bytes=sum(sizes[tensor.name] * (GRADIENT_BYTES + adam_bytes(tensor.dtype.itemsize)) for tensor in cold),
    )


def adam_bytes(item_bytes: int) -> int:
    """Of a trained parameter: two float32 moments, and a float32 main copy of one that has fewer bytes."""
    return 8 + (4 if item_bytes < 4 else 0)
