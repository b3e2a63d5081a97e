"""What travels between the step benchmark and its bare ranks. No torch.

A row is what a data-parallel rank runs in one micro-batch. It is made here from the batch and its plan alone, without
the package's own packing of rows, and travels as an `.npz` file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from megatron_sao.config import LayoutConfig, OptimizerConfig
from megatron_sao.types import Batch, MicroBatchPlan

GO = "go"


class BareSpec(BaseModel):
    """First line on stdin."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    role: Literal["actor", "critic"]
    rank: int
    parent_pid: int
    init_method: str
    directory: str  # HF model
    rows: str  # .npz
    layout: LayoutConfig
    optimizer: OptimizerConfig
    freeze: tuple[str, ...]
    num_updates: int  # K of the critic, 1 of the actor
    num_threads: int
    timeout_s: float


class Work(BaseModel):
    """What one rank, or a side, has done in one step. Forwards and tokens include those without a backward."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    num_forwards: int = 0
    num_backwards: int = 0
    num_optimizer_steps: int = 0
    num_tokens: int = 0  # that went through a forward

    def __add__(self, other: "Work") -> "Work":
        return Work(**{name: getattr(self, name) + getattr(other, name) for name in Work.model_fields})


class Done(BaseModel):
    """Answer to "go"."""

    work: Work
    updates_s: float
    values_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One packed row of B tokens, a of them actions. All int64."""

    token_ids_B: NDArray[np.int64]
    positions_B: NDArray[np.int64]  # within the trajectory
    segments_B: NDArray[np.int64]  # which trajectory of the row
    actions_a: NDArray[np.int64]  # row positions of the action tokens


def rows_of(batch: Batch, micro_batches: Sequence[MicroBatchPlan]) -> tuple[Row, ...]:
    """The rows of one data-parallel rank. A row without a trajectory is one token of padding."""
    return tuple(_row(batch, micro_batch) for micro_batch in micro_batches)


def _row(batch: Batch, micro_batch: MicroBatchPlan) -> Row:
    lengths = [batch.lengths[i] for i in micro_batch]
    if not lengths:
        one = np.zeros(1, dtype=np.int64)
        return Row(token_ids_B=one, positions_B=one, segments_B=one, actions_a=one[:0])
    tokens = np.concatenate([np.arange(batch.offsets[i], batch.offsets[i + 1]) for i in micro_batch])
    return Row(
        token_ids_B=batch.token_ids[tokens].astype(np.int64),
        positions_B=np.concatenate([np.arange(length) for length in lengths]),
        segments_B=np.repeat(np.arange(len(lengths)), lengths),
        actions_a=np.flatnonzero(batch.is_action[tokens]),
    )


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    names = Row.__slots__
    np.savez(path, **{f"{i}/{name}": getattr(row, name) for i, row in enumerate(rows) for name in names})


def read_rows(path: Path) -> tuple[Row, ...]:
    with np.load(path, allow_pickle=False) as arrays:
        num_rows = 1 + max(int(key.split("/")[0]) for key in arrays.files)
        return tuple(Row(**{name: arrays[f"{i}/{name}"] for name in Row.__slots__}) for i in range(num_rows))
