"""Two loops, one mathematics: the overlapped loop makes the serial one's updates, earlier. Roles are fakes
(tests/support/loop_world.py) but in the last test, where two Megatron roles train.
"""

import asyncio
import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_sao.channel import ActorUpdate, Command, CriticUpdate, CriticValues, RoleDied
from megatron_sao.controller.loop import overlapped_loop, serial_loop
from megatron_sao.types import Prompt
from tests.controller import test_deterministic
from tests.support.loop_world import EPISODES_PER_STEP, FakePublisher, FakeRole, World
from tests.support.tiny_models import make_tiny_model

NUM_STEPS = 5
LOOPS = {"serial": serial_loop, "overlapped": overlapped_loop}


async def train(world: World, loop: str, *, num_steps: int = NUM_STEPS) -> World:
    async with world.parts() as parts:
        assert await LOOPS[loop](parts, num_steps=num_steps, first_batch_id=50) == num_steps
        assert parts.buffer.metrics()["buffer/num_in_training"].value == 0
    return world


def column(world: World, key: str) -> list[Any]:
    return [record[key] for record in world.records]


def in_step(*, num_steps: int = NUM_STEPS, **changes: Any) -> World:
    """The actor's update of batch n ends when the critic has been asked for the values of batch n+1."""
    valued = {50 + batch: asyncio.Event() for batch in range(num_steps)}

    async def critic(command: Command) -> None:
        if isinstance(command, CriticValues):
            valued[command.batch_id].set()

    async def actor(command: Command) -> None:
        if isinstance(command, ActorUpdate) and command.batch_id + 1 in valued:
            await asyncio.wait_for(valued[command.batch_id + 1].wait(), 5)

    return World(actor=FakeRole("actor", actor), critic=FakeRole("critic", critic), **changes)


async def test_both_loops_ask_exactly_the_same_of_each_role() -> None:
    serial, overlapped = await train(World(), "serial"), await train(in_step(), "overlapped")
    assert overlapped.critic.asked == serial.critic.asked
    assert overlapped.actor.asked == serial.actor.asked
    assert len({str(tensors) for command, tensors in serial.actor.asked if tensors}) == 2 * NUM_STEPS


async def test_both_loops_write_the_same_keys_and_the_same_numbers_of_training() -> None:
    serial, overlapped = await train(World(), "serial"), await train(in_step(), "overlapped")
    measured = {"time/take_s", "time/wait_s", "time/critic_s", "time/actor_s", "time/step_s"}
    measured |= {"overlap/ahead_s", "overlap/held_slots"}
    for one, other in zip(serial.records, overlapped.records, strict=True):
        assert set(one) == set(other) >= measured
        same = [key for key in one if key.split("/")[0] in ("policy", "critic", "lag", "packing", "weight_version")]
        assert {key: one[key] for key in same} == {key: other[key] for key in same}


async def test_two_batches_hold_slots_while_the_actor_trains_and_the_last_one_is_alone() -> None:
    serial, overlapped = await train(World(), "serial"), await train(in_step(), "overlapped")
    assert column(serial, "overlap/held_slots") == [EPISODES_PER_STEP] * NUM_STEPS
    assert column(overlapped, "overlap/held_slots") == [2 * EPISODES_PER_STEP] * (NUM_STEPS - 1) + [EPISODES_PER_STEP]


async def test_lag_counts_from_the_update_that_uses_the_batch() -> None:
    """Batches 0, 1 and 2 are sampled by version 0. Batch 2 is taken while version 1 is made, and would train 2 old."""
    world = await train(in_step(max_token_lag=1), "overlapped")
    lags = [used - oldest for used, oldest in world.actor.oldest_versions()]
    assert max(lags) == 1
    assert world.records[-1]["buffer/num_dropped_stale"] >= EPISODES_PER_STEP
    synchronous = await train(in_step(max_lag=1), "overlapped")
    assert [used - oldest for used, oldest in synchronous.actor.oldest_versions()] == [0, 1, 1, 1, 1]


async def test_the_share_over_the_maximum_is_of_the_using_update() -> None:
    world = in_step(max_lag=2, num_steps=4)
    async with world.parts() as parts:
        stricter = dataclasses.replace(parts, max_lag=1)  # with the slots of 2
        await overlapped_loop(stricter, num_steps=4, first_batch_id=50)
    assert column(world, "lag/over_max_fraction") == [0.0, 0.0, 1.0, 1.0]


async def test_at_lag_zero_nothing_is_older_than_the_version_trained_from() -> None:
    world = await train(World(max_lag=0), "overlapped")
    assert all(used == oldest for used, oldest in world.actor.oldest_versions())


async def test_one_step_takes_nothing_ahead() -> None:
    world = await train(World(), "overlapped", num_steps=1)
    assert (len(world.actor.batches), len(world.critic.batches)) == (1, 1)


def fails_at(number: int, kind: type[Command]) -> Callable[[Command], Any]:
    num_seen = 0

    async def hook(command: Command) -> None:
        nonlocal num_seen
        num_seen += isinstance(command, kind)
        if num_seen == number and isinstance(command, kind):
            raise RoleDied("role", command.name, "killed")

    return hook


class Stuck:
    """Fake: from the second call on it waits for ever, and sees that it is cancelled and awaited."""

    def __init__(self, kind: type[Command] | None = None, *, after: int = 0) -> None:
        self.kind, self.after, self.num_waiting, self.num_cancelled = kind, after, 0, 0

    async def __call__(self, command: Command | None = None) -> None:
        if self.kind and not isinstance(command, self.kind):
            return
        self.num_waiting += 1
        if self.num_waiting <= self.after:
            return
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)  # cleaning up takes a while: it is waited for
            self.num_cancelled += 1
            raise


async def failing(world: World, error: type[Exception], match: str) -> None:
    async with asyncio.timeout(10), world.parts() as parts:
        with pytest.raises(error, match=match):
            await overlapped_loop(parts, num_steps=NUM_STEPS, first_batch_id=50)


async def test_a_critic_that_fails_ends_the_actors_update_with_the_plain_error() -> None:
    stuck = Stuck(ActorUpdate)
    world = World(actor=FakeRole("actor", stuck), critic=FakeRole("critic", fails_at(3, CriticUpdate)))
    await failing(world, RoleDied, "critic_update.*killed")
    assert stuck.num_cancelled == 1


async def test_a_critic_that_fails_ends_a_publish() -> None:
    stuck = Stuck()
    critic = FakeRole("critic", fails_at(3, CriticUpdate))
    await failing(World(critic=critic, publisher=FakePublisher(hook=stuck)), RoleDied, "critic_update.*killed")
    assert stuck.num_cancelled == stuck.num_waiting


async def test_an_actor_that_fails_ends_the_critics_values() -> None:
    stuck = Stuck(CriticValues, after=1)
    world = World(actor=FakeRole("actor", fails_at(1, ActorUpdate)), critic=FakeRole("critic", stuck))
    await failing(world, RoleDied, "actor_update.*killed")
    assert stuck.num_cancelled == stuck.num_waiting - 1


async def test_an_actor_that_fails_ends_the_wait_for_episodes() -> None:
    async def first_batch_only(prompt: Prompt) -> None:
        if prompt.position >= EPISODES_PER_STEP:
            await asyncio.get_running_loop().create_future()

    world = World(actor=FakeRole("actor", fails_at(1, ActorUpdate)), episodes=first_batch_only)
    await failing(world, RoleDied, "actor_update.*killed")


async def test_a_take_ahead_that_expires_names_batch_version_and_slots() -> None:
    async def first_batch_only(prompt: Prompt) -> None:
        if prompt.position >= EPISODES_PER_STEP:
            await asyncio.get_running_loop().create_future()

    world = World(actor=FakeRole("actor", Stuck(ActorUpdate)), episodes=first_batch_only, step_timeout_s=0.1)
    message = "no batch 51 for the update of version 1: .*0.1 s .*of 6 slots 4 run, 0 are finished, 2 in training"
    await failing(world, TimeoutError, message)


async def test_a_cancelled_loop_leaves_no_task() -> None:
    stuck = Stuck(ActorUpdate)
    async with World(actor=FakeRole("actor", stuck)).parts() as parts:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(overlapped_loop(parts, num_steps=NUM_STEPS, first_batch_id=50), 0.1)
    assert stuck.num_cancelled == 1


def sleeping(seconds: dict[type[Command], float]) -> Callable[[Command], Any]:
    async def hook(command: Command) -> None:
        await asyncio.sleep(seconds.get(type(command), 0.0))

    return hook


def slow_world() -> World:
    """The critic takes 2 s a step, the actor 3 s."""
    critic = sleeping({CriticUpdate: 0.7, CriticValues: 0.6})
    return World(actor=FakeRole("actor", sleeping({ActorUpdate: 3.0})), critic=FakeRole("critic", critic))


async def test_a_step_takes_as_long_as_the_actor_where_the_serial_one_takes_both() -> None:
    serial, overlapped = await asyncio.gather(
        train_unwatched(slow_world(), "serial"), train_unwatched(slow_world(), "overlapped")
    )
    assert statistics.median(column(serial, "time/step_s")) >= 5.0
    assert statistics.median(column(overlapped, "time/step_s")) <= 3.3
    assert statistics.median(column(overlapped, "time/wait_s")) <= 0.3
    assert statistics.median(column(serial, "time/wait_s")) >= 2.0
    assert min(column(overlapped, "overlap/ahead_s")[1:]) >= 2.9 > 2.3 >= max(column(serial, "overlap/ahead_s"))


async def train_unwatched(world: World, loop: str) -> World:
    """Beside another one, whose tasks are no leftovers."""
    world.check_tasks = False
    return await train(world, loop, num_steps=3)


@pytest.mark.ranks
async def test_megatron_roles_end_with_the_same_weights_in_both_loops(tmp_path: Path) -> None:
    """Real actor and critic, a fake engine whose tokens span versions: the same batches, so bit for bit the same."""
    model = make_tiny_model(tmp_path / "model")
    records = {}
    for loop in LOOPS:
        records[loop], _ = await test_deterministic.run(model, tmp_path / loop, loop=loop)
    parts = ("policy", "critic", "lag", "packing", "weight_version")
    trained = {
        loop: [{key: value for key, value in record.items() if key.split("/")[0] in parts} for record in written]
        for loop, written in records.items()
    }
    assert trained["serial"] == trained["overlapped"]
    assert any(record["lag/max"] > 0 for record in trained["serial"])
    for file in ("hf/model.safetensors", "critic/model.safetensors", "critic/value_head.safetensors"):
        serial, overlapped = load_file(tmp_path / "serial" / file), load_file(tmp_path / "overlapped" / file)
        assert serial.keys() == overlapped.keys()
        assert all(torch.equal(serial[name], overlapped[name]) for name in serial), file
    start, end = load_file(model / "model.safetensors"), load_file(tmp_path / "serial" / "hf" / "model.safetensors")
    assert not any(torch.equal(start[name], end[name]) for name in start), "a parameter was not trained"
