"""What stand-ins of Transformer Engine's kernels compute, each beside an independent computation.

`TRITON_INTERPRET=1 python -m tests.support.te_kernels FILE` writes the pairs, and what an unknown kernel says, to FILE.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb
from transformer_engine.pytorch.triton import permutation as fake

from megatron_sao.megatron import platform

Pairs = dict[str, tuple[Any, Any]]
"""By name: what the stand-ins give, and what the reference gives."""
HEADS, CHANNELS = 2, 12


def main(file: str) -> None:
    platform.install()
    torch.manual_seed(0)
    said = "nothing"
    try:
        sys.modules["transformer_engine_torch"].fp8_transpose(torch.zeros(2, 3), 7, out=None)
    except NotImplementedError as error:
        said = str(error)
    torch.save((_rotary() | _permutations() | _weight_gradients(), said), file)


def _with_gradient(function: Callable[[Tensor], Tensor], inputs: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    leaf = inputs.clone().requires_grad_()
    output = function(leaf)
    output.backward(gradient[: len(output)])
    assert leaf.grad is not None
    return output.detach(), leaf.grad


def _rotary() -> Pairs:
    """Transformer Engine's fused path beside its own unfused one; half of the channels pass."""
    angles = torch.rand(24, 1, 1, CHANNELS // 2)
    boundaries = torch.tensor([0, 8, 12, 24], dtype=torch.int32)
    pairs = {}
    for tensor_format, cp_size, cp_rank, interleaved in (
        ("thd", 1, 0, False),
        ("thd", 1, 0, True),
        ("thd", 2, 0, False),
        ("thd", 2, 1, False),
        ("sbhd", 1, 0, False),
        ("bshd", 1, 0, True),
    ):
        packed = tensor_format == "thd"
        shape = (24 // cp_size, HEADS, CHANNELS) if packed else (3, 4, HEADS, CHANNELS)
        values, gradient = torch.randn(shape), torch.randn(shape)

        def rotate(leaf: Tensor, fused: bool) -> Tensor:
            return apply_rotary_pos_emb(
                leaf,
                angles,
                tensor_format=tensor_format,  # noqa: B023 - called within the turn
                interleaved=interleaved,  # noqa: B023
                fused=fused,
                cu_seqlens=boundaries if packed else None,  # noqa: B023
                cp_size=cp_size,  # noqa: B023
                cp_rank=cp_rank,  # noqa: B023
            )

        found, wanted = (
            _with_gradient(lambda leaf, fused=fused: rotate(leaf, fused), values, gradient) for fused in (True, False)
        )
        pairs[f"rope {tensor_format} {cp_rank}/{cp_size}, interleaved {interleaved}"] = found, wanted
    return pairs


def _permutations() -> Pairs:
    """The stand-ins beside Transformer Engine's own Triton kernels in Triton's interpreter; with and without padding.

    A map of rows names a token's copies in any order: the two are compared by what is done with them.
    """
    real = _interpreted()
    num_tokens, num_experts, hidden = 7, 4, 8
    routing = torch.rand(num_tokens, num_experts) > 0.5
    num_copies, sizes = int(routing.sum()), routing.sum(0)
    padding = (-sizes) % 4
    offsets = padding.cumsum(0) - padding
    tokens, chances = torch.randn(num_tokens, hidden), torch.rand(num_tokens, num_experts)
    sized = (num_tokens, num_experts)
    pairs = {}
    for name, pad, num_rows in (("", None, num_copies), (", padded", offsets, num_copies + int(padding.sum()))):
        answers = []
        for kernels in (fake, real):
            where = kernels.make_row_id_map(routing, *sized)
            copies, _, row_chances = kernels.permute_with_mask_map(
                tokens, where, chances, None, pad, *sized, num_rows, hidden, 0
            )
            back = kernels.unpermute_with_mask_map(copies, where, None, row_chances, pad, *sized, hidden)
            merged, _ = kernels.unpermute_with_mask_map(copies, where, chances, None, pad, *sized, hidden)
            backward = kernels.unpermute_with_mask_map_bwd_with_merging_probs(
                tokens, where, copies, chances, pad, *sized, num_rows, hidden
            )
            answers.append((copies, row_chances, *back, merged, *backward))
        pairs[f"permutation{name}"] = answers[0], answers[1]
    return pairs | _sorted_chunks(real)


def _sorted_chunks(real: ModuleType) -> Pairs:
    sizes, order = torch.tensor([3, 0, 2, 4]), torch.tensor([2, 0, 3, 1])
    rows, chances = torch.randn(9, 8), torch.rand(9)
    answers = []
    for kernels in (fake, real):
        where = kernels.make_chunk_sort_map(sizes, order, 9, 4)
        results = [kernels.sort_chunks_by_map(rows, where, chances, 9, 8, forward) for forward in (True, False)]
        answers.append((where, *results[0], *results[1]))
    return {"sorted chunks": (answers[0], answers[1])}


def _interpreted() -> ModuleType:
    """A second copy of the module, with the kernels that it came with, on Triton's interpreter."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "set before Triton is imported"
    spec = importlib.util.find_spec("transformer_engine.pytorch.triton.permutation")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for kernel in vars(module).values():
        if hasattr(kernel, "configs"):
            kernel.configs = kernel.configs[:1]  # nothing to choose: the choice would be measured on a GPU
    return module


def _weight_gradients() -> Pairs:
    """Of the output layer: the product's replacement of Apex's kernel, twice into one buffer."""
    assert layers._grad_accum_fusion_available
    pairs: Pairs = {}
    for name, dtype in (("fp32", torch.float32), ("fp16", torch.bfloat16)):
        inputs, outputs = torch.randn(5, 8).to(dtype), torch.randn(5, 6).to(dtype)
        main_grad = torch.ones(6, 8)
        add = getattr(layers.fused_weight_gradient_mlp_cuda, f"wgrad_gemm_accum_{name}")
        add(inputs, outputs, main_grad)
        add(inputs, outputs, main_grad)
        pairs[f"weight gradient {name}"] = (main_grad,), (1 + 2 * (outputs.double().t() @ inputs.double()).float(),)
    return pairs


if __name__ == "__main__":
    main(sys.argv[1])
