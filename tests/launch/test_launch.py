"""The command `sao`: what it refuses, in one line; run directories; devices; signals."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from launch.cli import command
from launch.local import check
from launch.run_directory import remove_unfinished, run_directory
from launch.tasks import both, unless
from megatron_sao.config import Config, load
from megatron_sao.megatron.installed import SPARSE_ATTENTION
from tests.support.tiny_models import make_tiny_model

CONFIG = """
[run]
directory = "{directory}"
num_steps = 2
[model]
path = "{model}"
dtype = "float32"
[actor]
layout = {{ num_ranks = 2, expert = 2 }}
max_tokens_per_micro_batch = 128
[critic]
max_tokens_per_micro_batch = 128
critic_only_steps = 0
[algorithm]
eps_low = 0.3
eps_high = 5.0
[rollout]
prompts = "megatron_sao.rollout.environments.chain_sum:prompts"
prompts_args = {{ split = "train", size = 100, seed = 1 }}
episode = "megatron_sao.rollout.environments.chain_sum:episode"
reward = "megatron_sao.rollout.environments.chain_sum:reward"
trajectories_per_step = 4
max_episode_tokens = 96
max_turn_tokens = 16
[engine]
max_total_tokens = 4096
"""


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    def write(model: str = "no/model") -> Path:
        path = tmp_path / "config.toml"
        path.write_text(CONFIG.format(directory=tmp_path / "run", model=model))
        return path

    return write


BAD: dict[str, tuple[list[str], str]] = {
    "an unknown key": (["rollout.max_lagg=1"], "unknown key 'rollout.max_lagg'; known here: episode,"),
    "a value out of range": (["algorithm.eps_low=1.5"], "algorithm.eps_low: Input should be less than 1"),
    "no override": (["max_lag"], "override 'max_lag' is not of the form key.path=value"),
    "no model directory": ([], "model.path = 'no/model' is not a model directory: it has no config.json"),
    "sampling that is not the model's own": (["rollout.top_p=0.9"], "both must be 1"),
    "dropout": (["actor.hidden_dropout=0.1"], "dropout must be 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_a_person_must_change_is_one_line_and_status_2(
    name: str, tmp_path: Path, write_config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, message = BAD[name]
    assert command(["train", str(write_config()), *overrides]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert error.splitlines()[-1].startswith("sao: error: ")
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


UNUSABLE = {
    "a path to no module": ("rollout.prompts=nowhere:prompts", "import path 'nowhere:prompts': there is no module"),
    "fewer prompts than slots": ("rollout.prompts_args={split='train', size=5, seed=1}", "8"),
    "an argument that the prompts do not take": ("rollout.prompts_args={sise=5}", "unexpected keyword argument 'sise'"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_a_user_brings_is_loaded_before_anything_is_written_or_started(
    name: str, tmp_path: Path, write_config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    override, message = UNUSABLE[name]
    (tmp_path / "config.json").write_text("{}")  # a model directory, as far as anybody looks
    assert command(["train", str(write_config(str(tmp_path))), override]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("sao: error: ")
    assert message in last
    assert not (tmp_path / "run").exists()


def test_episodes_above_what_dense_attention_computes_exactly_are_refused_unless_wanted(
    tmp_path: Path, write_config: Callable[..., Path]
) -> None:
    (tmp_path / "config.json").write_text('{"index_topk": 95}')
    path = write_config(str(tmp_path))
    if SPARSE_ATTENTION:
        check(load(path))
    else:
        with pytest.raises(ValueError, match="max_episode_tokens = 96 exceeds index_topk = 95 of .* exact up to there"):
            check(load(path))
    check(load(path, ["model.approximate_sparse_attention=true"]))
    check(load(path, ["rollout.max_episode_tokens=95"]))


@pytest.mark.parametrize("key", ["model.path", "critic.init"])
def test_a_model_in_the_runs_own_directory_is_refused_and_left_where_it_is(
    key: str, tmp_path: Path, write_config: Callable[..., Path]
) -> None:
    with run_directory(config_of(write_config)) as directory:
        (directory / "hf").mkdir()
    config = load(write_config(), [f"{key}='{directory}/../run/hf'"])
    with pytest.raises(ValueError, match=rf"{key} = .*/hf' lies in run.directory = .*/run', which is moved aside"):
        with run_directory(config):
            pass
    assert (directory / "hf").is_dir()
    assert not (tmp_path / "run.1").exists()


def test_a_missing_config_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["train", str(tmp_path / "none.toml")]) == 2
    assert "cannot read the config" in capsys.readouterr().err


def test_help_and_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command(["--help"])
    assert "train by a TOML file" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        command([])


def test_a_directory_with_other_files_is_refused_and_untouched(
    tmp_path: Path, write_config: Callable[..., Path]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("ten years")
    with pytest.raises(ValueError, match="holds files that are no run's"):
        with run_directory(config_of(write_config)):
            pass
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.txt"]


def config_of(write_config: Callable[..., Path]) -> Config:
    return load(write_config())


def test_a_previous_run_is_moved_aside_whole(tmp_path: Path, write_config: Callable[..., Path]) -> None:
    for number in range(3):
        with run_directory(config_of(write_config)) as directory:
            (directory / "summary.json").write_text(str(number))
    names = {path.name: (path / "summary.json").read_text() for path in tmp_path.glob("run*")}
    assert names == {"run": "2", "run.1": "0", "run.2": "1"}
    assert json.loads((tmp_path / "run" / "config.json").read_text())["run"]["num_steps"] == 2


def test_a_run_that_is_going_on_is_left_alone(tmp_path: Path, write_config: Callable[..., Path]) -> None:
    config = config_of(write_config)
    with run_directory(config) as directory:
        with pytest.raises(ValueError, match="a run is going on in it"):
            with run_directory(config):
                pass
        assert directory.exists()
    assert not (tmp_path / "run.1").exists()


def test_half_written_files_are_removed_and_whole_ones_stay(tmp_path: Path) -> None:
    (tmp_path / ".hf-x7" / "hf").mkdir(parents=True)
    (tmp_path / "hf").mkdir()
    (tmp_path / "summary.json.partial").write_text("{")
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "metrics.jsonl"]


async def test_the_first_failure_ends_the_other_side() -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("slow")

    async def fail() -> None:
        raise RuntimeError("first")

    with pytest.raises(RuntimeError, match="first"):
        await both(slow(), fail(), grace_s=1.0)
    with pytest.raises(RuntimeError, match="first"):
        await unless(fail(), slow(), grace_s=1.0)
    assert ended == ["slow", "slow"]
    assert await unless(slow(), asyncio.sleep(0, "done"), grace_s=1.0) == "done"


MID_TRAINING = (
    "run.num_steps=1000",
    "rollout.reward=tests.launch.test_end_to_end:reward",
    "publish.verify_first=false",
)


@pytest.mark.parametrize(
    ("number", "overrides"),
    [(signal.SIGINT, ()), (signal.SIGTERM, MID_TRAINING)],
    ids=["Ctrl-C while it starts", "SIGTERM in mid-training"],
)
def test_a_signal_stops_every_process_of_a_run_within_15_s(
    number: signal.Signals, overrides: tuple[str, ...], tmp_path: Path, write_config: Callable[..., Path]
) -> None:
    """Real ranks and a real engine."""
    config = write_config(str(make_tiny_model(tmp_path / "model")))
    with subprocess.Popen(
        [sys.executable, "-m", "launch.cli", "train", str(config), *overrides],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    ) as run:
        started = descendants(run, at_least=5)  # two actor ranks, a critic rank, the engine and its supervisor
        if overrides:
            wait_for_a_step(run, tmp_path / "run" / "metrics.jsonl")
            started = descendants(run, at_least=5)
        start_s = time.monotonic()
        run.send_signal(number)
        run.send_signal(number)  # a person presses twice
        _, error = run.communicate(timeout=30)
    assert time.monotonic() - start_s < 15
    assert run.returncode == 128 + number
    assert error.strip().endswith(f"sao: error: stopped by {number.name}; every process of the run has ended")
    assert not [process for process in started if process.is_running() and process.status() != "zombie"]
    assert not list((tmp_path / "run").glob(".*-*"))


def wait_for_a_step(run: "subprocess.Popen[str]", metrics: Path) -> None:
    end_s = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text()):
        assert run.poll() is None, run.stderr.read() if run.stderr else ""
        assert time.monotonic() < end_s, "no step within 120 s"
        time.sleep(0.1)


def descendants(run: "subprocess.Popen[str]", *, at_least: int) -> list[psutil.Process]:
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s and run.poll() is None:
        found: list[psutil.Process] = psutil.Process(run.pid).children(recursive=True)
        if len(found) >= at_least:
            return found
        time.sleep(0.05)
    raise AssertionError(f"the run did not start its processes: {run.stderr.read() if run.stderr else ''}")
