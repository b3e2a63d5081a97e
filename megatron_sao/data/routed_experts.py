"""Expert ids that a router chose at rollout, from the engine's answer to the training ranks (router replay, R3).

Row t holds the choices of the forward over token t, in every layer (a dense layer's ids are 0 and nobody reads them).
They travel as the smallest unsigned integers that hold them, and by file: one a trajectory, named by its id, so that no
message carries them. Axis letters: R rows, T tokens of one trajectory, L layers of the model, K experts per token.
"""

import dataclasses
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sao.types import NOT_RECORDED, Trajectory

_DIRECTORY = ".routed-experts"  # hidden, as everything that a stopped run may leave and the next one removes


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterShape:
    """What an engine's routers choose, by the model's `config.json`."""

    num_layers: int  # of the whole model, dense ones and experts
    top_k: int
    num_experts: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "RouterShape":
        """From the raw file. Raises ValueError for a dense model: it has nothing to replay."""
        num_experts = next((int(config[name]) for name in _NUM_EXPERTS if config.get(name)), 0)
        if not num_experts:
            raise ValueError(
                f"actor.router_replay = true, but {config.get('architectures')} has no experts: set it to false"
            )
        return cls(
            num_layers=int(config["num_hidden_layers"]),
            top_k=int(config["num_experts_per_tok"]),
            num_experts=num_experts,
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest that holds every id and one value more, its largest, for a row that is missing."""
        return np.min_scalar_type(self.num_experts)

    @property
    def missing(self) -> int:
        return int(np.iinfo(self.dtype).max)

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.top_k * self.dtype.itemsize

    def pack(self, ids_RLK: NDArray[np.int32]) -> NDArray[Any]:
        """An engine's ids as they travel. Raises ValueError for another shape, an id out of range or one twice."""
        if ids_RLK.shape[1:] != (self.num_layers, self.top_k):
            raise ValueError(f"expert ids {ids_RLK.shape[1:]} where {self} was expected")
        if ids_RLK.size and not 0 <= ids_RLK.min() <= ids_RLK.max() < self.num_experts:
            raise ValueError(f"expert ids from {ids_RLK.min()} to {ids_RLK.max()}: there are {self.num_experts}")
        packed = ids_RLK.astype(self.dtype)
        if _repeats(packed[packed.any(axis=-1)]):  # a dense layer's are all 0
            raise ValueError("a row names the same expert twice")
        return packed


_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class ExpertFiles:
    """The files of one run. The controller writes and removes them, every training rank reads its own trajectories'."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(exist_ok=True)

    def write(self, episode: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
        """The trajectories without their ids, which are in their files now: whole, or not there at all.

        Raises:
            ValueError: one has none, so the episode that made it left out what the engine recorded.
        """
        return tuple(self._write(trajectory) for trajectory in episode)

    def _write(self, trajectory: Trajectory) -> Trajectory:
        if trajectory.routed_experts is None:
            raise ValueError(
                f"trajectory {trajectory.id} has no routed_experts, and actor.router_replay is on: its episode must "
                "join those of its generations"
            )
        path = expert_file(self._directory, trajectory.id)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            np.save(file, trajectory.routed_experts, allow_pickle=False)
        os.replace(partial, path)
        return dataclasses.replace(trajectory, routed_experts=None)

    def remove(self, episode: Iterable[Trajectory]) -> None:
        for trajectory in episode:
            expert_file(self._directory, trajectory.id).unlink()

    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertReader:
    """What one training rank reads: the layers that it holds, of the trajectories that it trains on."""

    directory: Path
    shape: RouterShape
    layers: tuple[int, ...]  # with experts, counted from 0 over the whole model

    def read(self, trajectory_ids: Sequence[str], lengths: Sequence[int]) -> tuple[NDArray[np.int16], int]:
        """Ids [T, layers, K] of the trajectories end to end, NOT_RECORDED where there is none; and the missing rows.

        Raises:
            ValueError: a file that is not there or not of its trajectory's shape, an id out of range or one twice.
        """
        parts = [self._read(trajectory, length) for trajectory, length in zip(trajectory_ids, lengths, strict=True)]
        empty = np.zeros((0, len(self.layers), self.shape.top_k), dtype=np.int16)
        return np.concatenate([empty, *(ids for ids, _ in parts)]), sum(missing for _, missing in parts)

    def _read(self, trajectory_id: str, length: int) -> tuple[NDArray[np.int16], int]:
        path, shape = expert_file(self.directory, trajectory_id), self.shape
        try:
            recorded = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"the routed experts of trajectory {trajectory_id} cannot be read: {error}") from error
        expected = (length - 1, shape.num_layers, shape.top_k)
        if recorded.shape != expected or recorded.dtype != shape.dtype:
            raise ValueError(
                f"{path.name} holds {recorded.dtype}{list(recorded.shape)}, a trajectory of {length} tokens has "
                f"{shape.dtype}{list(expected)}"
            )
        is_missing = np.asarray(recorded[:, 0, 0] == shape.missing)
        own = np.asarray(recorded[:, list(self.layers)])
        known = own[~is_missing]
        if (known >= shape.num_experts).any() or _repeats(known):
            raise ValueError(f"{path.name} has a row with an expert above {shape.num_experts - 1}, or one twice")
        ids = np.full((length, *own.shape[1:]), NOT_RECORDED, dtype=np.int16)
        ids[:-1][~is_missing] = known
        return ids, int(is_missing.sum()) + 1  # the last token's row is never recorded


def expert_directory(run_directory: Path) -> Path:
    """Of the files of the run in `run_directory`."""
    return run_directory.resolve() / _DIRECTORY


def expert_file(directory: Path, trajectory_id: str) -> Path:
    return directory / f"{trajectory_id}.npy"


def _repeats(ids: NDArray[Any]) -> bool:
    """Whether an expert stands twice in a row of the last axis."""
    ordered = np.sort(ids, axis=-1)
    return bool((ordered[..., 1:] == ordered[..., :-1]).any())
