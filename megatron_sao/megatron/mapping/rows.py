"""Rows of the tensor tables, in groups that the architectures are composed of.

The value head of a critic stands in every table: under its own name, in a file of its own.
"""

from megatron_sao.megatron.mapping.table import (
    FusedGateUp,
    FusedQKV,
    Layout,
    Presence,
    Replicated,
    Scope,
    Split,
    SplitVocabulary,
    TensorKind,
)

VALUE_HEAD = "value_head.weight"

_LAYER = "model.layers.{layer}."
_ATTENTION = _LAYER + "self_attn."
_EXPERT = _LAYER + "mlp.experts.{expert}."
_BLOCK = "decoder.layers.{layer}."
_SELF = _BLOCK + "self_attention."
_LOCAL_EXPERT = _BLOCK + "mlp.experts.local_experts.{expert}."
_GROUPED_EXPERT = _BLOCK + "mlp.experts."
_OUTPUTS, _INPUTS, _COPIES, _IDS = Split(0), Split(1), Replicated(), SplitVocabulary()
Dims = tuple[str, ...]


def _row(
    scope: Scope,
    name: str,
    dims: Dims,
    *megatron: str,
    layout: Layout = _COPIES,
    presence: Presence = "always",
    joined: bool = False,
) -> TensorKind:
    return TensorKind(
        scope=scope, hf=((name, dims),), megatron=megatron, layout=layout, presence=presence, joined=joined
    )


def _gate_up(scope: Scope, prefix: str, size: str, *megatron: str) -> TensorKind:
    hf = tuple((f"{prefix}{part}_proj.weight", (size, "hidden")) for part in ("gate", "up"))
    return TensorKind(scope=scope, hf=hf, megatron=megatron, layout=FusedGateUp())


def _indexer(name: str, dims: Dims, megatron: str) -> TensorKind:
    return TensorKind(
        scope="indexer_layer",
        hf=((f"{_ATTENTION}indexer.{name}", dims),),
        megatron=(f"{_SELF}core_attention.indexer.{megatron}",),
        layout=_COPIES,
        is_constant=True,
    )


def _latent_keys_and_values(presence: Presence, joined: bool = False) -> TensorKind:
    return _row(
        "layer",
        _ATTENTION + "kv_a_proj_with_mqa.weight",
        ("kv_lora_rope", "hidden"),
        _SELF + "linear_kv_down_proj.weight",
        presence=presence,
        joined=joined,
    )


def _qkv(end: str, dims: Dims, presence: Presence = "always") -> TensorKind:
    hf = tuple(
        (f"{_ATTENTION}{part}_proj.{end}", (size, *dims)) for part, size in (("q", "q"), ("k", "kv"), ("v", "kv"))
    )
    return TensorKind(
        scope="layer", hf=hf, megatron=(f"{_SELF}linear_qkv.{end}",), layout=FusedQKV(), presence=presence
    )


EMBEDDING = (
    _row(
        "model",
        "model.embed_tokens.weight",
        ("vocab", "hidden"),
        "embedding.word_embeddings.weight",
        layout=_IDS,
    ),
)

INPUT_NORM = (
    _row(
        "layer",
        _LAYER + "input_layernorm.weight",
        ("hidden",),
        _BLOCK + "input_layernorm.weight",
        _SELF + "linear_qkv.layer_norm_weight",
    ),
)

GROUPED_QUERY_ATTENTION = (
    *INPUT_NORM,
    _qkv("weight", ("hidden",)),
    _qkv("bias", (), presence="qkv_bias"),
    _row("layer", _ATTENTION + "q_norm.weight", ("head",), _SELF + "q_layernorm.weight", presence="qk_norm"),
    _row("layer", _ATTENTION + "k_norm.weight", ("head",), _SELF + "k_layernorm.weight", presence="qk_norm"),
    _row("layer", _ATTENTION + "o_proj.weight", ("hidden", "q"), _SELF + "linear_proj.weight", layout=_INPUTS),
)

LATENT_ATTENTION = (
    *INPUT_NORM,
    _row(
        "layer",
        _ATTENTION + "q_proj.weight",
        ("latent_q", "hidden"),
        _SELF + "linear_q_proj.weight",
        layout=_OUTPUTS,
        presence="whole_queries",
    ),
    _row(
        "layer",
        _ATTENTION + "q_a_proj.weight",
        ("q_lora", "hidden"),
        _SELF + "linear_q_down_proj.weight",
        presence="compressed_queries",
    ),
    _latent_keys_and_values(presence="compressed_queries", joined=True),
    _latent_keys_and_values(presence="whole_queries"),
    _row(
        "layer",
        _ATTENTION + "q_a_layernorm.weight",
        ("q_lora",),
        _SELF + "q_layernorm.weight",
        _SELF + "linear_q_up_proj.layer_norm_weight",
        presence="compressed_queries",
    ),
    _row(
        "layer",
        _ATTENTION + "q_b_proj.weight",
        ("latent_q", "q_lora"),
        _SELF + "linear_q_up_proj.weight",
        layout=_OUTPUTS,
        presence="compressed_queries",
    ),
    _row(
        "layer",
        _ATTENTION + "kv_a_layernorm.weight",
        ("kv_lora",),
        _SELF + "kv_layernorm.weight",
        _SELF + "linear_kv_up_proj.layer_norm_weight",
    ),
    _row(
        "layer",
        _ATTENTION + "kv_b_proj.weight",
        ("latent_kv", "kv_lora"),
        _SELF + "linear_kv_up_proj.weight",
        layout=_OUTPUTS,
    ),
    _row(
        "layer", _ATTENTION + "o_proj.weight", ("hidden", "latent_values"), _SELF + "linear_proj.weight", layout=_INPUTS
    ),
)

INDEXER = (  # a choice of tokens has no gradient
    _indexer("wq_b.weight", ("index_q", "q_lora"), "linear_wq_b.weight"),
    _indexer("wk.weight", ("index_head", "hidden"), "linear_wk.weight"),
    _indexer("k_norm.weight", ("index_head",), "k_norm.weight"),
    _indexer("k_norm.bias", ("index_head",), "k_norm.bias"),
    _indexer("weights_proj.weight", ("index_heads", "hidden"), "linear_weights_proj.weight"),
)

MLP_NORM = (
    _row(
        "layer",
        _LAYER + "post_attention_layernorm.weight",
        ("hidden",),
        _BLOCK + "pre_mlp_layernorm.weight",
        _BLOCK + "mlp.linear_fc1.layer_norm_weight",
    ),
)

DENSE_MLP = (
    _gate_up("dense_layer", _LAYER + "mlp.", "ffn", _BLOCK + "mlp.linear_fc1.weight"),
    _row(
        "dense_layer",
        _LAYER + "mlp.down_proj.weight",
        ("hidden", "ffn"),
        _BLOCK + "mlp.linear_fc2.weight",
        layout=_INPUTS,
    ),
)

EXPERTS = (
    _row("moe_layer", _LAYER + "mlp.gate.weight", ("experts", "hidden"), _BLOCK + "mlp.router.weight"),
    _gate_up(
        "expert",
        _EXPERT,
        "expert_ffn",
        _LOCAL_EXPERT + "linear_fc1.weight",
        _GROUPED_EXPERT + "linear_fc1.weight{expert}",
    ),
    _row(
        "expert",
        _EXPERT + "down_proj.weight",
        ("hidden", "expert_ffn"),
        _LOCAL_EXPERT + "linear_fc2.weight",
        _GROUPED_EXPERT + "linear_fc2.weight{expert}",
        layout=_INPUTS,
    ),
)

CORRECTION_BIAS = (
    TensorKind(
        scope="moe_layer",
        hf=((_LAYER + "mlp.gate.e_score_correction_bias", ("experts",)),),
        megatron=(_BLOCK + "mlp.router.expert_bias",),
        layout=_COPIES,
        is_buffer=True,
    ),
)

SHARED_EXPERTS = (
    _gate_up(
        "moe_layer", _LAYER + "mlp.shared_experts.", "shared_ffn", _BLOCK + "mlp.shared_experts.linear_fc1.weight"
    ),
    _row(
        "moe_layer",
        _LAYER + "mlp.shared_experts.down_proj.weight",
        ("hidden", "shared_ffn"),
        _BLOCK + "mlp.shared_experts.linear_fc2.weight",
        layout=_INPUTS,
    ),
)

MTP = (
    _row("mtp_layer", _LAYER + "enorm.weight", ("hidden",)),
    _row("mtp_layer", _LAYER + "hnorm.weight", ("hidden",)),
    _row("mtp_layer", _LAYER + "eh_proj.weight", ("hidden", "2 hidden")),
    _row("mtp_layer", _LAYER + "shared_head.norm.weight", ("hidden",)),
    # copies of the model's own, which only some checkpoints have
    _row("mtp_layer", _LAYER + "embed_tokens.weight", ("vocab", "hidden"), presence="optional"),
    _row("mtp_layer", _LAYER + "shared_head.head.weight", ("vocab", "hidden"), presence="optional"),
)

HEADS = (
    _row("model", "model.norm.weight", ("hidden",), "decoder.final_layernorm.weight"),
    _row(
        "model",
        "lm_head.weight",
        ("vocab", "hidden"),
        "output_layer.weight",
        layout=_IDS,
        presence="policy_untied",
    ),
    _row("model", VALUE_HEAD, ("1", "hidden"), "value_head.weight", presence="critic"),
)
