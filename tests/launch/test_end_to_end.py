"""Everything real, on one machine: SGLang, two actor ranks that share the experts, a critic, publishes, exports.

With `max_lag = 0` and float32 every action token was sampled by the weights that it is trained from, so its ratio is 1
up to rounding: the whole chain (tokens, positions, names, layouts, versions, publishes) is right, or this is not.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from launch import role_processes
from launch.local import run_locally
from launch.run_directory import run_directory
from megatron_sao.config import Config, parse
from megatron_sao.controller.report import Summary
from megatron_sao.types import Prompt, Reward, Trajectory
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.live, pytest.mark.ranks, pytest.mark.timeout(600)]
NUM_STEPS = 5
ROOT = Path(__file__).parent.parent.parent


async def reward(prompt: Prompt, trajectories: tuple[Trajectory, ...]) -> Reward:
    """Mixed, so that every step has advantages: a random model never solves a task."""
    return Reward(value=float(trajectories[0].token_ids[-1] % 2))


def config_of(model: Path, directory: Path, *, num_steps: int = NUM_STEPS, **publish: Any) -> Config:
    optimizer = {"learning_rate": 1e-3, "warmup_updates": 0}
    return parse(
        {
            "run": {"directory": str(directory), "num_steps": num_steps},
            "model": {"path": str(model), "dtype": "float32"},
            "actor": {
                "layout": {"num_ranks": 2, "expert": 2},
                "optimizer": {**optimizer, "clip_norm": 1.0},
                "max_tokens_per_micro_batch": 256,
            },
            "critic": {
                "optimizer": {**optimizer, "clip_norm": 10.0},
                "max_tokens_per_micro_batch": 256,
                "critic_only_steps": 1,
            },
            "algorithm": {"eps_low": 0.3, "eps_high": 5.0},
            "rollout": {
                "prompts": "tests.controller.test_deterministic:prompts",
                "prompts_args": {"prefix": "train", "size": 64},
                "episode": "tests.controller.test_deterministic:episode",
                "reward": "tests.launch.test_end_to_end:reward",
                "trajectories_per_step": 16,
                "max_lag": 0,
                "max_episode_tokens": 96,
                "max_turn_tokens": 32,
            },
            "engine": {"max_total_tokens": 8192},
            "publish": publish,
            "evaluation": {
                "prompts": "tests.controller.test_deterministic:prompts",
                "prompts_args": {"prefix": "held-out", "size": 16},
                "num_prompts": 16,
            },
        },
        source="test",
    )


async def run(config: Config) -> tuple[Summary, list[dict[str, Any]]]:
    with run_directory(config) as directory:
        summary = await run_locally(config, directory)
    return summary, [json.loads(line) for line in (directory / "metrics.jsonl").open()]


async def test_at_lag_zero_every_ratio_is_one(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    summary, records = await run(config_of(model, tmp_path / "run", logprob_tolerance=1e-4))
    assert [record["weight_version"] for record in records] == list(range(1, NUM_STEPS + 1))
    for record in records:
        assert record["lag/max"] == 0
        assert record["policy/mismatch_within_1e-3_fraction"] >= 0.999
        assert record["policy/mismatch_within_1e-5_fraction"] >= 0.5, "the median of |log r| is above 1e-5"
        assert record["policy/rejected_low_fraction"] + record["policy/rejected_high_fraction"] < 0.001
        assert record["policy/grad_norm"] > 0
        assert record["publish/logprob_max_difference"] <= 1e-4
    check_files(tmp_path / "run", summary, records, model)


METRICS = """step weight_version rollout/reward_mean rollout/num_trajectories rollout/action_tokens policy/loss
policy/rejected_low_fraction policy/rejected_high_fraction policy/mismatch_kl policy/drift_kl policy/ess
policy/grad_norm policy/num_updates critic/loss critic/explained_variance_before critic/grad_norm critic/num_updates
lag/mean lag/max lag/over_max_fraction publish/total_s publish/pause_s publish/bytes publish/verify_s time/step_s
packing/waste_fraction packing/imbalance"""
SUMMARY = """num_steps wall_s eval_reward_before eval_reward_before_ci95 eval_reward_after eval_reward_after_ci95
lag_max num_steps_with_stale_tokens num_dropped"""


def check_files(directory: Path, summary: Summary, records: list[dict[str, Any]], start: Path) -> None:
    """The bytes of a publish, the exports, the summary."""
    policy = AutoModelForCausalLM.from_pretrained(directory / "hf", dtype=torch.float32)
    assert {record["publish/bytes"] for record in records} == {4 * sum(p.numel() for p in policy.parameters())}
    before = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    moved = [not torch.equal(new, old) for new, old in zip(policy.parameters(), before.parameters(), strict=True)]
    assert all(moved), "a parameter of the exported policy never moved"
    assert json.loads((directory / "critic" / "config.json").read_text())["role"] == "critic"
    assert (directory / "critic" / "value_head.safetensors").is_file()
    assert all(set(METRICS.split()) <= set(record) for record in records)
    written = json.loads((directory / "summary.json").read_text())
    assert set(SUMMARY.split()) <= set(written)
    assert summary.num_steps == NUM_STEPS
    assert (written["eval_reward_after"], written["eval_version_after"]) == (summary.eval_reward_after, NUM_STEPS)
    assert not list(directory.rglob("*.partial"))


async def test_an_expert_left_out_of_every_publish_turns_the_ratios_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bar of lag 0 can fail: with the checks of the publish off, the metrics still say it."""
    monkeypatch.setattr(
        role_processes, "RANK_COMMAND", (sys.executable, str(ROOT / "tests" / "support" / "broken_publish.py"))
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    model = make_tiny_model(tmp_path / "model")
    _, records = await run(config_of(model, tmp_path / "run", num_steps=2, verify_first=False, logprob_tolerance=1e3))
    assert records[-1]["lag/max"] == 0
    assert records[-1]["policy/mismatch_within_1e-3_fraction"] < 0.999
