"""`run.deterministic`: two runs write the same numbers. Real Megatron roles, a FAKE engine on a virtual clock."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from launch.placement import Placement
from launch.processes import Supervisor
from launch.role_processes import start_roles, stop_roles
from megatron_sao.channel import ChannelServer
from megatron_sao.config import Config, parse
from megatron_sao.controller.run import load_work, train
from megatron_sao.rollout.episode import SingleTurnEpisode
from megatron_sao.types import Message, Prompt, Reward, Trajectory
from tests.support.scripted_engine import ScriptedEngine
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_model

pytestmark = pytest.mark.ranks
EPISODES_PER_STEP = 4
NUM_STEPS = 3
NUM_CRITIC_ONLY_STEPS = 2
NUM_TOKENS = 8


def prompts(*, prefix: str, size: int) -> Sequence[Prompt]:
    return [
        Prompt(id=f"{prefix}/{i}", position=i, messages=(Message(role="user", content=f"{prefix} {i}"),))
        for i in range(size)
    ]


def episode(tokenizer: PreTrainedTokenizerBase) -> SingleTurnEpisode:
    return SingleTurnEpisode(tokenizer)


async def reward(prompt: Prompt, trajectories: tuple[Trajectory, ...]) -> Reward:
    last = int(trajectories[0].token_ids[-1])
    return Reward(value=last % 2, metrics={"last_token": last})


def config_of(model: Path, directory: Path, *, loop: str = "serial", **rollout: Any) -> Config:
    here = "tests.controller.test_deterministic"
    optimizer = {"learning_rate": 1e-3, "warmup_updates": 0}
    return parse(
        {
            "run": {
                "directory": str(directory),
                "num_steps": NUM_STEPS,
                "deterministic": True,
                "seed": 3,
                "loop": loop,
            },
            "model": {"path": str(model), "dtype": "float32"},
            "actor": {"optimizer": {**optimizer, "clip_norm": 1.0}, "max_tokens_per_micro_batch": 64},
            "critic": {
                "optimizer": {**optimizer, "clip_norm": 10.0},
                "max_tokens_per_micro_batch": 64,
                "critic_only_steps": NUM_CRITIC_ONLY_STEPS,
            },
            "algorithm": {"eps_low": 0.3, "eps_high": 5.0},
            "rollout": {
                "prompts": f"{here}:prompts",
                "prompts_args": {"prefix": "train", "size": 20},
                "episode": f"{here}:episode",
                "reward": f"{here}:reward",
                "trajectories_per_step": EPISODES_PER_STEP,
                "max_episode_tokens": 64,
                "max_turn_tokens": NUM_TOKENS,
                **rollout,
            },
            "evaluation": {
                "prompts": f"{here}:prompts",
                "prompts_args": {"prefix": "held-out", "size": 4},
                "num_prompts": 4,
            },
            "publish": {"logprob_tolerance": 1e3},  # the fake engine has no model
            "metrics": {"tensorboard": False},
        },
        source="test",
    )


async def run(model: Path, directory: Path, *, loop: str = "serial") -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One whole run. Every second block of episodes takes a tick, so its tokens span two versions."""
    private = directory / "private"
    private.mkdir(parents=True)
    config = config_of(model, directory, loop=loop)
    num_evaluated = 4
    engine = ScriptedEngine(
        load_file(model / "model.safetensors"),
        vocab_size=VOCAB_SIZE,
        num_tokens=NUM_TOKENS,
        duration=lambda number: int(_block_of(number - num_evaluated) % 2 == 1),
    )
    async with contextlib.AsyncExitStack() as stack:
        supervisor, server = Supervisor(), ChannelServer()
        stack.callback(supervisor.stop, 3.0)
        stack.push_async_callback(server.close)
        roles = await start_roles(
            config, server=server, supervisor=supervisor, placement=Placement(), private=private, logs=directory
        )
        work = load_work(config)
        await train(config, work, actor=roles.actor, critic=roles.critic, engine=engine, run_directory=directory)
        await stop_roles(roles, supervisor)
    records = [json.loads(line) for line in (directory / "metrics.jsonl").open()]
    return records, json.loads((directory / "summary.json").read_text())


def _block_of(number: int) -> int:
    """Block of an episode: -1 in the evaluation before, 0 in the critic-only phase; the rest alternates."""
    if number < 0:
        return -2
    return max(0, number // EPISODES_PER_STEP - NUM_CRITIC_ONLY_STEPS)


def comparable(record: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in record.items()
        if not key.startswith(("time/", "overlap/ahead_s")) and not (key.startswith("publish/") and key.endswith("_s"))
    }


async def test_two_deterministic_runs_write_the_same_numbers(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    first, summary = await run(model, tmp_path / "a")
    second, _ = await run(model, tmp_path / "b")
    assert len(first) == NUM_STEPS
    assert [comparable(record) for record in first] == [comparable(record) for record in second]
    assert summary["num_steps_with_stale_tokens"] >= 1
    assert {record["weight_version"] for record in first} == {1, 2, 3}
    assert any(0 < record["lag/mean"] < record["lag/max"] for record in first), "no episode spans two versions"
