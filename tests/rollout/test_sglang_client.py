"""The client against a server that fails, lies, hangs or is old (the fake one): an error each time, never a sample."""

import asyncio
import copy
import socket
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from megatron_sao.rollout import sglang_client
from megatron_sao.rollout.engine import EngineError, GenerateRequest
from megatron_sao.rollout.sglang_answer import expand_spans
from megatron_sao.rollout.sglang_client import SAMPLING, SGLangEngine, Timeouts
from megatron_sao.types import Bucket
from tests.support.engines import PROMPT, Sender, eventually, fake_subject
from tests.support.fake_engine import FakeEngine

Edit = Callable[[dict[str, Any]], None]


def _request(num_tokens: int = 6, **fields: Any) -> GenerateRequest:
    return GenerateRequest(rid=uuid.uuid4().hex, input_ids=PROMPT, max_new_tokens=num_tokens, **fields)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _nothing_runs(fake: FakeEngine | None) -> bool:
    return fake is not None and not fake.running


async def _something_runs(fake: FakeEngine | None) -> bool:
    return fake is not None and bool(fake.running)


def _meta(key: str, edit: Callable[[Any], Any]) -> Edit:
    def apply(answer: dict[str, Any]) -> None:
        answer["meta_info"][key] = edit(answer["meta_info"][key])

    return apply


def _drop(key: str) -> Edit:
    def apply(answer: dict[str, Any]) -> None:
        del answer["meta_info"][key]

    return apply


def _emptied(answer: dict[str, Any]) -> None:
    answer["output_ids"] = []
    answer["meta_info"] |= {"output_token_logprobs": [], "weight_versions": []}


LIES: dict[str, tuple[Edit, str]] = {
    "a dropped log-prob": (_meta("output_token_logprobs", lambda e: e[:-1]), "5 log-probs for 6 generated tokens"),
    "no log-probs": (_drop("output_token_logprobs"), "no 'output_token_logprobs'"),
    "null log-probs": (_meta("output_token_logprobs", lambda _: None), "NoneType"),
    "a null log-prob": (_meta("output_token_logprobs", lambda e: [[None, *e[0][1:]], *e[1:]]), "a log-prob is None"),
    "a positive log-prob": (_meta("output_token_logprobs", lambda e: [[0.5, *e[0][1:]], *e[1:]]), "above 0"),
    "an infinite log-prob": (
        _meta("output_token_logprobs", lambda e: [[float("-inf"), *e[0][1:]], *e[1:]]),
        "not finite",
    ),
    "log-probs of other tokens": (_meta("output_token_logprobs", lambda e: e[1:] + e[:1]), "belong to other tokens"),
    "spans shifted by one": (
        _meta("weight_versions", lambda s: [{**s[0], "start": 1, "end": 7}]),
        "do not follow each other",
    ),
    "spans that are too short": (_meta("weight_versions", lambda s: [{**s[0], "end": 5}]), "cover 5 of 6"),
    "no spans": (_drop("weight_versions"), "no 'weight_versions'"),
    "a version that is no number": (_meta("weight_versions", lambda s: [{**s[0], "version": "default"}]), "default"),
    "an empty answer": (_emptied, "no token was generated"),
    "no tokens": (lambda answer: answer.pop("output_ids"), "no 'output_ids'"),
    "an unknown finish reason": (_meta("finish_reason", lambda _: {"type": "bored"}), "unknown finish reason"),
    "no finish reason": (_meta("finish_reason", lambda _: None), "NoneType"),
}


@pytest.mark.parametrize("lie", LIES)
async def test_an_answer_that_does_not_fit_its_tokens_is_an_error(lie: str) -> None:
    edit, message = LIES[lie]

    def edited(answer: dict[str, Any]) -> dict[str, Any]:
        answer = copy.deepcopy(answer)
        edit(answer)
        return answer

    async with fake_subject(token_delay_s=0.0) as subject:
        assert subject.fake is not None
        subject.fake.faults.edit_generation = edited
        with pytest.raises(EngineError, match=message) as failed:
            await subject.engine.generate(_request())
        assert failed.value.status is None
        assert failed.value.engine == subject.engine.name
        subject.fake.faults.edit_generation = None
        assert len((await subject.engine.generate(_request())).output_ids) == 6


@pytest.mark.parametrize(("answer", "message"), [(b"{oops", "not JSON"), (b"[]", "list"), (None, "disconnected")])
async def test_a_broken_answer_is_an_error_and_is_not_asked_for_again(answer: bytes | None, message: str) -> None:
    async with fake_subject(token_delay_s=0.0) as subject:
        assert subject.fake is not None
        subject.fake.faults.edit_generation = lambda _: answer
        with pytest.raises(EngineError, match=message):
            await subject.engine.generate(_request())
        assert [path for path, _ in subject.fake.calls].count("/generate") == 1


@pytest.mark.parametrize("status", [400, 500, 503])
async def test_an_http_error_carries_its_status_and_text(status: int) -> None:
    async with fake_subject() as subject:
        assert subject.fake is not None
        subject.fake.faults.fail_generate_status = status
        with pytest.raises(EngineError, match="scripted") as failed:
            await subject.engine.generate(_request())
        assert (failed.value.status, failed.value.call) == (status, "/generate")


async def test_a_silent_engine_meets_a_deadline_and_the_request_is_aborted() -> None:
    async with fake_subject(token_delay_s=0.05) as subject:
        assert subject.fake is not None
        engine = SGLangEngine(
            subject.url, api_key="secret", vocab_size=320, max_tokens=2048, timeouts=Timeouts(request_s=0.3)
        )
        request = _request(200)
        with pytest.raises(EngineError, match=r"no answer within 0\.3 s"):
            await engine.generate(request)
        await engine.close()
        assert {"rid": request.rid, "abort_all": False} in [body for path, body in subject.fake.calls]
        assert await eventually(lambda: _nothing_runs(subject.fake), timeout_s=1.0)
        subject.fake.faults.hang_generate = True
        with pytest.raises(EngineError, match="no answer within"):
            await engine.generate(_request())
        await engine.close()


async def test_closing_does_not_wait_for_aborts_that_a_hanging_engine_never_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sglang_client, "CLOSE_TIMEOUT_S", 0.2)
    async with fake_subject(token_delay_s=0.05) as subject:
        assert subject.fake is not None
        subject.fake.faults.hang_abort = True
        task = asyncio.create_task(subject.engine.generate(_request(200)))
        assert await eventually(lambda: _something_runs(subject.fake), timeout_s=2.0)
        task.cancel()
        await asyncio.wait((task,))
        aborts = [task for task in asyncio.all_tasks() if task.get_name().startswith("abort ")]
        async with asyncio.timeout(2.0):
            await subject.engine.close()
        assert [task.cancelled() for task in aborts] == [True]


async def test_a_refused_connection_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_client, "CONNECT_BACKOFF_S", 0.05)  # 0.35 s in all
    port = _free_port()
    engine = SGLangEngine(f"http://127.0.0.1:{port}", api_key=None, vocab_size=320, max_tokens=64)
    late = FakeEngine()
    task = asyncio.create_task(engine.generate(_request()))
    await asyncio.sleep(0.1)
    await late.start(port)
    assert len((await task).output_ids) == 6
    await late.stop()
    with pytest.raises(EngineError, match="Cannot connect"):
        await engine.generate(_request())
    await engine.close()


async def test_every_sampling_field_is_sent_with_every_request() -> None:
    async with fake_subject(token_delay_s=0.0) as subject:
        assert subject.fake is not None
        await subject.engine.generate(_request(stop_token_ids=(2,)))
        await subject.engine.generate(_request())
        await subject.engine.score(PROMPT)
        first, second, score = [body for _, body in subject.fake.calls]
        for body in (first, second, score):
            assert SAMPLING.items() <= body["sampling_params"].items()
            assert body["return_logprob"] is True
        assert (first["sampling_params"]["stop_token_ids"], first["sampling_params"]["ignore_eos"]) == ([2], False)
        assert (second["sampling_params"]["stop_token_ids"], second["sampling_params"]["ignore_eos"]) == ([], True)
        assert (score["sampling_params"]["max_new_tokens"], score["logprob_start_len"]) == (0, 0)
    assert (SAMPLING["temperature"], SAMPLING["top_p"], SAMPLING["top_k"], SAMPLING["min_p"]) == (1.0, 1.0, -1, 0.0)
    penalties = [SAMPLING[f"{kind}_penalty"] for kind in ("frequency", "presence", "repetition")]
    assert penalties == [0.0, 0.0, 1.0]


async def test_proxy_variables_do_not_touch_loopback_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{_free_port()}")
    async with fake_subject(token_delay_s=0.0) as subject:
        assert len((await subject.engine.generate(_request())).output_ids) == 6


async def test_an_old_server_has_no_update_sessions_and_takes_weights_without() -> None:
    """SGLang 0.5.20: begin and end answer 404."""
    async with fake_subject(version="0.5.20") as subject:
        assert subject.fake is not None
        assert await subject.engine.begin_update() is False
        async with Sender(subject) as sender:
            await subject.engine.pause()
            await sender.publish(subject.other_weights, version=1)
            await subject.engine.resume()
        await subject.engine.end_update()
        assert await subject.engine.weight_version() == 1
        assert set(subject.fake.received) == set(subject.other_weights)
        with pytest.raises(EngineError, match="CUDA"):
            await subject.engine.checksum()


async def test_a_load_that_fails_or_hangs_is_an_error_within_its_deadline() -> None:
    async with fake_subject() as subject:
        assert subject.fake is not None
        subject.fake.faults.fail_load = {0: 400}
        subject.fake.faults.hang_load = frozenset({1})
        await subject.engine.begin_update()
        bucket = Bucket(tensors=(), num_bytes=0)
        with pytest.raises(EngineError, match="scripted failure"):
            await subject.engine.load_bucket(bucket, group_name="g", version=1, flush=True, timeout_s=5)
        with pytest.raises(EngineError, match=r"no answer within 0\.2 s"):
            await subject.engine.load_bucket(bucket, group_name="g", version=1, flush=True, timeout_s=0.2)
        assert await subject.engine.weight_version() == 0


async def test_a_group_that_the_trainer_never_opens_is_an_error_within_its_deadline() -> None:
    async with fake_subject(group_timeout_s=1.0) as subject:
        with pytest.raises(EngineError, match="no answer within") as failed:
            await subject.engine.join_group(
                address="127.0.0.1",
                port=_free_port(),
                rank_offset=1,
                world_size=2,
                group_name="g",
                backend="gloo",
                timeout_s=0.3,
            )
        assert failed.value.call == "/init_weights_update_group"


async def test_a_success_flag_of_false_is_an_error_whatever_the_status() -> None:
    async with fake_subject() as subject:
        assert subject.fake is not None
        subject.fake.faults.fail_calls = {"/begin_weight_update": 200}
        with pytest.raises(EngineError, match="scripted failure"):
            await subject.engine.begin_update()


def test_spans_give_each_token_its_version() -> None:
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    assert expand_spans(spans, 3) == (3, 3, 4)
    with pytest.raises(ValueError, match="do not follow"):
        expand_spans([spans[0], {"version": "4", "start": 1, "end": 3}], 3)
    with pytest.raises(ValueError, match="cover 3 of 4"):
        expand_spans(spans, 4)
