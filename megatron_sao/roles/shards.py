"""Which part of a batch each data-parallel rank gets, and how their answers become one again. Pure numpy.

Legend: N trajectories, T tokens, A action tokens. A shard lies in the order of its plan: row by row, so that its rows
are runs of consecutive tokens. Arrays of A that come from or go to the controller are in the batch's order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_sao.channel import ActorUpdate, Command, CriticUpdate, CriticValues, LoadBatch, Tensors

MAX_BATCHES = 2
_TOKEN_ARRAYS = ("token_ids", "is_action", "rollout_logprobs", "version")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """What one data-parallel rank holds of a batch. Axes: N, T and A are those of the shard."""

    batch_id: int
    rows: tuple[tuple[int, ...], ...]  # [micro-batch] indices into this shard's trajectories, consecutive
    offsets: NDArray[np.int64]  # [N+1]
    token_ids: NDArray[np.int32]  # [T]
    is_action: NDArray[np.bool_]  # [T]
    rollout_logprobs: NDArray[np.float32]  # [T]
    version: NDArray[np.int32]  # [T]

    @property
    def num_actions(self) -> int:
        return int(self.is_action.sum())


def shard_of(command: LoadBatch, tensors: Tensors, data_rank: int) -> Shard:
    """The shard of `data_rank` from the tensors that `ShardMap.split` made for it."""
    counts = [len(row) for row in command.plan[data_rank]]
    starts = np.cumsum([0, *counts])
    rows = tuple(tuple(range(start, start + n)) for start, n in zip(starts.tolist(), counts, strict=False))
    arrays = {name: tensors[name] for name in ("offsets", *_TOKEN_ARRAYS)}
    return Shard(batch_id=command.batch_id, rows=rows, **arrays)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where a batch's trajectories and actions lie, for rank 0."""

    order: tuple[tuple[int, ...], ...]  # [data-parallel rank] trajectory indices in shard order
    action_offsets: NDArray[np.int64]  # [N+1]

    @property
    def num_actions(self) -> int:
        return int(self.action_offsets[-1])

    def indices(self, rank: int) -> NDArray[np.int64]:
        """[A of the shard] positions in the batch's order."""
        return _runs(self.action_offsets, self.order[rank])


class ShardMap:
    """Rank 0's knowledge of the batches that the role holds: splits what arrives, joins what leaves.

    Raises (both methods):
        ValueError: a batch that is not held, a third batch, a plan or an array that does not fit the role or the batch.
    """

    def __init__(self, num_data_ranks: int) -> None:
        self._num_data_ranks = num_data_ranks
        self._batches: dict[int, _Layout] = {}

    def split(self, command: Command, tensors: Tensors) -> list[Tensors]:
        """What each data-parallel rank gets of a command's tensors."""
        match command:
            case LoadBatch():
                return self._split_batch(command, tensors)
            case CriticUpdate() | ActorUpdate():
                ((name, array),) = tensors.items()
                layout = self._layout(command.batch_id)
                if len(array) != layout.num_actions:
                    raise ValueError(
                        f"{len(array)} {name} for the {layout.num_actions} action tokens of batch {command.batch_id}"
                    )
                return [{name: array[layout.indices(rank)]} for rank in range(self._num_data_ranks)]
            case CriticValues():
                self._layout(command.batch_id)
                return [tensors] * self._num_data_ranks
            case _:
                return [tensors] * self._num_data_ranks

    def join(self, command: CriticValues, parts: Sequence[Tensors]) -> Tensors:
        """The shards' values in the batch's order."""
        layout = self._layout(command.batch_id)
        values = np.full(layout.num_actions, np.nan, np.float32)
        for rank, part in enumerate(parts):
            values[layout.indices(rank)] = part["values"]
        return {"values": values}

    def forget(self, batch_id: int) -> None:
        self._batches.pop(batch_id, None)

    def _split_batch(self, command: LoadBatch, tensors: Tensors) -> list[Tensors]:
        if command.batch_id in self._batches or len(self._batches) >= MAX_BATCHES:
            raise ValueError(
                f"batch {command.batch_id} cannot be loaded: batches {sorted(self._batches)} are held, at most "
                f"{MAX_BATCHES} different ones can be; drop one"
            )
        if len(command.plan) != self._num_data_ranks:
            raise ValueError(
                f"batch {command.batch_id} is planned for {len(command.plan)} data-parallel ranks, this role has "
                f"{self._num_data_ranks}"
            )
        actions = np.add.reduceat(tensors["is_action"].astype(np.int64), tensors["offsets"][:-1])
        if not actions.all():
            raise ValueError(f"batch {command.batch_id}: a trajectory has no action token")
        order = tuple(tuple(i for row in rows for i in row) for rows in command.plan)
        self._batches[command.batch_id] = _Layout(order, np.concatenate([[0], np.cumsum(actions)]))
        return [_shard_tensors(tensors, indices) for indices in order]

    def _layout(self, batch_id: int) -> _Layout:
        if batch_id not in self._batches:
            raise ValueError(f"batch {batch_id} is not loaded; loaded are {sorted(self._batches)}")
        return self._batches[batch_id]


def _shard_tensors(tensors: Tensors, indices: Sequence[int]) -> Tensors:
    offsets = tensors["offsets"]
    lengths = np.diff(offsets)[list(indices)]
    tokens = _runs(offsets, indices)
    shard = {name: tensors[name][tokens] for name in _TOKEN_ARRAYS}
    return {"offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), **shard}


def _runs(offsets: NDArray[np.int64], indices: Sequence[int]) -> NDArray[np.int64]:
    """Positions offsets[i]:offsets[i+1] for each i of `indices`, one after the other."""
    runs = [np.arange(offsets[i], offsets[i + 1]) for i in indices]
    return np.concatenate(runs) if runs else np.zeros(0, np.int64)
