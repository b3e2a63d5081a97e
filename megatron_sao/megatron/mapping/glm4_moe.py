"""GLM-4.5, GLM-4.5-Air, GLM-4.6 and 4.7."""

from megatron_sao.megatron.mapping import rope, rows, shared
from megatron_sao.megatron.mapping.hf_config import ConfigFields, Derived
from megatron_sao.megatron.mapping.table import Architecture

GLM4_MOE = Architecture(
    name="Glm4MoeForCausalLM",
    fields=ConfigFields(
        used={
            **shared.USED,
            **shared.USED_GROUPED_QUERY,
            **shared.USED_SHARED_EXPERTS,
            "attention_bias": "qkv_bias",
            "use_qk_norm": "qk_norm",
        },
        optional=frozenset({"num_nextn_predict_layers"}),
        derived=(
            Derived(attribute="rope", fields=(*rope.FIELDS, "partial_rotary_factor"), read=rope.partial),
            shared.LEADING_DENSE_LAYERS,
            shared.ROUTER_GROUPS,
        ),
        fixed={**shared.FIXED, **shared.FIXED_SHARED_EXPERTS, "model_type": ("glm4_moe",)},
        inert=shared.INERT,
    ),
    options=lambda hf: {
        "qk_layernorm": hf.qk_norm,
        "add_qkv_bias": hf.qkv_bias,
        **shared.sigmoid_router(hf),
    },
    tensors=(
        *rows.EMBEDDING,
        *rows.GROUPED_QUERY_ATTENTION,
        *rows.MLP_NORM,
        *rows.DENSE_MLP,
        *rows.EXPERTS,
        *rows.CORRECTION_BIAS,
        *rows.SHARED_EXPERTS,
        *rows.MTP,
        *rows.HEADS,
    ),
)
