"""The quickstart on GPUs: one (shared by all, a publish through gloo), two (NCCL), three (a GPU each)."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
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
        *train(tmp_path / "run"),
        "run.num_steps=3",
        "critic.critic_only_steps=1",
        timeout_s=800,
        devices=",".join(map(str, range(num_gpus))),
    )
    assert ("a publish goes through gloo" in output) == (num_gpus == 1)
    assert ("is shared by" in output) == (num_gpus < 3)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [line["publish/logprob_mean_difference"] for line in lines if "publish/logprob_mean_difference" in line]
    assert len(found) >= 3
    figure("nats between engine and actor, mean", max(found), 0.1)


@pytest.mark.timeout(1800)
@pytest.mark.gpu(1)
def test_the_quickstart_learns(tmp_path: Path, figure: Figure) -> None:
    run(sys.executable, "-m", "tools.quickstart", timeout_s=600)
    directory = tmp_path / "run"
    run(*train(directory), timeout_s=1200, devices="0")
    summary = json.loads((directory / "summary.json").read_text())
    figure("reward before", summary["eval_reward_before"], 0.65)
    figure("1 - reward after", 1 - summary["eval_reward_after"], 0.07)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_gpus", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (1, 3)])
def test_a_run_whose_engine_is_killed_ends_and_names_it(num_gpus: int, tmp_path: Path, figure: Figure) -> None:
    """With one GPU update groups are gloo's, with three NCCL's: neither leaves a rank waiting."""
    run(sys.executable, "-m", "tools.quickstart", timeout_s=600)
    directory, log = tmp_path / "run", tmp_path / "log"
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(num_gpus)))}
    with log.open("w") as output:
        process = subprocess.Popen(
            [*train(directory), "run.num_steps=1000"], cwd=ROOT, env=os.environ | devices, stdout=output, stderr=output
        )
        try:
            wait_for(lambda: (directory / "metrics.jsonl").exists(), process, log, timeout_s=600)
            started = psutil.Process(process.pid).children(recursive=True)
            engine = next(each for each in started if "sglang.launch_server" in each.cmdline())
            engine.kill()
            start_s = time.monotonic()
            assert process.wait(timeout=300) == 1
        finally:
            process.kill()
    figure("s until the run has ended", time.monotonic() - start_s, 120)
    assert "engine" in log.read_text()[-4000:]
    assert not [each for each in started if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def train(directory: Path) -> tuple[str, ...]:
    where = f"run.directory={json.dumps(str(directory))}"
    return (sys.executable, "-m", "launch.cli", "train", "configs/quickstart.toml", *LAYOUT, where)


def wait_for(claim: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, *, timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s
    while not claim():
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < end_s, log.read_text()[-4000:]
        time.sleep(0.2)


def run(*command: str, timeout_s: float, devices: str | None = None) -> str:
    prefix = () if devices is None else ("env", f"CUDA_VISIBLE_DEVICES={devices}")
    done = subprocess.run(
        [*prefix, *command], cwd=ROOT, timeout=timeout_s, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout
