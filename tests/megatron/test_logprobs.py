"""Vocab-parallel log-probs and entropy against torch's log_softmax on whole logits, on real ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_sao.megatron.logprobs import (
    vocab_parallel_logprobs,
    vocab_parallel_logprobs_and_entropy,
)
from tests.support.ranks import run_ranks

VOCAB, ROWS = 24, 7


def make_logits() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(ROWS, VOCAB, generator=generator)
    logits[2, 3] = -float("inf")  # an id that a mask forbids
    logits[3] += 1e4  # large logits must not overflow
    return logits, torch.randint(0, VOCAB, (ROWS,), generator=generator)


def whole_reference() -> dict[str, torch.Tensor]:
    logits, targets = make_logits()
    leaf = logits.double().requires_grad_()
    log_p = torch.log_softmax(leaf, -1)
    entropy = -torch.where(log_p.exp() > 0, log_p.exp() * log_p.clamp(min=-1e9), 0.0).sum(-1)
    logprobs = log_p[torch.arange(ROWS), targets]
    (gradient,) = torch.autograd.grad((logprobs * torch.arange(1, ROWS + 1)).sum(), leaf, retain_graph=True)
    (entropy_gradient,) = torch.autograd.grad(entropy.sum(), leaf)
    return {"logprobs": logprobs, "entropy": entropy, "gradient": gradient, "entropy_gradient": entropy_gradient}


def on_rank(rank: int, size: int) -> dict[str, torch.Tensor]:
    logits, targets = make_logits()
    leaf = logits.chunk(size, dim=1)[rank].clone().requires_grad_()
    group: Any = dist.group.WORLD
    logprobs = vocab_parallel_logprobs(leaf, targets, group)
    (gradient,) = torch.autograd.grad((logprobs * torch.arange(1, ROWS + 1)).sum(), leaf)
    _, entropy = vocab_parallel_logprobs_and_entropy(leaf, targets, group)
    (entropy_gradient,) = torch.autograd.grad(entropy.sum(), leaf)
    empty = vocab_parallel_logprobs(leaf[:0], targets[:0], group)
    assert empty.shape == (0,)
    empty.sum().backward()
    assert not leaf.grad.any()
    half, _ = vocab_parallel_logprobs_and_entropy(leaf.bfloat16(), targets, group)
    assert half.dtype == torch.float32
    return {
        "logprobs": logprobs.detach(),
        "entropy": entropy.detach(),
        "gradient": gradient,
        "entropy_gradient": entropy_gradient,
    }


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, 2, 3])
def test_logprobs_and_entropy_equal_those_of_whole_logits(size: int) -> None:
    want = whole_reference()
    parts = run_ranks(size, on_rank, size)
    for name in ("logprobs", "entropy"):
        for part in parts:
            torch.testing.assert_close(part[name].double(), want[name], rtol=1e-6, atol=2e-6)
    for name in ("gradient", "entropy_gradient"):
        got = torch.cat([part[name] for part in parts], dim=1)
        torch.testing.assert_close(got.double(), want[name], rtol=1e-5, atol=2e-6)
