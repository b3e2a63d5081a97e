"""Slots and finished episodes: what bounds lag (docs/method.md).

A slot is reserved before an episode starts. It is freed when the episode is dropped, or by `release`, once the weights
trained from it are live. With (max_lag + 1) * trajectories_per_step slots, an episode that finishes in admission order
is at most max_lag versions old when it is trained, and no more than that many are ever held: all state is bounded.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megatron_sao.metrics import Metric
from megatron_sao.types import Trajectory, WeightVersion

FinishedEpisode = tuple[Trajectory, ...]
"""The segments of one episode: one or more trajectories with the same episode id."""

LENGTH_BUCKETS = (256, 1024, 4096, 16384, 65536)
"""Upper edges in tokens of an episode; one more bucket is open above."""


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """The right to run one episode. Slots are numbered in order of admission."""

    admission: int


class BufferClosedError(RuntimeError):
    """The buffer is closed; its cause, when there is one, is what ended the run."""


class TrajectoryBuffer:
    """Consumes episodes of the rollout service, produces the episodes of a step.

    Waits for: `reserve`, a free slot (unblocked by `drop` and `release`); `take`, enough finished episodes (unblocked
    by `put`, and in admission order also by `drop`). `close` unblocks both. For one event loop: every change is made
    between two awaits, so that no lock is needed.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        max_token_lag: int | None = None,
        on_free: Callable[[FinishedEpisode], None] | None = None,
    ) -> None:
        """`on_free`: called with each finished episode when its slot is freed; nobody needs it any more."""
        if num_slots < 1:
            raise ValueError(f"a buffer has at least one slot, not {num_slots}")
        self._num_slots = num_slots
        self._max_token_lag = max_token_lag
        self._on_free = on_free or _nothing
        self._changed = asyncio.Event()
        self._next_admission = 0
        self._running: set[Slot] = set()
        self._finished: dict[Slot, FinishedEpisode] = {}
        self._taken: set[str] = set()  # episode ids, until the weights trained from them are live
        self._closed = False
        self._cause: BaseException | None = None
        self._drops: Counter[str] = Counter()
        self._stale_by_length: Counter[int] = Counter()
        self._num_ended = 0  # episodes that were put or dropped: what `take` sees as progress

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
        await self._wait(lambda: self.num_free_slots > 0, timeout_s, what="a free slot")
        slot = Slot(self._next_admission)
        self._next_admission += 1
        self._running.add(slot)
        return slot

    def put(self, slot: Slot, episode: FinishedEpisode) -> None:
        """The slot's episode is finished. It keeps the slot."""
        assert len({t.episode_id for t in episode}) == 1, "an episode is one or more trajectories with one episode id"
        self._leave_running(slot)
        self._finished[slot] = episode
        self._notify()

    def drop(self, slot: Slot, reason: str) -> None:
        """The slot's episode is broken: count it under `reason` and free the slot. It is no sample."""
        self._leave_running(slot)
        self._drops[reason] += 1
        self._notify()

    async def take(
        self, num_episodes: int, *, timeout_s: float, in_order: bool = False, version: WeightVersion | None = None
    ) -> tuple[FinishedEpisode, ...]:
        """`num_episodes` finished episodes, in admission order; they keep their slots until `release`.

        The oldest admissions among the finished ones; with `in_order` the oldest admissions of all, waiting for those
        that still run. With `max_token_lag`, finished episodes with a token older than that many versions before
        `version`, the one to be trained from, are dropped first and counted by length.

        `timeout_s` is the longest wait for the next episode to be put or dropped: each one starts it anew, so that a
        broken episode's replacement has its full time. Give it an episode's own deadline. The whole wait is bounded,
        since there are finitely many slots and the service gives up after a number of drops in a row.

        Raises:
            ValueError: more episodes than slots; no `version` though `max_token_lag` is set.
            TimeoutError: not enough, and no progress in time. BufferClosedError: the buffer was closed.
        """
        if not 1 <= num_episodes <= self._num_slots:
            raise ValueError(f"a step takes 1 to {self._num_slots} episodes (the slots), not {num_episodes}")

        def ready() -> bool:
            self._drop_stale(version)
            slots = self._oldest(num_episodes, in_order)
            return len(slots) == num_episodes and all(slot in self._finished for slot in slots)

        await self._wait(ready, timeout_s, what=f"{num_episodes} finished episodes", restarts=True)
        episodes = tuple(self._finished.pop(slot) for slot in self._oldest(num_episodes, in_order))
        self._taken.update(episode[0].episode_id for episode in episodes)
        return episodes

    def release(self, episodes: Iterable[Sequence[Trajectory]]) -> None:
        """The weights trained from these episodes are live (or a critic-only step has used them): free their slots."""
        for episode in episodes:
            episode_id = episode[0].episode_id
            assert episode_id in self._taken, f"episode {episode_id} is released but is not in training"
            self._taken.remove(episode_id)
            self._on_free(tuple(episode))
        self._notify()

    def close(self, cause: BaseException | None = None) -> None:
        """Wake all who wait with BufferClosedError (from `cause`). Idempotent; the first cause stands."""
        self._cause = self._cause if self._closed else cause
        self._closed = True
        self._notify()

    def metrics(self) -> dict[str, Metric]:
        """Slots in use now, and drops since the start: in all, by reason, and by length for those that were stale."""
        metrics = {
            "buffer/num_running": Metric(len(self._running)),
            "buffer/num_finished": Metric(len(self._finished)),
            "buffer/num_in_training": Metric(len(self._taken)),
            "buffer/num_dropped": Metric(self.num_dropped),
        }
        for reason, count in sorted(self._drops.items()):
            metrics[f"buffer/num_dropped_{reason}"] = Metric(count)
        if self._max_token_lag is not None:
            names = [*(f"to_{edge}" for edge in LENGTH_BUCKETS), f"over_{LENGTH_BUCKETS[-1]}"]
            for bucket, name in enumerate(names):
                metrics[f"buffer/num_stale_{name}_tokens"] = Metric(self._stale_by_length[bucket])
        return metrics

    def _oldest(self, num_episodes: int, in_order: bool) -> Sequence[Slot]:
        return sorted([*self._finished, *self._running] if in_order else self._finished)[:num_episodes]

    def _leave_running(self, slot: Slot) -> None:
        assert slot in self._running, f"slot {slot.admission} holds no running episode: it was put or dropped before"
        self._running.remove(slot)
        self._num_ended += 1

    def _drop_stale(self, version: WeightVersion | None) -> None:
        if self._max_token_lag is None:
            return
        if version is None:
            raise ValueError("max_token_lag is set: say which version is to be trained from")
        oldest_allowed = version - self._max_token_lag
        stale = [slot for slot, e in self._finished.items() if min(t.oldest_version for t in e) < oldest_allowed]
        for slot in stale:
            episode = self._finished.pop(slot)
            num_tokens = sum(len(trajectory.token_ids) for trajectory in episode)
            self._drops["stale"] += 1
            self._stale_by_length[sum(num_tokens > edge for edge in LENGTH_BUCKETS)] += 1
            self._on_free(episode)
        if stale:
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()  # who waits from now on waits for the next change

    async def _wait(self, ready: Callable[[], bool], timeout_s: float, *, what: str, restarts: bool = False) -> None:
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                while not self._closed and not ready():
                    num_ended = self._num_ended
                    await self._changed.wait()
                    restart = restarts and self._num_ended > num_ended
                    deadline.reschedule(_now() + timeout_s if restart else deadline.when())
        except TimeoutError:
            raise TimeoutError(
                f"the buffer waited {timeout_s:g} s for {what}: of {self._num_slots} slots {len(self._running)} run, "
                f"{len(self._finished)} are finished, {len(self._taken)} in training, {self.num_free_slots} free"
            ) from None
        if self._closed:
            raise BufferClosedError(f"the buffer is closed ({self._cause!r})") from self._cause


def _nothing(_: FinishedEpisode) -> None:
    """An episode without anything of its own to give back."""


def _now() -> float:
    return asyncio.get_running_loop().time()
