"""The step benchmark compares the same work: its two sides run the same rows, as often, and it says so or stops."""

import argparse
import asyncio
import json
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from megatron_sao.channel import Answer, Command, LocalChannel, Tensors
from megatron_sao.config import ActorConfig
from megatron_sao.controller.clients import ActorClient
from megatron_sao.data.packing import pack
from megatron_sao.megatron.forward import make_micro_batches
from megatron_sao.megatron.parallel import Parallel
from megatron_sao.megatron.platform import Platform
from megatron_sao.megatron.shard import BatchArrays, take_shard
from megatron_sao.types import Batch
from tools.bench import step
from tools.bench.step_grpo import grpo_step
from tools.bench.step_inputs import Size, make_trajectories
from tools.bench.step_records import Work, read_rows, rows_of, write_rows
from tools.bench.step_sleeping import ACTOR_S, CRITIC_S, sleeping_case

TINY = {"layers": 1, "hidden": 128, "vocab": 320, "tokens": 512, "max-tokens-per-micro-batch": 128}
TINY |= {"long-tokens": 128, "long-vocab": 1024, "long-pairs": 1}
SIZE = Size(num_tokens=512, num_layers=1, hidden=128, vocab_size=320, max_tokens_per_micro_batch=128)
CPU = Platform(device=torch.device("cpu"), backend="gloo", transformer_engine=False, fused_weight_gradients=False)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return Batch.of(0, make_trajectories(SIZE))


def turn(seconds: float, **work: int) -> step.Turn:
    return step.Turn(seconds=seconds, cpu_s=seconds, idle_cpu_s=0.0, work=Work(**work), phases={"all_s": seconds})


@pytest.mark.ranks
def test_a_tiny_run_gives_complete_records_of_equal_work_and_leaves_no_process() -> None:
    before = {*psutil.Process().children(recursive=True)}  # other tests have a fork server, which stays
    parser = argparse.ArgumentParser()
    step.add_arguments(parser)
    options = [text for name, value in TINY.items() for text in (f"--{name}", str(value))]
    report = step.run(parser.parse_args(["--pairs", "2", *options]))
    cases = json.loads(json.dumps([dict(case) for case in report.cases], allow_nan=False))
    assert [case["case"] for case in cases] == ["bare_megatron", "long_rows", "grpo_cpu_seconds", "grpo_sleeping"]
    bare, long_rows, cpu, _ = cases
    assert (long_rows["num_tokens"], long_rows["num_micro_batches"]) == (128, 1)
    assert 60 <= long_rows["num_action_tokens"] <= 68  # half
    assert long_rows["met"] == (long_rows["ratio_to_bare_megatron"] >= long_rows["bar"] == 1.2)
    rows, tokens = bare["num_micro_batches"], bare["num_tokens"]
    assert tokens == 512
    assert bare["work"] == {  # K = 2 updates and the values of the critic, one update of the actor
        "num_forwards": 4 * rows,
        "num_backwards": 3 * rows,
        "num_optimizer_steps": 3,
        "num_tokens": 4 * tokens,
    }
    assert len(bare["ratios"]) == bare["num_pairs"] == 2
    assert bare["met"] == (bare["ratio_to_bare_megatron"] >= bare["bar"] == 0.90)
    for phases, seconds in ((bare["sao_phases"], bare["sao_s"]), (bare["bare_phases"], bare["bare_s"])):
        assert {"critic_update_s", "critic_values_s", "actor_update_s"} < set(phases)
        assert 0 < sum(phases.values()) < 2 * seconds
    assert cpu["sao_over_grpo"] > 1
    assert {*psutil.Process().children(recursive=True)} - before == set()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_bare_rows_are_the_rows_that_the_roles_run(batch: Batch, num_ranks: int, tmp_path: Any) -> None:
    names = ("offsets", "token_ids", "is_action", "rollout_logprobs", "version")
    arrays = BatchArrays(**{name: getattr(batch, name) for name in names})
    for micro_batches in pack(batch.lengths, num_ranks=num_ranks, max_tokens=128).ranks:
        shard, _ = take_shard(arrays, micro_batches)
        write_rows(tmp_path / "rows.npz", rows_of(batch, micro_batches))
        rows = read_rows(tmp_path / "rows.npz")
        for row, own in zip(rows, make_micro_batches(shard, {}, parallel=Parallel(), platform=CPU), strict=True):
            np.testing.assert_array_equal(row.token_ids_B, own.token_ids_B)
            np.testing.assert_array_equal(row.actions_a, own.state_index_a + 1)
            np.testing.assert_array_equal(row.segments_B, np.repeat(np.arange(len(own.lengths)), own.lengths))
            np.testing.assert_array_equal(row.positions_B, own.position_ids_B)


def test_a_row_without_a_trajectory_is_one_token_of_padding(batch: Batch) -> None:
    (row,) = rows_of(batch, [()])
    assert (row.token_ids_B.tolist(), row.actions_a.tolist()) == ([0], [])


@pytest.mark.parametrize("bare_first", [False, True])
async def test_sides_with_different_work_are_refused(bare_first: bool) -> None:
    class Fake:
        async def sao(self) -> step.Turn:
            return turn(1.0, num_optimizer_steps=3)

        async def bare_step(self) -> step.Turn:
            return turn(1.0, num_optimizer_steps=2)

    bench: Any = Fake()
    with pytest.raises(RuntimeError, match="different work"):
        await step._pair(bench, bare_first=bare_first)


def test_the_ratio_is_bare_over_sao_and_the_bar_is_on_its_median() -> None:
    pairs = [(turn(10.0), turn(8.0)), (turn(10.0), turn(9.1)), (turn(10.0), turn(9.2))]
    case = step.bare_case(pairs, {})
    assert case["ratio_to_bare_megatron"] == pytest.approx(0.91)
    assert case["met"] is True
    assert step.bare_case(pairs[:1], {})["met"] is False


async def test_a_grpo_step_sends_each_trajectory_its_groups_advantage(batch: Batch) -> None:
    sent: dict[str, Any] = {}

    def fake_actor(command: Command, tensors: Tensors) -> Answer:
        sent[command.name] = {name: np.array(array) for name, array in tensors.items()}
        return Answer()

    actor = ActorClient.of(LocalChannel("actor", fake_actor), ActorConfig(max_tokens_per_micro_batch=128))
    trajectories = make_trajectories(SIZE)
    await grpo_step(batch, ["a"] * len(trajectories), version=0, actor=actor)
    assert list(sent) == ["load_batch", "actor_update", "drop_batch"]
    rewards = np.array([trajectory.reward.sum() for trajectory in trajectories])
    want = (rewards - rewards.mean()) / rewards.std()
    counts = [trajectory.num_action_tokens for trajectory in trajectories]
    np.testing.assert_allclose(sent["actor_update"]["advantages"], np.repeat(want, counts), rtol=1e-5)


async def test_sleeping_roles_overlap_in_the_overlapped_loop_only() -> None:
    case: Any = await asyncio.wait_for(sleeping_case(make_trajectories(SIZE), num_steps=5), 30)
    assert case["grpo_s"] >= ACTOR_S
    assert ACTOR_S <= case["sao_s"] < ACTOR_S + CRITIC_S <= case["serial_s"]
