"""GLM-5, 5.1 and 5.2: latent attention with an indexer that chooses tokens; most layers of 5.2 take another's."""

from collections.abc import Mapping
from typing import Any

from megatron_sao.megatron.mapping import rope, rows, shared
from megatron_sao.megatron.mapping.hf_config import ConfigFields, Derived
from megatron_sao.megatron.mapping.table import Architecture

_SCHEDULE = ("index_topk_freq", "index_topk_pattern", "index_skip_topk_offset")


def _own_indexers(data: Mapping[str, Any]) -> tuple[bool, ...]:
    """`indexer_types`; where it is absent every layer has its own. A schedule that says the same is not read."""
    kinds, num_layers = data.get("indexer_types"), data["num_hidden_layers"]
    if kinds is None and data.get("index_topk_freq", 1) == 1 and data.get("index_topk_pattern") is None:
        kinds = ["full"] * num_layers
    if kinds is None or len(kinds) != num_layers or kinds[0] != "full" or set(kinds) - {"full", "shared"}:
        raise ValueError(f"indexer_types = {kinds} must say full or shared for {num_layers} layers, the first one full")
    return tuple(kind == "full" for kind in kinds)


GLM_MOE_DSA = Architecture(
    name="GlmMoeDsaForCausalLM",
    fields=ConfigFields(
        used={
            **shared.USED,
            **shared.USED_LATENT,
            **shared.USED_SHARED_EXPERTS,
            "index_topk": "index_topk",
            "index_n_heads": "index_num_heads",
            "index_head_dim": "index_head_dim",
        },
        optional=frozenset({"num_nextn_predict_layers"}),
        derived=(
            Derived(attribute="rope", fields=rope.FIELDS, read=rope.plain),
            Derived(attribute="has_indexer", fields=("indexer_types", *_SCHEDULE), read=_own_indexers),
            shared.AS_MANY_KV_HEADS,
            shared.LEADING_DENSE_LAYERS,
            shared.ROUTER_GROUPS,
        ),
        fixed={
            **shared.FIXED,
            **shared.FIXED_LATENT,
            **shared.FIXED_SHARED_EXPERTS,
            "mlp_bias": (False,),
            "model_type": ("glm_moe_dsa",),
        },
        # of the indexer, which is not in the model
        inert=shared.INERT | shared.INERT_LATENT | {"indexer_rope_interleave", "index_share_for_mtp_iteration"},
        layer_type="indexed_attention",
    ),
    options=lambda hf: {**shared.latent_attention(hf), **shared.sigmoid_router(hf)},
    tensors=(
        *rows.EMBEDDING,
        *rows.LATENT_ATTENTION,
        *rows.INDEXER,
        *rows.MLP_NORM,
        *rows.DENSE_MLP,
        *rows.EXPERTS,
        *rows.CORRECTION_BIAS,
        *rows.SHARED_EXPERTS,
        *rows.MTP,
        *rows.HEADS,
    ),
)
