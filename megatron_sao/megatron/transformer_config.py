"""A HF config and a layout as Megatron's TransformerConfig."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_sao.config import Recompute
from megatron_sao.megatron.mapping.architectures import ARCHITECTURES
from megatron_sao.megatron.mapping.hf_config import HFConfig
from megatron_sao.megatron.parallel import Parallel
from megatron_sao.megatron.platform import Platform
from megatron_sao.megatron.stages import stage_layers

_FUSED = {
    "apply_rope_fusion": "rotary embedding",
    "bias_activation_fusion": "activation",
    "moe_permute_fusion": "permutation",
    "gradient_accumulation_fusion": "weight gradients",
}


def transformer_config(
    hf: HFConfig, parallel: Parallel, platform: Platform, *, dtype: torch.dtype, recompute: Recompute
) -> TransformerConfig:
    _check_context(parallel, platform, dtype)
    options: dict[str, Any] = {
        "kv_channels": hf.head_dim,
        **ARCHITECTURES[hf.architecture].options(hf),
    }
    if hf.num_experts:
        options |= _moe_options(hf, platform)
    options["apply_rope_fusion"] = platform.transformer_engine and not hf.kv_lora_rank  # latent: an experiment
    if hf.computes_sparse:
        options["dsa_kernel_backend"] = platform.sparse_kernels
    options |= _pipeline_options(hf, parallel)
    if recompute == "selective":
        options |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    if recompute == "full":
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    kind = MLATransformerConfig if hf.kv_lora_rank else TransformerConfig
    return kind(
        num_layers=hf.num_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_heads,
        num_query_groups=hf.num_kv_heads,
        ffn_hidden_size=hf.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=platform.transformer_engine,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor_size,
        sequence_parallel=parallel.sequence_parallel,
        expert_model_parallel_size=parallel.expert_size,
        expert_tensor_parallel_size=parallel.expert_tensor_size,
        context_parallel_size=parallel.context_size,
        calculate_per_token_loss=True,
        moe_token_dispatcher_type="alltoall",  # of dense models too: pipelines of rows of any length refuse the default
        use_cpu_initialization=platform.device.type == "cpu",
        gradient_accumulation_fusion=platform.fused_weight_gradients,
        **options,
    )


def _check_context(parallel: Parallel, platform: Platform, dtype: torch.dtype) -> None:
    if parallel.context_size > 1 and platform.device.type == "cuda" and dtype is torch.float32:
        raise ValueError(
            f"layout.context = {parallel.context_size} with float32: the attention that context ranks share is "
            "Transformer Engine's fused one, which takes half precision only: set model.dtype = bfloat16, or "
            "layout.context = 1"
        )


def _pipeline_options(hf: HFConfig, parallel: Parallel) -> dict[str, Any]:
    """Stages of `stage_layers`. Forward and backward messages go apart in the interleaved schedule: with two pipeline
    ranks both neighbours are the same rank, and a message of one batch could be taken for another."""
    if parallel.pipeline_size == 1:
        return {}
    stages = [["decoder"] * len(layers) for layers in stage_layers(hf.may_start_stage, parallel.num_stages)]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    interleaved = parallel.virtual_stages > 1
    return {
        "pipeline_model_parallel_size": parallel.pipeline_size,
        "virtual_pipeline_model_parallel_size": parallel.virtual_stages if interleaved else None,
        "pipeline_model_parallel_layout": stages,
        "variable_seq_lengths": True,
        "deallocate_pipeline_outputs": True,
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def _moe_options(hf: HFConfig, platform: Platform) -> dict[str, Any]:
    return {
        "num_moe_experts": hf.num_experts,
        "moe_layer_freq": [int(is_moe) for is_moe in hf.is_moe_layer],
        "moe_ffn_hidden_size": hf.expert_ffn_size,
        "moe_router_topk": hf.experts_per_token,
        "moe_router_pre_softmax": not hf.renormalize_top_k,  # softmax over the chosen experts = renormalised
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": platform.transformer_engine,
        "moe_permute_fusion": platform.transformer_engine,
    }


def fused(config: TransformerConfig) -> str:
    """What is computed by fused kernels. The router is not: it would ask nobody for its top-k (`router_replay`)."""
    return " + ".join(name for option, name in _FUSED.items() if getattr(config, option)) or "nothing"
