"""Policy losses: direct double-sided importance sampling, and PPO's clip for the baselines. Sums, never means.

Axis letter: A action tokens. The caller divides the sum by the *global* number of action tokens of the step (all ranks,
all micro-batches, rejected tokens included), so that no packing or layout changes the gradient.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TrustRegion:
    """Where a ratio is trusted: (1 - eps_low, 1 + eps_high), both ends excluded. The epsilons are distances from 1.

    >>> str(TrustRegion(eps_low=0.3, eps_high=5.0))
    '(0.7, 6)'
    """

    eps_low: float
    eps_high: float

    def __post_init__(self) -> None:
        if not 0 < self.eps_low < 1:
            raise ValueError(f"eps_low = {self.eps_low} is not in (0, 1): it is a distance below 1, 0.3 means r > 0.7")
        if not 0 < self.eps_high < math.inf:
            raise ValueError(f"eps_high = {self.eps_high} is not above 0: it is a distance above 1, 5 means r < 6")

    def __str__(self) -> str:
        return f"({1 - self.eps_low:g}, {1 + self.eps_high:g})"

    @property
    def log_low(self) -> float:
        return math.log1p(-self.eps_low)

    @property
    def log_high(self) -> float:
        return math.log1p(self.eps_high)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trust:
    """What became of each token's ratio r = exp(log_ratio). Exactly one of the four masks is true per token."""

    log_ratio_A: Tensor  # float32, detached, 0 where it is not finite
    trusted_A: Tensor  # bool
    low_A: Tensor  # bool: r <= 1 - eps_low
    high_A: Tensor  # bool: r >= 1 + eps_high
    nonfinite_A: Tensor  # bool


def trust(logprobs_A: Tensor, rollout_logprobs_A: Tensor, region: TrustRegion) -> Trust:
    """Compare the ratios with the trust region in log space, in float32, with strict bounds (eq. 2)."""
    log_ratio = logprobs_A.detach().float() - rollout_logprobs_A.float()
    finite = torch.isfinite(log_ratio)
    log_ratio = torch.where(finite, log_ratio, 0.0)
    low = finite & (log_ratio <= region.log_low)
    high = finite & (log_ratio >= region.log_high)
    return Trust(log_ratio_A=log_ratio, trusted_A=finite & ~low & ~high, low_A=low, high_A=high, nonfinite_A=~finite)


def dis_loss(
    logprobs_A: Tensor, rollout_logprobs_A: Tensor, advantages_A: Tensor, *, region: TrustRegion
) -> tuple[Tensor, Trust]:
    """Direct double-sided importance sampling (arXiv 2607.07508, eq. 1-3), summed over the tokens given.

    loss = sum of -stopgrad(f(r) * A) * logp, so the gradient with respect to logp is exactly -f(r) * A, and exactly 0
    for a token outside the region or without a finite ratio (`where` acts on the inputs: 0 x -inf never appears).

    Args:
        logprobs_A: float, log-prob of each action token under the weights being trained, with its graph.
        rollout_logprobs_A: float, what the engine logged when it sampled the token.
        advantages_A: float.
        region: where a ratio is trusted.
    """
    found = trust(logprobs_A, rollout_logprobs_A, region)
    logprobs = torch.where(found.trusted_A, logprobs_A.float(), 0.0)
    ratio = torch.exp(torch.where(found.trusted_A, found.log_ratio_A, 0.0))
    weight = torch.where(found.trusted_A, ratio * advantages_A.float(), 0.0).detach()
    return -(weight * logprobs).sum(), found


def ppo_clip_loss(
    logprobs_A: Tensor, old_logprobs_A: Tensor, advantages_A: Tensor, *, region: TrustRegion
) -> tuple[Tensor, Trust]:
    """PPO's pessimistic clip, a baseline: sum of -min(r * A, clip(r) * A). Tokens without a finite ratio cost 0."""
    found = trust(logprobs_A, old_logprobs_A, region)
    logprobs = torch.where(found.nonfinite_A, 0.0, logprobs_A.float())
    old = torch.where(found.nonfinite_A, 0.0, old_logprobs_A.float())
    advantages = torch.where(found.nonfinite_A, 0.0, advantages_A.float())
    ratio = torch.exp(logprobs - old)
    clipped = ratio.clamp(1 - region.eps_low, 1 + region.eps_high)
    return -torch.minimum(ratio * advantages, clipped * advantages).sum(), found
