"""What each GPU of a role holds: parameters, gradients, optimizer states, activations. Pure numbers.

Tensors and how they are cut come from the architectures' tables (`mapping/table.py`). What Megatron allocates for them
is in megatron.core.distributed.param_and_grad_buffer and megatron.core.optimizer.distrib_optimizer: trained parameters
and their float32 gradients lie in flat buffers, padded so that every data-parallel rank owns an equal part; Adam keeps
two float32 moments, and a float32 main copy of parameters that are not float32, of that part alone.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from megatron_sao.config import LOGITS_TOKENS, ActorConfig, LayoutConfig, RoleConfig
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
        logits_tokens=config.logits_tokens if isinstance(config, ActorConfig) else LOGITS_TOKENS,
    )
    tied_copies = range(1, layout.pipeline)[-1:] if hf.tied_embeddings and hf.role == "policy" else ()
    held = _Held(hf, _cut(layout), ITEM_BYTES[dtype], frozenset(frozen))
    return tuple(
        StageMemory(
            layers=stages[rank :: layout.pipeline],
            activations=activations(hf, way, stages[rank :: layout.pipeline], rank),
            **_stage_bytes(_stage_share(held, stages[rank :: layout.pipeline], rank in tied_copies), config),
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


@lru_cache(maxsize=8)
def publish_bytes(hf: HFConfig, *, dtype: str, bucket_bytes: int) -> int:
    """An actor's two buckets: one is filled while the other is sent. A larger tensor is a bucket of its own."""
    shapes = (shape for b in bind(ARCHITECTURES[hf.architecture], hf, 1) for shape in b.hf_shapes)
    return 2 * max(bucket_bytes, max(map(math.prod, shapes)) * ITEM_BYTES[dtype])


def frozen_names(hf: HFConfig, freeze: Sequence[str]) -> frozenset[str]:
    """HF names of what is not trained. Raises ValueError: a pattern that matches nothing, or a part of a tensor."""
    return _frozen_names(hf, tuple(freeze))


@lru_cache(maxsize=8)
def _frozen_names(hf: HFConfig, freeze: tuple[str, ...]) -> frozenset[str]:
    return frozen_hf_names(bind(ARCHITECTURES[hf.architecture], hf, 1), freeze)


@dataclass(frozen=True, slots=True)
class _Held:
    """Of which model, and how: what a rank's share of a layer depends on."""

    hf: HFConfig
    cut: LayoutConfig
    item_bytes: int
    frozen: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Share:
    """Of some layers on one GPU, with what lies before the first and after the last; sums of two are those of both."""

    num_parameters: int = 0  # as numbers
    num_frozen: int = 0
    constant_bytes: int = 0  # of what is not trained
    buffers: Mapping[tuple[bool, int], tuple[int, int]] = field(default_factory=dict)
    """By whether experts', and bytes of a number: trained numbers, and how many when each tensor is aligned."""

    def plus(self, other: "_Share", times: int = 1) -> "_Share":
        buffers = dict(self.buffers)
        for key, (numel, aligned) in other.buffers.items():
            before = buffers.get(key, (0, 0))
            buffers[key] = (before[0] + numel * times, before[1] + aligned * times)
        return _Share(
            num_parameters=self.num_parameters + other.num_parameters * times,
            num_frozen=self.num_frozen + other.num_frozen * times,
            constant_bytes=self.constant_bytes + other.constant_bytes * times,
            buffers=buffers,
        )


def _cut(layout: LayoutConfig) -> LayoutConfig:
    """What of a layout decides what a rank holds of a layer."""
    sizes = {name: getattr(layout, name) for name in ("tensor", "expert", "expert_tensor")}
    return LayoutConfig(num_ranks=math.prod(sizes.values()), **sizes)


@lru_cache(maxsize=4096)
def _stage_share(held: _Held, layers: tuple[range, ...], has_tied_copy: bool) -> _Share:
    """What the first expert rank of a stage holds; the others hold as much."""
    like = _first_alike(held.hf, held.frozen)
    total = _Share()
    for layer, times in Counter(like[layer] for chunk in layers for layer in chunk).items():
        total = total.plus(_layer_share(held, layer), times)
    return total.plus(_share(held, _by_layer(held.hf)[0][:1])) if has_tied_copy else total


@lru_cache(maxsize=1024)
def _layer_share(held: _Held, layer: int) -> _Share:
    """The first expert rank has the first of a layer's experts."""
    bindings = _by_layer(held.hf)[layer]
    experts = [binding for binding in bindings if binding.expert_rank is not None]
    own = experts[: len(experts) // held.cut.expert]
    return _share(held, [binding for binding in bindings if binding.expert_rank is None] + own)


def _share(held: _Held, bindings: Sequence[Binding]) -> _Share:
    """Megatron puts tensors of one type and one data-parallel group into one buffer."""
    total = _Share()
    kinds = [_kind(binding, held.frozen) for binding in bindings]
    examples = dict(zip(kinds, bindings, strict=True))
    for kind, times in Counter(kinds).items():
        binding = examples[kind]
        numel, size = _local_numel(binding, held.cut), _item_bytes(binding, held.item_bytes)
        if binding.is_buffer or binding.is_constant or binding.hf_names[0] in held.frozen:
            one = _Share(num_parameters=numel, num_frozen=numel, constant_bytes=numel * size)
        else:
            key = (binding.expert_rank is not None, size)
            one = _Share(num_parameters=numel, buffers={key: (numel, _round_up(numel, _TENSOR_ALIGNMENT))})
        total = total.plus(one, times)
    return total


def _kind(binding: Binding, frozen: frozenset[str]) -> tuple[object, ...]:
    """Tensors of one kind have the same share."""
    is_frozen, is_head = binding.hf_names[0] in frozen, binding.hf_names == (VALUE_HEAD,)
    flags = (binding.expert_rank is None, binding.is_buffer, binding.is_constant, is_frozen, is_head)
    return (binding.hf_shapes, binding.layout.dim, *flags)


@lru_cache(maxsize=8)
def _first_alike(hf: HFConfig, frozen: frozenset[str]) -> tuple[int, ...]:
    """[num_layers] The first layer with tensors of the same kinds, in the same order."""
    first: dict[object, int] = {}
    kinds = [tuple(_kind(binding, frozen) for binding in bindings) for bindings in _by_layer(hf)]
    return tuple(first.setdefault(each, layer) for layer, each in enumerate(kinds))


@lru_cache(maxsize=4)
def _by_layer(hf: HFConfig) -> tuple[tuple[Binding, ...], ...]:
    layers: list[list[Binding]] = [[] for _ in range(hf.num_layers)]
    for binding in bind(ARCHITECTURES[hf.architecture], hf, 1):
        layers[binding.layer].append(binding)
    return tuple(map(tuple, layers))


def _stage_bytes(share: _Share, config: RoleConfig) -> dict[str, int]:
    layout, distributed = config.layout, config.optimizer.distributed
    parameter_bytes, gradient_bytes, optimizer_bytes = share.constant_bytes, 0, 0
    for (is_expert, size), (numel, aligned) in share.buffers.items():
        ranks = layout.expert_data if is_expert else layout.data * layout.context
        shards = ranks if distributed else 1
        held = _round_up(aligned, math.lcm(shards, _BUCKET_ALIGNMENT)) if distributed else numel
        parameter_bytes += held * size
        gradient_bytes += held * GRADIENT_BYTES
        optimizer_bytes += held // shards * adam_bytes(size)
    return {
        "num_parameters": share.num_parameters,
        "num_frozen": share.num_frozen,
        "parameter_bytes": parameter_bytes,
        "gradient_bytes": gradient_bytes,
        "optimizer_bytes": optimizer_bytes,
    }


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _numel(binding: Binding) -> int:
    return sum(math.prod(shape) for shape in binding.hf_shapes)


def _local_numel(binding: Binding, layout: LayoutConfig) -> int:
    """Of a vocabulary that the ranks do not divide, padding too."""
    dim = binding.layout.dim
    if dim is None:
        return _numel(binding)
    size = layout.tensor if binding.expert_rank is None else layout.expert_tensor
    across = sum(shape[dim] for shape in binding.hf_shapes)
    return -(-across // size) * (_numel(binding) // across)


def _item_bytes(binding: Binding, item_bytes: int) -> int:
    """Buffers and the value head are float32 in every model."""
    return 4 if binding.is_buffer or binding.hf_names == (VALUE_HEAD,) else item_bytes
