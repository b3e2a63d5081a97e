"""DeepSeek-V3, R1 and Moonlight: latent attention, YaRN, experts in groups."""

from megatron_sao.megatron.mapping import rope, rows, shared
from megatron_sao.megatron.mapping.hf_config import ConfigFields, Derived
from megatron_sao.megatron.mapping.table import Architecture

DEEPSEEK_V3 = Architecture(
    name="DeepseekV3ForCausalLM",
    fields=ConfigFields(
        used={**shared.USED, **shared.USED_LATENT, **shared.USED_SHARED_EXPERTS},
        optional=frozenset({"num_nextn_predict_layers"}),
        derived=(
            Derived(attribute="rope", fields=rope.FIELDS, read=rope.plain_or_yarn),
            shared.AS_MANY_KV_HEADS,
            shared.MAYBE_COMPRESSED_QUERIES,
            shared.LEADING_DENSE_LAYERS,
            shared.ROUTER_GROUPS,
        ),
        fixed={
            **shared.FIXED,
            **shared.FIXED_LATENT,
            **shared.FIXED_SHARED_EXPERTS,
            "model_type": ("deepseek_v3",),
        },
        inert=shared.INERT | shared.INERT_LATENT | {"aux_loss_alpha", "seq_aux"},  # no auxiliary loss is trained on
    ),
    options=lambda hf: {**shared.latent_attention(hf), **shared.sigmoid_router(hf)},
    tensors=(
        *rows.EMBEDDING,
        *rows.LATENT_ATTENTION,
        *rows.MLP_NORM,
        *rows.DENSE_MLP,
        *rows.EXPERTS,
        *rows.CORRECTION_BIAS,
        *rows.SHARED_EXPERTS,
        *rows.MTP,
        *rows.HEADS,
    ),
)
