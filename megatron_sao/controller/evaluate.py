"""Held-out reward with a 95 % interval, and which weights it was measured with."""

import hashlib
import logging
import math
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from megatron_sao.rollout.engine import Engine, EngineError
from megatron_sao.types import Prompt, Reward, WeightVersion

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Mean reward over held-out prompts at temperature 1. `ci95` is the half-width of the 95 % interval (normal)."""

    reward: float
    ci95: float
    num_prompts: int
    weight_version: WeightVersion  # as the engine reports it
    weight_digest: str | None  # sha256 over the engine's per-tensor checksums; None where the server has none


def mean_and_ci95(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and 1.96 standard errors of it. Two values at least.

    >>> mean_and_ci95([0.0, 1.0, 0.0, 1.0])
    (0.5, 0.5658...)
    """
    if len(values) < 2:
        raise ValueError(f"an interval needs two values or more, not {len(values)}")
    return statistics.fmean(values), 1.96 * statistics.stdev(values) / math.sqrt(len(values))


async def evaluate(
    prompts: Sequence[Prompt],
    *,
    run_episodes: Callable[[Sequence[Prompt]], Awaitable[Sequence[Reward]]],
    engine: Engine,
    expected_version: WeightVersion,
) -> Evaluation:
    """Run every prompt once with the weights that `engine` serves now.

    Raises:
        RuntimeError: the engine serves another version than expected, before or after the episodes.
    """
    before = await _served_version(engine, expected_version)
    rewards = await run_episodes(prompts)
    await _served_version(engine, before)
    mean, ci95 = mean_and_ci95([reward.value for reward in rewards])
    evaluation = Evaluation(
        reward=mean,
        ci95=ci95,
        num_prompts=len(rewards),
        weight_version=before,
        weight_digest=await _digest(engine),
    )
    LOG.info(
        "evaluation of version %d (%s): reward %.3f +- %.3f over %d prompts",
        evaluation.weight_version,
        (evaluation.weight_digest or "no checksum")[:12],
        evaluation.reward,
        evaluation.ci95,
        evaluation.num_prompts,
    )
    return evaluation


async def _served_version(engine: Engine, expected: WeightVersion) -> WeightVersion:
    served = await engine.weight_version()
    if served != expected:
        raise RuntimeError(f"engine {engine.name} serves weight version {served}, the evaluation is of {expected}")
    return served


async def _digest(engine: Engine) -> str | None:
    try:
        checksums = await engine.checksum()
    except EngineError as error:
        LOG.warning("engine %s gives no checksum (%s): the evaluation is logged without a digest", engine.name, error)
        return None
    return hashlib.sha256(repr(sorted(checksums.items())).encode()).hexdigest()
