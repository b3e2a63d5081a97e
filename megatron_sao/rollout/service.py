"""Keeps episodes in flight, one per slot, while training goes on; and runs held-out prompts for an evaluation."""

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from megatron_sao.data.buffer import BufferClosedError, Slot, TrajectoryBuffer
from megatron_sao.data.prompts import PromptStream
from megatron_sao.data.routed_experts import ExpertFiles
from megatron_sao.metrics import Metric, mean
from megatron_sao.rollout.engine import Engine, EngineError
from megatron_sao.rollout.episode import Episode, EpisodeError, Limits
from megatron_sao.rollout.reward import RewardError, RewardFunction, call_reward
from megatron_sao.types import Prompt, Reward, Trajectory

LOG = logging.getLogger(__name__)
Result = TypeVar("Result")

KINDS: Mapping[type[Exception], str] = {EngineError: "engine", EpisodeError: "episode", RewardError: "reward"}
"""What breaks one episode and not the run: the episode is dropped and counted under this name."""
BROKEN = tuple(KINDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRunner:
    """All that it takes to turn one prompt into scored trajectories."""

    engine: Engine
    episode: Episode
    reward: RewardFunction
    limits: Limits
    reward_range: tuple[float, float] = (0.0, 1.0)
    episode_timeout_s: float = 3600.0
    reward_timeout_s: float = 60.0

    async def run(self, prompt: Prompt) -> tuple[tuple[Trajectory, ...], Reward]:
        """The episode's segments, each with the reward on its last action token, and the reward itself.

        Raises:
            EngineError, EpisodeError, RewardError: this episode is broken.
            ValueError: what a person must change, such as a tokenizer that does not belong to the model.
        """
        try:
            async with asyncio.timeout(self.episode_timeout_s) as deadline:
                trajectories = await self.episode.run(prompt, self.engine, self.limits)
        except TimeoutError as error:
            problem = f"not finished within {self.episode_timeout_s:g} s" if deadline.expired() else f"{error!r}"
            raise EpisodeError(f"prompt {prompt.id!r}: {problem}") from error
        reward = await call_reward(
            self.reward, prompt, trajectories, reward_range=self.reward_range, timeout_s=self.reward_timeout_s
        )
        return tuple(trajectory.with_final_reward(reward.value) for trajectory in trajectories), reward


class RolloutService:
    """Consumes prompts and slots, produces finished episodes in the buffer.

    Waits for a free slot; unblocked by the buffer's `release` and `drop`. As many episodes run as slots are free, so
    it is bounded by them. Prompts are admitted in the order of the stream. Ends by `stop`, or by itself after
    `max_consecutive_failures` broken episodes in a row or at the first error that is no episode's own: then the buffer
    is closed with that error, and `watch` raises it.
    """

    def __init__(
        self,
        runner: EpisodeRunner,
        *,
        prompts: PromptStream,
        buffer: TrajectoryBuffer,
        slot_timeout_s: float,
        max_consecutive_failures: int = 16,
        expert_files: ExpertFiles | None = None,
    ) -> None:
        """`slot_timeout_s`: the longest wait for a slot. It must outlast a whole step, which frees them at its end.

        `expert_files`: where routed experts go; without it, they are not kept.
        """
        self._runner = runner
        self._prompts = prompts
        self._buffer = buffer
        self._max_consecutive_failures = max_consecutive_failures
        self._slot_timeout_s = slot_timeout_s
        self._expert_files = expert_files
        self._admission: asyncio.Task[None] | None = None
        self._failed: asyncio.Future[None] | None = None
        self._episodes: set[asyncio.Task[None]] = set()
        self._num_consecutive_failures = 0
        self._num_finished = 0
        self._num_failures: Counter[str] = Counter()
        self._sums: dict[str, float] = {}  # of the rewards' own metrics, over the episodes since the last `metrics`
        self._counts: Counter[str] = Counter()

    def start(self) -> None:
        """Begin to admit prompts. Call it once, with the event loop running."""
        assert self._admission is None, "the rollout service was started before"
        self._failed = asyncio.get_running_loop().create_future()
        self._admission = asyncio.create_task(self._admit(), name="admission")

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Cancel all episodes and close the buffer. Idempotent; also after a failure.

        Raises:
            TimeoutError: an episode did not end when it was cancelled.
        """
        self._buffer.close()
        tasks = [task for task in (self._admission, *self._episodes) if task is not None]
        for task in tasks:
            task.cancel()
        if not tasks:
            return
        _, stuck = await asyncio.wait(tasks, timeout=timeout_s)
        if stuck:
            names = ", ".join(task.get_name() for task in stuck)
            raise TimeoutError(f"{len(stuck)} tasks still run {timeout_s:g} s after they were cancelled: {names}")

    async def watch(self, work: Awaitable[Result]) -> Result:
        """The result of `work`, or the service's failure as soon as there is one (then `work` is cancelled)."""
        assert self._failed is not None, "start the rollout service before watching it"
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._failed), return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # its error is seen

    def metrics(self) -> dict[str, Metric]:
        """The buffer's state, failures since the start, and means of the rewards' own metrics since the last call."""
        metrics = self._buffer.metrics()
        metrics["rollout/num_finished"] = Metric(self._num_finished)
        metrics["rollout/num_broken"] = Metric(self._num_failures.total())
        for kind in KINDS.values():
            metrics[f"rollout/num_broken_{kind}"] = Metric(self._num_failures[kind])
        for key, total in sorted(self._sums.items()):
            metrics[f"reward/{key}"] = mean(total, self._counts[key])
        self._sums = dict.fromkeys(self._sums, 0.0)  # the keys stay, so that a record's keys do
        self._counts.clear()
        return metrics

    async def _admit(self) -> None:
        try:
            while True:
                slot = await self._buffer.reserve(timeout_s=self._slot_timeout_s)
                prompt = self._prompts.next()
                task = asyncio.create_task(self._run_one(slot, prompt), name=f"episode of {prompt.id}")
                self._episodes.add(task)
                task.add_done_callback(self._episodes.discard)
        except BufferClosedError:
            return
        except Exception as error:  # noqa: BLE001 - a border: no failure of the service may pass unseen
            self._fail(error)

    async def _run_one(self, slot: Slot, prompt: Prompt) -> None:
        try:
            trajectories, reward = await self._runner.run(prompt)
            if self._expert_files is not None:
                trajectories = await asyncio.to_thread(self._expert_files.write, trajectories)
        except BROKEN as error:
            self._break(slot, prompt, error)
        except Exception as error:  # noqa: BLE001 - a border: what is no episode's own failure ends the run
            self._fail(error)
        else:
            self._num_consecutive_failures = 0
            self._num_finished += 1
            for key, value in reward.metrics.items():
                self._sums[key] = self._sums.get(key, 0.0) + value
                self._counts[key] += 1
            self._buffer.put(slot, trajectories)

    def _break(self, slot: Slot, prompt: Prompt, error: Exception) -> None:
        kind = next(name for kind, name in KINDS.items() if isinstance(error, kind))
        self._num_failures[kind] += 1
        self._num_consecutive_failures += 1
        LOG.warning("the episode of prompt %r is dropped: %s", prompt.id, error)
        if self._num_consecutive_failures >= self._max_consecutive_failures:
            failure = RuntimeError(f"{self._num_consecutive_failures} episodes in a row broke; the last one: {error}")
            failure.__cause__ = error
            self._fail(failure)
        self._buffer.drop(slot, kind)

    def _fail(self, error: Exception) -> None:
        """The first failure is the run's. Running episodes go on until `stop`; nothing new is admitted."""
        assert self._failed is not None
        if not self._failed.done():
            LOG.error("the rollout service gives up: %s", error)
            self._failed.set_exception(error)
            self._failed.exception()  # seen, even when nobody watches; the buffer says it too
        self._buffer.close(error)


async def run_prompts(
    prompts: Sequence[Prompt], runner: EpisodeRunner, *, concurrency: int = 64, max_attempts: int = 3
) -> tuple[Reward, ...]:
    """The reward of each prompt, in their order, at most `concurrency` at a time; no slot or buffer is involved.

    Nobody trains on these episodes: routed experts are not asked for.

    Raises:
        ValueError: concurrency or max_attempts below 1.
        RuntimeError: one prompt's episode broke `max_attempts` times (its last error is the cause).
        Any other error ends the evaluation at once; the episodes that still run are cancelled.
    """
    if concurrency < 1 or max_attempts < 1:
        raise ValueError(f"concurrency = {concurrency} and max_attempts = {max_attempts} must be at least 1")
    runner = dataclasses.replace(runner, limits=dataclasses.replace(runner.limits, wants_routed=False))
    places = asyncio.Semaphore(concurrency)

    async def one(prompt: Prompt) -> Reward:
        async with places:
            return await _with_retries(prompt, runner, max_attempts)

    tasks = [asyncio.create_task(one(prompt), name=f"evaluation of {prompt.id}") for prompt in prompts]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _with_retries(prompt: Prompt, runner: EpisodeRunner, max_attempts: int) -> Reward:
    last: Exception | None = None
    for attempt in range(1, max_attempts + 1):
        try:
            _, reward = await runner.run(prompt)
            return reward
        except BROKEN as error:
            LOG.warning("evaluation of prompt %r, attempt %d of %d: %s", prompt.id, attempt, max_attempts, error)
            last = error
    raise RuntimeError(f"evaluation of prompt {prompt.id!r} broke {max_attempts} times: {last}") from last
