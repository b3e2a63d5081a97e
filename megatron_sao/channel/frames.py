"""Frames: a fixed prefix, a JSON header, a safetensors payload. Sizes are checked before anything is allocated.

    4 bytes magic | 4 bytes header length | 8 bytes payload length | header | payload     (big-endian)

Nothing here can run code: the header is JSON validated against a schema, the payload holds arrays only.
"""

import json
import struct
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from megatron_sao.channel.commands import Answer, Command, Tensors, explain, parse_command
from megatron_sao.channel.errors import ProtocolError, RoleError
from megatron_sao.metrics import Metric, Reduction

PREFIX = struct.Struct(">4sIQ")
_MAGIC = b"SAO1"


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """Largest header and payload that a side accepts. 128 trajectories of 131,072 tokens are 218 MB."""

    header_bytes: int = 64 * 2**20
    payload_bytes: int = 4 * 2**30


HANDSHAKE_LIMITS = FrameLimits(header_bytes=4096, payload_bytes=0)
"""What an unknown peer may send."""


class RequestHeader(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    id: int
    command: dict[str, JsonValue]


class MetricRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")
    value: float
    weight: float
    reduction: Reduction


class Failure(BaseModel):
    """An exception of the role, as text."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    kind: str
    message: str
    traceback: str = ""


class ReplyHeader(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")
    id: int
    data: dict[str, JsonValue] = {}
    metrics: dict[str, MetricRecord] = {}
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Frame:
    header: bytes
    payload: bytes


def encode(header: bytes, payload: bytes = b"") -> bytes:
    return PREFIX.pack(_MAGIC, len(header), len(payload)) + header + payload


def read_prefix(prefix: bytes, limits: FrameLimits) -> tuple[int, int]:
    """Lengths of header and payload. Raises ProtocolError when this is no frame, or one over the limits."""
    magic, header_bytes, payload_bytes = PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise ProtocolError(f"not a frame of this channel: it starts with {magic!r}")
    if header_bytes > limits.header_bytes or payload_bytes > limits.payload_bytes:
        raise ProtocolError(
            f"a frame of {header_bytes} + {payload_bytes} bytes exceeds the limit of "
            f"{limits.header_bytes} + {limits.payload_bytes}"
        )
    return header_bytes, payload_bytes


def encode_request(request_id: int, command: Command, tensors: Tensors) -> bytes:
    """Raises ProtocolError when the tensors are not the command's: nothing is sent then."""
    command.check_inputs(tensors)
    header = RequestHeader(id=request_id, command=command.model_dump(mode="json"))
    return encode(header.model_dump_json().encode(), pack(tensors))


def request_id_of(frame: Frame) -> int:
    return _request_header(frame).id


def decode_request(frame: Frame) -> tuple[int, Command, Tensors]:
    """Raises ProtocolError naming what is not as the schema says."""
    header = _request_header(frame)
    command = parse_command(json.dumps(header.command))  # JSON again: the strict parser knows tuples only there
    tensors = unpack(frame.payload)
    command.check_inputs(tensors)
    return header.id, command, tensors


def encode_answer(request_id: int, command: Command, answer: Answer) -> bytes:
    """Raises ProtocolError when the answer's tensors are not those that the command declares."""
    command.check_outputs(answer.tensors)
    metrics = {
        key: MetricRecord(value=float(m.value), weight=float(m.weight), reduction=m.reduction)
        for key, m in answer.metrics.items()
    }
    header = ReplyHeader(id=request_id, data=dict(answer.data), metrics=metrics)
    return encode(header.model_dump_json().encode(), pack(answer.tensors))


def encode_failure(request_id: int, failure: Failure) -> bytes:
    return encode(ReplyHeader(id=request_id, failure=failure).model_dump_json().encode())


def decode_reply_header(frame: Frame) -> ReplyHeader:
    try:
        return ReplyHeader.model_validate_json(frame.header)
    except ValidationError as error:
        raise ProtocolError(f"not a reply of this channel: {explain(error)}") from None


def decode_answer(role: str, command: Command, frame: Frame) -> Answer:
    """The answer in a reply frame. Raises RoleError when it carries a failure."""
    header = decode_reply_header(frame)
    if header.failure is not None:
        failure = header.failure
        raise RoleError(role, command.name, kind=failure.kind, message=failure.message, traceback=failure.traceback)
    tensors = unpack(frame.payload)
    command.check_outputs(tensors)
    metrics = {key: Metric(m.value, m.weight, m.reduction) for key, m in header.metrics.items()}
    return Answer(data=header.data, metrics=metrics, tensors=tensors)


def pack(tensors: Tensors) -> bytes:
    if not tensors:
        return b""
    return bytes(save_tensors({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}))


def unpack(payload: bytes) -> Tensors:
    if not payload:
        return {}
    try:
        return dict(load_tensors(payload))
    except (SafetensorError, KeyError, ValueError) as error:
        raise ProtocolError(f"the payload is not safetensors: {error}") from None


def _request_header(frame: Frame) -> RequestHeader:
    try:
        return RequestHeader.model_validate_json(frame.header)
    except ValidationError as error:
        raise ProtocolError(f"not a request of this channel: {explain(error)}") from None
