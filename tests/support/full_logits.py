"""The reference for `output_layer.py`: logits of a whole row through Megatron's own output layer, and autograd.

Axis letters: A rows of logits that are wanted, v the part of the vocabulary on this rank.
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

from megatron_sao.megatron.forward import MicroBatch, run_scoring, run_training
from megatron_sao.megatron.model import Model, PolicyModel
from megatron_sao.megatron.output_layer import Sums, Vocabulary, logprobs_of_states, loss_of_states
from megatron_sao.megatron.parallel import Group, Parallel
from megatron_sao.megatron.platform import Platform

PIECE_TOKENS = 4


def full_logits(chunk: PolicyModel, hidden: Tensor, num_ids: int) -> Tensor:
    """[T, v] of a row's hidden states [T/tp, 1, H], as Megatron's GPTModel makes them; -inf for padding."""
    tied = chunk.share_embeddings_and_output_weights
    shared = chunk.shared_embedding_or_output_weight() if tied else None
    logits: Tensor = ColumnParallelLinear.forward(chunk.output_layer, hidden, weight=shared)[0]
    ids = dist.get_rank(chunk.pg_collection.tp) * logits.shape[-1] + torch.arange(
        logits.shape[-1], device=logits.device
    )
    return logits[:, 0].masked_fill(ids >= num_ids, -torch.inf)


def logprobs_and_entropy(logits_Av: Tensor, targets_A: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Log-prob [A] float32 of each row's target, and the entropy [A] of its softmax; both differentiable."""
    logprobs_A, entropy_A = _LogProbsAndEntropy.apply(logits_Av, targets_A, group)
    return logprobs_A, entropy_A


def vocabulary(model: Model, place: Parallel, *, piece_tokens: int = PIECE_TOKENS) -> Vocabulary:
    return Vocabulary(
        weight_vH=model.chunks[-1].output_weight(),
        num_ids=model.hf_config.vocab_size,
        group=place.tensor_group,
        piece_tokens=piece_tokens,
    )


def differences(model: Model, place: Parallel, row: MicroBatch, machine: Platform) -> dict[str, float]:
    """Pieces against full logits, for a wrapped model, two thirds of a row's states, and a row without any.

    The largest difference of log-probs (of scoring too) and entropies; of gradients, each parameter's relative to its
    norm. On a rank without the last pipeline stage the gradients only. And the calls of the output layer, which bring
    in an overlapped optimizer's parameters, for one reading of its weight.
    """
    chosen = torch.arange(len(row.token_ids_B)) % 3 > 0
    actions, nothing = _chosen(row, chosen.nonzero()[:, 0]), _chosen(row, chosen.nonzero()[:0, 0])

    def in_pieces(hidden: Tensor, row: MicroBatch) -> tuple[Tensor, list[Sums]]:
        def of_piece(logprobs: Tensor, entropy: Tensor, piece: slice) -> tuple[Tensor, Sums]:
            total = (row.columns["weights"][piece] * logprobs).sum()
            return total, {"logprobs": logprobs.detach(), "entropy": entropy}

        return loss_of_states(hidden, row, of_piece, vocabulary(model, place))

    def at_once(hidden: Tensor, row: MicroBatch) -> tuple[Tensor, list[Sums]]:
        logits = full_logits(model.chunks[-1], hidden, model.hf_config.vocab_size)[row.state_index_a]
        logprobs, entropy = logprobs_and_entropy(logits, row.targets_a, place.tensor_group)
        total = (row.columns["weights"] * logprobs).sum()
        return total, [{"logprobs": logprobs.detach(), "entropy": entropy.detach()}]

    def read(hidden: Tensor, row: MicroBatch) -> Tensor:
        return logprobs_of_states(hidden, row, vocabulary(model, place))

    scored = run_scoring(model, (actions, nothing), read, machine)
    sums = [run_training(model, (actions, nothing), in_pieces, machine)]
    trained: list[Any] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = [parameter.main_grad.clone() for parameter in trained]
    sums.append(run_training(model, (actions, nothing), at_once, machine))
    pairs = zip(gradients, (parameter.main_grad for parameter in trained), strict=True)
    found = {"gradients": max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs)}
    if not scored:
        return found
    calls: list[Any] = []
    with model.chunks[-1].output_layer.register_forward_pre_hook(lambda *_: calls.append(None)):
        model.chunks[-1].output_weight()
    found["calls"] = len(calls)
    joined = [{name: torch.cat([part[name] for part in parts]) for name in ("logprobs", "entropy")} for parts in sums]
    joined.append(joined[0] | {"logprobs": torch.cat(scored)})
    for name in ("logprobs", "entropy"):
        found[name] = max(float((each[name] - joined[1][name]).abs().max()) for each in joined)
    return found | {"pieces": len(sums[0])}


def _chosen(row: MicroBatch, index: Tensor) -> MicroBatch:
    return dataclasses.replace(
        row,
        state_index_a=index,
        targets_a=row.targets_a[index],
        places_a=index,
        columns={"weights": torch.linspace(-1, 1, len(row.targets_a))[index]},
    )


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
