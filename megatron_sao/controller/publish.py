"""A publish: the engines go from one weight version to the next, or are known to be in no version at all.

    [recover ──>] plan ──> connect (once) ──> prepare ──> pause ──> begin ──> [engines load bucket k || actor sends
    bucket k and prepares bucket k+1] ... ──> end ──> resume

Consumes the actor's weights, produces engines that serve them. Waits for the engines and the actor; every phase has a
deadline. On any failure both sides leave the groups, the session is ended, the engines count as unknown (they may hold
half of the new weights) and, once paused, stay so: they serve nothing before a publish of all tensors has succeeded,
which begins with whether they answer again (recover). The actor's version stands.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_sao.channel import (
    Answer,
    Channel,
    PublishJoin,
    PublishLeave,
    PublishListen,
    PublishPlanning,
    PublishPrepare,
    publish_plan_from,
)
from megatron_sao.config import PublishConfig
from megatron_sao.controller.buckets import ANSWER_S, Transfer
from megatron_sao.controller.engines import CANCEL_S, Failure, ask_for_life, compare_logprobs, quietly, together
from megatron_sao.controller.phases import Phases
from megatron_sao.metrics import Metric
from megatron_sao.rollout.engine import Engine, EngineError, PauseMode
from megatron_sao.sync.plan import check_digest
from megatron_sao.sync.verify import check_reset, check_returned
from megatron_sao.trace import NoTrace, Trace
from megatron_sao.types import PublishPlan, WeightVersion

LOG = logging.getLogger(__name__)
Check = Callable[[], Awaitable[None]]

_NUM_ATTEMPTS = 2


class PublishError(RuntimeError):
    """A publish failed; `phase` and `bucket` (None outside of send and load) say where. The engines are unknown, and
    paused from phase pause on."""

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
    """What a publish did. `metrics`: publish/bytes, and publish/*_s with

    total: from the plan to the resume; pause: how long the engines did not generate; prepare: gather and flatten as far
    as nothing else went on meanwhile; gather, flatten: all of it; send: broadcasts; load: what the engines took beyond;
    verify: the fixed prompt, after the resume.
    """

    version: WeightVersion
    full: bool
    num_attempts: int
    num_tensors: int
    num_bytes: int
    metrics: Mapping[str, Metric]


class Publisher:
    """Publishes the weights of one actor to its engines, all in one. One publish at a time.

    `engine_ranks` is each engine's tensor parallel size. `fixed_prompt` is scored by both sides after each publish
    (None: not, for engines without a model).
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        actor: Channel,
        settings: PublishConfig,
        *,
        engine_ranks: int,
        fixed_prompt: Sequence[int] | None,
        trace: Trace | None = None,
    ) -> None:
        self._engines, self._actor, self._settings = tuple(engines), actor, settings
        self._names = ", ".join(engine.name for engine in engines)
        self._engine_ranks, self._fixed_prompt = engine_ranks, fixed_prompt
        self._trace = trace or NoTrace()
        self._groups: Mapping[int, str] = {}  # by source
        # Sources whose group has carried buckets: NCCL compiles with the first.
        self._warm: frozenset[int] = frozenset()
        self._has_connected = False
        self._paused_s: float | None = None  # since when the engines stand still
        self._is_open = False  # an attempt runs, or was cut short: its groups and its session are still there
        self._known = True  # the engines hold exactly the weights of the version that they name

    @property
    def engines_are_known(self) -> bool:
        return self._known

    async def first_publish(self, version: WeightVersion = 0) -> PublishReport:
        """Publish the weights that the engines have loaded from disk themselves, and see every one of them arrive.

        Raises:
            RuntimeError: a tensor did not come back as it was loaded (named), or the log-probs differ.
            PublishError: as `publish`.
        """
        if not self._settings.verify_first:
            return await self.publish(version, full=True)
        try:
            loaded = await together(*(engine.checksum() for engine in self._engines))
        except EngineError as error:
            if error.status is None:
                raise
            LOG.warning("the first publish is verified by the log-probs of a fixed prompt only: %s", error)
            return await self.publish(version, full=True)
        self._known = False
        await together(*(engine.pause("retract") for engine in self._engines))
        await together(*(engine.reset_tensors() for engine in self._engines))
        for before, reset in zip(loaded, await together(*(e.checksum() for e in self._engines)), strict=True):
            if kept := check_reset(before, reset):
                LOG.warning("the reset left %d tensors as they were, these are not verified: %s", len(kept), kept[:8])

        async def every_tensor_is_back() -> None:
            for before, now in zip(loaded, await together(*(e.checksum() for e in self._engines)), strict=True):
                check_returned(before, now)
            LOG.info("first publish: all %d checksums are those of the load from disk", sum(map(len, loaded)))

        return await self._publish(version, full=True, check=every_tensor_is_back)

    async def publish(self, version: WeightVersion, *, full: bool = False) -> PublishReport:
        """Bring the engines to `version`: what training can change, or everything (`full`, or an unknown engine).

        Raises:
            PublishError: two attempts failed, the second with new groups and all tensors; the engines stay paused.
            RuntimeError: the log-probs of the fixed prompt differ by more than the tolerance; they are paused then too.
        """
        return await self._publish(version, full=full, check=_nothing)

    async def close(self) -> None:
        """Leave the groups on both sides. What goes wrong is logged."""
        await self._leave()

    async def _publish(self, version: WeightVersion, *, full: bool, check: Check) -> PublishReport:
        start_s = time.monotonic()
        num_attempts, phases = 1, Phases(self._trace)
        first: PublishError | None = None
        while True:
            whole = full or not self._known
            try:
                plan = await self._attempt(version, full=whole, check=check, phases=phases)
                break
            except PublishError as error:
                if num_attempts == _NUM_ATTEMPTS:
                    raise error.after(first) from error.__cause__
                first = error
                LOG.warning("%s; one more attempt, with new groups and all tensors", error)
            num_attempts, phases = num_attempts + 1, Phases(self._trace)
        phases.add("total", time.monotonic() - start_s)
        with phases.during("verify"):
            difference = await self._verify(version)
        return PublishReport(
            version=version,
            full=whole,
            num_attempts=num_attempts,
            num_tensors=sum(len(bucket.tensors) for bucket in plan.buckets),
            num_bytes=plan.num_bytes,
            metrics=phases.metrics() | _counts(plan, num_attempts) | difference,
        )

    async def _attempt(self, version: WeightVersion, *, full: bool, check: Check, phases: Phases) -> PublishPlan:
        known, self._known = self._known, False
        mode: PauseMode = self._settings.pause if known else "retract"  # KV of half of the weights is not kept
        if self._is_open:
            await self._give_up()
        self._is_open = True
        try:
            if not known:
                with phases.during("recover"):
                    await together(*(ask_for_life(engine) for engine in self._engines))
            with phases.during("plan"):
                plan = await self._plan(full)
            if not set(plan.sources) <= set(self._groups):
                with phases.during("connect"):
                    await self._connect(plan)
            with phases.during("prepare"):
                await self._call(PublishPrepare(bucket=0, timeout_s=self._settings.timeout_s))
            await self._switch(version, plan, mode=mode, check=check, phases=phases)
        except Failure as error:
            what = f"publish of version {version} ({'all tensors' if full else 'trained tensors'})"
            await self._give_up()
            reason = str(error) or type(error).__name__
            raise PublishError(f"{what} to engine {self._names}", phases.phase, phases.bucket, reason) from error
        self._known, self._is_open = True, False
        return plan

    async def _switch(
        self, version: WeightVersion, plan: PublishPlan, *, mode: PauseMode, check: Check, phases: Phases
    ) -> None:
        """From the pause to the resume. TimeoutError after `max_pause_s`."""
        if self._paused_s is None:
            self._paused_s = time.monotonic()
        longest_s = self._settings.max_pause_s
        try:
            async with asyncio.timeout(longest_s) as bound:
                with phases.at("pause"):
                    await together(*(engine.pause(mode) for engine in self._engines))
                await self._transfer(version, plan, phases, flush=mode == "retract")
                with phases.during("check"):
                    await check()
                with phases.during("resume"):
                    await together(*(engine.resume() for engine in self._engines))
        except TimeoutError as error:
            if not bound.expired():
                raise
            raise TimeoutError(f"the engines have stood still for publish.max_pause_s = {longest_s:g} s") from error
        phases.add("pause", time.monotonic() - self._paused_s)
        self._paused_s = None

    async def _give_up(self) -> None:
        await self._leave()
        await together(*(quietly("end the session", engine.end_update()) for engine in self._engines))
        self._is_open = False

    async def _transfer(self, version: WeightVersion, plan: PublishPlan, phases: Phases, *, flush: bool) -> None:
        """All buckets. The last one brings the version, and flushes the prefix cache (not where episodes keep KV)."""
        with phases.during("begin"):
            await together(*(engine.begin_update() for engine in self._engines))
        sources = frozenset(plan.sources)
        settings = self._settings
        await Transfer(
            engines=self._engines,
            actor=self._actor,
            plan=plan,
            groups=self._groups,
            version=version,
            flush=flush,
            timeout_s=settings.timeout_s if sources <= self._warm else settings.first_timeout_s,
            phases=phases,
        ).run()
        self._warm |= sources
        with phases.during("end"):
            await together(*(engine.end_update() for engine in self._engines))
            served = await together(*(engine.weight_version() for engine in self._engines))
        for engine, found in zip(self._engines, served, strict=True):
            if found != version:
                raise EngineError(engine.name, "weight_version", None, f"it says {found} after this publish")

    async def _plan(self, full: bool) -> PublishPlan:
        settings = self._settings
        command = PublishPlanning(full=full, bucket_bytes=settings.bucket_bytes, direct=settings.sender == "direct")
        answer = await self._actor.call(command, timeout_s=settings.timeout_s)
        return check_digest(publish_plan_from(answer.data))

    async def _connect(self, plan: PublishPlan) -> None:
        timeout_s = self._settings.timeout_s if self._has_connected else self._settings.first_timeout_s
        await self._leave()
        endpoint = (await self._actor.call(PublishListen(), timeout_s=timeout_s)).data
        address, port = str(endpoint["address"]), int(str(endpoint["port"]))
        name, world_size = f"publish-{uuid.uuid4().hex[:12]}", 1 + len(self._engines) * self._engine_ranks
        self._groups, self._warm = {source: f"{name}-{source}" for source in plan.sources}, frozenset()

        async def join(engine: Engine, rank_offset: int) -> None:
            for group_name in self._groups.values():
                await engine.join_group(
                    address=address,
                    port=port,
                    rank_offset=rank_offset,
                    world_size=world_size,
                    group_name=group_name,
                    backend=str(endpoint["backend"]),
                    timeout_s=timeout_s,
                )

        command = PublishJoin(
            groups=dict(self._groups), world_size=world_size, address=address, port=port, timeout_s=timeout_s
        )
        offsets = range(1, world_size, self._engine_ranks)
        joining = [join(engine, offset) for engine, offset in zip(self._engines, offsets, strict=True)]
        await together(self._call(command), *joining)
        self._has_connected = True

    async def _call(self, command: PublishJoin | PublishPrepare) -> Answer:
        """The actor ends these by itself, and can say why."""
        return await self._actor.call(command, timeout_s=command.timeout_s + ANSWER_S)

    async def _verify(self, version: WeightVersion) -> dict[str, Metric]:
        """Log-probs of the fixed prompt on all sides. A publish that fails here is not repeated: it is no accident."""
        if self._fixed_prompt is None:
            return {}
        settings = self._settings
        try:
            found = await compare_logprobs(self._engines, self._actor, self._fixed_prompt, version, settings)
        except Failure as error:
            await self._withdraw()
            what = f"publish of version {version} to engine {self._names}"
            raise PublishError(what, "verify", None, str(error)) from error
        except RuntimeError:
            await self._withdraw()
            raise
        largest, mean = (max(values) for values in zip(*found, strict=True))
        return {"publish/logprob_max_difference": Metric(largest), "publish/logprob_mean_difference": Metric(mean)}

    async def _withdraw(self) -> None:
        """Stop engines that serve other weights than they say."""
        self._known = False
        await together(*(quietly("pause the engine", engine.pause("retract")) for engine in self._engines))

    async def _leave(self) -> None:
        """All sides at once: whichever waits for another is woken by the other's leaving."""
        if not self._groups:
            return

        async def leave(engine: Engine) -> None:
            for group_name in self._groups.values():
                await quietly("leave the group on the engine", engine.leave_group(group_name))

        actor = quietly("leave the group on the actor", self._actor.call(PublishLeave(), timeout_s=CANCEL_S))
        await together(actor, *(leave(engine) for engine in self._engines))
        self._groups = {}


async def _nothing() -> None: ...


def _counts(plan: PublishPlan, num_attempts: int) -> dict[str, Metric]:
    return {"publish/bytes": Metric(plan.num_bytes), "publish/num_attempts": Metric(num_attempts)}
