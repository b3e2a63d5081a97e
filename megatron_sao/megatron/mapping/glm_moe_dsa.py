"""GLM-5, 5.1 and 5.2: latent attention with an indexer that chooses tokens; most layers of 5.2 take another's."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_sao.megatron.installed import SPARSE_ATTENTION
from megatron_sao.megatron.mapping import rope, rows, shared
from megatron_sao.megatron.mapping.hf_config import ConfigFields, Derived, HFConfig
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


def _sparse_attention(hf: HFConfig) -> dict[str, Any]:
    """Megatron's options; those that it does not have where it computes dense attention are not given."""
    if not hf.computes_sparse:
        return {}
    period, num_leading = sharing_schedule(hf.has_indexer)
    return {
        "experimental_attention_variant": "dsa",
        "cp_comm_type": "allgather",  # the only one that it takes
        "dsa_indexer_n_heads": hf.index_num_heads,
        "dsa_indexer_head_dim": hf.index_head_dim,
        "dsa_indexer_topk": hf.index_topk,
        "dsa_indexer_topk_freq": period,
        "dsa_indexer_skip_topk_offset": num_leading,
        "dsa_indexer_rope_interleaved": True,
        "dsa_indexer_rotate_activation": False,
        "dsa_indexer_k_norm_epsilon": 1e-6,  # of transformers and SGLang, whatever rms_norm_eps is
        "dsa_indexer_loss_coeff": 0.0,
    }


def sharing_schedule(has_indexer: Sequence[bool]) -> tuple[int, int]:
    """(period, number of leading layers): each leading layer has an indexer, and every period-th from the last of them.

    Raises:
        ValueError: the layers have no such order, and Megatron knows no other.

    >>> sharing_schedule([True, True, False, False, True, False])
    (3, 2)
    """
    own = [layer for layer, has in enumerate(has_indexer) if has]
    num_leading = next((i for i, layer in enumerate(own) if layer != i), len(own))
    period = own[num_leading] - num_leading + 1 if num_leading < len(own) else len(has_indexer)
    if own != [*range(num_leading - 1), *range(num_leading - 1, len(has_indexer), period)]:
        raise ValueError(f"indexer_types: the layers {own} have an indexer of their own, which is no regular order")
    return (1, num_leading) if num_leading == len(has_indexer) else (period, num_leading)


GLM_MOE_DSA = Architecture(
    name="GlmMoeDsaForCausalLM",
    fields=ConfigFields(
        used={
            **shared.USED,
            **shared.USED_LATENT,
            "q_lora_rank": "q_lora_rank",
            **shared.USED_SHARED_EXPERTS,
            "index_topk": "index_topk",
            "index_n_heads": "index_num_heads",
            "index_head_dim": "index_head_dim",
        },
        optional=frozenset({"num_nextn_predict_layers"}),
        derived=(
            Derived(attribute="rope", fields=rope.FIELDS, read=rope.plain),
            Derived(attribute="has_indexer", fields=("indexer_types", *_SCHEDULE), read=_own_indexers),
            Derived(attribute="computes_sparse", fields=(), read=lambda _: SPARSE_ATTENTION),
            shared.AS_MANY_KV_HEADS,
            shared.LEADING_DENSE_LAYERS,
            shared.ROUTER_GROUPS,
        ),
        fixed={
            **shared.FIXED,
            **shared.FIXED_LATENT,
            **shared.FIXED_SHARED_EXPERTS,
            "mlp_bias": (False,),
            "indexer_rope_interleave": (True,),
            "model_type": ("glm_moe_dsa",),
        },
        inert=shared.INERT | shared.INERT_LATENT | {"index_share_for_mtp_iteration"},
        layer_type="indexed_attention",
    ),
    options=lambda hf: {**shared.latent_attention(hf), **shared.sigmoid_router(hf), **_sparse_attention(hf)},
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
