"""RMSNorm and LayerNorm, forward and backward. Statistics in float32, over the last dimension."""

from typing import Any

import torch
from torch import Tensor

from tests.support.te_cpu.extension import TORCH_TYPES, Extension


def register(extension: Extension) -> None:
    extension.rmsnorm_fwd, extension.rmsnorm_bwd = rmsnorm_fwd, rmsnorm_bwd
    extension.layernorm_fwd, extension.layernorm_bwd = layernorm_fwd, layernorm_bwd


def rmsnorm_fwd(  # the extension's signature
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, None, Tensor]:
    """The result, no mean, and the inverse root of the mean square."""
    _refuse_quantizer(x, quantizer)
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1) + eps)
    return _deliver(wide * inverse[..., None] * _scale(weight, zero_centered_gamma), out, out_dtype), None, inverse


def rmsnorm_bwd(
    gradient: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight."""
    wide = gradient.float().reshape(x.shape)
    normal = x.float() * inverse[..., None]
    inner = wide * _scale(weight, zero_centered_gamma)
    input_gradient = inverse[..., None] * (inner - normal * (inner * normal).mean(-1, keepdim=True))
    return input_gradient.to(x.dtype), (wide * normal).flatten(0, -2).sum(0).to(weight.dtype)


def layernorm_fwd(  # the extension's signature
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, the mean, and the inverse standard deviation."""
    _refuse_quantizer(x, quantizer)
    wide = x.float()
    mean, inverse = wide.mean(-1), torch.rsqrt(wide.var(-1, unbiased=False) + eps)
    normal = (wide - mean[..., None]) * inverse[..., None]
    result = normal * _scale(weight, zero_centered_gamma) + bias.float()
    return _deliver(result, out, out_dtype), mean, inverse


def layernorm_bwd(  # the extension's signature
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the weight and of the bias."""
    wide = gradient.float().reshape(x.shape)
    normal = (x.float() - mean[..., None]) * inverse[..., None]
    inner = wide * _scale(weight, zero_centered_gamma)
    centered = inner - inner.mean(-1, keepdim=True) - normal * (inner * normal).mean(-1, keepdim=True)
    weight_gradient, bias_gradient = ((part.flatten(0, -2).sum(0)) for part in (wide * normal, wide))
    return (inverse[..., None] * centered).to(x.dtype), weight_gradient.to(weight.dtype), bias_gradient.to(weight.dtype)


def _scale(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def _deliver(result: Tensor, out: Tensor | None, out_dtype: Any) -> Tensor:
    result = result.to(out_dtype if isinstance(out_dtype, torch.dtype) else TORCH_TYPES[int(out_dtype)])
    return result if out is None else out.copy_(result)


def _refuse_quantizer(x: Tensor, quantizer: Any) -> None:
    if quantizer is not None:
        raise NotImplementedError(f"a norm of {tuple(x.shape)} with {type(quantizer).__name__}")
