"""The channel's twin in memory, for tests of either side: same bytes, same checks, same errors, no socket."""

import asyncio
from collections.abc import Callable

from megatron_sao.channel.client import failure_of
from megatron_sao.channel.commands import NO_TENSORS, Answer, Command, Tensors
from megatron_sao.channel.errors import ProtocolError, RoleDied, RoleTimeout
from megatron_sao.channel.frames import (
    PREFIX,
    Failure,
    Frame,
    FrameLimits,
    decode_answer,
    decode_request,
    encode_answer,
    encode_failure,
    encode_request,
    read_prefix,
    request_id_of,
)

Handler = Callable[[Command, Tensors], Answer]


class LocalChannel:
    """Runs `handler` in a thread for each command, one at a time; what it raises comes back as RoleError."""

    def __init__(self, role: str, handler: Handler, limits: FrameLimits = FrameLimits()) -> None:
        self._role, self._handler, self._limits = role, handler, limits
        self._busy = asyncio.Lock()
        self._num_calls = 0
        self._closed = False

    @property
    def role(self) -> str:
        return self._role

    async def call(self, command: Command, tensors: Tensors = NO_TENSORS, *, timeout_s: float) -> Answer:
        self._num_calls += 1
        request = encode_request(self._num_calls, command, tensors)
        if self._closed:
            raise RoleDied(self._role, command.name, "the controller closed the channel")
        work = asyncio.ensure_future(self._work(request))
        try:
            reply = await asyncio.wait_for(asyncio.shield(work), timeout_s)
        except TimeoutError:
            raise RoleTimeout(self._role, command.name, timeout_s) from None
        return decode_answer(self._role, command, split(reply, self._limits))

    async def close(self) -> None:
        self._closed = True

    async def _work(self, request: bytes) -> bytes:
        async with self._busy:
            return await asyncio.to_thread(self._answer, request)

    def _answer(self, request: bytes) -> bytes:
        frame = split(request, self._limits)
        request_id = request_id_of(frame)
        try:
            _, command, tensors = decode_request(frame)
        except ProtocolError as error:
            return encode_failure(request_id, Failure(kind="ProtocolError", message=str(error)))
        try:
            return encode_answer(request_id, command, self._handler(command, tensors))
        except Exception as error:  # noqa: BLE001  (the border: a role's failure becomes a reply)
            return encode_failure(request_id, failure_of(error))


def split(data: bytes, limits: FrameLimits) -> Frame:
    header_bytes, payload_bytes = read_prefix(data[: PREFIX.size], limits)
    header = data[PREFIX.size : PREFIX.size + header_bytes]
    payload = data[PREFIX.size + header_bytes :]
    assert len(payload) == payload_bytes, "a frame is complete"
    return Frame(header, payload)
