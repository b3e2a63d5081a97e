"""The publish benchmark: its records, its networks, its baseline, and one small case against a live SGLang server."""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from safetensors import safe_open

from launch.cli import command, parse_arguments
from megatron_sao.config import PublishConfig
from tools.bench import bare_broadcast, networks
from tools.bench.bare_broadcast import BareBroadcast, BareRun
from tools.bench.bench_model import sizes_for, write_model
from tools.bench.networks import Link, Unavailable, check_rate, link, namespaces
from tools.bench.publish import bar_of, grid, results_of, run
from tools.bench.publish_stand import Samples
from tools.bench.publish_worker import cores
from tools.bench.report import Report

MIB = 2**20
BUCKETS = (3 * MIB, 5 * MIB)
HALF = """
from tools.bench import bare_broadcast

def half(self):
    every, self._buffers = self._buffers, [buffer[: len(buffer) // 2] for buffer in self._buffers]
    try:
        return whole(self)
    finally:
        self._buffers = every

whole, bare_broadcast.Rank._broadcast = bare_broadcast.Rank._broadcast, half
bare_broadcast.main()
"""


def options(*arguments: str) -> argparse.Namespace:
    return parse_arguments(["bench", "publish", *arguments])


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def started_here() -> set[psutil.Process]:
    """Descendants of this process, and orphans that belong to a benchmark."""
    orphans = {each for each in psutil.Process(1).children() if "sao-bench-" in command_line(each)}
    return {*psutil.Process().children(recursive=True), *orphans}


async def broadcast(made: Link, log: Path, *, buckets: tuple[int, ...] = BUCKETS, num_receivers: int = 1) -> BareRun:
    bare = await BareBroadcast.start(
        made.trainer, made.engine, num_receivers=num_receivers, environment=os.environ, log_path=log
    )
    try:
        await bare.allocate(buckets)
        await bare.run()
        return await bare.run()
    finally:
        await bare.close()


@pytest.fixture
def slow_link() -> Iterator[Link]:
    try:
        with link("shaped-1gbit") as made:
            yield made
    except Unavailable as error:
        pytest.skip(str(error))
    assert not [name for name in namespaces() if str(os.getpid()) in name]


def test_results_are_medians_and_the_ratio_is_taken_pair_by_pair() -> None:
    samples = Samples(
        num_buckets=2,
        largest_bucket_bytes=2 * MIB,
        publish_s=(1.0, 2.0, 4.0),
        bare_s=(0.5, 0.4, 4.0),
        phases={"send_s": (0.1, 0.3, 0.2)},
        memory_bytes=3 * MIB,
    )
    results = results_of(samples, num_bytes=250_000_000, bucket_bytes=MIB)
    assert results["ratio_to_raw_broadcast"] == 0.5  # of 0.5, 0.2, 1
    assert results["ratio_iqr"] == [0.35, 0.75]
    assert (results["publish_s"], results["bare_s"]) == (2.0, 0.5)
    assert results["bare_gbit_per_s"] == pytest.approx(4.0)  # 2 Gbit in 0.5 s
    assert (results["phases"], results["memory_above_model_buckets"]) == ({"send_s": 0.2}, 1.5)


@pytest.mark.parametrize(
    ("changed", "bar"),
    [
        ({}, 0.30),
        ({"network": "shaped-2gbit"}, 0.90),
        ({"network": "shaped-8gbit"}, None),
        ({"engines": 2}, None),
        ({"tp": 2}, None),
        ({"bytes": 64 * MIB}, None),
        ({"sender": "gather"}, None),
        ({"bucket_bytes": 32 * MIB}, None),
    ],
)
def test_one_engine_of_tp_1_and_256_mib_has_a_bar_on_two_networks(changed: dict[str, object], bar: float) -> None:
    case = {"network": "loopback", "bytes": 256 * MIB, "engines": 1, "tp": 1, "sender": "direct"}
    case |= {"bucket_bytes": PublishConfig().bucket_bytes, **changed}
    assert bar_of(case) == bar  # type: ignore[arg-type]


def test_the_default_run_has_both_cases_with_bars_and_shaped_networks_share_a_start() -> None:
    places = grid(options())
    assert [[case.network for case in place.cases] for place in places] == [
        ["loopback"] * 2,
        ["shaped-2gbit"] * 2 + ["shaped-8gbit"] * 2,
    ]
    assert {(place.num_bytes, place.num_engines, place.tensor) for place in places} == {(256 * MIB, 1, 1)}


@pytest.mark.parametrize("wrong", [("--networks", "shaped"), ("--sizes", "12MB"), ("--expert", "3")])
def test_an_option_that_makes_no_sense_is_refused(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["bench", "publish", *wrong]) == 2
    assert wrong[1] in capsys.readouterr().err


def test_without_root_a_shaped_case_is_skipped_in_plain_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(networks.os, "geteuid", lambda: 1000)
    arguments = ("--networks", "shaped-2gbit", "--sizes", "4MiB", "--senders", "gather", "--json")
    assert command(["bench", "publish", *arguments, str(tmp_path / "report.json")]) == 0
    (case,) = json.loads((tmp_path / "report.json").read_text())["cases"]
    assert (case["network"], case["met"]) == ("shaped-2gbit", None)
    assert "ratio_to_raw_broadcast" not in case
    assert case["skipped"] == "shaped networks need root, for network namespaces"
    assert case["skipped"] in capsys.readouterr().out


def test_a_missed_bar_is_counted_and_a_report_is_json(tmp_path: Path) -> None:
    report = Report(
        title="t", cases=({"bar": 0.9, "met": False}, {"bar": None, "met": None}, {"bar": 0.3, "met": True})
    )
    assert report.num_missed == 1
    report.write(tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["cases"][0] == {"bar": 0.9, "met": False}
    assert os.listdir(tmp_path) == ["r.json"]


@pytest.mark.parametrize("mib", [4, 64, 256, 1024])
def test_a_model_has_the_size_that_was_asked_for(mib: int) -> None:
    assert sizes_for(mib * MIB).num_bytes == pytest.approx(mib * MIB, rel=0.02)


def test_a_model_is_written_with_all_its_bytes(tmp_path: Path) -> None:
    num_bytes = write_model(tmp_path / "model", 4 * MIB)
    with safe_open(tmp_path / "model" / "model.safetensors", framework="pt") as file:
        assert sum(file.get_tensor(name).nbytes for name in file.keys()) == num_bytes  # noqa: SIM118


def test_ranks_of_engines_share_cores_where_there_are_not_enough() -> None:
    assert [cores([0, 1, 2], engine=engine, tensor=2) for engine in (0, 1)] == ["2|1", "0|2"]


def test_every_receiver_of_the_bare_broadcast_has_every_byte(tmp_path: Path) -> None:
    found = asyncio.run(broadcast(Link(), tmp_path / "log", num_receivers=2))
    assert found.num_bytes == sum(BUCKETS)
    assert found.seconds > 0


def test_a_baseline_that_sends_half_of_the_bytes_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bare_broadcast, "COMMAND", (sys.executable, "-c", HALF))
    with pytest.raises(RuntimeError, match=f"rank 1 has {sum(BUCKETS) // 2} of {sum(BUCKETS)} bytes"):
        asyncio.run(broadcast(Link(), tmp_path / "log"))


def test_a_shaped_network_has_its_rate(tmp_path: Path, slow_link: Link) -> None:
    found = asyncio.run(broadcast(slow_link, tmp_path / "log"))
    check_rate("shaped-1gbit", found.num_bytes, found.seconds)


def test_a_shaped_network_without_shaping_is_seen(tmp_path: Path, slow_link: Link) -> None:
    for side in (slow_link.trainer, slow_link.engine):
        subprocess.run(f"tc -n {side.namespace} qdisc del dev sao0 root".split(), check=True)
    found = asyncio.run(broadcast(slow_link, tmp_path / "log", buckets=(16 * MIB,) * 4))
    with pytest.raises(RuntimeError, match="the network is not shaped"):
        check_rate("shaped-1gbit", found.num_bytes, found.seconds)


def test_what_a_killed_benchmark_left_is_removed_and_a_running_ones_is_not(slow_link: Link) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    theirs, left = f"sao-bench-{os.getppid()}-t", f"sao-bench-{ended.pid}-t"
    for name in (theirs, left):
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        networks.remove_leftovers()
        assert left not in namespaces()
        assert {theirs, slow_link.trainer.namespace} <= set(namespaces())
    finally:
        subprocess.run(["ip", "netns", "del", theirs], check=True)


def test_the_model_of_a_killed_benchmark_is_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(networks.os, "geteuid", lambda: 1000)
    ended = subprocess.Popen(["true"])
    ended.wait()
    theirs, left = (tmp_path / f"sao-bench-publish-{pid}-x" for pid in (os.getppid(), ended.pid))
    for path in (theirs, left):
        path.mkdir()
    run(options("--networks", "shaped-2gbit", "--sizes", "4MiB"))
    assert list(tmp_path.iterdir()) == [theirs]


@pytest.mark.live
def test_an_interrupted_benchmark_leaves_no_process_and_no_network(slow_link: Link) -> None:
    arguments = ("bench", "publish", "--networks", "shaped-2gbit", "--sizes", "4MiB")
    bench = subprocess.Popen([sys.executable, "-m", "launch.cli", *arguments], stderr=subprocess.DEVNULL)
    mine = {f"sao-bench-{bench.pid}-{letter}" for letter in "te"}
    end_s, started = time.monotonic() + 120, []
    while not any("sglang.launch_server" in command_line(process) for process in started):
        assert bench.poll() is None, "the benchmark ended by itself"
        assert time.monotonic() < end_s, "no server was started"
        time.sleep(0.2)
        started = psutil.Process(bench.pid).children(recursive=True)
    assert mine <= set(namespaces())
    bench.send_signal(signal.SIGINT)
    assert bench.wait(90) == 130
    assert not mine & set(namespaces())
    assert not [process for process in started if process.is_running()]


@pytest.mark.live
@pytest.mark.ranks
def test_a_small_case_is_measured_against_a_live_server_and_leaves_no_process(tmp_path: Path) -> None:
    before = started_here()
    report = run(
        options(
            *("--networks", "loopback", "--sizes", "4MiB", "--bucket-bytes", "1MiB", "--pairs", "2"),
            *("--senders", "gather"),
        )
    )
    (case,) = report.cases
    num_bytes = sizes_for(4 * MIB).num_bytes
    assert case["bytes"] == num_bytes
    settings = ("network", "engines", "tp", "sender", "bucket_bytes", "num_pairs", "bar", "met")
    assert [case[key] for key in settings] == ["loopback", 1, 1, "gather", MIB, 2, None, None]
    for key in ("publish_s", "bare_s", "ratio_to_raw_broadcast", "memory_above_model_buckets", "bare_gbit_per_s"):
        assert case[key] > 0, key  # type: ignore[operator]
    assert {"gather_s", "flatten_s", "send_s", "load_s", "resume_s", "pause_s"} <= set(case["phases"])  # type: ignore[arg-type]
    assert case["num_buckets"] > 1  # type: ignore[operator]
    assert started_here() <= before
    report.write(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["cases"] == [dict(case)]
