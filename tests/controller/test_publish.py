"""A publish against the fake engine (it joins the group and receives for real) by a toy actor of one or two ranks.

Nobody hangs: every wait of these tests ends by the deadlines under test, far below the test's own.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from megatron_sao.channel import Answer, Channel, ChannelServer, Command, DropBatch, Score, Tensors
from megatron_sao.config import PublishConfig
from megatron_sao.controller.publish import Publisher, PublishError
from megatron_sao.rollout.engine import GenerateRequest, Generation
from megatron_sao.rollout.sglang_client import SGLangEngine, Timeouts
from megatron_sao.sync.verify import fixed_prompt
from tests.support.fake_engine import FakeEngine, Faults
from tests.support.ranks import run_ranks
from tests.support.toy_actor import KEY, Script, run_toy_actor, toy_tensors, toy_values

pytestmark = pytest.mark.ranks
NO_TENSORS: Tensors = {}
TRAINED = {t.spec.name for t in toy_tensors() if t.trained or t.is_buffer}
FROZEN = {t.spec.name for t in toy_tensors()} - TRAINED


class ScoringActor:
    """The toy actor with the fake engine's own log-probs as its answer to `Score`, plus an error."""

    def __init__(self, actor: Channel, fake: FakeEngine) -> None:
        self._actor, self._fake = actor, fake
        self.role, self.close = actor.role, actor.close
        self.error = 0.0
        self.commands: list[str] = []

    async def call(self, command: Command, tensors: Tensors = NO_TENSORS, *, timeout_s: float) -> Answer:
        self.commands.append(command.name)
        if not isinstance(command, Score):
            return await self._actor.call(command, tensors, timeout_s=timeout_s)
        ids = [int(token) for token in tensors["token_ids"]]
        logprobs = [self._fake.logprob(*pair) + self.error for pair in zip(ids, ids[1:], strict=False)]
        return Answer(tensors={"logprobs": np.array(logprobs, dtype=np.float32)})

    async def train(self, version: int) -> None:
        await self.call(DropBatch(batch_id=version + 1), timeout_s=30)


@dataclass(frozen=True)
class Parts:
    fake: FakeEngine
    engine: SGLangEngine
    actor: ScoringActor
    publisher: Publisher

    def served_is(self, step: int, names: set[str] | None = None) -> bool:
        expected, served = toy_values(step), self.fake.weights.served
        return all(torch.equal(served[name], expected[name]) for name in names or set(expected))

    def paths(self) -> list[str]:
        return [path for path, _ in self.fake.calls]


@asynccontextmanager
async def running(
    *,
    num_ranks: int = 1,
    faults: Faults | None = None,
    script: Script = Script(),
    version: str = "0.5.23",
    settings: Mapping[str, Any] = {},
) -> AsyncIterator[Parts]:
    """Toy actor, fake engine that has loaded the start weights, and a publisher. Buckets hold one or two tensors."""
    server = ChannelServer()
    port = await server.start("127.0.0.1", KEY)
    ranks = asyncio.create_task(
        asyncio.to_thread(run_ranks, num_ranks, run_toy_actor, num_ranks, port, script, timeout_s=150)
    )
    try:
        async with FakeEngine(version=version, weights=toy_values(0), faults=faults) as fake:
            actor = ScoringActor(await server.accept("actor", 90), fake)
            times = Timeouts(request_s=20, control_s=5)
            engine = SGLangEngine(fake.url, api_key=None, vocab_size=320, max_tokens=512, timeouts=times)
            config = PublishConfig(
                **(
                    {
                        "sender": "gather",
                        "bucket_bytes": 150,
                        "timeout_s": 3.0,
                        "first_timeout_s": 10.0,
                        "logprob_tolerance": 1e-2,
                    }
                    | settings
                )
            )
            publisher = Publisher([engine], actor, config, engine_ranks=1, fixed_prompt=fixed_prompt(320))
            try:
                yield Parts(fake, engine, actor, publisher)
            finally:
                await publisher.close()
                await engine.close()
    finally:
        await server.close()
        await asyncio.wait_for(ranks, 60)


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_a_publish_brings_every_trained_tensor_bit_exact_and_the_group_stays(num_ranks: int) -> None:
    async with running(num_ranks=num_ranks) as parts:
        full = await parts.publisher.publish(0, full=True)
        assert set(parts.fake.received) == TRAINED | FROZEN
        assert full.num_bytes == sum(tensor.nbytes for tensor in toy_values(0).values())
        await parts.actor.train(0)
        parts.fake.weights.received.clear()
        report = await parts.publisher.publish(1)
        assert set(parts.fake.received) == TRAINED
        assert parts.served_is(1, TRAINED)
        assert parts.served_is(0, FROZEN)
        assert parts.fake.weight_version == "1"
        assert report.num_bytes == sum(toy_values(1)[name].nbytes for name in TRAINED)
        assert report.metrics["publish/bytes"].value == report.num_bytes
        assert report.metrics["publish/logprob_max_difference"].value < 1e-6
        assert (report.num_attempts, parts.paths().count("/init_weights_update_group")) == (1, 1)
        for phase in ("total", "plan", "pause", "prepare", "gather", "flatten", "send", "load", "resume"):
            assert 0 <= report.metrics[f"publish/{phase}_s"].value < 30


async def test_a_publish_pauses_begins_loads_ends_resumes_and_only_the_last_bucket_has_version_and_flush() -> None:
    async with running() as parts:
        await parts.publisher.publish(7, full=True)
        paths = [path for path in parts.paths() if path not in ("/init_weights_update_group", "/generate")]
        loads = [body for path, body in parts.fake.calls if path == "/update_weights_from_distributed"]
        load = ["/update_weights_from_distributed"] * len(loads)
        begin, end = ["/pause_generation", "/begin_weight_update"], ["/end_weight_update", "/model_info"]
        assert paths == [*begin, *load, *end, "/continue_generation"]
        assert len(loads) > 2
        assert [body["weight_version"] for body in loads] == [None] * (len(loads) - 1) + ["7"]
        assert [body["flush_cache"] for body in loads] == [False] * (len(loads) - 1) + [True]
        assert dict(parts.fake.calls)["/pause_generation"] == {"mode": "retract"}


async def generate_and_close(engine: SGLangEngine, request: GenerateRequest) -> Generation:
    try:
        return await engine.generate(request)
    finally:
        await engine.close()


async def generating(parts: Parts) -> "asyncio.Task[Any]":
    """A request that waits at the paused engine: another client's, since the publishing one keeps its own back."""
    other = SGLangEngine(parts.fake.url, api_key=None, vocab_size=320, max_tokens=512, timeouts=Timeouts(request_s=20))
    request = GenerateRequest(rid=uuid.uuid4().hex, input_ids=(5, 6, 7), max_new_tokens=4)
    task = asyncio.create_task(generate_and_close(other, request))
    for _ in range(500):
        if parts.fake.waiting:
            break
        await asyncio.sleep(0.01)
    assert parts.fake.waiting
    return task


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    # name: what breaks in both attempts of the first publish, what the error says
    "load refused": ({"faults": Faults(fail_load={1: 400, 2: 400})}, r"phase .{4}, bucket [01]: .*HTTP 400"),
    "load hangs": (
        {"faults": Faults(hang_load=frozenset({1, 2}))},
        r"phase .{4}, bucket [01]: .*(not done within|Timed out)",
    ),
    "begin refused": ({"faults": Faults(fail_calls={"/begin_weight_update": 400})}, r"phase begin: .*HTTP 400"),
    "join refused": ({"faults": Faults(fail_calls={"/init_weights_update_group": 400})}, r"phase connect: .*HTTP 400"),
    "resume refused": ({"faults": Faults(fail_calls={"/continue_generation": 500})}, r"phase resume: .*HTTP 500"),
    "end refused": ({"faults": Faults(fail_calls={"/end_weight_update": 500})}, r"phase end: .*HTTP 500"),
    "gather raises": (
        {"script": Script(raise_at=frozenset({1, 2}))},
        r"phase prepare: actor failed .*phase gather: bucket 0: scripted failure.*; the attempt before: "
        r".*phase .{4}, bucket 0: actor failed .*phase gather: bucket 1: scripted failure",
    ),
    "a tensor forgotten": (
        {"script": Script(forget_at=frozenset({0, 1}))},
        r"prepare: .*phase flatten: bucket 0: .* bytes were",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_publish_names_its_phase_and_the_engine_serves_nothing_until_a_full_one(name: str) -> None:
    arguments, message = BROKEN[name]
    settings = {"bucket_bytes": 100, "first_timeout_s": 3.0}
    async with running(**arguments, settings=settings) as parts:
        start_s = time.monotonic()
        with pytest.raises(PublishError, match=message):
            await parts.publisher.publish(1, full=True)
        assert time.monotonic() - start_s < 20
        assert not parts.publisher.engines_are_known
        parts.fake.faults.fail_calls = {}
        if parts.fake.paused is None:  # the engine was never paused: it has its old weights, whole
            assert not parts.fake.received
            await parts.engine.pause("retract")
        waiting = await generating(parts)
        assert not waiting.done()
        report = await parts.publisher.publish(2)
        assert report.full
        assert parts.served_is(0)
        assert (await waiting).versions == (2, 2, 2, 2)


async def test_one_failure_is_repaired_by_a_second_attempt_with_a_new_group_and_all_tensors() -> None:
    async with running(faults=Faults(fail_load={1: 400})) as parts:
        await parts.actor.train(0)
        report = await parts.publisher.publish(1)
        assert (report.num_attempts, report.full) == (2, True)
        assert parts.served_is(1)
        groups = [body["group_name"] for path, body in parts.fake.calls if path == "/init_weights_update_group"]
        assert len(set(groups)) == 2
        assert not parts.fake.session_open
        await parts.actor.train(1)
        assert not (await parts.publisher.publish(2)).full


async def test_an_engine_that_refuses_wakes_the_sender_long_before_its_deadline() -> None:
    slow = {"timeout_s": 120.0, "first_timeout_s": 120.0}
    async with running(faults=Faults(fail_load={0: 400, 1: 400}), settings=slow) as parts:
        start_s = time.monotonic()
        with pytest.raises(PublishError, match="phase .{4}, bucket 0"):
            await parts.publisher.publish(1)
        assert time.monotonic() - start_s < 15
        assert (await parts.publisher.publish(1)).full


async def test_an_engine_that_dies_ends_the_publish_and_leaves_the_actor_at_work() -> None:
    slow = {"timeout_s": 60.0, "first_timeout_s": 60.0}
    async with running(settings=slow) as parts:
        await parts.publisher.publish(0)
        parts.fake.died = "scripted"
        start_s = time.monotonic()
        with pytest.raises(PublishError, match="phase pause"):
            await parts.publisher.publish(1)
        assert time.monotonic() - start_s < 30
        await parts.actor.train(0)


async def test_wrong_log_probs_after_a_publish_withdraw_the_engine() -> None:
    async with running() as parts:
        parts.actor.error = 0.5
        with pytest.raises(RuntimeError, match=r"differ on the fixed prompt by at most 0\.5 nats"):
            await parts.publisher.publish(1)
        assert parts.fake.paused == "retract"
        assert not parts.publisher.engines_are_known


async def test_the_first_publish_brings_every_checksum_back() -> None:
    async with running() as parts:
        loaded = parts.fake.weights.checksums()
        await parts.publisher.first_publish()
        assert parts.fake.weights.checksums() == loaded
        checks = [body["action"] for path, body in parts.fake.calls if path == "/weights_checker"]
        assert checks == ["checksum", "reset_tensors", "checksum", "checksum"]
        assert parts.publisher.engines_are_known


async def test_a_tensor_that_the_engine_loses_is_named_by_the_first_publish_and_nothing_is_served() -> None:
    lost = "model.layers.0.mlp.experts.1.up_proj.weight"
    async with running(faults=Faults(skip_tensors=frozenset({lost}))) as parts:
        with pytest.raises(RuntimeError, match=f"left 1 of 6 engine tensors .*{lost}"):
            await parts.publisher.first_publish()
        assert parts.fake.paused == "retract"
        assert "/continue_generation" not in parts.paths()


async def test_an_engine_without_checksums_and_sessions_is_verified_by_log_probs_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(version="0.5.20") as parts:
        with caplog.at_level(logging.WARNING):
            report = await parts.publisher.first_publish()
        assert "verified by the log-probs of a fixed prompt only" in caplog.text
        assert "reset_tensors" not in [body["action"] for path, body in parts.fake.calls if path == "/weights_checker"]
        assert "publish/logprob_max_difference" in report.metrics
        assert parts.served_is(0)


async def test_an_engine_that_dies_while_it_loads_wakes_the_sender_and_leaves_the_actor_at_work() -> None:
    slow = {"timeout_s": 60.0, "first_timeout_s": 60.0}
    async with running(faults=Faults(hang_load=frozenset({1})), settings=slow) as parts:
        publish = asyncio.create_task(parts.publisher.publish(1))
        async with asyncio.timeout(20):
            while parts.paths().count("/update_weights_from_distributed") < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        start_s = time.monotonic()
        await parts.fake.stop()
        with pytest.raises(PublishError, match=r"the attempt before: .*phase .{4}, bucket 1: "):
            await publish
        assert time.monotonic() - start_s < 25
        await parts.actor.train(0)


async def test_a_pause_ends_by_its_own_bound_however_long_its_phases_may_take() -> None:
    slow = {"timeout_s": 60.0, "first_timeout_s": 60.0, "max_pause_s": 1.0}
    async with running(faults=Faults(hang_load=frozenset({0, 1})), settings=slow) as parts:
        start_s = time.monotonic()
        with pytest.raises(
            PublishError, match=r"phase load: the engines have stood still for publish\.max_pause_s = 1 s"
        ):
            await parts.publisher.publish(1)
        assert time.monotonic() - start_s < 20
        assert not parts.publisher.engines_are_known
        report = await parts.publisher.publish(2)
        assert report.metrics["publish/pause_s"].value > 1.0  # since the first attempt's pause
