"""Several parties at once, all of them or the first failure; and what is asked of the engines of a publish."""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any

import numpy as np

from megatron_sao.channel import Channel, ChannelError, ProtocolError, Score
from megatron_sao.config import PublishConfig
from megatron_sao.rollout.engine import Engine, EngineError
from megatron_sao.sync.verify import check_logprobs
from megatron_sao.types import WeightVersion

LOG = logging.getLogger(__name__)
Failure = (EngineError, ChannelError, ProtocolError, TimeoutError)
"""Of an engine or a role, as whoever talks to them sees it."""
CANCEL_S = 30.0  # the longest that one side may take to leave a group or a session


async def together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """All results, in their order, or the first failure: the others are cancelled then."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failures = [task.exception() for task in tasks if task.done() and task.exception()]
        for other in failures[1:]:
            LOG.warning("another side failed too: %s", other)
        for failure in failures[:1]:
            assert failure is not None
            raise failure
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def quietly(what: str, work: Awaitable[Any]) -> None:
    """For the way out of a failure: what goes wrong there must not hide the first cause."""
    try:
        async with asyncio.timeout(CANCEL_S):
            await work
    except Failure as error:
        LOG.warning("could not %s: %s", what, error or "no answer in time")


async def ask_for_life(engine: Engine) -> None:
    """Raises EngineError where an engine that failed does not answer yet. Asked to join a group, it would hear of that
    too late, and then wait for a store that is gone (SGLang: many minutes)."""
    try:
        await engine.end_update()
    except EngineError as error:
        if error.status is None:
            raise


async def compare_logprobs(
    engines: Sequence[Engine],
    actor: Channel,
    prompt: Sequence[int],
    version: WeightVersion,
    settings: PublishConfig,
) -> list[tuple[float, float]]:
    """Largest and mean difference [nats] between the actor's log-probs of `prompt` and each engine's.

    Raises:
        RuntimeError: above the tolerance, another version, or a prompt that was not computed anew.
    """
    scores = await together(*(engine.score(prompt) for engine in engines))
    tokens = {"token_ids": np.asarray(prompt, dtype=np.int32)}
    expected = (await actor.call(Score(), tokens, timeout_s=settings.timeout_s)).tensors["logprobs"]
    differences = []
    for engine, score in zip(engines, scores, strict=True):
        what = f"publish of version {version} to engine {engine.name}"
        if score.cached_tokens or score.version != version:
            raise RuntimeError(
                f"after {what} the fixed prompt was scored by version {score.version} with {score.cached_tokens} "
                "cached tokens: the flush or the version did not reach the engine"
            )
        tolerances = {"tolerance": settings.logprob_tolerance, "mean_tolerance": settings.logprob_mean_tolerance}
        differences.append(check_logprobs(score.logprobs, expected, what=what, **tolerances))
    return differences
