"""Toy actor for tests of a publish: a few small tensors with values known to both sides, no model.

Its ranks run the real worker loop and the real sender. `DropBatch(batch_id=n)`, which no toy needs, sets the number of
updates done to n, and with it every value. A script says what goes wrong, and where a rank reports what it does.
"""

import asyncio
import dataclasses
import json
import multiprocessing
import os
import signal
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_sao.channel import (
    Answer,
    Command,
    DropBatch,
    PublishCommand,
    Score,
    Tensors,
    connect,
)
from megatron_sao.roles import publishing
from megatron_sao.roles.exchange import Exchange
from megatron_sao.roles.worker import Worker
from megatron_sao.sync.plan import Publishable
from megatron_sao.sync.send import WeightSender
from megatron_sao.types import TensorSpec

KEY = b"k" * 32
CONTROL_S, GRACE_S = 90.0, 8.0
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


@dataclass(frozen=True, kw_only=True)
class Script:
    """Numbers count the gathers of a rank from 0, since the start or the last `DropBatch`."""

    raise_at: frozenset[int] = frozenset()  # on the rank that the gather is for
    forget_at: frozenset[int] = frozenset()  # the first tensor of the bucket is not written
    signal_at: Mapping[int, tuple[int, signal.Signals]] = field(default_factory=dict)  # rank -> gather, to itself
    gather_s: float = 0.0  # a gather takes so long
    hang_in: str | None = None  # "plan", "listen" or "join": that command does not end before its deadline
    hang_s: float = 0.0
    report: Path | None = None  # a directory; each rank writes events to a file of its own

    def note(self, rank: int, event: str, **facts: Any) -> None:
        if self.report is not None:
            with (self.report / f"{rank}.jsonl").open("a") as file:
                file.write(json.dumps({"event": event, "rank": rank, "at": time.monotonic()} | facts) + "\n")

    def begin_gather(self, rank: int, number: int, target: int) -> None:
        self.note(rank, "gather", number=number, target=target)
        at, sent = self.signal_at.get(rank, (-1, signal.SIGCONT))
        if number == at:
            os.kill(os.getpid(), sent)

    def end_gather(self, rank: int, number: int, target: int, **facts: Any) -> None:
        """A scripted failure comes here: no other rank waits for this one (one that did would end its role)."""
        time.sleep(self.gather_s)
        self.note(rank, "gathered", number=number, target=target, **facts)
        if rank == target and number in self.raise_at:
            raise RuntimeError("scripted failure of the gather")


def events(report: Path, event: str, rank: int | None = None) -> list[dict[str, Any]]:
    """What the ranks have reported so far, in the order of time."""
    files = report.glob("*.jsonl" if rank is None else f"{rank}.jsonl")
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines(keepends=True) if "\n" in line]
    return sorted((line for line in lines if line["event"] == event), key=lambda line: line["at"])


@dataclass
class ToySource:
    """Tensor number i lives on rank i modulo the number of ranks, as experts do."""

    rank: int
    world_size: int
    script: Script = Script()
    step: int = 0
    num_gathers: int = 0

    def tensors(self) -> Sequence[Publishable]:
        return [dataclasses.replace(tensor, owner=self._owner(tensor.spec)) for tensor in toy_tensors()]

    def gather(
        self, specs: Sequence[TensorSpec], places: Mapping[str, torch.Tensor] | None, *, target: int, timeout_s: float
    ) -> int:
        number, self.num_gathers = self.num_gathers, self.num_gathers + 1
        self.script.begin_gather(self.rank, number, target)
        num_bytes = 0
        for spec in specs:
            owner = self._owner(spec)
            if self.rank == owner != target:
                _wait(dist.isend(toy_value(spec, self.step).view(torch.uint8), dst=target), timeout_s)
            elif self.rank == target != owner:
                assert places is not None
                _wait(dist.irecv(places[spec.name].view(torch.uint8), src=owner), timeout_s)
                num_bytes += places[spec.name].nbytes
        self.script.end_gather(self.rank, number, target, num_bytes=num_bytes)
        return num_bytes

    def flatten(self, specs: Sequence[TensorSpec], places: Mapping[str, torch.Tensor]) -> int:
        own = [spec for spec in specs if self._owner(spec) == self.rank]
        if self.num_gathers - 1 in self.script.forget_at:
            own = own[1:]
        for spec in own:
            places[spec.name].copy_(toy_value(spec, self.step))
        storage = next(iter(places.values())).untyped_storage()
        facts = {"buffer": storage.data_ptr(), "num_bytes": storage.nbytes(), "tensors": list(places)}
        self.script.note(self.rank, "flattened", number=self.num_gathers - 1, **facts)
        return sum(places[spec.name].nbytes for spec in own)

    def _owner(self, spec: TensorSpec) -> int:
        return [tensor.spec.name for tensor in toy_tensors()].index(spec.name) % self.world_size


def _wait(work: Any, timeout_s: float) -> None:
    work.wait(timedelta(seconds=timeout_s))


class PublishingRole:
    """`roles.worker.Role` over a source and a sender, as `roles.actor.Actor` is."""

    def __init__(self, source: Any, sender: WeightSender, cancelled: Callable[[], bool], script: Script) -> None:
        self._source, self._sender, self._cancelled, self._script = source, sender, cancelled, script

    def handle(self, command: Command, tensors: Tensors) -> Answer:
        if self._script.hang_in == command.name.removeprefix("publish_"):
            time.sleep(self._script.hang_s)
        match command:
            case DropBatch(batch_id=step):
                self._source.step, self._source.num_gathers = step, 0
            case Score():
                return Answer(tensors={"logprobs": self._source.score(tensors["token_ids"])})
            case PublishCommand():
                return publishing.execute(command, self._sender, self._cancelled)
        return Answer()


def run_toy_actor(rank: int, world_size: int, port: int, script: Script) -> None:
    """For `run_ranks` and `started`."""
    serve(rank, port, ToySource(rank, world_size, script), script)


def serve(rank: int, port: int, source: Any, script: Script = Script(), *, data_rank: int | None = None) -> None:
    """Execute commands until the controller closes the channel, or this rank has lost the others."""
    exchange = Exchange.create(data_rank=rank if data_rank is None else data_rank, timeout_s=CONTROL_S, grace_s=GRACE_S)
    sender = WeightSender(source, rank=rank, backend="gloo")
    connection = connect("127.0.0.1", port, role="actor", key=KEY, timeout_s=30) if rank == 0 else None
    cancelled = connection.interrupted if connection is not None else lambda: False
    Worker(PublishingRole(source, sender, cancelled, script), exchange, connection).run()
    sender.leave()


@asynccontextmanager
async def started(world_size: int, function: Callable[..., None], *args: Any) -> AsyncIterator[list[BaseProcess]]:
    """Ranks of which none is ended because another died (as `run_ranks` would). At the end all are gone."""
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        store = str(Path(directory) / "store")
        ranks = [
            context.Process(target=_run, args=(rank, world_size, store, function, args)) for rank in range(world_size)
        ]
        try:
            for process in ranks:
                process.start()
            yield list(ranks)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()


async def ended(ranks: Sequence[BaseProcess], timeout_s: float) -> list[int | None]:
    """Exit codes, once these processes have ended by themselves; None for one that has not in time."""
    deadline = time.monotonic() + timeout_s
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return [process.exitcode for process in ranks]


def _run(rank: int, world_size: int, store: str, function: Callable[..., None], args: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout)
    try:
        function(rank, *args)
    except BaseException:  # noqa: BLE001 - as roles.main: a rank that has lost the others waits for nobody
        os._exit(3)
    os._exit(0)
