"""Update groups: built as SGLang builds its side, waited for with a deadline, left from any state.

A group built otherwise than by SGLang's `init_custom_process_group` makes both sides wait for each other.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

LOG = logging.getLogger(__name__)
Backend = Literal["gloo", "nccl"]
Cancelled = Callable[[], bool]
Broadcast = tuple[dist.Work, list[float]]
"""The work, and the time (of `time.monotonic`) at which it was over, once that is known."""
Result = TypeVar("Result")

STORE_TIMEOUT = timedelta(seconds=60)  # of one request to a store
CONNECT_TIMEOUT = timedelta(seconds=5)  # a store is there before anyone hears of it: one that is not has been closed
_ON_ERROR = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_POLL_S = 0.0002
_MAX_POLL_S = 0.002


def open_store(host: str) -> TCPStore:
    """A store on a free port of `host` alone (TCPStore by itself would listen on every interface)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        return TCPStore(
            host, port, None, True, STORE_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    finally:
        listener.close()


def connect_store(address: str, port: int) -> TCPStore:
    store = TCPStore(address, port, None, False, CONNECT_TIMEOUT, wait_for_workers=False)
    store.set_timeout(STORE_TIMEOUT)
    return store


def build_group(
    store: Store, backend: Backend, group_name: str, world_size: int, timeout_s: float
) -> dist.ProcessGroup:
    """Rank 0 of an update group that is no subgroup of the default group, as SGLang builds the other ranks."""
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    prefixed = PrefixStore(group_name, store)
    group: dist.ProcessGroup
    with errors_left_to_us():
        group, _ = c10d._new_process_group_helper(
            world_size, 0, [], dist.Backend(backend), prefixed, group_name=c10d.GroupName(group_name), timeout=timeout
        )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


@contextmanager
def errors_left_to_us() -> Iterator[None]:
    """NCCL groups made here live on after an error: torch's watchdog would end this rank with an engine that dies.

    A group reads the variable when it is made. Those of training keep torch's way: a rank is worth nothing alone.
    """
    before = os.environ.get(_ON_ERROR)
    os.environ[_ON_ERROR] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ON_ERROR]
        else:
            os.environ[_ON_ERROR] = before


def wait_until(done: Callable[[], bool], timeout_s: float, cancelled: Cancelled) -> None:
    """Poll: neither gloo nor NCCL lets a wait be interrupted from outside."""
    end_s, pause_s = time.monotonic() + timeout_s, _POLL_S
    while not done():
        if cancelled():
            raise RuntimeError("cancelled by the controller")
        if time.monotonic() > end_s:
            raise TimeoutError(f"not done within {timeout_s:.1f} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_POLL_S)


def in_thread(what: str, function: Callable[[], Result]) -> "Future[Result]":
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:  # noqa: BLE001  (the border of the thread: it is raised where the result is read)
            future.set_exception(error)

    threading.Thread(target=run, name=f"update group: {what}", daemon=True).start()
    return future


def start_broadcast(group: dist.ProcessGroup, flat: torch.Tensor, options: Any, stream: Any) -> Broadcast:
    """`stream`: the CUDA stream that fills `flat`; the current one belongs to each thread alone."""
    if stream is not None:
        torch.cuda.set_stream(stream)
    work, over_s = group.broadcast([flat], options), list[float]()
    if stream is None:  # NCCL's future is there before its bytes
        work.get_future().add_done_callback(lambda _: over_s.append(time.monotonic()))
    return work, over_s


def is_over(broadcast: "Future[Broadcast]") -> bool:
    return broadcast.done() and (broadcast.exception() is not None or broadcast.result()[0].is_completed())


def discard_group(future: "Future[Any]") -> None:
    """A group that came up after its join was given up."""
    if future.exception() is None:
        destroy([future.result()])


def destroy(held: "list[dist.ProcessGroup | None]") -> None:
    group = held.pop()
    if group is None:
        return
    try:
        if dist.get_backend(group) == "nccl":
            group.abort()  # ends kernels that wait for an engine
        dist.destroy_process_group(group)
    except (RuntimeError, ValueError) as error:
        LOG.warning("the update group could not be destroyed cleanly: %s", error)
