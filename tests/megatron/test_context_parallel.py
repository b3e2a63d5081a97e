"""The stand-ins of context parallelism against plain attention, and what of it is refused."""

import dataclasses
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_sao.config import LayoutConfig
from megatron_sao.megatron.forward import context_part
from megatron_sao.megatron.mapping.architectures import read_hf_config
from megatron_sao.megatron.parallel import Parallel, check_platform
from megatron_sao.megatron.platform import Platform
from megatron_sao.megatron.transformer_config import transformer_config
from tests.support.te_cpu import context_parallel as fakes
from tests.support.te_cpu.extension import make
from tests.support.tiny_models import make_tiny_model

LENGTHS = (8, 4, 12)  # of sequences, in chunks for 2 context ranks
HEADS, GROUPS, QK, V = 4, 2, 6, 5
NO_TE = Platform(device=torch.device("cpu"), backend="gloo", transformer_engine=False, fused_weight_gradients=False)


def row(num_tokens: int, *, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(num_tokens)
    shapes = ((num_tokens, HEADS, QK), (num_tokens, GROUPS, QK), (num_tokens, GROUPS, V))
    q, k, v = (torch.randn(shape, generator=random).requires_grad_(grad) for shape in shapes)
    return q, k, v


def plain(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """torch's attention of one sequence, heads repeated by hand."""
    k, v = (each.repeat_interleave(HEADS // GROUPS, dim=1) for each in (k, v))
    q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)[0].transpose(0, 1)


@pytest.fixture
def fused() -> Any:
    extension = make()
    fakes.register(extension)
    return extension


def call(extension: Any, names: tuple[str, ...], **known: Any) -> list[Any]:
    """The extension's function with these arguments by position, and what the fake has not switched off."""
    ext, defaults = extension, dict.fromkeys(names)
    defaults |= {
        "qkv_layout": ext.NVTE_QKV_Layout.NVTE_THD_THD_THD,
        "dqkv_layout": ext.NVTE_QKV_Layout.NVTE_THD_THD_THD,
    }
    defaults |= {"o_format": ext.NVTE_QKV_Format.NVTE_THD, "do_format": ext.NVTE_QKV_Format.NVTE_THD}
    defaults |= {
        "bias_type": ext.NVTE_Bias_Type.NVTE_NO_BIAS,
        "softmax_type": ext.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX,
    }
    function = ext.fused_attn_bwd if "saved" in names else ext.fused_attn_fwd
    given = {**defaults, "window_size": (-1, -1), "attn_scale": QK**-0.5, "dropout": 0.0, **known}
    return function(*(given[name] for name in names))


@pytest.mark.parametrize("causal", [True, False])
def test_fused_attention_of_padded_rows_is_plain_attention(fused: Any, causal: bool) -> None:
    """Output, gradients and log-sum-exp; where a sequence is padded, nothing."""
    lengths, places = (3, 5), (0, 4, 10)  # two sequences in 10 tokens: token 3 and token 9 are padding
    q, k, v = row(10, grad=True)
    mask = "NVTE_PADDING_CAUSAL_MASK" if causal else "NVTE_PADDING_MASK"
    starts = torch.tensor([0, *np.cumsum(lengths).tolist()])
    known = {
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), starts),
        **{name: torch.tensor(places) for name in ("cu_seqlens_q_padded", "cu_seqlens_kv_padded")},
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), 6),
        "mask_type": getattr(fused.NVTE_Mask_Type, mask),
    }
    with torch.no_grad():
        out, lse, state = call(fused, fakes._FORWARD, q=q, k=k, v=v, **known)
    spans = [slice(start, start + length) for start, length in zip(places, lengths, strict=False)]
    wanted = [plain(q[span], k[span], v[span], causal=causal) for span in spans]
    for span, of_sequence in zip(spans, wanted, strict=True):
        torch.testing.assert_close(out[span], of_sequence)
    assert not out[[3, 9]].any()
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    sum((each * d_out[span]).sum() for span, each in zip(spans, wanted, strict=True)).backward()  # type: ignore[union-attr]
    with torch.no_grad():
        found = call(fused, fakes._BACKWARD, q=q, k=k, v=v, out=out, d_out=d_out, saved=[lse, state], **known)
    for gradient, leaf in zip(found, (q, k, v), strict=False):
        torch.testing.assert_close(gradient, leaf.grad)


def test_two_steps_over_other_keys_make_one_attention() -> None:
    """By log-sum-exp: all keys at once, or first half and second half of them corrected into each other."""
    q, k, v = row(sum(LENGTHS))
    boundaries = torch.tensor([0, *np.cumsum(LENGTHS).tolist()])
    size = QK**-0.5
    whole, whole_lse = fakes.attention(q, k, v, scale=size, causal=False)
    first, first_lse = fakes.attention(q, k[:9], v[:9], scale=size, causal=False)
    second, second_lse = fakes.attention(q, k[9:], v[9:], scale=size, causal=False)
    lses = [each.t().contiguous() for each in (first_lse, second_lse)]
    merged = torch.logaddexp(*lses)
    torch.testing.assert_close(merged, whole_lse.t())
    out = first.clone()
    fakes.thd_out_correction(out, second, lses[0], merged, lses[1], boundaries, False, True)
    torch.testing.assert_close(out, whole)
    half = fakes._half(boundaries, 1)
    half_lse, out = lses[0].clone(), first.clone()
    fakes.thd_second_half_lse_correction(half_lse, lses[1][:, half], boundaries, True)
    fakes.thd_out_correction(out, second[half], lses[0], half_lse, lses[1][:, half], boundaries, True, True)
    is_second = torch.zeros(len(q), dtype=torch.bool).index_fill(0, half, True)
    torch.testing.assert_close(out, torch.where(is_second[:, None, None], whole, first))
    torch.testing.assert_close(fakes.thd_read_second_half_lse(half_lse, boundaries, True, len(half)), merged[:, half])


def test_halves_are_those_of_every_sequence() -> None:
    tokens, boundaries = torch.arange(24.0), torch.tensor([0, 8, 12, 24])
    assert fakes.thd_read_half_tensor(tokens, boundaries, 0).tolist() == [0, 1, 2, 3, 8, 9, *range(12, 18)]
    assert fakes.thd_read_half_tensor(tokens, boundaries, 1).tolist() == [4, 5, 6, 7, 10, 11, *range(18, 24)]
    grad = torch.zeros(24)
    fakes.thd_grad_correction(grad, tokens[:12], boundaries, "none", "add")
    fakes.thd_grad_correction(grad, torch.ones(24), boundaries, "copy", "add")
    assert grad.tolist() == [1, 1, 1, 1, 1, 2, 3, 4, 1, 1, 5, 6, *[1] * 6, 7, 8, 9, 10, 11, 12]
    with pytest.raises(NotImplementedError, match="'zero'"):
        fakes.thd_grad_correction(grad, tokens[:12], boundaries, "zero", "none")


@pytest.mark.parametrize("size", [2, 4])
def test_a_context_ranks_part_has_transformer_engines_order(size: int) -> None:
    lengths = [length * size // 2 for length in LENGTHS]
    boundaries = torch.tensor([0, *np.cumsum(lengths).tolist()])
    for rank in range(size):
        wanted = fakes.thd_get_partitioned_indices(boundaries, sum(lengths), size, rank)
        np.testing.assert_array_equal(context_part(lengths, rank=rank, size=size), wanted)


def test_the_fake_attention_says_what_it_does_not_know(fused: Any) -> None:
    q, k, v = row(4)
    ends = torch.tensor([0, 4])
    known = {"q": q, "k": k, "v": v, "cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": 4, "max_seqlen_kv": 4}
    known["mask_type"] = fused.NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK
    with pytest.raises(NotImplementedError, match=r"dropout = 0\.1"):
        call(fused, fakes._FORWARD, **known, dropout=0.1)
    with pytest.raises(NotImplementedError, match="window"):
        call(fused, fakes._FORWARD, **known, window_size=(2, 0))
    wanted = {"qkv_layout": 99, "attn_mask_type": 0, "window_size_left": -1, "window_size_right": 0}
    choice, reason = fused.get_fused_attn_backend(
        types.SimpleNamespace(**wanted, dropout=0.0, bottom_right_diagonal=False)
    )
    assert choice == fused.NVTE_Fused_Attn_Backend.NVTE_No_Backend
    assert "qkv_layout = 99" in reason


def test_without_transformer_engine_context_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layout\.context = 2.*set layout\.context = 1"):
        check_platform(LayoutConfig(num_ranks=2, context=2), NO_TE)


def test_on_a_gpu_context_ranks_want_half_precision(tmp_path: Path) -> None:
    hf = read_hf_config(make_tiny_model(tmp_path, seed=1))
    gpu = dataclasses.replace(NO_TE, device=torch.device("cuda", 0), backend="nccl", transformer_engine=True)
    with pytest.raises(ValueError, match=r"context = 2 with float32.*model\.dtype = bfloat16"):
        transformer_config(hf, Parallel(context_size=2), gpu, dtype=torch.float32, recompute="none")
