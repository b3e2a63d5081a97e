"""How many numbers a model has, by its tables: no weights, no Megatron model, no torch memory."""

import math
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
    in_model: int  # of the total, what Megatron holds: all but indexers that are carried


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
        in_model=in_model,
    )
