"""The actor's half of a publish: fill a bucket with whole tensors, broadcast it to the engines.

Consumes commands that every rank of the actor executes in the same order; produces bytes on update groups, one for each
rank that is the source of a bucket, with that rank as its rank 0 and the engines as the others. While bucket k is on
its way, bucket k+1 is gathered and flattened into the other of two buffers. Waits for the other ranks (gather) and for
the engines (join, broadcast); unblocked by them, by the deadline of the command, or by `cancelled`.
"""

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from megatron_sao.sync import group as groups
from megatron_sao.sync.group import Backend, Broadcast, Cancelled
from megatron_sao.sync.plan import Publishable, make_plan, offsets, tensor_bytes
from megatron_sao.types import Bucket, PublishPlan, TensorSpec

_CANCELLED = "cancelled"  # key in the store, by which rank 0 tells the other sources
_JOIN_S = 15.0  # how much longer another source may take to join: less than a failed rank waits for the others
_REPORT_S = 5.0  # how much longer rank 0 waits for another source than that waits for the engines


class TensorSource(Protocol):
    """Where whole tensors come from. Every rank calls `tensors` and `gather`, with the same arguments."""

    def tensors(self) -> Sequence[Publishable]:
        """Every tensor of the unsharded model under its HF name, tied ones once, in one order on all ranks."""
        ...

    def gather(
        self, specs: Sequence[TensorSpec], places: Mapping[str, torch.Tensor] | None, *, target: int, timeout_s: float
    ) -> int:
        """Bring what other ranks hold of `specs` into `places` (by name) on rank `target`; None elsewhere. Returns the
        bytes written here. Collective."""
        ...

    def flatten(self, specs: Sequence[TensorSpec], places: Mapping[str, torch.Tensor]) -> int:
        """Copy what this rank holds of `specs` into `places`. Returns the bytes written."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where update groups meet."""

    address: str
    port: int
    backend: Backend


@dataclass(frozen=True, kw_only=True, slots=True)
class SendReport:
    """What one bucket took on its source. On a GPU, copies that are still under way count for the phase that waits."""

    num_bytes: int
    gather_s: float
    flatten_s: float
    send_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Filled:
    """A bucket that is ready on its source."""

    flat: torch.Tensor
    gather_s: float
    flatten_s: float


class WeightSender:
    """One per rank. Every rank calls every method in the same order.

    `backend` is that of the update groups, and says where buckets are: on the GPU with "nccl", on the CPU with "gloo",
    whatever the actor's own world (`group`) uses.

    `cancelled` is polled on rank 0, which has the channel: a role gives `RoleConnection.interrupted`, so that any
    command which follows during a join or a send (PublishLeave) ends it, on every source.

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
        self._buffers = [self._empty(0), self._empty(0)]  # one is filled while the other is sent
        self._turn = 0
        self._ready: int | None = None  # the bucket that is prepared
        self._filled: _Filled | None = None  # its content, on its source
        self._store: TCPStore | None = None  # on rank 0 the server of it
        self._group: dist.ProcessGroup | None = None
        self._pending: Future[Broadcast] | None = None
        self._num_sends = 0

    def plan(self, *, full: bool, bucket_bytes: int, direct: bool = False) -> PublishPlan:
        """The plan of the next sends, after all ranks have found that theirs is the same.

        Raises:
            RuntimeError: the ranks' plans differ; every rank raises.
            ValueError: what `make_plan` refuses.
        """
        plan = make_plan(self._source.tensors(), bucket_bytes=bucket_bytes, full=full, direct=direct)
        compare_digests(plan.digest, rank=self._rank, group=self._actor_group)
        self._plan, self._ready, self._turn = plan, None, 0
        return plan

    def listen(self) -> Endpoint | None:
        """Open the store of new update groups on a free port of `host`. None on ranks other than 0."""
        self.leave()
        if self._rank:
            return None
        self._store = groups.open_store(self._host)
        return Endpoint(address=self._host, port=self._store.port, backend=self._backend)

    def join(
        self,
        names: Mapping[int, str],
        world_size: int,
        timeout_s: float,
        *,
        endpoint: tuple[str, int],
        cancelled: Cancelled = lambda: False,
    ) -> None:
        """Join the group `names[rank]` as its rank 0, while the engines join all of them as the others.

        Raises:
            RuntimeError: not listening, a deadline, or a cancel; the group is not there then.
        """
        if self._rank == 0 and (self._store is None or self._group is not None):
            raise self._error("connect", "call listen() first, once for each group")
        if self._rank in names:
            if self._rank:
                self._store = self._connect(endpoint)
            with self._told(f"joined/{self._rank}") as told:
                self._join(names[self._rank], world_size, timeout_s, endpoint=endpoint, cancelled=cancelled)
                told.append("joined")
        if self._rank == 0:
            for rank in (rank for rank in names if rank):
                self._hear("connect", f"joined/{rank}", f"rank {rank}", min(timeout_s, _JOIN_S), cancelled)

    def prepare(self, bucket: int, timeout_s: float) -> None:
        """Gather and flatten bucket number `bucket` of the plan on its source.

        Raises:
            RuntimeError: no plan or no such bucket, a rank that does not give its part in time, a bucket that is not
                filled exactly.
        """
        content = self._bucket(bucket)
        self._ready = self._filled = None
        flat = self._free_buffer(content) if content.source == self._rank else None
        places = None if flat is None else _views(flat, content)
        start_s = time.monotonic()
        num_bytes = self._gather(bucket, content, places, timeout_s)
        if flat is not None and places is not None:
            gathered_s = time.monotonic()
            num_bytes += self._source.flatten(content.tensors, places)
            if num_bytes != content.num_bytes:
                raise self._error("flatten", f"bucket {bucket}: {num_bytes} of {content.num_bytes} bytes were written")
            times = {"gather_s": gathered_s - start_s, "flatten_s": time.monotonic() - gathered_s}
            self._filled = _Filled(flat=flat, **times)
        self._ready = bucket

    def send(self, bucket: int, timeout_s: float, cancelled: Cancelled = lambda: False) -> SendReport | None:
        """Broadcast the prepared bucket from its source and prepare the next one meanwhile. None but on rank 0.

        Raises:
            RuntimeError: not prepared, a deadline, a cancel, an engine that has gone; or what `prepare` raises.
        """
        start_s, content, key = time.monotonic(), self._bucket(bucket), f"sent/{self._num_sends}"
        self._num_sends += 1
        if self._ready != bucket:
            raise self._error("send", f"bucket {bucket} is not prepared: call prepare() first")
        if content.source != self._rank:
            self._prepare_after(bucket, timeout_s)
            if self._rank:
                return None
            left_s = max(0.0, timeout_s - (time.monotonic() - start_s))
            text = self._hear("send", key, f"rank {content.source}, bucket {bucket}", left_s, cancelled)
            return SendReport(**json.loads(text))
        with self._told(key) as told:
            report = self._send(bucket, timeout_s, cancelled)
            told.append(json.dumps(asdict(report)))
        return None if self._rank else report

    def leave(self) -> None:
        """Destroy the update group and its store, whatever they are doing. Does nothing where there is none."""
        held, self._group = [self._group], None  # the last reference: dropping it runs gloo's destructor
        waiting = self._pending is not None and not groups.is_over(self._pending)
        self._pending = self._store = self._ready = self._filled = None
        if waiting:
            # The destructor waits for the broadcast, which ends by its own deadline, with the peer, or by the abort of
            # its communicator. Until then its bytes must stay what they are: the next publish takes other buffers.
            self._buffers = [self._empty(0), self._empty(0)]
            threading.Thread(target=groups.destroy, args=(held,), name="leave update group", daemon=True).start()
        else:
            groups.destroy(held)

    def _join(
        self, name: str, world_size: int, timeout_s: float, *, endpoint: tuple[str, int], cancelled: Cancelled
    ) -> None:
        client = self._connect(endpoint)
        thread = groups.in_thread(
            "join", lambda: groups.build_group(client, self._backend, name, world_size, timeout_s)
        )
        try:
            groups.wait_until(thread.done, timeout_s, self._cancel(cancelled))
            self._group = thread.result()
        except (RuntimeError, TimeoutError) as error:
            self._store = None  # on rank 0 this closes the store, which ends the waits of both sides
            thread.add_done_callback(groups.discard_group)
            raise self._error("connect", f"group {name} of {world_size}: {error}") from error

    def _connect(self, endpoint: tuple[str, int]) -> TCPStore:
        try:
            return groups.connect_store(*endpoint)
        except RuntimeError as error:
            raise self._error("connect", f"the store of rank 0 at {endpoint[0]}:{endpoint[1]}: {error}") from error

    def _gather(self, bucket: int, content: Bucket, places: Mapping[str, torch.Tensor] | None, timeout_s: float) -> int:
        try:
            return self._source.gather(content.tensors, places, target=content.source, timeout_s=timeout_s)
        except RuntimeError as error:
            raise self._error("gather", f"bucket {bucket}: {error}") from error

    def _prepare_after(self, bucket: int, timeout_s: float) -> None:
        if bucket + 1 < len(self._known_plan().buckets):
            self.prepare(bucket + 1, timeout_s)

    def _send(self, bucket: int, timeout_s: float, cancelled: Cancelled) -> SendReport:
        filled, start_s = self._filled, time.monotonic()
        assert filled is not None, "a prepared bucket is filled on its source"
        try:
            self._pending = pending = self._start_broadcast(bucket, filled.flat, timeout_s)
        finally:  # the other ranks take part in this one's next gather, whatever happens here
            self._prepare_after(bucket, timeout_s)
        try:
            left_s = timeout_s - (time.monotonic() - start_s)
            groups.wait_until(lambda: groups.is_over(pending), max(0.0, left_s), self._cancel(cancelled))
            work, over_s = pending.result()
            work.wait()
        except (RuntimeError, TimeoutError) as error:
            raise self._error("send", f"bucket {bucket} of {len(filled.flat)} bytes: {error}") from error
        self._pending = None
        return SendReport(
            num_bytes=len(filled.flat),
            gather_s=filled.gather_s,
            flatten_s=filled.flatten_s,
            send_s=(over_s[0] if over_s else time.monotonic()) - start_s,
        )

    def _start_broadcast(self, bucket: int, flat: torch.Tensor, timeout_s: float) -> Future[Broadcast]:
        if self._group is None:
            raise self._error("send", f"bucket {bucket}: no update group; join() one first")
        if self._pending is not None:
            raise self._error("send", f"bucket {bucket}: the last broadcast failed; leave() and join() a new group")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        # Our own deadline comes first on NCCL, whose watchdog would end this process at its own.
        options.timeout = timedelta(seconds=timeout_s if self._backend == "gloo" else 2 * timeout_s + 60)
        # In a thread: the first broadcast of a group on NCCL makes the communicator, and blocks until the engines do.
        group, stream = self._group, torch.cuda.current_stream() if self._backend == "nccl" else None
        return groups.in_thread("broadcast", lambda: groups.start_broadcast(group, flat, options, stream))

    @contextmanager
    def _told(self, key: str) -> Iterator[list[str]]:
        """Tells rank 0 what was appended: nothing where a send failed, and not at all where a join did (the ranks'
        agreement on the command says why)."""
        report: list[str] = []
        try:
            yield report
        finally:
            if self._rank and self._store is not None:
                self._store.set(key, "".join(report))

    def _hear(self, phase: str, key: str, who: str, timeout_s: float, cancelled: Cancelled) -> str:
        """Rank 0 waits for what `_told` says."""
        store = self._store
        assert store is not None, "rank 0 listens"
        try:
            groups.wait_until(lambda: store.check([key]), timeout_s + _REPORT_S, self._cancel(cancelled))
        except (RuntimeError, TimeoutError) as error:
            raise self._error(phase, f"waiting for {who}: {error}") from error
        report = store.get(key).decode()
        store.delete_key(key)
        if not report:
            raise self._error(phase, f"{who} failed")
        return report

    def _cancel(self, cancelled: Cancelled) -> Cancelled:
        """Rank 0 hears of a cancel by its channel and passes it on; other sources hear it from rank 0."""
        store = self._store
        assert store is not None, "a source has the store"
        if self._rank:
            return lambda: store.check([_CANCELLED])

        def check() -> bool:
            if is_cancelled := cancelled():
                store.set(_CANCELLED, "")
            return is_cancelled

        return check

    def _bucket(self, bucket: int) -> Bucket:
        buckets = self._known_plan().buckets
        if not 0 <= bucket < len(buckets):
            raise self._error("plan", f"bucket {bucket} is none of the plan's {len(buckets)}")
        return buckets[bucket]

    def _known_plan(self) -> PublishPlan:
        if self._plan is None:
            raise self._error("plan", "there is none: call plan() first")
        return self._plan

    def _free_buffer(self, content: Bucket) -> torch.Tensor:
        """The one that is not being sent; made once, for the largest bucket of this source."""
        self._turn = 1 - self._turn
        if len(self._buffers[self._turn]) < content.num_bytes:
            largest = max(each.num_bytes for each in self._known_plan().buckets if each.source == self._rank)
            self._buffers[self._turn] = self._empty(0)  # the smaller one goes before the larger one is there
            self._buffers[self._turn] = self._empty(largest)
        return self._buffers[self._turn][: content.num_bytes]

    def _empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

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


def _views(flat: torch.Tensor, content: Bucket) -> dict[str, torch.Tensor]:
    """Each tensor of the bucket as a view of its flat bytes."""
    return {
        spec.name: flat[offset : offset + tensor_bytes(spec)].view(getattr(torch, spec.dtype)).view(spec.shape)
        for spec, offset in zip(content.tensors, offsets(content), strict=True)
    }
