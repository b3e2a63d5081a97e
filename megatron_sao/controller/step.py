"""One SAO step over a batch: the method on one page (docs/method.md; arXiv 2607.07508 eq. 1-5).

    batch ──> critic: K updates towards the returns ──> fresh values ──> skip-observation GAE ──> actor: DIS update

Legend: A action tokens of the batch, in the batch's order.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

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


async def sao_step(
    batch: Batch, *, version: WeightVersion, actor: ActorClient, critic: CriticClient, settings: StepSettings
) -> Metrics:
    """Train both models on `batch`, the actor from `version`; its weights are `version + 1` afterwards.

    Consumes a batch, produces metrics. Waits for both roles; every command has its role's deadline.
    """
    algorithm = settings.algorithm
    start_s = time.monotonic()
    _, packing = await asyncio.gather(critic.load(batch), actor.load(batch))

    values_A = await critic.values(batch) if settings.values_before_updates else None
    targets_A = batch_targets(batch, values_A, gamma=algorithm.gamma, lam=algorithm.lambda_critic)
    critic_metrics = [await critic.update(batch, targets_A) for _ in range(settings.num_critic_updates)]
    if values_A is None:
        values_A = await critic.values(batch)
    critic_s = time.monotonic() - start_s

    advantages_A = batch_advantages(
        batch, values_A, gamma=algorithm.gamma, alpha=algorithm.alpha, whiten_advantages=algorithm.whiten_advantages
    )
    if algorithm.advantage == "zero":
        advantages_A = 0.0 * advantages_A
    policy_metrics = await actor.update(batch, advantages_A, version=version)

    await asyncio.gather(critic.drop(batch), actor.drop(batch))
    times = {
        "time/critic_s": Metric(critic_s),
        "time/actor_s": Metric(time.monotonic() - start_s - critic_s),
    }
    return {**packing, **policy_metrics, **of_updates(critic_metrics), **times}


async def critic_step(batch: Batch, *, critic: CriticClient, settings: StepSettings) -> Metrics:
    """One step of the critic-only phase: K updates on a fresh batch. The policy and its version stay."""
    algorithm = settings.algorithm
    await critic.load(batch)
    values_A = await critic.values(batch) if settings.values_before_updates else None
    targets_A = batch_targets(batch, values_A, gamma=algorithm.gamma, lam=algorithm.lambda_critic)
    metrics = [await critic.update(batch, targets_A) for _ in range(settings.num_critic_updates)]
    await critic.drop(batch)
    return of_updates(metrics)


def of_updates(updates: list[Metrics]) -> dict[str, Metric]:
    """The metrics of a step's K critic updates: the last update's, and explained variance as it was before the first.

    `critic/explained_variance_before` comes from the first update's own forward, so it costs no pass of its own.
    """
    metrics = dict(updates[-1])
    metrics["critic/explained_variance_after"] = metrics.pop("critic/explained_variance")
    metrics["critic/explained_variance_before"] = updates[0]["critic/explained_variance"]
    return metrics
