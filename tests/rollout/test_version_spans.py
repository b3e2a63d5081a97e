"""Which weights sampled which token: generations of a live SGLang that span publishes, seen through HF transformers."""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_sao.rollout.engine import EngineError, GenerateRequest, Generation
from megatron_sao.rollout.sglang_client import SGLangEngine
from tests.conftest import LiveServer
from tests.controller.test_publish_live import hf_logprobs, other_model, running
from tests.support.engine_proxy import Proxy
from tests.support.engines import eventually
from tests.support.live_actor import OTHER, START

__all__ = ["other_model"]
pytestmark = [pytest.mark.live, pytest.mark.ranks]
EXACT = 1e-4
PROMPTS = tuple(tuple((a * token + 5) % 256 for token in range(12)) for a in (3, 7, 11))
SHARED = tuple((13 * token + 1) % 256 for token in range(300))
NUM_TOKENS = 3500


async def generate(engine: SGLangEngine, prompt: Sequence[int], num_tokens: int, rid: str | None = None) -> Generation:
    rid = rid or uuid.uuid4().hex
    return await engine.generate(GenerateRequest(rid=rid, input_ids=tuple(prompt), max_new_tokens=num_tokens))


async def busy(engine: SGLangEngine) -> bool:
    """Whether something runs: only then is a flush refused."""
    try:
        await engine.flush()
    except EngineError as error:
        return error.status == 400
    return False


async def started(engine: SGLangEngine, prompts: Sequence[Sequence[int]]) -> dict[str, "asyncio.Task[Generation]"]:
    """Turns far too long to end, by request id, once they run. The cache was emptied until then."""
    rids = [uuid.uuid4().hex for _ in prompts]
    turns = zip(prompts, rids, strict=True)
    tasks = {rid: asyncio.create_task(generate(engine, prompt, NUM_TOKENS, rid)) for prompt, rid in turns}
    assert await eventually(lambda: busy(engine), timeout_s=60)
    await asyncio.sleep(0.5)  # some tokens; the spans prove it
    return tasks


async def stopped(engine: SGLangEngine, tasks: Mapping[str, "asyncio.Task[Generation]"]) -> list[Generation]:
    """What they have so far."""
    assert not any(task.done() for task in tasks.values())
    for rid in tasks:
        await engine.abort(rid)
    generations = await asyncio.gather(*tasks.values())
    assert {generation.finish for generation in generations} == {"abort"}
    return generations


def differences(generation: Generation, prompt: Sequence[int], model: Path) -> list[float]:
    """|log-prob - HF's| of each generated token, under one checkpoint."""
    expected = hf_logprobs(model, (*prompt, *generation.output_ids))[len(prompt) - 1 :]
    return [abs(a - b) for a, b in zip(generation.logprobs, expected, strict=True)]


def of_versions(
    generation: Generation, prompt: Sequence[int], models: Mapping[int, Path], shift: int = 0
) -> dict[int, list[float]]:
    """By version, the differences of its tokens to the checkpoint of that version. `shift`: spans that many late."""
    by_model = {model: differences(generation, prompt, model) for model in set(models.values())}
    last = len(generation.versions) - 1
    versions = [generation.versions[min(last, max(0, place - shift))] for place in range(last + 1)]
    found: dict[int, list[float]] = {version: [] for version in models}
    for place, version in enumerate(versions):
        found[version].append(by_model[models[version]][place])
    return found


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_the_tokens_of_running_turns_carry_the_version_that_sampled_them_across_two_publishes(
    live_server: LiveServer, other_model: Path, mode: str, record_testsuite_property: Any
) -> None:
    """Turns are far from their end at each publish: nothing is drained. In place, SGLang's scheduler has one more step
    under way at the pause, whose token it gives the version after.
    """
    models = {0: live_server.model_path, 1: other_model, 2: live_server.model_path}
    async with running(live_server, other_model, settings={"pause": mode}) as parts:
        tasks = await started(parts.engine, PROMPTS)
        for version, step in ((1, OTHER), (2, START)):
            await parts.set_weights(step)
            report = await parts.publisher.publish(version)
            record_testsuite_property(f"{mode}: pause_s", report.metrics["publish/pause_s"].value)
            assert (report.num_attempts, report.full) == (1, False)
            await asyncio.sleep(1.0)
        generations = await stopped(parts.engine, tasks)
    shifted = []
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        counts = [generation.versions.count(version) for version in (0, 1, 2)]
        assert generation.versions == (0,) * counts[0] + (1,) * counts[1] + (2,) * counts[2]
        assert min(counts) > 2
        found = of_versions(generation, prompt, models)
        assert max(found[0]) <= EXACT
        for version in (1, 2):
            later = found[version][1:]
            told = len(later), max(later), sum(later) / len(later), found[version][0]
            record_testsuite_property(f"{mode}, version {version}: tokens, max, mean, first token", told)
            if mode == "retract":
                assert max(found[version]) <= EXACT
        late = of_versions(generation, prompt, models, shift=1)
        early = of_versions(generation, prompt, models, shift=-1)
        shifted.append((max(late[0]), max(early[1][:1]), max(found[1][1:])))
    after, before, kept = (max(each) for each in zip(*shifted, strict=True))
    if mode == "retract":
        assert min(after, before) > 1e-2, "spans that begin a token late or early would be seen"
    else:
        assert kept > 1e-2, "this mode keeps KV of the old weights"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_turn_that_begins_after_the_switch_reads_no_kv_of_older_weights(
    live_server: LiveServer, other_model: Path, mode: str
) -> None:
    """One long turn runs all the time, so that an in_place publish cannot flush; one turn is asked for in the pause."""
    async with running(live_server, other_model, settings={"pause": mode}) as parts:
        await parts.publisher.publish(1)
        long = await started(parts.engine, PROMPTS[:1])
        cached = [(await generate(parts.engine, SHARED, 4)).cached_tokens for _ in range(2)]
        assert cached == [0, len(SHARED) - 1]
        await parts.set_weights(OTHER)
        publish = asyncio.create_task(parts.publisher.publish(2))
        async with asyncio.timeout(30):
            while parts.engine._running.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        asked = asyncio.create_task(generate(parts.engine, SHARED, 30))
        await publish
        for cached_tokens, turn in ((0, asked), (len(SHARED) - 1, generate(parts.engine, SHARED, 30))):
            generation = await turn
            assert (set(generation.versions), generation.cached_tokens) == ({2}, cached_tokens)
            assert max(differences(generation, SHARED, other_model)) <= EXACT
        score = await parts.engine.score(SHARED)
        of_b = hf_logprobs(other_model, SHARED)
        assert max(abs(a - b) for a, b in zip(score.logprobs, of_b, strict=True)) <= EXACT
        await stopped(parts.engine, long)


async def test_a_turn_that_was_on_its_way_when_an_in_place_pause_came_reads_no_kv_of_older_weights(
    live_server: LiveServer, other_model: Path
) -> None:
    """A proxy keeps it back until the engine is paused: it carries the cache key of the version before."""
    async with Proxy(live_server.url).running() as proxy:
        async with running(live_server, other_model, settings={"pause": "in_place"}, url=proxy.url) as parts:
            await parts.publisher.publish(1)
            long = await started(parts.engine, PROMPTS[:1])
            await generate(parts.engine, SHARED, 4)
            await parts.set_weights(OTHER)
            paused, sent = asyncio.Event(), asyncio.Event()

            async def until_paused(_: int) -> None:
                sent.set()
                await paused.wait()

            async def is_paused(_: int) -> None:
                paused.set()

            proxy.before = {"/generate": until_paused, "/begin_weight_update": is_paused}
            late = asyncio.create_task(generate(parts.engine, SHARED, 30))
            await sent.wait()
            await parts.publisher.publish(2)
            generation = await late
            await stopped(parts.engine, long)
        assert set(generation.versions) == {2}
        assert max(differences(generation, SHARED, other_model)) <= EXACT
