"""One record per kind of tensor: its HF names, its Megatron-core names, and how the one is laid out in the other.

HF names are those on disk (one tensor per projection and expert, [out, in]). A Megatron name is given for the local
layer spec and, where it differs, for Transformer Engine's: the model has exactly one of them.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from megatron_sao.megatron.mapping.hf_config import ConfigFields, HFConfig

Scope = Literal["model", "layer", "dense_layer", "moe_layer", "expert"]
Presence = Literal["always", "policy_untied", "critic"]
Shape = tuple[int, ...]


class Layout(Protocol):
    """How HF tensors become one tensor-parallel shard, and back. Pure: no group, no model."""

    @property
    def dim(self) -> int | None: ...  # the dimension that tensor parallelism cuts; None: every rank holds the same

    def shard(self, parts: Sequence[Tensor], config: HFConfig, *, rank: int, size: int) -> Tensor: ...

    def whole(self, shards: Sequence[Tensor], config: HFConfig) -> tuple[Tensor, ...]: ...  # new memory


class Replicated:
    dim = None

    def shard(self, parts: Sequence[Tensor], config: HFConfig, *, rank: int, size: int) -> Tensor:
        return parts[0]

    def whole(self, shards: Sequence[Tensor], config: HFConfig) -> tuple[Tensor, ...]:
        return (shards[0].clone(),)


@dataclass(frozen=True, slots=True)
class Split:
    """Contiguous chunks of one dimension: 0 = outputs (column parallel), 1 = inputs (row parallel)."""

    dim: int

    def shard(self, parts: Sequence[Tensor], config: HFConfig, *, rank: int, size: int) -> Tensor:
        return parts[0].chunk(size, dim=self.dim)[rank]

    def whole(self, shards: Sequence[Tensor], config: HFConfig) -> tuple[Tensor, ...]:
        return (torch.cat(list(shards), dim=self.dim),)


class FusedQKV:
    """linear_qkv rows: per key-value head its query heads in order, then its key, then its value; chunks of dim 0."""

    dim = 0

    def shard(self, parts: Sequence[Tensor], config: HFConfig, *, rank: int, size: int) -> Tensor:
        groups = [part.reshape(config.num_kv_heads, -1, part.shape[-1]) for part in parts]
        return torch.cat(groups, dim=1).flatten(0, 1).chunk(size)[rank]

    def whole(self, shards: Sequence[Tensor], config: HFConfig) -> tuple[Tensor, ...]:
        rows = torch.cat(list(shards))
        queries = config.num_heads // config.num_kv_heads * config.head_dim
        groups = rows.reshape(config.num_kv_heads, -1, rows.shape[-1])
        return tuple(part.flatten(0, 1) for part in groups.split([queries, config.head_dim, config.head_dim], dim=1))


class FusedGateUp:
    """linear_fc1 rows of one shard: its chunk of gate_proj, then its chunk of up_proj."""

    dim = 0

    def shard(self, parts: Sequence[Tensor], config: HFConfig, *, rank: int, size: int) -> Tensor:
        return torch.cat([part.chunk(size)[rank] for part in parts])

    def whole(self, shards: Sequence[Tensor], config: HFConfig) -> tuple[Tensor, ...]:
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([gate for gate, _ in halves]), torch.cat([up for _, up in halves])


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorKind:
    """One row of an architecture's table. `{layer}` and `{expert}` stand for indices."""

    scope: Scope
    hf: tuple[tuple[str, tuple[str, ...]], ...]  # (HF name, dimensions by name), in the order the layout takes them
    megatron: tuple[str, ...]  # alternatives; {expert} counts within the rank
    layout: Layout
    presence: Presence = "always"


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """All that is particular to one HF architecture."""

    name: str
    fields: ConfigFields
    options: Mapping[str, Any]  # of TransformerConfig, that no field of config.json gives
    tensors: tuple[TensorKind, ...]  # in the canonical order: before the layers, in a layer, after the layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding:
    """One Megatron tensor of the whole model and the HF tensors in it."""

    hf_names: tuple[str, ...]
    hf_shapes: tuple[Shape, ...]
    megatron_names: tuple[str, ...]  # alternatives, as the owning rank names it
    layout: Layout
    expert_rank: int | None  # owner within an expert-parallel group; None: not an expert

    def shard_shape(self, size: int) -> Shape:
        """Shape of the Megatron tensor on each of `size` tensor-parallel ranks: the HF tensors' rows, cut."""
        shape = [sum(hf_shape[0] for hf_shape in self.hf_shapes), *self.hf_shapes[0][1:]]
        if self.layout.dim is not None:
            shape[self.layout.dim] //= size
        return tuple(shape)

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
    present = [kind for kind in tensors if _is_present(kind, config)]
    first_in_layer = next(i for i, kind in enumerate(present) if kind.scope != "model")
    in_layer = [kind for kind in present if kind.scope != "model"]
    head, tail = present[:first_in_layer], present[first_in_layer + len(in_layer) :]
    bindings = [_binding(kind, config, expert_size) for kind in head]
    for layer in range(config.num_layers):
        bindings += _bind_layer(in_layer, config, expert_size, layer)
    return tuple(bindings + [_binding(kind, config, expert_size) for kind in tail])


def _bind_layer(kinds: Sequence[TensorKind], config: HFConfig, expert_size: int, layer: int) -> list[Binding]:
    is_moe = config.is_moe_layer[layer]
    skipped = "dense_layer" if is_moe else "moe_layer"
    bindings = [
        _binding(kind, config, expert_size, layer=layer) for kind in kinds if kind.scope not in (skipped, "expert")
    ]
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
        expert_rank=None if expert is None else owner,
    )


def _is_present(kind: TensorKind, config: HFConfig) -> bool:
    is_critic = config.role == "critic"
    return {
        "always": True,
        "policy_untied": not is_critic and not config.tied_embeddings,
        "critic": is_critic,
    }[kind.presence]
