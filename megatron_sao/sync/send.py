"""The actor's half of a publish: gather whole tensors, flatten a bucket, broadcast it to the engines.

Consumes commands that every rank of the actor executes in the same order; produces bytes on the update group, whose
rank 0 is the actor's rank 0. Waits for the other ranks (gather) and for the engines (join, broadcast); unblocked by
them, by the deadline of the command, or by `cancelled`. The update group is built as SGLang builds its side
(`init_custom_process_group`): a group built otherwise makes both sides wait for each other.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from megatron_sao.sync.plan import Publishable, make_plan, offsets, tensor_bytes
from megatron_sao.types import Bucket, PublishPlan, TensorSpec

LOG = logging.getLogger(__name__)
Backend = Literal["gloo", "nccl"]
Cancelled = Callable[[], bool]
Result = TypeVar("Result")

_POLL_S = 0.0002
_MAX_POLL_S = 0.02
_STORE_TIMEOUT = timedelta(seconds=60)  # of one request to a store on this machine


class TensorSource(Protocol):
    """Where whole tensors come from. Every rank calls both methods, with the same arguments."""

    def tensors(self) -> Sequence[Publishable]:
        """Every tensor of the unsharded model under its HF name, tied ones once, in one order on all ranks."""
        ...

    def gather(self, specs: Sequence[TensorSpec]) -> Mapping[str, torch.Tensor]:
        """The whole tensors of `specs`, in their dtypes, on rank 0; nothing on the others. Collective."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where the update group meets."""

    address: str
    port: int
    backend: Backend


@dataclass(frozen=True, kw_only=True, slots=True)
class SendReport:
    """What one bucket took on rank 0. On a GPU, copies that are still under way count for the phase that waits."""

    num_bytes: int
    gather_s: float
    flatten_s: float
    send_s: float


class WeightSender:
    """One per rank. Every rank calls every method in the same order; only rank 0 has anything to do with engines.

    `cancelled` is polled while rank 0 waits for engines: a role gives `RoleConnection.interrupted`, so that any command
    which follows during a join or a send (PublishLeave) ends it.

    Errors name the rank, the phase and the bucket. `leave` works from any state and brings back the first one.
    """

    def __init__(
        self,
        source: TensorSource,
        *,
        rank: int,
        backend: Backend,
        host: str = "127.0.0.1",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._source, self._rank, self._backend, self._host = source, rank, backend, host
        self._actor_group = group  # None: the default group
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._plan: PublishPlan | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._store: TCPStore | None = None
        self._group: dist.ProcessGroup | None = None
        self._pending: Future[dist.Work] | None = None  # a broadcast: its start, then the work

    def plan(self, *, full: bool, bucket_bytes: int) -> PublishPlan:
        """The plan of the next sends, after all ranks have found that theirs is the same.

        Raises:
            RuntimeError: the ranks' plans differ; every rank raises.
            ValueError: what `make_plan` refuses.
        """
        plan = make_plan(self._source.tensors(), bucket_bytes=bucket_bytes, full=full)
        compare_digests(plan.digest, rank=self._rank, group=self._actor_group)
        self._plan = plan
        return plan

    def listen(self) -> Endpoint | None:
        """Open the store of a new update group on a free port of `host`. None on ranks other than 0."""
        if self._rank:
            return None
        self.leave()
        self._store = open_store(self._host)
        return Endpoint(address=self._host, port=self._store.port, backend=self._backend)

    def join(self, group_name: str, world_size: int, timeout_s: float, cancelled: Cancelled = lambda: False) -> None:
        """Join as rank 0, while the engines join as the others. With gloo it returns when all have.

        Raises:
            RuntimeError: not listening, a deadline, or a cancel; the group is not there then.
        """
        if self._rank:
            return
        if self._store is None or self._group is not None:
            raise self._error("connect", "call listen() first, once for each group")
        client = TCPStore(self._host, self._store.port, None, False, _STORE_TIMEOUT, wait_for_workers=False)
        thread = _in_thread("join", lambda: build_group(client, self._backend, group_name, world_size, timeout_s))
        try:
            _wait_until(thread.done, timeout_s, cancelled)
            self._group = thread.result()
        except (RuntimeError, TimeoutError) as error:
            self._store = None  # closes the store, which ends the waits of both sides
            thread.add_done_callback(_discard_group)
            raise self._error("connect", f"group {group_name} of {world_size}: {error}") from error

    def send(self, bucket: int, timeout_s: float, cancelled: Cancelled = lambda: False) -> SendReport | None:
        """Gather, flatten and broadcast bucket number `bucket` of the plan. None on ranks other than 0.

        Raises:
            RuntimeError: no plan or no such bucket, a tensor that is not as planned, a deadline, a cancel, a peer
                that has gone.
        """
        content = self._bucket(bucket)
        start_s = time.monotonic()
        tensors = self._source.gather(content.tensors)
        if self._rank:
            return None
        gathered_s = time.monotonic()
        flat = self._flatten(bucket, content, tensors)
        flattened_s = time.monotonic()
        self._broadcast(bucket, flat, timeout_s=timeout_s - (flattened_s - start_s), cancelled=cancelled)
        return SendReport(
            num_bytes=content.num_bytes,
            gather_s=gathered_s - start_s,
            flatten_s=flattened_s - gathered_s,
            send_s=time.monotonic() - flattened_s,
        )

    def leave(self) -> None:
        """Destroy the update group and its store, whatever they are doing. Does nothing where there is none."""
        held, self._group = [self._group], None  # the last reference: dropping it runs gloo's destructor
        waiting = self._pending is not None and not _is_over(self._pending)
        self._pending = self._store = None
        if waiting:
            # The destructor waits for the broadcast, which ends by its own deadline, with the peer, or by the abort of
            # its communicator. Until then its bytes must stay what they are: the next publish takes another buffer.
            self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)
            threading.Thread(target=_destroy, args=(held,), name="leave update group", daemon=True).start()
        else:
            _destroy(held)

    def _bucket(self, bucket: int) -> Bucket:
        if self._plan is None:
            raise self._error("plan", "there is none: call plan() before send()")
        if not 0 <= bucket < len(self._plan.buckets):
            raise self._error("plan", f"bucket {bucket} is none of the plan's {len(self._plan.buckets)}")
        return self._plan.buckets[bucket]

    def _flatten(self, bucket: int, content: Bucket, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if len(self._buffer) < content.num_bytes:
            assert self._plan is not None
            largest = max(each.num_bytes for each in self._plan.buckets)
            self._buffer = torch.empty(largest, dtype=torch.uint8, device=self._device)
        flat = self._buffer[: content.num_bytes]
        for spec, offset in zip(content.tensors, offsets(content), strict=True):
            tensor = tensors.get(spec.name)
            wrong = _unlike(tensor, spec)
            if tensor is None or wrong:
                raise self._error("flatten", f"bucket {bucket}: {wrong}")
            place = flat[offset : offset + tensor_bytes(spec)].view(tensor.dtype).view(spec.shape)
            place.copy_(tensor.detach())
        return flat

    def _broadcast(self, bucket: int, flat: torch.Tensor, *, timeout_s: float, cancelled: Cancelled) -> None:
        if self._group is None:
            raise self._error("send", f"bucket {bucket}: no update group; join() one first")
        if self._pending is not None:
            raise self._error("send", f"bucket {bucket}: the last broadcast failed; leave() and join() a new group")
        if timeout_s <= 0:
            raise self._error("send", f"bucket {bucket}: its gather used up the deadline")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        # Our own deadline comes first on NCCL, whose watchdog would end this process at its own.
        options.timeout = timedelta(seconds=timeout_s if self._backend == "gloo" else 2 * timeout_s + 60)
        # In a thread: the first broadcast of a group on NCCL makes the communicator, and blocks until the engines do.
        group, stream = self._group, torch.cuda.current_stream() if self._backend == "nccl" else None
        self._pending = pending = _in_thread("broadcast", lambda: _start_broadcast(group, flat, options, stream))
        try:
            _wait_until(lambda: _is_over(pending), timeout_s, cancelled)
            pending.result().wait()
        except (RuntimeError, TimeoutError) as error:
            raise self._error("send", f"bucket {bucket} of {len(flat)} bytes: {error}") from error
        self._pending = None

    def _error(self, phase: str, message: str) -> RuntimeError:
        return RuntimeError(f"actor rank {self._rank}, publish phase {phase}: {message}")


def compare_digests(digest: str, *, rank: int, group: dist.ProcessGroup | None) -> None:
    """Raise RuntimeError on every rank when the digests (64 hex digits) of the ranks differ. Collective."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    own = torch.frombuffer(bytearray(digest.encode()), dtype=torch.uint8).to(device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    digests = [bytes(each.cpu().numpy()).decode() for each in every]
    if len(set(digests)) > 1:
        listed = ", ".join(f"rank {index}: {each[:12]}" for index, each in enumerate(digests))
        raise RuntimeError(f"actor rank {rank}, publish phase plan: the ranks would send different plans ({listed})")


def open_store(host: str) -> TCPStore:
    """A store on a free port of `host` alone (TCPStore by itself would listen on every interface)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        return TCPStore(
            host, port, None, True, _STORE_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    finally:
        listener.close()


def build_group(
    store: Store, backend: Backend, group_name: str, world_size: int, timeout_s: float
) -> dist.ProcessGroup:
    """Rank 0 of an update group that is no subgroup of the default group, as SGLang builds the other ranks."""
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    prefixed = PrefixStore(group_name, store)
    group: dist.ProcessGroup
    group, _ = c10d._new_process_group_helper(
        world_size, 0, [], dist.Backend(backend), prefixed, group_name=c10d.GroupName(group_name), timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def _unlike(tensor: torch.Tensor | None, spec: TensorSpec) -> str | None:
    """What is wrong with a gathered tensor, or None."""
    if tensor is None:
        return f"{spec.name} was not gathered"
    found = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    if found != (spec.dtype, spec.shape):
        return f"{spec.name} is {found[0]}{list(found[1])}, planned was {spec.dtype}{list(spec.shape)}"
    return None


def _wait_until(done: Callable[[], bool], timeout_s: float, cancelled: Cancelled) -> None:
    """Poll: neither gloo nor NCCL lets a wait be interrupted from outside."""
    end_s, pause_s = time.monotonic() + timeout_s, _POLL_S
    while not done():
        if cancelled():
            raise RuntimeError("cancelled by the controller")
        if time.monotonic() > end_s:
            raise TimeoutError(f"not done within {timeout_s:.1f} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_POLL_S)


def _in_thread(what: str, function: Callable[[], Result]) -> "Future[Result]":
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:  # noqa: BLE001  (the border of the thread: it is raised where the result is read)
            future.set_exception(error)

    threading.Thread(target=run, name=f"update group: {what}", daemon=True).start()
    return future


def _start_broadcast(group: dist.ProcessGroup, flat: torch.Tensor, options: Any, stream: Any) -> dist.Work:
    """`stream`: the CUDA stream that fills `flat`; the current one belongs to each thread alone."""
    if stream is not None:
        torch.cuda.set_stream(stream)
    return group.broadcast([flat], options)


def _is_over(broadcast: "Future[dist.Work]") -> bool:
    return broadcast.done() and (broadcast.exception() is not None or broadcast.result().is_completed())


def _discard_group(future: "Future[Any]") -> None:
    """A group that came up after its join was given up."""
    if future.exception() is None:
        _destroy([future.result()])


def _destroy(held: "list[dist.ProcessGroup | None]") -> None:
    group = held.pop()
    if group is None:
        return
    try:
        if dist.get_backend(group) == "nccl":
            group.abort()  # ends kernels that wait for an engine
        dist.destroy_process_group(group)
    except (RuntimeError, ValueError) as error:
        LOG.warning("the update group could not be destroyed cleanly: %s", error)
