"""Metrics merge without means of means, and undefined ones are null."""

import json
from pathlib import Path

import pytest

from megatron_sao.metrics import JsonlSink, Metric, Reduction, TensorBoardSink, mean, merge


def test_a_weighted_mean_does_not_depend_on_how_it_was_split() -> None:
    parts = [{"m": mean(6.0, 3)}, {"m": mean(0.0, 0)}, {"m": mean(10.0, 1)}]
    assert merge(parts) == merge([{"m": mean(16.0, 4)}]) == {"m": 4.0}


def test_sums_maxima_and_minima_ignore_absent_parts() -> None:
    def of(reduction: Reduction) -> float | None:
        values = (Metric(2.0, 1, reduction), Metric(99.0, 0, reduction), Metric(-5.0, 1, reduction))
        return merge([{"m": value} for value in values])["m"]

    assert [of(Reduction.SUM), of(Reduction.MAX), of(Reduction.MIN)] == [-3.0, 2.0, -5.0]


def test_a_metric_without_any_weight_is_null_not_zero() -> None:
    assert merge([{"m": mean(0.0, 0)}]) == {"m": None}


def test_two_reductions_under_one_name_are_an_error() -> None:
    with pytest.raises(ValueError, match="'m'"):
        merge([{"m": Metric(1.0, 1, Reduction.SUM)}, {"m": Metric(1.0)}])


def test_jsonl_has_one_record_a_step_and_refuses_nan_by_name(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.write(0, {"a": 1.0, "b": None})
    with pytest.raises(RuntimeError, match="step 1.*: a"):
        sink.write(1, {"a": float("nan")})
    sink.close()
    assert [json.loads(line) for line in (tmp_path / "m.jsonl").open()] == [{"step": 0, "a": 1.0, "b": None}]


def test_tensorboard_files_are_written(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write(0, {"a": 1.0, "b": None})
    sink.close()
    assert list(tmp_path.glob("events.out.tfevents.*"))
