"""The quickstart on GPUs: one (shared by all, a publish through gloo), two (NCCL), three (a GPU each)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.conftest import Figure

ROOT = Path(__file__).parent.parent.parent
LAYOUT = ("model.dtype=bfloat16", "actor.layout.num_ranks=1", "actor.layout.expert=1")  # as the Makefile's QUICKSTART


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("num_gpus", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (1, 2, 3)])
def test_the_quickstart_publishes_what_it_learns(num_gpus: int, tmp_path: Path, figure: Figure) -> None:
    """Its first publish compares checksums; each one compares log-probs of engine and actor."""
    run(sys.executable, "-m", "tools.quickstart", timeout_s=600)
    output = run(
        sys.executable,
        "-m",
        "launch.cli",
        "train",
        "configs/quickstart.toml",
        *LAYOUT,
        "run.num_steps=3",
        "critic.critic_only_steps=1",
        f"run.directory={json.dumps(str(tmp_path / 'run'))}",
        timeout_s=800,
        devices=",".join(map(str, range(num_gpus))),
    )
    assert ("a publish goes through gloo" in output) == (num_gpus == 1)
    assert ("is shared by" in output) == (num_gpus < 3)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [line["publish/logprob_mean_difference"] for line in lines if "publish/logprob_mean_difference" in line]
    assert len(found) >= 3
    figure("nats between engine and actor, mean", max(found), 0.1)


def run(*command: str, timeout_s: float, devices: str | None = None) -> str:
    prefix = () if devices is None else ("env", f"CUDA_VISIBLE_DEVICES={devices}")
    done = subprocess.run(
        [*prefix, *command], cwd=ROOT, timeout=timeout_s, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout
