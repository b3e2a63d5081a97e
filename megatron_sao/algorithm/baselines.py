"""Advantages of baselines: running mean and group (docs/method.md). One number per trajectory.

They take the place of the critic: every action token of a trajectory gets the trajectory's advantage.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class RunningMean:
    """A = r - mean of the last `window` rewards seen before this one (0 while there is none).

    >>> mean = RunningMean(window=2)
    >>> [mean.advantage(reward) for reward in (1.0, 0.0, 1.0, 1.0)]
    [1.0, -1.0, 0.5, 0.5]
    """

    def __init__(self, window: int) -> None:
        if window < 1:
            raise ValueError(f"a running mean needs a window >= 1, not {window}")
        self._rewards: deque[float] = deque(maxlen=window)

    def advantage(self, reward: float) -> float:
        baseline = sum(self._rewards) / len(self._rewards) if self._rewards else 0.0
        self._rewards.append(reward)
        return reward - baseline


def group_advantages(
    rewards_N: NDArray[np.floating], groups_N: Sequence[str], *, divide_by_deviation: bool = True
) -> NDArray[np.float64]:
    """GRPO: A = (r - group mean) / group standard deviation, [N] float64; 0 where a group is all equal."""
    rewards = np.asarray(rewards_N, dtype=np.float64)
    names = np.asarray(groups_N)
    advantages = np.zeros_like(rewards)
    for name in dict.fromkeys(groups_N):
        members = names == name
        centred = rewards[members] - rewards[members].mean()
        deviation = centred.std() if divide_by_deviation else 1.0
        advantages[members] = centred / deviation if deviation > 0 else 0.0
    return advantages


def per_action_token(advantages_N: NDArray[np.floating], num_action_tokens_N: Sequence[int]) -> NDArray[np.float32]:
    """Spread one advantage per trajectory [N] over its action tokens, [A] float32 in batch order."""
    return np.repeat(np.asarray(advantages_N), num_action_tokens_N).astype(np.float32)
