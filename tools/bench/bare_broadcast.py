"""The baseline of a publish: `torch.distributed.broadcast` of warm, preallocated buffers, in processes of their own.

One sender and one receiver for each rank of the engines, one flat buffer of bytes for each bucket. Between two runs
they wait for a line on a pipe; when the pipe closes they end. A run is timed from the moment at which all have met to
the moment at which the last receiver has every byte; the bytes differ from run to run, and receivers count them.

A process: `python -m tools.bench.bare_broadcast`, one JSON request a line on stdin, one JSON answer a line on stdout.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from megatron_sao.rollout.server import NOT_INHERITED
from megatron_sao.sync.group import open_store
from tools.bench.networks import Side

COMMAND = (sys.executable, "-P", "-m", "tools.bench.bare_broadcast")
START_S = 120.0  # to import torch and to meet
STOP_S = 5.0
GROUP_TIMEOUT_S = 300.0  # of one broadcast
COUNT_BYTES = 2**22  # at a time: counting needs no second buffer

Send = Callable[[torch.Tensor], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class BareRun:
    """One broadcast of all buckets."""

    seconds: float
    num_bytes: int  # that every receiver has


class BareBroadcast:
    """The processes. `start`, then `allocate` and any number of `run`; `close` ends them."""

    def __init__(self, processes: Sequence[asyncio.subprocess.Process]) -> None:
        self._processes = processes
        self._num_bytes = 0
        self._num_runs = 0

    @classmethod
    async def start(
        cls, sender: Side, receiver: Side, *, num_receivers: int, environment: Mapping[str, str], log_path: Path
    ) -> "BareBroadcast":
        """Returns when all of them have met."""
        processes: list[asyncio.subprocess.Process] = []
        bare = cls(processes)
        try:
            with log_path.open("ab") as log:
                for side in (sender, *[receiver] * num_receivers):
                    processes.append(await _launch(side, environment, log))
            port = (await bare._ask(processes[0], {"listen": sender.host}))["port"]
            join = {"host": sender.host, "port": port, "world_size": len(processes)}
            await bare._ask_all([{**join, "join": rank} for rank in range(len(processes))])
        except BaseException:
            await bare.close()
            raise
        return bare

    async def allocate(self, bucket_bytes: Sequence[int]) -> None:
        """One buffer for each bucket, in place of those before."""
        self._num_bytes = sum(bucket_bytes)
        await self._ask_all([{"allocate": list(bucket_bytes)}] * len(self._processes))

    async def run(self) -> BareRun:
        """Raises RuntimeError when a receiver does not have every byte."""
        self._num_runs += 1
        fill = 1 + self._num_runs % 250
        await self._ask_all([{"fill": fill}] * len(self._processes))
        times = await self._ask_all([{"broadcast": True}] * len(self._processes))
        counts = await self._ask_all([{"count": fill}] * len(self._processes))
        for rank, count in enumerate(counts):
            if count["bytes"] != self._num_bytes:
                raise RuntimeError(f"bare broadcast: rank {rank} has {count['bytes']} of {self._num_bytes} bytes")
        seconds = max(time["end_s"] for time in times[1:]) - times[0]["start_s"]
        return BareRun(seconds=seconds, num_bytes=self._num_bytes)

    async def close(self) -> None:
        """A closed pipe ends them; who does not end by that is killed."""
        for process in self._processes:
            assert process.stdin is not None, "stdin is a pipe"
            process.stdin.close()
        for process in self._processes:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_S)
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _ask_all(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        pairs = zip(self._processes, requests, strict=True)
        return await asyncio.gather(*(self._ask(process, request) for process, request in pairs))

    async def _ask(self, process: asyncio.subprocess.Process, request: Mapping[str, Any]) -> dict[str, Any]:
        assert process.stdin is not None, "stdin is a pipe"
        assert process.stdout is not None, "stdout is a pipe"
        process.stdin.write(json.dumps(request).encode() + b"\n")
        async with asyncio.timeout(START_S + GROUP_TIMEOUT_S):
            line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"bare broadcast: a process ended during {request}; its log says why")
        answer: dict[str, Any] = json.loads(line)
        return answer


async def _launch(side: Side, environment: Mapping[str, str], log: Any) -> asyncio.subprocess.Process:
    kept = {key: value for key, value in environment.items() if key not in NOT_INHERITED}
    return await asyncio.create_subprocess_exec(
        *side.prefix,
        *COMMAND,
        env={**kept, "GLOO_SOCKET_IFNAME": side.interface, "OMP_NUM_THREADS": "1"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
        start_new_session=True,
    )


class Rank:
    """One process: answers requests."""

    def __init__(self) -> None:
        self._rank = 0
        self._store: TCPStore | None = None
        self._buffers: list[torch.Tensor] = []

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        match request:
            case {"listen": host}:
                self._store = open_store(host)
                return {"port": self._store.port}
            case {"join": rank, "host": host, "port": port, "world_size": world_size}:
                self._join(rank, host, port, world_size)
            case {"allocate": sizes}:
                self._buffers = []  # before the new ones are there
                self._buffers = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
            case {"fill": value}:
                if self._rank == 0:
                    for buffer in self._buffers:
                        buffer.fill_(value)
            case {"broadcast": _}:
                return self._broadcast()
            case {"count": value}:
                parts = (part for buffer in self._buffers for part in buffer.split(COUNT_BYTES))
                return {"bytes": sum(int(torch.count_nonzero(part == value)) for part in parts)}
            case _:
                raise ValueError(f"not a request: {request}")
        return {}

    def _join(self, rank: int, host: str, port: int, world_size: int) -> None:
        self._rank = rank
        store = self._store or TCPStore(host, port, None, False, timeout=timedelta(seconds=START_S))
        timeout = timedelta(seconds=GROUP_TIMEOUT_S)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)

    def _broadcast(self) -> dict[str, Any]:
        """`start_s` and `end_s` on the machine's monotonic clock, which all processes share."""
        dist.barrier()
        start_s = time.monotonic()
        for buffer in self._buffers:
            dist.broadcast(buffer, 0)
        return {"start_s": start_s, "end_s": time.monotonic()}


def main() -> None:
    torch.set_num_threads(1)
    rank = Rank()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(rank.answer(json.loads(line))) + "\n")
        sys.stdout.flush()
    os._exit(0)  # a shutdown of the interpreter would wait for gloo's peers


if __name__ == "__main__":
    main()
