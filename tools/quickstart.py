"""Make the quickstart's start policy: `python -m tools.quickstart`. Does nothing when it is already there.

Trains a tiny Qwen3-MoE on demonstrations of mixed quality (about a minute on two cores), looks at what it can do on
held-out prompts, and puts it at `model.path` of configs/quickstart.toml. Made anew when the recipe changes.
"""

import asyncio
import dataclasses
import hashlib
import inspect
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from megatron_sao import config
from megatron_sao.rollout import render
from megatron_sao.rollout.engine import Engine
from megatron_sao.rollout.environments import chain_sum
from megatron_sao.rollout.episode import Limits
from megatron_sao.rollout.service import EpisodeRunner
from megatron_sao.types import Prompt, Reward, Trajectory
from tools.warm_start import demonstrations, local_engine, model, training

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.toml"
RECORD = "warm_start.json"
NUM_DEMONSTRATIONS = 8000
MIDDLING = (0.3, 0.65)
"""A start policy that succeeds more or less often than this leaves nothing to show: the recipe is broken."""


def main(arguments: Sequence[str] | None = None) -> int:
    overrides = list(sys.argv[1:] if arguments is None else arguments)
    settings = config.load(CONFIG, overrides)
    target = Path(settings.model.path)
    recipe = training.Recipe()
    digest = digest_of(recipe, settings.rollout.prompts_args)
    if _is_current(target, digest):
        print(f"start policy: {target} is up to date")
        return 0
    torch.set_num_threads(min(2, torch.get_num_threads()))
    start_s = time.monotonic()
    sources = split_prompts(settings)
    print(f"start policy: {recipe.num_updates} updates on demonstrations, {torch.get_num_threads()} threads")
    tokenizer = model.build_tokenizer()
    policy = training.train(tokenizer, sources["demonstrations"], recipe, progress=_Printer(recipe.num_updates))
    report = asyncio.run(look_at(policy, tokenizer, sources["evaluation"], settings.rollout))
    report |= {"wall_s": round(time.monotonic() - start_s, 1), "num_parameters": policy.num_parameters()}
    print("start policy: " + ", ".join(f"{key} {value}" for key, value in report.items()))
    if not MIDDLING[0] <= report["success_rate"] <= MIDDLING[1]:
        raise RuntimeError(f"the start policy's success rate {report['success_rate']} is not within {MIDDLING}")
    write(policy, tokenizer, target, {"digest": digest, "recipe": dataclasses.asdict(recipe), **report})
    print(f"start policy: written to {target}")
    return 0


def digest_of(recipe: training.Recipe, prompts_args: dict[str, Any]) -> str:
    """Of all that shapes the start policy: the recipe, the prompts' ranges and the code that uses them."""
    code = [inspect.getsource(part) for part in (chain_sum, render, demonstrations, model, training)]
    values = json.dumps([dataclasses.asdict(recipe), prompts_args, NUM_DEMONSTRATIONS], sort_keys=True)
    return hashlib.sha256("\n".join([values, *code]).encode()).hexdigest()


def split_prompts(settings: config.Config) -> dict[str, tuple[Prompt, ...]]:
    """Demonstrations, training and held-out prompts of the run to come.

    Raises:
        ValueError: no evaluation in the config. AssertionError: two splits share a question.
    """
    if settings.evaluation is None:
        raise ValueError("the quickstart's config needs an [evaluation]: its prompts are held out here too")
    ranges = {key: value for key, value in settings.rollout.prompts_args.items() if key.startswith(("min_", "max_"))}
    sources = {
        "demonstrations": chain_sum.prompts("demonstrations", NUM_DEMONSTRATIONS, **ranges),
        "train": chain_sum.prompts(**settings.rollout.prompts_args),
        "evaluation": chain_sum.prompts(**settings.evaluation.prompts_args),
    }
    questions = [prompt.messages[-1].content for source in sources.values() for prompt in source]
    assert len(set(questions)) == len(questions), "demonstrations, training and evaluation share a question"
    return sources


async def look_at(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    settings: config.RolloutConfig,
) -> dict[str, Any]:
    """What the policy does on `prompts` at temperature 1, through the run's own episode and reward."""
    runner = EpisodeRunner(
        engine=cast(Engine, local_engine.LocalEngine(policy)),  # its `generate` is all that an episode asks for
        episode=chain_sum.episode(tokenizer),
        reward=chain_sum.reward,
        limits=Limits(
            max_episode_tokens=settings.max_episode_tokens,
            max_turn_tokens=settings.max_turn_tokens,
            max_turns=settings.max_turns,
        ),
    )
    results = await asyncio.gather(*(runner.run(prompt) for prompt in prompts))
    return summary_of(results)


def summary_of(results: Sequence[tuple[tuple[Trajectory, ...], Reward]]) -> dict[str, Any]:
    rewards = [reward.value for _, reward in results]
    with_tool = [reward.value for _, reward in results if reward.metrics["tool_use"]]
    trajectories = [trajectory for segments, _ in results for trajectory in segments]
    return {
        "success_rate": _rounded(rewards),
        "tool_share": round(len(with_tool) / len(rewards), 3),
        "success_with_tool": _rounded(with_tool),
        "tokens_per_episode": _rounded([len(t.token_ids) for t in trajectories]),
        "max_tokens": max(len(t.token_ids) for t in trajectories),
        "actions_per_episode": _rounded([t.num_action_tokens for t in trajectories]),
        "num_prompts": len(rewards),
    }


def write(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, target: Path, record: dict[str, Any]) -> None:
    """The whole directory or none of it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        partial, old = Path(scratch) / "new", Path(scratch) / "old"
        policy.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if target.exists():
            os.replace(target, old)
        os.replace(partial, target)
        shutil.rmtree(old, ignore_errors=True)


def _is_current(target: Path, digest: str) -> bool:
    try:
        record = json.loads((target / RECORD).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return False
    return bool(record.get("digest") == digest)


def _rounded(values: Sequence[float]) -> float:
    return round(sum(values) / max(1, len(values)), 3)


class _Printer:
    """A line now and then: how far, how fast, how long still."""

    def __init__(self, num_updates: int, *, every_s: float = 5.0) -> None:
        self._num_updates = num_updates
        self._every_s = every_s
        self._next_s = 0.0

    def __call__(self, done: int, loss: float, seconds: float) -> None:
        if seconds < self._next_s and done < self._num_updates:
            return
        self._next_s = seconds + self._every_s
        rate = done / seconds
        left_s = (self._num_updates - done) / rate
        print(f"  update {done}/{self._num_updates}  loss {loss:.3f}  {rate:.1f}/s  {left_s:.0f} s left", flush=True)


if __name__ == "__main__":
    sys.exit(main())
