"""Records are checked at birth."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from megatron_sao.types import Batch, BatchPlan, Reward, StopReason, Trajectory


def trajectory(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "id": "0" * 32,
        "episode_id": "1" * 32,
        "prompt_id": "p",
        "position": 0,
        "token_ids": np.array([5, 6, 7, 8, 9], np.int32),
        "is_action": np.array([False, True, True, False, True]),
        "rollout_logprobs": np.array([0, -1, -2, 0, -3], np.float32),
        "version": np.array([-1, 0, 0, -1, 1], np.int32),
        "reward": np.array([0, 0, 0, 0, 1], np.float32),
        "turns": ((1, 3), (4, 5)),
        "stop_reason": StopReason.STOP,
        "engine": "e",
        "started_s": 0.0,
        "finished_s": 1.0,
    }
    return Trajectory(**(fields | changes))


def test_a_trajectory_knows_its_actions_and_oldest_version() -> None:
    t = trajectory()
    assert (t.num_action_tokens, t.oldest_version) == (3, 0)
    assert t.with_final_reward(0.5).reward.tolist() == [0, 0, 0, 0, 0.5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": "abc"}, "32 hex"),
        ({"reward": np.zeros(4, np.float32)}, "reward has 4 entries for 5"),
        ({"reward": np.array([0, 0, 0, 1, 0], np.float32)}, "not the last of its action"),
        ({"reward": np.array([0, 1, 0, 0, 0], np.float32)}, "not the last of its action"),
        ({"reward": np.array([0, 0, np.nan, 0, 0], np.float32)}, "not finite"),
        ({"rollout_logprobs": np.array([0, -1, 0.1, 0, -3], np.float32)}, "above 0"),
        ({"rollout_logprobs": np.array([0, -1, -np.inf, 0, -3], np.float32)}, "not finite"),
        ({"rollout_logprobs": np.array([0, -1, -2, -1, -3], np.float32)}, "observation carries"),
        ({"version": np.array([-1, 0, 0, 0, 1], np.int32)}, "observation carries"),
        ({"version": np.array([-1, 0, -1, -1, 1], np.int32)}, "no weight version"),
        ({"turns": ((1, 3),)}, "action spans"),
    ],
)
def test_a_broken_trajectory_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trajectory(**changes)


def test_a_trajectory_needs_a_state_an_action_and_no_trailing_observation() -> None:
    def with_actions(flags: list[bool], turns: tuple[tuple[int, int], ...]) -> None:
        action = np.array(flags)
        trajectory(
            is_action=action,
            turns=turns,
            rollout_logprobs=np.where(action, -1, 0).astype(np.float32),
            version=np.where(action, 0, -1).astype(np.int32),
            reward=np.zeros(5, np.float32),
        )

    with pytest.raises(ValueError, match="no action token"):
        with_actions([False] * 5, ())
    with pytest.raises(ValueError, match="starts with an action"):
        with_actions([True] * 5, ((0, 5),))
    with pytest.raises(ValueError, match="ends with an observation"):
        with_actions([False, True, True, True, False], ((1, 4),))


def test_trajectory_arrays_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        trajectory().token_ids[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        trajectory().engine = "other"  # type: ignore[misc]


def test_a_batch_lays_trajectories_end_to_end() -> None:
    batch = Batch.of(3, (trajectory(), trajectory(id="2" * 32)))
    assert batch.lengths == (5, 5)
    assert batch.num_action_tokens == 6
    assert batch.reward.tolist() == [0, 0, 0, 0, 1] * 2
    with pytest.raises(ValueError, match="no trajectory"):
        Batch.of(3, ())


def test_a_plan_holds_every_trajectory_once_in_equal_numbers_of_micro_batches() -> None:
    assert BatchPlan(ranks=(((0, 2), (1,)), ((3,), ()))).num_micro_batches == 2
    with pytest.raises(ValueError, match="exactly once"):
        BatchPlan(ranks=(((0, 0),),))
    with pytest.raises(ValueError, match="same number"):
        BatchPlan(ranks=(((0,), (1,)), ((2,),)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", True, None])
def test_a_reward_is_a_finite_number(value: Any) -> None:
    with pytest.raises(ValueError, match="finite number"):
        Reward(value=value)
