"""Multi-tensor kernels of the optimizer: lists of lists of tensors, changed in place."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.te_cpu.extension import Extension


def register(extension: Extension) -> None:
    extension.multi_tensor_scale = multi_tensor_scale
    extension.multi_tensor_l2norm = multi_tensor_l2norm
    extension.multi_tensor_adam = multi_tensor_adam


def multi_tensor_scale(chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], scale: float) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source.float() * scale)


def multi_tensor_l2norm(
    chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], per_tensor: bool = False, *_: Any
) -> tuple[Tensor, Tensor]:
    """The norm [1] of all, and one a tensor."""
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]]) if lists[0] else torch.zeros(1)
    return norms.norm().reshape(1), norms


def multi_tensor_adam(  # the extension's signature
    chunk: int,
    overflow: Tensor,
    lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One step over gradients, parameters, first and second moments and, where there are any, main copies."""
    first_correction = 1 - beta1**step if bias_correction else 1.0
    second_correction = 1 - beta2**step if bias_correction else 1.0
    for gradient, parameter, first, second, *main in zip(*lists, strict=True):
        value, grad = (main[0] if main else parameter).float(), gradient.float()
        if not decoupled:
            grad = grad + weight_decay * value
        first.mul_(beta1).add_(grad, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = (first / first_correction) / ((second / second_correction).sqrt() + eps)
        if decoupled:
            update = update + weight_decay * value
        value = value - lr * update
        for target in (parameter, *main):
            target.copy_(value)
