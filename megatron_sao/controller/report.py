"""Where a run's numbers go: one record a step, a live line, and the summary at the end."""

import importlib.util
import json
import logging
import os
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from megatron_sao.controller.evaluate import Evaluation
from megatron_sao.metrics import JsonlSink, Record, Sink, TensorBoardSink

LOG = logging.getLogger(__name__)
SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
CRITIC_ONLY_METRICS = "critic_only.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """RUN/summary.json. Rewards are means over held-out prompts, `_ci95` the half-width of their 95 % interval."""

    num_steps: int
    wall_s: float
    eval_reward_before: float | None
    eval_reward_before_ci95: float | None
    eval_reward_after: float | None
    eval_reward_after_ci95: float | None
    eval_num_prompts: int | None
    eval_version_after: int | None  # that the engine served
    eval_digest_after: str | None  # sha256 over the engine's checksums
    lag_max: float | None
    num_steps_with_stale_tokens: int
    num_dropped: int
    num_critic_only_steps: int
    rejected_fraction: float | None
    step_s_median: float | None
    policy_directory: str
    critic_directory: str
    metrics_file: str


class Reporter:
    """Writes every step's record to all sinks, keeps what the summary needs, and shows progress.

    On a terminal a live bar with rate and time left, elsewhere one log line a step.
    """

    def __init__(self, run_directory: Path, *, num_steps: int, tensorboard: bool) -> None:
        self._directory = run_directory
        self._num_steps = num_steps
        self._start_s = time.monotonic()
        self._records: list[Record] = []
        self._num_critic_only = 0
        self._critic_only = JsonlSink(run_directory / CRITIC_ONLY_METRICS)
        self._sinks: list[Sink] = [JsonlSink(run_directory / METRICS)]
        if tensorboard and importlib.util.find_spec("tensorboard"):
            self._sinks.append(TensorBoardSink(run_directory / "tensorboard"))
        self._progress = progress_bar()
        self._task = self._progress.add_task("SAO", total=num_steps, text="starting")
        self._progress.start()

    def phase(self, text: str) -> None:
        """Say what the run is doing between steps."""
        self._progress.update(self._task, text=text)
        LOG.info("%s", text)

    def critic_only_step(self, record: Record) -> None:
        self._critic_only.write(self._num_critic_only, record)
        self._num_critic_only += 1
        explained = _show(record.get("critic/explained_variance_before"))
        self.phase(f"critic-only step {self._num_critic_only}: explained variance {explained}")

    def step(self, step: int, record: Record) -> None:
        for sink in self._sinks:
            sink.write(step, record)
        self._records.append(record)
        text = "  ".join(f"{label} {_show(record.get(key))}" for label, key in _SHOWN.items())
        self._progress.update(self._task, completed=step + 1, text=text)
        step_s = statistics.median(_values(self._records, "time/step_s"))
        left_s = step_s * (self._num_steps - step - 1)
        LOG.info("step %d/%d: %s  (%.0f s left)", step + 1, self._num_steps, text, left_s)

    def summary(
        self,
        *,
        before: Evaluation | None,
        after: Evaluation | None,
        num_dropped: int,
        policy_directory: Path,
        critic_directory: Path,
    ) -> Summary:
        """The run in one record, also written to RUN/summary.json."""
        lags = _values(self._records, "lag/max")
        low, high = (_values(self._records, f"policy/rejected_{side}_fraction") for side in ("low", "high"))
        step_s = _values(self._records, "time/step_s")
        summary = Summary(
            num_steps=len(self._records),
            wall_s=time.monotonic() - self._start_s,
            eval_reward_before=before.reward if before else None,
            eval_reward_before_ci95=before.ci95 if before else None,
            eval_reward_after=after.reward if after else None,
            eval_reward_after_ci95=after.ci95 if after else None,
            eval_num_prompts=after.num_prompts if after else None,
            eval_version_after=after.weight_version if after else None,
            eval_digest_after=after.weight_digest if after else None,
            lag_max=max(lags, default=None),
            num_steps_with_stale_tokens=sum(lag > 0 for lag in lags),
            num_dropped=num_dropped,
            num_critic_only_steps=self._num_critic_only,
            rejected_fraction=statistics.fmean(low) + statistics.fmean(high) if low and high else None,
            step_s_median=statistics.median(step_s) if step_s else None,
            policy_directory=str(policy_directory),
            critic_directory=str(critic_directory),
            metrics_file=str(self._directory / METRICS),
        )
        write_atomically(self._directory / SUMMARY, json.dumps(asdict(summary), indent=2) + "\n")
        return summary

    def close(self) -> None:
        self._progress.stop()
        for sink in [*self._sinks, self._critic_only]:
            sink.close()


_SHOWN = {
    "reward": "rollout/reward_mean",
    "explained variance": "critic/explained_variance_before",
    "lag": "lag/mean",
    "grad norm": "policy/grad_norm",
    "step s": "time/step_s",
}


def summary_table(summary: Summary) -> Table:
    """What a person wants to know at the end of a run."""
    table = Table(title="SAO run", show_header=False, title_justify="left")
    rows = {
        "reward before": _interval(summary.eval_reward_before, summary.eval_reward_before_ci95),
        "reward after": _interval(summary.eval_reward_after, summary.eval_reward_after_ci95),
        "held-out prompts": str(summary.eval_num_prompts),
        "steps (critic-only)": f"{summary.num_steps} ({summary.num_critic_only_steps})",
        "wall time": f"{summary.wall_s / 60:.1f} min, median step {_show(summary.step_s_median)} s",
        "largest token lag": f"{_show(summary.lag_max)}, stale tokens in {summary.num_steps_with_stale_tokens} steps",
        "rejected tokens": _show(summary.rejected_fraction),
        "episodes dropped": str(summary.num_dropped),
        "policy": summary.policy_directory,
        "critic": summary.critic_directory,
        "metrics": summary.metrics_file,
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def write_atomically(path: Path, text: str) -> None:
    """The whole file or none of it, also when the process is killed in the middle."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def progress_bar() -> Progress:
    """With rate and time left, on stderr; nothing where that is no terminal. Tasks carry a field `text`."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _values(records: Iterable[Record], key: str) -> list[float]:
    return [value for record in records if (value := record.get(key)) is not None]


def _interval(mean: float | None, ci95: float | None) -> str:
    return "not evaluated" if mean is None else f"{mean:.3f} +- {ci95:.3f}"


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
