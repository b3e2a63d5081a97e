"""A toy actor for publish tests: real ranks, a real channel, the real sender; tensors made from their name and step."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_sao.channel import (
    ActorUpdate,
    Answer,
    Command,
    ControllerGone,
    PublishJoin,
    PublishLeave,
    PublishListen,
    PublishPlanning,
    PublishSend,
    RoleConnection,
    Score,
    Tensors,
    connect,
    parse_command,
    publish_plan_data,
)
from megatron_sao.channel.frames import pack, unpack
from megatron_sao.sync.plan import Publishable
from megatron_sao.sync.send import WeightSender
from megatron_sao.types import TensorSpec

KEY = b"k" * 32
SPECS = (
    ("model.embed_tokens.weight", "bfloat16", (7, 5), True, False),
    ("model.layers.0.mlp.gate.e_score_correction_bias", "float32", (3,), False, True),
    ("model.layers.0.self_attn.q_proj.weight", "bfloat16", (3, 5), False, False),  # frozen
    ("model.layers.0.mlp.experts.0.up_proj.weight", "bfloat16", (9, 5), True, False),
    ("model.layers.0.mlp.experts.1.up_proj.weight", "bfloat16", (9, 5), True, False),
    ("model.norm.weight", "float32", (5,), True, False),
)


def toy_tensors() -> tuple[Publishable, ...]:
    return tuple(
        Publishable(spec=TensorSpec(name=name, dtype=dtype, shape=shape), trained=trained, is_buffer=is_buffer)
        for name, dtype, shape, trained, is_buffer in SPECS
    )


def toy_value(spec: TensorSpec, step: int) -> torch.Tensor:
    """The tensor after `step` updates."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{spec.name}/{step}".encode()))
    return torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype))


def toy_values(step: int) -> dict[str, torch.Tensor]:
    return {tensor.spec.name: toy_value(tensor.spec, step) for tensor in toy_tensors()}


@dataclass
class ToySource:
    """Tensor number i lives on rank i modulo the number of ranks, as experts do. Numbers of gathers count from 0."""

    rank: int
    world_size: int
    raise_at: frozenset[int] = frozenset()
    transpose_at: frozenset[int] = frozenset()
    step: int = 0
    num_gathers: int = 0

    def tensors(self) -> Sequence[Publishable]:
        return toy_tensors()

    def gather(self, specs: Sequence[TensorSpec]) -> Mapping[str, torch.Tensor]:
        number, self.num_gathers = self.num_gathers, self.num_gathers + 1
        names = [tensor.spec.name for tensor in toy_tensors()]
        tensors = {spec.name: self._collect(spec, names.index(spec.name) % self.world_size) for spec in specs}
        if self.rank:
            return {}
        if number in self.raise_at:
            raise RuntimeError("scripted failure of the gather")
        if number in self.transpose_at:
            return {name: tensor.t() if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
        return tensors

    def _collect(self, spec: TensorSpec, owner: int) -> torch.Tensor:
        tensor = (
            toy_value(spec, self.step)
            if self.rank == owner
            else torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        )
        if owner and self.rank == owner:
            dist.send(tensor.view(torch.uint8), dst=0)
        elif owner and self.rank == 0:
            dist.recv(tensor.view(torch.uint8), src=owner)
        return tensor


def run_toy_actor(
    rank: int, world_size: int, port: int, raise_at: frozenset[int], transpose_at: frozenset[int]
) -> None:
    """For `run_ranks`."""
    serve(rank, port, ToySource(rank, world_size, raise_at, transpose_at))


def serve(rank: int, port: int, source: Any) -> None:
    """Execute publish commands until the controller closes the channel. An actor update sets `source.step`."""
    sender = WeightSender(source, rank=rank, backend="gloo")
    connection = connect("127.0.0.1", port, role="actor", key=KEY, timeout_s=30) if rank == 0 else None
    while (command := _next(connection)) is not None:
        try:
            answer = _execute(*command, source, sender, connection)
        except (RuntimeError, ValueError) as error:
            if connection is None:
                raise
            connection.fail(error)
        else:
            if connection is not None:
                connection.reply(answer)
    sender.leave()


def _execute(
    command: Command, tensors: Tensors, source: Any, sender: WeightSender, connection: RoleConnection | None
) -> Answer:
    cancelled = connection.interrupted if connection is not None else lambda: False
    match command:
        case ActorUpdate(version=version):
            source.step = version + 1
        case Score():
            return Answer(tensors={"logprobs": source.score(tensors["token_ids"])})
        case PublishPlanning(full=full, bucket_bytes=bucket_bytes):
            return Answer(data=publish_plan_data(sender.plan(full=full, bucket_bytes=bucket_bytes)))
        case PublishListen():
            end = sender.listen()
            return Answer(data={"address": end.address, "port": end.port, "backend": end.backend} if end else {})
        case PublishJoin(group_name=group_name, world_size=world_size, timeout_s=timeout_s):
            sender.join(group_name, world_size, timeout_s, cancelled)
        case PublishSend(bucket=bucket, timeout_s=timeout_s):
            sent = sender.send(bucket, timeout_s, cancelled)
            seconds = {f"{k}_s": getattr(sent, f"{k}_s") for k in ("gather", "flatten", "send")} if sent else {}
            return Answer(data={"bytes": sent.num_bytes if sent else 0, **seconds})
        case PublishLeave():
            sender.leave()
    return Answer()


def _next(connection: RoleConnection | None) -> tuple[Command, Tensors] | None:
    """Rank 0 receives, all get the command and the token ids of a score; None: the end."""
    message = b""
    if connection is not None:
        try:
            received = connection.receive(timeout_s=60)
            assert received is not None, "the controller was silent for 60 s"
            message = pack(received[1])
            message = received[0].model_dump_json().encode() + b"\n" + message
        except ControllerGone:
            message = b""
    size = torch.tensor([len(message)])
    dist.broadcast(size, src=0)
    if not int(size):
        return None
    data = torch.frombuffer(bytearray(message.ljust(int(size))), dtype=torch.uint8)
    dist.broadcast(data, src=0)
    text, _, packed = bytes(data.numpy()).partition(b"\n")
    return parse_command(text), unpack(packed)
