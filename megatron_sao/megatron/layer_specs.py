"""Layer specs for the two platforms, and what keeps the sequences of a packed row apart in their attention."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_dsa_module_spec_for_backend,
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_sao.megatron.mapping.hf_config import HFConfig
from megatron_sao.megatron.platform import Platform


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Which attention Megatron computes for a model."""

    kind: Literal["grouped-query", "latent", "latent, dense for sparse", "sparse (DSA)"]
    max_exact_tokens: int | None  # longer sequences are not computed as the checkpoint's model would; None: all are


def attention_of(hf: HFConfig) -> Attention:
    """The one place that says it.

    A sparse attention (DSA) of `index_topk` tokens is dense up to that length. Megatron-core 0.16.1 has classes for it
    but no spec that builds them, no layers that share a choice, and an indexer that sees other latents than GLM's.
    """
    if hf.computes_sparse:
        return Attention(kind="sparse (DSA)", max_exact_tokens=None)
    if hf.index_topk:
        return Attention(kind="latent, dense for sparse", max_exact_tokens=hf.index_topk)
    return Attention(kind="latent" if hf.kv_lora_rank else "grouped-query", max_exact_tokens=None)


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, for the local layer spec (Megatron's own refuses sequence parallelism)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), None, self.eps).to(x.dtype) * self.weight


class LayerNorm(nn.LayerNorm):
    """Of an indexer's keys, for the local layer spec."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)


class SparseBackend(LocalSpecProvider):
    """What Megatron's local modules lack for sparse attention."""

    def linear(self) -> type:
        return Linear  # type: ignore[no-any-return]

    def layer_norm(self, rms_norm: bool = False, **_: Any) -> type:
        return RMSNorm if rms_norm else LayerNorm


class LatentCoreAttention(DotProductAttention):
    """Megatron's local attention, which takes heads with values of another size, if it is not told so.

    Its output has `config.kv_channels` per head: the size of a value.
    """

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert v_channels in (0, self.config.kv_channels), f"a value of {v_channels} is not config.kv_channels"


class WholeQueriesAttention(MLASelfAttention):
    """Latent attention whose queries are not compressed, and so have no latent to be normed.

    Megatron-core 0.19 would put a norm of its own into their projection, or refuse to without Transformer Engine. Older
    ones do not ask here.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver  # here: not in every version

        resolver = QKNormConfigResolver(self.config, submodules)
        resolver.has_q_lora = True  # what it says of the queries' latent is not built
        return {**resolver.resolve(), "linear_q_proj": submodules.linear_q_proj}


def layer_specs(config: TransformerConfig, platform: Platform, *, vp_stage: int | None = None) -> Any:
    """Specs of the layers in this rank's pipeline stage, or in its chunk number `vp_stage`.

    The local spec gets our norm, and for latent attention a core and down projections that every rank has whole; for
    sparse attention all that Megatron's own has, out of local modules.

    Megatron's own local spec cuts the down projections' outputs over tensor-parallel ranks. Then the gradient of the
    rotated part of the keys, which every rank computes from its own heads, is never summed.
    """
    sparse = is_sparse(config)
    if platform.transformer_engine and sparse:
        return get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)
    dense = copy.copy(config)
    dense.experimental_attention_variant = None
    specs = get_gpt_decoder_block_spec(
        dense, platform.transformer_engine, normalization=config.normalization, vp_stage=vp_stage
    )
    if config.multi_latent_attention and config.q_lora_rank is None:
        for layer in specs.layer_specs:
            layer.submodules.self_attention.module = WholeQueriesAttention
    if platform.transformer_engine:
        return specs
    for layer in specs.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        attention = layer.submodules.self_attention.submodules
        if sparse:
            layer.submodules.self_attention = get_dsa_module_spec_for_backend(config, SparseBackend())
        elif config.multi_latent_attention:
            attention.q_layernorm = attention.kv_layernorm = RMSNorm
            attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
            attention.core_attention = LatentCoreAttention
        elif config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    specs.layer_norm = RMSNorm
    return specs


def is_sparse(config: TransformerConfig) -> bool:
    return bool(config.experimental_attention_variant == "dsa")


def takes_packed_rows(config: TransformerConfig, platform: Platform) -> bool:
    """Whether the attention is told the sequences' boundaries, or takes a mask. A sparse one ignores masks."""
    return platform.transformer_engine or is_sparse(config)


def attention_inputs(
    lengths: Sequence[int], *, device: torch.device, packed: bool
) -> tuple[Tensor | None, PackedSeqParams | None]:
    """What keeps the sequences of a packed row apart: `attention_mask` and `packed_seq_params` for the model's call.

    `lengths`: of the row's sequences in order, T in all; padding is a sequence of its own. The host knows them: nothing
    here waits for the device.
    Not `packed`: a mask [1, 1, T, T], True where attention is forbidden, and None. Else: None, and the sequence
    boundaries (format thd).
    """
    if not packed:
        segments_T = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(device, non_blocking=True)
        position_T = torch.arange(len(segments_T), device=device)
        masked = (segments_T[:, None] != segments_T[None, :]) | (position_T[:, None] < position_T[None, :])
        return masked[None, None], None
    boundaries = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)
    longest = max(lengths)
    return None, PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
