"""The two sides of `sao bench step` as processes: the real roles behind their real channels, and the bare ranks.

Both are CPU processes and rest in a blocking read while the other side works. Every wait has a deadline; leaving a side
ends its processes.
"""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from launch.placement import Placement
from launch.processes import Supervisor, tail
from launch.role_processes import rank_environment, start_roles, stop_roles
from launch.watch import Watch
from megatron_sao.channel import Answer, Channel, ChannelServer, Command
from megatron_sao.channel.commands import NO_TENSORS, Tensors
from megatron_sao.config import Config
from tools.bench.step_records import GO, BareSpec, Done

STOP_S = 10.0


@dataclass(kw_only=True)
class TimedChannel:
    """Passes calls on, and notes (command, start, end) of each, s."""

    channel: Channel
    calls: list[tuple[str, float, float]] = field(default_factory=list)

    @property
    def role(self) -> str:
        return self.channel.role

    async def call(self, command: Command, tensors: Tensors = NO_TENSORS, *, timeout_s: float) -> Answer:
        start_s = time.perf_counter()
        answer = await self.channel.call(command, tensors, timeout_s=timeout_s)
        self.calls.append((command.name, start_s, time.perf_counter()))
        return answer

    async def close(self) -> None:
        await self.channel.close()


@dataclass(frozen=True, kw_only=True)
class RoleSide:
    """The real role processes."""

    actor: TimedChannel
    critic: TimedChannel
    pids: dict[str, tuple[int, ...]]  # by role


@contextlib.asynccontextmanager
async def role_side(config: Config, private: Path, logs: Path) -> AsyncIterator[RoleSide]:
    """Both roles with their models built, as `sao train` starts them."""
    supervisor, server = Supervisor(), ChannelServer()
    no_gpu = ("",) * max(config.actor.layout.num_ranks, config.critic.layout.num_ranks)
    placement = Placement(actor=no_gpu, critic=no_gpu)
    try:
        starting = start_roles(
            config, server=server, supervisor=supervisor, placement=placement, private=private, logs=logs
        )
        roles = await Watch(supervisor).over(starting, grace_s=STOP_S)
        pids = {
            role: tuple(process.popen.pid for process in supervisor.processes if process.name.startswith(role))
            for role in ("actor", "critic")
        }
        yield RoleSide(actor=TimedChannel(channel=roles.actor), critic=TimedChannel(channel=roles.critic), pids=pids)
        await stop_roles(roles, supervisor)
    finally:
        await server.close()
        await asyncio.to_thread(supervisor.stop, STOP_S)


class BareRank:
    """One process of `bare_megatron`, with a deadline on every answer."""

    def __init__(self, spec: BareSpec, process: asyncio.subprocess.Process, log: Path) -> None:
        self._spec, self._process, self._log = spec, process, log

    @property
    def pid(self) -> int:
        return self._process.pid

    async def tell(self, line: str) -> None:
        assert self._process.stdin is not None, "stdin is a pipe"
        self._process.stdin.write(line.encode() + b"\n")
        await self._process.stdin.drain()

    async def answer(self) -> bytes:
        """Raises RuntimeError when it has ended, or said nothing in time."""
        assert self._process.stdout is not None, "stdout is a pipe"
        who = f"bare {self._spec.role} rank {self._spec.rank}"
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), self._spec.timeout_s)
        except TimeoutError:
            raise RuntimeError(f"{who} gave no answer within {self._spec.timeout_s:g} s") from None
        if not line:
            raise RuntimeError(f"{who} ended. The end of its log:\n{tail(self._log)}")
        return line

    async def stop(self) -> None:
        """It holds nothing that a kill could break."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


@dataclass(frozen=True, kw_only=True)
class BareSide:
    ranks: dict[str, tuple[BareRank, ...]]  # by role

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(rank.pid for ranks in self.ranks.values() for rank in ranks)

    async def go(self, role: str) -> list[Done]:
        """One step's work of a role, on all its ranks."""
        for rank in self.ranks[role]:
            await rank.tell(GO)
        return [Done.model_validate_json(line) for line in await _answers(self.ranks[role])]


@contextlib.asynccontextmanager
async def bare_side(specs: Sequence[BareSpec], logs: Path) -> AsyncIterator[BareSide]:
    """All bare ranks with their models built and their rows on the device."""
    async with contextlib.AsyncExitStack() as stack:
        ranks: dict[str, tuple[BareRank, ...]] = {}
        for spec in specs:
            rank = await _start(spec, logs / f"bare-{spec.role}-{spec.rank}.log")
            stack.push_async_callback(rank.stop)
            ranks[spec.role] = (*ranks.get(spec.role, ()), rank)
        for role_ranks in ranks.values():
            await _answers(role_ranks)
        yield BareSide(ranks=ranks)


async def _start(spec: BareSpec, log_path: Path) -> BareRank:
    with log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "tools.bench.bare_megatron"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=rank_environment(os.environ, num_threads=spec.num_threads) | {"CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,
        )
    rank = BareRank(spec, process, log_path)
    await rank.tell(spec.model_dump_json())
    return rank


async def _answers(ranks: Sequence[BareRank]) -> list[bytes]:
    return list(await asyncio.gather(*(rank.answer() for rank in ranks)))


def cpu_seconds(pids: Sequence[int]) -> float:
    """Of processes of this machine, in user and kernel mode."""
    times: list[Any] = [psutil.Process(pid).cpu_times() for pid in pids]
    return float(sum(time.user + time.system for time in times))
