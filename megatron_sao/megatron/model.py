"""Policy and critic as Megatron-core models, built from a HF `config.json` alone.

Token axes: T tokens of one packed row; batch size is always 1. With sequence parallelism T is a multiple of the
tensor-parallel size (pad the row with a segment of its own).
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_sao.megatron.mapping.architectures import ARCHITECTURES, read_hf_config
from megatron_sao.megatron.mapping.hf_config import HFConfig
from megatron_sao.megatron.parallel import Parallel
from megatron_sao.megatron.platform import Platform

__all__ = [
    "CriticModel",
    "HFConfig",
    "PolicyModel",
    "attention_inputs",
    "build_critic",
    "build_policy",
    "read_hf_config",
]

Recompute = Literal["none", "full"]


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, for the local layer spec (Megatron's own refuses sequence parallelism)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), None, self.eps).to(x.dtype) * self.weight


class ValueHead(nn.Module):
    """One float32 number per token from the final-norm hidden states: [T/tp, 1, H] -> [1, T], zero at birth.

    Each tensor-parallel rank computes the tokens that it holds. So a rank's weight gradient covers those only, and
    Megatron adds the ranks' gradients up as it does for norms (`sequence_parallel`); the loss, which every rank
    computes over all tokens, sends each rank only its own tokens' gradient back.
    """

    def __init__(self, config: TransformerConfig, group: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=torch.float32))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._group = group if config.sequence_parallel else None

    def forward(self, hidden: Tensor) -> Tensor:
        values = F.linear(hidden.float(), self.weight)
        assert values.shape[-1] == 1, f"a critic gives one value per token, not {values.shape[-1]}"
        if self._group is not None:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=self._group)
        return values.squeeze(-1).transpose(0, 1)


class PolicyModel(GPTModel):
    """`model(token_ids [1,T], position_ids [1,T], attention_mask, packed_seq_params=...)` -> logits [1, T, V/tp]."""

    hf_config: HFConfig
    frozen_hf_names: frozenset[str] = frozenset()  # set by `freeze`

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Rotary angles by position within the sequence. Megatron's local attention takes the place in the row."""
        outputs = list(super()._preprocess(input_ids, position_ids, *args, **kwargs))
        if kwargs.get("packed_seq_params") is None:
            outputs[1] = outputs[1][position_ids[0]]
        return tuple(outputs)


class CriticModel(PolicyModel):
    """The policy's backbone with `value_head` in place of the output layer: -> values [1, T], float32."""

    def __init__(self, config: TransformerConfig, spec: Any, **kwargs: Any) -> None:
        kwargs["share_embeddings_and_output_weights"] = True  # so that no output weight is allocated
        super().__init__(config, spec, **kwargs)
        del self.output_layer
        del self.embedding.word_embeddings.weight.zero_out_wgrad
        self.share_embeddings_and_output_weights = False
        self.value_head = ValueHead(config, self.pg_collection.tp)

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.value_head(hidden_states)  # type: ignore[no-any-return]


def build_policy(
    directory: Path | str, parallel: Parallel, platform: Platform, *, dtype: torch.dtype, recompute: Recompute = "none"
) -> PolicyModel:
    """The model of `directory`'s `config.json` with random weights (`checkpoint.load_policy` fills them), without DDP.

    Raises:
        ValueError: as `read_hf_config`; the directory holds a critic; a size that the layout does not divide.
    """
    config = read_hf_config(directory)
    if config.role != "policy":
        raise ValueError(f"{directory} holds a {config.role}, not a policy: give the directory of a policy")
    return _build(PolicyModel, config, parallel, platform, dtype=dtype, recompute=recompute)  # type: ignore[return-value]


def build_critic(
    directory: Path | str, parallel: Parallel, platform: Platform, *, dtype: torch.dtype, recompute: Recompute = "none"
) -> CriticModel:
    """As `build_policy`, from a policy's directory or an exported critic's; the value head is float32 and zero."""
    config = dataclasses.replace(read_hf_config(directory), role="critic")
    model = _build(CriticModel, config, parallel, platform, dtype=dtype, recompute=recompute)
    width = tuple(model.value_head.weight.shape)
    assert width == (1, config.hidden_size), f"the value head must be [1, hidden], not {width}"
    return model  # type: ignore[return-value]


def attention_inputs(segment_ids: Tensor, platform: Platform) -> tuple[Tensor | None, PackedSeqParams | None]:
    """What keeps the sequences of a packed row apart: `attention_mask` and `packed_seq_params` for the model's call.

    `segment_ids` [T]: a sequence's tokens are neighbours and share a number; padding is a sequence of its own.
    Without Transformer Engine: a mask [1, 1, T, T], True where attention is forbidden, and None. With it: None, and
    the sequence boundaries (format thd).
    """
    if not platform.transformer_engine:
        position = torch.arange(len(segment_ids), device=segment_ids.device)
        masked = (segment_ids[:, None] != segment_ids[None, :]) | (position[:, None] < position[None, :])
        return masked[None, None], None
    _, lengths = torch.unique_consecutive(segment_ids, return_counts=True)
    boundaries = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(lengths.max())
    return None, PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _build(
    cls: type[PolicyModel],
    hf: HFConfig,
    parallel: Parallel,
    platform: Platform,
    *,
    dtype: torch.dtype,
    recompute: Recompute,
) -> PolicyModel:
    _check_layout(hf, parallel)
    config = _transformer_config(hf, parallel, platform, dtype=dtype, recompute=recompute)
    model = cls(
        config,
        _layer_specs(config, platform),
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_positions,
        position_embedding_type="rope",
        rotary_base=hf.rope_theta,
        share_embeddings_and_output_weights=hf.tied_embeddings,
        parallel_output=True,
    )
    model.hf_config = hf
    _mark_experts(model, parallel)
    if recompute == "full":
        model.embedding.register_forward_hook(_require_gradient)
    return model.to(platform.device)  # type: ignore[no-any-return]


def _mark_experts(model: nn.Module, parallel: Parallel) -> None:
    """Sum experts' gradients over the ranks that hold the same experts.

    Megatron marks them only when there are several expert ranks. With tensor parallelism and one expert rank it would
    sum over data-parallel ranks alone, and lose the tokens that the other tensor ranks sent through their copies.
    """
    if parallel.expert_data_size != parallel.data_size:
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.allreduce = False  # type: ignore[attr-defined]


def _require_gradient(_: nn.Module, __: Any, embeddings: Tensor) -> None:
    """Recomputation is skipped by autograd, and all gradients with it, when no input of a block requires one."""
    if torch.is_grad_enabled() and not embeddings.requires_grad:
        embeddings.requires_grad_()


def _transformer_config(
    hf: HFConfig, parallel: Parallel, platform: Platform, *, dtype: torch.dtype, recompute: Recompute
) -> TransformerConfig:
    options: dict[str, Any] = dict(ARCHITECTURES[hf.architecture].options)
    if hf.num_experts:
        options |= _moe_options(hf, platform)
    if recompute == "full":
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=hf.num_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_heads,
        num_query_groups=hf.num_kv_heads,
        kv_channels=hf.head_dim,
        ffn_hidden_size=hf.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor_size,
        sequence_parallel=parallel.sequence_parallel,
        expert_model_parallel_size=parallel.expert_size,
        expert_tensor_parallel_size=1,
        calculate_per_token_loss=True,
        use_cpu_initialization=platform.device.type == "cpu",
        gradient_accumulation_fusion=platform.fused_weight_gradients,
        **options,
    )


def _moe_options(hf: HFConfig, platform: Platform) -> dict[str, Any]:
    return {
        "num_moe_experts": hf.num_experts,
        "moe_layer_freq": [int(is_moe) for is_moe in hf.is_moe_layer],
        "moe_ffn_hidden_size": hf.expert_ffn_size,
        "moe_router_topk": hf.experts_per_token,
        "moe_router_pre_softmax": not hf.renormalize_top_k,  # softmax over the chosen experts = renormalised
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": platform.transformer_engine,
    }


def _layer_specs(config: TransformerConfig, platform: Platform) -> Any:
    specs = get_gpt_decoder_block_spec(config, platform.transformer_engine, normalization=config.normalization)
    if platform.transformer_engine:
        return specs
    for layer in specs.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    specs.layer_norm = RMSNorm
    return specs


def _check_layout(hf: HFConfig, parallel: Parallel) -> None:
    tensor, expert = parallel.tensor_size, parallel.expert_size
    sizes = {"attention heads": hf.num_heads, "vocabulary": hf.vocab_size}
    if not all(hf.is_moe_layer):
        sizes["feed-forward size"] = hf.ffn_size
    for what, size in sizes.items():
        if size % tensor:
            raise ValueError(f"tensor = {tensor} does not divide the {what}, {size}: {_working(size)} would")
    if hf.num_kv_heads % tensor and tensor % hf.num_kv_heads:
        raise ValueError(
            f"tensor = {tensor} is neither a divisor nor a multiple of the {hf.num_kv_heads} key-value heads"
        )
    if expert > 1 and not hf.num_experts:
        raise ValueError(f"expert = {expert}, but {hf.architecture} has no experts: expert = 1 is the only choice")
    if hf.num_experts and hf.num_experts % expert:
        raise ValueError(
            f"expert = {expert} does not divide the {hf.num_experts} experts: {_working(hf.num_experts)} would"
        )


def _working(size: int) -> str:
    divisors = [n for n in range(1, min(size, 64) + 1) if size % n == 0]
    return ", ".join(map(str, divisors))
