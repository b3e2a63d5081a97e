"""What each GPU of a role holds: parameters, gradients, optimizer states, activations. Pure numbers.

Tensors and how they are cut come from the architectures' tables (`mapping/table.py`). What Megatron allocates for them
is in megatron.core.distributed.param_and_grad_buffer and megatron.core.optimizer.distrib_optimizer: trained parameters
and their float32 gradients lie in flat buffers, padded so that every data-parallel rank owns an equal part; Adam keeps
two float32 moments, and a float32 main copy of parameters that are not float32, of that part alone.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from megatron_sao.config import LayoutConfig, RoleConfig
from megatron_sao.megatron.activations import Activations, Pass, activations
from megatron_sao.megatron.frozen_names import GRADIENT_BYTES, adam_bytes, frozen_hf_names
from megatron_sao.megatron.mapping.architectures import ARCHITECTURES
from megatron_sao.megatron.mapping.hf_config import HFConfig
from megatron_sao.megatron.mapping.rows import VALUE_HEAD
from megatron_sao.megatron.mapping.table import Binding, bind, carried
from megatron_sao.megatron.stages import stage_layers
from megatron_sao.types import ITEM_BYTES

_TENSOR_ALIGNMENT = 64  # numbers; so are the next
_BUCKET_ALIGNMENT = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Bytes on each GPU of one pipeline rank."""

    layers: tuple[range, ...]  # one range for each model chunk
    num_parameters: int  # on one GPU, as numbers
    num_frozen: int  # of these
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activations: Activations

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by what they are for; together, the peak."""
        return {
            "parameters": self.parameter_bytes,
            "gradients": self.gradient_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.activations.peak_bytes,
        }

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())


def role_memory(
    hf: HFConfig,
    config: RoleConfig,
    *,
    dtype: str,
    frozen: Collection[str] = (),
    transformer_engine: bool = True,
) -> tuple[StageMemory, ...]:
    """By pipeline rank. `hf.role` says which model it is, `frozen` the HF names that are not trained.

    Raises:
        ValueError: fewer layers than stages.
    """
    layout = config.layout
    stages = stage_layers(hf.may_start_stage, layout.pipeline * layout.virtual_stages)
    way = Pass(
        layout=layout,
        item_bytes=ITEM_BYTES[dtype],
        max_tokens=config.max_tokens_per_micro_batch,
        recompute=config.recompute,
        transformer_engine=transformer_engine,
    )
    bindings = _by_pipeline_rank(hf, layout)
    return tuple(
        StageMemory(
            layers=stages[rank :: layout.pipeline],
            activations=activations(hf, way, stages[rank :: layout.pipeline], rank),
            **_held(bindings[rank], config, ITEM_BYTES[dtype], frozen),
        )
        for rank in range(layout.pipeline)
    )


def advice(parts: Mapping[str, int], config: RoleConfig) -> str:
    """What to change so that a role needs less, beginning with what helps its largest part."""
    largest = max(parts, key=lambda part: parts[part])
    fewer_tokens = f"lower max_tokens_per_micro_batch (now {config.max_tokens_per_micro_batch})"
    remedies = {
        "activations": [fewer_tokens, "more layout.tensor, layout.context or layout.pipeline ranks"],
        "optimizer": ["more data-parallel ranks (layout.num_ranks), which share it", "more layout.pipeline ranks"],
        "publish": ["lower publish.bucket_bytes"],
    }.get(largest, ["more layout.expert, layout.tensor or layout.pipeline ranks"])
    if largest == "activations" and config.recompute != "full":
        remedies.insert(0, 'set recompute = "full"')
    if largest == "optimizer" and not config.optimizer.distributed:
        remedies.insert(0, "set optimizer.distributed = true")
    if largest != "activations":
        remedies.append(fewer_tokens)
    return f"the largest part is {largest}, {_gib(parts[largest])}: {'; '.join(remedies)}"


def describe(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{part} {_gib(num_bytes)}" for part, num_bytes in parts.items())


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 1024**3:.1f} GiB"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingMemory:
    """Bytes on each GPU of an engine."""

    weight_bytes: int
    kv_bytes_per_token: int


def serving_memory(hf: HFConfig, *, dtype: str, tensor: int) -> ServingMemory:
    """SGLang cuts what can be cut, and gives each rank a key-value head of its own or a copy of one. Of latent
    attention every rank keeps the whole latent; of an indexer, keys of 8 bits and a scale."""
    item_bytes = ITEM_BYTES[dtype]
    architecture = ARCHITECTURES[hf.architecture]
    weights = sum(
        _numel(b) // (1 if b.layout.dim is None else tensor) * _item_bytes(b, item_bytes)
        for b in bind(architecture, hf, 1)
    )
    indexers = sum(math.prod(each.shape) for each in carried(architecture, hf) if each.layer < hf.num_layers)
    if hf.kv_lora_rank:
        numbers = hf.kv_lora_rank + hf.rope_head_dim
    else:
        numbers = max(1, hf.num_kv_heads // tensor) * 2 * hf.head_dim
    index_bytes = sum(hf.has_indexer) * (hf.index_head_dim + 4)
    return ServingMemory(
        weight_bytes=weights + indexers * item_bytes,
        kv_bytes_per_token=hf.num_layers * numbers * item_bytes + index_bytes,
    )


def publish_bytes(hf: HFConfig, *, dtype: str, bucket_bytes: int) -> int:
    """An actor's two buckets: one is filled while the other is sent. A larger tensor is a bucket of its own."""
    shapes = (shape for b in bind(ARCHITECTURES[hf.architecture], hf, 1) for shape in b.hf_shapes)
    return 2 * max(bucket_bytes, max(map(math.prod, shapes)) * ITEM_BYTES[dtype])


def _by_pipeline_rank(hf: HFConfig, layout: LayoutConfig) -> list[list[Binding]]:
    """What the first expert rank of each pipeline rank holds; the others hold as much. Tied embeddings twice."""
    stages = stage_layers(hf.may_start_stage, layout.pipeline * layout.virtual_stages)
    rank_of = {layer: stage % layout.pipeline for stage, layers in enumerate(stages) for layer in layers}
    held: list[list[Binding]] = [[] for _ in range(layout.pipeline)]
    bindings = bind(ARCHITECTURES[hf.architecture], hf, layout.expert)
    for binding in bindings:
        if not binding.expert_rank:
            held[rank_of[binding.layer]].append(binding)
    if hf.tied_embeddings and layout.pipeline > 1 and hf.role == "policy":
        held[-1].append(bindings[0])
    return held


def frozen_names(hf: HFConfig, freeze: Sequence[str]) -> frozenset[str]:
    """HF names of what is not trained. Raises ValueError: a pattern that matches nothing, or a part of a tensor."""
    return frozen_hf_names(bind(ARCHITECTURES[hf.architecture], hf, 1), freeze)


def _held(bindings: Sequence[Binding], config: RoleConfig, item_bytes: int, frozen: Collection[str]) -> dict[str, int]:
    """Megatron puts tensors of one type and one data-parallel group into one buffer."""
    layout, distributed = config.layout, config.optimizer.distributed
    buffers: dict[tuple[bool, int], list[int]] = {}
    num_parameters = num_frozen = constant_bytes = 0
    for binding in bindings:
        numel, size = _local_numel(binding, layout), _item_bytes(binding, item_bytes)
        num_parameters += numel
        if binding.is_buffer or binding.is_constant or binding.hf_names[0] in frozen:
            num_frozen += numel
            constant_bytes += numel * size
        else:
            buffers.setdefault((binding.expert_rank is not None, size), []).append(numel)
    parameter_bytes, gradient_bytes, optimizer_bytes = constant_bytes, 0, 0
    for (is_expert, size), numels in buffers.items():
        ranks = layout.expert_data if is_expert else layout.data * layout.context
        shards = ranks if distributed else 1
        numel = _padded(numels, shards) if distributed else sum(numels)
        parameter_bytes += numel * size
        gradient_bytes += numel * GRADIENT_BYTES
        optimizer_bytes += numel // shards * adam_bytes(size)
    return {
        "num_parameters": num_parameters,
        "num_frozen": num_frozen,
        "parameter_bytes": parameter_bytes,
        "gradient_bytes": gradient_bytes,
        "optimizer_bytes": optimizer_bytes,
    }


def _padded(numels: Sequence[int], num_ranks: int) -> int:
    end = 0
    for numel in numels:
        end = _round_up(end, _TENSOR_ALIGNMENT) + numel
    return _round_up(end, math.lcm(num_ranks, _BUCKET_ALIGNMENT))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _numel(binding: Binding) -> int:
    return sum(math.prod(shape) for shape in binding.hf_shapes)


def _local_numel(binding: Binding, layout: LayoutConfig) -> int:
    if binding.layout.dim is None:
        return _numel(binding)
    return _numel(binding) // (layout.tensor if binding.expert_rank is None else layout.expert_tensor)


def _item_bytes(binding: Binding, item_bytes: int) -> int:
    """Buffers and the value head are float32 in every model."""
    return 4 if binding.is_buffer or binding.hf_names == (VALUE_HEAD,) else item_bytes
