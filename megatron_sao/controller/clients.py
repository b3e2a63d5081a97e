"""What a step asks of the two roles, as methods. Each holds the role's channel, its packing and its deadline.

Legend: T all tokens, A action tokens of a batch, in the batch's order.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from megatron_sao.channel import Channel, Tensors
from megatron_sao.channel.commands import (
    NO_TENSORS,
    ActorUpdate,
    Answer,
    Command,
    CriticUpdate,
    CriticValues,
    DropBatch,
    Export,
    LoadBatch,
)
from megatron_sao.config import RoleConfig
from megatron_sao.data.packing import pack, packing_metrics
from megatron_sao.metrics import Metric
from megatron_sao.trace import Trace
from megatron_sao.types import Batch, WeightVersion

Metrics = Mapping[str, Metric]


class TracedChannel:
    """A role's channel; each call is a span in the row of the role, named by the command."""

    def __init__(self, channel: Channel, trace: Trace) -> None:
        self._channel, self._trace = channel, trace
        self.role, self.close = channel.role, channel.close

    async def call(self, command: Command, tensors: Tensors = NO_TENSORS, *, timeout_s: float) -> Answer:
        args = command.model_dump(include={"batch_id", "version", "bucket"})
        with self._trace.span(self.role, command.name, **args):
            return await self._channel.call(command, tensors, timeout_s=timeout_s)


@dataclass(frozen=True, kw_only=True)
class RoleClient:
    """A Megatron group as the controller sees it."""

    channel: Channel
    num_data_parallel: int
    max_tokens_per_micro_batch: int
    timeout_s: float

    @classmethod
    def of(cls, channel: Channel, config: RoleConfig) -> Self:
        return cls(
            channel=channel,
            num_data_parallel=config.layout.data,
            max_tokens_per_micro_batch=config.max_tokens_per_micro_batch,
            timeout_s=config.command_timeout_s,
        )

    async def load(self, batch: Batch) -> Metrics:
        """Send the tokens once, packed for this group's layout. Returns what the packing wastes."""
        plan = pack(batch.lengths, num_ranks=self.num_data_parallel, max_tokens=self.max_tokens_per_micro_batch)
        command = LoadBatch(batch_id=batch.id, trajectory_ids=batch.trajectory_ids, plan=plan.ranks)
        tensors: Tensors = {
            "offsets": batch.offsets,
            "token_ids": batch.token_ids,
            "is_action": batch.is_action,
            "rollout_logprobs": batch.rollout_logprobs,
            "version": batch.version,
        }
        await self.channel.call(command, tensors, timeout_s=self.timeout_s)
        return packing_metrics(plan, batch.lengths, self.max_tokens_per_micro_batch)

    async def drop(self, batch: Batch) -> None:
        await self.channel.call(DropBatch(batch_id=batch.id), timeout_s=self.timeout_s)

    async def export(self, directory: Path) -> None:
        """Write a HF directory: complete, or not there at all."""
        await self.channel.call(Export(directory=str(directory)), timeout_s=self.timeout_s)


class CriticClient(RoleClient):
    async def update(self, batch: Batch, targets_A: NDArray[np.float32]) -> Metrics:
        """One optimizer update towards `targets_A`."""
        command = CriticUpdate(batch_id=batch.id)
        answer = await self.channel.call(command, {"targets": targets_A}, timeout_s=self.timeout_s)
        return answer.metrics

    async def values(self, batch: Batch) -> NDArray[np.float32]:
        """[A] V(s) before each action token, under the current critic."""
        answer = await self.channel.call(CriticValues(batch_id=batch.id), timeout_s=self.timeout_s)
        return answer.tensors["values"]


class ActorClient(RoleClient):
    async def update(self, batch: Batch, advantages_A: NDArray[np.float32], *, version: WeightVersion) -> Metrics:
        """One DIS update of the weights `version`, which become `version + 1`."""
        command = ActorUpdate(batch_id=batch.id, version=version)
        answer = await self.channel.call(command, {"advantages": advantages_A}, timeout_s=self.timeout_s)
        return answer.metrics
