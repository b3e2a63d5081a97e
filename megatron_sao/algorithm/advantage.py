"""Skip-observation GAE with decoupled, length-adaptive lambdas (arXiv 2607.07508, section 3.2, eq. 4-5).

Axis letters: T all tokens, A action tokens only (trajectory by trajectory, in token order), N trajectories.
Observations carry no value, advantage or target: the recurrence runs over the action tokens alone, so that the last
token of an action bootstraps from the first token of the next one. Everything is accumulated in float64: at 131,072
action tokens 1 - lambda is 5e-6. Values are read at the state before a token is emitted.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from megatron_sao.types import Batch

FloatArray = NDArray[np.float64]


def lambda_policy(alpha: float, num_action_tokens: int) -> float:
    """Length-adaptive lambda of one trajectory: 1 - 1/(alpha * l), l = its action tokens (paper 3.2; l: own choice).

    Raises:
        ValueError: when alpha * l <= 1, where lambda would not be in (0, 1).
    """
    if not alpha * num_action_tokens > 1:
        raise ValueError(
            f"alpha * l = {alpha} * {num_action_tokens} is not above 1: lambda_policy would be "
            f"{1 - 1 / (alpha * num_action_tokens) if num_action_tokens else 'undefined'}; choose a larger alpha"
        )
    return 1.0 - 1.0 / (alpha * num_action_tokens)


def skip_observation_gae(
    rewards_T: NDArray[np.floating],
    values_T: NDArray[np.floating],
    is_action_T: NDArray[np.bool_],
    *,
    gamma: float,
    lam: float,
) -> FloatArray:
    """Advantages [T] of one trajectory, float64, 0 on observations. The end of the trajectory is terminal.

    Values on observations are not read.

    Raises:
        ValueError: a reward on an observation, no action token, or an input that is not finite on an action.
    """
    _check_rewards(rewards_T, is_action_T, "the trajectory")
    if not is_action_T.any():
        raise ValueError("the trajectory has no action token: it has no advantage")
    advantages_T = np.zeros(len(is_action_T), dtype=np.float64)
    advantages_T[is_action_T] = action_gae(rewards_T[is_action_T], values_T[is_action_T], gamma=gamma, lam=lam)
    return advantages_T


def skip_observation_gae_reference(
    rewards_T: NDArray[np.floating],
    values_T: NDArray[np.floating],
    is_action_T: NDArray[np.bool_],
    *,
    gamma: float,
    lam: float,
) -> FloatArray:
    """The same as `skip_observation_gae`, one token at a time, as eq. 4-5 read. For tests and for the reader."""
    advantages_T = np.zeros(len(is_action_T), dtype=np.float64)
    next_value, next_advantage = 0.0, 0.0  # nothing after the terminal
    for t in reversed(range(len(is_action_T))):
        if not is_action_T[t]:
            continue
        delta = float(rewards_T[t]) + gamma * next_value - float(values_T[t])
        next_advantage = delta + gamma * lam * next_advantage
        next_value = float(values_T[t])
        advantages_T[t] = next_advantage
    return advantages_T


def action_gae(
    rewards_A: NDArray[np.floating], values_A: NDArray[np.floating], *, gamma: float, lam: float
) -> FloatArray:
    """Plain GAE [A] over the action tokens of one trajectory, float64."""
    values_A = np.asarray(values_A, dtype=np.float64)
    if not np.isfinite(values_A).all():
        raise ValueError(f"{int((~np.isfinite(values_A)).sum())} values of action tokens are not finite")
    deltas_A = np.asarray(rewards_A, dtype=np.float64) - values_A
    deltas_A[:-1] += gamma * values_A[1:]
    return discounted_sum(deltas_A, gamma * lam)


def discounted_sum(x_A: FloatArray, decay: float) -> FloatArray:
    """y[t] = x[t] + decay * y[t+1] as a first-order recursive filter over the reversed array (float64)."""
    filtered: FloatArray = lfilter([1.0], [1.0, -decay], x_A[::-1])[::-1]
    return filtered


def critic_targets(
    rewards_A: NDArray[np.floating], values_A: NDArray[np.floating] | None, *, gamma: float, lam: float
) -> FloatArray:
    """Regression targets [A] of one trajectory's action tokens: the lambda return, float64.

    With lam = 1 (the default of the method) it is the discounted return and needs no values.

    Raises:
        ValueError: lam < 1 without values.
    """
    if lam == 1.0:
        return discounted_sum(np.asarray(rewards_A, dtype=np.float64), gamma)
    if values_A is None:
        raise ValueError(f"lambda_critic = {lam} is below 1: its targets need values")
    return action_gae(rewards_A, values_A, gamma=gamma, lam=lam) + np.asarray(values_A, dtype=np.float64)


def whiten(advantages_A: FloatArray) -> FloatArray:
    """Mean 0 and standard deviation 1 over the step's action tokens; all-equal advantages become 0."""
    centred = advantages_A - advantages_A.mean()
    deviation = centred.std()
    return centred / deviation if deviation > 0 else np.zeros_like(centred)


def batch_advantages(
    batch: Batch, values_A: NDArray[np.floating], *, gamma: float, alpha: float, whiten_advantages: bool = False
) -> NDArray[np.float32]:
    """Advantages [A] float32 of a batch's action tokens, in the batch's token order, from its values [A].

    Raises:
        ValueError: values of another length or not finite, a reward on an observation, alpha * l <= 1.
    """
    _check_length(values_A, batch, "values")
    parts = [
        action_gae(rewards, values_A[span], gamma=gamma, lam=lambda_policy(alpha, len(rewards)))
        for rewards, span in _trajectories(batch)
    ]
    advantages_A = np.concatenate(parts)
    return (whiten(advantages_A) if whiten_advantages else advantages_A).astype(np.float32)


def batch_targets(
    batch: Batch, values_A: NDArray[np.floating] | None, *, gamma: float, lam: float
) -> NDArray[np.float32]:
    """Critic targets [A] float32 of a batch's action tokens, in the batch's token order; lam = 1 needs no values."""
    if values_A is not None:
        _check_length(values_A, batch, "values")
    parts = [
        critic_targets(rewards, None if values_A is None else values_A[span], gamma=gamma, lam=lam)
        for rewards, span in _trajectories(batch)
    ]
    return np.concatenate(parts).astype(np.float32)


def _trajectories(batch: Batch) -> Iterator[tuple[NDArray[np.float32], slice]]:
    """Rewards [A_n] of each trajectory's actions and its place in the batch's [A] arrays."""
    start = 0
    for index, trajectory_id in enumerate(batch.trajectory_ids):
        tokens = slice(int(batch.offsets[index]), int(batch.offsets[index + 1]))
        is_action = batch.is_action[tokens]
        _check_rewards(batch.reward[tokens], is_action, f"trajectory {trajectory_id}")
        rewards = batch.reward[tokens][is_action]
        if not len(rewards):
            raise ValueError(f"trajectory {trajectory_id} has no action token: it has no advantage")
        yield rewards, slice(start, start + len(rewards))
        start += len(rewards)


def _check_rewards(rewards_T: NDArray[np.floating], is_action_T: NDArray[np.bool_], where: str) -> None:
    astray = np.flatnonzero((np.asarray(rewards_T) != 0) & ~is_action_T)
    if len(astray):
        raise ValueError(
            f"{where}: a reward sits on observation token {astray[0]} ({rewards_T[astray[0]]}); it would reach no "
            "action. Put it on the last token of an action"
        )
    if not np.isfinite(rewards_T).all():
        raise ValueError(f"{where}: a reward is not finite")


def _check_length(array_A: NDArray[np.floating], batch: Batch, what: str) -> None:
    if array_A.shape != (batch.num_action_tokens,):
        raise ValueError(
            f"batch {batch.id}: {what} have shape {array_A.shape} for {batch.num_action_tokens} action tokens"
        )
