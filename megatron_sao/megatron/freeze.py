"""Which parameters are trained: glob patterns over HF names, so that one config means the same under every layer spec.

Call it before DDP wraps the model: frozen parameters then have no gradient buffer and no optimizer state.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_sao.megatron.frozen_names import GRADIENT_BYTES, adam_bytes, frozen_hf_names
from megatron_sao.megatron.mapping.transfer import (
    HFTensor,
    MappedModel,
    bindings_of,
    hf_tensors,
    parameter_hf_names,
)
from megatron_sao.megatron.parallel import Parallel


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
