"""GEMM, plain and grouped. Sums in float32, as the tensor cores' accumulators are."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.te_cpu.extension import TORCH_TYPES, Extension


def register(extension: Extension) -> None:
    extension.generic_gemm = generic_gemm
    extension.te_general_grouped_gemm = te_general_grouped_gemm


def generic_gemm(  # the extension's signature
    a: Tensor,
    transa: bool,
    b: Tensor,
    transb: bool,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    **overlap: Any,
) -> tuple[Tensor, Tensor | None, None, None]:
    """op(b) @ op(a), in the order of column-major BLAS: `TN` is b @ a.T. Returns the result and a bias gradient.

    A backward call with a bias (`grad`) takes the bias gradient, the sum of b's rows.
    """
    if gelu or quantizer is not None or overlap.get("comm_overlap") is not None:
        raise NotImplementedError(f"a GEMM of {tuple(a.shape)} and {tuple(b.shape)} with gelu, quantizer or overlap")
    result = multiply(a, transa, b, transb)
    bias_gradient = None
    if bias is not None and bias.numel():
        if grad:
            bias_gradient = b.reshape(-1, b.shape[-1]).float().sum(0).to(TORCH_TYPES[int(bias_dtype)])
        else:
            result = result + bias.float()
    if not transb:
        result = result.reshape(*b.shape[:-1], -1)
    if out is None:
        return result.to(a.dtype if out_dtype is None else TORCH_TYPES[int(out_dtype)]), bias_gradient, None, None
    store(result, out, accumulate=accumulate)
    return out, bias_gradient, None, None


def multiply(a: Tensor, transa: bool, b: Tensor, transb: bool) -> Tensor:
    rows_a, rows_b = a.reshape(-1, a.shape[-1]).float(), b.reshape(-1, b.shape[-1]).float()
    return (rows_b.t() if transb else rows_b) @ (rows_a.t() if transa else rows_a)


def store(result: Tensor, out: Tensor, *, accumulate: bool) -> None:
    result = result.reshape(out.shape)
    out.copy_(out + result if accumulate else result)


def te_general_grouped_gemm(  # the extension's signature
    a: Sequence[Tensor],
    transa: bool,
    b: Sequence[Tensor],
    transb: bool,
    out: Sequence[Tensor],
    out_dtype: Any,
    m_splits: Sequence[int],
    bias: Sequence[Tensor],
    bias_dtype: Any,
    single_output: bool,
    gelu_in: Sequence[Tensor],
    grad: bool,
    workspaces: Sequence[Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Sequence[Tensor]:
    """One GEMM an expert, experts without tokens included: their weight gradient is 0 and their output empty."""
    if any(tensor.numel() for tensor in bias):
        raise NotImplementedError(f"a grouped GEMM with biases {[tuple(tensor.shape) for tensor in bias]}")
    outs = torch.split(out[0], list(m_splits)) if single_output else out
    for first, second, target in zip(a, b, outs, strict=True):
        store(multiply(first, transa, second, transb), target, accumulate=accumulate)
    return bias
