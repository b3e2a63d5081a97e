"""The buckets of a publish, in a pipeline over the engines and the actor.

    actor     send 0 ║ prepare 1    send 1 ║ prepare 2    ...
    engines          receive 0 ── load 0 ── receive 1 ── load 1 ...

Bucket k+1 is announced to the engines as soon as k is sent, while they still load k, so that they go from one to the
next without a round trip. The last one, which brings the version, is announced when all others are loaded: engines that
failed at one never name the new version.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_sao.channel import Channel, ProtocolError, PublishSend
from megatron_sao.controller.engines import together
from megatron_sao.controller.phases import Phases
from megatron_sao.rollout.engine import Engine
from megatron_sao.types import PublishPlan, WeightVersion

LOG = logging.getLogger(__name__)
ANSWER_S = 45.0
"""The actor bounds its commands by itself; its answer may come this much later: a rank that failed waits for the others
for `Meeting.grace_s` (30 s) before it can say why."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """All buckets of a plan, into engines that are paused and have a session open."""

    engines: Sequence[Engine]
    actor: Channel
    plan: PublishPlan
    groups: Mapping[int, str]  # by source
    version: WeightVersion
    flush: bool  # the prefix cache, with the last bucket
    timeout_s: float  # of each bucket
    phases: Phases

    async def run(self) -> None:
        self.phases.phase = "load"
        times = await pipeline(len(self.plan.buckets), load=self._load, send=self._send)
        for phase, seconds in seconds_of(times).items():
            self.phases.add(phase, seconds)

    async def _load(self, index: int) -> None:
        bucket, last = self.plan.buckets[index], index == len(self.plan.buckets) - 1
        with self.phases.at("load", index):
            await together(
                *(
                    engine.load_bucket(
                        bucket,
                        group_name=self.groups[bucket.source],
                        version=self.version if last else None,
                        flush=self.flush and last,
                        timeout_s=2 * self.timeout_s + ANSWER_S,  # the bucket before may still be loading
                    )
                    for engine in self.engines
                )
            )

    async def _send(self, index: int) -> float:
        start_s, num_bytes = time.monotonic(), self.plan.buckets[index].num_bytes
        with self.phases.at("send", index):
            command = PublishSend(bucket=index, timeout_s=self.timeout_s)
            sent = (await self.actor.call(command, timeout_s=self.timeout_s + ANSWER_S)).data
            if sent["num_bytes"] != num_bytes:
                raise ProtocolError(
                    f"the actor sent {sent['num_bytes']} bytes of bucket {index}, planned were {num_bytes}"
                )
        for phase in ("gather", "flatten"):
            self.phases.add(phase, float(str(sent[f"{phase}_s"])))
        return start_s + float(str(sent["send_s"]))


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketTimes:
    """Of `time.monotonic`."""

    announced_s: float
    sent_s: float  # the broadcast was over
    loaded_s: float  # by all engines


async def pipeline(
    num_buckets: int,
    *,
    load: Callable[[int], Coroutine[Any, Any, None]],
    send: Callable[[int], Coroutine[Any, Any, float]],
) -> list[BucketTimes]:
    """Run `load(k)` (the engines) and `send(k)` (the actor; returns the time at which the broadcast was over).

    Raises the first failure; what still runs is cancelled and awaited.
    """
    announced_s: list[float] = []
    loading: list[asyncio.Task[float]] = []
    sending: list[asyncio.Task[float]] = []

    async def loaded(index: int) -> float:
        await load(index)
        return time.monotonic()

    try:
        for index in range(num_buckets):
            before = loading[-1:]
            if index == num_buckets - 1:
                await _all_of(before, watched=before)
            announced_s.append(time.monotonic())
            loading.append(asyncio.create_task(loaded(index)))
            sending.append(asyncio.create_task(send(index)))
            needed = [*before, sending[-1]]
            await _all_of(needed, watched=[*needed, loading[-1]])
        await _all_of(loading, watched=loading)
        return [
            BucketTimes(announced_s=start_s, sent_s=sent.result(), loaded_s=end.result())
            for start_s, sent, end in zip(announced_s, sending, loading, strict=True)
        ]
    finally:
        tasks = [*loading, *sending]
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                LOG.info("a side of the pipeline ended with: %s", result)


def seconds_of(times: Sequence[BucketTimes]) -> Mapping[str, float]:
    """Seconds of the whole pipeline: send (engines receive), load, prepare (they wait for the actor)."""
    send_s = load_s = prepare_s = 0.0
    free_s = times[0].announced_s
    for bucket in times:
        start_s = max(free_s, bucket.announced_s)
        prepare_s += start_s - free_s
        sent_s = min(max(bucket.sent_s, start_s), bucket.loaded_s)
        send_s += sent_s - start_s
        load_s += bucket.loaded_s - sent_s
        free_s = bucket.loaded_s
    return {"send": send_s, "load": load_s, "prepare": prepare_s}


async def _all_of(needed: Sequence[asyncio.Task[Any]], *, watched: Sequence[asyncio.Task[Any]]) -> None:
    """Wait for `needed`, or for the first failure of `watched`."""
    while True:
        for task in watched:
            if task.done():
                task.result()
        pending = [task for task in watched if not task.done()]
        if not any(task in pending for task in needed):
            return
        await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
