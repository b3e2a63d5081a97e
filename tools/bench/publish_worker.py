"""One stand of the publish benchmark: SGLang servers, actor ranks, bare broadcast; started once, measured in turn.

    pair: publish (bare processes wait on their pipes)  ──>  bare broadcast (engines and ranks are idle)  ──> ...

A process on the trainer's side of the network: `python -m tools.bench.publish_worker`, a Stand as one line of JSON on
stdin, one JSON line on stdout for each pair (`pair`) and each case (`samples`). It ends, with all that it started, when
its work is done, by SIGTERM, or when its stdin closes. Everything runs on the CPU, over gloo.
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from launch import bounded
from launch.processes import Supervisor
from launch.role_processes import HOST, KEY_BYTES, built, start_rank
from launch.tasks import both
from launch.watch import Watch
from megatron_sao.channel import Channel, ChannelServer, PublishPlanning, publish_plan_from
from megatron_sao.config import ActorConfig, EngineConfig, LayoutConfig, ModelConfig, PublishConfig
from megatron_sao.controller.model_file import vocab_size
from megatron_sao.controller.publish import Publisher, PublishReport
from megatron_sao.roles.spec import ActorSpec, Meeting
from megatron_sao.rollout.server import SGLangServer
from megatron_sao.rollout.sglang_client import SGLangEngine
from tools.bench.bare_broadcast import BareBroadcast, BareRun
from tools.bench.memory import peak_bytes, reset_peak, resident_bytes
from tools.bench.networks import check_rate
from tools.bench.publish_stand import STOP_S, CaseSettings, Samples, Stand

NUM_WARM_UPS = 2
FIRST_PORT = 30_000  # in a namespace of its own, where all are free
PORTS_PER_ENGINE = 1_000  # SGLang takes more of them above the first
MAX_TOKENS = 2048
START_S = 300.0
PHASE_S = 180.0
GRACE_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What is running."""

    actor: Channel
    engines: Sequence[SGLangEngine]
    bare: BareBroadcast
    pids: Sequence[int]  # of the actor's ranks


def main() -> None:
    stand = Stand.model_validate_json(sys.stdin.readline())
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    status = 1
    try:
        bounded.run(run(stand), force_after_s=STOP_S - GRACE_S)
        status = 0
    except bounded.Interrupted as error:
        status = 128 + error.number
    except Exception:  # noqa: BLE001  (the border of the process: the benchmark shows what it says)
        logging.getLogger(__name__).exception("the stand ends")
    bounded.leave(status)


def _end_with_stdin() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


async def run(stand: Stand) -> None:
    """Start everything, measure every case, stop everything."""
    async with contextlib.AsyncExitStack() as stack:
        private = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sao-bench-")))
        ranks = Supervisor()
        stack.push_async_callback(asyncio.to_thread, ranks.stop, GRACE_S)
        watch = Watch(ranks)
        parts = await watch.over(_start(stand, ranks, private, stack), grace_s=GRACE_S)
        await watch.over(_measure(stand, parts), grace_s=GRACE_S)


async def _start(stand: Stand, ranks: Supervisor, private: Path, stack: contextlib.AsyncExitStack) -> Parts:
    starting_engines = _start_engines(stand, private, stack)
    actor, engines = await both(_start_actor(stand, ranks, private, stack), starting_engines, grace_s=GRACE_S)
    bare = await BareBroadcast.start(
        stand.link.trainer,
        stand.link.engine,
        num_receivers=stand.num_engines * stand.tensor,
        environment=os.environ,
        log_path=private / "bare.log",
    )
    stack.push_async_callback(bare.close)
    return Parts(actor=actor, engines=engines, bare=bare, pids=[process.popen.pid for process in ranks.processes])


async def _start_actor(stand: Stand, ranks: Supervisor, private: Path, stack: contextlib.AsyncExitStack) -> Channel:
    server, key, side = ChannelServer(), secrets.token_bytes(KEY_BYTES), stand.link.trainer
    stack.push_async_callback(server.close)
    port = await server.start(HOST, key)
    meeting = Meeting(
        init_method=f"file://{private / 'actor'}", host=HOST, port=port, key=key.hex(), publish_host=side.host
    )
    layout = LayoutConfig(num_ranks=stand.actor_ranks, expert=stand.expert)
    for rank in range(stand.actor_ranks):
        spec = ActorSpec(
            rank=rank,
            parent_pid=os.getpid(),
            meeting=meeting,
            model=ModelConfig(path=stand.model_path, dtype="bfloat16"),
            config=ActorConfig(layout=layout, max_tokens_per_micro_batch=64),  # nothing is trained
            eps_low=0.3,
            eps_high=5.0,
            bucket_bytes=PublishConfig().bucket_bytes,
        )
        start_rank(spec, supervisor=ranks, environment={}, logs=private, interface=side.interface)
    actor = await server.accept("actor", START_S)
    await built(actor, START_S)
    return actor


async def _start_engines(stand: Stand, private: Path, stack: contextlib.AsyncExitStack) -> list[SGLangEngine]:
    """One after the other: an engine needs most memory while it starts."""
    engines = []
    for index in range(stand.num_engines):
        api_key, side = secrets.token_hex(32), stand.link.engine
        config = EngineConfig(
            host=side.host,
            port=FIRST_PORT + PORTS_PER_ENGINE * index if side.prefix else 0,
            tensor=stand.tensor,
            max_total_tokens=MAX_TOKENS,
            cpu_cores=cores(sorted(os.sched_getaffinity(0)), engine=index, tensor=stand.tensor),
            start_timeout_s=START_S,
        )
        server = await SGLangServer.start(
            config,
            model_path=stand.model_path,
            dtype="bfloat16",
            api_key=api_key,
            log_path=private / f"engine-{index}.log",
            prefix=side.prefix,
        )
        stack.push_async_callback(server.stop)
        vocab = vocab_size(Path(stand.model_path))
        client = SGLangEngine(server.url, api_key=api_key, vocab_size=vocab, max_tokens=MAX_TOKENS)
        stack.push_async_callback(client.close)
        engines.append(client)
    return engines


def cores(allowed: Sequence[int], *, engine: int, tensor: int) -> str:
    """One core for each rank, from the highest down; engines share cores where there are not enough."""
    first = engine * tensor
    return "|".join(str(allowed[-1 - (first + rank) % len(allowed)]) for rank in range(tensor))


async def _measure(stand: Stand, parts: Parts) -> None:
    sizes_before = [resident_bytes(pid) for pid in parts.pids]
    version = 0
    for case in stand.cases:
        stand.link.shape(case.network)
        for pid in parts.pids:
            reset_peak(pid)
        version, reports, bare_runs, sizes = await _measure_case(stand, case, parts, version)
        growth = [peak_bytes(pid) - before for pid, before in zip(parts.pids, sizes_before, strict=True)]
        samples = Samples(
            num_buckets=len(sizes),
            largest_bucket_bytes=max(sizes),
            publish_s=tuple(report.metrics["publish/total_s"].value for report in reports),
            bare_s=tuple(bare.seconds for bare in bare_runs),
            phases=phases(reports),
            memory_bytes=max(growth),
        )
        _say({"samples": samples.model_dump(mode="json")})


async def _measure_case(
    stand: Stand, case: CaseSettings, parts: Parts, version: int
) -> tuple[int, list[PublishReport], list[BareRun], list[int]]:
    """Warm-ups, then pairs; publish and bare broadcast take turns in going first."""
    settings = PublishConfig(
        sender=case.sender, bucket_bytes=case.bucket_bytes, timeout_s=PHASE_S, first_timeout_s=PHASE_S
    )
    sizes = await bucket_sizes(parts.actor, settings)
    await parts.bare.allocate(sizes)
    publisher = Publisher(parts.engines, parts.actor, settings, engine_ranks=stand.tensor, fixed_prompt=None)
    reports: list[PublishReport] = []
    bare_runs: list[BareRun] = []
    try:
        for pair in range(NUM_WARM_UPS + stand.num_pairs):
            version += 1
            if pair % 2:
                bare_runs.append(await _bare_run(case, parts))
            reports.append(check_publish(await publisher.publish(version), stand.model_bytes))
            if not pair % 2:
                bare_runs.append(await _bare_run(case, parts))
            _say({"pair": case.model_dump(mode="json")})
    finally:
        await publisher.close()
    return version, reports[NUM_WARM_UPS:], bare_runs[NUM_WARM_UPS:], sizes


async def _bare_run(case: CaseSettings, parts: Parts) -> BareRun:
    bare = await parts.bare.run()
    check_rate(case.network, bare.num_bytes, bare.seconds)
    return bare


def check_publish(report: PublishReport, model_bytes: int) -> PublishReport:
    """The report of a publish that counts. Raises RuntimeError when it was repeated, or did not send everything."""
    if report.num_attempts != 1 or report.num_bytes != model_bytes:
        raise RuntimeError(
            f"a publish of {report.num_bytes} of the model's {model_bytes} bytes in {report.num_attempts} attempts "
            "is no sample"
        )
    return report


async def bucket_sizes(actor: Channel, settings: PublishConfig) -> list[int]:
    """Bytes of each bucket of a publish with `settings`."""
    command = PublishPlanning(full=False, bucket_bytes=settings.bucket_bytes, direct=settings.sender == "direct")
    plan = publish_plan_from((await actor.call(command, timeout_s=settings.timeout_s)).data)
    return [bucket.num_bytes for bucket in plan.buckets]


def phases(reports: Sequence[PublishReport]) -> dict[str, tuple[float, ...]]:
    """Every `publish/<phase>_s` but the whole, and but the check afterwards."""
    names = [
        key for key in reports[0].metrics if key.endswith("_s") and key not in ("publish/total_s", "publish/verify_s")
    ]
    return {key.removeprefix("publish/"): tuple(report.metrics[key].value for report in reports) for key in names}


def _say(message: Mapping[str, JsonValue]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
