"""A role's side, synchronous: rank 0 of a role connects, receives commands one by one, answers each.

A wait for a command is unblocked by a command, by `timeout_s`, or by the end of the connection.
"""

import logging
import math
import select
import socket
import time
import traceback as traceback_module

from megatron_sao.channel import handshake
from megatron_sao.channel.commands import Answer, Command, Tensors
from megatron_sao.channel.errors import ControllerGone, HandshakeError, ProtocolError
from megatron_sao.channel.frames import (
    HANDSHAKE_LIMITS,
    PREFIX,
    Failure,
    Frame,
    FrameLimits,
    decode_request,
    encode,
    encode_answer,
    encode_failure,
    read_prefix,
    request_id_of,
)

LOG = logging.getLogger(__name__)
STALL_S = 300.0  # within a frame: for more of it to come, for it to be taken


def connect(host: str, port: int, *, role: str, key: bytes, timeout_s: float) -> "RoleConnection":
    """Connect to the controller and prove the key, both ways.

    Raises:
        HandshakeError: nobody listens there in time, or one side does not know the run's key.
    """
    handshake.check_key(key)
    try:
        sock = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise HandshakeError(f"{role} cannot reach the controller at {host}:{port}: {error}") from error
    try:
        _authenticate(sock, role, key)
    except (OSError, ControllerGone) as error:
        sock.close()
        reason = "it closed the connection: it may not know this role's key, or have this role already"
        raise HandshakeError(f"the controller at {host}:{port} refused {role}: {reason} ({error})") from error
    except BaseException:
        sock.close()
        raise
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return RoleConnection(sock, role)


class RoleConnection:
    """One command at a time: `receive`, then exactly one of `reply` and `fail`."""

    def __init__(self, sock: socket.socket, role: str, limits: FrameLimits = FrameLimits()) -> None:
        self._sock, self._limits = sock, limits
        self._sock.settimeout(STALL_S)
        self.role = role
        self._open: tuple[int, Command] | None = None  # received, not yet answered

    def receive(self, *, timeout_s: float) -> tuple[Command, Tensors] | None:
        """The next command with its tensors, or None when `timeout_s` pass without one.

        A command that is not as its schema says is answered with the reason, and the wait goes on.

        Raises:
            ControllerGone: the connection ended.
            ProtocolError: the bytes are no frames, too large ones, or half of one for `STALL_S`. The connection is of
                no use any more.
        """
        assert self._open is None, "the last command has no answer yet"
        end = time.monotonic() + timeout_s
        while _readable(self._sock, end - time.monotonic()):
            frame = self._read_frame()
            request_id = request_id_of(frame)
            try:
                _, command, tensors = decode_request(frame)
            except ProtocolError as error:
                LOG.error("refused a command: %s", error)
                self._send(encode_failure(request_id, Failure(kind="ProtocolError", message=str(error))))
                continue
            self._open = (request_id, command)
            return command, tensors
        return None

    def interrupted(self) -> bool:
        """Whether something has come in (or the controller has gone) while a command runs: a wish to cancel it."""
        return _readable(self._sock, 0.0)

    def reply(self, answer: Answer = Answer()) -> None:
        """Raises ProtocolError, with nothing sent, when the tensors are not what the command declares."""
        request_id, command = self._take_open()
        try:
            frame = encode_answer(request_id, command, answer)
        except ProtocolError:
            self._open = (request_id, command)  # still to be answered, by `fail`
            raise
        self._send(frame)

    def fail(self, error: BaseException | Failure) -> None:
        request_id, _ = self._take_open()
        self._send(encode_failure(request_id, error if isinstance(error, Failure) else failure_of(error)))

    def close(self) -> None:
        self._sock.close()

    def _read_frame(self) -> Frame:
        try:
            return read_frame(self._sock, self._limits)
        except TimeoutError as error:
            raise ProtocolError(f"nothing more came of a frame that had begun: {error}") from error

    def _take_open(self) -> tuple[int, Command]:
        assert self._open is not None, "there is no command to answer"
        taken, self._open = self._open, None
        return taken

    def _send(self, frame: bytes) -> None:
        try:
            self._sock.sendall(frame)
        except OSError as error:
            raise ControllerGone(f"the controller closed the channel ({error})") from error


def failure_of(error: BaseException) -> Failure:
    """An exception as text."""
    text = "".join(traceback_module.format_exception(error))
    return Failure(kind=type(error).__name__, message=str(error), traceback=text)


def read_frame(sock: socket.socket, limits: FrameLimits) -> Frame:
    header_bytes, payload_bytes = read_prefix(_read_exactly(sock, PREFIX.size), limits)
    header = _read_exactly(sock, header_bytes)
    return Frame(header, _read_exactly(sock, payload_bytes))


def _authenticate(sock: socket.socket, role: str, key: bytes) -> None:
    hello = handshake.parse(handshake.Hello, read_frame(sock, HANDSHAKE_LIMITS).header)
    claimed = handshake.claim(key, role, hello)
    sock.sendall(encode(claimed.model_dump_json().encode()))
    answer = handshake.parse(handshake.Welcome, read_frame(sock, HANDSHAKE_LIMITS).header)
    handshake.check_welcome(key, hello, claimed, answer)


def _readable(sock: socket.socket, timeout_s: float) -> bool:
    poll = select.poll()  # select() takes no descriptor above 1023
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(math.ceil(1000 * max(0.0, timeout_s))))


def _read_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    view, done = memoryview(data), 0
    while done < num_bytes:
        try:
            got = sock.recv_into(view[done:])
        except TimeoutError:
            raise
        except OSError as error:
            raise ControllerGone(f"the controller closed the channel ({error})") from error
        if got == 0:
            raise ControllerGone("the controller closed the channel")
        done += got
    return bytes(data)
