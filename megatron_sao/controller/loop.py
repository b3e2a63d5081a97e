"""The serial loop, the specification: one step after the other, while episodes run on.

    take ──> step ──> publish ──> release the slots ──> take ...          engines generate all the time

(The overlapped loop will stand beside it, over the same `step.py`.)
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_sao.config import CriticConfig
from megatron_sao.controller.clients import ActorClient, CriticClient
from megatron_sao.controller.publish import Publisher
from megatron_sao.controller.report import Reporter
from megatron_sao.controller.step import StepSettings, critic_step, sao_step
from megatron_sao.data.buffer import TrajectoryBuffer
from megatron_sao.metrics import Metric, Record, merge
from megatron_sao.rollout.service import RolloutService
from megatron_sao.types import Batch, Trajectory, WeightVersion


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the loops work with."""

    buffer: TrajectoryBuffer
    service: RolloutService
    actor: ActorClient
    critic: CriticClient
    publisher: Publisher
    reporter: Reporter
    settings: StepSettings
    episodes_per_step: int
    max_lag: int
    in_order: bool  # batches in admission order (deterministic runs), else in order of completion
    episode_timeout_s: float  # the longest that a step's last episode may take


async def critic_only_phase(parts: Parts, config: CriticConfig) -> None:
    """Value pre-training before the first actor step (docs/method.md).

    Consumes batches of the start policy, produces critic updates. Waits for episodes; unblocked by the rollout service.
    Ends after `critic_only_steps` once explained variance exceeds `min_explained_variance`.

    Raises:
        RuntimeError: `max_critic_only_steps` were not enough, unless the configuration says to go on.
    """
    step, explained = 0, None
    while step < config.critic_only_steps or _below(explained, config.min_explained_variance):
        if step == config.max_critic_only_steps:
            if config.continue_below_min_explained_variance:
                return
            raise RuntimeError(
                f"the critic explains {explained} of the returns' variance after {step} critic-only steps, "
                f"critic.min_explained_variance asks for {config.min_explained_variance}: raise "
                "critic.max_critic_only_steps, or set critic.continue_below_min_explained_variance"
            )
        start_s = time.monotonic()
        episodes, batch, rollout = await _next_batch(parts, batch_id=step, version=0)
        metrics = await critic_step(batch, critic=parts.critic, settings=parts.settings)
        parts.buffer.release(episodes)  # no new weights will come from it
        record = merge([rollout, metrics, {"time/step_s": Metric(time.monotonic() - start_s)}])
        explained = record["critic/explained_variance_before"]
        parts.reporter.critic_only_step(record)
        step += 1


async def serial_loop(parts: Parts, *, num_steps: int, first_batch_id: int) -> WeightVersion:
    """`num_steps` SAO steps from version 0. Returns the version that the engine serves at the end.

    Consumes finished episodes, produces weight versions. Waits for the buffer (deadline: an episode's), the roles and
    the publish; frees slots once the weights trained from them are live, which unblocks the rollout service.
    """
    for version in range(num_steps):
        start_s = time.monotonic()
        episodes, batch, rollout = await _next_batch(parts, batch_id=first_batch_id + version, version=version)
        wait_s = time.monotonic() - start_s
        trained = await sao_step(
            batch, version=version, actor=parts.actor, critic=parts.critic, settings=parts.settings
        )
        published = (await parts.publisher.publish(version + 1)).metrics
        parts.buffer.release(episodes)
        times = {"time/wait_s": Metric(wait_s), "time/step_s": Metric(time.monotonic() - start_s)}
        lag = {"lag/over_max_fraction": over_max_fraction(batch, version=version, max_lag=parts.max_lag)}
        parts.reporter.step(version, _record(version, [rollout, trained, published, times, lag]))
    return num_steps


async def _next_batch(
    parts: Parts, *, batch_id: int, version: WeightVersion
) -> tuple[Sequence[Sequence[Trajectory]], Batch, Mapping[str, Metric]]:
    episodes = await parts.service.watch(
        parts.buffer.take(
            parts.episodes_per_step, timeout_s=parts.episode_timeout_s, in_order=parts.in_order, version=version
        )
    )
    trajectories = tuple(trajectory for episode in episodes for trajectory in episode)
    batch = Batch.of(batch_id, trajectories)
    return episodes, batch, rollout_metrics(trajectories) | parts.service.metrics()


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, Metric]:
    """Means over the trajectories of a step, and its sizes."""
    rewards = [float(trajectory.reward.sum()) for trajectory in trajectories]
    tokens = [len(trajectory.token_ids) for trajectory in trajectories]
    actions = [trajectory.num_action_tokens for trajectory in trajectories]
    return {
        "rollout/reward_mean": Metric(float(np.mean(rewards))),
        "rollout/num_trajectories": Metric(len(trajectories)),
        "rollout/action_tokens": Metric(sum(actions)),
        "rollout/tokens": Metric(sum(tokens)),
        "rollout/tokens_max": Metric(max(tokens)),
        "rollout/turns_mean": Metric(float(np.mean([len(trajectory.turns) for trajectory in trajectories]))),
    }


def over_max_fraction(batch: Batch, *, version: WeightVersion, max_lag: int) -> Metric:
    """Share of the batch's action tokens whose lag exceeds `max_lag` (kept: DIS is the guard)."""
    lag_A = version - batch.version[batch.is_action]
    return Metric(float((lag_A > max_lag).mean()))


def _below(explained: float | None, minimum: float | None) -> bool:
    return minimum is not None and (explained is None or explained <= minimum)


def _record(version: WeightVersion, parts: Sequence[Mapping[str, Metric]]) -> Record:
    return {"weight_version": version + 1, **merge(parts)}
