"""A run as one picture: `python -m tools.plot runs/quickstart` writes runs/quickstart/curves.png."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

Records = Sequence[Mapping[str, Any]]
TIMES = {
    "actor waits": "time/wait_s",
    "actor": "time/actor_s",
    "publish": "publish/total_s",
    "check": "publish/verify_s",
}


def draw(records: Records, summary: Mapping[str, Any] | None, path: Path) -> None:
    """Reward, ages and rejections of tokens, the critic, and where a step's time goes."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), sharex=True, layout="constrained")
    _reward(axes[0, 0], records, summary)
    _lines(axes[0, 1], records, {"lag, mean": "lag/mean", "lag, max": "lag/max"}, "age of action tokens [versions]")
    rejected = axes[0, 1].twinx()
    shares = [100 * (r["policy/rejected_low_fraction"] + r["policy/rejected_high_fraction"]) for r in records]
    rejected.plot(_steps(records), shares, color="tab:red", alpha=0.6, linewidth=1)
    rejected.set_ylabel("rejected tokens [%]", color="tab:red")
    critic = {"explained variance, before the updates": "critic/explained_variance_before", "loss": "critic/loss"}
    _lines(axes[1, 0], records, critic, "critic")
    parts = [[r.get(key) or 0.0 for r in records] for key in TIMES.values()]
    axes[1, 1].stackplot(_steps(records), parts, labels=list(TIMES), alpha=0.8)
    for label, key, style in (
        ("step", "time/step_s", "-"),
        ("critic", "time/critic_s", ":"),
    ):
        axes[1, 1].plot(_steps(records), [r[key] for r in records], style, color="black", linewidth=1, label=label)
    axes[1, 1].set_ylabel("time [s]")
    axes[1, 1].set_ylim(0, 1.3 * max(r["time/step_s"] for r in records))
    axes[1, 1].legend(fontsize="small", ncols=3, loc="upper left")
    for axis in axes[1]:
        axis.set_xlabel("step")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _reward(axis: Axes, records: Records, summary: Mapping[str, Any] | None) -> None:
    axis.plot(_steps(records), [r["rollout/reward_mean"] for r in records], label="training, mean of a step")
    if summary and summary["eval_reward_before"] is not None:
        for side, step in (("before", 0), ("after", summary["num_steps"] - 1)):
            mean, ci95 = summary[f"eval_reward_{side}"], summary[f"eval_reward_{side}_ci95"]
            label = f"held out, {side}: {mean:.3f}"
            axis.errorbar([step], [mean], yerr=[ci95], fmt="o", capsize=4, label=label)
    axis.set_ylabel("reward")
    axis.set_ylim(-0.02, 1.02)
    axis.legend(loc="lower right", fontsize="small")


def _lines(axis: Axes, records: Records, keys: Mapping[str, str], label: str) -> None:
    for name, key in keys.items():
        axis.plot(_steps(records), [float("nan") if r[key] is None else r[key] for r in records], label=name)
    axis.set_ylabel(label)
    axis.legend(fontsize="small")


def _steps(records: Records) -> list[int]:
    return [record["step"] for record in records]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.plot", description=__doc__)
    parser.add_argument("run", type=Path, help="directory of a run")
    run: Path = parser.parse_args().run
    metrics, summary = run / "metrics.jsonl", run / "summary.json"
    if not metrics.is_file() or not metrics.stat().st_size:
        print(f"{metrics} has no record yet: give the directory of a run that has trained a step", file=sys.stderr)
        return 2
    records = [json.loads(line) for line in metrics.open(encoding="utf-8")]
    draw(records, json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else None, run / "curves.png")
    print(run / "curves.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
