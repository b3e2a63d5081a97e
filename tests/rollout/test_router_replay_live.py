"""Router replay against a live SGLang: the recorded experts, what they do to the mismatch, and a whole run with it."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from launch.local import run_locally
from launch.run_directory import run_directory
from megatron_sao.config import parse
from megatron_sao.data.routed_experts import RouterShape, expert_file
from megatron_sao.rollout.engine import PauseMode
from megatron_sao.types import Prompt, Reward, Trajectory
from tests.conftest import LiveServer
from tests.launch.test_end_to_end import config_of
from tests.rollout.test_engine_contract import other_model
from tests.support.engines import PROMPT, Sender, live_subject
from tests.support.ranks import run_ranks
from tests.support.replay_bodies import replayed_logprobs
from tests.support.routing_reference import chosen_by_hf
from tests.support.tiny_models import make_tiny_model

__all__ = ["other_model"]
pytestmark = [pytest.mark.live, pytest.mark.ranks, pytest.mark.timeout(600)]
ROUTER = RouterShape(num_layers=2, top_k=2, num_experts=8)
FLIPPING = {"num_hidden_layers": 4, "num_experts": 32, "moe_intermediate_size": 160}  # its experts weigh much
TIES = 2  # rows in which two experts' logits may be closer than rounding
SEEN: list[Trajectory] = []


async def reward(prompt: Prompt, trajectories: tuple[Trajectory, ...]) -> Reward:
    """Mixed, as a random model's must be; the trajectories are kept for the test."""
    SEEN.extend(trajectories)
    return Reward(value=float(trajectories[0].token_ids[-1] % 2))


def num_other_choices(recorded: NDArray[Any], expected: NDArray[np.int16]) -> int:
    """Rows, in any layer, where the two sets of experts differ."""
    return int((np.sort(recorded, axis=-1) != np.sort(expected, axis=-1)).any(axis=(1, 2)).sum())


def mismatches(
    model: Path, dtype: str, directory: Path, router: RouterShape, turns: Iterable[tuple[Any, Any, Any]]
) -> Mapping[str, float]:
    """Mean |log p_train - log p_rollout| over the turns' action tokens, by the router's own choice and with replay.

    `turns`: token ids [T], recorded experts [T-1, ...], rollout log-probs of the last tokens.
    """
    directory.mkdir()
    sequences, logged = {}, {}
    for number, (token_ids, experts, logprobs) in enumerate(turns):
        name = f"{number:032x}"
        np.save(expert_file(directory, name), experts)
        sequences[name], logged[name] = np.asarray(token_ids, np.int32), np.asarray(logprobs)
    (answers,) = run_ranks(1, replayed_logprobs, str(model), dtype, directory, router, sequences)
    own, replayed = zip(*answers, strict=True)
    return {"own": _mean_difference(own, logged.values()), "replayed": _mean_difference(replayed, logged.values())}


def _mean_difference(found: Iterable[Any], wanted: Iterable[Any]) -> float:
    parts = [abs(of[-len(logged) :] - logged) for of, logged in zip(found, wanted, strict=True)]
    return float(np.concatenate(parts).mean())


async def test_in_float32_the_recorded_experts_are_those_of_transformers_and_of_megatron(
    live_server: LiveServer, other_model: Path, tmp_path: Path, record_testsuite_property: Any
) -> None:
    async with live_subject(live_server, other_model, router=ROUTER) as subject:
        prompts = [PROMPT[:3], PROMPT, PROMPT * 3, PROMPT]  # the last one's prefix comes from the cache
        generations = [await subject.generate(120, prompt=prompt) for prompt in prompts]
    assert generations[-1].cached_tokens > 0
    sequences = [np.array([*p, *g.output_ids], np.int32) for p, g in zip(prompts, generations, strict=True)]
    for generation, chosen in zip(generations, chosen_by_hf(live_server.model_path, sequences), strict=True):
        assert generation.routed_experts is not None
        assert num_other_choices(generation.routed_experts, chosen[:-1]) <= TIES
    turns = [(s, g.routed_experts, g.logprobs) for s, g in zip(sequences, generations, strict=True)]
    found = mismatches(live_server.model_path, "float32", tmp_path / "files", ROUTER, turns)
    record_testsuite_property("float32: mean |log p_train - log p_rollout|", found)
    assert max(found.values()) <= 1e-5


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_rows_across_a_switch_of_weights_are_those_of_the_forward_that_sampled_or_missing(
    live_server: LiveServer, other_model: Path, mode: PauseMode
) -> None:
    async with live_subject(live_server, other_model, router=ROUTER) as subject:
        _, turn = subject.start(1000)
        await asyncio.sleep(0.5)
        await subject.engine.pause(mode)
        async with Sender(subject) as sender:
            await subject.engine.begin_update()
            await sender.send(subject.other_weights, version=1, flush=mode == "retract")
            await subject.engine.end_update()
        await subject.engine.resume()
        generation = await turn
    token_ids = np.array([*PROMPT, *generation.output_ids], np.int32)
    switch = len(PROMPT) + generation.versions.index(1) - 1  # the first row under the new weights
    assert switch > len(PROMPT)
    experts = generation.routed_experts
    assert experts is not None
    before, after = experts[:switch], experts[switch:]
    (of_old,), (of_new,) = (chosen_by_hf(path, [token_ids]) for path in (live_server.model_path, other_model))
    if mode == "retract":
        assert (before == ROUTER.missing).all()
        assert num_other_choices(after, of_new[switch:-1]) <= TIES
    else:
        last = 1  # SGLang's scheduler has one step under way at the pause
        assert num_other_choices(before, of_old[:switch]) <= TIES + last
        assert not (after == ROUTER.missing).any()


async def test_in_bfloat16_a_run_replays_the_engines_choice_and_its_mismatch_falls(
    tmp_path: Path, record_testsuite_property: Any
) -> None:
    model = make_tiny_model(tmp_path / "model", dtype=torch.bfloat16, **FLIPPING)
    router = RouterShape.of(json.loads((model / "config.json").read_text()))
    data = config_of(model, tmp_path / "run", num_steps=2).model_dump()
    data["model"]["dtype"] = "bfloat16"
    data["actor"]["router_replay"] = True
    data["rollout"]["reward"] = "tests.rollout.test_router_replay_live:reward"
    SEEN.clear()
    config = parse(data, source="test")
    with run_directory(config) as directory:
        await run_locally(config, directory)
        assert not list(directory.rglob("*.npy"))
    records = [json.loads(line) for line in (directory / "metrics.jsonl").open()]
    for record in records:
        lasts = record["rollout/num_trajectories"] / record["rollout/tokens"]
        assert record["policy/replay_missing_fraction"] == pytest.approx(lasts)
        assert record["policy/grad_norm"] > 0
    trained = [t for t in SEEN if t.routed_experts is not None]
    assert 0 < len(trained) < len(SEEN)  # nobody asks for those of an evaluation
    start = [t for t in trained if (t.version[t.is_action] == 0).all()]
    turns = [(t.token_ids, t.routed_experts, t.rollout_logprobs[t.is_action]) for t in start]
    found = mismatches(model, "bfloat16", tmp_path / "files", router, turns)
    record_testsuite_property("bfloat16: mean |log p_train - log p_rollout|", found)
    record_testsuite_property("bfloat16: policy/mismatch_kl by step", [r["policy/mismatch_kl"] for r in records])
    assert found["replayed"] < 0.5 * found["own"]
