"""Qwen3 and Qwen3-MoE."""

from collections.abc import Mapping
from typing import Any

from megatron_sao.megatron.mapping import rope, rows, shared
from megatron_sao.megatron.mapping.hf_config import ConfigFields, Derived
from megatron_sao.megatron.mapping.table import Architecture

_USED = {**shared.USED, **shared.USED_GROUPED_QUERY}
_USED_MOE = {
    **_USED,
    "num_experts": "num_experts",
    "moe_intermediate_size": "expert_ffn_size",
    "num_experts_per_tok": "experts_per_token",
    "norm_topk_prob": "renormalize_top_k",
}
_FIXED = {**shared.FIXED, "attention_bias": (False,), "use_sliding_window": (False,)}
_INERT = shared.INERT | {"max_window_layers", "sliding_window"}  # of sliding windows, which are off
_DERIVED = (
    Derived(attribute="rope", fields=rope.FIELDS, read=rope.plain),
    Derived(attribute="qk_norm", fields=(), read=lambda data: True),
)


def _dense(data: Mapping[str, Any]) -> tuple[bool, ...]:
    return (False,) * int(data["num_hidden_layers"])


def _every_so_many(data: Mapping[str, Any]) -> tuple[bool, ...]:
    dense, step = data.get("mlp_only_layers") or (), data.get("decoder_sparse_step", 1)
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(data["num_hidden_layers"]))


QWEN3 = Architecture(
    name="Qwen3ForCausalLM",
    fields=ConfigFields(
        used=_USED,
        derived=(*_DERIVED, Derived(attribute="is_moe_layer", fields=(), read=_dense)),
        fixed={**_FIXED, "model_type": ("qwen3",)},
        inert=_INERT,
    ),
    options=lambda hf: {"qk_layernorm": True},
    tensors=(*rows.EMBEDDING, *rows.GROUPED_QUERY_ATTENTION, *rows.MLP_NORM, *rows.DENSE_MLP, *rows.HEADS),
)
QWEN3_MOE = Architecture(
    name="Qwen3MoeForCausalLM",
    fields=ConfigFields(
        used=_USED_MOE,
        derived=(
            *_DERIVED,
            Derived(attribute="is_moe_layer", fields=("mlp_only_layers", "decoder_sparse_step"), read=_every_so_many),
        ),
        fixed={**_FIXED, "model_type": ("qwen3_moe",)},
        inert=_INERT | {"router_aux_loss_coef"},  # no auxiliary loss is trained on
    ),
    options=lambda hf: {"qk_layernorm": True, "moe_router_score_function": "softmax"},
    tensors=(
        *rows.EMBEDDING,
        *rows.GROUPED_QUERY_ATTENTION,
        *rows.MLP_NORM,
        *rows.DENSE_MLP,
        *rows.EXPERTS,
        *rows.HEADS,
    ),
)
