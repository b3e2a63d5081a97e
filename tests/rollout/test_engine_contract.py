"""What an engine does, whichever it is: every story runs against the fake server and against a live SGLang 0.5.23."""

import asyncio
import base64
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_sao.rollout.engine import EngineError, GenerateRequest, PauseMode
from megatron_sao.rollout.sglang_client import SGLangEngine
from tests.conftest import LiveServer
from tests.support.engines import PROMPT, Sender, Subject, eventually, fake_subject, live_subject
from tests.support.tiny_models import load_hf, make_tiny_model

RUNNING_S = 0.3  # from its first token on; a long turn has many to go then


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("other") / "model", seed=1)


@pytest.fixture(params=["fake", pytest.param("live", marks=pytest.mark.live)])
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    if request.param == "fake":
        async with fake_subject() as subject:
            yield subject
    else:
        live, other = request.getfixturevalue("live_server"), request.getfixturevalue("other_model")
        async with live_subject(live, other) as subject:
            yield subject


def _differences(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(left, right, strict=True)]


async def _idle(subject: Subject) -> bool:
    """Whether nothing runs: only then can the cache be flushed."""
    try:
        await subject.engine.flush()
    except EngineError as error:
        if error.status != 400:
            raise
        return False
    return True


async def _until_running(subject: Subject) -> None:
    async def busy() -> bool:
        return not await _idle(subject)

    assert await eventually(busy, timeout_s=60.0), "nothing runs"
    await asyncio.sleep(RUNNING_S)


async def test_every_token_has_one_logprob_and_one_version(subject: Subject) -> None:
    generation = await subject.generate(24)
    assert len(generation.output_ids) == len(generation.logprobs) == 24
    assert generation.versions == (0,) * 24
    assert generation.finish == "length"
    assert generation.matched_stop is None
    assert min(generation.logprobs) < -0.1


async def test_logged_logprobs_are_those_of_the_sampled_tokens(subject: Subject) -> None:
    generation = await subject.generate(40)
    score = await subject.engine.score(PROMPT + generation.output_ids)
    assert score.cached_tokens == 0
    assert score.version == 0
    assert len(score.logprobs) == len(PROMPT) + 39
    assert max(_differences(generation.logprobs, score.logprobs[len(PROMPT) - 1 :])) <= 1e-4


@pytest.mark.live
async def test_live_logprobs_equal_those_of_transformers(live_server: LiveServer, other_model: Path) -> None:
    async with live_subject(live_server, other_model) as subject:
        generation = await subject.generate(64)
        score = await subject.engine.score(PROMPT + generation.output_ids)
    tokens = torch.tensor([PROMPT + generation.output_ids])
    with torch.no_grad():
        logits = load_hf(live_server.model_path)(tokens).logits[0].float()
    expected = logits.log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0].tolist()
    assert max(_differences(score.logprobs, expected)) <= 1e-4
    assert max(_differences(generation.logprobs, expected[len(PROMPT) - 1 :])) <= 1e-4


async def test_a_matched_stop_token_ends_the_turn_and_stays_in_it(subject: Subject) -> None:
    stops = tuple(range(0, 320, 2))
    generation = await subject.generate(200, stops=stops)
    assert generation.finish == "stop"
    assert generation.matched_stop == generation.output_ids[-1]
    assert [token in stops for token in generation.output_ids] == [False] * (len(generation.output_ids) - 1) + [True]
    assert len(generation.logprobs) == len(generation.output_ids)


async def test_without_stop_tokens_only_the_length_ends_a_turn(subject: Subject) -> None:
    """Even the model's own end-of-sequence token does not: one of 320, it comes up in 92 % of the runs."""
    if subject.fake is not None:
        subject.fake.token_delay_s = 0.0
    generation = await subject.generate(800)
    assert (generation.finish, len(generation.output_ids)) == ("length", 800)


async def test_versions_change_at_the_very_token_that_new_weights_sampled(subject: Subject) -> None:
    _, task = subject.start(subject.long_turn // 2)
    async with Sender(subject) as sender:
        await _until_running(subject)
        await subject.engine.pause("retract")
        await sender.publish(subject.other_weights, version=7)
        await subject.engine.resume()
        assert await subject.engine.weight_version() == 7
        generation = await task
        tokens = PROMPT + generation.output_ids
        await subject.engine.flush()
        new = (await subject.engine.score(tokens)).logprobs[len(PROMPT) - 1 :]
        await subject.engine.pause("retract")
        await sender.publish(subject.weights, version=0)
        await subject.engine.resume()
    old = (await subject.engine.score(tokens)).logprobs[len(PROMPT) - 1 :]
    boundary = generation.versions.index(7)
    assert boundary > 0
    assert generation.versions == (0,) * boundary + (7,) * (len(generation.versions) - boundary)
    expected = old[:boundary] + new[boundary:]
    assert max(_differences(generation.logprobs, expected)) <= 1e-4
    assert min(max(_differences(old[i : i + 9], new[i : i + 9])) for i in (boundary - 9, boundary)) > 1e-2


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_paused_turn_stands_still_and_goes_on_after_the_resume(subject: Subject, mode: PauseMode) -> None:
    num_tokens = subject.long_turn // 2
    _, task = subject.start(num_tokens)
    await _until_running(subject)
    await subject.engine.pause(mode)
    done, _ = await asyncio.wait([task], timeout=2.5)
    assert not done
    await subject.engine.resume()
    generation = await task
    assert (generation.finish, len(generation.output_ids)) == ("length", num_tokens)


async def test_an_abort_pause_ends_turns_with_what_they_have(subject: Subject) -> None:
    _, task = subject.start(subject.long_turn)
    await _until_running(subject)
    await subject.engine.pause("abort")
    generation = await task
    assert generation.finish == "abort"
    assert 0 < len(generation.output_ids) < subject.long_turn
    assert len(generation.logprobs) == len(generation.versions) == len(generation.output_ids)


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
async def test_new_requests_wait_during_a_pause(subject: Subject, mode: PauseMode) -> None:
    await subject.engine.pause(mode)
    _, task = subject.start(3)
    done, _ = await asyncio.wait([task], timeout=0.5)
    assert not done
    await subject.engine.resume()
    assert (await task).finish == "length"


async def test_the_cache_is_not_flushed_while_a_turn_runs_unless_it_is_retracted(subject: Subject) -> None:
    subject.start(subject.long_turn)
    await _until_running(subject)
    assert not await _idle(subject)
    await subject.engine.pause("in_place")
    assert not await _idle(subject)
    await subject.engine.resume()
    await subject.engine.pause("retract")
    assert await _idle(subject)


async def test_cached_prompt_tokens_are_told_and_a_flush_forgets_them(subject: Subject) -> None:
    await subject.engine.flush()
    assert (await subject.generate(2)).cached_tokens == 0
    assert (await subject.generate(2)).cached_tokens == len(PROMPT) - 1
    await subject.engine.flush()
    assert (await subject.generate(2)).cached_tokens == 0


async def test_an_update_session_is_opened_and_closed_once(subject: Subject) -> None:
    with pytest.raises(EngineError) as not_open:
        await subject.engine.end_update()
    assert not_open.value.status == 400
    assert await subject.engine.begin_update() is True
    with pytest.raises(EngineError) as opened:
        await subject.engine.begin_update()
    assert opened.value.status == 400
    await subject.engine.end_update()


async def test_weights_outside_a_session_are_refused_at_once(subject: Subject) -> None:
    async with Sender(subject) as sender:
        with pytest.raises(EngineError) as refused:
            await asyncio.wait_for(sender.send(subject.weights, version=1), timeout=10)
    assert refused.value.status == 400
    assert await subject.engine.weight_version() == 0


async def test_weights_that_arrive_under_an_in_place_pause_cannot_flush(subject: Subject) -> None:
    """They are loaded all the same, and the version with them: why a publish pauses by retract."""
    subject.start(subject.long_turn)
    async with Sender(subject) as sender:
        await _until_running(subject)
        await subject.engine.pause("in_place")
        await subject.engine.begin_update()
        with pytest.raises(EngineError) as refused:
            await sender.send(subject.weights, version=3, flush=True)
        assert refused.value.status == 400
        await subject.engine.end_update()


async def test_leaving_a_group_that_is_not_there_is_refused(subject: Subject) -> None:
    with pytest.raises(EngineError) as refused:
        await subject.engine.leave_group("nobody-joined-this")
    assert refused.value.status == 400


async def test_unknown_pause_modes_are_refused(subject: Subject) -> None:
    status, _ = await subject.post("/pause_generation", {"mode": "sideways"})
    assert status == 400


async def test_an_abort_ends_that_turn_and_no_other(subject: Subject) -> None:
    rid, task = subject.start(subject.long_turn)
    _, other = subject.start(subject.long_turn // 3)
    await _until_running(subject)
    await subject.engine.abort(uuid.uuid4().hex)
    await subject.engine.abort(rid)
    generation = await task
    assert generation.finish == "abort"
    assert 0 < len(generation.output_ids) == len(generation.logprobs) < subject.long_turn
    assert (await other).finish == "length"


async def test_an_abort_takes_prefixes_with_it_so_ids_are_all_of_one_length(subject: Subject) -> None:
    async def raw(rid: str) -> str:
        params = {"max_new_tokens": subject.long_turn, "ignore_eos": True, "stop_token_ids": []}
        body = {"rid": rid, "input_ids": list(PROMPT), "sampling_params": params, "logprob_start_len": -1}
        _, text = await subject.post("/generate", body)
        return str(json.loads(text)["meta_info"]["finish_reason"]["type"])

    tasks = [asyncio.create_task(raw(rid)) for rid in ("job-1", "job-10")]
    await _until_running(subject)
    await subject.engine.abort("job-1")
    assert await asyncio.gather(*tasks) == ["abort", "abort"]
    for rid in ("job-1", uuid.uuid4().hex[:31], uuid.uuid4().hex.upper()):
        with pytest.raises(ValueError, match="32 hex digits"):
            GenerateRequest(rid=rid, input_ids=PROMPT, max_new_tokens=1)


async def test_cancelling_a_turn_ends_it_on_the_engine(subject: Subject) -> None:
    _, task = subject.start(subject.long_turn)
    await _until_running(subject)
    assert not await _idle(subject)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await eventually(lambda: _idle(subject), timeout_s=0.5)


async def test_turns_cancelled_while_they_wait_in_a_pause_do_not_run_on_after_it(subject: Subject) -> None:
    await subject.engine.pause("retract")
    tasks = [subject.start(subject.long_turn)[1] for _ in range(4)]
    await asyncio.sleep(0.2)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await subject.engine.resume()
    assert await eventually(lambda: _idle(subject), timeout_s=1.0)


@pytest.mark.parametrize("token", [-1, 320, 10**9])
async def test_ids_outside_the_vocabulary_are_not_sent_and_the_engine_lives(subject: Subject, token: int) -> None:
    with pytest.raises(ValueError, match=f"input id {token} at position 1 is outside the vocabulary of 320"):
        await subject.generate(1, prompt=(1, token))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        await subject.engine.score([1, token])
    assert (await subject.generate(1)).finish == "length"


async def test_more_tokens_than_the_limit_are_not_sent(subject: Subject) -> None:
    with pytest.raises(ValueError, match="4090 prompt tokens and up to 10 new ones exceed"):
        await subject.generate(10, prompt=(5,) * 4090)


async def test_a_request_longer_than_the_context_is_refused_by_the_server(subject: Subject) -> None:
    engine = SGLangEngine(subject.url, api_key=subject.api_key, vocab_size=320, max_tokens=10**6)
    with pytest.raises(EngineError) as refused:
        await engine.generate(GenerateRequest(rid=uuid.uuid4().hex, input_ids=PROMPT, max_new_tokens=5000))
    assert refused.value.status == 400
    await engine.close()


@pytest.mark.parametrize("key", ["wrong", None])
async def test_a_wrong_key_is_refused(subject: Subject, key: str | None) -> None:
    engine = SGLangEngine(subject.url, api_key=key, vocab_size=320, max_tokens=2048)
    for call in (engine.pause(), engine.weight_version(), engine.score(PROMPT)):
        with pytest.raises(EngineError) as refused:
            await call
        assert refused.value.status == 401
    await engine.close()


async def test_published_weights_are_served(subject: Subject) -> None:
    before = await subject.engine.score(PROMPT)
    async with Sender(subject) as sender:
        await subject.engine.pause("retract")
        await sender.publish(subject.other_weights, version=1)
        await subject.engine.resume()
        after = await subject.engine.score(PROMPT)
        assert (after.version, after.cached_tokens) == (1, 0)
        assert max(_differences(before.logprobs, after.logprobs)) > 1e-2
        await subject.engine.pause("retract")
        await sender.publish(subject.weights, version=0)
        await subject.engine.resume()
    again = await subject.engine.score(PROMPT)
    assert max(_differences(before.logprobs, again.logprobs)) <= 1e-6
    if subject.fake is not None:
        assert all(torch.equal(subject.fake.received[name], tensor) for name, tensor in subject.weights.items())


async def test_checksums_show_a_tensor_that_a_publish_left_out(subject: Subject) -> None:
    start = await subject.engine.checksum()
    await subject.engine.pause("retract")
    await subject.engine.reset_tensors()
    noise = await subject.engine.checksum()
    trained = {name for name in start if start[name] != noise[name]}
    assert len(trained) >= 2
    all_but_one = dict(subject.weights)
    left_out = "second" if subject.fake is not None else "model.layers.1.mlp.experts.3.up_proj.weight"
    del all_but_one[left_out]
    async with Sender(subject) as sender:
        await sender.publish(all_but_one, version=0)
        partial = await subject.engine.checksum()
        wrong = [name for name in start if partial[name] != start[name]]
        assert wrong == (["second"] if subject.fake is not None else ["model.layers.1.mlp.experts.w13_weight"])
        await subject.engine.begin_update()
        await sender.send({left_out: subject.weights[left_out]}, version=0)
        await subject.engine.end_update()
    assert await subject.engine.checksum() == start
    await subject.engine.resume()


@pytest.mark.live
async def test_a_live_server_returns_the_experts_that_it_routed_to(live_server: LiveServer, other_model: Path) -> None:
    async with live_subject(live_server, other_model) as subject:
        params: dict[str, Any] = {"max_new_tokens": 5, "ignore_eos": True}
        body = {"input_ids": list(PROMPT), "sampling_params": params, "return_routed_experts": True}
        status, text = await subject.post("/generate", body)
    assert status == 200
    raw = base64.b64decode(json.loads(text)["meta_info"]["routed_experts"])
    experts = torch.frombuffer(bytearray(raw), dtype=torch.int32).reshape(len(PROMPT) + 5 - 1, 2, 2)
    assert experts.min() >= 0
    assert experts.max() < 8
    assert len(experts.unique()) > 2
