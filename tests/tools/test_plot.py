"""A run becomes a picture."""

import json
import subprocess
import sys
from pathlib import Path

RECORD = {
    "rollout/reward_mean": 0.5,
    "lag/mean": 0.5,
    "lag/max": 1.0,
    "policy/rejected_low_fraction": 0.0,
    "policy/rejected_high_fraction": 0.01,
    "critic/explained_variance_before": None,
    "critic/loss": 0.2,
    "time/step_s": 2.0,
    "time/critic_s": 1.0,
}


def plot(run: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.plot", str(run)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


def test_a_run_becomes_a_picture_also_without_its_summary(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, **RECORD}) for step in range(3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert plot(tmp_path).returncode == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_directory_without_a_step_is_refused(tmp_path: Path) -> None:
    answer = plot(tmp_path)
    assert answer.returncode == 2
    assert "no record yet" in answer.stderr
