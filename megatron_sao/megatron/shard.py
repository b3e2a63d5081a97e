"""What one data-parallel rank holds of a batch, as numpy arrays. Pure; no torch.

Axis letters: T all tokens of the shard, A its action tokens (trajectory by trajectory, in token order), n trajectories.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_sao.types import MicroBatchPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """The trajectories of one data-parallel rank, laid end to end, and how its micro-batches take them.

    A rank may hold no trajectory: all its micro-batches are then empty, and it still takes part in every collective.

    Raises:
        ValueError: no micro-batch, a trajectory missing or twice, arrays of the wrong length, a trajectory that starts
            with an action (it has no state to act from), no action token in the whole step.
    """

    offsets: NDArray[np.int64]  # [n+1] trajectory i owns tokens offsets[i]:offsets[i+1]
    token_ids: NDArray[np.int32]  # [T]
    is_action: NDArray[np.bool_]  # [T]
    rollout_logprobs: NDArray[np.float32]  # [T] 0 on observations
    version: NDArray[np.int32]  # [T] -1 on observations
    micro_batches: tuple[MicroBatchPlan, ...]  # indices into this shard's trajectories; the same count on all ranks
    num_action_tokens: int  # of the whole step, over all data-parallel ranks: the denominator of every loss
    routed_experts: NDArray[np.int16] | None = None  # [T, layers of this rank, top_k] to be replayed, or NOT_RECORDED
    num_missing_routed: int = 0  # tokens without recorded experts

    def __post_init__(self) -> None:
        if self.num_action_tokens < 1:
            raise ValueError("the step has no action token on any rank: nothing in it can be trained")
        if not self.micro_batches:
            raise ValueError(
                "a shard needs at least one micro-batch (it may be empty): every rank runs the same number"
            )
        if sorted(i for part in self.micro_batches for i in part) != list(range(len(self.offsets) - 1)):
            raise ValueError(f"{len(self.offsets) - 1} trajectories are not each in one of {self.micro_batches}")
        for name in ("token_ids", "is_action", "rollout_logprobs", "version"):
            if len(getattr(self, name)) != self.offsets[-1]:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {self.offsets[-1]} tokens")
        if self.routed_experts is not None and len(self.routed_experts) != self.offsets[-1]:
            raise ValueError(f"routed experts of {len(self.routed_experts)} tokens for {self.offsets[-1]}")
        if (np.diff(self.offsets) < 1).any() or self.is_action[self.offsets[:-1]].any():
            raise ValueError("a trajectory is empty or starts with an action: it has no state to act from")

    @property
    def num_local_action_tokens(self) -> int:
        return int(self.is_action.sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchArrays:
    """A whole batch as a `load_batch` command carries it."""

    offsets: NDArray[np.int64]  # [N+1]
    token_ids: NDArray[np.int32]
    is_action: NDArray[np.bool_]
    rollout_logprobs: NDArray[np.float32]
    version: NDArray[np.int32]


def take_shard(batch: BatchArrays, micro_batches: Sequence[MicroBatchPlan]) -> tuple[Shard, NDArray[np.int64]]:
    """The shard of the rank whose micro-batches these are (indices into the batch), and where its actions lie.

    The second value, [A] int64, holds the place of each of the shard's action tokens among the batch's action tokens:
    `advantages_batch[places]` are the shard's, and `values_batch[places] = values_shard` puts them back.
    """
    order = [index for part in micro_batches for index in part]
    spans = [np.arange(batch.offsets[i], batch.offsets[i + 1]) for i in order]
    tokens = np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)
    starts = np.cumsum([0, *(len(part) for part in micro_batches)])
    shard = Shard(
        offsets=np.cumsum([0, *(len(span) for span in spans)]).astype(np.int64),
        token_ids=batch.token_ids[tokens],
        is_action=batch.is_action[tokens],
        rollout_logprobs=batch.rollout_logprobs[tokens],
        version=batch.version[tokens],
        micro_batches=tuple(
            tuple(range(start, end)) for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
        ),
        num_action_tokens=int(batch.is_action.sum()),
    )
    place = np.cumsum(batch.is_action) - 1
    places: NDArray[np.int64] = place[tokens[batch.is_action[tokens]]]
    return shard, places
