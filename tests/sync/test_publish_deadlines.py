"""Deadlines in every phase of a publish, against a fake engine that hangs and an actor that is late."""

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_sao.channel import ChannelServer
from megatron_sao.config import PublishConfig
from megatron_sao.controller.publish import Publisher, PublishError
from megatron_sao.rollout.sglang_client import SGLangEngine
from tests.support.publish_world import LOAD, WaitingEngine, world
from tests.support.toy_actor import KEY, Script, ended, run_toy_actor, started, toy_values

pytestmark = pytest.mark.ranks
CONTROL_S, PHASE_S = 1.0, 1.5
HANGING = {
    # name: the path at which the engine hangs, what the error says of the last attempt
    "connect": ("/init_weights_update_group", r"phase connect: .*"),
    "pause": ("/pause_generation", r"phase pause: engine .*/pause_generation: no valid answer"),
    "begin": ("/begin_weight_update", r"phase begin: engine .*/begin_weight_update: no valid answer"),
    "load": (LOAD, r"phase .{4}, bucket 0: .*"),
    "end": ("/end_weight_update", r"phase recover: engine .*/end_weight_update: no valid answer"),
    "version": ("/model_info", r"phase end: engine .*/model_info: no valid answer"),
    "resume": ("/continue_generation", r"phase resume: engine .*/continue_generation: no valid answer"),
    "leave too": ("/destroy_weights_update_group", r"phase .{4}, bucket 1: .*HTTP 400"),
}


def short() -> dict[str, Any]:
    return {"timeout_s": PHASE_S, "first_timeout_s": PHASE_S, "bucket_bytes": 60}


@pytest.mark.parametrize("sender", ["gather", "direct"])
@pytest.mark.parametrize("name", HANGING)
async def test_an_engine_that_hangs_in_any_phase_ends_the_publish_by_its_deadline_and_is_named(
    tmp_path: Path, name: str, sender: str
) -> None:
    path, message = HANGING[name]
    async with world(tmp_path, settings=short() | {"sender": sender}, control_s=CONTROL_S) as parts:
        (fake,) = parts.fakes
        go_on = asyncio.Event()

        async def hang(_: int) -> None:
            await go_on.wait()

        fake.before[path] = hang
        if name == "leave too":
            fake.faults.fail_load = {1: 400, 3: 400}
        start_s = time.monotonic()
        with pytest.raises(PublishError, match=f"{parts.engines[0].name} failed in {message}.*the attempt before: "):
            await parts.publisher.publish(1)
        assert time.monotonic() - start_s < 2 * (2 * PHASE_S + 6 * CONTROL_S) + 5
        go_on.set()
        fake.before, fake.faults.fail_load = {}, {}
        await parts.train(1)
        assert (await parts.publisher.publish(2)).full
        assert parts.serves(1)


LATE = {
    # name: what the actor does, the last attempt's error
    "plan": ({"hang_in": "plan", "hang_s": 2.5}, r"phase plan: .*publish_plan.*1\.5 s"),
    "listen": ({"hang_in": "listen", "hang_s": 2.5}, r"phase connect: .*publish_listen.*1\.5 s"),
    "join": ({"hang_in": "join", "hang_s": 2.5}, r"phase connect: .*"),
}


@pytest.mark.parametrize("name", LATE)
async def test_an_actor_that_is_late_in_any_phase_ends_the_publish_by_its_deadline(tmp_path: Path, name: str) -> None:
    script, message = LATE[name]
    async with world(tmp_path, settings=short(), script=script, control_s=CONTROL_S) as parts:
        start_s = time.monotonic()
        with pytest.raises(PublishError, match=f"failed in {message}.*the attempt before: "):
            await parts.publisher.publish(1)
        assert time.monotonic() - start_s < 20
        assert parts.fakes[0].paused is None
        assert not parts.fakes[0].bodies(LOAD)


async def test_a_rank_that_is_stopped_in_a_gather_is_named_by_the_one_that_waits_for_it(tmp_path: Path) -> None:
    """Rank 1 stops itself in the gather of bucket 3, which it owns; what is sent meanwhile is bucket 2."""
    channels = ChannelServer()
    port = await channels.start("127.0.0.1", KEY)
    script = Script(signal_at={1: (3, signal.SIGSTOP)})
    async with started(2, run_toy_actor, 2, port, script) as ranks, WaitingEngine(weights=toy_values(0)) as fake:
        actor = await channels.accept("actor", 90)
        engine = SGLangEngine(fake.url, api_key=None, vocab_size=320, max_tokens=512)
        config = PublishConfig(sender="gather", timeout_s=2.0, first_timeout_s=2.0, bucket_bytes=1)
        publisher = Publisher([engine], actor, config, engine_ranks=1, fixed_prompt=None)
        start_s = time.monotonic()
        reason = (
            r".{4}, bucket 2: actor failed .*BrokenWorld: rank 0 of 2: .*actor rank 0, publish phase gather: bucket 3"
        )
        with pytest.raises(PublishError, match=f"phase plan: actor is gone.*the attempt before: .*{reason}"):
            await publisher.publish(1, full=True)
        assert time.monotonic() - start_s < 25
        assert await ended(ranks[:1], 10) == [3]
        assert fake.paused == "retract"
        await engine.close()
    await channels.close()
