"""A step does what the method says, in its order. The roles here are fakes behind the in-memory channel."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from megatron_sao.channel import Answer, Command, LocalChannel, Tensors
from megatron_sao.config import AlgorithmConfig
from megatron_sao.controller.clients import ActorClient, CriticClient
from megatron_sao.controller.loop import over_max_fraction, rollout_metrics
from megatron_sao.controller.step import StepSettings, critic_step, sao_step
from megatron_sao.metrics import Metric, merge
from megatron_sao.types import Batch, Trajectory
from tests.test_types import trajectory


@dataclass
class FakeRole:
    """Records what it is asked; its critic explains 0.1 more with every update and values every state 0.25."""

    log: list[str] = field(default_factory=list)
    tensors: dict[str, Any] = field(default_factory=dict)
    num_updates: int = 0

    def __call__(self, command: Command, tensors: Tensors) -> Answer:
        self.log.append(command.name)
        self.tensors |= {f"{command.name}/{name}": np.array(array) for name, array in tensors.items()}
        match command.name:
            case "critic_values":
                return Answer(tensors={"values": np.full(6, 0.25, np.float32)})
            case "critic_update":
                self.num_updates += 1
                return Answer(metrics={"critic/explained_variance": Metric(0.1 * self.num_updates)})
            case "actor_update":
                return Answer(metrics={"policy/loss": Metric(1.0)})
        return Answer()


@pytest.fixture
def batch() -> Batch:
    return Batch.of(0, (trajectory(), trajectory(id="2" * 32)))


def settings(*, k: int = 2, before: bool = False, **changes: Any) -> StepSettings:
    algorithm = AlgorithmConfig(eps_low=0.3, eps_high=5.0, **changes)
    return StepSettings(algorithm=algorithm, num_critic_updates=k, values_before_updates=before)


async def step(batch: Batch, config: StepSettings) -> tuple[FakeRole, FakeRole, dict[str, float | None]]:
    actor, critic = FakeRole(), FakeRole()
    limits = {"num_data_parallel": 1, "max_tokens_per_micro_batch": 64, "timeout_s": 10.0}
    metrics = await sao_step(
        batch,
        version=1,
        actor=ActorClient(channel=LocalChannel("actor", actor), **limits),
        critic=CriticClient(channel=LocalChannel("critic", critic), **limits),
        settings=config,
    )
    return actor, critic, merge([metrics])


async def test_the_critic_updates_k_times_before_its_values_are_used(batch: Batch) -> None:
    actor, critic, metrics = await step(batch, settings(k=2))
    assert critic.log == ["load_batch", "critic_update", "critic_update", "critic_values", "drop_batch"]
    assert actor.log == ["load_batch", "actor_update", "drop_batch"]
    assert {"policy/loss", "packing/waste_fraction", "time/critic_s", "time/actor_s"} <= set(metrics)
    assert metrics["critic/explained_variance_before"] == pytest.approx(0.1)
    assert metrics["critic/explained_variance_after"] == pytest.approx(0.2)


async def test_the_other_order_reads_values_first_and_only_once(batch: Batch) -> None:
    _, critic, _ = await step(batch, settings(k=1, before=True))
    assert critic.log == ["load_batch", "critic_values", "critic_update", "drop_batch"]


async def test_targets_are_the_returns_and_advantages_skip_observations(batch: Batch) -> None:
    actor, critic, _ = await step(batch, settings(k=1))
    assert critic.tensors["critic_update/targets"].tolist() == [1.0] * 6
    # l = 3, alpha = 1.5: lambda = 1 - 1/4.5. Values are equal, so only the last token's delta, 1 - 0.25, is not 0.
    lam = 1 - 1 / 4.5
    expected = [0.75 * lam**2, 0.75 * lam, 0.75] * 2
    assert actor.tensors["actor_update/advantages"] == pytest.approx(expected, rel=1e-6)


async def test_the_zero_advantage_control_sends_zeros_and_nothing_else_changes(batch: Batch) -> None:
    actor, critic, _ = await step(batch, settings(k=1, advantage="zero"))
    assert actor.tensors["actor_update/advantages"].tolist() == [0.0] * 6
    assert actor.log == ["load_batch", "actor_update", "drop_batch"]
    assert "critic_values" in critic.log


async def test_the_critic_only_step_leaves_the_actor_alone(batch: Batch) -> None:
    role = FakeRole()
    critic = CriticClient(
        channel=LocalChannel("critic", role), num_data_parallel=1, max_tokens_per_micro_batch=64, timeout_s=10.0
    )
    await critic_step(batch, critic=critic, settings=settings(k=2))
    assert role.log == ["load_batch", "critic_update", "critic_update", "drop_batch"]


def test_lag_over_the_maximum_counts_action_tokens_only(batch: Batch) -> None:
    # versions of the actions: 0, 0, 1 twice; training from version 2 gives lags 2, 2, 1
    assert over_max_fraction(batch, version=2, max_lag=1) == Metric(pytest.approx(4 / 6))
    assert over_max_fraction(batch, version=2, max_lag=2) == Metric(0.0)


def test_rollout_metrics_are_means_over_trajectories() -> None:
    losing: Trajectory = trajectory(reward=np.zeros(5, np.float32))
    record = merge([rollout_metrics((trajectory(), losing))])
    assert record["rollout/reward_mean"] == 0.5
    assert (record["rollout/action_tokens"], record["rollout/tokens"], record["rollout/turns_mean"]) == (6, 10, 2)
