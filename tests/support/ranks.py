"""Real torch.distributed ranks for tests: one process each, over a file store, never left behind; gloo, or NCCL."""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PRELOAD = ["torch.distributed", "tests.support.ranks_preload"]


class RankError(AssertionError):
    """A rank raised, died or did not end in time; the message holds its traceback."""


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120, gpus: bool = False
) -> list[Any]:
    """Run `function(rank, *args)` in `world_size` fresh processes that form one world; results by rank.

    On the CPU over gloo, also where there are GPUs; with `gpus` over NCCL, each rank on the device of its number.
    `function` and `args` must be picklable (a function at the top of a module). The first failure ends all ranks.

    Raises:
        RankError: a rank raised (its traceback is in the message), died, or was not done after `timeout_s`.
    """
    context: Any = multiprocessing.get_context("spawn" if gpus else "forkserver")
    if not gpus:
        context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        store = str(Path(directory) / "store")
        processes = [
            context.Process(
                target=_run, args=(rank, world_size, store, timeout_s, pipes[rank][1], function, args, gpus)
            )
            for rank in range(world_size)
        ]
        try:
            for process, (_, sender) in zip(processes, pipes, strict=True):
                process.start()
                sender.close()
            results = _collect([receiver for receiver, _ in pipes], timeout_s)
            for process in processes:
                process.join(timeout=10)
            return results
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                if process.pid is not None:
                    process.join()


def _collect(receivers: list[Connection], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        waiting = {receiver: rank for rank, receiver in enumerate(receivers) if rank not in results}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} were not done after {timeout_s} s")
        for receiver in ready:
            rank = waiting[receiver]  # type: ignore[index]
            results[rank] = _receive(rank, receiver)  # type: ignore[arg-type]
    return [results[rank] for rank in range(len(receivers))]


def _receive(rank: int, receiver: Connection) -> Any:
    try:
        ok, value = pickle.loads(receiver.recv_bytes())  # noqa: S301 - from our own child, tensors by value
    except EOFError:
        raise RankError(f"rank {rank} died without an answer") from None
    if not ok:
        raise RankError(f"rank {rank} failed:\n{value}")
    return value


def _run(
    rank: int, world_size: int, store: str, timeout_s: float, sender: Connection, function: Any, args: Any, gpus: bool
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    try:
        _take_device(rank if gpus else None)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            "nccl" if gpus else "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout
        )
        value = function(rank, *args)
        sender.send_bytes(pickle.dumps((True, _on_cpu(value))))
    except BaseException:  # noqa: BLE001 - whatever it is, the test's process must see it
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
        os._exit(1)  # peers may be inside a collective with us: do not wait for them
    finally:
        sender.close()
    dist.destroy_process_group()


def _take_device(number: int | None) -> None:
    if number is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything asks for a device
    else:
        os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # as a run's ranks have it
        torch.cuda.set_device(number)


def _on_cpu(value: Any) -> Any:
    """A rank's answer, with its tensors where the test's process can compare them."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(each) for key, each in value.items()}
    return type(value)(map(_on_cpu, value)) if type(value) in (list, tuple) else value
