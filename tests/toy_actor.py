"""A toy actor for publish tests: real ranks, a real channel, the real sender; tensors made from their name and step."""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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
    PublishPrepare,
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
    forget_at: frozenset[int] = frozenset()
    step: int = 0
    num_gathers: int = 0

    def tensors(self) -> Sequence[Publishable]:
        return [dataclasses.replace(tensor, owner=self._owner(tensor.spec)) for tensor in toy_tensors()]

    def gather(
        self, specs: Sequence[TensorSpec], places: Mapping[str, torch.Tensor] | None, *, target: int, timeout_s: float
    ) -> int:
        number, self.num_gathers = self.num_gathers, self.num_gathers + 1
        if self.rank == target and number in self.raise_at:
            raise RuntimeError("scripted failure of the gather")
        num_bytes = 0
        for spec in specs:
            owner = self._owner(spec)
            if self.rank == owner != target:
                dist.send(toy_value(spec, self.step).view(torch.uint8), dst=target)
            elif self.rank == target != owner:
                assert places is not None
                dist.recv(places[spec.name].view(torch.uint8), src=owner)
                num_bytes += places[spec.name].nbytes
        return num_bytes

    def flatten(self, specs: Sequence[TensorSpec], places: Mapping[str, torch.Tensor]) -> int:
        own = [spec for spec in specs if self._owner(spec) == self.rank]
        if self.num_gathers - 1 in self.forget_at:
            own = own[1:]
        for spec in own:
            places[spec.name].copy_(toy_value(spec, self.step))
        return sum(places[spec.name].nbytes for spec in own)

    def _owner(self, spec: TensorSpec) -> int:
        return [tensor.spec.name for tensor in toy_tensors()].index(spec.name) % self.world_size


def run_toy_actor(rank: int, world_size: int, port: int, raise_at: frozenset[int], forget_at: frozenset[int]) -> None:
    """For `run_ranks`."""
    serve(rank, port, ToySource(rank, world_size, raise_at, forget_at))


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
        case PublishPlanning(full=full, bucket_bytes=bucket_bytes, direct=direct):
            return Answer(data=publish_plan_data(sender.plan(full=full, bucket_bytes=bucket_bytes, direct=direct)))
        case PublishListen():
            end = sender.listen()
            return Answer(data=asdict(end) if end else {})
        case PublishJoin(groups=groups, world_size=world_size, address=address, port=port, timeout_s=timeout_s):
            sender.join(groups, world_size, timeout_s, endpoint=(address, port), cancelled=cancelled)
        case PublishPrepare(bucket=bucket, timeout_s=timeout_s):
            sender.prepare(bucket, timeout_s)
        case PublishSend(bucket=bucket, timeout_s=timeout_s):
            sent = sender.send(bucket, timeout_s, cancelled)
            return Answer(data=asdict(sent) if sent else {})
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
