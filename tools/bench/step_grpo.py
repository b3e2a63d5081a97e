"""A GRPO step over the package's own actor: what SAO is compared with. No critic, one advantage a trajectory."""

from collections.abc import Sequence

import numpy as np

from megatron_sao.algorithm.baselines import group_advantages, per_action_token
from megatron_sao.controller.clients import ActorClient
from megatron_sao.metrics import Metric
from megatron_sao.types import Batch, WeightVersion


async def grpo_step(
    batch: Batch, groups_N: Sequence[str], *, version: WeightVersion, actor: ActorClient
) -> dict[str, Metric]:
    """Load, group advantages, one update of the actor (with the same loss as SAO's), drop."""
    packing = await actor.load(batch)
    rewards_N = np.add.reduceat(batch.reward, batch.offsets[:-1])
    actions_N = np.add.reduceat(batch.is_action.astype(np.int64), batch.offsets[:-1])
    advantages_A = per_action_token(group_advantages(rewards_N, groups_N), actions_N.tolist())
    metrics = await actor.update(batch, advantages_A, version=version)
    await actor.drop(batch)
    return {**packing, **metrics}
