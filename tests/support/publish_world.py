"""A toy actor, fake engines that wait where a test says, and a publisher of direct sends."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from megatron_sao.channel import Channel, ChannelServer, DropBatch
from megatron_sao.config import PublishConfig
from megatron_sao.controller.publish import Publisher
from megatron_sao.rollout.sglang_client import SGLangEngine, Timeouts
from tests.support.fake_engine import FakeEngine
from tests.support.ranks import run_ranks
from tests.support.toy_actor import KEY, Script, run_toy_actor, toy_values

LOAD = "/update_weights_from_distributed"
Before = Callable[[int], Awaitable[None]]


class WaitingEngine(FakeEngine):
    """The fake engine; before it hears call number n (from 0) of a path it does what a test says."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.before: dict[str, Before] = {}
        self.arrived: Counter[str] = Counter()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        number, self.arrived[request.path] = self.arrived[request.path], self.arrived[request.path] + 1
        await request.read()  # a client that hangs up meanwhile has asked all the same
        if request.path in self.before:
            await self.before[request.path](number)
        return await super()._guard(request, handler)

    def bodies(self, path: str) -> list[Any]:
        return [body for called, body in self.calls if called == path]


class Held:
    """Holds the next call of a path back, until a test lets it go on."""

    def __init__(self, fake: WaitingEngine, path: str, number: int = 0) -> None:
        self.reached, self.go_on, self._number = asyncio.Event(), asyncio.Event(), fake.arrived[path] + number
        fake.before[path] = self._wait

    async def _wait(self, number: int) -> None:
        if number == self._number:
            self.reached.set()
            await self.go_on.wait()


@dataclass(frozen=True)
class World:
    fakes: tuple[WaitingEngine, ...]
    engines: tuple[SGLangEngine, ...]
    actor: Channel
    publisher: Publisher
    report: Path

    async def train(self, step: int) -> None:
        await self.actor.call(DropBatch(batch_id=step), timeout_s=30)

    def serves(self, step: int) -> bool:
        expected = toy_values(step)
        return all(torch.equal(fake.weights.served[name], expected[name]) for fake in self.fakes for name in expected)


@asynccontextmanager
async def world(
    report: Path,
    *,
    num_ranks: int = 2,
    num_engines: int = 1,
    script: Mapping[str, Any] = {},
    settings: Mapping[str, Any] = {},
    control_s: float = 5.0,
) -> AsyncIterator[World]:
    """A toy actor, engines that have loaded its start weights, and a publisher of direct sends of one tensor each."""
    channels = ChannelServer()
    port = await channels.start("127.0.0.1", KEY)
    told = Script(report=report, **script)
    ranks = asyncio.create_task(
        asyncio.to_thread(run_ranks, num_ranks, run_toy_actor, num_ranks, port, told, timeout_s=120)
    )
    config = {"bucket_bytes": 60, "timeout_s": 20.0, "first_timeout_s": 20.0, "sender": "direct"} | settings
    try:
        async with contextlib.AsyncExitStack() as stack:
            fakes, engines = [], []
            for _ in range(num_engines):
                fakes.append(await stack.enter_async_context(WaitingEngine(weights=toy_values(0), group_timeout_s=5.0)))
                times = Timeouts(request_s=20, control_s=control_s)
                engines.append(
                    SGLangEngine(fakes[-1].url, api_key=None, vocab_size=320, max_tokens=512, timeouts=times)
                )
                stack.push_async_callback(engines[-1].close)
            actor = await channels.accept("actor", 90)
            publisher = Publisher(engines, actor, PublishConfig(**config), engine_ranks=1, fixed_prompt=None)
            stack.push_async_callback(publisher.close)
            yield World(tuple(fakes), tuple(engines), actor, publisher, report)
    finally:
        await channels.close()
        await asyncio.wait_for(ranks, 60)


async def until(claim: Callable[[], bool], timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not claim():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
