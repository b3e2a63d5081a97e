"""Comparisons after a publish: what differs is named."""

import math

import pytest

from megatron_sao.sync.verify import check_logprobs, check_reset, check_returned, fixed_prompt, logprob_difference


def test_the_fixed_prompt_is_the_same_in_every_run_and_inside_the_vocabulary() -> None:
    prompt = fixed_prompt(320)
    assert prompt == fixed_prompt(320)
    assert len(prompt) == 64
    assert max(prompt) < 320
    assert len(set(prompt)) > 32


def test_a_tensor_that_did_not_come_back_is_named() -> None:
    loaded = {"a": "1", "experts.w13": "2", "c": "3"}
    check_returned(loaded, dict(loaded))
    with pytest.raises(RuntimeError, match=r"1 of 3 engine tensors .*: experts\.w13\."):
        check_returned(loaded, loaded | {"experts.w13": "0"})
    with pytest.raises(RuntimeError, match=r": c\."):
        check_returned(loaded, {"a": "1", "experts.w13": "2"})


def test_a_reset_that_changes_nothing_is_an_error_and_what_it_leaves_is_said() -> None:
    with pytest.raises(RuntimeError, match="none of their checksums changed"):
        check_reset({"a": "1"}, {"a": "1"})
    assert check_reset({"a": "1", "b": "2"}, {"a": "1", "b": "0"}) == ("a",)


def test_log_probs_are_compared_by_their_largest_and_their_mean_difference() -> None:
    assert logprob_difference([-1.0, -2.0], [-1.25, -2.0]) == 0.25
    assert logprob_difference([-1.0, -math.inf], [-1.0, -2.0]) == math.inf
    with pytest.raises(RuntimeError, match="shape"):
        logprob_difference([-1.0], [-1.0, -2.0])
    both = check_logprobs([-1.0, -2.0], [-1.002, -2.0], tolerance=0.01, what="it")
    assert both == pytest.approx((0.002, 0.001))
    with pytest.raises(RuntimeError, match=r"after it engine and actor differ .* at most 0\.5 nats \(at token 2\)"):
        check_logprobs([-1.0, -2.0], [-1.0, -2.5], tolerance=0.01, what="it")


def test_without_a_limit_on_single_tokens_the_mean_decides() -> None:
    one_flipped = [-1.0] * 9 + [-3.0]
    assert check_logprobs(one_flipped, [-1.0] * 10, tolerance=None, mean_tolerance=0.5, what="it")[0] == 2.0
    with pytest.raises(RuntimeError, match=r"by 1 in the mean"):
        check_logprobs([-1.0] * 10, [-2.0] * 10, tolerance=None, mean_tolerance=0.5, what="it")


def test_a_log_prob_that_is_not_finite_is_never_within_a_tolerance() -> None:
    with pytest.raises(RuntimeError, match="at most inf"):
        check_logprobs([math.nan], [-1.0], tolerance=None, what="it")
