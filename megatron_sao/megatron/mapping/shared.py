"""Fields of `config.json` and Megatron options that several architectures have in common."""

from collections.abc import Mapping
from typing import Any

from megatron_sao.megatron.mapping.hf_config import Derived, HFConfig

USED = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_positions",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_embeddings",
    "intermediate_size": "ffn_size",
}
USED_GROUPED_QUERY = {"num_key_value_heads": "num_kv_heads", "head_dim": "head_dim"}
USED_LATENT = {  # head_dim is no size of such a model: files say 64 or 192 where a query has 256
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "nope_head_dim",
    "qk_rope_head_dim": "rope_head_dim",
    "v_head_dim": "value_head_dim",
}
USED_SHARED_EXPERTS = {
    "n_routed_experts": "num_experts",
    "moe_intermediate_size": "expert_ffn_size",
    "num_experts_per_tok": "experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "routed_scaling_factor": "routed_scale",
    "topk_group": "groups_per_token",
    "num_nextn_predict_layers": "num_mtp_layers",
}
FIXED: Mapping[str, tuple[Any, ...]] = {"hidden_act": ("silu",)}
FIXED_LATENT: Mapping[str, tuple[Any, ...]] = {"attention_bias": (False,), "rope_interleave": (True,)}
FIXED_SHARED_EXPERTS: Mapping[str, tuple[Any, ...]] = {
    "norm_topk_prob": (True,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}
INERT = frozenset(
    {
        "_name_or_path",
        "attention_dropout",  # dropout is 0 in training, whatever the checkpoint says
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "initializer_range",
        "transformers_version",
        "use_cache",
        "output_router_logits",
    }
)
INERT_LATENT = frozenset({"auto_map", "ep_size", "head_dim", "pretraining_tp", "qk_head_dim"})


def _as_many_kv_heads(data: Mapping[str, Any]) -> int:
    heads = data["num_attention_heads"]
    if data.get("num_key_value_heads", heads) != heads:
        raise ValueError(
            f"num_key_value_heads = {data['num_key_value_heads']}: latent attention has one per head, {heads}"
        )
    return int(heads)


def _leading_dense_layers(data: Mapping[str, Any]) -> tuple[bool, ...]:
    count, num_layers = data.get("first_k_dense_replace"), data["num_hidden_layers"]
    if not isinstance(count, int) or count < 0:
        raise ValueError(f"first_k_dense_replace = {count!r} must be a number of layers")
    is_moe = tuple(layer >= count for layer in range(num_layers))
    kinds = data.get("mlp_layer_types")
    if kinds is not None and kinds != ["sparse" if moe else "dense" for moe in is_moe]:
        raise ValueError(f"mlp_layer_types is not what first_k_dense_replace = {count} says: {kinds}")
    return is_moe


def _router_groups(data: Mapping[str, Any]) -> int:
    """Megatron sums a group's best experts_per_token / groups_per_token scores, HF its best 2."""
    groups, chosen, topk = data.get("n_group", 1), data.get("topk_group", 1), data["num_experts_per_tok"]
    if groups > 1 and topk != 2 * chosen:
        raise ValueError(
            f"n_group = {groups}, topk_group = {chosen}, num_experts_per_tok = {topk}: groups are implemented only "
            "where num_experts_per_tok is twice topk_group"
        )
    if topk == 1:
        raise ValueError("num_experts_per_tok = 1 is not implemented: Megatron does not renormalize a single score")
    return int(groups)


def _query_rank(data: Mapping[str, Any]) -> int:
    """Null in the file: one projection makes the queries (Moonlight)."""
    if "q_lora_rank" not in data:
        raise ValueError("missing config fields q_lora_rank")
    rank = data["q_lora_rank"]
    if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool) or rank < 1):
        raise ValueError(f"q_lora_rank = {rank!r} must be a positive int, or null where queries are not compressed")
    return rank or 0


MAYBE_COMPRESSED_QUERIES = Derived(attribute="q_lora_rank", fields=("q_lora_rank",), read=_query_rank)
AS_MANY_KV_HEADS = Derived(attribute="num_kv_heads", fields=("num_key_value_heads",), read=_as_many_kv_heads)
LEADING_DENSE_LAYERS = Derived(
    attribute="is_moe_layer", fields=("first_k_dense_replace", "mlp_layer_types"), read=_leading_dense_layers
)
ROUTER_GROUPS = Derived(attribute="num_router_groups", fields=("n_group",), read=_router_groups)


def latent_attention(hf: HFConfig) -> dict[str, Any]:
    """Options of MLATransformerConfig.

    The norms of the latents take `layernorm_epsilon`, as in SGLang, whose log-probs the update is compared with;
    transformers has 1e-6 there, whatever rms_norm_eps says.
    """
    options: dict[str, Any] = {
        "multi_latent_attention": True,
        "q_lora_rank": hf.q_lora_rank or None,
        "kv_lora_rank": hf.kv_lora_rank,
        "qk_head_dim": hf.nope_head_dim,
        "qk_pos_emb_head_dim": hf.rope_head_dim,
        "v_head_dim": hf.value_head_dim,
        "kv_channels": hf.value_head_dim,  # of the local attention's output
        "qk_layernorm": True,
        "rotary_base": hf.rope.theta,
        "rope_type": "rope",
    }
    if hf.rope.yarn is not None:
        yarn = hf.rope.yarn
        options |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_positions,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
        }
    return options


def sigmoid_router(hf: HFConfig) -> dict[str, Any]:
    """Sigmoid scores, chosen with the correction bias (which stays as it is), and shared experts."""
    options: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": hf.routed_scale,
        "moe_shared_expert_intermediate_size": hf.sizes["shared_ffn"],
    }
    if hf.num_router_groups > 1:
        options |= {"moe_router_num_groups": hf.num_router_groups, "moe_router_group_topk": hf.groups_per_token}
    return options
