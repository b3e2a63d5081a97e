"""Qwen3 and Qwen3-MoE: HF names and shapes, Megatron-core names, layouts, options.

The value head of a critic stands in the same table: under its own name, in a file of its own.
"""

from collections.abc import Mapping
from typing import Any

from megatron_sao.megatron.mapping.hf_config import ConfigFields
from megatron_sao.megatron.mapping.table import Architecture, FusedGateUp, FusedQKV, Replicated, Split, TensorKind

VALUE_HEAD = "value_head.weight"

_LAYER = "model.layers.{layer}."
_BLOCK = "decoder.layers.{layer}."
_EXPERT = _LAYER + "mlp.experts.{expert}."
_LOCAL_EXPERT = _BLOCK + "mlp.experts.local_experts.{expert}."
_GROUPED_EXPERT = _BLOCK + "mlp.experts."
_OUTPUTS, _INPUTS = Split(0), Split(1)

_TENSORS = (
    TensorKind(
        scope="model",
        hf=(("model.embed_tokens.weight", ("vocab", "hidden")),),
        megatron=("embedding.word_embeddings.weight",),
        layout=_OUTPUTS,
    ),
    TensorKind(
        scope="layer",
        hf=((_LAYER + "input_layernorm.weight", ("hidden",)),),
        megatron=(_BLOCK + "input_layernorm.weight", _BLOCK + "self_attention.linear_qkv.layer_norm_weight"),
        layout=Replicated(),
    ),
    TensorKind(
        scope="layer",
        hf=(
            (_LAYER + "self_attn.q_proj.weight", ("q", "hidden")),
            (_LAYER + "self_attn.k_proj.weight", ("kv", "hidden")),
            (_LAYER + "self_attn.v_proj.weight", ("kv", "hidden")),
        ),
        megatron=(_BLOCK + "self_attention.linear_qkv.weight",),
        layout=FusedQKV(),
    ),
    TensorKind(
        scope="layer",
        hf=((_LAYER + "self_attn.q_norm.weight", ("head",)),),
        megatron=(_BLOCK + "self_attention.q_layernorm.weight",),
        layout=Replicated(),
    ),
    TensorKind(
        scope="layer",
        hf=((_LAYER + "self_attn.k_norm.weight", ("head",)),),
        megatron=(_BLOCK + "self_attention.k_layernorm.weight",),
        layout=Replicated(),
    ),
    TensorKind(
        scope="layer",
        hf=((_LAYER + "self_attn.o_proj.weight", ("hidden", "q")),),
        megatron=(_BLOCK + "self_attention.linear_proj.weight",),
        layout=_INPUTS,
    ),
    TensorKind(
        scope="layer",
        hf=((_LAYER + "post_attention_layernorm.weight", ("hidden",)),),
        megatron=(_BLOCK + "pre_mlp_layernorm.weight", _BLOCK + "mlp.linear_fc1.layer_norm_weight"),
        layout=Replicated(),
    ),
    TensorKind(
        scope="dense_layer",
        hf=(
            (_LAYER + "mlp.gate_proj.weight", ("ffn", "hidden")),
            (_LAYER + "mlp.up_proj.weight", ("ffn", "hidden")),
        ),
        megatron=(_BLOCK + "mlp.linear_fc1.weight",),
        layout=FusedGateUp(),
    ),
    TensorKind(
        scope="dense_layer",
        hf=((_LAYER + "mlp.down_proj.weight", ("hidden", "ffn")),),
        megatron=(_BLOCK + "mlp.linear_fc2.weight",),
        layout=_INPUTS,
    ),
    TensorKind(
        scope="moe_layer",
        hf=((_LAYER + "mlp.gate.weight", ("experts", "hidden")),),
        megatron=(_BLOCK + "mlp.router.weight",),
        layout=Replicated(),
    ),
    TensorKind(
        scope="expert",
        hf=(
            (_EXPERT + "gate_proj.weight", ("expert_ffn", "hidden")),
            (_EXPERT + "up_proj.weight", ("expert_ffn", "hidden")),
        ),
        megatron=(_LOCAL_EXPERT + "linear_fc1.weight", _GROUPED_EXPERT + "linear_fc1.weight{expert}"),
        layout=FusedGateUp(),
    ),
    TensorKind(
        scope="expert",
        hf=((_EXPERT + "down_proj.weight", ("hidden", "expert_ffn")),),
        megatron=(_LOCAL_EXPERT + "linear_fc2.weight", _GROUPED_EXPERT + "linear_fc2.weight{expert}"),
        layout=_INPUTS,
    ),
    TensorKind(
        scope="model",
        hf=(("model.norm.weight", ("hidden",)),),
        megatron=("decoder.final_layernorm.weight",),
        layout=Replicated(),
    ),
    TensorKind(
        scope="model",
        hf=(("lm_head.weight", ("vocab", "hidden")),),
        megatron=("output_layer.weight",),
        layout=_OUTPUTS,
        presence="policy_untied",
    ),
    TensorKind(
        scope="model",
        hf=((VALUE_HEAD, ("1", "hidden")),),
        megatron=("value_head.weight",),
        layout=Replicated(),
        presence="critic",
    ),
)

_USED = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_positions",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_embeddings",
    "intermediate_size": "ffn_size",
}
_USED_MOE = {
    **_USED,
    "num_experts": "num_experts",
    "moe_intermediate_size": "expert_ffn_size",
    "num_experts_per_tok": "experts_per_token",
    "norm_topk_prob": "renormalize_top_k",
}
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "hidden_act": ("silu",),
    "use_sliding_window": (False,),
}
_INERT = frozenset(
    {
        "_name_or_path",
        "attention_dropout",  # dropout is 0 in training, whatever the checkpoint says
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "initializer_range",
        "max_window_layers",  # of sliding windows, which are off
        "sliding_window",
        "transformers_version",
        "use_cache",
    }
)
_OPTIONS = {"qk_layernorm": True}

QWEN3 = Architecture(
    name="Qwen3ForCausalLM",
    fields=ConfigFields(used=_USED, fixed={**_FIXED, "model_type": ("qwen3",)}, inert=_INERT),
    options=_OPTIONS,
    tensors=_TENSORS,
)
QWEN3_MOE = Architecture(
    name="Qwen3MoeForCausalLM",
    fields=ConfigFields(
        used=_USED_MOE,
        fixed={**_FIXED, "model_type": ("qwen3_moe",)},
        inert=_INERT | {"output_router_logits", "router_aux_loss_coef"},  # no auxiliary loss is trained on
    ),
    options={**_OPTIONS, "moe_router_score_function": "softmax"},
    tensors=_TENSORS,
)
