"""Slots bound what is in flight: reserved before an episode, freed when its weights are live or it is dropped."""

import asyncio
import uuid

import numpy as np
import pytest

from megatron_sao.data.buffer import BufferClosedError, TrajectoryBuffer
from megatron_sao.types import StopReason, Trajectory


def episode(*, version: int = 0, num_tokens: int = 4) -> tuple[Trajectory, ...]:
    action = np.array([False] + [True] * (num_tokens - 1))
    return (
        Trajectory(
            id=uuid.uuid4().hex,
            episode_id=uuid.uuid4().hex,
            prompt_id="p",
            position=0,
            token_ids=np.arange(num_tokens, dtype=np.int32),
            is_action=action,
            rollout_logprobs=np.where(action, -1.0, 0.0).astype(np.float32),
            version=np.where(action, version, -1).astype(np.int32),
            reward=np.zeros(num_tokens, dtype=np.float32),
            turns=((1, num_tokens),),
            stop_reason=StopReason.STOP,
            engine="e",
            started_s=0.0,
            finished_s=1.0,
        ),
    )


async def reserve(buffer: TrajectoryBuffer, num: int = 1) -> list:
    return [await buffer.reserve(timeout_s=1) for _ in range(num)]


async def is_full(buffer: TrajectoryBuffer) -> bool:
    try:
        await buffer.reserve(timeout_s=0.01)
    except TimeoutError:
        return True
    return False


async def test_a_slot_is_held_until_the_weights_trained_from_it_are_live() -> None:
    buffer = TrajectoryBuffer(1)
    (slot,) = await reserve(buffer)
    assert await is_full(buffer)  # running
    buffer.put(slot, episode())
    assert await is_full(buffer)  # finished
    taken = await buffer.take(1, timeout_s=1)
    assert await is_full(buffer)  # in training
    buffer.release(taken)
    assert not await is_full(buffer)


async def test_a_dropped_episode_frees_its_slot_and_is_counted_by_its_reason() -> None:
    buffer = TrajectoryBuffer(1)
    (slot,) = await reserve(buffer)
    waiting = asyncio.create_task(buffer.reserve(timeout_s=1))
    await asyncio.sleep(0)
    buffer.drop(slot, "engine")
    assert (await waiting).admission == 1
    assert buffer.num_dropped == buffer.metrics()["buffer/num_dropped_engine"].value == 1


async def test_the_oldest_admissions_among_the_finished_are_taken_first() -> None:
    buffer = TrajectoryBuffer(4)
    slots, episodes = await reserve(buffer, 4), [episode() for _ in range(4)]
    for i in (3, 1, 2):  # 0 still runs
        buffer.put(slots[i], episodes[i])
    assert await buffer.take(2, timeout_s=1) == (episodes[1], episodes[2])


async def test_in_order_waits_for_the_oldest_admission() -> None:
    buffer = TrajectoryBuffer(3)
    slots, episodes = await reserve(buffer, 3), [episode() for _ in range(3)]
    for i in (1, 2):
        buffer.put(slots[i], episodes[i])
    with pytest.raises(TimeoutError, match="2 finished episodes: of 3 slots 1 run, 2 are finished"):
        await buffer.take(2, timeout_s=0.02, in_order=True)
    waiting = asyncio.create_task(buffer.take(2, timeout_s=1, in_order=True))
    await asyncio.sleep(0)
    buffer.put(slots[0], episodes[0])
    assert await waiting == (episodes[0], episodes[1])


async def test_the_deadline_of_take_runs_from_the_last_episode_that_came_or_was_dropped() -> None:
    buffer = TrajectoryBuffer(4)
    slots = await reserve(buffer, 4)
    waiting = asyncio.create_task(buffer.take(3, timeout_s=0.2))
    for slot in slots[:2]:
        await asyncio.sleep(0.12)
        buffer.put(slot, episode())
    await asyncio.sleep(0.12)
    buffer.drop(slots[2], "episode")
    await asyncio.sleep(0.12)  # 0.48 s in all
    buffer.put(slots[3], episode())
    assert len(await waiting) == 3


async def test_a_release_is_no_progress_for_take() -> None:
    buffer = TrajectoryBuffer(2)
    slots = await reserve(buffer, 2)
    buffer.put(slots[0], episode())
    taken = await buffer.take(1, timeout_s=1)
    waiting = asyncio.create_task(buffer.take(1, timeout_s=0.2))
    await asyncio.sleep(0.12)
    buffer.release(taken)
    await asyncio.sleep(0.12)
    assert isinstance(waiting.exception(), TimeoutError)


async def test_in_order_does_not_wait_for_a_dropped_episode() -> None:
    buffer = TrajectoryBuffer(2)
    slots, last = await reserve(buffer, 2), episode()
    buffer.put(slots[1], last)
    waiting = asyncio.create_task(buffer.take(1, timeout_s=1, in_order=True))
    await asyncio.sleep(0)
    buffer.drop(slots[0], "reward")
    assert await waiting == (last,)


async def test_lag_stays_within_max_lag_when_episodes_finish_in_admission_order() -> None:
    max_lag, per_step, version, lags = 1, 3, 0, []
    buffer = TrajectoryBuffer((max_lag + 1) * per_step)
    running = [(slot, version) for slot in await reserve(buffer, 6)]
    for _ in range(8):
        for _ in range(per_step):
            slot, born = running.pop(0)
            buffer.put(slot, episode(version=born))
        taken = await buffer.take(per_step, timeout_s=1)
        lags += [version - segment.oldest_version for (segment,) in taken]
        version += 1
        buffer.release(taken)
        running += [(slot, version) for slot in await reserve(buffer, per_step)]
        assert await is_full(buffer)
    assert set(lags) == {0, 1}


async def test_stale_episodes_are_dropped_and_counted_by_length_and_free_their_slots() -> None:
    buffer = TrajectoryBuffer(3, max_token_lag=1)
    fresh = episode(version=4)
    for slot, one in zip(await reserve(buffer, 3), (episode(version=3, num_tokens=300), episode(), fresh), strict=True):
        buffer.put(slot, one)
    assert await buffer.take(1, timeout_s=1, version=5) == (fresh,)
    metrics = buffer.metrics()
    assert metrics["buffer/num_dropped_stale"].value == buffer.num_free_slots == 2
    assert metrics["buffer/num_stale_to_256_tokens"].value == metrics["buffer/num_stale_to_1024_tokens"].value == 1


async def test_max_token_lag_needs_to_know_the_version() -> None:
    with pytest.raises(ValueError, match="which version"):
        await TrajectoryBuffer(1, max_token_lag=1).take(1, timeout_s=1)


async def test_closing_wakes_who_waits_and_says_why() -> None:
    buffer = TrajectoryBuffer(1)
    await reserve(buffer)
    waits = [asyncio.create_task(buffer.take(1, timeout_s=9)), asyncio.create_task(buffer.reserve(timeout_s=9))]
    await asyncio.sleep(0)
    buffer.close(RuntimeError("the engine is gone"))
    buffer.close()
    for wait in waits:
        with pytest.raises(BufferClosedError, match="the engine is gone") as caught:
            await wait
        assert isinstance(caught.value.__cause__, RuntimeError)


async def test_more_episodes_than_slots_can_never_come() -> None:
    with pytest.raises(ValueError, match=r"1 to 2 episodes \(the slots\), not 3"):
        await TrajectoryBuffer(2).take(3, timeout_s=1)


async def test_an_episode_is_put_once_and_released_once() -> None:
    buffer = TrajectoryBuffer(1)
    (slot,) = await reserve(buffer)
    buffer.put(slot, episode())
    with pytest.raises(AssertionError, match="put or dropped before"):
        buffer.drop(slot, "engine")
    taken = await buffer.take(1, timeout_s=1)
    buffer.release(taken)
    with pytest.raises(AssertionError, match="not in training"):
        buffer.release(taken)
