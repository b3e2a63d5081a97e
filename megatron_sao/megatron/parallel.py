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

Group = Any
"""A `torch.distributed.ProcessGroup`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """This rank's place in every mesh. Ranks are ordered tensor first; experts lie over tensor and data ranks.

    With 4 ranks, tensor = 2, expert = 4: tensor groups {0,1} {2,3}, data groups {0,2} {1,3}, expert group {0,1,2,3}.
    So global rank 0 sits in the tensor group of ranks 0..tensor-1 and in the expert group of ranks 0..expert-1: these
    ranks together hold one whole model.
    """

    rank: int
    world_size: int
    tensor_rank: int
    tensor_size: int
    tensor_group: Group  # ranks that hold shards of the same dense tensors
    data_rank: int
    data_size: int
    data_group: Group  # ranks that hold the same dense shard
    expert_rank: int  # among the ranks that hold different experts of one whole model
    expert_size: int
    expert_data_rank: int  # among the ranks that hold the same experts
    expert_data_size: int
    world_group: Group

    @property
    def sequence_parallel(self) -> bool:
        return self.tensor_size > 1


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
        ValueError: an existing world has another size, or this process another rank in it.
    """
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
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
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
    )
    model_parallel_cuda_manual_seed(seed)
    _check_order(layout, rank)
    return _read(rank, layout.num_ranks)


def shutdown(parallel: Parallel) -> None:
    """Leave all groups and the world. Call it on every rank."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def _check_order(layout: LayoutConfig, rank: int) -> None:
    if rank == 0:
        tensor = dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group())
        expert = dist.get_process_group_ranks(parallel_state.get_expert_model_parallel_group())
        assert tensor == list(range(layout.tensor)), f"tensor group of rank 0: {tensor}"
        assert expert == list(range(layout.expert)), f"expert group of rank 0: {expert}"


def _read(rank: int, world_size: int) -> Parallel:
    tensor, data = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_data_parallel_group()
    expert = parallel_state.get_expert_model_parallel_group()
    expert_data = parallel_state.get_expert_data_parallel_group()
    return Parallel(
        rank=rank,
        world_size=world_size,
        tensor_rank=dist.get_rank(tensor),
        tensor_size=dist.get_world_size(tensor),
        tensor_group=tensor,
        data_rank=dist.get_rank(data),
        data_size=dist.get_world_size(data),
        data_group=data,
        expert_rank=dist.get_rank(expert),
        expert_size=dist.get_world_size(expert),
        expert_data_rank=dist.get_rank(expert_data),
        expert_data_size=dist.get_world_size(expert_data),
        world_group=dist.group.WORLD,
    )
