"""A stand of the publish benchmark as records, and the process that runs it (`publish_worker.py`)."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tools.bench.networks import Link

WORKER = (sys.executable, "-P", "-m", "tools.bench.publish_worker")
LINE_BYTES = 2**24  # of one message
STOP_S = 45.0  # for a worker to stop everything


class CaseSettings(BaseModel):
    """What differs between the cases of one stand."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    network: str
    sender: Literal["gather", "direct"]
    bucket_bytes: int


class Stand(BaseModel):
    """What is started once, and what is measured with it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    model_path: str
    model_bytes: int
    link: Link
    num_engines: int
    tensor: int  # of each engine
    actor_ranks: int
    expert: int
    num_pairs: int
    cases: tuple[CaseSettings, ...]


class Samples(BaseModel):
    """What was measured in one case, a number for each pair."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    num_buckets: int
    largest_bucket_bytes: int  # above the setting where one tensor is
    publish_s: tuple[float, ...]
    bare_s: tuple[float, ...]
    phases: dict[str, tuple[float, ...]]
    memory_bytes: int  # the largest growth of an actor rank over its size before the first publish


async def run_stand(stand: Stand, pair_done: Callable[[CaseSettings], None]) -> list[Samples]:
    """Measure all cases of a stand in a process on the trainer's side. Nothing is left of it, whatever happens.

    Raises:
        RuntimeError: it failed; its error is on stderr.
    """
    worker = await _start(stand)
    samples: list[Samples] = []
    try:
        assert worker.stdout is not None, "stdout is a pipe"
        while line := await worker.stdout.readline():
            message: dict[str, Any] = json.loads(line)
            if "samples" in message:
                samples.append(Samples.model_validate(message["samples"]))
            else:
                pair_done(CaseSettings.model_validate(message["pair"]))
        status = await worker.wait()
    finally:
        await _end(worker)
    if status or len(samples) != len(stand.cases):
        raise RuntimeError(f"a stand of the benchmark ended with status {status}; its error is above")
    return samples


async def _start(stand: Stand) -> asyncio.subprocess.Process:
    side = stand.link.trainer
    worker = await asyncio.create_subprocess_exec(
        *side.prefix,
        *WORKER,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": side.interface},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
        limit=LINE_BYTES,
    )
    assert worker.stdin is not None, "stdin is a pipe"
    worker.stdin.write(stand.model_dump_json().encode() + b"\n")
    return worker


async def _end(worker: asyncio.subprocess.Process) -> None:
    """A closed stdin ends it in order."""
    assert worker.stdin is not None, "stdin is a pipe"
    worker.stdin.close()
    try:
        await asyncio.wait_for(worker.wait(), STOP_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        await worker.wait()
