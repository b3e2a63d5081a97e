"""RUN/trace.json: valid when closed, readable when cut, rows that only nest. The roles' and the engine's rows too."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from megatron_sao.channel import Answer, Command, CriticUpdate, LocalChannel, RoleError, Score, Tensors
from megatron_sao.controller.clients import TracedChannel
from megatron_sao.rollout.engine import GenerateRequest, Generation
from megatron_sao.rollout.traced import TracedEngine
from megatron_sao.trace import NoTrace, Trace
from tests.support.scripted_engine import ScriptedEngine
from tests.support.traces import check_nesting, spans

TIMEOUT_S = 10.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


async def test_a_closed_trace_is_valid_json_with_a_named_row_for_each_name(path: Path) -> None:
    trace = Trace(path)
    with trace.span("publish", "gather", bucket=2):
        with trace.span("publish", "copy"):
            pass
    with trace.span("actor", "actor_update", batch_id=7):
        pass
    trace.close()
    found = spans(path)
    assert [(span.row, span.name) for span in found] == [
        ("publish", "copy"),
        ("publish", "gather"),
        ("actor", "actor_update"),
    ]
    assert (found[1].args, found[2].args) == ({"bucket": 2}, {"batch_id": 7})
    check_nesting(found)


async def test_a_cut_trace_is_readable_and_holds_what_had_ended(path: Path) -> None:
    trace = Trace(path)
    with trace.span("actor", "load_batch"):
        pass
    with trace.span("actor", "actor_update"):
        assert [span.name for span in spans(path, cut=True)] == ["load_batch"]  # what a kill at this moment leaves
    trace.close()


async def test_tasks_that_overlap_get_rows_of_their_own_and_share_them_afterwards(path: Path) -> None:
    trace, both = Trace(path), asyncio.Barrier(2)

    async def send(bucket: int) -> None:
        with trace.span("publish", "send", bucket=bucket):
            await both.wait()
            with trace.span("publish", "copy"):
                await asyncio.sleep(0)

    with trace.span("publish", "publish"):
        await asyncio.gather(send(0), send(1))
    await asyncio.gather(send(2), send(3))
    trace.close()
    found = spans(path)
    check_nesting(found)
    sends = {span.args["bucket"]: span.row for span in found if span.name == "send"}
    assert sends == {0: "publish (2)", 1: "publish (3)", 2: "publish", 3: "publish (2)"}


async def test_spans_that_are_open_at_the_close_end_there_and_later_ones_are_left_out(path: Path) -> None:
    trace = Trace(path)
    with trace.span("engine", "paused"):
        trace.close()
    with trace.span("engine", "generating"):
        pass
    trace.close()
    assert [span.name for span in spans(path)] == ["paused"]


async def test_a_span_ends_when_its_block_raises(path: Path) -> None:
    trace = Trace(path)
    with pytest.raises(ValueError, match="broken"), trace.span("critic", "critic_update"):
        raise ValueError("broken")
    assert [span.name for span in spans(path, cut=True)] == ["critic_update"]
    trace.close()


async def test_a_disabled_trace_is_the_same_to_its_users_and_writes_nothing() -> None:
    trace = NoTrace()
    with trace.span("actor", "actor_update", batch_id=1):
        pass
    trace.close()


async def test_a_call_to_a_role_is_a_span_with_its_batch_also_when_the_role_fails(path: Path) -> None:
    def role(command: Command, tensors: Tensors) -> Answer:
        if isinstance(command, Score):
            raise RuntimeError("no")
        return Answer()

    trace = Trace(path)
    channel = TracedChannel(LocalChannel("critic", role), trace)
    assert channel.role == "critic"
    targets = {"targets": np.zeros(3, np.float32)}
    await channel.call(CriticUpdate(batch_id=4), targets, timeout_s=TIMEOUT_S)
    with pytest.raises(RoleError):
        await channel.call(Score(), {"token_ids": np.zeros(3, np.int32)}, timeout_s=TIMEOUT_S)
    trace.close()
    assert [(s.row, s.name, s.args) for s in spans(path)] == [
        ("critic", "critic_update", {"batch_id": 4}),
        ("critic", "score", {}),
    ]


class WaitingEngine(ScriptedEngine):
    """Fake: every request waits for `answer`."""

    def __init__(self) -> None:
        super().__init__({}, vocab_size=9, num_tokens=4, duration=lambda number: 0)
        self.answer = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> Generation:
        await self.answer.wait()
        return await super().generate(request)


async def test_the_engines_row_says_when_it_generates_and_when_it_is_paused(path: Path) -> None:
    trace, waiting = Trace(path), WaitingEngine()
    engine = TracedEngine(waiting, trace)
    requests = [GenerateRequest(rid=f"{i:032x}", input_ids=(1, 2), max_new_tokens=4) for i in range(3)]
    running = [asyncio.create_task(engine.generate(request)) for request in requests]
    await asyncio.sleep(0)
    await engine.pause()
    await engine.resume()
    waiting.answer.set()
    await asyncio.gather(*running)
    await engine.generate(requests[0])
    await engine.pause()  # a failed publish leaves it so
    trace.close()
    found = spans(path)
    check_nesting(found)
    assert [span.name for span in found] == ["generating", "paused", "generating", "generating", "paused"]
    assert {span.row for span in found} == {waiting.name}
    assert await engine.weight_version() == 0  # all else is the engine's own
