"""Forward and backward over packed rows, through Megatron's own schedule.

Axis letters: B tokens that this rank has of one micro-batch (one packed row, or with context parallelism its part of
it), a the action tokens chosen in states among them, A action tokens of the rank's shard.
A loss is a sum over action tokens. `calculate_per_token_loss` makes Megatron add the sums over micro-batches and
data-parallel ranks, and divide the gradients once by the global number of action tokens.
The log-prob and the value of a token are read at the position before it: the state in which it was chosen.
With a pipeline, output, loss and results are on the last stage only.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model
from numpy.typing import NDArray
from torch import Tensor

from megatron_sao.megatron.layer_specs import attention_inputs, takes_packed_rows
from megatron_sao.megatron.model import Model
from megatron_sao.megatron.output_layer import Sums
from megatron_sao.megatron.parallel import Parallel
from megatron_sao.megatron.platform import Platform
from megatron_sao.megatron.router_replay import replaying
from megatron_sao.megatron.shard import Shard
from megatron_sao.types import NOT_RECORDED


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One packed row, on the device. Without an action token it still runs, for the collectives of its peers."""

    token_ids_B: Tensor  # int64
    position_ids_B: Tensor  # int64, within the segment
    lengths: tuple[int, ...]  # of the whole row's segments in order; padding is a segment too, or the end of one
    state_index_a: Tensor  # int64, where in B is the state that each action token was chosen in
    targets_a: Tensor  # int64, the action tokens
    places_a: Tensor  # int64, of these actions among the shard's [A]
    columns: Mapping[str, Tensor]  # [a] each: what the loss needs per action token
    routed_experts_B: Tensor | None = None  # [B, layers of this rank, top_k] to be replayed, `staged`


Loss = Callable[[Tensor, MicroBatch], tuple[Tensor, list[Sums]]]
"""(model output, micro-batch) -> (summed loss [] with its graph, sums for the metrics, of each piece)."""

Read = Callable[[Tensor, MicroBatch], Tensor]
"""(model output, micro-batch) -> one number per action token [a]."""


def make_micro_batches(
    shard: Shard, columns_A: Mapping[str, NDArray[Any]], *, parallel: Parallel, platform: Platform
) -> tuple[MicroBatch, ...]:
    """Pack a shard's trajectories into rows, and add empty ones until the interleaved schedule can run them.

    Args:
        shard: this data-parallel rank's trajectories and plan.
        columns_A: arrays over the shard's action tokens, cut into each micro-batch's [a].
        parallel: this rank's place; rows are padded so that they divide over tensor and context ranks.
        platform: where the tensors go.

    Raises:
        ValueError: a column that is not [A].
    """
    num_actions = shard.num_local_action_tokens
    for name, column in columns_A.items():
        if column.shape != (num_actions,):
            raise ValueError(f"{name} has shape {column.shape} for {num_actions} action tokens of this rank")
    starts_A = np.concatenate([[0], np.cumsum(shard.is_action)])[shard.offsets]  # [n+1] first action of each trajectory
    multiple = parallel.pipeline_size if parallel.virtual_stages > 1 else 1
    padding = ((),) * (-len(shard.micro_batches) % multiple)
    return tuple(
        lay_out(shard, part, starts_A, columns_A, parallel=parallel, device=platform.device)
        for part in (*shard.micro_batches, *padding)
    )


def lay_out(
    shard: Shard,
    trajectories: Sequence[int],
    starts_A: NDArray[np.int64],
    columns_A: Mapping[str, NDArray[Any]],
    *,
    parallel: Parallel,
    device: torch.device,
) -> MicroBatch:
    """Trajectories end to end, each padded until context ranks can share it, the row until tensor ranks can."""
    spans = [slice(int(shard.offsets[i]), int(shard.offsets[i + 1])) for i in trajectories]
    multiple = 2 * parallel.context_size if parallel.context_size > 1 else 1
    lengths = [span.stop - span.start for span in spans]
    padded = [length + -length % multiple for length in lengths]
    rest = -sum(padded) % (multiple * parallel.tensor_size) if padded else multiple * parallel.tensor_size
    padded += [rest] if rest else []
    source = np.full(sum(padded), -1)  # place of each of the row's tokens in the shard, -1: padding
    for start, span in zip(np.cumsum([0, *padded]), spans, strict=False):
        source[start : start + span.stop - span.start] = np.arange(span.start, span.stop)
    tokens, is_action = _taken(shard.token_ids, source, 0), _taken(shard.is_action, source, False)
    kept_B = context_part(padded, rank=parallel.context_rank, size=parallel.context_size)
    found = np.full(len(tokens), -1)
    found[kept_B] = np.arange(len(kept_B))  # place of a token of the row on this rank, -1: on another
    actions = np.flatnonzero(is_action)
    mine = found[actions - 1] >= 0
    places = np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(*starts_A[i : i + 2]) for i in trajectories)])
    arrays = {
        "token_ids_B": tokens[kept_B].astype(np.int64),
        "position_ids_B": np.concatenate([np.arange(length) for length in padded])[kept_B],
        "state_index_a": found[actions - 1][mine],
        "targets_a": tokens[actions[mine]].astype(np.int64),
        "places_a": places[mine],
    }
    return MicroBatch(
        lengths=tuple(padded),
        columns={
            name: staged(column[places[mine]], device).to(device, non_blocking=True)
            for name, column in columns_A.items()
        },
        **{name: staged(array, device).to(device, non_blocking=True) for name, array in arrays.items()},
        routed_experts_B=_routed(shard, source[kept_B], device),
    )


def _taken(array_T: NDArray[Any], source: NDArray[np.int64], filler: Any) -> NDArray[Any]:
    """What lies at `source` of a shard's array, `filler` where it is -1."""
    taken = np.full((len(source), *array_T.shape[1:]), filler, dtype=array_T.dtype)
    taken[source >= 0] = array_T[source[source >= 0]]
    return taken


def _routed(shard: Shard, source_B: NDArray[np.int64], device: torch.device) -> Tensor | None:
    if shard.routed_experts is None:
        return None
    return staged(_taken(shard.routed_experts, source_B, NOT_RECORDED), device)


def staged(array: NDArray[Any], device: torch.device) -> Tensor:
    """On the CPU, where a GPU takes it from without a wait: a copy out of pageable memory waits for the GPU's work."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def context_part(lengths: Sequence[int], *, rank: int, size: int) -> NDArray[np.int64]:
    """[B] positions in a row of segments of `lengths` that a context-parallel rank has.

    Of each segment, cut into 2 * size chunks, it has number `rank` and the one as far from the end, in this order: so
    that causal attention is the same work on all. It is the order of Transformer Engine's
    `thd_get_partitioned_indices`.

    >>> context_part([4, 8], rank=0, size=2)
    array([ 0,  3,  4,  5, 10, 11])
    """
    if size == 1:
        return np.arange(sum(lengths))
    parts = []
    for start, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
        chunks = start + np.arange(length).reshape(2 * size, -1)
        parts += [chunks[rank], chunks[-1 - rank]]
    return np.concatenate(parts)


def run_training(model: Model, micro_batches: Sequence[MicroBatch], loss: Loss, platform: Platform) -> list[Sums]:
    """Forward and backward of every micro-batch; afterwards the gradients are final: reduced, and divided once.

    Returns the metric sums of all pieces of all micro-batches, on the last pipeline stage only. Every data-parallel
    rank must bring the same number of micro-batches.
    """
    assert model.config.calculate_per_token_loss, "gradients must be divided once, by the global number of tokens"
    for chunk in model.wrapped:
        chunk.zero_grad_buffer()

    def step(rows: Iterator[MicroBatch], wrapped: Any) -> tuple[Tensor, Any]:
        row = next(rows)
        return _call(wrapped, row, platform), lambda output: _summed(loss, output, row)

    return [sums for pieces in _schedule(model, micro_batches, step, forward_only=False) for sums in pieces]


def run_scoring(model: Model, micro_batches: Sequence[MicroBatch], read: Read, platform: Platform) -> list[Tensor]:
    """Forward only, without a graph: what `read` finds in each micro-batch, [a] each; on the last stage only."""

    def step(rows: Iterator[MicroBatch], wrapped: Any) -> tuple[Tensor, Any]:
        row = next(rows)
        return _call(wrapped, row, platform), lambda output, non_loss_data: read(output, row)

    with torch.no_grad():
        return _schedule(model, micro_batches, step, forward_only=True)


def _schedule(model: Model, micro_batches: Sequence[MicroBatch], step: Any, *, forward_only: bool) -> list[Any]:
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(micro_batches) for _ in model.wrapped],
        model=list(model.wrapped),
        num_microbatches=len(micro_batches),
        seq_length=max(sum(row.lengths) for row in micro_batches),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return results


def _summed(loss: Loss, output: Tensor, row: MicroBatch) -> tuple[Tensor, Tensor, list[Sums]]:
    """What Megatron's schedule wants: a sum that hangs on the graph, the number of its tokens, numbers to keep."""
    total, sums = loss(output, row)
    assert total.requires_grad, "an empty micro-batch needs a zero loss that hangs on the graph: its peers wait for it"
    return total, torch.full((), len(row.places_a), dtype=torch.int, device=total.device), sums


def _call(model: Any, row: MicroBatch, platform: Platform) -> Tensor:
    """Model output of a packed row: hidden states [B/tp, 1, H] of a policy or a stage, critic values [1, B]."""
    _check_lengths(get_attr_wrapped_model(model, "max_tokens"), row.lengths)
    device = row.token_ids_B.device
    mask, packed = attention_inputs(row.lengths, device=device, packed=takes_packed_rows(model.config, platform))
    if packed is not None and model.config.context_parallel_size > 1:  # its attention asks for both
        packed = dataclasses.replace(
            packed, cu_seqlens_q_padded=packed.cu_seqlens_q, cu_seqlens_kv_padded=packed.cu_seqlens_kv
        )
    inputs = (row.token_ids_B[None], row.position_ids_B[None], mask)
    return replaying(model, row.routed_experts_B, lambda: model(*inputs, packed_seq_params=packed))


def _check_lengths(max_tokens: int | None, lengths: Sequence[int]) -> None:
    if max_tokens is not None and max(lengths) > max_tokens:
        raise ValueError(
            f"a sequence of {max(lengths)} tokens: above index_topk = {max_tokens} the model's attention is sparse, "
            "and Megatron's dense one an approximation: set model.approximate_sparse_attention = true to want it, or "
            "lower rollout.max_episode_tokens"
        )
