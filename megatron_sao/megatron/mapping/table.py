"""One record per kind of tensor: its HF names, its Megatron-core names, and how the one is laid out in the other.

HF names are those on disk (one tensor per projection and expert, [out, in]). A Megatron name is given for the local
layer spec and, where it differs, for Transformer Engine's: the model has exactly one of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from megatron_sao.megatron.mapping.hf_config import ConfigFields, HFConfig

if TYPE_CHECKING:  # tables are read by `sao plan`, which starts without torch
    from torch import Tensor

Scope = Literal["model", "layer", "dense_layer", "moe_layer", "expert", "indexer_layer", "mtp_layer"]
Presence = Literal[
    "always", "optional", "policy_untied", "critic", "qkv_bias", "qk_norm", "compressed_queries", "whole_queries"
]
Shape = tuple[int, ...]


class Layout(Protocol):
    """How HF tensors lie in one tensor-parallel shard. Pure views: a copy from `place` into `cut` loads, the other way
    round it gathers; the two have the same shape.
    """

    @property
    def dim(self) -> int | None: ...  # the dimension that tensor parallelism cuts; None: every rank holds the same

    def cut(self, shard: Tensor, config: HFConfig, *, rank: int, size: int) -> tuple[Tensor, ...]:
        """The shard's piece of each HF tensor, in their order; a piece may be empty."""
        ...

    def place(self, whole: Tensor, config: HFConfig, *, part: int, rank: int, size: int) -> Tensor:
        """Where the shard's piece of HF tensor number `part` lies in it."""
        ...


class Replicated:
    dim = None

    def cut(self, shard: Tensor, config: HFConfig, *, rank: int, size: int) -> tuple[Tensor, ...]:
        return (shard,)

    def place(self, whole: Tensor, config: HFConfig, *, part: int, rank: int, size: int) -> Tensor:
        return whole


@dataclass(frozen=True, slots=True)
class Split:
    """Contiguous chunks of one dimension: 0 = outputs (column parallel), 1 = inputs (row parallel)."""

    dim: int

    def cut(self, shard: Tensor, config: HFConfig, *, rank: int, size: int) -> tuple[Tensor, ...]:
        return (shard,)

    def place(self, whole: Tensor, config: HFConfig, *, part: int, rank: int, size: int) -> Tensor:
        return whole.chunk(size, dim=self.dim)[rank]


class SplitVocabulary:
    """Chunks of ids, as many for each rank: the last ones are padded where there are no ids left."""

    dim = 0

    def cut(self, shard: Tensor, config: HFConfig, *, rank: int, size: int) -> tuple[Tensor, ...]:
        return (shard[: len(self._ids(config, rank, size))],)

    def place(self, whole: Tensor, config: HFConfig, *, part: int, rank: int, size: int) -> Tensor:
        ids = self._ids(config, rank, size)
        return whole[ids.start : ids.stop]

    def _ids(self, config: HFConfig, rank: int, size: int) -> range:
        height = padded_vocabulary(config.vocab_size, size) // size
        return range(config.vocab_size)[rank * height : (rank + 1) * height]


def padded_vocabulary(vocab_size: int, tensor: int) -> int:
    """Rows of an embedding and an output layer that `tensor` ranks cut into equal parts."""
    return -(-vocab_size // tensor) * tensor


class FusedQKV:
    """linear_qkv rows: per key-value head its query heads in order, then its key, then its value; chunks of dim 0.

    Of fewer key-value heads than ranks each rank has a run of rows of one head's group.
    """

    dim = 0

    def cut(self, shard: Tensor, config: HFConfig, *, rank: int, size: int) -> tuple[Tensor, ...]:
        groups, low, rows = _qkv_rows(config, rank, size)
        grouped = shard.view(len(groups), -1, *shard.shape[1:])
        return tuple(grouped[:, start - low : end - low] for _, start, end in rows)

    def place(self, whole: Tensor, config: HFConfig, *, part: int, rank: int, size: int) -> Tensor:
        groups, _, rows = _qkv_rows(config, rank, size)
        first, start, end = rows[part]
        grouped = whole.view(config.num_kv_heads, -1, *whole.shape[1:])
        return grouped[groups.start : groups.stop, start - first : end - first]


def _qkv_rows(config: HFConfig, rank: int, size: int) -> tuple[range, int, list[tuple[int, int, int]]]:
    """Of a shard: its groups, its first row within them, and for q, k, v (first row of all, its first, its end)."""
    num_groups, head = config.num_kv_heads, config.head_dim
    queries = config.num_heads // num_groups * head
    shards_per_group = max(1, size // num_groups)
    height = (queries + 2 * head) // shards_per_group
    first_group, low = rank * num_groups // size, rank % shards_per_group * height
    rows = []
    for first, end in ((0, queries), (queries, queries + head), (queries + head, queries + 2 * head)):
        start = min(max(first, low), end)
        rows.append((first, start, max(start, min(end, low + height))))
    return range(first_group, first_group + max(1, num_groups // size)), low, rows


class FusedGateUp:
    """linear_fc1 rows of one shard: its chunk of gate_proj, then its chunk of up_proj."""

    dim = 0

    def cut(self, shard: Tensor, config: HFConfig, *, rank: int, size: int) -> tuple[Tensor, ...]:
        return shard.chunk(2)

    def place(self, whole: Tensor, config: HFConfig, *, part: int, rank: int, size: int) -> Tensor:
        return whole.chunk(size)[rank]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorKind:
    """One row of an architecture's table. `{layer}` and `{expert}` stand for indices."""

    scope: Scope
    hf: tuple[tuple[str, tuple[str, ...]], ...]  # (HF name, dimensions by name), in the order the layout takes them
    megatron: tuple[str, ...]  # alternatives; {expert} counts within the rank; none: carried, not in the model
    layout: Layout
    presence: Presence = "always"
    is_buffer: bool = False  # float32 in every model, and not trained
    is_constant: bool = False  # a parameter that is never trained
    joined: bool = False  # to the row before: SGLang fuses the two, and forgets the first one when a load ends


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """All that is particular to one HF architecture."""

    name: str
    fields: ConfigFields
    options: Callable[[HFConfig], Mapping[str, Any]]  # of TransformerConfig, that not all architectures have
    tensors: tuple[TensorKind, ...]  # in the canonical order: before the layers, in a layer, after the layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding:
    """One Megatron tensor of the whole model and the HF tensors in it."""

    hf_names: tuple[str, ...]
    hf_shapes: tuple[Shape, ...]
    megatron_names: tuple[str, ...]  # alternatives, as the owning rank's `Model` names it
    layout: Layout
    layer: int  # in whose pipeline stage it lies: before the layers with the first, after them with the last
    expert_rank: int | None  # owner within an expert-parallel group; None: not an expert
    is_buffer: bool
    is_constant: bool  # these three: see TensorKind
    joined: bool

    def find(self, names: Mapping[str, Any]) -> str:
        """The alternative that this rank's model has."""
        found = [name for name in self.megatron_names if name in names]
        assert len(found) == 1, f"the model must have one of {self.megatron_names} for {self.hf_names}; it has {found}"
        return found[0]


def bind(architecture: Architecture, config: HFConfig, expert_size: int) -> tuple[Binding, ...]:
    """Every tensor of the whole model in one order that depends on the config alone: the same on all ranks."""
    return _bind(architecture.name, architecture.tensors, config, expert_size)


@functools.lru_cache(maxsize=8)
def _bind(_: str, tensors: tuple[TensorKind, ...], config: HFConfig, expert_size: int) -> tuple[Binding, ...]:
    present = [kind for kind in tensors if kind.megatron and _is_present(kind, config)]
    first_in_layer = next(i for i, kind in enumerate(present) if kind.scope != "model")
    in_layer = [kind for kind in present if kind.scope != "model"]
    head, tail = present[:first_in_layer], present[first_in_layer + len(in_layer) :]
    bindings = [_binding(kind, config, expert_size) for kind in head]
    for layer in range(config.num_layers):
        bindings += _bind_layer(in_layer, config, expert_size, layer)
    return tuple(bindings + [_binding(kind, config, expert_size, layer=config.num_layers - 1) for kind in tail])


def _bind_layer(kinds: Sequence[TensorKind], config: HFConfig, expert_size: int, layer: int) -> list[Binding]:
    is_moe = config.is_moe_layer[layer]
    scopes = {"layer", "moe_layer" if is_moe else "dense_layer"}
    if config.computes_sparse and config.has_indexer[layer]:
        scopes.add("indexer_layer")
    bindings = [_binding(kind, config, expert_size, layer=layer) for kind in kinds if kind.scope in scopes]
    if is_moe:
        experts = [kind for kind in kinds if kind.scope == "expert"]
        bindings += [
            _binding(kind, config, expert_size, layer=layer, expert=expert)
            for expert in range(config.num_experts)
            for kind in experts
        ]
    return bindings


def _binding(
    kind: TensorKind, config: HFConfig, expert_size: int, *, layer: int = 0, expert: int | None = None
) -> Binding:
    per_rank = max(1, config.num_experts // expert_size)
    owner, local = divmod(expert or 0, per_rank)
    sizes = config.sizes
    return Binding(
        hf_names=tuple(name.format(layer=layer, expert=expert) for name, _ in kind.hf),
        hf_shapes=tuple(tuple(sizes[dim] for dim in dims) for _, dims in kind.hf),
        megatron_names=tuple(name.format(layer=layer, expert=local) for name in kind.megatron),
        layout=kind.layout,
        layer=layer,
        expert_rank=None if expert is None else owner,
        is_buffer=kind.is_buffer,
        is_constant=kind.is_constant,
        joined=kind.joined,
    )


def _is_present(kind: TensorKind, config: HFConfig) -> bool:
    is_critic = config.role == "critic"
    return {
        "always": True,
        "optional": True,
        "policy_untied": not is_critic and not config.tied_embeddings,
        "critic": is_critic,
        "qkv_bias": config.qkv_bias,
        "qk_norm": config.qk_norm,
        "compressed_queries": config.q_lora_rank > 0,
        "whole_queries": config.q_lora_rank == 0,
    }[kind.presence]


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """A tensor of the checkpoint that is not in the model: checked at load, written back as it was."""

    name: str
    shape: Shape
    layer: int
    optional: bool


def carried(architecture: Architecture, config: HFConfig) -> tuple[Carried, ...]:
    """Indexers that are not in the model, and the layers of multi-token prediction (an MoE layer each, with some of its
    own). A critic has none: it predicts no token, and nobody serves it.
    """
    if config.role == "critic":
        return ()
    return tuple(_carried(architecture.tensors, config))


def _carried(tensors: Sequence[TensorKind], config: HFConfig) -> Iterator[Carried]:
    scopes = {"layer", "moe_layer", "expert", "mtp_layer", *(["indexer_layer"] if config.has_indexer else [])}
    indexers = () if config.computes_sparse else config.has_indexer
    wanted = {layer: {"indexer_layer"} for layer, own in enumerate(indexers) if own}
    wanted |= {config.num_layers + layer: scopes for layer in range(config.num_mtp_layers)}
    for layer, of_layer in wanted.items():
        for kind in (kind for kind in tensors if kind.scope in of_layer and _is_present(kind, config)):
            yield from _carried_of(kind, config, layer)


def _carried_of(kind: TensorKind, config: HFConfig, layer: int) -> Iterator[Carried]:
    sizes = config.sizes
    for expert in range(config.num_experts if kind.scope == "expert" else 1):
        for name, dims in kind.hf:
            yield Carried(
                name=name.format(layer=layer, expert=expert),
                shape=tuple(sizes[dim] for dim in dims),
                layer=layer,
                optional=kind.presence == "optional",
            )
