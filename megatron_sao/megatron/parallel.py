"""The process groups of one Megatron role, as a value. The only caller of `parallel_state`."""

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_sao.config import LayoutConfig
from megatron_sao.megatron.platform import Platform
from megatron_sao.megatron.stages import stage_of

Group = Any
"""A `torch.distributed.ProcessGroup`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """This rank's place in every mesh; without arguments, that of a rank alone.

    Ranks are ordered tensor, context, data, pipeline, and for experts expert-tensor, expert, expert-data, pipeline. So
    the ranks of a pipeline stage are neighbours, and the first of them hold one whole copy of the stage.
    With 8 ranks, tensor = 2, expert = 4, pipeline = 2: the stages have ranks 0-3 and 4-7; of the first, tensor groups
    are {0,1} {2,3}, data groups {0,2} {1,3}, the expert group {0,1,2,3}; pipeline groups {0,4} {1,5} {2,6} {3,7}.
    """

    rank: int = 0
    world_size: int = 1
    tensor_rank: int = 0
    tensor_size: int = 1
    tensor_group: Group = None  # ranks that hold shards of the same dense tensors
    context_rank: int = 0
    context_size: int = 1
    context_group: Group = None  # ranks that share the tokens of each packed row
    data_rank: int = 0
    data_size: int = 1
    data_group: Group = None  # ranks that hold the same dense shard and other rows, or other tokens of a row
    expert_rank: int = 0  # among the ranks that hold different experts of one whole stage
    expert_size: int = 1
    expert_tensor_rank: int = 0  # among the ranks that hold shards of the same experts
    expert_tensor_size: int = 1
    expert_data_rank: int = 0  # among the ranks that hold the same shards of the same experts
    expert_data_size: int = 1
    pipeline_rank: int = 0
    pipeline_size: int = 1
    pipeline_group: Group = None  # ranks that hold the stages of one whole model
    virtual_stages: int = 1  # model chunks on each pipeline rank
    world_group: Group = None

    @property
    def sequence_parallel(self) -> bool:
        return self.tensor_size > 1

    @property
    def num_stages(self) -> int:
        return self.pipeline_size * self.virtual_stages

    @property
    def stages(self) -> tuple[int, ...]:
        """Stages whose layers this rank holds, one for each model chunk."""
        return tuple(chunk * self.pipeline_size + self.pipeline_rank for chunk in range(self.virtual_stages))

    def pipeline_rank_of(self, layer: int, may_start_stage: tuple[bool, ...]) -> int:
        return stage_of(layer, may_start_stage, self.num_stages) % self.pipeline_size

    def first_rank(self, pipeline_rank: int) -> int:
        """Lowest global rank among those of a pipeline rank."""
        return pipeline_rank * (self.world_size // self.pipeline_size)


def initialize(
    layout: LayoutConfig,
    *,
    rank: int,
    init_method: str | None,
    timeout_s: float,
    platform: Platform,
    seed: int = 0,
) -> Parallel:
    """Join the role's world of `layout.num_ranks` ranks (unless already joined) and build its groups.

    Raises:
        ValueError: a layout that the platform cannot run; an existing world has another size, or this process another
            rank in it.
    """
    check_platform(layout, platform)
    timeout = timedelta(seconds=timeout_s)
    if (
        not dist.is_initialized()
    ):  # without a device_id: torch would split every later NCCL group, also one with engines
        dist.init_process_group(
            platform.backend, init_method=init_method, rank=rank, world_size=layout.num_ranks, timeout=timeout
        )
    if (dist.get_world_size(), dist.get_rank()) != (layout.num_ranks, rank):
        raise ValueError(
            f"rank {rank} of {layout.num_ranks} asked for, but this process is rank {dist.get_rank()} of "
            f"{dist.get_world_size()}: give the layout num_ranks = {dist.get_world_size()}"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_stages if layout.virtual_stages > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
    )
    model_parallel_cuda_manual_seed(seed)
    place = _read(rank, layout)
    _check_order(place)
    return place


def check_platform(layout: LayoutConfig, platform: Platform) -> None:
    """Raises ValueError for a layout that the libraries at hand cannot run, before anything is built."""
    if layout.context > 1 and not platform.transformer_engine:
        raise ValueError(
            f"layout.context = {layout.context}: context parallelism needs Transformer Engine's attention on a GPU, "
            f"and this is {platform.device.type} without it: set layout.context = 1"
        )
    if platform.backend == "gloo" and layout.expert_tensor > 1 and (layout.expert > 1 or layout.tensor == 1):
        raise ValueError(
            f"layout.expert_tensor = {layout.expert_tensor} with expert = {layout.expert} and tensor = "
            f"{layout.tensor}: Megatron-core then gathers unequal numbers of tokens, which gloo cannot: on a CPU give "
            "expert_tensor = 1, or expert = 1 and tensor >= 2"
        )


def shutdown(parallel: Parallel) -> None:
    """Leave all groups and the world. Call it on every rank."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def _check_order(place: Parallel) -> None:
    if place.rank == 0:
        stage, experts = place.first_rank(1), place.expert_size * place.expert_tensor_size
        for name, group, wanted in (
            ("tensor", place.tensor_group, range(place.tensor_size)),
            ("expert", parallel_state.get_expert_model_parallel_group(), range(0, experts, place.expert_tensor_size)),
            ("pipeline", place.pipeline_group, range(0, place.world_size, stage)),
        ):
            found = dist.get_process_group_ranks(group)
            assert found == list(wanted), f"{name} group of rank 0: {found}"


def _read(rank: int, layout: LayoutConfig) -> Parallel:
    tensor, context = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_context_parallel_group()
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    expert_tensor = parallel_state.get_expert_tensor_parallel_group()
    expert = parallel_state.get_expert_model_parallel_group()
    expert_data = parallel_state.get_expert_data_parallel_group()
    data = parallel_state.get_data_parallel_group()
    return Parallel(
        rank=rank,
        world_size=layout.num_ranks,
        tensor_rank=dist.get_rank(tensor),
        tensor_size=dist.get_world_size(tensor),
        tensor_group=tensor,
        context_rank=dist.get_rank(context),
        context_size=dist.get_world_size(context),
        context_group=context,
        data_rank=dist.get_rank(data),
        data_size=dist.get_world_size(data),
        data_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        expert_rank=dist.get_rank(expert),
        expert_size=dist.get_world_size(expert),
        expert_tensor_rank=dist.get_rank(expert_tensor),
        expert_tensor_size=dist.get_world_size(expert_tensor),
        expert_data_rank=dist.get_rank(expert_data),
        expert_data_size=dist.get_world_size(expert_data),
        pipeline_rank=dist.get_rank(pipeline),
        pipeline_size=dist.get_world_size(pipeline),
        pipeline_group=pipeline,
        virtual_stages=layout.virtual_stages,
        world_group=dist.group.WORLD,
    )
