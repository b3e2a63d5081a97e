"""`sao bench publish`: a whole publish into real SGLang servers over a bare broadcast of the same bytes.

    ratio_to_raw_broadcast = seconds of the bare broadcast / seconds of the publish      (median over interleaved pairs)

publish         from the plan to the resume: real Megatron actor ranks, real servers, all tensors trained, no check of
                log-probs afterwards.
bare broadcast  `torch.distributed.broadcast` over gloo, in processes of their own: warm, one preallocated flat buffer
                for each bucket of the publish's plan, as many receivers as the engines have ranks.
networks        loopback, where the copying of memory bounds both; `shaped-<N>gbit`, which is what a cluster looks like
                (Linux, as root; skipped in plain words elsewhere). The bare broadcast's own rate shows that it is.

Everything runs on the CPU. The machine's other load disturbs the times: run it alone.
"""

import argparse
import itertools
import os
import re
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from launch import bounded
from megatron_sao.config import LayoutConfig, PublishConfig
from tools.bench.bench_model import write_model
from tools.bench.networks import Unavailable, bits_per_s, link
from tools.bench.progress import Display
from tools.bench.publish_stand import STOP_S, CaseSettings, Samples, Stand, run_stand
from tools.bench.publish_worker import NUM_WARM_UPS
from tools.bench.report import Case, Report

UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SIZES = ("256MiB",)
ALL_SIZES = ("64MiB", "256MiB", "1GiB")
NETWORKS = ("loopback", "shaped-2gbit", "shaped-8gbit")
SENDERS = ("gather", "direct")
BUCKET_BYTES = ("64MiB",)
NUM_PAIRS = 9
BARS = {"loopback": 0.30, "shaped-2gbit": 0.90}  # one engine, TP 1, the sender that a run has by default
BAR_MIN_BYTES = 0.98 * 2**28
COLUMNS = (
    *("network", "bytes", "engines", "tp", "sender", "bucket_bytes", "publish_s", "bare_s", "bare_gbit_per_s"),
    *("ratio_to_raw_broadcast", "ratio_iqr", "bar", "met", "phases", "memory_above_model_buckets"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What is started anew for its cases; shaped networks share one start, since their rate changes while it runs."""

    num_bytes: int
    num_engines: int
    tensor: int
    cases: tuple[CaseSettings, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "A whole publish over a bare broadcast of the same bytes. Exit status 1: a bar is missed."
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="N", help="published bytes, such as 256MiB")
    parser.add_argument("--networks", nargs="+", default=NETWORKS, metavar="NAME", help="loopback, shaped-<N>gbit")
    parser.add_argument("--engines", nargs="+", type=int, default=(1,), metavar="N", help="SGLang servers at once")
    parser.add_argument("--tp", nargs="+", type=int, default=(1,), metavar="N", help="tensor-parallel size of each")
    parser.add_argument("--senders", nargs="+", choices=SENDERS, default=SENDERS)
    parser.add_argument("--bucket-bytes", nargs="+", default=BUCKET_BYTES, metavar="N", help="such as 32MiB")
    parser.add_argument("--pairs", type=int, default=NUM_PAIRS, metavar="N", help="publish and bare broadcast, in turn")
    parser.add_argument("--actor-ranks", type=int, default=2, metavar="N")
    parser.add_argument("--expert", type=int, default=2, metavar="N", help="expert-parallel size of the actor")
    parser.add_argument("--all", action="store_true", help="64 MiB to 1 GiB, 1 and 2 engines, TP 1 and 2: hours")


def run(options: argparse.Namespace) -> Report:
    """Every case in turn.

    Raises:
        ValueError: an option that makes no sense.
        RuntimeError: something failed; more is on stderr.
        bounded.Interrupted: a signal; everything is stopped and removed.
    """
    if options.all:
        options.sizes, options.engines, options.tp = ALL_SIZES, (1, 2), (1, 2)
    if options.pairs < 1:
        raise ValueError(f"--pairs {options.pairs}: a median needs one pair at least, and a bar 7")
    LayoutConfig(num_ranks=options.actor_ranks, expert=options.expert)
    places = grid(options)
    num_pairs = sum(len(place.cases) for place in places) * (NUM_WARM_UPS + options.pairs)
    _remove_leftovers()
    scratch = tempfile.TemporaryDirectory(prefix=f"sao-bench-publish-{os.getpid()}-")
    with scratch as directory, Display("publish", num_pairs) as display:
        running = _run_all(options, places, Path(directory), display)
        cases = bounded.run(running, force_after_s=2 * STOP_S)
    return Report(title="publish over bare broadcast", cases=tuple(cases), columns=COLUMNS)


def _remove_leftovers() -> None:
    """The models of benchmarks that were killed."""
    for path in Path(tempfile.gettempdir()).glob("sao-bench-publish-*"):
        pid = path.name.split("-")[3]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path)


def parse_bytes(text: str) -> int:
    """1048576, 1MiB."""
    match = re.fullmatch(r"(\d+)(|KiB|MiB|GiB)", text)
    if not match or not int(match[1]):
        raise ValueError(f"{text!r} is not a number of bytes such as 256MiB")
    return int(match[1]) * UNITS[match[2]]


def grid(options: argparse.Namespace) -> list[Place]:
    """Raises ValueError for a network or a number of bytes that is none."""
    shaped = [name for name in options.networks if bits_per_s(name)]
    alike = [names for names in ([name for name in options.networks if name not in shaped], shaped) if names]
    buckets = sorted(map(parse_bytes, options.bucket_bytes))  # a sender keeps its buffers: smaller ones are seen first
    sizes = [parse_bytes(text) for text in options.sizes]
    return [
        Place(
            num_bytes=num_bytes,
            num_engines=num_engines,
            tensor=tensor,
            cases=tuple(
                CaseSettings(network=network, sender=sender, bucket_bytes=bucket_bytes)
                for bucket_bytes, network, sender in itertools.product(buckets, names, options.senders)
            ),
        )
        for num_bytes, names, num_engines, tensor in itertools.product(sizes, alike, options.engines, options.tp)
    ]


async def _run_all(
    options: argparse.Namespace, places: Sequence[Place], directory: Path, display: Display
) -> list[Case]:
    models: dict[int, int] = {}
    cases: list[Case] = []
    for place in places:
        path = directory / str(place.num_bytes)
        if place.num_bytes not in models:
            models[place.num_bytes] = write_model(path, place.num_bytes)
        try:
            samples = await _run_place(options, place, path, models[place.num_bytes], display)
            records = [_record(options, place, models, *each) for each in zip(place.cases, samples, strict=True)]
        except Unavailable as error:
            records = [_record(options, place, models, settings, str(error)) for settings in place.cases]
            display.skip(len(place.cases) * (NUM_WARM_UPS + options.pairs), str(error))
        cases += records
    return cases


async def _run_place(
    options: argparse.Namespace, place: Place, model: Path, model_bytes: int, display: Display
) -> list[Samples]:
    check_cores(place.tensor)
    what = f"{place.num_bytes / 2**20:.0f} MiB, {place.num_engines} engines of TP {place.tensor}"
    with link(place.cases[0].network) as made:
        display.say(f"starting: {what}")
        stand = Stand(
            model_path=str(model),
            model_bytes=model_bytes,
            link=made,
            num_engines=place.num_engines,
            tensor=place.tensor,
            actor_ranks=options.actor_ranks,
            expert=options.expert,
            num_pairs=options.pairs,
            cases=place.cases,
        )
        return await run_stand(
            stand, lambda case: display.advance(f"{what}, {case.network}, {case.sender}, bucket {case.bucket_bytes}")
        )


def check_cores(tensor: int) -> None:
    """Raises Unavailable: SGLang binds each rank of an engine to a core of its own on a CPU."""
    num_cores = len(os.sched_getaffinity(0))
    if tensor > num_cores:
        raise Unavailable(f"an engine of TP {tensor} needs {tensor} cores, this process may use {num_cores}")


def _record(
    options: argparse.Namespace, place: Place, models: dict[int, int], settings: CaseSettings, found: Samples | str
) -> Case:
    """`found`: what was measured, or why nothing was."""
    case: dict[str, JsonValue] = {
        "network": settings.network,
        "bytes": models[place.num_bytes],
        "engines": place.num_engines,
        "tp": place.tensor,
        "sender": settings.sender,
        "bucket_bytes": settings.bucket_bytes,
        "actor_ranks": options.actor_ranks,
        "expert": options.expert,
    }
    bar = bar_of(case)
    if isinstance(found, str):
        return {**case, "bar": bar, "met": None, "skipped": found}
    results = results_of(found, num_bytes=models[place.num_bytes], bucket_bytes=settings.bucket_bytes)
    ratio: Any = results["ratio_to_raw_broadcast"]
    return {**case, **results, "bar": bar, "met": None if bar is None else bool(ratio >= bar)}


def bar_of(case: Case) -> float | None:
    """What a case must reach: those with one engine of TP 1, enough bytes, and what a run has by default."""
    num_bytes: Any = case["bytes"]
    usual = {"engines": 1, "tp": 1, **PublishConfig().model_dump(include={"sender", "bucket_bytes"})}
    is_usual = all(case[key] == value for key, value in usual.items())
    return BARS.get(str(case["network"])) if is_usual and num_bytes >= BAR_MIN_BYTES else None


def results_of(samples: Samples, *, num_bytes: int, bucket_bytes: int) -> dict[str, JsonValue]:
    """Medians over the pairs; the ratio is taken pair by pair."""
    ratios = [bare / publish for bare, publish in zip(samples.bare_s, samples.publish_s, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    bare_s = statistics.median(samples.bare_s)
    return {
        "num_buckets": samples.num_buckets,
        "num_pairs": len(ratios),
        "publish_s": statistics.median(samples.publish_s),
        "bare_s": bare_s,
        "bare_gbit_per_s": 8e-9 * num_bytes / bare_s,
        "ratio_to_raw_broadcast": statistics.median(ratios),
        "ratio_iqr": [low, high],
        "phases": {name: statistics.median(seconds) for name, seconds in samples.phases.items()},
        "memory_above_model_buckets": samples.memory_bytes / max(bucket_bytes, samples.largest_bucket_bytes),
    }
