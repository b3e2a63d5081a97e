"""Slots and finished episodes: what bounds lag (method.md section 4, Admission).

A slot is reserved before an episode starts. It is freed when the episode is dropped, or by `release`, once the weights
trained from it are live. With (max_lag + 1) * trajectories_per_step slots, an episode that finishes in admission order
is at most max_lag versions old when it is trained, and no more than that many are ever held: all state is bounded.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megatron_sao.metrics import Metric, Reduction
from megatron_sao.types import Prompt, Reward, Trajectory, WeightVersion

LENGTH_BUCKETS = (256, 1024, 4096, 16384, 65536)
"""Upper edges in tokens; the last bucket is open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedEpisode:
    """One episode: its segments (they share the episode id and the reward, which is on each one's last token)."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    reward: Reward

    def __post_init__(self) -> None:
        if len({t.episode_id for t in self.trajectories}) != 1:
            raise ValueError(f"prompt {self.prompt.id!r}: an episode is one or more trajectories with one episode id")

    @property
    def id(self) -> str:
        return self.trajectories[0].episode_id

    @property
    def oldest_version(self) -> WeightVersion:
        return min(t.oldest_version for t in self.trajectories)

    @property
    def num_tokens(self) -> int:
        return sum(len(t.token_ids) for t in self.trajectories)


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """The right to run one episode. Slots are numbered in order of admission."""

    admission: int


class BufferClosedError(RuntimeError):
    """The buffer is closed; its cause, when there is one, is what ended the run."""


class TrajectoryBuffer:
    """Consumes episodes of the rollout service, produces the episodes of a step.

    Waits for: `reserve`, a free slot (unblocked by `drop` and `release`); `take`, enough finished episodes (unblocked
    by `put`, and in admission order also by `drop`). `close` unblocks both. For one event loop.
    """

    def __init__(self, num_slots: int, *, max_token_lag: int | None = None) -> None:
        if num_slots < 1:
            raise ValueError(f"a buffer has at least one slot, not {num_slots}")
        self._num_slots = num_slots
        self._max_token_lag = max_token_lag
        self._changed = asyncio.Condition()
        self._next_admission = 0
        self._running: set[Slot] = set()
        self._finished: dict[Slot, FinishedEpisode] = {}
        self._taken: dict[str, Slot] = {}  # by episode id, until the weights trained from it are live
        self._closed = False
        self._cause: BaseException | None = None
        self._drops: Counter[str] = Counter()
        self._drops_by_length: Counter[int] = Counter()

    @property
    def num_free_slots(self) -> int:
        return self._num_slots - len(self._running) - len(self._finished) - len(self._taken)

    @property
    def num_dropped(self) -> int:
        return self._drops.total()

    async def reserve(self, *, timeout_s: float) -> Slot:
        """The next slot in admission order.

        Raises:
            TimeoutError: no slot became free in time. BufferClosedError: the buffer was closed.
        """
        async with self._changed:
            await self._wait(lambda: self.num_free_slots > 0, timeout_s, what="a free slot")
            slot = Slot(self._next_admission)
            self._next_admission += 1
            self._running.add(slot)
            return slot

    async def put(self, slot: Slot, episode: FinishedEpisode) -> None:
        """The slot's episode is finished. Keeps the slot."""
        async with self._changed:
            self._finished[self._leave_running(slot)] = episode
            self._changed.notify_all()

    async def drop(self, slot: Slot, reason: str) -> None:
        """The slot's episode is broken: count it under `reason` and free the slot. It is no sample."""
        async with self._changed:
            self._leave_running(slot)
            self._drops[reason] += 1
            self._changed.notify_all()

    async def take(
        self, num_episodes: int, *, version: WeightVersion, timeout_s: float, in_order: bool = False
    ) -> tuple[FinishedEpisode, ...]:
        """`num_episodes` finished episodes to train version `version` from; they keep their slots until `release`.

        The oldest admissions among the finished ones; with `in_order` the oldest admissions of all, waiting for those
        that still run. Episodes with a token older than `max_token_lag` versions are dropped here, counted by length.

        Raises:
            ValueError: more episodes than slots. TimeoutError: not enough in time. BufferClosedError: closed.
        """
        if not 1 <= num_episodes <= self._num_slots:
            raise ValueError(f"a step takes 1 to {self._num_slots} episodes (the slots), not {num_episodes}")

        def ready() -> bool:
            self._drop_stale(version)
            slots = self._in_admission_order(in_order)[:num_episodes]
            return len(slots) == num_episodes and all(slot in self._finished for slot in slots)

        async with self._changed:
            await self._wait(ready, timeout_s, what=f"{num_episodes} finished episodes")
            slots = self._in_admission_order(in_order)[:num_episodes]
            episodes = tuple(self._finished.pop(slot) for slot in slots)
            self._taken.update(zip((episode.id for episode in episodes), slots, strict=True))
            return episodes

    async def release(self, episodes: Iterable[FinishedEpisode]) -> None:
        """The weights trained from these episodes are live (or a critic-only step used them): free their slots."""
        async with self._changed:
            for episode in episodes:
                assert episode.id in self._taken, f"episode {episode.id} is released but was not taken"
                del self._taken[episode.id]
            self._changed.notify_all()

    async def close(self, cause: BaseException | None = None) -> None:
        """Wake all who wait with BufferClosedError (from `cause`). Idempotent; the first cause stands."""
        async with self._changed:
            self._cause = self._cause if self._closed else cause
            self._closed = True
            self._changed.notify_all()

    def metrics(self) -> dict[str, Metric]:
        """Slots in use now, and drops since the start: in all, by reason, and by length for those that were stale."""
        state = {"running": self._running, "finished": self._finished, "in_training": self._taken}
        metrics = {f"buffer/num_{name}": Metric(len(held)) for name, held in state.items()}
        metrics["buffer/num_dropped"] = Metric(self.num_dropped, reduction=Reduction.SUM)
        for reason, count in self._drops.items():
            metrics[f"buffer/num_dropped_{reason}"] = Metric(count, reduction=Reduction.SUM)
        if self._max_token_lag is not None:
            names = [*(f"to_{edge}" for edge in LENGTH_BUCKETS), f"over_{LENGTH_BUCKETS[-1]}"]
            for bucket, name in enumerate(names):
                count = self._drops_by_length[bucket]
                metrics[f"buffer/num_stale_{name}_tokens"] = Metric(count, reduction=Reduction.SUM)
        return metrics

    def _in_admission_order(self, in_order: bool) -> list[Slot]:
        return sorted([*self._finished, *self._running] if in_order else self._finished)

    def _leave_running(self, slot: Slot) -> Slot:
        assert slot in self._running, f"slot {slot.admission} holds no running episode: it was put or dropped before"
        self._running.remove(slot)
        return slot

    def _drop_stale(self, version: WeightVersion) -> None:
        if self._max_token_lag is None:
            return
        oldest_allowed = version - self._max_token_lag
        stale = [slot for slot, episode in self._finished.items() if episode.oldest_version < oldest_allowed]
        for slot in stale:
            num_tokens = self._finished.pop(slot).num_tokens
            self._drops["stale"] += 1
            self._drops_by_length[sum(num_tokens > edge for edge in LENGTH_BUCKETS)] += 1
        if stale:
            self._changed.notify_all()

    async def _wait(self, ready: Callable[[], bool], timeout_s: float, *, what: str) -> None:
        """Wait with the lock held until `ready`; the lock is free while waiting."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait_for(lambda: self._closed or ready())
        except TimeoutError:
            raise TimeoutError(
                f"the buffer waited {timeout_s:g} s for {what}: of {self._num_slots} slots {len(self._running)} run, "
                f"{len(self._finished)} are finished, {len(self._taken)} in training, {self.num_free_slots} free"
            ) from None
        if self._closed:
            raise BufferClosedError(f"the buffer is closed ({self._cause!r})") from self._cause
