"""The serial loop, the specification, and the overlapped one beside it. Engines generate all the time in both.

    serial        take 0 ─> critic 0 ─> actor 0, publish, release ─> take 1 ─> critic 1 ─> actor 1, publish, release ...

    overlapped    take 0 ─> critic 0 ─> actor 0, publish, release ─> actor 1, publish, release ─> ...
                                        take 1 ─> critic 1           take 2 ─> critic 2

The same two parts of `step.py`: given the same batches, both loops make identical updates. The overlap costs slots:
two batches hold theirs, of (max_lag + 1) * trajectories_per_step, so that engines have new episodes to begin during an
actor update only from max_lag = 2 on. With max_lag = 0 batch n+1 begins when n is released, and nothing overlaps.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_sao.config import CriticConfig
from megatron_sao.controller.clients import ActorClient, CriticClient
from megatron_sao.controller.engines import together
from megatron_sao.controller.publish import Publisher
from megatron_sao.controller.report import Reporter
from megatron_sao.controller.step import StepSettings, Valued, actor_part, critic_part, critic_step
from megatron_sao.data.buffer import TrajectoryBuffer
from megatron_sao.metrics import Metric, Record, merge
from megatron_sao.rollout.service import RolloutService
from megatron_sao.types import Batch, Trajectory, WeightVersion

Metrics = Mapping[str, Metric]


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
    step_timeout_s: float  # the same, after a whole step and publish that first have to free its slot


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A valued batch that waits for the actor, and holds its slots."""

    episodes: Sequence[Sequence[Trajectory]]
    valued: Valued
    rollout: Metrics
    taken_s: float  # when, on the monotonic clock


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
        episodes, batch, rollout = await _next_batch(parts, batch_id=step, version=0, timeout_s=parts.episode_timeout_s)
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
        free_s = time.monotonic()
        ready = await _value(parts, first_batch_id + version, version=version, timeout_s=parts.episode_timeout_s)
        await _train(parts, ready, version=version, free_s=free_s)
    return num_steps


async def overlapped_loop(parts: Parts, *, num_steps: int, first_batch_id: int) -> WeightVersion:
    """The same steps as `serial_loop`; the critic is one batch ahead of the actor, and never two.

    Consumes finished episodes, produces weight versions. The critic's side waits for the buffer (deadline: an
    episode's after a whole step's, since it may have to wait for the actor's release) and for the actor to take over
    what it has valued; the actor's side waits for a valued batch, the publish and its own commands; it frees slots
    once their weights are live, which unblocks the rollout service and with it the critic. The first failure of
    either side ends the other and is raised.
    """
    free_s = time.monotonic()
    ready = await _value(parts, first_batch_id, version=0, timeout_s=parts.episode_timeout_s)
    for version in range(num_steps - 1):
        using = version + 1  # the update that the batch taken ahead is for: its lag counts from there
        training = _train(parts, ready, version=version, free_s=free_s)
        ahead = _value(parts, first_batch_id + using, version=using, timeout_s=parts.step_timeout_s)
        free_s, ready = await together(training, ahead)
    await _train(parts, ready, version=num_steps - 1, free_s=free_s)
    return num_steps


async def _value(parts: Parts, batch_id: int, *, version: WeightVersion, timeout_s: float) -> Ready:
    """The critic's side of a step: take a batch for the update of `version`, train the critic on it, value it."""
    start_s = time.monotonic()
    episodes, batch, rollout = await _next_batch(parts, batch_id=batch_id, version=version, timeout_s=timeout_s)
    taken_s = time.monotonic()
    valued = await critic_part(batch, critic=parts.critic, settings=parts.settings)
    times = {"time/take_s": Metric(taken_s - start_s)}
    return Ready(episodes=episodes, valued=valued, rollout={**rollout, **times}, taken_s=taken_s)


async def _train(parts: Parts, ready: Ready, *, version: WeightVersion, free_s: float) -> float:
    """The actor's side of a step: update, publish, release, record. Returns the time at which the actor is free.

    `free_s`: when it was free before.
    """
    start_s = time.monotonic()
    trained = await actor_part(ready.valued, version=version, actor=parts.actor, settings=parts.settings)
    published = (await parts.publisher.publish(version + 1)).metrics
    held = parts.buffer.metrics()["buffer/num_in_training"]
    parts.buffer.release(ready.episodes)
    end_s = time.monotonic()
    batch = ready.valued.batch
    own = {
        "time/wait_s": Metric(start_s - free_s),  # of the actor, for a valued batch
        "time/step_s": Metric(end_s - free_s),  # wait, actor and publish
        "overlap/ahead_s": Metric(start_s - ready.taken_s),  # the batch held its slots before the actor had it
        "overlap/held_slots": held,  # by taken batches, when these weights are live
        "lag/over_max_fraction": over_max_fraction(batch, version=version, max_lag=parts.max_lag),
    }
    parts.reporter.step(version, _record(version, [ready.rollout, trained, published, own]))
    return end_s


async def _next_batch(
    parts: Parts, *, batch_id: int, version: WeightVersion, timeout_s: float
) -> tuple[Sequence[Sequence[Trajectory]], Batch, Metrics]:
    taking = parts.buffer.take(parts.episodes_per_step, timeout_s=timeout_s, in_order=parts.in_order, version=version)
    try:
        episodes = await parts.service.watch(taking)
    except TimeoutError as error:
        raise TimeoutError(f"no batch {batch_id} for the update of version {version}: {error}") from error
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
