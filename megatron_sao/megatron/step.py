"""What the roles do with a model: a policy update, a value update, values, log-probs. Every rank calls the same.

Inputs are numpy arrays of *this data-parallel rank's* shard, the same on all ranks that share its data: a `Shard`
(`shard.take_shard` cuts it from a batch) and one number per action token [A] in the shard's order. Results [A] come in
that order too, on all of these ranks. Metrics are already reduced: every rank returns the same numbers.

    model = build_policy(...); load_policy(model, ...); freeze(model, ...)
    trainer = Trainer.of(model, parallel, platform, config.optimizer)
    metrics = policy_update(trainer, shard, advantages_A, eps_low=0.3, eps_high=5.0, version=7)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

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
from megatron_sao.algorithm.policy_loss import TrustRegion, dis_loss
from megatron_sao.algorithm.value_loss import value_loss
from megatron_sao.config import OptimizerConfig
from megatron_sao.megatron.forward import (
    Loss,
    MicroBatch,
    make_micro_batches,
    run_scoring,
    run_training,
)
from megatron_sao.megatron.model import Model
from megatron_sao.megatron.optimizer import Optimizer, UpdateReport, wrap
from megatron_sao.megatron.output_layer import Sums, Vocabulary, logprobs_of_states, loss_of_states
from megatron_sao.megatron.parallel import Parallel
from megatron_sao.megatron.platform import Platform
from megatron_sao.megatron.shard import Shard
from megatron_sao.metrics import Metric, Reduction, mean
from megatron_sao.types import WeightVersion


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """One model with its optimizer and its place among the ranks."""

    model: Model
    optimizer: Optimizer
    parallel: Parallel
    platform: Platform

    @classmethod
    def of(cls, model: Model, parallel: Parallel, platform: Platform, config: OptimizerConfig) -> Self:
        """Wrap a loaded model with its frozen parts set. From here on only `Optimizer.step` changes its parameters."""
        wrap(model, config)
        optimizer = Optimizer(model, parallel, config)
        return cls(model=model, optimizer=optimizer, parallel=parallel, platform=platform)

    @property
    def vocabulary(self) -> Vocabulary:
        """A policy's output layer, on the last pipeline stage."""
        return Vocabulary(
            weight_vH=self.model.chunks[-1].output_weight(),
            num_ids=self.model.hf_config.vocab_size,
            group=self.parallel.tensor_group,
            piece_tokens=self.model.logits_tokens,
        )


def policy_update(
    trainer: Trainer,
    shard: Shard,
    advantages_A: NDArray[np.floating],
    *,
    eps_low: float,
    eps_high: float,
    version: WeightVersion,
) -> dict[str, Metric]:
    """One DIS update of the policy on the whole step, trained from `version`. Metrics policy/* and lag/*.

    Raises:
        ValueError: epsilons out of range, advantages not finite or not [A], a token newer than `version`.
        RuntimeError: a gradient is not finite; nothing was stepped.
    """
    region = TrustRegion(eps_low=eps_low, eps_high=eps_high)
    _check_finite("advantages", advantages_A)
    columns: dict[str, NDArray[Any]] = {
        "rollout_logprobs": shard.rollout_logprobs[shard.is_action],
        "advantages": advantages_A.astype(np.float32),
        "lag": _lag(shard, version),
    }

    def loss(hidden: Tensor, row: MicroBatch) -> tuple[Tensor, list[Sums]]:
        def of_piece(logprobs: Tensor, entropy: Tensor, piece: slice) -> tuple[Tensor, Sums]:
            rollout, advantages, lag = (row.columns[name][piece] for name in columns)
            total, found = dis_loss(logprobs, rollout, advantages, region=region)
            return total, policy_sums(found, total, entropy_A=entropy, lag_A=lag)

        return loss_of_states(hidden, row, of_piece, trainer.vocabulary)

    merged = _train(trainer, shard, columns, loss, names=(POLICY_SUMS, POLICY_MAXIMA))
    metrics = finish_policy(merged) | _update_metrics("policy", trainer.optimizer.step())
    return metrics | _replay_metrics(trainer, shard)


def value_update(trainer: Trainer, shard: Shard, targets_A: NDArray[np.floating]) -> dict[str, Metric]:
    """One update of the critic towards `targets_A` on the whole step. Metrics critic/*.

    critic/explained_variance is that of the update's own forward, so of the values before it.
    """
    _check_finite("targets", targets_A)

    def loss(values: Tensor, row: MicroBatch) -> tuple[Tensor, list[Sums]]:
        values_a = values[0, row.state_index_a]
        total = value_loss(values_a, row.columns["targets"])
        return total, [value_sums(values_a, row.columns["targets"], total)]

    columns = {"targets": targets_A.astype(np.float32)}
    merged = _train(trainer, shard, columns, loss, names=(VALUE_SUMS, VALUE_MAXIMA))
    return finish_value(merged) | _update_metrics("critic", trainer.optimizer.step())


def values(trainer: Trainer, shard: Shard) -> NDArray[np.float32]:
    """V [A] of the state before each action token of this shard."""

    def read(output: Tensor, row: MicroBatch) -> Tensor:
        return output[0, row.state_index_a]

    return _score(trainer, shard, read)


def logprobs(trainer: Trainer, shard: Shard) -> NDArray[np.float32]:
    """log p [A] of each action token of this shard under the current weights, temperature 1."""

    def read(hidden: Tensor, row: MicroBatch) -> Tensor:
        return logprobs_of_states(hidden, row, trainer.vocabulary)

    return _score(trainer, shard, read)


def score(trainer: Trainer, token_ids_T: NDArray[np.int32]) -> NDArray[np.float32]:
    """log p [T-1] of token t+1 given tokens 0..t of one sequence that every rank is given."""
    num_tokens = len(token_ids_T)
    if num_tokens < 2:
        raise ValueError(f"a sequence of {num_tokens} token has no token to score: give at least 2")
    is_action = np.arange(num_tokens) > 0
    shard = Shard(
        offsets=np.array([0, num_tokens]),
        token_ids=token_ids_T,
        is_action=is_action,
        rollout_logprobs=np.zeros(num_tokens, dtype=np.float32),
        version=is_action.astype(np.int32) - 1,
        micro_batches=((0,),),
        num_action_tokens=num_tokens - 1,
    )
    return logprobs(trainer, shard)


def _train(
    trainer: Trainer,
    shard: Shard,
    columns_A: Mapping[str, NDArray[Any]],
    loss: Loss,
    *,
    names: tuple[Sequence[str], Sequence[str]],
) -> dict[str, float]:
    """Gradients of the whole step, and the metric sums and maxima of the whole step under their names."""
    micro_batches = _pack(trainer, shard, columns_A)
    parts = run_training(trainer.model, micro_batches, loss, trainer.platform)
    sums, maxima = (
        torch.stack([torch.stack([part[name] for name in group]) for part in parts])
        if parts
        else torch.zeros(1, len(group), dtype=torch.float64, device=trainer.platform.device)
        for group in names
    )
    total, highest = sums.sum(0), maxima.amax(0)
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=trainer.parallel.data_group)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=trainer.parallel.data_group)
    for numbers in (total, highest):
        _from_last_stage(numbers, trainer.parallel)
    merged = dict(zip((*names[0], *names[1]), (*total.tolist(), *highest.tolist()), strict=True))
    assert merged["tokens"] == shard.num_action_tokens, (
        f"the ranks trained on {merged['tokens']:.0f} action tokens, the step has {shard.num_action_tokens}"
    )
    return merged


def _score(trainer: Trainer, shard: Shard, read: Any) -> NDArray[np.float32]:
    """[A] from the ranks that have the states, on every rank that shares the data."""
    rows = _pack(trainer, shard, {})
    parts = run_scoring(trainer.model, rows, read, trainer.platform)
    found = torch.zeros(shard.num_local_action_tokens, device=trainer.platform.device)
    for row, part in zip(rows, parts, strict=bool(parts)):
        found[row.places_a] = part.float()
    dist.all_reduce(found, group=trainer.parallel.context_group)
    _from_last_stage(found, trainer.parallel)
    result: NDArray[np.float32] = found.cpu().numpy()
    return result


def _from_last_stage(numbers: Tensor, parallel: Parallel) -> None:
    """In place: what the last pipeline stage has, on the others too."""
    if parallel.pipeline_size > 1:
        dist.broadcast(numbers, group_src=parallel.pipeline_size - 1, group=parallel.pipeline_group)


def _pack(trainer: Trainer, shard: Shard, columns_A: Mapping[str, NDArray[Any]]) -> tuple[MicroBatch, ...]:
    return make_micro_batches(shard, columns_A, parallel=trainer.parallel, platform=trainer.platform)


def _lag(shard: Shard, version: WeightVersion) -> NDArray[np.int64]:
    """[A] version being trained from minus the version that sampled the token."""
    lag = version - shard.version[shard.is_action].astype(np.int64)
    if (lag < 0).any():
        raise ValueError(f"a token was sampled with version {version - lag.min()}, but {version} is being trained from")
    return lag


def _replay_metrics(trainer: Trainer, shard: Shard) -> dict[str, Metric]:
    """policy/replay_missing_fraction: tokens of the step whose experts were not recorded, where the router chose."""
    if shard.routed_experts is None:
        return {}
    counts = torch.tensor([shard.num_missing_routed, len(shard.token_ids)], device=trainer.platform.device)
    dist.all_reduce(counts, group=trainer.parallel.data_group)
    missing, tokens = counts.tolist()
    return {"policy/replay_missing_fraction": mean(missing, tokens)}


def _check_finite(what: str, array_A: NDArray[np.floating]) -> None:
    if not np.isfinite(array_A).all():
        raise ValueError(f"{int((~np.isfinite(array_A)).sum())} of {array_A.size} {what} are not finite")


def _update_metrics(role: str, report: UpdateReport) -> dict[str, Metric]:
    parts = {f"{role}/grad_norm_{part}": Metric(norm) for part, norm in report.grad_norms.items()}
    return parts | {
        f"{role}/grad_norm": Metric(report.grad_norm),
        f"{role}/learning_rate": Metric(report.learning_rate),
        f"{role}/num_updates": Metric(report.num_updates, reduction=Reduction.MAX),
    }
