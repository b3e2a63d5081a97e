"""Records that cross a boundary: frozen, checked at birth, no torch.

Axis letters: T all tokens of one trajectory or one batch, A action tokens only, N trajectories of a batch.
"""

import dataclasses
import enum
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

WeightVersion = int
"""0 = start weights, +1 per actor update (never for a critic-only update)."""

NOT_RECORDED = -1
"""On a training rank, in the place of an expert's id: the router chooses by itself."""

ITEM_BYTES = {  # by the name of a dtype
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}

HEX_ID = re.compile(r"[0-9a-f]{32}")


class StopReason(enum.StrEnum):
    """Why a trajectory ended. All of them are terminal states with a score; broken episodes become no trajectory."""

    STOP = "stop"  # the model ended its last turn
    LENGTH = "length"  # the token budget of the turn or of the episode was used up
    TURN_LIMIT = "turn_limit"  # the environment ended it after the last allowed turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One chat message, as a chat template reads it."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One item of the prompt stream.

    >>> Prompt(id="sum/7", messages=(Message(role="user", content="2 + 2 ="),), data={"answer": "4"})
    """

    id: str
    messages: tuple[Message, ...]
    position: int = 0  # place in the stream, set when the prompt is admitted
    data: Mapping[str, Any] = field(default_factory=dict)  # whatever the environment and the reward need

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError(f"prompt {self.id!r} has no messages: give it at least one")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """Tokens of one episode (or of one of its segments) with what the engines logged while sampling them.

    Raises:
        ValueError: at birth, when a field has the wrong length, the first token is an action, there is no action
            token, an action's log-prob is not finite or above 0, the last token is an observation, a reward sits on
            a token that is not the last of its action, a version or log-prob is given for an observation, or the routed
            experts are not unsigned ids [T-1, layers, top_k].
    """

    id: str  # 32 hex digits
    episode_id: str  # 32 hex digits; segments of one episode share it
    prompt_id: str
    position: int  # the prompt's place in the stream
    segment: int = 0
    token_ids: NDArray[np.int32]  # [T]
    is_action: NDArray[np.bool_]  # [T] sampled by the model, matched stop tokens included
    rollout_logprobs: NDArray[np.float32]  # [T] natural log, 0 on observations
    version: NDArray[np.int32]  # [T] weight version of the forward pass that sampled the token, -1 on observations
    reward: NDArray[np.float32]  # [T] non-zero only on the last token of an action
    turns: tuple[tuple[int, int], ...]  # action spans [start, end)
    texts: tuple[str, ...] = ()  # of each turn, control tokens left out: for rewards and logs, never encoded again
    stop_reason: StopReason
    engine: str
    started_s: float
    finished_s: float
    routed_experts: NDArray[np.unsignedinteger] | None = None
    # [T-1, layers, top_k] row t: the forward over token t; the dtype's largest value where not recorded

    def __post_init__(self) -> None:
        num_tokens = len(self.token_ids)
        _check_hex(self.id, "trajectory id")
        _check_hex(self.episode_id, "episode id")
        for name in ("is_action", "rollout_logprobs", "version", "reward"):
            if len(getattr(self, name)) != num_tokens:
                raise ValueError(
                    f"trajectory {self.id}: {name} has {len(getattr(self, name))} entries for {num_tokens} tokens"
                )
        self._check_actions()
        self._check_turns()
        self._check_experts()
        for name in ("token_ids", "is_action", "rollout_logprobs", "version", "reward"):
            getattr(self, name).setflags(write=False)

    def _check_actions(self) -> None:
        action = self.is_action
        if not action.any():
            raise ValueError(f"trajectory {self.id} has no action token: nothing in it can be trained")
        if action[0]:
            raise ValueError(f"trajectory {self.id} starts with an action: it has no state to act from")
        if not action[-1]:
            raise ValueError(f"trajectory {self.id} ends with an observation: cut it after the last action")
        logprobs = self.rollout_logprobs[action]
        if not (np.isfinite(logprobs).all() and (logprobs <= 0).all()):
            raise ValueError(f"trajectory {self.id}: an action's log-prob is not finite or above 0: {logprobs}")
        if self.rollout_logprobs[~action].any() or (self.version[~action] != -1).any():
            raise ValueError(f"trajectory {self.id}: an observation carries a log-prob or a version")
        if (self.version[action] < 0).any():
            raise ValueError(f"trajectory {self.id}: an action token has no weight version")

    def _check_turns(self) -> None:
        edges = np.flatnonzero(np.diff(np.concatenate([[False], self.is_action, [False]]).astype(np.int8)))
        spans = tuple((int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True))
        if tuple(self.turns) != spans:
            raise ValueError(f"trajectory {self.id}: turns {self.turns} are not its action spans {spans}")
        if self.texts and len(self.texts) != len(spans):
            raise ValueError(f"trajectory {self.id}: {len(self.texts)} texts for {len(spans)} turns")
        if not np.isfinite(self.reward).all():
            raise ValueError(f"trajectory {self.id}: a reward is not finite")
        last = np.zeros(len(self.token_ids), dtype=bool)
        last[[end - 1 for _, end in spans]] = True
        if self.reward[~last].any():
            raise ValueError(f"trajectory {self.id}: a reward sits on a token that is not the last of its action")

    def _check_experts(self) -> None:
        ids, num_rows = self.routed_experts, len(self.token_ids) - 1
        if ids is not None and (ids.ndim != 3 or len(ids) != num_rows or ids.dtype.kind != "u"):
            raise ValueError(
                f"trajectory {self.id}: routed experts {ids.dtype}{list(ids.shape)} are not unsigned ids "
                f"[{num_rows}, layers, top_k]"
            )

    @property
    def num_action_tokens(self) -> int:
        return int(self.is_action.sum())

    @property
    def oldest_version(self) -> WeightVersion:
        return int(self.version[self.is_action].min())

    def with_final_reward(self, value: float) -> "Trajectory":
        """The same trajectory with `value` on its last action token."""
        reward = np.zeros_like(self.reward)
        reward[-1] = value
        return dataclasses.replace(self, reward=reward)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """What a reward function answers: a finite number, and numbers worth logging."""

    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.value, bool) or not isinstance(self.value, Real) or not math.isfinite(self.value):
            raise ValueError(f"a reward must be a finite number, not {self.value!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The trajectories of one step, laid end to end. The order of `trajectory_ids` is the order of every array."""

    id: int
    trajectory_ids: tuple[str, ...]  # [N]
    offsets: NDArray[np.int64]  # [N+1] trajectory n owns tokens offsets[n]:offsets[n+1]
    token_ids: NDArray[np.int32]  # [T]
    is_action: NDArray[np.bool_]  # [T]
    rollout_logprobs: NDArray[np.float32]  # [T]
    version: NDArray[np.int32]  # [T]
    reward: NDArray[np.float32]  # [T]

    def __post_init__(self) -> None:
        if not self.trajectory_ids or len(self.offsets) != len(self.trajectory_ids) + 1:
            raise ValueError(f"batch {self.id}: {len(self.trajectory_ids)} trajectories, {len(self.offsets)} offsets")
        for name in ("token_ids", "is_action", "rollout_logprobs", "version", "reward"):
            if len(getattr(self, name)) != self.offsets[-1]:
                raise ValueError(f"batch {self.id}: {name} has {len(getattr(self, name))} of {self.offsets[-1]} tokens")

    @classmethod
    def of(cls, batch_id: int, trajectories: tuple[Trajectory, ...]) -> "Batch":
        if not trajectories:
            raise ValueError(f"batch {batch_id} has no trajectory")
        lengths = [len(trajectory.token_ids) for trajectory in trajectories]
        arrays = {
            name: np.concatenate([getattr(trajectory, name) for trajectory in trajectories])
            for name in ("token_ids", "is_action", "rollout_logprobs", "version", "reward")
        }
        ids = tuple(trajectory.id for trajectory in trajectories)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return cls(id=batch_id, trajectory_ids=ids, offsets=offsets, **arrays)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(int(n) for n in np.diff(self.offsets))

    @property
    def num_action_tokens(self) -> int:
        return int(self.is_action.sum())


MicroBatchPlan = tuple[int, ...]
"""Trajectory indices (into the batch) that one packed row holds, in row order. Empty: a padding micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """Which trajectory goes to which micro-batch of which data-parallel rank. Pure data, made by `data.packing`."""

    ranks: tuple[tuple[MicroBatchPlan, ...], ...]  # [data-parallel rank][micro-batch]

    def __post_init__(self) -> None:
        counts = {len(micro_batches) for micro_batches in self.ranks}
        if len(counts) != 1 or 0 in counts:
            raise ValueError(f"every data-parallel rank runs the same number (>= 1) of micro-batches, not {counts}")
        indices = [i for rank in self.ranks for micro_batch in rank for i in micro_batch]
        if sorted(indices) != list(range(len(indices))):
            raise ValueError("a plan holds every trajectory of the batch exactly once")

    @property
    def num_micro_batches(self) -> int:
        return len(self.ranks[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One whole (unsharded) tensor as an engine receives it, under its HF name."""

    name: str
    dtype: str  # attribute name of torch: "float32", "bfloat16"
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Tensors that travel as one flat run of bytes, in this order, widest dtype first (SGLang's flattened_bucket)."""

    tensors: tuple[TensorSpec, ...]
    num_bytes: int
    source: int = 0  # rank of the actor that broadcasts it


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishPlan:
    """What a publish sends, identical on all ranks of the actor (they compare `digest`)."""

    buckets: tuple[Bucket, ...]
    digest: str  # sha256 of the canonical form, hex

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def sources(self) -> tuple[int, ...]:
        """Ranks of the actor that broadcast a bucket."""
        return tuple(sorted({bucket.source for bucket in self.buckets}))


def _check_hex(value: str, what: str) -> None:
    if not HEX_ID.fullmatch(value):
        raise ValueError(f"{what} must be 32 hex digits (SGLang aborts by prefix), not {value!r}")
