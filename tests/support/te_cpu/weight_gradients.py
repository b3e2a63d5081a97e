"""Apex's `fused_weight_gradient_mlp_cuda`: the weight gradient of a linear layer, added to the main gradient.

Megatron's own linear layers (the output layer) want it where `gradient_accumulation_fusion` is on.
"""

import importlib.machinery
import types

from torch import Tensor

NAME = "fused_weight_gradient_mlp_cuda"


def make() -> types.ModuleType:
    module = types.ModuleType(NAME)
    module.__spec__ = importlib.machinery.ModuleSpec(NAME, None)
    module.wgrad_gemm_accum_fp32 = accumulate  # type: ignore[attr-defined]
    module.wgrad_gemm_accum_fp16 = accumulate  # type: ignore[attr-defined]
    return module


def accumulate(inputs: Tensor, output_gradient: Tensor, main_grad: Tensor) -> None:
    """[tokens, in] and [tokens, out] into [out, in]."""
    rows = output_gradient.reshape(-1, output_gradient.shape[-1]).float()
    main_grad.add_((rows.t() @ inputs.reshape(-1, inputs.shape[-1]).float()).to(main_grad.dtype))
