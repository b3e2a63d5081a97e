"""Log-probs and entropies of logits whose vocabulary is split over a tensor-parallel group. No gather of logits.

Axis letters: A rows of logits that are wanted, V the whole vocabulary, v the part of it on this rank (V / group size).
Three numbers per row cross the group: the maximum, then the sums of exp, of exp * logit, and the target's logit.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_sao.megatron.parallel import Group


def vocab_parallel_logprobs(logits_Av: Tensor, targets_A: Tensor, group: Group) -> Tensor:
    """Log-prob [A] float32 of each row's target, differentiable. Every rank of `group` must call it.

    Args:
        logits_Av: [A, V / group size], any float type; rank r holds ids r * v to (r + 1) * v.
        targets_A: int64 ids in the whole vocabulary.
        group: the tensor-parallel group.
    """
    return vocab_parallel_logprobs_and_entropy(logits_Av, targets_A, group)[0]


def vocab_parallel_logprobs_and_entropy(logits_Av: Tensor, targets_A: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Those log-probs, and the entropy [A] float32 in nats of each row's softmax; both differentiable, one softmax."""
    assert logits_Av.ndim == 2, f"logits {tuple(logits_Av.shape)}"
    assert targets_A.shape == logits_Av.shape[:1], f"{tuple(targets_A.shape)} targets, {tuple(logits_Av.shape)} logits"
    logprobs_A, entropy_A = _LogProbsAndEntropy.apply(logits_Av, targets_A, group)
    return logprobs_A, entropy_A


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_Av: Tensor, targets_A: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        shifted = logits_Av.float()
        highest = _all_reduce(shifted.amax(dim=-1), dist.ReduceOp.MAX, group)
        shifted = shifted - highest.unsqueeze(-1)
        width = shifted.shape[-1]
        local = targets_A - dist.get_rank(group) * width
        mine = (local >= 0) & (local < width)
        local = torch.where(mine, local, 0)
        target_logit = torch.where(mine, shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1), 0.0)
        weights = shifted.exp()
        sums = torch.stack([weights.sum(-1), _times_log(weights, shifted).sum(-1), target_logit])
        total, weighted, target_logit = _all_reduce(sums, dist.ReduceOp.SUM, group)
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(weights.div_(total.unsqueeze(-1)), local, mine, entropy)
        ctx.dtype = logits_Av.dtype
        ctx.set_materialize_grads(False)
        return target_logit - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        logprob_gradient, entropy_gradient = gradients
        softmax, local, mine, entropy = ctx.saved_tensors
        result = torch.zeros_like(softmax)
        if logprob_gradient is not None:  # one-hot minus softmax
            result -= logprob_gradient.unsqueeze(-1) * softmax
            hit = torch.where(mine, logprob_gradient, 0.0)
            result.scatter_add_(-1, local.unsqueeze(-1), hit.unsqueeze(-1))
        if entropy_gradient is not None:  # -p * (log p + H)
            slope = _times_log(softmax, softmax.log()) + softmax * entropy.unsqueeze(-1)
            result -= entropy_gradient.unsqueeze(-1) * slope
        return result.to(ctx.dtype), None, None


def _times_log(probability: Tensor, log: Tensor) -> Tensor:
    """p * log with 0 * -inf = 0: an id that a mask has set to -inf adds nothing."""
    return torch.where(probability > 0, probability * log, 0.0)


def _all_reduce(x: Tensor, operation: Any, group: Group) -> Tensor:
    """In place. Rows are the same on all ranks of the group, so that all of them leave out an empty one."""
    if x.numel() and dist.get_world_size(group) > 1:
        dist.all_reduce(x, op=operation, group=group)
    return x
