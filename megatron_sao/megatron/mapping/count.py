"""How many numbers a model has, by its tables: no weights, no Megatron model, no torch memory."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from megatron_sao.megatron.mapping.architectures import ARCHITECTURES
from megatron_sao.megatron.mapping.hf_config import HFConfig
from megatron_sao.megatron.mapping.table import bind, carried


@dataclass(frozen=True, kw_only=True, slots=True)
class NumParameters:
    """Tied tensors count once, correction biases count, copies of embedding and head in an MTP layer do not."""

    total: int  # without multi-token prediction, indexers included
    active: int  # of the total, what one token meets: all but the experts it is not sent to
    mtp: int  # layers of multi-token prediction


def num_parameters(config: HFConfig) -> NumParameters:
    architecture = ARCHITECTURES[config.architecture]
    bindings = bind(architecture, config, 1)
    of_experts = sum(math.prod(shape) for b in bindings if b.expert_rank is not None for shape in b.hf_shapes)
    in_model = sum(math.prod(shape) for binding in bindings for shape in binding.hf_shapes)
    beside = [tensor for tensor in carried(architecture, config) if not tensor.optional]
    total = in_model + sum(math.prod(tensor.shape) for tensor in beside if tensor.layer < config.num_layers)
    idle = of_experts * (config.num_experts - config.experts_per_token) // max(1, config.num_experts)
    return NumParameters(
        total=total,
        active=total - idle,
        mtp=sum(math.prod(tensor.shape) for tensor in beside if tensor.layer >= config.num_layers),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNumbers:
    """Of one layer, of all its experts together."""

    dense: int
    dense_trained: int
    expert: int
    expert_trained: int


def layer_numbers(config: HFConfig, frozen: Collection[str] = ()) -> tuple[LayerNumbers, ...]:
    """[num_layers], without embedding, last norm and heads. `frozen`: HF names that are not trained."""
    counts = [dict.fromkeys(LayerNumbers.__dataclass_fields__, 0) for _ in range(config.num_layers)]
    for binding in bind(ARCHITECTURES[config.architecture], config, 1):
        if not binding.hf_names[0].startswith("model.layers."):
            continue
        numbers, kind = sum(map(math.prod, binding.hf_shapes)), "dense" if binding.expert_rank is None else "expert"
        counts[binding.layer][kind] += numbers
        if not (binding.is_buffer or binding.is_constant or binding.hf_names[0] in frozen):
            counts[binding.layer][f"{kind}_trained"] += numbers
    return tuple(LayerNumbers(**count) for count in counts)
