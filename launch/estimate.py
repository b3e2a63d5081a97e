"""How long a role takes for one step: an estimate that orders layouts, no promise. Pure numbers.

A step is `trajectories_per_step` trajectories of the greatest length, in rows of `max_tokens_per_micro_batch`. An actor
makes one update, a critic K and the values (one more forward). Counted: matrices, attention and output layer at
COMPUTE_EFFICIENCY of the GPU's peak; what layers send (tensor, expert, context and pipeline groups) and the gradients
and parameters of each update at LINK_EFFICIENCY of the links; the pipeline's bubble; recomputation; the busiest expert
rank. A ring of context ranks sends beside the attention that it feeds; nothing else is taken to overlap. Not counted:
generation, publishing, Adam, small matrices that reach less.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from launch.rates import GPUS, Group, Links
from megatron_sao.config import Config, LayoutConfig, Recompute, RoleConfig
from megatron_sao.megatron.activations import Pass
from megatron_sao.megatron.mapping.count import LayerNumbers, layer_numbers
from megatron_sao.megatron.mapping.hf_config import HFConfig
from megatron_sao.megatron.memory import frozen_names
from megatron_sao.megatron.stages import stage_layers
from megatron_sao.types import ITEM_BYTES

_GRADIENT_BYTES = 4
_Kind = tuple[LayerNumbers, bool]
"""Of a layer: its numbers, and whether it has an indexer that works."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """By what they are spent on."""

    compute: float = 0.0
    tensor: float = 0.0  # gathers and scatters of tensor groups
    experts: float = 0.0  # all-to-all, and the experts' own tensor groups
    context: float = 0.0  # what a ring does not hide
    pipeline: float = 0.0  # from stage to stage
    bubble: float = 0.0  # a stage waits for others
    update: float = 0.0  # gradients and parameters between data-parallel ranks

    @property
    def total(self) -> float:
        return self.compute + self.tensor + self.experts + self.context + self.pipeline + self.bubble + self.update

    def plus(self, other: "Seconds", times: float = 1.0) -> "Seconds":
        return Seconds(
            compute=self.compute + times * other.compute,
            tensor=self.tensor + times * other.tensor,
            experts=self.experts + times * other.experts,
            context=self.context + times * other.context,
            pipeline=self.pipeline + times * other.pipeline,
            bubble=self.bubble + times * other.bubble,
            update=self.update + times * other.update,
        )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a role does in a step, whatever its layout; `seconds` says how long it takes in one."""

    hf: HFConfig
    layers: tuple[LayerNumbers, ...]
    links: Links
    flops: float  # of a GPU, a second
    item_bytes: int
    num_rows: int  # of a step
    max_tokens: int  # of a row
    sequence: int  # tokens of a trajectory
    num_updates: int
    num_forwards: int  # besides
    distributed: bool

    @classmethod
    def of(cls, config: Config, role: RoleConfig, hf: HFConfig) -> "Workload":
        """`hf.role` says which of the two it is."""
        rollout, max_tokens = config.rollout, role.max_tokens_per_micro_batch
        in_a_row = max_tokens // rollout.max_episode_tokens
        is_critic = hf.role == "critic"
        return cls(
            hf=hf,
            layers=layer_numbers(hf, frozen_names(hf, role.frozen_patterns)),
            links=Links(gpu=GPUS[config.cluster.gpu], gpus_per_node=config.cluster.gpus_per_node),
            flops=GPUS[config.cluster.gpu].flops(config.model.dtype),
            item_bytes=ITEM_BYTES[config.model.dtype],
            num_rows=-(-rollout.trajectories_per_step // in_a_row),
            max_tokens=max_tokens,
            sequence=rollout.max_episode_tokens,
            num_updates=config.critic.num_updates if is_critic else 1,
            num_forwards=1 if is_critic else 0,
            distributed=role.optimizer.distributed,
        )

    @cached_property
    def kinds(self) -> dict[_Kind, list[int]]:
        """Layers that take as long."""
        indexers = self.hf.has_indexer if self.hf.computes_sparse else (False,) * self.hf.num_layers
        kinds: dict[_Kind, list[int]] = {}
        for layer, kind in enumerate(zip(self.layers, indexers, strict=True)):
            kinds.setdefault(kind, []).append(layer)
        return kinds

    def stages(self, pipeline: int, virtual_stages: int) -> tuple["_Stage", ...]:
        """By pipeline rank."""
        key = (pipeline, virtual_stages)
        if key not in self._stages:
            chunks = stage_layers(self.hf.may_start_stage, pipeline * virtual_stages)
            self._stages[key] = tuple(_Stage.of(self, chunks[rank::pipeline]) for rank in range(pipeline))
        return self._stages[key]

    @cached_property
    def of_kinds(self) -> dict[tuple[object, ...], list["_Passes"]]:
        """What `_kinds` remembers."""
        return {}

    @cached_property
    def _stages(self) -> dict[tuple[int, int], tuple["_Stage", ...]]:
        return {}

    def seconds(self, role: RoleConfig) -> Seconds:
        """Of a step, with the layout and the recomputation of `role`."""
        layout, per_node = role.layout, self.links.gpus_per_node
        if layout.num_ranks < per_node:  # then no group leaves the node
            links = replace(self.links, gpus_per_node=layout.num_ranks)
            return _seconds(replace(self, links=links), layout, role.recompute)
        return _seconds(self, layout, role.recompute)


def _seconds(work: Workload, layout: LayoutConfig, recompute: Recompute) -> Seconds:
    way = Pass(
        layout=layout,
        item_bytes=work.item_bytes,
        max_tokens=work.max_tokens,
        recompute=recompute,
        transformer_engine=True,
    )
    of_stages = _passes(work, way)
    slowest = max((stage.update for stage in of_stages), key=lambda each: each.total)
    slowest_forward = max((stage.forward for stage in of_stages), key=lambda each: each.total)
    rows = -(-work.num_rows // layout.data)
    if layout.virtual_stages > 1:  # the schedule takes multiples of the pipeline's size
        rows = -(-rows // layout.pipeline) * layout.pipeline
    waits = (layout.pipeline - 1) / layout.virtual_stages
    once = _piped(slowest, rows, waits).plus(Seconds(update=_update_s(work, layout)))
    return Seconds().plus(once, work.num_updates).plus(_piped(slowest_forward, rows, waits), work.num_forwards)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    """What one pipeline rank has."""

    num_of_kind: tuple[int, ...]  # layers, in the order of `Workload.kinds`
    is_last: bool
    dense_trained: int  # numbers, of embedding and output layer too
    expert_trained: int

    @classmethod
    def of(cls, work: Workload, chunks: Sequence[range]) -> "_Stage":
        hf, own = work.hf, [layer for chunk in chunks for layer in chunk]
        is_last, has_head = own[-1] == hf.num_layers - 1, hf.role == "policy" and not hf.tied_embeddings
        num_vocabularies = (own[0] == 0) + (is_last and has_head)
        dense = sum(work.layers[layer].dense_trained for layer in own)
        return cls(
            num_of_kind=tuple(len(set(own) & set(layers)) for layers in work.kinds.values()),
            is_last=is_last,
            dense_trained=dense + num_vocabularies * hf.vocab_size * hf.hidden_size,
            expert_trained=sum(work.layers[layer].expert_trained for layer in own),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Passes:
    """Of one row through some layers."""

    forward: Seconds
    update: Seconds  # forward and backward


def _piped(row: Seconds, num_rows: int, waits: float) -> Seconds:
    """`num_rows` through the slowest stage, which waits for the others' first and last."""
    return Seconds(bubble=waits * row.total).plus(row, num_rows)


def _passes(work: Workload, way: Pass) -> list[_Passes]:
    """Of each pipeline rank, but of equal ones one."""
    of_kinds = _kinds(work, way)
    sent, logits = Seconds(pipeline=_handed_on_s(work, way)), Seconds()
    if work.hf.role == "policy":
        flops = 2 * work.hf.hidden_size * work.hf.vocab_size * way.row / way.layout.tensor
        logits = Seconds(compute=flops / work.flops)
    stages = work.stages(way.layout.pipeline, way.layout.virtual_stages)
    passes = []
    for num_of_kind, is_last in {(stage.num_of_kind, stage.is_last) for stage in stages}:
        forward, update = sent.plus(logits, is_last), sent.plus(sent).plus(logits, 3 * is_last)
        for of_kind, times in zip(of_kinds, num_of_kind, strict=True):
            forward, update = forward.plus(of_kind.forward, times), update.plus(of_kind.update, times)
        passes.append(_Passes(forward=forward, update=update))
    return passes


def _kinds(work: Workload, way: Pass) -> list[_Passes]:
    """Of a layer of each kind: the same for many layouts."""
    layout = way.layout
    key = (layout.tensor, layout.context, layout.expert, layout.expert_tensor, way.recompute)
    if key not in work.of_kinds:
        work.of_kinds[key] = [_layer(work, way, numbers, has_indexer=indexer) for numbers, indexer in work.kinds]
    return work.of_kinds[key]


def _handed_on_s(work: Workload, way: Pass) -> float:
    """One stream of hidden states, for each chunk."""
    layout = way.layout
    if layout.pipeline == 1:
        return 0.0
    stages = Group(size=layout.pipeline, stride=layout.num_ranks // layout.pipeline)
    stream = way.shard * work.hf.hidden_size * work.item_bytes
    return layout.virtual_stages * work.links.neighbour_s(stream, stages)


def _layer(work: Workload, way: Pass, numbers: LayerNumbers, *, has_indexer: bool) -> _Passes:
    """The backward has the gradients of inputs, those of trained weights, attention twice, and what is recomputed."""
    layout, chosen = way.layout, work.hf.experts_per_token / max(1, work.hf.num_experts)
    dense_tokens, expert_tokens = way.row / layout.tensor, way.routed / layout.expert_tensor * chosen
    forward_flops = 2 * (numbers.dense * dense_tokens + numbers.expert * expert_tokens)
    weight_flops = 2 * (numbers.dense_trained * dense_tokens + numbers.expert_trained * expert_tokens)
    core = _core_flops(work, has_indexer=has_indexer) * dense_tokens / work.flops
    matrices, weights = forward_flops / work.flops, weight_flops / work.flops
    ring, tensor = _ring_s(work, way), _tensor_s(work, way, numbers)
    experts = _experts_s(work, way) if numbers.expert else 0.0
    forward = Seconds(compute=matrices + core, tensor=2 * tensor, experts=experts, context=max(0.0, ring - core))
    backward = Seconds(
        compute=matrices + weights + 2 * core,
        tensor=3 * tensor,  # the inputs are gathered again for the weights' gradients
        experts=experts,
        context=max(0.0, 2 * (ring - core)),
    )
    again = {"none": Seconds(), "selective": Seconds(compute=core), "full": forward}[way.recompute]
    return _Passes(forward=forward, update=forward.plus(backward).plus(again))


def _core_flops(work: Workload, *, has_indexer: bool) -> float:
    """Scores and values of a token's query, over half of its sequence's keys on average; and an indexer's."""
    hf, keys = work.hf, work.sequence / 2
    if hf.computes_sparse:
        indexer = 2 * keys * hf.index_num_heads * hf.index_head_dim * has_indexer
        return indexer + 2 * min(keys, hf.index_topk) * hf.num_heads * (2 * hf.kv_lora_rank + hf.rope_head_dim)
    if hf.kv_lora_rank:
        return 2 * keys * hf.num_heads * (hf.nope_head_dim + hf.rope_head_dim + hf.value_head_dim)
    return 2 * keys * hf.num_heads * 2 * hf.head_dim


def _ring_s(work: Workload, way: Pass) -> float:
    """Keys and values of all other pieces of a row pass by; of a sparse attention, the latents."""
    hf, layout = work.hf, way.layout
    if hf.computes_sparse:
        numbers: float = hf.kv_lora_rank + hf.rope_head_dim
    elif hf.kv_lora_rank:
        numbers = hf.num_heads * (hf.nope_head_dim + hf.rope_head_dim + hf.value_head_dim) / layout.tensor
    else:
        numbers = 2 * max(hf.num_kv_heads / layout.tensor, 1) * hf.head_dim
    group = Group(size=layout.context, stride=layout.tensor)
    return work.links.neighbour_s((layout.context - 1) * way.row * numbers * work.item_bytes, group)


def _tensor_s(work: Workload, way: Pass, numbers: LayerNumbers) -> float:
    """One gather or scatter of the stream for attention, and one for a dense MLP or shared experts."""
    size = way.layout.tensor
    parts = 2 if work.hf.num_shared_experts or not numbers.expert else 1
    stream = way.row * work.hf.hidden_size * work.item_bytes
    return parts * work.links.ring_s(stream * (size - 1) / size, Group(size=size))


def _experts_s(work: Workload, way: Pass) -> float:
    """There and back: the tokens of the busiest rank, once for each expert that they choose."""
    layout = way.layout
    sent = way.routed / layout.expert_tensor * work.hf.experts_per_token * work.hf.hidden_size * work.item_bytes
    exchanged = work.links.all_to_all_s(sent, Group(size=layout.expert, stride=layout.expert_tensor))
    return 2 * (exchanged + work.links.ring_s((layout.expert_tensor - 1) * sent, Group(size=layout.expert_tensor)))


def _update_s(work: Workload, layout: LayoutConfig) -> float:
    """Gradients are summed in float32, parameters gathered, in the stage that has most of them."""
    cuts = layout.expert * layout.expert_tensor
    dense_group = Group(size=layout.data * layout.context, stride=layout.tensor)
    expert_group = Group(size=layout.expert_data, stride=cuts)
    num_bytes = _GRADIENT_BYTES + (work.item_bytes if work.distributed else _GRADIENT_BYTES)

    def of_one_s(cut: int, group: Group) -> float:
        return work.links.ring_s(num_bytes / cut * (group.size - 1) / group.size, group)

    dense_s, expert_s = of_one_s(layout.tensor, dense_group), of_one_s(cuts, expert_group)
    stages = work.stages(layout.pipeline, layout.virtual_stages)
    return max(stage.dense_trained * dense_s + stage.expert_trained * expert_s for stage in stages)
