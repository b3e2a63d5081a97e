"""`sao bench step`: an SAO step against the same model work in a bare Megatron-core loop, and against a GRPO step.

    bare_megatron     SAO side:  the real roles through their real channel, by `sao_step`: commands, batch transport,
                                 packing, K critic updates, values, advantages, actor update, metrics.
                                 Clock: from the Batch in the controller to the merged record.
                      bare side: `bare_megatron.py`, same models, optimizers, ranks, threads and packed rows; the rows
                                 with their masks are tensors before the clock. Same forwards, backwards and optimizer
                                 steps, with a masked sum as loss. Clock: from "go" over a pipe to "done", critic first.
                      The sides run in turn, never at once, and take turns in going first. `idle_cpu_fraction` is what
                      the waiting side burns meanwhile, in cores: gloo wakes a thread of every group each 10 ms.
    long_rows         The same with a large vocabulary, a single layer and rows of which half are observations: the bare
                      side computes the logits of every token at once, as Megatron's GPTModel does.
    grpo_cpu_seconds  CPU seconds of the ranks in an SAO step over those in a GRPO step (no critic) on the same batch.
    grpo_sleeping     SAO over GRPO with a critic that has devices of its own: roles that sleep, the real loops.

Generation and publish are in none of them. The machine's other load disturbs the times: run it alone.
"""

import argparse
import dataclasses
import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
from pydantic import JsonValue

from launch import bounded
from megatron_sao.config import Config, RoleConfig, parse
from megatron_sao.controller.clients import ActorClient, CriticClient
from megatron_sao.controller.step import StepSettings, sao_step
from megatron_sao.data.packing import pack
from megatron_sao.metrics import Record, merge
from megatron_sao.types import Batch, BatchPlan
from tools.bench.progress import Display
from tools.bench.report import Case, Report
from tools.bench.step_grpo import grpo_step
from tools.bench.step_inputs import Size, make_trajectories, write_models
from tools.bench.step_records import BareSpec, Work, rows_of, write_rows
from tools.bench.step_sides import STOP_S, BareSide, RoleSide, TimedChannel, bare_side, cpu_seconds, role_side
from tools.bench.step_sleeping import sleeping_case

BAR, LONG_ROWS_BAR = 0.90, 1.2
LONG_ROW_TOKENS = 2048
COLUMNS = (
    *("case", "ratio_to_bare_megatron", "ratio_iqr", "cpu_ratio", "bar", "met", "sao_over_grpo", "serial_over_grpo"),
    *("sao_s", "bare_s", "grpo_s"),
)
COMMAND_TIMEOUT_S = 300.0
FORCE_S = 3 * STOP_S  # after an interrupt
NUM_SLEEPING_STEPS = 6
NUM_WARM_UPS = 2  # pairs; the second step of a fresh rank still costs more than the third
NUM_GRPO_STEPS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pairs", type=int, default=9, help=f"interleaved pairs, after {NUM_WARM_UPS} that are not counted"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="of the batch")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--max-tokens-per-micro-batch", type=int, default=1024)
    parser.add_argument("--long-tokens", type=int, default=4096, help="of the batch of long_rows")
    parser.add_argument("--long-vocab", type=int, default=65536, help="of long_rows, whose model has one layer")
    parser.add_argument("--long-pairs", type=int, default=5, help="of long_rows")
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks of each role, one thread each")


def run(options: argparse.Namespace) -> Report:
    """Raises RuntimeError when the sides did not do the same work, or a process died."""
    size = Size(
        num_tokens=options.tokens,
        num_layers=options.layers,
        hidden=options.hidden,
        vocab_size=options.vocab,
        max_tokens_per_micro_batch=options.max_tokens_per_micro_batch,
    )
    long_rows = Size(
        num_tokens=options.long_tokens,
        num_layers=1,
        hidden=options.hidden,
        vocab_size=options.long_vocab,
        max_tokens_per_micro_batch=min(options.long_tokens, LONG_ROW_TOKENS),
    )
    if min(options.pairs, options.long_pairs) < 1:
        given = f"--pairs {options.pairs} --long-pairs {options.long_pairs}"
        raise ValueError(f"{given}: a median needs one pair at least, and the bars 9 and 5")
    running = _cases(
        size, long_rows, num_ranks=options.ranks, num_pairs=options.pairs, num_long_pairs=options.long_pairs
    )
    cases = bounded.run(running, force_after_s=FORCE_S)
    return Report(title="SAO step", cases=cases, columns=COLUMNS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One step of one side, s. `cpu_s` of its ranks, `idle_cpu_s` of the other side's ranks meanwhile."""

    seconds: float
    cpu_s: float
    idle_cpu_s: float
    work: Work
    phases: dict[str, float]


@dataclass(kw_only=True)
class Bench:
    """Both sides, up and warm."""

    config: Config
    batch: Batch
    groups: tuple[str, ...]
    plans: dict[str, BatchPlan]  # by role
    roles: RoleSide
    bare: BareSide
    num_steps: int = 0
    num_updates: dict[str, int] = field(default_factory=lambda: {"actor": 0, "critic": 0})  # that the roles counted

    async def sao(self) -> Turn:
        """The real step."""
        self.num_steps += 1
        batch = dataclasses.replace(self.batch, id=self.num_steps)
        pids = [*self.roles.pids["actor"], *self.roles.pids["critic"]]
        channels = (self.roles.actor, self.roles.critic)
        for channel in channels:
            channel.calls.clear()
        settings = StepSettings.of(self.config.algorithm, self.config.critic)
        actor = ActorClient.of(self.roles.actor, self.config.actor)
        critic = CriticClient.of(self.roles.critic, self.config.critic)
        with _Meter(pids, self.bare.pids) as meter:
            metrics = await sao_step(batch, version=self.num_steps, actor=actor, critic=critic, settings=settings)
            record = merge([metrics])
        return meter.turn(phases=_phases(channels, meter.seconds), work=self._work(record))

    def _work(self, record: Record) -> Work:
        """Commands and plans say what was run, the counters of the roles' optimizers how often they stepped."""
        total = Work()
        num_steps = self._count_updates(record)
        for channel in (self.roles.actor, self.roles.critic):
            num_calls = Counter(name for name, _, _ in channel.calls)
            num_updates = num_calls["actor_update"] + num_calls["critic_update"]
            ranks = self.plans[channel.role].ranks
            rows = [max(1, sum(self.batch.lengths[i] for i in row)) for rank in ranks for row in rank]
            num_passes = num_updates + num_calls["critic_values"]
            total += Work(
                num_forwards=num_passes * len(rows),
                num_backwards=num_updates * len(rows),
                num_optimizer_steps=num_steps[channel.role] * len(ranks),
                num_tokens=num_passes * sum(rows),
            )
        return total

    def _count_updates(self, record: Record) -> dict[str, int]:
        """Optimizer steps of each role since the last count."""
        found = {"actor": record.get("policy/num_updates"), "critic": record.get("critic/num_updates")}
        totals = {role: int(count) for role, count in found.items() if count is not None}
        steps = {role: total - self.num_updates[role] for role, total in totals.items()}
        self.num_updates |= totals
        return steps

    async def bare_step(self) -> Turn:
        with _Meter(self.bare.pids, [*self.roles.pids["actor"], *self.roles.pids["critic"]]) as meter:
            critics = await self.bare.go("critic")
            actors = await self.bare.go("actor")
        work = sum((done.work for done in [*critics, *actors]), Work())
        phases = {
            "critic_update_s": critics[0].updates_s,
            "critic_values_s": critics[0].values_s,
            "actor_update_s": actors[0].updates_s,
        }
        return meter.turn(phases=phases | {"rest_s": meter.seconds - sum(phases.values())}, work=work)

    async def grpo(self) -> Turn:
        self.num_steps += 1
        batch = dataclasses.replace(self.batch, id=self.num_steps)
        actor = ActorClient.of(self.roles.actor, self.config.actor)
        with _Meter(self.roles.pids["actor"], self.roles.pids["critic"]) as meter:
            record = merge([await grpo_step(batch, self.groups, version=self.num_steps, actor=actor)])
        self._count_updates(record)
        return meter.turn(phases={}, work=Work())


class _Meter:
    """Wall and CPU seconds of a block."""

    def __init__(self, pids: Sequence[int], idle_pids: Sequence[int]) -> None:
        self._pids, self._idle_pids = pids, idle_pids
        self.seconds = self._cpu_s = self._idle_cpu_s = 0.0

    def __enter__(self) -> "_Meter":
        self._cpu_s, self._idle_cpu_s = -cpu_seconds(self._pids), -cpu_seconds(self._idle_pids)
        self.seconds = -time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter()
        self._cpu_s += cpu_seconds(self._pids)
        self._idle_cpu_s += cpu_seconds(self._idle_pids)

    def turn(self, *, phases: dict[str, float], work: Work) -> Turn:
        return Turn(seconds=self.seconds, cpu_s=self._cpu_s, idle_cpu_s=self._idle_cpu_s, work=work, phases=phases)


def _phases(channels: Sequence[TimedChannel], seconds: float) -> dict[str, float]:
    """Seconds in which a command of that name was under way with some role; the rest is the controller's own."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for channel in channels:
        for name, start_s, end_s in channel.calls:
            spans.setdefault(name, []).append((start_s, end_s))
    phases = {f"{name}_s": _union(found) for name, found in spans.items()}
    every = [span for found in spans.values() for span in found]
    return phases | {"controller_s": seconds - _union(every)}


def _union(spans: Sequence[tuple[float, float]]) -> float:
    total, end_of_last = 0.0, float("-inf")
    for start_s, end_s in sorted(spans):
        total += max(0.0, end_s - max(start_s, end_of_last))
        end_of_last = max(end_of_last, end_s)
    return total


async def _cases(
    size: Size, long_rows: Size, *, num_ranks: int, num_pairs: int, num_long_pairs: int
) -> tuple[Case, ...]:
    sleeping = await sleeping_case(make_trajectories(size), num_steps=NUM_SLEEPING_STEPS)
    pairs, grpo, settings = await _run(size, num_ranks=num_ranks, num_pairs=num_pairs, num_grpo=NUM_GRPO_STEPS)
    of_long_rows, _, long_settings = await _run(long_rows, num_ranks=1, num_pairs=num_long_pairs, num_grpo=0)
    return (
        bare_case(pairs, settings),
        bare_case(of_long_rows, long_settings, name="long_rows", bar=LONG_ROWS_BAR),
        grpo_case([sao for sao, _ in pairs[-len(grpo) :]], grpo, settings),
        sleeping,
    )


async def _run(
    size: Size, *, num_ranks: int, num_pairs: int, num_grpo: int
) -> tuple[list[tuple[Turn, Turn]], list[Turn], dict[str, JsonValue]]:
    """Both sides from start to end: pairs, GRPO steps, and what was run."""
    trajectories = make_trajectories(size)
    batch, groups = Batch.of(0, trajectories), tuple(trajectory.prompt_id for trajectory in trajectories)
    with tempfile.TemporaryDirectory(prefix="sao-bench-") as name:
        directory = Path(name)
        config = bench_config(directory, size, num_ranks)
        plans = {"actor": plan_of(batch, config.actor), "critic": plan_of(batch, config.critic)}
        specs = bare_specs(config, batch, plans, directory)
        async with role_side(config, directory, directory) as roles, bare_side(specs, directory) as bare:
            bench = Bench(config=config, batch=batch, groups=groups, plans=plans, roles=roles, bare=bare)
            pairs, grpo = await _measure(bench, num_pairs, num_grpo)
        settings: dict[str, JsonValue] = {
            "num_tokens": int(batch.offsets[-1]),
            "num_action_tokens": batch.num_action_tokens,
            "num_micro_batches": plans["actor"].num_micro_batches,
            "num_ranks": num_ranks,
            "num_layers": size.num_layers,
            "hidden": size.hidden,
            "vocab_size": size.vocab_size,
            "num_critic_updates": config.critic.num_updates,
        }
    return pairs, grpo, settings


async def _measure(bench: Bench, num_pairs: int, num_grpo: int) -> tuple[list[tuple[Turn, Turn]], list[Turn]]:
    """(SAO, bare) of each pair after the warm-up, and a GRPO step after each of the last ones."""
    pairs: list[tuple[Turn, Turn]] = []
    grpo: list[Turn] = []
    with Display("pairs", NUM_WARM_UPS + num_pairs) as display:
        for number in range(-NUM_WARM_UPS, num_pairs):
            sao, bare = await _pair(bench, bare_first=number % 2 == 0)
            if number >= 0:
                pairs.append((sao, bare))
            if number >= max(0, num_pairs - num_grpo):
                grpo.append(await bench.grpo())
            display.advance(f"bare {bare.seconds:.2f} s, SAO {sao.seconds:.2f} s")
    return pairs, grpo


async def _pair(bench: Bench, *, bare_first: bool) -> tuple[Turn, Turn]:
    if bare_first:
        bare, sao = await bench.bare_step(), await bench.sao()
    else:
        sao, bare = await bench.sao(), await bench.bare_step()
    if sao.work != bare.work:
        raise RuntimeError(f"the sides did different work: SAO {sao.work}, bare {bare.work}")
    return sao, bare


def bare_case(
    pairs: Sequence[tuple[Turn, Turn]], settings: dict[str, JsonValue], *, name: str = "bare_megatron", bar: float = BAR
) -> Case:
    ratios = [bare.seconds / sao.seconds for sao, bare in pairs]
    ratio = median(ratios)
    sides = [[pair[side] for pair in pairs] for side in (0, 1)]
    turns = [*sides[0], *sides[1]]
    return {
        "case": name,
        **settings,
        "num_pairs": len(pairs),
        "ratio_to_bare_megatron": ratio,
        "ratio_iqr": np.percentile(ratios, (25, 75)).tolist(),
        "bar": bar,
        "met": ratio >= bar,
        "sao_s": median(turn.seconds for turn in sides[0]),
        "bare_s": median(turn.seconds for turn in sides[1]),
        "cpu_ratio": median(bare.cpu_s / sao.cpu_s for sao, bare in pairs),
        "idle_cpu_fraction": sum(turn.idle_cpu_s for turn in turns) / sum(turn.seconds for turn in turns),
        "work": pairs[0][0].work.model_dump(),
        "sao_phases": _medians(sides[0]),
        "bare_phases": _medians(sides[1]),
        "ratios": ratios,
    }


def grpo_case(sao: Sequence[Turn], grpo: Sequence[Turn], settings: dict[str, JsonValue]) -> Case:
    return {
        "case": "grpo_cpu_seconds",
        **settings,
        "num_grpo_steps": len(grpo),
        "sao_over_grpo": median(a.cpu_s / b.cpu_s for a, b in zip(sao, grpo, strict=True)),
        "bar": None,
        "met": None,
        "sao_cpu_s": median(turn.cpu_s for turn in sao),
        "grpo_cpu_s": median(turn.cpu_s for turn in grpo),
        "sao_s": median(turn.seconds for turn in sao),
        "grpo_s": median(turn.seconds for turn in grpo),
    }


def _medians(turns: Sequence[Turn]) -> dict[str, JsonValue]:
    return {name: median(turn.phases[name] for turn in turns) for name in turns[0].phases}


def bench_config(directory: Path, size: Size, num_ranks: int) -> Config:
    """The configuration of both sides, with both models written to `directory`."""
    policy, critic = write_models(directory / "models", size)
    role: dict[str, Any] = {
        "layout": {"num_ranks": num_ranks},
        "max_tokens_per_micro_batch": size.max_tokens_per_micro_batch,
        "command_timeout_s": COMMAND_TIMEOUT_S,
    }
    nothing = "none:none"  # no episode is run
    data = {
        "run": {"directory": str(directory), "num_steps": 1},
        "model": {"path": str(policy), "dtype": "float32"},
        "actor": role,
        "critic": role | {"init": str(critic)},
        "algorithm": {"eps_low": 0.3, "eps_high": 5.0},
        "rollout": {
            "prompts": nothing,
            "episode": nothing,
            "reward": nothing,
            "max_episode_tokens": size.max_tokens_per_micro_batch,
            "max_turn_tokens": size.max_tokens_per_micro_batch,
        },
    }
    return parse(data, source="the step benchmark")


def plan_of(batch: Batch, config: RoleConfig) -> BatchPlan:
    return pack(batch.lengths, num_ranks=config.layout.data, max_tokens=config.max_tokens_per_micro_batch)


def bare_specs(config: Config, batch: Batch, plans: dict[str, BatchPlan], directory: Path) -> list[BareSpec]:
    """One for each bare rank, with its rows written to `directory`."""
    specs = []
    models: tuple[tuple[Literal["actor", "critic"], RoleConfig, str], ...] = (
        ("critic", config.critic, config.critic.init),
        ("actor", config.actor, config.model.path),
    )
    for role, settings, model in models:
        for rank, micro_batches in enumerate(plans[role].ranks):
            rows = directory / f"{role}-{rank}.npz"
            write_rows(rows, rows_of(batch, micro_batches))
            spec = BareSpec(
                role=role,
                rank=rank,
                parent_pid=os.getpid(),
                init_method=f"file://{directory / f'bare-{role}'}",
                directory=model,
                rows=str(rows),
                layout=settings.layout,
                optimizer=settings.optimizer,
                freeze=settings.freeze,
                num_updates=config.critic.num_updates if role == "critic" else 1,
                num_threads=settings.num_threads,
                timeout_s=settings.command_timeout_s,
            )
            specs.append(spec)
    return specs
