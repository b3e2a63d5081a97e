"""The scaled softmax kernels of unfused attention in half precision: [batch, heads, queries, keys]."""

import torch
from torch import Tensor

from tests.support.te_cpu.extension import Extension

FORBIDDEN = -10000.0
"""The score that the kernel gives a forbidden key; a query that may see no key gets 0 everywhere."""


def register(extension: Extension) -> None:
    extension.scaled_softmax_forward = scaled_softmax_forward
    extension.scaled_masked_softmax_forward = scaled_masked_softmax_forward
    extension.scaled_upper_triang_masked_softmax_forward = scaled_upper_triang_masked_softmax_forward
    extension.scaled_aligned_causal_masked_softmax_forward = scaled_aligned_causal_masked_softmax_forward
    for kind in ("", "masked_", "upper_triang_masked_", "aligned_causal_masked_"):
        setattr(extension, f"scaled_{kind}softmax_backward", scaled_softmax_backward)


def scaled_softmax_forward(scores: Tensor, scale: float) -> Tensor:
    return torch.softmax(scores.float() * scale, dim=-1).to(scores.dtype)


def scaled_masked_softmax_forward(scores: Tensor, mask: Tensor, scale: float) -> Tensor:
    """`mask`, uint8 or bool [batch or 1, 1, queries, keys]: 1 forbids."""
    forbidden = mask.bool()
    chances = torch.softmax((scores.float() * scale).masked_fill(forbidden, FORBIDDEN), dim=-1)
    return chances.masked_fill(forbidden.all(-1, keepdim=True), 0.0).to(scores.dtype)


def scaled_upper_triang_masked_softmax_forward(scores: Tensor, scale: float) -> Tensor:
    return _causal(scores, scale, offset=0)


def scaled_aligned_causal_masked_softmax_forward(scores: Tensor, scale: float) -> Tensor:
    """The last query sees the last key."""
    return _causal(scores, scale, offset=scores.shape[-1] - scores.shape[-2])


def _causal(scores: Tensor, scale: float, *, offset: int) -> Tensor:
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + offset)
    return torch.softmax((scores.float() * scale).masked_fill(later, float("-inf")), dim=-1).to(scores.dtype)


def scaled_softmax_backward(gradient: Tensor, chances: Tensor, scale: float) -> Tensor:
    wide, probabilities = gradient.float(), chances.float()
    inner = (wide * probabilities).sum(-1, keepdim=True)
    return (scale * probabilities * (wide - inner)).to(gradient.dtype)
