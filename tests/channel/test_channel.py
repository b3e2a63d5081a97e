"""The channel: what is refused, what a deadline names, and that the in-memory twin is the TCP one."""

import asyncio
import contextlib
import errno
import json
import logging
import math
import os
import pickle
import socket
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron_sao import channel as channel_package
from megatron_sao.channel import (
    Answer,
    Channel,
    ChannelServer,
    Command,
    ControllerGone,
    CriticUpdate,
    CriticValues,
    Describe,
    DropBatch,
    FrameLimits,
    HandshakeError,
    LoadBatch,
    LocalChannel,
    ProtocolError,
    RoleConnection,
    RoleDied,
    RoleError,
    RoleTimeout,
    Score,
    Stop,
    Tensors,
    connect,
    parse_command,
    publish_plan_data,
    publish_plan_from,
)
from megatron_sao.channel.frames import PREFIX, encode, encode_answer, encode_request, unpack
from megatron_sao.metrics import Metric, Reduction
from megatron_sao.types import Bucket, PublishPlan, TensorSpec

KEY = b"k" * 32
Handler = Callable[[Command, Tensors], Answer]
Opener = Callable[[Handler], Channel]


def critic(command: Command, tensors: Tensors) -> Answer:
    """A toy role."""
    match command:
        case CriticValues(batch_id=0):
            return Answer(tensors={"values": np.array([0.5, -1.0], dtype=np.float32)})
        case CriticValues():
            return Answer(tensors={"values": np.array([0.5, -1.0])})  # float64: not what the command declares
        case CriticUpdate():
            total = float(tensors["targets"].sum())
            metrics = {"critic/loss": Metric(total, 2.0), "critic/grad_norm": Metric(math.inf, 1.0, Reduction.MAX)}
            return Answer(data={"updates": 1}, metrics=metrics)
        case DropBatch():
            raise KeyError("no such batch")
        case _:
            return Answer()


def serve(connection: RoleConnection, handler: Handler) -> None:
    with contextlib.suppress(ControllerGone):
        while True:
            request = connection.receive(timeout_s=30)
            assert request is not None
            command, tensors = request
            try:
                connection.reply(handler(command, tensors))
            except Exception as error:  # noqa: BLE001
                connection.fail(error)
            if isinstance(command, Stop):
                connection.close()
                return


@contextlib.asynccontextmanager
async def tcp_channel(handler: Handler, role: str = "critic") -> AsyncIterator[Channel]:
    server = ChannelServer()
    port = await server.start("127.0.0.1", KEY)
    role_side = asyncio.to_thread(connect, "127.0.0.1", port, role=role, key=KEY, timeout_s=10)
    connection, channel = await asyncio.gather(role_side, server.accept(role, timeout_s=10))
    thread = threading.Thread(target=serve, args=(connection, handler), daemon=True)
    thread.start()
    yield channel
    await server.close()
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()
    connection.close()


@contextlib.asynccontextmanager
async def local_channel(handler: Handler, role: str = "critic") -> AsyncIterator[Channel]:
    yield LocalChannel(role, handler)


@pytest.fixture(params=[tcp_channel, local_channel], ids=["tcp", "local"])
def open_channel(request: pytest.FixtureRequest) -> Callable[..., contextlib.AbstractAsyncContextManager[Channel]]:
    opener: Callable[..., contextlib.AbstractAsyncContextManager[Channel]] = request.param
    return opener


def batch_command() -> LoadBatch:
    return LoadBatch(batch_id=3, trajectory_ids=("a" * 32, "b" * 32), plan=(((0,),), ((1,),)))


def batch_tensors(**changes: np.ndarray) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {
        "offsets": np.array([0, 2, 5], dtype=np.int64),
        "token_ids": np.arange(5, dtype=np.int32),
        "is_action": np.array([0, 1, 0, 1, 1], dtype=bool),
        "rollout_logprobs": np.array([0, -1, 0, -2, -3], dtype=np.float32),
        "version": np.array([-1, 0, -1, 0, 1], dtype=np.int32),
    }
    return {**tensors, **changes}


async def test_an_answer_returns_data_metrics_and_tensors_as_they_were_given(open_channel) -> None:
    async with open_channel(critic) as channel:
        answer = await channel.call(CriticUpdate(batch_id=0), {"targets": np.ones(3, np.float32)}, timeout_s=10)
        assert answer.data == {"updates": 1}
        assert answer.metrics["critic/loss"] == Metric(3.0, 2.0)
        assert answer.metrics["critic/grad_norm"] == Metric(math.inf, 1.0, Reduction.MAX)
        values = (await channel.call(CriticValues(batch_id=0), timeout_s=10)).tensors["values"]
        assert values.dtype == np.float32
        assert values.tolist() == [0.5, -1.0]


async def test_a_batch_arrives_bit_by_bit(open_channel) -> None:
    seen: list[tuple[Command, Tensors]] = []

    def keep(command: Command, tensors: Tensors) -> Answer:
        seen.append((command, tensors))
        return Answer()

    async with open_channel(keep) as channel:
        await channel.call(batch_command(), batch_tensors(), timeout_s=10)
    command, tensors = seen[0]
    assert command == batch_command()
    for name, sent in batch_tensors().items():
        assert tensors[name].dtype == sent.dtype
        assert tensors[name].tobytes() == sent.tobytes()


async def test_a_failure_of_the_role_comes_back_with_its_traceback_and_the_role_lives_on(open_channel) -> None:
    async with open_channel(critic) as channel:
        with pytest.raises(RoleError, match=r"critic failed in drop_batch: KeyError: 'no such batch'") as caught:
            await channel.call(DropBatch(batch_id=1), timeout_s=10)
        assert 'raise KeyError("no such batch")' in caught.value.traceback
        assert (await channel.call(Describe(), timeout_s=10)).data == {}


async def test_an_answer_with_undeclared_tensors_is_the_roles_failure(open_channel) -> None:
    async with open_channel(critic) as channel:
        with pytest.raises(RoleError, match=r"values as float32\[A\], not float64\[2\]"):
            await channel.call(CriticValues(batch_id=1), timeout_s=10)


async def test_a_deadline_names_role_and_command_and_the_late_answer_is_thrown_away(open_channel) -> None:
    release = threading.Event()

    def slow(command: Command, tensors: Tensors) -> Answer:
        if isinstance(command, Score):
            release.wait(10)
            return Answer(tensors={"logprobs": np.zeros(1, np.float32)})
        return Answer(data={"kind": command.name})

    async with open_channel(slow) as channel:
        with pytest.raises(RoleTimeout, match=r"critic did not answer score within 0.2 s"):
            await channel.call(Score(), {"token_ids": np.zeros(2, np.int32)}, timeout_s=0.2)
        release.set()
        assert (await channel.call(Describe(), timeout_s=10)).data == {"kind": "describe"}


async def test_calls_made_at_once_are_answered_each_with_its_own(open_channel) -> None:
    def echo(command: Command, tensors: Tensors) -> Answer:
        assert isinstance(command, DropBatch)
        return Answer(data={"batch": command.batch_id})

    async with open_channel(echo) as channel:
        answers = await asyncio.gather(*(channel.call(DropBatch(batch_id=i), timeout_s=10) for i in range(20)))
    assert [answer.data["batch"] for answer in answers] == list(range(20))


async def test_the_death_of_the_peer_is_named_during_and_after_a_call() -> None:
    async with dying_role() as channel:
        with pytest.raises(RoleDied, match=r"actor is gone \(in describe\)"):
            await channel.call(Describe(), timeout_s=10)
        with pytest.raises(RoleDied, match=r"actor is gone \(in stop\)"):
            await channel.call(Stop(), timeout_s=10)


@contextlib.asynccontextmanager
async def dying_role() -> AsyncIterator[Channel]:
    """A role that closes its socket when it gets its first command."""
    server = ChannelServer()
    port = await server.start("127.0.0.1", KEY)
    role_side = asyncio.to_thread(connect, "127.0.0.1", port, role="actor", key=KEY, timeout_s=10)
    connection, channel = await asyncio.gather(role_side, server.accept("actor", timeout_s=10))

    def die() -> None:
        connection.receive(timeout_s=10)
        connection.close()

    death = asyncio.create_task(asyncio.to_thread(die))
    yield channel
    await death
    await server.close()


async def test_a_role_learns_that_the_controller_is_gone() -> None:
    server = ChannelServer()
    port = await server.start("127.0.0.1", KEY)
    role_side = asyncio.to_thread(connect, "127.0.0.1", port, role="actor", key=KEY, timeout_s=10)
    connection, _ = await asyncio.gather(role_side, server.accept("actor", timeout_s=10))
    await server.close()
    with pytest.raises(ControllerGone):
        await asyncio.to_thread(connection.receive, timeout_s=10)
    connection.close()


async def test_a_role_that_never_connects_is_named() -> None:
    server = ChannelServer()
    await server.start("127.0.0.1", KEY)
    with pytest.raises(RoleTimeout, match=r"critic did not answer connect within 0.1 s"):
        await server.accept("critic", timeout_s=0.1)
    await server.close()


async def test_a_wrong_key_is_refused_on_the_controllers_side(caplog: pytest.LogCaptureFixture) -> None:
    server = ChannelServer()
    port = await server.start("127.0.0.1", KEY)
    with pytest.raises(HandshakeError, match=r"refused actor: .*it may not know this role's key"):
        await asyncio.to_thread(connect, "127.0.0.1", port, role="actor", key=b"x" * 32, timeout_s=10)
    assert "calls itself actor does not know this run's key" in caplog.text
    with pytest.raises(RoleTimeout):
        await server.accept("actor", timeout_s=0.1)
    await server.close()


async def test_a_controller_that_does_not_know_the_key_is_refused_by_the_role() -> None:
    """A fake controller (a few lines here) that says hello, takes any claim, and makes up its own proof."""

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode(json.dumps({"nonce": "0" * 64}).encode()))
        await reader.readexactly(PREFIX.size)
        writer.write(encode(json.dumps({"mac": "0" * 64}).encode()))
        await writer.drain()

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(HandshakeError, match="the controller does not know this run's key"):
        await asyncio.to_thread(connect, "127.0.0.1", port, role="actor", key=KEY, timeout_s=10)
    server.close()


async def test_a_second_process_of_the_same_role_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with tcp_channel(critic) as channel:
        (port,) = open_ports()
        with pytest.raises(HandshakeError, match="or have this role already"):
            await asyncio.to_thread(connect, "127.0.0.1", port, role="critic", key=KEY, timeout_s=10)
        assert "critic is connected already" in caplog.text
        assert (await channel.call(Describe(), timeout_s=10)).data == {}


def open_ports() -> list[int]:
    """Ports this process listens on."""
    listening = [c for c in psutil.Process(os.getpid()).net_connections() if c.status == psutil.CONN_LISTEN]
    return [c.laddr.port for c in listening]


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16 random bytes, this one has 3"):
        connect("127.0.0.1", 1, role="actor", key=b"abc", timeout_s=1)


async def test_an_unknown_peer_cannot_make_the_controller_allocate(caplog: pytest.LogCaptureFixture) -> None:
    server = ChannelServer()
    port = await server.start("127.0.0.1", KEY)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFIX.pack(b"SAO1", 2**32 - 1, 2**60))
    await asyncio.wait_for(reader.read(), 10)  # the hello, then the end: the controller has hung up
    assert "exceeds the limit of 4096 + 0" in caplog.text
    writer.close()
    await server.close()


async def test_an_oversize_answer_ends_the_channel_and_says_why() -> None:
    async with tcp_pair(controller_limits=FrameLimits(payload_bytes=100)) as (channel, connection):
        answering = asyncio.create_task(asyncio.to_thread(answer_values, connection, 1000))
        with pytest.raises(RoleDied, match=r"it broke the protocol: a frame of \d+ \+ \d+ bytes exceeds"):
            await channel.call(CriticValues(batch_id=0), timeout_s=10)
        await answering


async def test_an_oversize_command_is_refused_by_the_role_before_it_is_read() -> None:
    async with tcp_pair() as (channel, connection):
        connection._limits = FrameLimits(payload_bytes=100)
        call = asyncio.create_task(
            channel.call(CriticUpdate(batch_id=0), {"targets": np.zeros(1000, np.float32)}, timeout_s=10)
        )
        with pytest.raises(ProtocolError, match=r"exceeds the limit of \d+ \+ 100"):
            await asyncio.to_thread(connection.receive, timeout_s=10)
        connection.close()
        with pytest.raises(RoleDied):
            await call


def answer_values(connection: RoleConnection, num_values: int) -> None:
    connection.receive(timeout_s=10)
    connection.reply(Answer(tensors={"values": np.zeros(num_values, np.float32)}))


@contextlib.asynccontextmanager
async def tcp_pair(
    controller_limits: FrameLimits = FrameLimits(),
) -> AsyncIterator[tuple[Channel, RoleConnection]]:
    server = ChannelServer(controller_limits)
    port = await server.start("127.0.0.1", KEY)
    role_side = asyncio.to_thread(connect, "127.0.0.1", port, role="critic", key=KEY, timeout_s=10)
    connection, channel = await asyncio.gather(role_side, server.accept("critic", timeout_s=10))
    yield channel, connection
    await server.close()
    connection.close()


BAD_TENSORS = {
    "a missing tensor": ({"version": None}, r"takes tensors .*'version'\], not "),
    "one too many": ({"extra": np.zeros(1)}, r"not \['extra', 'is_action'"),
    "another dtype": ({"token_ids": np.arange(5)}, r"token_ids as int32\[T\], not int64\[5\]"),
    "two dimensions": ({"token_ids": np.zeros((5, 1), np.int32)}, r"token_ids as int32\[T\], not int32\[5, 1\]"),
    "another length": ({"version": np.zeros(4, np.int32)}, r"version\[T\] as long as token_ids: 4 against 5"),
    "offsets short of the tokens": (
        {"offsets": np.array([0, 2, 4], np.int64)},
        "rise by at least 2 from 0 to the 5 tokens",
    ),
    "an offset too few": ({"offsets": np.array([0, 5], np.int64)}, "2 offsets for 2 trajectories"),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
async def test_tensors_that_are_not_the_commands_are_refused_before_they_are_sent(open_channel, name: str) -> None:
    changes, message = BAD_TENSORS[name]
    tensors = {key: value for key, value in batch_tensors(**changes).items() if value is not None}
    async with open_channel(critic) as channel:
        with pytest.raises(ProtocolError, match=message):
            await channel.call(batch_command(), tensors, timeout_s=10)


async def test_a_role_checks_what_it_gets_answers_with_the_reason_and_waits_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The sender here is not our client: raw bytes with an unknown kind, then with wrong tensors."""
    async with tcp_pair() as (channel, connection):
        received = asyncio.create_task(asyncio.to_thread(connection.receive, timeout_s=10))
        writer = channel._writer  # type: ignore[attr-defined]
        writer.write(encode(json.dumps({"id": 7, "command": {"kind": "exec", "code": "1"}}).encode()))
        good = encode_request(8, CriticUpdate(batch_id=0), {"targets": np.zeros(2, np.float32)})
        bad = encode_request(8, CriticValues(batch_id=0), {}).replace(b"critic_values", b"critic_update")
        writer.write(bad)
        writer.write(good)
        request = await received
        assert request is not None
        assert request[0] == CriticUpdate(batch_id=0)
    assert "'exec' found using 'kind'" in caplog.text
    assert "critic_update takes tensors ['targets'], not []" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"kind": "exec"}', "'exec' found using 'kind' does not match any of the expected tags: 'describe'"),
        ('{"kind": "drop_batch"}', "batch_id: Field required"),
        ('{"kind": "drop_batch", "batch_id": "1"}', "batch_id: Input should be a valid integer"),
        ('{"kind": "drop_batch", "batch_id": 1, "more": 2}', "more: Extra inputs are not permitted"),
        ('{"kind": "publish_send", "bucket": 0, "timeout_s": Infinity}', "finite number"),
        (
            '{"kind": "load_batch", "batch_id": 0, "trajectory_ids": ["a"], "plan": [[[0], [0]]]}',
            "holds every trajectory of the batch exactly once",
        ),
        ('{"kind": "load_batch", "batch_id": 0, "trajectory_ids": ["a", "a"], "plan": [[[0, 1]]]}', "1 distinct ids"),
    ],
)
def test_a_command_outside_the_schema_is_refused_with_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ProtocolError, match="not a command of this channel") as caught:
        parse_command(text)
    assert message in str(caught.value)


def test_a_torn_or_foreign_payload_is_refused() -> None:
    payload = encode_answer(0, CriticValues(batch_id=0), Answer(tensors={"values": np.zeros(4, np.float32)}))
    with pytest.raises(ProtocolError, match="not safetensors"):
        unpack(payload[-20:])


def test_bytes_that_pickle_would_run_are_only_bytes(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self):  # type: ignore[no-untyped-def]
            return (Path.touch, (tmp_path / "ran",))

    with pytest.raises(ProtocolError, match="not safetensors"):
        unpack(pickle.dumps(Bomb()))
    assert not (tmp_path / "ran").exists()


def test_no_module_of_the_channel_knows_pickle() -> None:
    sources = [path.read_text() for path in Path(channel_package.__file__).parent.glob("*.py")]
    assert len(sources) >= 6
    for word in ("import pickle", "marshal", "eval(", "torch"):
        assert not [source for source in sources if word in source.replace("unpickled", "")]


def test_a_publish_plan_survives_the_way_through_json() -> None:
    spec = TensorSpec(name="model.norm.weight", dtype="float32", shape=(64,))
    plan = PublishPlan(buckets=(Bucket(tensors=(spec,), num_bytes=256),), digest="0" * 64)
    assert publish_plan_from(json.loads(json.dumps(publish_plan_data(plan)))) == plan
    with pytest.raises(ProtocolError, match="not a publish plan: buckets"):
        publish_plan_from({"digest": "0"})


async def test_ten_megabytes_pass(open_channel) -> None:
    tensors = {"targets": np.zeros(2_500_000, np.float32)}
    async with open_channel(lambda command, t: Answer(data={"n": len(t["targets"])})) as channel:
        answer = await channel.call(CriticUpdate(batch_id=0), tensors, timeout_s=20)
    assert answer.data == {"n": 2_500_000}


def test_the_handshake_has_a_deadline_for_the_role() -> None:
    """A listener that never says hello."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(HandshakeError, match="timed out"):
            connect("127.0.0.1", port, role="actor", key=KEY, timeout_s=0.2)


async def test_half_a_frame_does_not_keep_a_role_for_ever() -> None:
    async with tcp_pair() as (channel, connection):
        connection._sock.settimeout(0.2)  # what `stall_s` sets
        frame = encode_request(0, Describe(), {})
        channel._writer.write(frame[:-3])  # type: ignore[attr-defined]
        with pytest.raises(ProtocolError, match="nothing more came of a frame"):
            await asyncio.wait_for(asyncio.to_thread(connection.receive, timeout_s=10), 5)


async def test_a_role_with_many_open_files_still_hears_its_commands() -> None:
    """select(2) knows 1024 of them."""
    async with tcp_pair() as (channel, connection):
        old, number = connection._sock, 1500
        os.dup2(old.fileno(), number)
        connection._sock = socket.socket(fileno=number)
        old.close()
        call = asyncio.create_task(channel.call(CriticValues(batch_id=0), timeout_s=10))
        await asyncio.to_thread(answer_values, connection, 3)
        assert len((await call).tensors["values"]) == 3


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EHOSTUNREACH], ids=errno.errorcode.get)
async def test_a_connection_that_the_network_gave_up_fails_the_waiting_calls_at_once(number: int) -> None:
    async with tcp_pair() as (channel, _):
        call = asyncio.create_task(channel.call(Describe(), timeout_s=30))
        await asyncio.sleep(0.05)
        channel._reader.set_exception(OSError(number, os.strerror(number)))  # type: ignore[attr-defined]
        with pytest.raises(RoleDied, match=os.strerror(number)):
            await asyncio.wait_for(call, 5)
        with pytest.raises(RoleDied, match=os.strerror(number)):
            await channel.call(Stop(), timeout_s=30)


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
