"""FAKE roles, publisher and episodes for tests of the loops; service, buffer, clients and loops are the real ones.

An episode ends at once. Its tokens come from its prompt's place in the stream, its version is the published one. With
batches in admission order and slots that only a release frees, both loops see the same batches.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from megatron_sao.channel import ActorUpdate, Answer, Command, CriticUpdate, CriticValues, LoadBatch, Tensors
from megatron_sao.channel.commands import NO_TENSORS
from megatron_sao.config import AlgorithmConfig
from megatron_sao.controller.clients import ActorClient, CriticClient
from megatron_sao.controller.loop import Parts
from megatron_sao.controller.step import StepSettings
from megatron_sao.data.buffer import TrajectoryBuffer
from megatron_sao.data.prompts import PromptStream
from megatron_sao.metrics import Metric, Record
from megatron_sao.rollout.service import EpisodeRunner, RolloutService
from megatron_sao.types import Message, Prompt, Reward, StopReason, Trajectory

EPISODES_PER_STEP = 2
PROMPTS = [Prompt(id=f"p{i}", messages=(Message(role="user", content=str(i)),)) for i in range(100)]
Hook = Callable[[Command], Awaitable[None]]


async def at_once(command: Command) -> None: ...


class FakeRole:
    """Keeps all that it is asked. Its values tell batches, tokens and updates apart; `hook` may wait or raise."""

    def __init__(self, role: str, hook: Hook = at_once) -> None:
        self.role, self.hook = role, hook
        self.asked: list[tuple[Command, Mapping[str, Any]]] = []
        self.batches: dict[int, Tensors] = {}
        self.num_updates = 0

    async def call(self, command: Command, tensors: Tensors = NO_TENSORS, *, timeout_s: float) -> Answer:
        self.asked.append((command, {name: array.tolist() for name, array in tensors.items()}))
        await self.hook(command)
        match command:
            case LoadBatch(batch_id=batch_id):
                self.batches[batch_id] = tensors
            case CriticUpdate():
                self.num_updates += 1
                return Answer(metrics={"critic/explained_variance": Metric(0.0)})
            case CriticValues(batch_id=batch_id):
                batch = self.batches[batch_id]
                values_A = 0.01 * batch["token_ids"][batch["is_action"]] + self.num_updates
                return Answer(tensors={"values": values_A.astype(np.float32)})
        return Answer()

    async def close(self) -> None: ...

    def oldest_versions(self) -> list[tuple[int, int]]:
        """For each update of the actor: the version it trained from, and the oldest one among its batch's actions."""
        updates = [command for command, _ in self.asked if isinstance(command, ActorUpdate)]
        batches = [self.batches[update.batch_id] for update in updates]
        oldest = [int(batch["version"][batch["is_action"]].min()) for batch in batches]
        return [(update.version, version) for update, version in zip(updates, oldest, strict=True)]


@dataclass
class FakePublisher:
    version: int = 0
    hook: Callable[[], Awaitable[None]] | None = None

    async def publish(self, version: int) -> Any:
        if self.hook:
            await self.hook()
        self.version = version
        return SimpleNamespace(metrics={"publish/total_s": Metric(0.0)})


@dataclass
class World:
    """A run without processes. `episodes` may keep an episode from ending."""

    actor: FakeRole = field(default_factory=lambda: FakeRole("actor"))
    critic: FakeRole = field(default_factory=lambda: FakeRole("critic"))
    publisher: FakePublisher = field(default_factory=FakePublisher)
    episodes: Callable[[Prompt], Awaitable[None]] | None = None
    max_lag: int = 2
    max_token_lag: int | None = None
    step_timeout_s: float = 30.0
    check_tasks: bool = True
    records: list[Record] = field(default_factory=list)

    async def run(self, prompt: Prompt) -> tuple[tuple[Trajectory, ...], Reward]:
        if self.episodes:
            await self.episodes(prompt)
        trajectory = Trajectory(
            id=f"{prompt.position:032x}",
            episode_id=f"{prompt.position:032x}",
            prompt_id=prompt.id,
            position=prompt.position,
            token_ids=np.array([1, 2, 3], np.int32) + 3 * prompt.position,
            is_action=np.array([False, True, True]),
            rollout_logprobs=np.array([0, -1, -2], np.float32),
            version=np.array([-1, self.publisher.version, self.publisher.version], np.int32),
            reward=np.array([0, 0, prompt.position % 2], np.float32),
            turns=((1, 3),),
            stop_reason=StopReason.STOP,
            engine="fake",
            started_s=0.0,
            finished_s=1.0,
        )
        return (trajectory,), Reward(value=float(prompt.position % 2))

    def step(self, step: int, record: Record) -> None:
        self.records.append(record)

    @asynccontextmanager
    async def parts(self) -> AsyncIterator[Parts]:
        """Started, and stopped at the end: no task is left then."""
        slots = (self.max_lag + 1) * EPISODES_PER_STEP
        buffer = TrajectoryBuffer(slots, max_token_lag=self.max_token_lag)
        runner = cast(EpisodeRunner, self)
        service = RolloutService(runner, prompts=PromptStream(PROMPTS, seed=0), buffer=buffer, slot_timeout_s=30.0)
        limits: dict[str, Any] = {"num_data_parallel": 1, "max_tokens_per_micro_batch": 64, "timeout_s": 30.0}
        algorithm = AlgorithmConfig(eps_low=0.3, eps_high=5.0)
        service.start()
        try:
            yield Parts(
                buffer=buffer,
                service=service,
                actor=ActorClient(channel=self.actor, **limits),
                critic=CriticClient(channel=self.critic, **limits),
                publisher=cast(Any, self.publisher),
                reporter=cast(Any, self),
                settings=StepSettings(algorithm=algorithm, num_critic_updates=2, values_before_updates=False),
                episodes_per_step=EPISODES_PER_STEP,
                max_lag=self.max_lag,
                in_order=True,
                episode_timeout_s=5.0,
                step_timeout_s=self.step_timeout_s,
            )
        finally:
            await service.stop()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not (left and self.check_tasks), f"tasks are left: {left}"
