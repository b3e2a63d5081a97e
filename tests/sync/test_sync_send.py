"""The sender alone: ranks that disagree, and waits that end."""

import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed import distributed_c10d as c10d

from megatron_sao.sync import group
from megatron_sao.sync.group import build_group, open_store
from megatron_sao.sync.plan import digest, make_plan
from megatron_sao.sync.send import WeightSender, compare_digests
from tests.support.ranks import run_ranks
from tests.support.toy_actor import ToySource, toy_tensors

pytestmark = pytest.mark.ranks


def outcome(function: Any, *args: Any) -> tuple[str, float]:
    """What it raised, and after how long."""
    start_s = time.monotonic()
    try:
        function(*args)
    except RuntimeError as error:
        return str(error), time.monotonic() - start_s
    return "", time.monotonic() - start_s


def plans_in_two_orders(rank: int) -> str:
    plan = make_plan(toy_tensors()[:: 1 - 2 * rank], bucket_bytes=100, full=True)
    return outcome(lambda: compare_digests(plan.digest, rank=rank, group=None))[0]


def test_ranks_that_would_send_different_plans_all_say_so_before_the_first_byte() -> None:
    digests = [digest(make_plan(toy_tensors()[::way], bucket_bytes=100, full=True).buckets)[:12] for way in (1, -1)]
    for rank, message in enumerate(run_ranks(2, plans_in_two_orders)):
        assert f"actor rank {rank}, publish phase plan: the ranks would send different plans" in message
        assert all(each in message for each in digests)


def join(sender: WeightSender, name: str, world_size: int, timeout_s: float, cancelled: Any = lambda: False) -> None:
    end = sender.listen()
    assert end is not None
    sender.join({0: name}, world_size, timeout_s, endpoint=(end.address, end.port), cancelled=cancelled)


def join_alone(rank: int) -> dict[str, tuple[str, float]]:
    sender = WeightSender(ToySource(rank, 1), rank=rank, backend="gloo")
    results = {"no listen": outcome(lambda: sender.join({0: "g0"}, 2, 5.0, endpoint=("127.0.0.1", 1)))}
    results["deadline"] = outcome(join, sender, "g1", 2, 1.0)
    results["cancel"] = outcome(join, sender, "g2", 2, 60.0, lambda: True)
    sender.plan(full=True, bucket_bytes=100)
    results["not prepared"] = outcome(sender.send, 0, 5.0)
    sender.prepare(0, 5.0)
    results["no group"] = outcome(sender.send, 0, 5.0)
    results["no bucket"] = outcome(sender.send, 99, 5.0)
    sender.leave()
    sender.leave()
    return results


def test_a_join_without_engines_ends_by_its_deadline_or_a_cancel_and_says_where() -> None:
    (results,) = run_ranks(1, join_alone, timeout_s=60)
    for case, (message, seconds) in results.items():
        assert message.startswith("actor rank 0, publish phase "), (case, message)
        assert seconds < 4, (case, seconds)
    assert "call listen() first" in results["no listen"][0]
    assert "cancelled by the controller" in results["cancel"][0]
    assert "bucket 0 is not prepared" in results["not prepared"][0]
    assert "bucket 0: no update group" in results["no group"][0]
    assert "bucket 99 is none of the plan's" in results["no bucket"][0]


def broadcast_to_nobody(rank: int) -> dict[str, tuple[str, float]]:
    """Rank 1 joins as an engine would and then receives nothing."""
    results: dict[str, tuple[str, float]] = {}
    for case, timeout_s, cancelled in (("deadline", 1.0, lambda: False), ("cancel", 4.0, lambda: True)):
        sender = WeightSender(ToySource(0, 1), rank=rank, backend="gloo")
        if rank == 0:
            end = sender.listen()
            assert end is not None
        ports = [end.port if rank == 0 else None]
        dist.broadcast_object_list(ports, src=0)
        if rank == 1:
            store: Any = dist.TCPStore("127.0.0.1", ports[0], 2, False)
            for prefix in (case, f"{case}/", "cpu/"):
                store = dist.PrefixStore(prefix, store)
            engine = dist.ProcessGroupGloo(store, 1, 2, timedelta(seconds=30))
            dist.barrier()  # both have joined, as the controller waits for both
            dist.barrier()
            del engine
            continue
        sender.join({0: case}, 2, 10.0, endpoint=(end.address, end.port))
        dist.barrier()
        sender._plan = make_plan(toy_tensors(), bucket_bytes=100, full=True)
        sender.prepare(1, 5.0)
        results[case] = outcome(sender.send, 1, timeout_s, cancelled)
        sender.prepare(1, 5.0)
        results[f"again after {case}"] = outcome(sender.send, 1, timeout_s, cancelled)
        start_s = time.monotonic()
        sender.leave()
        results[f"leave after {case}"] = "", time.monotonic() - start_s
        dist.barrier()
    return results


def test_a_broadcast_that_no_engine_takes_ends_by_its_deadline_or_a_cancel_and_leaving_does_not_wait() -> None:
    results = run_ranks(2, broadcast_to_nobody, timeout_s=60)[0]
    for case in ("deadline", "cancel"):
        message, seconds = results[case]
        assert message.startswith("actor rank 0, publish phase send: bucket 1 of 30 bytes: "), message
        assert seconds < 3
        assert "the last broadcast failed" in results[f"again after {case}"][0]
        assert results[f"leave after {case}"][1] < 0.5
    assert "cancelled by the controller" in results["cancel"][0]


def start_that_blocks(rank: int) -> dict[str, tuple[str, float]]:
    """A fake start of a broadcast, which blocks as NCCL's does while an engine stays away from its communicator."""
    results: dict[str, tuple[str, float]] = {}
    free = threading.Event()

    def blocked(*_: Any) -> dist.Work:
        assert free.wait(30)
        raise RuntimeError("the communicator was aborted")

    group.start_broadcast = blocked
    for case, timeout_s, cancelled in (("deadline", 1.0, lambda: False), ("cancel", 20.0, lambda: True)):
        sender = WeightSender(ToySource(0, 1), rank=0, backend="gloo")
        join(sender, case, 1, 10.0)
        sender.plan(full=True, bucket_bytes=100)
        sender.prepare(1, 5.0)
        results[case] = outcome(sender.send, 1, timeout_s, cancelled)
        sender.prepare(1, 5.0)
        results[f"again after {case}"] = outcome(sender.send, 1, timeout_s, cancelled)
        start_s = time.monotonic()
        sender.leave()
        results[f"leave after {case}"] = "", time.monotonic() - start_s
    free.set()
    return results


def test_a_broadcast_that_blocks_in_its_start_ends_by_its_deadline_or_a_cancel_and_leaving_does_not_wait() -> None:
    (results,) = run_ranks(1, start_that_blocks, timeout_s=60)
    for case, reason in (("deadline", "not done within 1.0 s"), ("cancel", "cancelled by the controller")):
        message, seconds = results[case]
        assert message.startswith("actor rank 0, publish phase send: bucket 1 of 30 bytes: "), message
        assert reason in message
        assert seconds < 3
        assert "the last broadcast failed" in results[f"again after {case}"][0]
        assert results[f"leave after {case}"][1] < 0.5


def test_the_store_listens_on_its_host_alone() -> None:
    store = open_store("127.0.0.1")
    with open("/proc/net/tcp") as table:
        listening = [line.split()[1] for line in table if line.split()[3] == "0A"]
    addresses = [address for address in listening if address.endswith(f":{store.port:04X}")]
    assert addresses == [f"0100007F:{store.port:04X}"]


@pytest.mark.parametrize("before", [None, "3"])
def test_only_an_update_group_outlives_an_error_of_nccl(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    """A group of torch reads the variable as it is made; 0: its watchdog leaves errors alone."""
    name, seen = "TORCH_NCCL_ASYNC_ERROR_HANDLING", []
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    make = c10d._new_process_group_helper

    def watched(*args: Any, **options: Any) -> Any:
        seen.append(os.environ[name])
        return make(*args, **options)

    monkeypatch.setattr(c10d, "_new_process_group_helper", watched)
    group.destroy([build_group(HashStore(), "gloo", f"alone {before}", 1, 5.0)])
    assert (seen, os.environ.get(name)) == (["0"], before)
