"""A publish: the engine goes from one weight version to the next, or is known to be in no version at all.

    plan ──> connect (once) ──> pause ──> begin ──> [engine loads bucket || actor sends bucket] ... ──> end ──> resume

Consumes the actor's weights, produces an engine that serves them. Waits for the engine and the actor; every phase has
a deadline. On any failure both sides leave the group, the session is ended, the engine stays paused and counts as
unknown (it may hold half of the new weights): it serves nothing before a publish of all tensors has succeeded. The
actor's version stands.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_sao.channel import (
    Answer,
    Channel,
    ChannelError,
    Command,
    ProtocolError,
    PublishJoin,
    PublishLeave,
    PublishListen,
    PublishPlanning,
    PublishSend,
    Score,
    publish_plan_from,
)
from megatron_sao.config import PublishConfig
from megatron_sao.metrics import Metric
from megatron_sao.rollout.engine import Engine, EngineError
from megatron_sao.sync.plan import check_digest
from megatron_sao.sync.verify import check_logprobs, check_reset, check_returned
from megatron_sao.types import PublishPlan, WeightVersion

LOG = logging.getLogger(__name__)
Failure = (EngineError, ChannelError, ProtocolError, TimeoutError)
Check = Callable[[], Awaitable[None]]

_NUM_ATTEMPTS = 2
_CANCEL_S = 30.0  # the longest that one side may take to leave a group or a session
_ANSWER_S = 5.0  # the actor bounds a send by itself; its answer may come this much later


class PublishError(RuntimeError):
    """A publish failed; `phase` and `bucket` (None outside of load) say where. The engine is paused and unknown."""

    def __init__(self, what: str, phase: str, bucket: int | None, reason: str) -> None:
        where = phase if bucket is None else f"{phase}, bucket {bucket}"
        super().__init__(f"{what} failed in phase {where}: {reason}")
        self.what, self.phase, self.bucket, self.reason = what, phase, bucket, reason

    def after(self, earlier: "PublishError | None") -> "PublishError":
        """The same error, which also says why the attempt before it failed."""
        reason = self.reason if earlier is None else f"{self.reason}; the attempt before: {earlier}"
        return PublishError(self.what, self.phase, self.bucket, reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishReport:
    """What a publish did. `metrics`: publish/{total,pause,gather,flatten,send,load,resume,verify}_s, /bytes, ..."""

    version: WeightVersion
    full: bool
    num_attempts: int
    num_tensors: int
    num_bytes: int
    metrics: Mapping[str, Metric]


@dataclass(slots=True)
class _Trace:
    """Where an attempt is, and what it took so far."""

    phase: str = "plan"
    bucket: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def during(self, phase: str, bucket: int | None = None) -> Iterator[None]:
        self.phase, self.bucket = phase, bucket
        start_s = time.monotonic()
        yield
        self.add(phase, time.monotonic() - start_s)

    def add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds


class Publisher:
    """Publishes the weights of one actor to one engine. One publish at a time.

    `engine_ranks` is the engine's tensor parallel size. `fixed_prompt` is scored by both sides after each publish
    (None: not, for engines without a model).
    """

    def __init__(
        self,
        engine: Engine,
        actor: Channel,
        settings: PublishConfig,
        *,
        engine_ranks: int,
        fixed_prompt: Sequence[int] | None,
    ) -> None:
        self._engine, self._actor, self._settings = engine, actor, settings
        self._world_size = 1 + engine_ranks
        self._fixed_prompt = fixed_prompt
        self._group: str | None = None
        self._group_is_warm = False  # it has carried a bucket: NCCL compiles with the first
        self._num_groups = 0
        self._known = True  # the engine holds exactly the weights of the version that it names

    @property
    def engine_is_known(self) -> bool:
        return self._known

    async def first_publish(self, version: WeightVersion = 0) -> PublishReport:
        """Publish the weights that the engine has loaded from disk itself, and see every one of them arrive.

        Raises:
            RuntimeError: a tensor did not come back as it was loaded (named), or the log-probs differ.
            PublishError: as `publish`.
        """
        if not self._settings.verify_first:
            return await self.publish(version, full=True)
        try:
            loaded = await self._engine.checksum()
        except EngineError as error:
            if error.status is None:
                raise
            LOG.warning("the first publish is verified by the log-probs of a fixed prompt only: %s", error)
            return await self.publish(version, full=True)
        self._known = False
        await self._engine.pause("retract")
        await self._engine.reset_tensors()
        kept = check_reset(loaded, await self._engine.checksum())
        if kept:
            LOG.warning("the reset left %d tensors as they were, these are not verified: %s", len(kept), kept[:8])

        async def every_tensor_is_back() -> None:
            check_returned(loaded, await self._engine.checksum())
            LOG.info("first publish: all %d checksums are those of the load from disk", len(loaded))

        return await self._publish(version, full=True, check=every_tensor_is_back)

    async def publish(self, version: WeightVersion, *, full: bool = False) -> PublishReport:
        """Bring the engine to `version`: what training can change, or everything (`full`, or an unknown engine).

        Raises:
            PublishError: two attempts failed, the second with a new group and all tensors; the engine stays paused.
            RuntimeError: the log-probs of the fixed prompt differ by more than the tolerance; it is paused then too.
        """
        return await self._publish(version, full=full, check=None)

    async def close(self) -> None:
        """Leave the group on both sides. What goes wrong is logged."""
        await self._leave()

    async def _publish(self, version: WeightVersion, *, full: bool, check: Check | None) -> PublishReport:
        start_s = time.monotonic()
        num_attempts, trace = 1, _Trace()
        first: PublishError | None = None
        while True:
            whole = full or not self._known
            try:
                plan = await self._attempt(version, full=whole, check=check, trace=trace)
                break
            except PublishError as error:
                if num_attempts == _NUM_ATTEMPTS:
                    raise error.after(first) from error.__cause__
                first = error
                LOG.warning("%s; one more attempt, with a new group and all tensors", error)
            num_attempts, trace = num_attempts + 1, _Trace()
        trace.add("total", time.monotonic() - start_s)
        with trace.during("verify"):
            difference = await self._verify(version)
        return PublishReport(
            version=version,
            full=whole,
            num_attempts=num_attempts,
            num_tensors=sum(len(bucket.tensors) for bucket in plan.buckets),
            num_bytes=plan.num_bytes,
            metrics=_metrics(trace, plan, num_attempts) | difference,
        )

    async def _attempt(self, version: WeightVersion, *, full: bool, check: Check | None, trace: _Trace) -> PublishPlan:
        self._known = False
        try:
            with trace.during("plan"):
                plan = await self._plan(full)
            if self._group is None:
                with trace.during("connect"):
                    await self._connect()
            pause_s = time.monotonic()
            with trace.during("pause"):
                await self._engine.pause("retract")
            await self._transfer(version, plan, trace)
            if check is not None:
                await check()
            with trace.during("resume"):
                await self._engine.resume()
            trace.add("paused", time.monotonic() - pause_s)
        except Failure as error:
            what = f"publish of version {version} ({'all tensors' if full else 'trained tensors'})"
            await self._leave()
            await self._end_session()
            reason = str(error) or type(error).__name__
            raise PublishError(f"{what} to engine {self._engine.name}", trace.phase, trace.bucket, reason) from error
        self._known = True
        return plan

    async def _transfer(self, version: WeightVersion, plan: PublishPlan, trace: _Trace) -> None:
        with trace.during("begin"):
            await self._engine.begin_update()
        for index in range(len(plan.buckets)):
            trace.phase, trace.bucket = "load", index
            await self._bucket(version, plan, index, trace)
        with trace.during("end"):
            await self._engine.end_update()
            served = await self._engine.weight_version()
        if served != version:
            raise EngineError(self._engine.name, "weight_version", None, f"it says {served} after this publish")

    async def _plan(self, full: bool) -> PublishPlan:
        command = PublishPlanning(full=full, bucket_bytes=self._settings.bucket_bytes)
        answer = await self._actor.call(command, timeout_s=self._settings.timeout_s)
        return check_digest(publish_plan_from(answer.data))

    async def _connect(self) -> None:
        timeout_s = self._settings.timeout_s if self._num_groups else self._settings.first_timeout_s
        endpoint = (await self._actor.call(PublishListen(), timeout_s=timeout_s)).data
        self._num_groups += 1
        self._group = f"publish-{uuid.uuid4().hex[:12]}"
        self._group_is_warm = False
        join = self._engine.join_group(
            address=str(endpoint["address"]),
            port=int(str(endpoint["port"])),
            rank_offset=1,
            world_size=self._world_size,
            group_name=self._group,
            backend=str(endpoint["backend"]),
            timeout_s=timeout_s,
        )
        command = PublishJoin(group_name=self._group, world_size=self._world_size, timeout_s=timeout_s)
        await _together(join, self._call(command, timeout_s))

    async def _bucket(self, version: WeightVersion, plan: PublishPlan, index: int, trace: _Trace) -> None:
        """One bucket: the engine receives it while the actor sends it. The last one brings the version and flushes."""
        assert self._group is not None
        last = index == len(plan.buckets) - 1
        timeout_s = self._settings.timeout_s if self._group_is_warm else self._settings.first_timeout_s
        start_s = time.monotonic()
        load = self._engine.load_bucket(
            plan.buckets[index],
            group_name=self._group,
            version=version if last else None,
            flush=last,
            timeout_s=timeout_s + _ANSWER_S,
        )
        sent = (await _together(load, self._call(PublishSend(bucket=index, timeout_s=timeout_s), timeout_s))).data
        if sent["bytes"] != plan.buckets[index].num_bytes:
            raise ProtocolError(f"the actor sent {sent['bytes']} bytes, planned were {plan.buckets[index].num_bytes}")
        self._group_is_warm = True
        parts = {phase: float(str(sent[f"{phase}_s"])) for phase in ("gather", "flatten", "send")}
        parts["load"] = max(0.0, time.monotonic() - start_s - sum(parts.values()))
        for phase, seconds in parts.items():
            trace.add(phase, seconds)

    async def _call(self, command: Command, timeout_s: float) -> Answer:
        return await self._actor.call(command, timeout_s=timeout_s + _ANSWER_S)

    async def _verify(self, version: WeightVersion) -> dict[str, Metric]:
        """Log-probs of the fixed prompt on both sides. A publish that fails here is not repeated: it is no accident."""
        if self._fixed_prompt is None:
            return {}
        what = f"publish of version {version} to engine {self._engine.name}"
        try:
            largest, mean = await self._logprob_difference(version, self._fixed_prompt, what)
        except Failure as error:
            await self._withdraw()
            raise PublishError(what, "verify", None, str(error)) from error
        except RuntimeError:
            await self._withdraw()
            raise
        return {"publish/logprob_max_difference": Metric(largest), "publish/logprob_mean_difference": Metric(mean)}

    async def _logprob_difference(
        self, version: WeightVersion, prompt: Sequence[int], what: str
    ) -> tuple[float, float]:
        tokens = {"token_ids": np.asarray(prompt, dtype=np.int32)}
        score = await self._engine.score(prompt)
        if score.cached_tokens or score.version != version:
            raise RuntimeError(
                f"after {what} the fixed prompt was scored by version {score.version} with {score.cached_tokens} "
                "cached tokens: the flush or the version did not reach the engine"
            )
        answer = await self._actor.call(Score(), tokens, timeout_s=self._settings.timeout_s)
        return check_logprobs(
            score.logprobs,
            answer.tensors["logprobs"],
            tolerance=self._settings.logprob_tolerance,
            mean_tolerance=self._settings.logprob_mean_tolerance,
            what=what,
        )

    async def _withdraw(self) -> None:
        """Stop an engine that serves other weights than it says."""
        self._known = False
        await _quietly("pause the engine", self._engine.pause("retract"))

    async def _leave(self) -> None:
        """Both sides at once: whichever waits for the other is woken by the other's leaving."""
        group, self._group = self._group, None
        if group is None:
            return
        await asyncio.gather(
            _quietly("leave the group on the engine", self._engine.leave_group(group)),
            _quietly("leave the group on the actor", self._actor.call(PublishLeave(), timeout_s=_CANCEL_S)),
        )

    async def _end_session(self) -> None:
        await _quietly("end the engine's update session", self._engine.end_update())


async def _together(engine: Coroutine[Any, Any, None], actor: Coroutine[Any, Any, Answer]) -> Answer:
    """Both, or the first failure: the other one is given up then (leaving the group ends it on its side)."""
    load, send = asyncio.ensure_future(engine), asyncio.ensure_future(actor)
    try:
        await asyncio.wait((load, send), return_when=asyncio.FIRST_EXCEPTION)
        failures = [task.exception() for task in (load, send) if task.done() and task.exception()]
        if len(failures) == 2:
            LOG.warning("both sides failed: %s; %s", *failures)
        for failure in failures:
            assert failure is not None
            raise failure
        return send.result()
    finally:
        load.cancel()
        send.cancel()
        await asyncio.gather(load, send, return_exceptions=True)


async def _quietly(what: str, work: Awaitable[Any]) -> None:
    """For the way out of a failure: what goes wrong there must not hide the first cause."""
    try:
        async with asyncio.timeout(_CANCEL_S):
            await work
    except Failure as error:
        LOG.warning("could not %s: %s", what, error or "no answer in time")


def _metrics(trace: _Trace, plan: PublishPlan, num_attempts: int) -> dict[str, Metric]:
    phases = ("total", "gather", "flatten", "send", "load", "resume", "verify")
    metrics = {f"publish/{phase}_s": Metric(trace.seconds.get(phase, 0.0)) for phase in phases}
    metrics["publish/pause_s"] = Metric(trace.seconds["paused"])  # from before the pause to after the resume
    metrics["publish/bytes"] = Metric(plan.num_bytes)
    metrics["publish/num_attempts"] = Metric(num_attempts)
    return metrics
