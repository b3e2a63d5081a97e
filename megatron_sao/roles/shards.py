"""Rank 0's split of what arrives for a batch, and its join of what leaves. Pure numpy.

Legend: T tokens, A action tokens. Arrays of A that come from or go to the controller are in the batch's order; those of
a rank are in its shard's order.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sao.channel import ActorUpdate, Command, CriticUpdate, CriticValues, LoadBatch, Tensors
from megatron_sao.megatron.shard import BatchArrays, Shard, take_shard

MAX_BATCHES = 2
_ARRAYS = ("offsets", "token_ids", "is_action", "rollout_logprobs", "version")
_NUM_ACTIONS = "num_action_tokens"  # of the whole batch, [1]

Places = tuple[NDArray[np.int64], ...]
"""[data-parallel rank][A of its shard] places among the batch's action tokens."""


class ShardMap:
    """Where the actions of the held batches lie.

    Raises (all methods):
        ValueError: a batch that is not held, a third batch, a plan or an array that does not fit the role or the batch.
    """

    def __init__(self, num_data_ranks: int) -> None:
        self._num_data_ranks = num_data_ranks
        self._places: dict[int, Places] = {}

    def split(self, command: Command, tensors: Tensors) -> list[Tensors]:
        """What each data-parallel rank gets of a command's tensors."""
        match command:
            case LoadBatch():
                return self._split_batch(command, tensors)
            case CriticUpdate() | ActorUpdate():
                ((name, array_A),) = tensors.items()
                places = self._held(command.batch_id)
                if len(array_A) != sum(map(len, places)):
                    raise ValueError(
                        f"{len(array_A)} {name} for the {sum(map(len, places))} action tokens of batch "
                        f"{command.batch_id}"
                    )
                if not np.isfinite(array_A).all():
                    bad = int((~np.isfinite(array_A)).sum())
                    raise ValueError(f"{bad} of {len(array_A)} {name} of batch {command.batch_id} are not finite")
                return [{name: array_A[place]} for place in places]
            case CriticValues():
                self._held(command.batch_id)
                return [tensors] * self._num_data_ranks
            case _:
                return [tensors] * self._num_data_ranks

    def join(self, command: CriticValues, parts: Sequence[Tensors]) -> Tensors:
        """The shards' values in the batch's order."""
        places = self._held(command.batch_id)
        values_A = np.full(sum(map(len, places)), np.nan, np.float32)
        for place, part in zip(places, parts, strict=True):
            values_A[place] = part["values"]
        return {"values": values_A}

    def forget(self, batch_id: int) -> None:
        self._places.pop(batch_id, None)

    def _split_batch(self, command: LoadBatch, tensors: Tensors) -> list[Tensors]:
        if command.batch_id in self._places or len(self._places) >= MAX_BATCHES:
            raise ValueError(
                f"batch {command.batch_id} cannot be loaded: batches {sorted(self._places)} are held, at most "
                f"{MAX_BATCHES} different ones can be; drop one"
            )
        if len(command.plan) != self._num_data_ranks:
            raise ValueError(
                f"batch {command.batch_id} is planned for {len(command.plan)} data-parallel ranks, this role has "
                f"{self._num_data_ranks}"
            )
        batch = BatchArrays(**{name: tensors[name] for name in _ARRAYS})
        shards = [take_shard(batch, micro_batches) for micro_batches in command.plan]
        self._places[command.batch_id] = tuple(places for _, places in shards)
        return [_tensors_of(shard) for shard, _ in shards]

    def _held(self, batch_id: int) -> Places:
        if batch_id not in self._places:
            raise ValueError(f"batch {batch_id} is not loaded; loaded are {sorted(self._places)}")
        return self._places[batch_id]


def _tensors_of(shard: Shard) -> Tensors:
    return {name: getattr(shard, name) for name in _ARRAYS} | {_NUM_ACTIONS: np.array([shard.num_action_tokens])}


def shard_of(command: LoadBatch, tensors: Tensors, data_rank: int) -> Shard:
    """The shard of `data_rank`, from the tensors that `ShardMap.split` made for it."""
    starts = np.cumsum([0, *(len(row) for row in command.plan[data_rank])]).tolist()
    micro_batches = tuple(tuple(range(start, end)) for start, end in zip(starts[:-1], starts[1:], strict=True))
    arrays: dict[str, Any] = {name: tensors[name] for name in _ARRAYS}
    return Shard(micro_batches=micro_batches, num_action_tokens=int(tensors[_NUM_ACTIONS][0]), **arrays)
