"""The output layer at chosen states alone, in pieces: log-probs, entropies, and the gradient of a loss over them.

A piece's logits live until its gradient is made: in the forward, by the loss's slope at each log-prob. So nothing of
[.., V] outlives its piece, nothing is computed twice, and the backward multiplies what the forward has left.
Three numbers per state cross the tensor-parallel group (the maximum; then the sums of exp and of exp * logit, with the
target's logit), and its gradient: every rank has that of its own ids, and of it the tokens that it holds.
Axis letters: b tokens of a row on this tensor rank, a chosen states of the whole row, p those of a piece, H hidden,
V the vocabulary, v this rank's part of it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

from megatron_sao.megatron.parallel import Group

Sums = dict[str, Tensor]
"""Numbers for the metrics [] by their names."""

PieceLoss = Callable[[Tensor, Tensor, slice], tuple[Tensor, Sums]]
"""(log-probs [p], their entropies [p], which of the chosen states) -> (loss [] summed over the piece, its sums).

The loss is differentiated by the log-probs. Entropies have no graph.
"""


class ChosenStates(Protocol):
    """A row's states that are wanted."""

    @property
    def state_index_a(self) -> Tensor:
        """int64, where in the row they are, each once."""

    @property
    def targets_a(self) -> Tensor:
        """int64, an id for each."""


class OutputLayer(ColumnParallelLinear):
    """Megatron's, but that a call gives the weight, for this module to compute with.

    A call and no attribute: what an overlapped optimizer has not gathered yet, Megatron's DDP brings in before one.
    """

    def forward(self, weight: Tensor | None = None) -> Tensor:
        found: Tensor = self.weight if weight is None else weight
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """This tensor rank's part of an output layer, and how to compute with it."""

    weight_vH: Tensor  # of the ids from rank * v on; those beyond the vocabulary are padding
    num_ids: int  # V, without padding
    group: Group  # the tensor-parallel ranks; they share a row's tokens as they do the ids
    piece_tokens: int  # states whose logits are there at once

    @property
    def first_id(self) -> int:
        return dist.get_rank(self.group) * len(self.weight_vH)

    @property
    def num_local_ids(self) -> int:
        """Without padding, which so has no logit, no probability and no gradient."""
        number = min(len(self.weight_vH), self.num_ids - self.first_id)
        assert number > 0, f"{self.num_ids} ids leave tensor rank {dist.get_rank(self.group)} none"
        return number

    def pieces(self, num_states: int) -> Iterator[slice]:
        """At least one: a row without a chosen state has an empty piece."""
        for start in range(0, max(num_states, 1), self.piece_tokens):
            yield slice(start, min(start + self.piece_tokens, num_states))


def loss_of_states(
    hidden_bH: Tensor, chosen: ChosenStates, of_piece: PieceLoss, vocabulary: Vocabulary
) -> tuple[Tensor, list[Sums]]:
    """Loss [] float32 summed over the pieces, differentiable by hidden states and weight; and each piece's sums.

    Every rank of the tensor group must call it. A gradient that Megatron keeps in float32 (`main_grad`) gets the
    weight's as it is, in the backward; otherwise it goes through autograd, in the weight's type.

    Args:
        hidden_bH: [b, 1, H] this rank's tokens of the row, rank r those from r * b to (r + 1) * b.
        chosen: which of the row's states, and their targets: the same on every rank.
        of_piece: the loss.
        vocabulary: the output layer.
    """
    total, sums = _LossOfStates.apply(hidden_bH, vocabulary.weight_vH, chosen, of_piece, vocabulary)
    return total, sums


def logprobs_of_states(hidden_bH: Tensor, chosen: ChosenStates, vocabulary: Vocabulary) -> Tensor:
    """Log-prob [a] float32 of each target, without a graph. Arguments as of `loss_of_states`."""
    with torch.no_grad():
        states, targets = _chosen(hidden_bH, chosen.state_index_a, vocabulary.group), chosen.targets_a
        pieces = vocabulary.pieces(len(targets))
        return torch.cat([_Softmax.of(states[piece], targets[piece], vocabulary).logprobs_p for piece in pieces])


class _LossOfStates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, chosen: ChosenStates, of_piece: PieceLoss, vocabulary: Vocabulary
    ) -> tuple[Tensor, list[Sums]]:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        index_a, targets_a = chosen.state_index_a, chosen.targets_a
        states_aH = _chosen(hidden, index_a, vocabulary.group)
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        total, sums = torch.zeros((), device=hidden.device), []
        for piece in vocabulary.pieces(len(index_a)):
            loss, found, of_logits = _gradient(states_aH, targets_a, of_piece, piece, vocabulary)
            total += loss
            sums.append(found)
            if of_weight is not None:
                _add_product(of_weight[: of_logits.shape[1]], of_logits.t(), states_aH[piece])
            if wants_hidden:  # a piece's states make room for their gradient
                of_states = (of_logits @ weight[: of_logits.shape[1]]).float()
                states_aH[piece] = _all_reduce(of_states, dist.ReduceOp.SUM, vocabulary.group)
            del of_logits
        ctx.weight, ctx.of_weight = weight, of_weight
        ctx.of_hidden = _spread(states_aH, index_a, hidden, vocabulary.group) if wants_hidden else None
        return total, sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = ctx.of_hidden, ctx.of_weight
        ctx.of_hidden = ctx.of_weight = None  # a loss is differentiated once
        if of_hidden is not None:
            of_hidden = of_hidden.mul_(gradient)
        if of_weight is not None:
            of_weight = _handed_over(of_weight, gradient, ctx.weight)
        return of_hidden, of_weight, None, None, None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Softmax:
    """A piece's distributions over the vocabulary, of which this rank has a part."""

    logprobs_p: Tensor  # float32, of the targets
    entropy_p: Tensor  # float32, nats
    weights_pv: Tensor  # float32, exp(logit - the state's largest)
    total_p: Tensor  # of the weights, over all ranks
    target_p: Tensor  # the target's place in v, 0 where another rank has it
    mine_p: Tensor  # bool: this rank has it

    @classmethod
    def of(cls, states_pH: Tensor, targets_p: Tensor, vocabulary: Vocabulary) -> "_Softmax":
        width, group = vocabulary.num_local_ids, vocabulary.group
        shifted = (states_pH @ vocabulary.weight_vH[:width].t()).float()
        shifted -= _all_reduce(shifted.amax(dim=-1), dist.ReduceOp.MAX, group).unsqueeze(-1)
        local = targets_p - vocabulary.first_id
        mine = (local >= 0) & (local < width)
        local = torch.where(mine, local, 0)
        target_logit = torch.where(mine, shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1), 0.0)
        weights = shifted.exp()
        sums = torch.stack([weights.sum(-1), shifted.mul_(weights).sum(-1), target_logit])
        total, weighted, target_logit = _all_reduce(sums, dist.ReduceOp.SUM, group)
        log_total = total.log()
        return cls(
            logprobs_p=target_logit - log_total,
            entropy_p=log_total - weighted / total,
            weights_pv=weights,
            total_p=total,
            target_p=local,
            mine_p=mine,
        )

    def gradient(self, slope_p: Tensor) -> Tensor:
        """[p, v] of the logits: slope * (one-hot minus softmax). It takes the place of the weights."""
        gradient = self.weights_pv.mul_((-slope_p / self.total_p).unsqueeze(-1))
        hit = torch.where(self.mine_p, slope_p, 0.0)
        return gradient.scatter_add_(-1, self.target_p.unsqueeze(-1), hit.unsqueeze(-1))


def _gradient(
    states_aH: Tensor, targets_a: Tensor, of_piece: PieceLoss, piece: slice, vocabulary: Vocabulary
) -> tuple[Tensor, Sums, Tensor]:
    """The piece's loss, its sums, and the loss's gradient [p, v] by this rank's logits, in the weight's type."""
    softmax = _Softmax.of(states_aH[piece], targets_a[piece], vocabulary)
    with torch.enable_grad():
        logprobs_p = softmax.logprobs_p.requires_grad_()
        loss, sums = of_piece(logprobs_p, softmax.entropy_p, piece)
        (slope_p,) = torch.autograd.grad(loss, logprobs_p)
    return loss.detach(), sums, softmax.gradient(slope_p).to(states_aH.dtype)


def _chosen(hidden_bH: Tensor, index_a: Tensor, group: Group) -> Tensor:
    """[a, H] the chosen states on every tensor rank, each from the one that holds its token."""
    local_a, mine_a = _places(hidden_bH, index_a, group)
    states = hidden_bH[:, 0].index_select(0, torch.where(mine_a, local_a, 0))
    return _all_reduce(states.masked_fill_(~mine_a.unsqueeze(-1), 0), dist.ReduceOp.SUM, group)


def _spread(of_states_aH: Tensor, index_a: Tensor, hidden_bH: Tensor, group: Group) -> Tensor:
    """[b, 1, H] what `_chosen` took, at this rank's tokens; what is another's falls behind the end."""
    num_tokens, _, width = hidden_bH.shape
    local_a, mine_a = _places(hidden_bH, index_a, group)
    spread = hidden_bH.new_zeros(num_tokens + 1, width)
    spread[torch.where(mine_a, local_a, num_tokens)] = of_states_aH
    return spread[:num_tokens].unsqueeze(1)


def _places(hidden_bH: Tensor, index_a: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Where each chosen state is among this rank's tokens, and whether it is."""
    local_a = index_a - dist.get_rank(group) * len(hidden_bH)
    return local_a, (local_a >= 0) & (local_a < len(hidden_bH))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in float32 over the pieces."""
    if right.dtype is torch.float32:
        total.addmm_(left, right)
    else:
        total += left @ right


def _handed_over(of_weight: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    """What autograd gets for a weight. Where Megatron keeps its gradient in float32, that is added to, and autograd
    gets what Megatron's DDP wants to see and leaves out: anything, or zeros where it is added (`zero_out_wgrad`)."""
    main_gradient = getattr(weight, "main_grad", None)
    if main_gradient is None:
        return (of_weight * gradient).to(weight.dtype)
    main_gradient.addcmul_(of_weight, gradient)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


def _all_reduce(x: Tensor, operation: Any, group: Group) -> Tensor:
    """In place. Rows are the same on all ranks of the group, so that all of them leave out an empty one."""
    if x.numel() and dist.get_world_size(group) > 1:
        dist.all_reduce(x, op=operation, group=group)
    return x
