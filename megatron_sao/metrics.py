"""Metrics as values: a number with its weight and its reduction, merged once per step, written in one place.

Keys read `part/what[_unit]`, e.g. `policy/loss`, `publish/total_s`. A metric that is undefined in a step has the value
None (null in the JSONL file): never 0.
"""

import enum
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Reduction(enum.StrEnum):
    SUM = "sum"
    MEAN = "mean"  # weighted by `weight`
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True)
class Metric:
    """One number on its way to a step's record. A weight of 0 says: no such token here."""

    value: float
    weight: float = 1.0
    reduction: Reduction = Reduction.MEAN


def mean(total: float, weight: float) -> Metric:
    """A mean given as its sum and its weight, so that it merges without a mean of means."""
    return Metric(total / weight if weight else 0.0, weight, Reduction.MEAN)


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, float | None]:
    """One value per key. Weighted means stay exact however the parts were split; None where all weights are 0."""
    by_key: dict[str, list[Metric]] = {}
    for part in parts:
        for key, metric in part.items():
            by_key.setdefault(key, []).append(metric)
    return {key: _reduce(key, metrics) for key, metrics in by_key.items()}


def _reduce(key: str, metrics: list[Metric]) -> float | None:
    reductions = {metric.reduction for metric in metrics}
    if len(reductions) != 1:
        raise ValueError(f"metric {key!r} is given with several reductions: {sorted(reductions)}")
    present = [metric for metric in metrics if metric.weight]
    if not present:
        return None
    match reductions.pop():
        case Reduction.SUM:
            return math.fsum(metric.value for metric in present)
        case Reduction.MAX:
            return max(metric.value for metric in present)
        case Reduction.MIN:
            return min(metric.value for metric in present)
        case _:
            weight = math.fsum(metric.weight for metric in present)
            return math.fsum(metric.value * metric.weight for metric in present) / weight


Record = Mapping[str, float | None]


class Sink(Protocol):
    """Where a step's record goes. `write` is called once per step, in order."""

    def write(self, step: int, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """One JSON object per line; numbers that are not finite are refused by name, so that a reader never meets NaN."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, step: int, record: Record) -> None:
        bad = [key for key, value in record.items() if value is not None and not math.isfinite(value)]
        if bad:
            raise RuntimeError(f"step {step}: metrics that are not finite: {', '.join(bad)}")
        self._file.write(json.dumps({"step": step, **record}) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Scalars for TensorBoard. Needs the package `tensorboard`; `megatron_sao.controller` asks before it makes one."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # here, so that metrics import without torch

        self._writer = SummaryWriter(str(directory))

    def write(self, step: int, record: Record) -> None:
        for key, value in record.items():
            if value is not None:
                self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()
