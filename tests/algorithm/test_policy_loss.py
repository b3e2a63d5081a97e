"""DIS, value loss, baselines, diagnostics: against numpy float64 loops, and the gradients they must have."""

import math

import numpy as np
import pytest
import torch

from megatron_sao.algorithm.baselines import RunningMean, group_advantages, per_action_token
from megatron_sao.algorithm.diagnostics import (
    POLICY_MAXIMA,
    POLICY_SUMS,
    VALUE_MAXIMA,
    VALUE_SUMS,
    finish_policy,
    finish_value,
    policy_sums,
    value_sums,
)
from megatron_sao.algorithm.policy_loss import TrustRegion, dis_loss, ppo_clip_loss, trust
from megatron_sao.algorithm.value_loss import value_loss
from megatron_sao.metrics import merge

REGION = TrustRegion(eps_low=0.3, eps_high=5.0)


def random_tokens(n: int = 200, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(1.0, n)
    logprobs = np.minimum(rollout + rng.normal(0, 1.2, n), -1e-3)  # plenty of tokens on both sides of the region
    return tuple(torch.tensor(x, dtype=torch.float32) for x in (logprobs, rollout, rng.normal(size=n)))


def reference_dis(logprobs: np.ndarray, rollout: np.ndarray, advantages: np.ndarray) -> tuple[float, np.ndarray]:
    """Token by token in float64: the loss and its gradient with respect to each log-prob."""
    loss, gradient = 0.0, np.zeros(len(logprobs))
    for t in range(len(logprobs)):
        ratio = math.exp(float(logprobs[t]) - float(rollout[t]))
        if 0.7 < ratio < 6.0:
            gradient[t] = -ratio * float(advantages[t])
            loss += gradient[t] * float(logprobs[t])
    return loss, gradient


def test_dis_equals_a_float64_loop_and_its_gradient_is_minus_f_of_r_times_a() -> None:
    logprobs, rollout, advantages = random_tokens()
    logprobs.requires_grad_()
    loss, found = dis_loss(logprobs, rollout, advantages, region=REGION)
    (loss / len(logprobs)).backward()
    want, gradient = reference_dis(logprobs.detach().numpy(), rollout.numpy(), advantages.numpy())
    scale = np.abs(gradient * logprobs.detach().numpy()).sum()
    assert abs(loss.item() - want) <= 1e-6 * scale
    np.testing.assert_allclose(logprobs.grad.numpy(), gradient / 200, rtol=2e-6, atol=0)
    assert found.low_A.any()
    assert found.high_A.any()
    assert found.trusted_A.any()


def test_bounds_are_strict_and_epsilon_is_a_distance_from_one() -> None:
    rollout = torch.full((6,), -3.0)
    low, high = torch.tensor(math.log(0.7)), torch.tensor(math.log(6.0))
    tiny = 1e-6
    logprobs = rollout + torch.stack([low, low + tiny, low - tiny, high, high - 2 * tiny, high + 2 * tiny])
    # the sums -3 + x are rounded, so compare what the ratio really is
    log_ratio = logprobs - rollout
    found = trust(logprobs, rollout, REGION)
    want = (log_ratio > REGION.log_low) & (log_ratio < REGION.log_high)
    assert found.trusted_A.tolist() == want.tolist()
    exact = trust(torch.tensor([REGION.log_low, REGION.log_high]), torch.zeros(2), REGION)
    assert not exact.trusted_A.any()
    assert exact.low_A.tolist() == [True, False]
    assert exact.high_A.tolist() == [False, True]
    inside = trust(torch.tensor([math.log(0.71), math.log(5.99), math.log(0.5)]), torch.zeros(3), REGION)
    assert inside.trusted_A.tolist() == [True, True, False]
    assert str(REGION) == "(0.7, 6)"


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1.0, 1.0), (0.3, 0.0), (-0.1, 1), (0.3, math.inf)])
def test_epsilons_out_of_range_are_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="eps_"):
        TrustRegion(eps_low=low, eps_high=high)


def test_masked_tokens_cost_exactly_zero_whatever_their_numbers() -> None:
    inf = float("inf")
    logprobs = torch.tensor([-inf, -50.0, -0.1, float("nan"), -1.0], requires_grad=True)
    rollout = torch.tensor([-1.0, -1.0, -9.0, -1.0, -inf])
    advantages = torch.tensor([inf, 3.0, -2.0, 1.0, float("nan")])
    loss, found = dis_loss(logprobs, rollout, advantages, region=REGION)
    loss.backward()
    assert loss.item() == 0.0
    assert logprobs.grad.tolist() == [0.0] * 5
    assert found.nonfinite_A.tolist() == [True, False, False, True, True]
    assert found.low_A.tolist() == [False, True, False, False, False]
    assert found.high_A.tolist() == [False, False, True, False, False]


def test_no_nan_reaches_the_logits_of_a_masked_token() -> None:
    logits = torch.tensor([[0.0, -float("inf"), 1.0], [0.5, 0.2, 0.1]], requires_grad=True)
    logprobs = torch.log_softmax(logits, -1)[torch.arange(2), torch.tensor([1, 0])]
    loss, _ = dis_loss(logprobs, torch.tensor([-1.0, -1.0]), torch.ones(2), region=REGION)
    loss.backward()
    assert torch.isfinite(logits.grad).all()
    assert not logits.grad[0].any()
    assert logits.grad[1].any()


def test_the_split_and_order_of_tokens_do_not_change_the_loss() -> None:
    logprobs, rollout, advantages = (x.double() for x in random_tokens())
    whole, _ = dis_loss(logprobs, rollout, advantages, region=REGION)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    parts = [dis_loss(logprobs[i], rollout[i], advantages[i], region=REGION)[0] for i in order.split(37)]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), abs=1e-4)


def test_no_token_costs_zero_and_keeps_its_graph() -> None:
    logprobs = torch.zeros(0, requires_grad=True)
    loss, found = dis_loss(logprobs, torch.zeros(0), torch.zeros(0), region=REGION)
    loss.backward()
    sums = policy_sums(found, loss, entropy_A=torch.zeros(0), lag_A=torch.zeros(0, dtype=torch.int64))
    assert loss.item() == 0.0
    assert all(sums[name].item() == 0 for name in POLICY_SUMS)
    published = merge([finish_policy({name: tensor.item() for name, tensor in sums.items()})])
    assert set(published.values()) == {None}


def test_diagnostics_equal_numpy_and_merge_over_any_split() -> None:
    logprobs, rollout, advantages = random_tokens(seed=3)
    lag = torch.tensor(np.random.default_rng(3).integers(0, 3, 200))
    entropy = torch.rand(200, generator=torch.Generator().manual_seed(2))

    def sums(i: torch.Tensor) -> dict[str, float]:
        loss, found = dis_loss(logprobs[i], rollout[i], advantages[i], region=REGION)
        return {k: v.item() for k, v in policy_sums(found, loss, entropy_A=entropy[i], lag_A=lag[i]).items()}

    parts = [sums(i) for i in torch.arange(200).split(33)]
    merged = {k: (max if k in POLICY_MAXIMA else sum)(p[k] for p in parts) for k in POLICY_SUMS + POLICY_MAXIMA}
    got = merge([finish_policy(merged)])
    log_ratio = (logprobs - rollout).numpy().astype(np.float64)
    r = np.exp(log_ratio)
    weight = np.where((r > 0.7) & (r < 6), r, 0.0)
    fresh = lag.numpy() == 0
    want = {
        "policy/rejected_low_fraction": (r <= 0.7).mean(),
        "policy/rejected_high_fraction": (r >= 6).mean(),
        "policy/rejected_nonfinite_fraction": 0.0,
        "policy/mismatch_kl": (r - 1 - log_ratio)[fresh].mean(),
        "policy/drift_kl": (r - 1 - log_ratio).mean(),
        "policy/ess": weight.sum() ** 2 / (200 * (weight**2).sum()),
        "policy/ess_unmasked": r.sum() ** 2 / (200 * (r**2).sum()),
        "policy/ratio_mean": weight[weight > 0].mean(),
        "policy/ratio_max": weight.max(),
        "policy/entropy": entropy.mean().item(),
        "lag/mean": lag.double().mean().item(),
        "lag/max": 2.0,
    }
    for key, value in want.items():
        assert got[key] == pytest.approx(value, rel=1e-5), key


def test_mismatch_is_absent_when_no_token_is_fresh() -> None:
    logprobs, rollout, advantages = random_tokens()
    loss, found = dis_loss(logprobs, rollout, advantages, region=REGION)
    sums = policy_sums(found, loss, entropy_A=torch.zeros(200), lag_A=torch.ones(200, dtype=torch.int64))
    published = merge([finish_policy({name: tensor.item() for name, tensor in sums.items()})])
    assert published["policy/mismatch_kl"] is None
    assert published["policy/drift_kl"] > 0


def test_unbounded_ratios_keep_the_metrics_finite() -> None:
    logprobs, rollout = torch.tensor([-1.0, -1.0]), torch.tensor([-1e30, -1.0])
    loss, found = dis_loss(logprobs, rollout, torch.ones(2), region=REGION)
    sums = policy_sums(found, loss, entropy_A=torch.zeros(2), lag_A=torch.zeros(2, dtype=torch.int64))
    published = merge([finish_policy({name: tensor.item() for name, tensor in sums.items()})])
    assert all(value is not None and math.isfinite(value) for value in published.values())
    assert published["policy/rejected_high_fraction"] == 0.5


def explained(values: np.ndarray, targets: np.ndarray, split: int) -> dict[str, float | None]:
    pairs = list(zip(torch.tensor(values).split(split), torch.tensor(targets).split(split), strict=True))
    parts = [{k: t.item() for k, t in value_sums(v, r, value_loss(v, r)).items()} for v, r in pairs]
    merged = {k: (max if k in VALUE_MAXIMA else sum)(p[k] for p in parts) for k in VALUE_SUMS + VALUE_MAXIMA}
    return merge([finish_value(merged)])


def test_value_loss_and_explained_variance_do_not_depend_on_the_split() -> None:
    rng = np.random.default_rng(4)
    targets = rng.normal(size=50)
    values = 0.5 * targets + 0.3 * rng.normal(size=50) + 2.0
    for split in (50, 7):
        got = explained(values, targets, split)
        assert got["critic/loss"] == pytest.approx(((values - targets) ** 2).mean(), rel=1e-6)
        assert got["critic/explained_variance"] == pytest.approx(1 - np.var(targets - values) / np.var(targets))


def test_explained_variance_is_absent_when_all_targets_are_equal() -> None:
    got = explained(np.random.default_rng(5).normal(size=10), np.full(10, 0.1), 4)
    assert got["critic/explained_variance"] is None
    assert got["critic/loss"] > 0


def test_value_loss_has_the_gradient_of_a_squared_error() -> None:
    values = torch.tensor([0.5, -1.0], requires_grad=True)
    value_loss(values, torch.tensor([1.0, 1.0])).backward()
    assert values.grad.tolist() == [-1.0, -4.0]


def test_ppo_clip_equals_a_float64_loop() -> None:
    logprobs, old, advantages = random_tokens(seed=6)
    logprobs.requires_grad_()
    loss, _ = ppo_clip_loss(logprobs, old, advantages, region=TrustRegion(eps_low=0.2, eps_high=0.28))
    loss.backward()
    want, gradient = 0.0, []
    for lp, o, a in zip(logprobs.tolist(), old.tolist(), advantages.tolist(), strict=True):
        r = math.exp(lp - o)
        clipped = min(max(r, 0.8), 1.28)
        want -= min(r * a, clipped * a)
        gradient.append(-r * a if r * a <= clipped * a else 0.0)
    assert loss.item() == pytest.approx(want, rel=1e-5)
    np.testing.assert_allclose(logprobs.grad.numpy(), gradient, rtol=1e-5, atol=1e-6)


def test_group_advantages_are_zero_in_a_group_without_contrast() -> None:
    got = group_advantages(np.array([1.0, 0.0, 1.0, 1.0]), ["a", "a", "b", "b"])
    np.testing.assert_allclose(got, [1.0, -1.0, 0.0, 0.0])
    np.testing.assert_array_equal(per_action_token(got[:2], [2, 1]), np.float32([1, 1, -1]))


def test_running_mean_forgets_rewards_outside_its_window() -> None:
    mean = RunningMean(window=2)
    assert [mean.advantage(reward) for reward in (1.0, 0.0, 1.0, 1.0)] == [1.0, -1.0, 0.5, 0.5]
