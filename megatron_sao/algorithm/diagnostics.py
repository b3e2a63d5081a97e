"""Diagnostics of an update from sums that merge over micro-batches and ranks before any ratio is taken.

A micro-batch gives `policy_sums` / `value_sums`: one float64 tensor per name in a fixed order. Sums add, maxima take
the maximum; `finish_policy` / `finish_value` turn the merged numbers into published metrics. No `.item()` before that.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_sao.algorithm.policy_loss import Trust
from megatron_sao.metrics import Metric, Reduction, mean

MAX_LOG_RATIO = 60.0
"""log r is held within +-60 in the statistics of the unmasked ratio, so that r^2 stays finite in float64."""

CLOSE, EQUAL = 1e-3, 1e-5
"""|log r| of a lag-0 token, nats: what float32 on both sides keeps to, and what its median keeps to."""

POLICY_SUMS = (
    "tokens",
    "loss",
    "rejected_low",
    "rejected_high",
    "rejected_nonfinite",
    "fresh_tokens",  # of lag 0, with a finite ratio
    "mismatch",
    "fresh_close",  # of them, with |log r| <= CLOSE
    "fresh_equal",  # of them, with |log r| <= EQUAL
    "finite_tokens",
    "drift",
    "trusted_tokens",
    "weight",  # sum of f(r)
    "weight_squared",
    "ratio",  # sum of r, unmasked
    "ratio_squared",
    "entropy",
    "lag",
)
POLICY_MAXIMA = ("ratio_max", "lag_max")

VALUE_SUMS = ("tokens", "loss", "target", "target_squared", "error", "error_squared")
VALUE_MAXIMA = ("target_max", "minus_target_min")


def policy_sums(found: Trust, loss: Tensor, *, entropy_A: Tensor, lag_A: Tensor) -> dict[str, Tensor]:
    """Sums [] float64 under POLICY_SUMS and POLICY_MAXIMA of one micro-batch; no token gives zeros.

    Args:
        found: what became of the ratios (policy_loss.trust).
        loss: the summed loss.
        entropy_A: entropy of the distribution each action token was drawn from, nats.
        lag_A: version being trained from minus the version that sampled the token.
    """
    finite = ~found.nonfinite_A
    log_ratio = found.log_ratio_A.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = torch.where(finite, torch.exp(log_ratio), 0.0)
    weight = torch.where(found.trusted_A, ratio, 0.0)
    divergence = torch.where(finite, torch.expm1(log_ratio) - log_ratio, 0.0)
    fresh = finite & (lag_A == 0)
    return {
        "tokens": _count(torch.ones_like(finite)),
        "loss": loss.detach().double(),
        "rejected_low": _count(found.low_A),
        "rejected_high": _count(found.high_A),
        "rejected_nonfinite": _count(found.nonfinite_A),
        "fresh_tokens": _count(fresh),
        "mismatch": torch.where(fresh, divergence, 0.0).sum(),
        "fresh_close": _count(fresh & (log_ratio.abs() <= CLOSE)),
        "fresh_equal": _count(fresh & (log_ratio.abs() <= EQUAL)),
        "finite_tokens": _count(finite),
        "drift": divergence.sum(),
        "trusted_tokens": _count(found.trusted_A),
        "weight": weight.sum(),
        "weight_squared": (weight * weight).sum(),
        "ratio": ratio.sum(),
        "ratio_squared": (ratio * ratio).sum(),
        "entropy": entropy_A.detach().double().sum(),
        "lag": lag_A.double().sum(),
        "ratio_max": _maximum(weight),
        "lag_max": _maximum(lag_A.double()),
    }


def finish_policy(merged: Mapping[str, float]) -> dict[str, Metric]:
    """Published policy/* and lag/* metrics from the sums of the whole step. Weight 0 says: no such token."""
    tokens, trusted = merged["tokens"], merged["trusted_tokens"]
    return {
        "policy/loss": mean(merged["loss"], tokens),
        "policy/rejected_low_fraction": mean(merged["rejected_low"], tokens),
        "policy/rejected_high_fraction": mean(merged["rejected_high"], tokens),
        "policy/rejected_nonfinite_fraction": mean(merged["rejected_nonfinite"], tokens),
        "policy/mismatch_kl": mean(merged["mismatch"], merged["fresh_tokens"]),
        "policy/mismatch_within_1e-3_fraction": mean(merged["fresh_close"], merged["fresh_tokens"]),
        "policy/mismatch_within_1e-5_fraction": mean(merged["fresh_equal"], merged["fresh_tokens"]),
        "policy/drift_kl": mean(merged["drift"], merged["finite_tokens"]),
        "policy/ess": _effective_sample_size(merged["weight"], merged["weight_squared"], tokens),
        "policy/ess_unmasked": _effective_sample_size(merged["ratio"], merged["ratio_squared"], tokens),
        "policy/ratio_mean": mean(merged["weight"], trusted),
        "policy/ratio_max": Metric(merged["ratio_max"] if trusted else 0.0, trusted, Reduction.MAX),
        "policy/entropy": mean(merged["entropy"], tokens),
        "lag/mean": mean(merged["lag"], tokens),
        "lag/max": Metric(merged["lag_max"] if tokens else 0.0, tokens, Reduction.MAX),
    }


def value_sums(values_A: Tensor, targets_A: Tensor, loss: Tensor) -> dict[str, Tensor]:
    """Sums [] float64 under VALUE_SUMS and VALUE_MAXIMA of one micro-batch."""
    targets = targets_A.double()
    error = targets - values_A.detach().double()
    return {
        "tokens": _count(torch.ones_like(targets, dtype=torch.bool)),
        "loss": loss.detach().double(),
        "target": targets.sum(),
        "target_squared": (targets * targets).sum(),
        "error": error.sum(),
        "error_squared": (error * error).sum(),
        "target_max": _maximum(targets),
        "minus_target_min": _maximum(-targets),
    }


def finish_value(merged: Mapping[str, float]) -> dict[str, Metric]:
    """critic/loss and critic/explained_variance = 1 - Var(R - V) / Var(R); absent when all targets are equal."""
    tokens = merged["tokens"]
    defined = tokens > 0 and merged["target_max"] > -merged["minus_target_min"]
    explained = 0.0
    if defined:
        unexplained = merged["error_squared"] / tokens - (merged["error"] / tokens) ** 2
        explained = 1.0 - unexplained / (merged["target_squared"] / tokens - (merged["target"] / tokens) ** 2)
    return {
        "critic/loss": mean(merged["loss"], tokens),
        "critic/explained_variance": Metric(explained, tokens if defined else 0.0),
    }


def _effective_sample_size(total: float, total_squared: float, tokens: float) -> Metric:
    """(sum w)^2 / (N sum w^2), N = all action tokens; absent when every weight is 0."""
    if not total_squared:
        return Metric(0.0, 0.0)
    return Metric(total * total / (tokens * total_squared), tokens)


def _count(mask: Tensor) -> Tensor:
    return mask.double().sum()


def _maximum(x: Tensor) -> Tensor:
    """Largest element, -inf where there is none."""
    return torch.cat([x.new_full((1,), -math.inf), x]).max()
