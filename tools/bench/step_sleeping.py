"""Steps per second of SAO's real loops and of GRPO over roles that sleep: what a critic with its own devices costs.

Only the roles' work and what lies outside training (episodes, publish) are stood in for: roles sleep behind the
in-memory channel, episodes are there at once, a publish takes no time.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np

from megatron_sao.channel import ActorUpdate, Answer, Command, CriticUpdate, CriticValues, LoadBatch, Tensors
from megatron_sao.channel.local import LocalChannel
from megatron_sao.config import AlgorithmConfig
from megatron_sao.controller.clients import ActorClient, CriticClient
from megatron_sao.controller.loop import Parts, overlapped_loop, serial_loop
from megatron_sao.controller.step import StepSettings
from megatron_sao.metrics import Metric
from megatron_sao.types import Batch, Trajectory
from tools.bench.report import Case
from tools.bench.step_grpo import grpo_step

ACTOR_S, CRITIC_S = 0.3, 0.2  # a step's: a tenth of 3 s and 2 s
NUM_CRITIC_UPDATES = 2
TIMEOUT_S = 30.0
_R = TypeVar("_R")


async def sleeping_case(trajectories: Sequence[Trajectory], *, num_steps: int) -> Case:
    """Seconds between the ends of steps, medians; the first step of a loop has nothing to overlap with."""
    seconds = {
        "serial": await _of_loop(serial_loop, trajectories, num_steps),
        "overlapped": await _of_loop(overlapped_loop, trajectories, num_steps),
        "grpo": await _of_grpo(trajectories, num_steps),
    }
    return {
        "case": "grpo_sleeping",
        "num_steps": num_steps,
        "actor_sleep_s": ACTOR_S,
        "critic_sleep_s": CRITIC_S,
        "sao_over_grpo": seconds["overlapped"] / seconds["grpo"],
        "serial_over_grpo": seconds["serial"] / seconds["grpo"],
        "bar": None,
        "met": None,
        "sao_s": seconds["overlapped"],
        "serial_s": seconds["serial"],
        "grpo_s": seconds["grpo"],
    }


async def _of_loop(loop: Callable[..., Awaitable[Any]], trajectories: Sequence[Trajectory], num_steps: int) -> float:
    outside = _Outside(trajectories)
    parts = Parts(
        buffer=cast(Any, outside),
        service=cast(Any, outside),
        publisher=cast(Any, outside),
        reporter=cast(Any, outside),
        actor=_client(ActorClient, _Sleeper()),
        critic=_client(CriticClient, _Sleeper()),
        settings=StepSettings(
            algorithm=AlgorithmConfig(eps_low=0.3, eps_high=5.0),
            num_critic_updates=NUM_CRITIC_UPDATES,
            values_before_updates=False,
        ),
        episodes_per_step=len(trajectories),
        max_lag=1,
        in_order=True,
        episode_timeout_s=TIMEOUT_S,
        step_timeout_s=TIMEOUT_S,
    )
    await loop(parts, num_steps=num_steps, first_batch_id=0)
    return _median_step(outside.ends_s)


async def _of_grpo(trajectories: Sequence[Trajectory], num_steps: int) -> float:
    actor, ends_s = _client(ActorClient, _Sleeper()), []
    groups = [trajectory.prompt_id for trajectory in trajectories]
    for version in range(num_steps):
        await grpo_step(Batch.of(version, tuple(trajectories)), groups, version=version, actor=actor)
        ends_s.append(time.monotonic())
    return _median_step(ends_s)


def _median_step(ends_s: Sequence[float]) -> float:
    return float(np.median(np.diff(ends_s)))


class _Sleeper:
    """A role whose work is to sleep."""

    def __init__(self) -> None:
        self._num_actions: dict[int, int] = {}

    def __call__(self, command: Command, tensors: Tensors) -> Answer:
        match command:
            case LoadBatch(batch_id=batch_id):
                self._num_actions[batch_id] = int(tensors["is_action"].sum())
            case CriticUpdate():
                time.sleep(CRITIC_S / (NUM_CRITIC_UPDATES + 1))
                return Answer(metrics={"critic/explained_variance": Metric(0.0)})
            case CriticValues(batch_id=batch_id):
                time.sleep(CRITIC_S / (NUM_CRITIC_UPDATES + 1))
                return Answer(tensors={"values": np.zeros(self._num_actions[batch_id], dtype=np.float32)})
            case ActorUpdate():
                time.sleep(ACTOR_S)
        return Answer()


ClientT = TypeVar("ClientT", ActorClient, CriticClient)


def _client(kind: type[ClientT], sleeper: _Sleeper) -> ClientT:
    channel = LocalChannel(kind.__name__, sleeper)
    return kind(channel=channel, num_data_parallel=1, max_tokens_per_micro_batch=2**20, timeout_s=TIMEOUT_S)


@dataclass
class _Outside:
    """In place of buffer, rollout service, publisher and reporter: always ready, never in the way."""

    trajectories: Sequence[Trajectory]

    def __post_init__(self) -> None:
        self.ends_s: list[float] = []  # of steps

    async def take(self, *_: Any, **__: Any) -> list[tuple[Trajectory, ...]]:
        return [(trajectory,) for trajectory in self.trajectories]

    async def watch(self, taking: Awaitable[_R]) -> _R:
        return await taking

    def metrics(self) -> dict[str, Metric]:
        return {"buffer/num_in_training": Metric(0.0)}

    def release(self, _: Any) -> None:
        pass

    async def publish(self, _: int) -> Any:
        await asyncio.sleep(0)
        return SimpleNamespace(metrics={})

    def step(self, *_: Any) -> None:
        self.ends_s.append(time.monotonic())
