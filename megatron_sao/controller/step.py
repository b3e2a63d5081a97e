"""One SAO step over a batch: the method on one page (docs/method.md; arXiv 2607.07508 eq. 1-5).

    batch ──> critic: K updates towards the returns ──> fresh values ──> skip-observation GAE ──> actor: DIS update
              `critic_part`                                              `actor_part`

The loops run the two parts one after the other, or side by side on two batches. Each part loads the batch into its
role and drops it. Legend: A action tokens of the batch, in the batch's order.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_sao.algorithm.advantage import batch_advantages, batch_targets
from megatron_sao.config import AlgorithmConfig, CriticConfig
from megatron_sao.controller.clients import ActorClient, CriticClient
from megatron_sao.metrics import Metric
from megatron_sao.types import Batch, WeightVersion

Metrics = Mapping[str, Metric]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """What a step needs of the configuration."""

    algorithm: AlgorithmConfig
    num_critic_updates: int  # K
    values_before_updates: bool

    @classmethod
    def of(cls, algorithm: AlgorithmConfig, critic: CriticConfig) -> "StepSettings":
        before = critic.values == "before_updates"
        return cls(algorithm=algorithm, num_critic_updates=critic.num_updates, values_before_updates=before)


@dataclass(frozen=True, kw_only=True, slots=True)
class Valued:
    """What the critic hands to the actor."""

    batch: Batch
    values_A: NDArray[np.float32]  # of this batch's action tokens
    metrics: Metrics  # of the critic's part


async def sao_step(
    batch: Batch, *, version: WeightVersion, actor: ActorClient, critic: CriticClient, settings: StepSettings
) -> Metrics:
    """Train both models on `batch`, the actor from `version`; its weights are `version + 1` afterwards.

    The method in two lines. The loops take the two parts one by one, with the waits and the publish between them.
    """
    valued = await critic_part(batch, critic=critic, settings=settings)
    return await actor_part(valued, version=version, actor=actor, settings=settings)


async def critic_part(batch: Batch, *, critic: CriticClient, settings: StepSettings) -> Valued:
    """K updates of the critic on `batch`, then its values (or values first, by the settings).

    Consumes a batch, produces a valued one. Waits for the critic; every command has its deadline.
    """
    start_s = time.monotonic()
    await critic.load(batch)
    values_A, metrics = await _update_critic(batch, critic, settings)
    if values_A is None:
        values_A = await critic.values(batch)
    await critic.drop(batch)
    times = {"time/critic_s": Metric(time.monotonic() - start_s)}
    return Valued(batch=batch, values_A=values_A, metrics={**metrics, **times})


async def actor_part(valued: Valued, *, version: WeightVersion, actor: ActorClient, settings: StepSettings) -> Metrics:
    """Advantages of a valued batch, and one DIS update of the weights `version`. The metrics of both parts.

    Consumes a valued batch, produces the weights `version + 1`. Waits for the actor; every command has its deadline.
    """
    algorithm, batch, start_s = settings.algorithm, valued.batch, time.monotonic()
    advantages_A = batch_advantages(
        batch,
        valued.values_A,
        gamma=algorithm.gamma,
        alpha=algorithm.alpha,
        whiten_advantages=algorithm.whiten_advantages,
    )
    if algorithm.advantage == "zero":
        advantages_A = 0.0 * advantages_A
    packing = await actor.load(batch)
    policy = await actor.update(batch, advantages_A, version=version)
    await actor.drop(batch)
    return {**valued.metrics, **packing, **policy, "time/actor_s": Metric(time.monotonic() - start_s)}


async def critic_step(batch: Batch, *, critic: CriticClient, settings: StepSettings) -> Metrics:
    """One step of the critic-only phase: K updates on a fresh batch. The policy and its version stay."""
    await critic.load(batch)
    _, metrics = await _update_critic(batch, critic, settings)
    await critic.drop(batch)
    return metrics


async def _update_critic(
    batch: Batch, critic: CriticClient, settings: StepSettings
) -> tuple[NDArray[np.float32] | None, Metrics]:
    """K updates, and the values from before them where the settings ask for those."""
    algorithm = settings.algorithm
    values_A = await critic.values(batch) if settings.values_before_updates else None
    targets_A = batch_targets(batch, values_A, gamma=algorithm.gamma, lam=algorithm.lambda_critic)
    return values_A, of_updates([await critic.update(batch, targets_A) for _ in range(settings.num_critic_updates)])


def of_updates(updates: list[Metrics]) -> dict[str, Metric]:
    """The metrics of a step's K critic updates: the last update's, and explained variance as it was before the first.

    `critic/explained_variance_before` comes from the first update's own forward, so it costs no pass of its own.
    """
    metrics = dict(updates[-1])
    metrics["critic/explained_variance_after"] = metrics.pop("critic/explained_variance")
    metrics["critic/explained_variance_before"] = updates[0]["critic/explained_variance"]
    return metrics
