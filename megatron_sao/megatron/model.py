"""Policy and critic as Megatron-core models, built from a HF `config.json` alone.

Token axes: T tokens of one packed row; batch size is always 1. With sequence parallelism T is a multiple of the
tensor-parallel size (pad the row with a segment of its own).
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_sao.config import LOGITS_TOKENS, Recompute
from megatron_sao.megatron.freeze import freeze
from megatron_sao.megatron.layer_specs import attention_of, layer_specs
from megatron_sao.megatron.mapping.architectures import read_hf_config
from megatron_sao.megatron.mapping.hf_config import HFConfig
from megatron_sao.megatron.mapping.table import padded_vocabulary
from megatron_sao.megatron.mapping.transfer import EMBEDDING
from megatron_sao.megatron.output_layer import OutputLayer
from megatron_sao.megatron.parallel import Parallel
from megatron_sao.megatron.platform import Platform
from megatron_sao.megatron.router_replay import RouterReplay
from megatron_sao.megatron.sizes import check_sizes
from megatron_sao.megatron.stages import stage_layers
from megatron_sao.megatron.transformer_config import transformer_config

__all__ = [
    "CriticModel",
    "HFConfig",
    "Model",
    "PolicyModel",
    "build_critic",
    "build_policy",
    "read_hf_config",
]

_LAYERS = "decoder.layers."


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
    """`model(token_ids [1,T], position_ids [1,T], attention_mask, packed_seq_params=...)` -> hidden [T/tp, 1, H].

    One chunk of the layers. The last one's states are those that its output layer reads (`output_layer.py`).
    """

    max_tokens: int | None = None  # of one sequence: above it this model is not the checkpoint's
    router_replay: RouterReplay | None = None  # sets itself

    def __init__(self, config: TransformerConfig, spec: Any, **kwargs: Any) -> None:
        super().__init__(config, spec, **kwargs)
        if self.post_process:
            assert type(self.output_layer) is ColumnParallelLinear, "OutputLayer computes as this one"
            self.output_layer.__class__ = OutputLayer

    def output_weight(self) -> Tensor:
        """[V/tp, H] of the output layer, complete also with an overlapped optimizer; of the last chunk only."""
        shared = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        weight: Tensor = self.output_layer(shared)
        return weight

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Rotary angles by position within the sequence. Megatron's local attention takes the place in the row.

        So does latent attention, which makes its angles itself; only differences of places reach its scores.
        """
        outputs = list(super()._preprocess(input_ids, position_ids, *args, **kwargs))
        if kwargs.get("packed_seq_params") is None and outputs[1] is not None:
            outputs[1] = outputs[1][position_ids[0]]
        return tuple(outputs)

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


class CriticModel(PolicyModel):
    """The policy's backbone with `value_head` in place of the output layer: -> values [1, T], float32.

    On a last stage of its own an output weight is there while the model is built: Megatron leaves it out only where the
    embedding could serve.
    """

    def __init__(self, config: TransformerConfig, spec: Any, **kwargs: Any) -> None:
        is_whole = kwargs["pre_process"] and kwargs["post_process"]
        kwargs["share_embeddings_and_output_weights"] = is_whole  # so that no output weight is allocated
        super().__init__(config, spec, **kwargs)
        if is_whole:
            del self.embedding.word_embeddings.weight.zero_out_wgrad
        self.share_embeddings_and_output_weights = False
        if self.post_process:
            del self.output_layer
            self.value_head = ValueHead(config, self.pg_collection.tp)
            width = tuple(self.value_head.weight.shape)
            assert width == (1, config.hidden_size), f"the value head must be [1, hidden], not {width}"

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.value_head(hidden_states) if self.post_process else hidden_states


class Model:
    """What one rank holds of a policy or a critic: a chunk of its layers, with virtual stages several."""

    def __init__(self, chunks: Sequence[PolicyModel], hf: HFConfig) -> None:
        self.hf_config = hf
        self.frozen_hf_names: frozenset[str] = frozenset()  # set by `freeze`
        self.chunks = tuple(chunks)
        self.logits_tokens = 0  # of a policy, whose logits are there at once: set by `build_policy`
        self.wrapped: tuple[DistributedDataParallel, ...] = ()  # the chunks, set by `optimizer.wrap`
        self.is_complete = True  # False from an overlapped optimizer's step until all parameters are known to be here

    @property
    def config(self) -> TransformerConfig:
        return self.chunks[0].config

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """By Megatron's names, layers counted through the whole model; a copy of the tied embedding by its name."""
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                yield self._whole_name(chunk, name), parameter

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """By Megatron's names, layers counted through the whole model."""
        for chunk in self.chunks:
            for name, buffer in chunk.named_buffers():
                yield self._whole_name(chunk, name), buffer

    def complete(self) -> None:
        """Bring in what an overlapped optimizer has not gathered yet; else the next forward does. Collective."""
        if not self.is_complete:
            for chunk in self.wrapped:
                chunk.start_param_sync(force_sync=True)
        self.is_complete = True

    def _whole_name(self, chunk: PolicyModel, name: str) -> str:
        if name == "output_layer.weight" and self.hf_config.tied_embeddings:
            return EMBEDDING
        head, found, rest = name.partition(_LAYERS)
        if not found:
            return name
        index, _, rest = rest.partition(".")
        return f"{head}{_LAYERS}{chunk.decoder.layers[int(index)].layer_number - 1}.{rest}"


def build_policy(
    directory: Path | str,
    parallel: Parallel,
    platform: Platform,
    *,
    dtype: torch.dtype,
    recompute: Recompute = "none",
    logits_tokens: int = LOGITS_TOKENS,
    approximate_sparse_attention: bool = False,
) -> Model:
    """The model of `directory`'s `config.json` with random weights (`checkpoint.load_policy` fills them), without DDP.

    `logits_tokens`: the states whose logits are there at once.
    `approximate_sparse_attention`: take sequences of any length where dense attention stands in for a sparse one.

    Raises:
        ValueError: as `read_hf_config`; the directory holds a critic, or quantised weights; a size that the layout does
            not divide.
    """
    config = read_hf_config(directory)
    if config.role != "policy":
        raise ValueError(f"{directory} holds a {config.role}, not a policy: give the directory of a policy")
    model = _build(PolicyModel, config, parallel, platform, dtype=dtype, recompute=recompute)
    model.logits_tokens = logits_tokens
    return _limited(model, approximate_sparse_attention)


def build_critic(
    directory: Path | str,
    parallel: Parallel,
    platform: Platform,
    *,
    dtype: torch.dtype,
    recompute: Recompute = "none",
    approximate_sparse_attention: bool = False,
) -> Model:
    """As `build_policy`, from a policy's directory or an exported critic's; the value head is float32 and zero."""
    config = dataclasses.replace(read_hf_config(directory), role="critic")
    model = _build(CriticModel, config, parallel, platform, dtype=dtype, recompute=recompute)
    return _limited(model, approximate_sparse_attention)


def _limited(model: Model, approximate: bool) -> Model:
    for chunk in model.chunks:
        chunk.max_tokens = None if approximate else attention_of(model.hf_config).max_exact_tokens
    return model


def _build(
    cls: type[PolicyModel],
    hf: HFConfig,
    parallel: Parallel,
    platform: Platform,
    *,
    dtype: torch.dtype,
    recompute: Recompute,
) -> Model:
    if hf.quantization is not None:
        raise ValueError(
            f"the weights of this {hf.architecture} are quantised ({hf.quantization}): convert them to bfloat16, and "
            "leave quantization_config out of its config.json"
        )
    check_sizes(
        hf,
        tensor=parallel.tensor_size,
        expert=parallel.expert_size,
        expert_tensor=parallel.expert_tensor_size,
        num_stages=parallel.num_stages,
    )
    config = transformer_config(hf, parallel, platform, dtype=dtype, recompute=recompute)
    layers = stage_layers(hf.may_start_stage, parallel.num_stages)
    chunks = []
    for number, stage in enumerate(parallel.stages):
        vp_stage = number if parallel.virtual_stages > 1 else None
        chunk = cls(
            config,
            layer_specs(config, platform, vp_stage=vp_stage),
            vocab_size=padded_vocabulary(hf.vocab_size, parallel.tensor_size),
            max_sequence_length=hf.max_positions,
            pre_process=stage == 0,
            post_process=stage == parallel.num_stages - 1,
            position_embedding_type="rope",
            rotary_base=hf.rope.theta,
            rotary_percent=hf.rope.fraction,
            share_embeddings_and_output_weights=hf.tied_embeddings,
            parallel_output=True,
            vp_stage=vp_stage,
        )
        built = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        assert built == list(layers[stage]), f"Megatron built layers {built} for stage {stage}, not {layers[stage]}"
        _mark_experts(chunk, parallel)
        if recompute == "full" and stage == 0:
            chunk.embedding.register_forward_hook(_require_gradient)
        chunks.append(chunk.to(platform.device))
    model = Model(chunks, hf)
    freeze(model, parallel, ())  # what is never trained
    return model


def _mark_experts(model: nn.Module, parallel: Parallel) -> None:
    """Sum experts' gradients over the ranks that hold the same experts.

    Megatron marks them only when there are several expert ranks. With tensor parallelism and one expert rank it would
    sum over data-parallel ranks alone, and lose the tokens that the other tensor ranks sent through their copies.
    """
    if parallel.expert_data_size != parallel.data_size * parallel.context_size:
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.allreduce = False  # type: ignore[attr-defined]


def _require_gradient(_: nn.Module, __: Any, embeddings: Tensor) -> None:
    """Recomputation is skipped by autograd, and all gradients with it, when no input of a block requires one."""
    if torch.is_grad_enabled() and not embeddings.requires_grad:
        embeddings.requires_grad_()
