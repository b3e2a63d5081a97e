"""Policy and critic as Megatron-core models, built from a HF `config.json` alone.

Token axes: T tokens of one packed row; batch size is always 1. With sequence parallelism T is a multiple of the
tensor-parallel size (pad the row with a segment of its own).
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_sao.megatron.layer_specs import layer_specs
from megatron_sao.megatron.mapping.architectures import read_hf_config
from megatron_sao.megatron.mapping.hf_config import HFConfig
from megatron_sao.megatron.parallel import Parallel
from megatron_sao.megatron.platform import Platform
from megatron_sao.megatron.router_replay import RouterReplay
from megatron_sao.megatron.transformer_config import Recompute, check_layout, transformer_config

__all__ = [
    "CriticModel",
    "HFConfig",
    "PolicyModel",
    "build_critic",
    "build_policy",
    "read_hf_config",
]


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
    router_replay: RouterReplay | None = None  # sets itself

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


def _build(
    cls: type[PolicyModel],
    hf: HFConfig,
    parallel: Parallel,
    platform: Platform,
    *,
    dtype: torch.dtype,
    recompute: Recompute,
) -> PolicyModel:
    check_layout(hf, parallel)
    config = transformer_config(hf, parallel, platform, dtype=dtype, recompute=recompute)
    model = cls(
        config,
        layer_specs(config, platform),
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
