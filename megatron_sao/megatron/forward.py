"""Forward and backward over packed rows, through Megatron's own schedule.

Axis letters: B tokens of one micro-batch (one packed row), a its action tokens, A action tokens of the rank's shard.
A loss is a sum over action tokens. `calculate_per_token_loss` makes Megatron add the sums over micro-batches and
data-parallel ranks, and divide the gradients once by the global number of action tokens.
The log-prob and the value of a token are read at the position before it: the state in which it was chosen.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor

from megatron_sao.megatron.layer_specs import attention_inputs
from megatron_sao.megatron.platform import Platform
from megatron_sao.megatron.router_replay import replaying
from megatron_sao.megatron.shard import Shard
from megatron_sao.types import NOT_RECORDED


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One packed row, on the device. Without an action token it still runs, for the collectives of its peers."""

    token_ids_B: Tensor  # int64
    lengths: tuple[int, ...]  # of the segments in row order, padding (its own segment) included; sums to B
    action_index_a: Tensor  # int64, row positions of the action tokens, all >= 1
    columns: Mapping[str, Tensor]  # [a] each: what the loss needs per action token
    routed_experts_B: Tensor | None = None  # [B, layers of this rank, top_k] to be replayed, on the CPU

    @property
    def targets_a(self) -> Tensor:
        return self.token_ids_B[self.action_index_a]

    @property
    def state_index_a(self) -> Tensor:
        """Row position of the state each action token was chosen in."""
        return self.action_index_a - 1


Loss = Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]
"""(model output, micro-batch) -> (summed loss [] with its graph, sums for the metrics [] each)."""

Read = Callable[[Tensor, MicroBatch], Tensor]
"""(model output, micro-batch) -> one number per action token [a]."""


def make_micro_batches(
    shard: Shard, columns_A: Mapping[str, NDArray[Any]], *, pad_to_multiple: int, platform: Platform
) -> tuple[MicroBatch, ...]:
    """Pack a shard's trajectories into rows.

    Args:
        shard: this data-parallel rank's trajectories and plan.
        columns_A: arrays over the shard's action tokens, cut into each micro-batch's [a].
        pad_to_multiple: of tokens; sequence parallel cuts a row evenly over the tensor-parallel ranks.
        platform: where the tensors go.

    Raises:
        ValueError: a column that is not [A].
    """
    num_actions = shard.num_local_action_tokens
    for name, column in columns_A.items():
        if column.shape != (num_actions,):
            raise ValueError(f"{name} has shape {column.shape} for {num_actions} action tokens of this rank")
    starts_A = np.concatenate([[0], np.cumsum(shard.is_action)])[shard.offsets]  # [n+1] first action of each trajectory
    return tuple(
        _pack(shard, part, starts_A, columns_A, pad_to_multiple, platform.device) for part in shard.micro_batches
    )


def _pack(
    shard: Shard,
    trajectories: Sequence[int],
    starts_A: NDArray[np.int64],
    columns_A: Mapping[str, NDArray[Any]],
    multiple: int,
    device: torch.device,
) -> MicroBatch:
    spans = [slice(int(shard.offsets[i]), int(shard.offsets[i + 1])) for i in trajectories]
    length = sum(span.stop - span.start for span in spans)
    padding = -length % multiple if length else multiple
    tokens = np.concatenate([*(shard.token_ids[span] for span in spans), np.zeros(padding, dtype=np.int32)])
    is_action = np.concatenate([*(shard.is_action[span] for span in spans), np.zeros(padding, dtype=bool)])
    actions = np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(*starts_A[i : i + 2]) for i in trajectories)])
    lengths = [span.stop - span.start for span in spans] + ([padding] if padding else [])
    return MicroBatch(
        token_ids_B=torch.from_numpy(tokens.astype(np.int64)).to(device),
        lengths=tuple(lengths),
        action_index_a=torch.from_numpy(np.flatnonzero(is_action)).to(device),
        columns={name: torch.from_numpy(column[actions]).to(device) for name, column in columns_A.items()},
        routed_experts_B=_routed(shard, spans, padding),
    )


def _routed(shard: Shard, spans: Sequence[slice], padding: int) -> Tensor | None:
    if shard.routed_experts is None:
        return None
    missing = np.full((padding, *shard.routed_experts.shape[1:]), NOT_RECORDED, dtype=np.int16)
    return torch.from_numpy(np.concatenate([*(shard.routed_experts[span] for span in spans), missing]))


def run_training(
    model: DistributedDataParallel, micro_batches: Sequence[MicroBatch], loss: Loss, platform: Platform
) -> list[dict[str, Tensor]]:
    """Forward and backward of every micro-batch; afterwards the gradients are final: reduced, and divided once.

    Returns the metric sums of each micro-batch. Every data-parallel rank must bring the same number of micro-batches.
    """
    assert model.config.calculate_per_token_loss, "gradients must be divided once, by the global number of tokens"
    model.zero_grad_buffer()

    def step(rows: Iterator[MicroBatch], wrapped: Any) -> tuple[Tensor, Any]:
        row = next(rows)
        return _call(wrapped, row, platform), lambda output: _summed(loss, output, row)

    return _schedule(model, micro_batches, step, forward_only=False)


def run_scoring(
    model: DistributedDataParallel, micro_batches: Sequence[MicroBatch], read: Read, platform: Platform
) -> list[Tensor]:
    """Forward only, without a graph: what `read` finds in each micro-batch, [a] each."""

    def step(rows: Iterator[MicroBatch], wrapped: Any) -> tuple[Tensor, Any]:
        row = next(rows)
        return _call(wrapped, row, platform), lambda output, non_loss_data: read(output, row)

    with torch.no_grad():
        return _schedule(model, micro_batches, step, forward_only=True)


def in_shard_order(shard: Shard, parts: Sequence[Tensor]) -> NDArray[np.float32]:
    """Join per-micro-batch numbers [a] to the shard's [A]; micro-batches may take trajectories in any order."""
    starts_A = np.concatenate([[0], np.cumsum(shard.is_action)])[shard.offsets]
    result = np.zeros(shard.num_local_action_tokens, dtype=np.float32)
    for trajectories, part in zip(shard.micro_batches, parts, strict=True):
        places = [np.arange(*starts_A[i : i + 2]) for i in trajectories]
        if places:
            result[np.concatenate(places)] = part.float().cpu().numpy()
    return result


def _schedule(model: Any, micro_batches: Sequence[MicroBatch], step: Any, *, forward_only: bool) -> list[Any]:
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(micro_batches),
        model=[model],
        num_microbatches=len(micro_batches),
        seq_length=max(len(row.token_ids_B) for row in micro_batches),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return results


def _summed(loss: Loss, output: Tensor, row: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """What Megatron's schedule wants: a sum that hangs on the graph, the number of its tokens, numbers to keep."""
    total, sums = loss(output, row)
    assert total.requires_grad, "an empty micro-batch needs a zero loss that hangs on the graph: its peers wait for it"
    return total, torch.tensor(len(row.action_index_a), dtype=torch.int, device=total.device), sums


def _call(model: Any, row: MicroBatch, platform: Platform) -> Tensor:
    """Model output of a packed row: policy logits [1, B, V/tp] or critic values [1, B]."""
    device = row.token_ids_B.device
    lengths = torch.tensor(row.lengths, device=device)
    segments_B = torch.repeat_interleave(torch.arange(len(row.lengths), device=device), lengths)
    starts = lengths.cumsum(0) - lengths
    positions_B = torch.arange(len(row.token_ids_B), device=device) - starts[segments_B]
    mask, packed = attention_inputs(segments_B, platform)
    inputs = (row.token_ids_B[None], positions_B[None], mask)
    return replaying(model, row.routed_experts_B, lambda: model(*inputs, packed_seq_params=packed))
