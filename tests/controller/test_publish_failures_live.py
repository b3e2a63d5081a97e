"""Publishes that break in the middle, with a real Megatron actor (EP 2) and a live SGLang.

Whatever breaks: the error names it, within the deadlines; the engine, which may hold half of the weights, serves
nothing before a publish of all tensors; and then it serves exactly these.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from megatron_sao.channel import Channel, ChannelServer, DropBatch
from megatron_sao.config import EngineConfig, PublishConfig
from megatron_sao.controller.publish import Publisher, PublishError
from megatron_sao.rollout.engine import GenerateRequest
from megatron_sao.rollout.server import SGLangServer
from megatron_sao.rollout.sglang_client import SGLangEngine, Timeouts
from megatron_sao.sync.verify import fixed_prompt, logprob_difference
from tests.conftest import LiveServer
from tests.controller.test_publish_live import OTHER_PROMPT, hf_logprobs, other_model
from tests.support.engine_proxy import Proxy
from tests.support.live_actor import NUM_RANKS, OTHER, START, run_live_actor
from tests.support.toy_actor import KEY, Script, ended, started

__all__ = ["other_model"]
pytestmark = [pytest.mark.live, pytest.mark.ranks]
LOAD = "/update_weights_from_distributed"
SETTINGS = PublishConfig(sender="gather", bucket_bytes=150_000, timeout_s=6, first_timeout_s=15, logprob_tolerance=1e-4)
CONTROL_S = 8.0
BOUND_S = 75.0  # two attempts: connect, a bucket and the answers of both sides, then leaving, each with its deadline


@dataclass(frozen=True)
class World:
    engine: SGLangEngine
    proxy: Proxy
    other_client: SGLangEngine
    of_b: list[float]

    def publisher(self, actor: Channel) -> Publisher:
        return Publisher([self.engine], actor, SETTINGS, engine_ranks=1, fixed_prompt=fixed_prompt(320))

    async def breaks(self, publisher: Publisher, message: str) -> None:
        """A publish fails with this message in time, and a turn that another client asks for finds no answer."""
        start_s = time.monotonic()
        with pytest.raises(PublishError, match=message):
            await publisher.publish(1, full=True)
        assert time.monotonic() - start_s < BOUND_S
        assert not publisher.engines_are_known

    async def serves_nothing_until_all_of_b_is_published(self, publisher: Publisher, actor: Channel) -> None:
        request = GenerateRequest(rid=uuid.uuid4().hex, input_ids=OTHER_PROMPT, max_new_tokens=4)
        waiting = asyncio.create_task(self.other_client.generate(request))
        done, _ = await asyncio.wait([waiting], timeout=1.5)
        assert not done
        await train(actor, OTHER)
        report = await publisher.publish(7, full=True)
        assert report.full
        assert (await waiting).versions == (7,) * 4
        score = await self.engine.score(OTHER_PROMPT)
        assert logprob_difference(score.logprobs, self.of_b) < 1e-4


async def train(actor: Channel, step: int) -> None:
    await actor.call(DropBatch(batch_id=step), timeout_s=60)


@contextlib.asynccontextmanager
async def clients(url: str, api_key: str, other_model: Path) -> AsyncIterator[World]:
    times = Timeouts(request_s=90, control_s=CONTROL_S)
    async with Proxy(url).running() as proxy:
        made = [
            SGLangEngine(each, api_key=api_key, vocab_size=320, max_tokens=512, timeouts=times)
            for each in (proxy.url, url)
        ]
        yield World(made[0], proxy, made[1], hf_logprobs(other_model, OTHER_PROMPT))
        for engine in made:
            await engine.close()


@contextlib.asynccontextmanager
async def actor(model: Path, other: Path, script: Script) -> AsyncIterator[tuple[Channel, list[BaseProcess]]]:
    channels = ChannelServer()
    port = await channels.start("127.0.0.1", KEY)
    try:
        async with started(NUM_RANKS, run_live_actor, port, model, other, script) as ranks:
            yield await channels.accept("actor", 120), ranks
    finally:
        await channels.close()


GATHER, RANK_GONE = (
    r"actor rank 0, publish phase gather: bucket 2: .* of rank 1",
    r"phase .{4}, bucket 1: actor failed",
)
LOST_RANKS = {
    # name: rank, signal in its gather number 2 (bucket 2, while bucket 1 is sent), what the error says of the attempt
    "rank 0 is killed": (
        0,
        signal.SIGKILL,
        r"phase plan: actor is gone.*before: .*.{4}, bucket 1: actor is gone",
    ),
    "rank 1 is killed": (1, signal.SIGKILL, f"phase plan: actor is gone.*before: .*{RANK_GONE}.*{GATHER}"),
    "rank 1 is stopped": (1, signal.SIGSTOP, f"phase plan: actor is gone.*before: .*{RANK_GONE}.*{GATHER}"),
}


@pytest.mark.parametrize("name", LOST_RANKS)
async def test_a_rank_lost_in_the_middle_is_named_and_a_new_actor_publishes_all(
    name: str, live_server: LiveServer, other_model: Path
) -> None:
    rank, sent, message = LOST_RANKS[name]
    model = live_server.model_path
    async with clients(live_server.url, live_server.api_key, other_model) as world, contextlib.AsyncExitStack() as both:
        lost, healthy = await asyncio.gather(
            both.enter_async_context(actor(model, other_model, Script(signal_at={rank: (2, sent)}))),
            both.enter_async_context(actor(model, other_model, Script())),
        )
        await world.breaks(world.publisher(lost[0]), message)
        others = [process for process in lost[1] if sent is signal.SIGKILL or process is not lost[1][rank]]
        assert None not in await ended(others, 20), "a rank hangs"
        publisher = world.publisher(healthy[0])
        await world.serves_nothing_until_all_of_b_is_published(publisher, healthy[0])
        await back_to_a(publisher, healthy[0])


async def back_to_a(publisher: Publisher, channel: Channel) -> None:
    await train(channel, START)
    await publisher.publish(0, full=True)
    await publisher.close()


async def test_an_engine_that_refuses_in_the_middle_ends_the_broadcast_and_takes_a_full_publish_later(
    live_server: LiveServer, other_model: Path
) -> None:
    """Refused by a proxy: the server waits for nothing; or by the server itself, which never heard of a begin."""
    async with clients(live_server.url, live_server.api_key, other_model) as world:
        async with actor(live_server.model_path, other_model, Script()) as (channel, _):
            publisher = world.publisher(channel)

            async def third_of_both(number: int) -> int | None:
                return 400 if number in (2, 5) else None

            world.proxy.before[LOAD] = third_of_both
            await world.breaks(publisher, ".{4}, bucket 2: .*HTTP 400: .*the attempt before: .*.{4}, bucket 2: .*400")
            await world.serves_nothing_until_all_of_b_is_published(publisher, channel)

            async def swallowed(_: int) -> int | None:
                return 200

            world.proxy.before = {"/begin_weight_update": swallowed}
            await world.breaks(publisher, ".{4}, bucket 0: .*HTTP 400: .*before: .*.{4}, bucket 0: .*HTTP 400")
            world.proxy.before = {}
            await world.serves_nothing_until_all_of_b_is_published(publisher, channel)
            await back_to_a(publisher, channel)


async def test_an_engine_that_is_stopped_and_then_killed_in_the_middle(
    live_server: LiveServer, other_model: Path, tmp_path: Path
) -> None:
    """Stopped, it takes a full publish once it goes on; killed, it is gone, and the actor is at work."""
    key, cores = secrets.token_hex(16), str(max(os.sched_getaffinity(0)))
    config = EngineConfig(max_total_tokens=4096, cpu_cores=cores, start_timeout_s=240.0)
    arguments = {"model_path": live_server.model_path, "dtype": "float32", "api_key": key}
    server = await SGLangServer.start(config, log_path=tmp_path / "sglang.log", **arguments)
    try:
        async with clients(server.url, key, other_model) as world:
            async with actor(live_server.model_path, other_model, Script()) as (channel, ranks):
                publisher = world.publisher(channel)
                await stopped_in_the_middle(world, server, publisher, channel)
                await killed_in_the_middle(world, server, publisher)
                await train(channel, OTHER)
                assert [process.is_alive() for process in ranks] == [True] * NUM_RANKS
    finally:
        await server.stop()


async def stopped_in_the_middle(world: World, server: SGLangServer, publisher: Publisher, channel: Channel) -> None:
    (scheduler,) = (process for process in descendants(server) if "scheduler" in " ".join(process.cmdline()))

    async def stop(number: int) -> None:
        if number == 2:
            scheduler.suspend()

    world.proxy.before[LOAD] = stop
    try:
        await world.breaks(publisher, f"engine .*the attempt before: .*engine {world.engine.name} .*, bucket 2: ")
    finally:
        scheduler.resume()
    await world.serves_nothing_until_all_of_b_is_published(publisher, channel)


async def killed_in_the_middle(world: World, server: SGLangServer, publisher: Publisher) -> None:
    first = world.proxy.arrived[LOAD]

    async def kill(number: int) -> None:
        if number == first + 2:
            for process in descendants(server):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    world.proxy.before[LOAD] = kill
    await world.breaks(publisher, f"engine .*the attempt before: .*engine {world.engine.name} .*, bucket 2: ")


def descendants(server: SGLangServer) -> list[psutil.Process]:
    return psutil.Process(server._process.pid).children(recursive=True)
