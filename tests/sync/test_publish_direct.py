"""Direct sends, several engines and the pipeline, against fake engines (they join the groups and receive for real).

Order is proved by events: a fake engine keeps a bucket waiting until the ranks have reported what must come before it.
"""

import asyncio
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_sao.controller.publish import PublishError
from megatron_sao.rollout.engine import GenerateRequest
from megatron_sao.rollout.sglang_client import SGLangEngine
from tests.support.publish_world import LOAD, Held, until, world
from tests.support.toy_actor import events, toy_tensors, toy_values

pytestmark = pytest.mark.ranks
TRAINED = {t.spec.name for t in toy_tensors() if t.trained or t.is_buffer}


@pytest.mark.parametrize("num_ranks", [2, 3])
async def test_direct_sends_arrive_bit_exact_with_a_group_for_each_source_and_nothing_gathered(
    num_ranks: int, tmp_path: Path
) -> None:
    async with world(tmp_path, num_ranks=num_ranks) as parts:
        await parts.train(1)
        await parts.publisher.publish(1, full=True)
        assert parts.serves(1)
        joins = parts.fakes[0].bodies("/init_weights_update_group")
        assert len({join["group_name"] for join in joins}) == len(joins) == num_ranks
        assert {join["rank_offset"] for join in joins} == {1}
        assert {load["group_name"] for load in parts.fakes[0].bodies(LOAD)} == {join["group_name"] for join in joins}
        gathered = events(tmp_path, "gathered")
        assert len(gathered) == num_ranks * len(parts.fakes[0].bodies(LOAD))  # every rank takes part in each
        assert sum(event["num_bytes"] for event in gathered) == 0
        owners = {name: index % num_ranks for index, name in enumerate(toy_values(1))}
        filled = {name: event["rank"] for event in events(tmp_path, "flattened") for name in event["tensors"]}
        assert filled == owners
        await parts.train(2)
        await parts.publisher.publish(2)
        assert all(torch.equal(parts.fakes[0].weights.served[name], toy_values(2)[name]) for name in TRAINED)
        assert len(parts.fakes[0].bodies("/init_weights_update_group")) == num_ranks


async def test_gathered_sends_leave_from_rank_0_alone_and_cost_the_others_bytes(tmp_path: Path) -> None:
    async with world(tmp_path, settings={"sender": "gather"}) as parts:
        await parts.publisher.publish(1, full=True)
        assert {event["rank"] for event in events(tmp_path, "flattened")} == {0}
        received = {rank: sum(e["num_bytes"] for e in events(tmp_path, "gathered", rank)) for rank in (0, 1)}
        elsewhere = [tensor.nbytes for index, tensor in enumerate(toy_values(0).values()) if index % 2]
        assert received == {0: sum(elsewhere), 1: 0}
        assert len(parts.fakes[0].bodies("/init_weights_update_group")) == 1


async def test_a_plan_that_needs_another_source_makes_new_groups_for_all(tmp_path: Path) -> None:
    """With 3 ranks the frozen tensor is one of rank 2's two; the gathered publish before needs rank 0 only."""
    async with world(tmp_path, num_ranks=3, settings={"sender": "gather"}) as parts:
        await parts.publisher.publish(1)
        fake = parts.fakes[0]
        direct = parts.publisher._settings.model_copy(update={"sender": "direct"})
        parts.publisher._settings = direct
        await parts.train(1)
        assert (await parts.publisher.publish(2, full=True)).num_attempts == 1
        assert parts.serves(1)
        joined, left = (fake.bodies(f"/{what}_weights_update_group") for what in ("init", "destroy"))
        assert [join["group_name"].rsplit("-", 1)[-1] for join in joined] == ["0", "0", "1", "2"]
        assert [leave["group_name"] for leave in left] == [joined[0]["group_name"]]
        parts.publisher._settings = direct.model_copy(update={"sender": "gather"})  # a subset of the sources
        assert (await parts.publisher.publish(3)).num_attempts == 1
        assert len(fake.bodies("/init_weights_update_group")) == 4


async def test_two_engines_get_everything_in_one_publish(tmp_path: Path) -> None:
    async with world(tmp_path, num_engines=2) as parts:
        await parts.train(1)
        await parts.publisher.publish(1, full=True)
        assert parts.serves(1)
        for place, fake in enumerate(parts.fakes):
            joins = fake.bodies("/init_weights_update_group")
            assert {(join["rank_offset"], join["world_size"]) for join in joins} == {(1 + place, 3)}
            assert (fake.weight_version, fake.paused, fake.session_open) == ("1", None, False)


async def test_one_engine_that_refuses_makes_all_unknown_and_the_second_attempt_is_full_for_all(tmp_path: Path) -> None:
    async with world(tmp_path, num_engines=2) as parts:
        await parts.publisher.publish(1, full=True)
        before = [len(fake.bodies(LOAD)) for fake in parts.fakes]
        parts.fakes[1].faults.fail_load = {before[1] + 1: 400}
        await parts.train(1)
        report = await parts.publisher.publish(2)
        assert (report.num_attempts, report.full) == (2, True)
        assert parts.serves(1)
        parts.fakes[1].faults.fail_load = {len(parts.fakes[1].bodies(LOAD)) + n: 400 for n in range(9)}
        with pytest.raises(PublishError, match="phase .{4}, bucket 0: .*the attempt before: .*phase .{4}, bucket 0"):
            await parts.publisher.publish(3)
        assert not parts.publisher.engines_are_known
        assert [fake.paused for fake in parts.fakes] == ["retract", "retract"]
        parts.fakes[1].faults.fail_load = {}
        assert (await parts.publisher.publish(4)).full
        assert parts.serves(1)


async def test_an_engine_that_refuses_a_bucket_of_rank_1_wakes_that_rank_far_before_its_deadline(
    tmp_path: Path,
) -> None:
    slow = {"timeout_s": 100.0, "first_timeout_s": 100.0}
    async with world(tmp_path, num_ranks=3, settings=slow) as parts:
        parts.fakes[0].faults.fail_load = {1: 400, 3: 400}  # the second bucket of both attempts is rank 1's
        start_s = time.monotonic()
        with pytest.raises(PublishError, match="phase .{4}, bucket 1: .*HTTP 400.*the attempt before.*.{4}, bucket 1"):
            await parts.publisher.publish(1)
        assert time.monotonic() - start_s < 15
        await parts.train(1)
        assert (await parts.publisher.publish(2)).num_attempts == 1
        assert parts.serves(1)


async def test_a_bucket_of_rank_1_that_no_engine_takes_ends_by_its_deadline_and_names_that_rank(tmp_path: Path) -> None:
    short = {"timeout_s": 2.0, "first_timeout_s": 2.0}
    async with world(tmp_path, num_ranks=3, settings=short) as parts:
        parts.fakes[0].faults.hang_load = frozenset({1, 3})
        start_s = time.monotonic()
        with pytest.raises(PublishError, match=r"phase .{4}, bucket 1: .*actor rank 1, publish phase send: bucket 1"):
            await parts.publisher.publish(1)
        assert time.monotonic() - start_s < 25
        assert (await parts.publisher.publish(2)).full


async def test_a_source_that_raises_is_named_with_its_rank_and_bucket(tmp_path: Path) -> None:
    async with world(tmp_path, num_ranks=3, script={"raise_at": frozenset({1, 3})}) as parts:
        with pytest.raises(PublishError, match=r".{4}, bucket 0: .*rank 1 of 3: .*actor rank 1, .*gather: bucket 1"):
            await parts.publisher.publish(1)
        assert (await parts.publisher.publish(2)).full
        assert parts.serves(0)


@pytest.mark.parametrize("sender", ["gather", "direct"])
async def test_the_next_bucket_is_prepared_while_one_is_on_its_way(tmp_path: Path, sender: str) -> None:
    """Bucket k is received only once every rank has begun, and its source ended, bucket k+1. A rank may have begun
    bucket k+2: gloo takes so few bytes before anybody receives them, and on a slow machine the check comes late."""
    async with world(tmp_path, settings={"sender": sender, "bucket_bytes": 1}) as parts:
        (fake,) = parts.fakes
        num_buckets = len(toy_values(0))  # one tensor each

        async def next_is_prepared(load: int) -> None:
            prepared = min(load + 2, num_buckets)
            await until(lambda: len(events(tmp_path, "flattened")) >= prepared)
            for rank in (0, 1):
                await until(lambda rank=rank: len(events(tmp_path, "gather", rank)) >= prepared)  # type: ignore[misc]
                assert len(events(tmp_path, "gather", rank)) <= prepared + 1

        fake.before[LOAD] = next_is_prepared
        await parts.train(1)
        report = await parts.publisher.publish(1, full=True)
        assert (report.num_attempts, len(fake.bodies(LOAD))) == (1, num_buckets)
        assert parts.serves(1)


async def test_bytes_under_way_are_not_overwritten_and_two_buffers_serve_every_publish(tmp_path: Path) -> None:
    """The engine receives each bucket late: when the next one has been written."""
    async with world(tmp_path, settings={"sender": "gather", "bucket_bytes": 1}) as parts:
        (fake,) = parts.fakes
        num_buckets = len(toy_values(0))  # one tensor each

        async def late(load: int) -> None:
            prepared = min(load + 2, num_buckets * (load // num_buckets + 1))
            await until(lambda: len(events(tmp_path, "flattened")) >= prepared)

        fake.before[LOAD] = late
        for step in (1, 2, 3):
            await parts.train(step)
            await parts.publisher.publish(step, full=True)
            assert parts.serves(step)
            assert fake.arrived[LOAD] == num_buckets * step
        filled = events(tmp_path, "flattened")
        largest = max(sum(toy_values(0)[name].nbytes for name in event["tensors"]) for event in filled)
        assert len({event["buffer"] for event in filled}) == 2
        assert {event["num_bytes"] for event in filled} == {largest}


async def test_send_s_is_the_broadcast_and_not_the_preparation_beside_it(tmp_path: Path) -> None:
    """Gathers take 0.3 s each; the engine receives at once."""
    async with world(tmp_path, settings={"sender": "gather", "bucket_bytes": 1}, script={"gather_s": 0.3}) as parts:
        report = await parts.publisher.publish(1, full=True)
        num_gathers = len(toy_values(0))
        assert report.metrics["publish/gather_s"].value >= 0.3 * num_gathers
        assert report.metrics["publish/send_s"].value < 0.3 * (num_gathers - 1) / 2
        assert report.metrics["publish/prepare_s"].value >= 0.3 * (num_gathers - 1)


SHAPES: dict[str, dict[str, Any]] = {
    "one bucket only": {"bucket_bytes": 10**6},
    "tensors larger than a bucket": {"bucket_bytes": 1},
    "in_place": {"pause": "in_place"},
}


@pytest.mark.parametrize("sender", ["gather", "direct"])
@pytest.mark.parametrize("name", SHAPES)
async def test_publishes_in_a_row_of_any_shape_are_bit_exact(tmp_path: Path, name: str, sender: str) -> None:
    async with world(tmp_path, num_ranks=3, settings=SHAPES[name] | {"sender": sender}) as parts:
        for version, step in enumerate((0, 1, 1, 2)):  # with one of unchanged weights
            await parts.train(step)
            report = await parts.publisher.publish(version, full=True)
            assert (report.num_attempts, parts.fakes[0].weight_version) == (1, str(version))
            assert parts.serves(step)


@pytest.mark.parametrize("sender", ["gather", "direct"])
@pytest.mark.parametrize(
    "path",
    ["/init_weights_update_group", "/pause_generation", "/begin_weight_update", LOAD, "/end_weight_update",
     "/continue_generation"],
)  # fmt: skip
async def test_a_publish_cancelled_in_any_phase_is_followed_by_one_that_succeeds(
    tmp_path: Path, path: str, sender: str
) -> None:
    async with world(tmp_path, settings={"sender": sender}) as parts:
        (fake,) = parts.fakes
        held = Held(fake, path)
        publish = asyncio.create_task(parts.publisher.publish(1))
        await held.reached.wait()
        publish.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publish
        held.go_on.set()
        assert not parts.publisher.engines_are_known
        if path == "/pause_generation":
            await until(lambda: fake.paused is not None)
        was_paused = fake.paused is not None
        if was_paused:
            other = SGLangEngine(fake.url, api_key=None, vocab_size=320, max_tokens=512)
            request = GenerateRequest(rid=uuid.uuid4().hex, input_ids=(5, 6), max_new_tokens=2)
            waiting = asyncio.create_task(other.generate(request))
        await parts.train(1)
        start_s = time.monotonic()
        report = await parts.publisher.publish(2)
        assert report.full
        assert time.monotonic() - start_s < 20
        assert parts.serves(1)
        if was_paused:
            version = 1 if path == "/continue_generation" else 2  # a resume under way brings version 1, which is whole
            assert (await waiting).versions == (version, version)
            await other.close()
