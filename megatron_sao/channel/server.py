"""The controller's side: listen, accept one connection per role, call.

Consumes commands from the controller's coroutines; produces frames to, and answers from, rank 0 of each role. A call
waits for its role's answer; it is unblocked by that answer, by its deadline, or by the end of the connection.
"""

import asyncio
import itertools
import logging
from typing import Protocol

from megatron_sao.channel import handshake
from megatron_sao.channel.commands import NO_TENSORS, Answer, Command, Tensors
from megatron_sao.channel.errors import HandshakeError, ProtocolError, RoleDied, RoleTimeout
from megatron_sao.channel.frames import (
    HANDSHAKE_LIMITS,
    PREFIX,
    Frame,
    FrameLimits,
    decode_answer,
    decode_reply_header,
    encode,
    encode_request,
    read_prefix,
)

LOG = logging.getLogger(__name__)
HANDSHAKE_TIMEOUT_S = 10.0
_READ_BYTES = 16 * 2**20


class Channel(Protocol):
    """Calls to one role, answered in order.

    `call` raises RoleError (the role failed and lives), RoleTimeout (no answer in `timeout_s`, waiting for earlier
    calls included), RoleDied (no connection), ProtocolError (the tensors are not the command's, or the answer is not).
    """

    @property
    def role(self) -> str: ...

    async def call(self, command: Command, tensors: Tensors = NO_TENSORS, *, timeout_s: float) -> Answer: ...

    async def close(self) -> None: ...


class TcpChannel:
    """A connection whose role has proved that it knows the key."""

    def __init__(
        self, role: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: FrameLimits
    ) -> None:
        self._role = role
        self._reader, self._writer, self._limits = reader, writer, limits
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._closed: str | None = None  # why
        self._task = asyncio.create_task(self._read(), name=f"channel of {role}")

    @property
    def role(self) -> str:
        return self._role

    async def call(self, command: Command, tensors: Tensors = NO_TENSORS, *, timeout_s: float) -> Answer:
        request_id = next(self._ids)
        request = encode_request(request_id, command, tensors)
        if self._closed is not None:
            raise RoleDied(self._role, command.name, self._closed)
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                self._writer.write(request)  # whole into the buffer: a cancelled call never tears a frame
                await self._writer.drain()
                frame = await future
        except OSError as error:
            if isinstance(error, TimeoutError) and deadline.expired():  # the network has a TimeoutError of its own
                raise RoleTimeout(self._role, command.name, timeout_s) from None
            raise RoleDied(self._role, command.name, self._closed or str(error)) from None
        finally:
            del self._waiting[request_id]
            if future.done() and not future.cancelled():
                future.exception()  # seen: the writer failed first
        return decode_answer(self._role, command, frame)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self._end("the controller closed the channel")

    async def _read(self) -> None:
        """Hands each reply to its call; one that nobody waits for any more is thrown away."""
        reason = "its process ended or closed the channel"
        try:
            while True:
                frame = await read_frame(self._reader, self._limits)
                future = self._waiting.get(decode_reply_header(frame).id)
                if future is None or future.done():
                    LOG.warning("%s answered a call that was given up (deadline or cancel): thrown away", self._role)
                else:
                    future.set_result(frame)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except OSError as error:
            reason = f"the network gave up its connection: {error}"
        except ProtocolError as error:
            reason = f"it broke the protocol: {error}"
        self._end(reason)

    def _end(self, reason: str) -> None:
        self._closed = self._closed or reason
        self._writer.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionError(self._closed))


class ChannelServer:
    """Listens for the roles of one run. `start` -> port, `accept` once per role, `close`."""

    def __init__(self, limits: FrameLimits = FrameLimits()) -> None:
        self._limits = limits
        self._server: asyncio.Server | None = None
        self._arrivals: dict[str, asyncio.Future[TcpChannel]] = {}
        self._claimed: set[str] = set()
        self._channels: list[TcpChannel] = []
        self._key = b""

    async def start(self, host: str, key: bytes) -> int:
        """Bind a free port of `host` (loopback, unless the run spans machines) and return it."""
        self._key = handshake.check_key(key)
        self._server = await asyncio.start_server(self._greet, host, 0, limit=_READ_BYTES)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def accept(self, role: str, timeout_s: float) -> Channel:
        """The channel of `role`, once its rank 0 has connected. Raises RoleTimeout."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._arrival(role)), timeout_s)
        except TimeoutError:
            raise RoleTimeout(role, "connect", timeout_s) from None

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for channel in self._channels:
            await channel.close()

    def _arrival(self, role: str) -> "asyncio.Future[TcpChannel]":
        return self._arrivals.setdefault(role, asyncio.get_running_loop().create_future())

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                role = await self._authenticate(reader, writer)
        except (HandshakeError, ProtocolError) as error:
            LOG.warning("refused a connection to the channel: %s", error)
            writer.close()
        except (asyncio.IncompleteReadError, OSError):
            LOG.warning("a connection to the channel ended before it said who it is")
            writer.close()
        else:
            channel = TcpChannel(role, reader, writer, self._limits)
            self._channels.append(channel)
            self._arrival(role).set_result(channel)

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        hello = handshake.Hello(nonce=handshake.new_nonce())
        writer.write(encode(hello.model_dump_json().encode()))
        claimed = handshake.parse(handshake.Claim, (await read_frame(reader, HANDSHAKE_LIMITS)).header)
        answer = handshake.welcome(self._key, hello, claimed)
        if claimed.role in self._claimed:
            raise HandshakeError(f"{claimed.role} is connected already")
        self._claimed.add(claimed.role)
        writer.write(encode(answer.model_dump_json().encode()))
        await writer.drain()
        return claimed.role


async def read_frame(reader: asyncio.StreamReader, limits: FrameLimits) -> Frame:
    header_bytes, payload_bytes = read_prefix(await reader.readexactly(PREFIX.size), limits)
    header = await reader.readexactly(header_bytes)
    return Frame(header, await reader.readexactly(payload_bytes))
