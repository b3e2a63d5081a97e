"""Skip-observation GAE: against an independent loop, and what must not move it."""

import numpy as np
import pytest

from megatron_sao.algorithm.advantage import (
    batch_advantages,
    batch_targets,
    critic_targets,
    lambda_policy,
    skip_observation_gae,
    skip_observation_gae_reference,
    whiten,
)
from megatron_sao.types import Batch

GAMMA, ALPHA = 0.97, 1.5


def make_batch(actions: list[list[bool]], rewards: list[list[float]]) -> Batch:
    lengths = [len(a) for a in actions]
    is_action = np.concatenate([np.array(a, dtype=bool) for a in actions])
    return Batch(
        id=1,
        trajectory_ids=tuple(f"{n:032x}" for n in range(len(actions))),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        token_ids=np.arange(sum(lengths), dtype=np.int32),
        is_action=is_action,
        rollout_logprobs=np.where(is_action, -1.0, 0.0).astype(np.float32),
        version=np.where(is_action, 0, -1).astype(np.int32),
        reward=np.concatenate([np.array(r, dtype=np.float32) for r in rewards]),
    )


def double_sum(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """A_t = sum_k (gamma lam)^k delta_{t+k}, written as the definition, with no recursion."""
    n = len(rewards)
    after = np.append(values[1:], 0.0)
    deltas = rewards + gamma * after - values
    return np.array([sum((gamma * lam) ** k * deltas[t + k] for k in range(n - t)) for t in range(n)])


def test_advantages_equal_the_defining_sum_and_the_readable_reference() -> None:
    rng = np.random.default_rng(0)
    is_action = np.array([0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 1], dtype=bool)
    rewards = np.where([0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 1], rng.normal(size=11), 0.0)
    values = rng.normal(size=11)
    got = skip_observation_gae(rewards, values, is_action, gamma=GAMMA, lam=0.9)
    assert got.dtype == np.float64
    np.testing.assert_allclose(
        got[is_action], double_sum(rewards[is_action], values[is_action], GAMMA, 0.9), rtol=0, atol=1e-13
    )
    reference = skip_observation_gae_reference(rewards, values, is_action, gamma=GAMMA, lam=0.9)
    np.testing.assert_allclose(got, reference, rtol=0, atol=1e-13)
    assert not got[~is_action].any()


def test_one_hand_worked_boundary_skips_the_observation() -> None:
    # a0 | o | a1, gamma 1, lambda 1/2: A(a1) = 1 - 0.4 = 0.6; A(a0) = 0 + 0.4 - 0.2 + 0.5 * 0.6 = 0.5
    got = skip_observation_gae(
        np.array([0.0, 0.0, 0.0, 1.0]),
        np.array([7.0, 0.2, 9.0, 0.4]),
        np.array([False, True, False, True]),
        gamma=1.0,
        lam=0.5,
    )
    np.testing.assert_allclose(got, [0.0, 0.5, 0.0, 0.6], atol=1e-15)


def test_observations_do_not_move_advantages() -> None:
    rng = np.random.default_rng(1)
    rewards, values = np.array([0.0, 0.0, 0.5, 0.0, 1.0]), rng.normal(size=5)
    without = skip_observation_gae(rewards, values, np.ones(5, dtype=bool), gamma=1.0, lam=0.8)
    where = np.array([2, 3, 4, 7, 9])  # the same actions with observations in front of and between them
    is_action = np.zeros(10, dtype=bool)
    is_action[where] = True
    spread_rewards, spread_values = np.zeros(10), rng.normal(size=10) * 100
    spread_rewards[where], spread_values[where] = rewards, values
    got = skip_observation_gae(spread_rewards, spread_values, is_action, gamma=1.0, lam=0.8)
    np.testing.assert_array_equal(got[is_action], without)


def test_lambda_one_advantages_are_return_minus_value_and_targets_are_the_return() -> None:
    values = np.random.default_rng(2).normal(size=6)
    rewards = np.array([0, 0, 0, 0, 0, 0.75])
    got = skip_observation_gae(rewards, values, np.ones(6, dtype=bool), gamma=1.0, lam=1.0)
    np.testing.assert_allclose(got, 0.75 - values, atol=1e-14)
    np.testing.assert_array_equal(critic_targets(rewards, None, gamma=1.0, lam=1.0), np.full(6, 0.75))
    below_one = critic_targets(rewards, values, gamma=GAMMA, lam=0.9)
    np.testing.assert_allclose(below_one, double_sum(rewards, values, GAMMA, 0.9) + values, atol=1e-13)


def test_lambda_adapts_to_the_length_of_each_trajectory() -> None:
    batch = make_batch([[False, True, True], [False, True, False, True, True]], [[0, 0, 1], [0, 0.5, 0, 0, 1]])
    values = np.random.default_rng(3).normal(size=5)
    got = batch_advantages(batch, values, gamma=GAMMA, alpha=ALPHA)
    first = double_sum(np.array([0.0, 1.0]), values[:2], GAMMA, 1 - 1 / (1.5 * 2))
    second = double_sum(np.array([0.5, 0.0, 1.0]), values[2:], GAMMA, 1 - 1 / (1.5 * 3))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, np.concatenate([first, second]), rtol=1e-6)
    np.testing.assert_allclose(batch_targets(batch, None, gamma=1.0, lam=1.0), [1, 1, 1.5, 1, 1])


def test_the_order_of_trajectories_does_not_change_their_advantages() -> None:
    actions, rewards = [[False, True, True], [False, True]], [[0.0, 0, 1], [0.0, 0.25]]
    values = np.array([0.1, 0.2, 0.3])
    forward = batch_advantages(make_batch(actions, rewards), values, gamma=1.0, alpha=ALPHA)
    swapped = make_batch(actions[::-1], rewards[::-1])
    backward = batch_advantages(swapped, values[[2, 0, 1]], gamma=1.0, alpha=ALPHA)
    np.testing.assert_array_equal(forward, backward[[1, 2, 0]])


def test_float64_keeps_the_signal_at_131072_tokens() -> None:
    n = 131_072
    lam = lambda_policy(ALPHA, n)
    got = skip_observation_gae(np.append(np.zeros(n - 1), 1.0), np.zeros(n), np.ones(n, dtype=bool), gamma=1.0, lam=lam)
    assert got[0] == pytest.approx(lam ** (n - 1), rel=1e-10)  # exp(-1/1.5) = 0.513, not 0 and not 1
    assert got[0] == pytest.approx(np.exp(-1 / 1.5), rel=1e-4)


def test_a_reward_on_an_observation_is_refused() -> None:
    batch = make_batch([[False, True, False, True]], [[0, 0, 1, 0]])
    with pytest.raises(ValueError, match="observation token 2"):
        batch_advantages(batch, np.zeros(2), gamma=1.0, alpha=ALPHA)
    with pytest.raises(ValueError, match="observation token 2"):
        batch_targets(batch, None, gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match="observation token 0"):
        skip_observation_gae(np.array([1.0, 0.0]), np.zeros(2), np.array([False, True]), gamma=1.0, lam=1.0)


def test_alpha_times_length_must_exceed_one() -> None:
    assert lambda_policy(1.5, 1) == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="alpha"):
        lambda_policy(1.0, 1)
    with pytest.raises(ValueError, match="alpha"):
        batch_advantages(make_batch([[False, True]], [[0, 1]]), np.zeros(1), gamma=1.0, alpha=0.5)


def test_values_of_the_wrong_length_or_not_finite_are_refused() -> None:
    batch = make_batch([[False, True, True]], [[0, 0, 1]])
    with pytest.raises(ValueError, match="2 action tokens"):
        batch_advantages(batch, np.zeros(3), gamma=1.0, alpha=ALPHA)
    with pytest.raises(ValueError, match="not finite"):
        batch_advantages(batch, np.array([np.nan, 0.0]), gamma=1.0, alpha=ALPHA)
    with pytest.raises(ValueError, match="need values"):
        batch_targets(batch, None, gamma=1.0, lam=0.9)


def test_whitening_gives_mean_0_and_deviation_1_over_the_step() -> None:
    got = whiten(np.array([1.0, 2.0, 6.0]))
    assert got.mean() == pytest.approx(0)
    assert got.std() == pytest.approx(1)
    np.testing.assert_array_equal(whiten(np.full(3, 2.0)), np.zeros(3))
    batch = make_batch([[False, True, True], [False, True]], [[0.0, 0, 1], [0.0, 0.25]])
    got = batch_advantages(batch, np.zeros(3), gamma=1.0, alpha=ALPHA, whiten_advantages=True)
    assert got.mean() == pytest.approx(0, abs=1e-6)
    assert got.std() == pytest.approx(1, abs=1e-6)
