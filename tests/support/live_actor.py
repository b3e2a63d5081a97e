"""A real Megatron actor (EP 2) for publish tests against a live SGLang: two checkpoints, and two ways to go wrong."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_sao.config import LayoutConfig, OptimizerConfig
from megatron_sao.megatron.checkpoint import load_policy
from megatron_sao.megatron.model import build_policy
from megatron_sao.megatron.parallel import initialize
from megatron_sao.megatron.platform import install
from megatron_sao.megatron.step import Trainer, score
from megatron_sao.megatron.weight_files import carried_tensors
from megatron_sao.sync.plan import Publishable
from megatron_sao.sync.source import MegatronSource
from megatron_sao.types import TensorSpec
from tests.support.toy_actor import Script, serve

START, OTHER, EXPERT_LEFT_OUT, GATE_UP_SWAPPED, SENDER_FAILS_ONCE = range(1, 6)
"""Steps: the weights of checkpoint A, those of B, A with a broken publish of one expert, B with a sender that
fails once in the middle."""

EXPERT = "model.layers.1.mlp.experts.5."
NUM_RANKS = 2
EXPERT_PARALLEL = LayoutConfig(num_ranks=NUM_RANKS, expert=2)
TENSOR_PARALLEL = LayoutConfig(num_ranks=NUM_RANKS, tensor=2)
PIPELINE_PARALLEL = LayoutConfig(num_ranks=NUM_RANKS, pipeline=2)
TENSOR_AND_EXPERT_PARALLEL = LayoutConfig(num_ranks=NUM_RANKS, tensor=2, expert=2)


class LiveSource:
    def __init__(self, rank: int, start: Path, other: Path, script: Script, layout: LayoutConfig) -> None:
        platform = install()
        self._script, self._rank = script, rank
        self._parallel = initialize(layout, rank=rank, init_method=None, timeout_s=60, platform=platform)
        self._model = build_policy(start, self._parallel, platform, dtype=torch.float32)
        self._directories = {OTHER: other, SENDER_FAILS_ONCE: other}
        self._start = start
        self._source = MegatronSource(self._model, self._parallel, carried_tensors(start))
        optimizer = OptimizerConfig(learning_rate=1e-6, clip_norm=1.0)
        self._trainer = Trainer.of(self._model, self._parallel, platform, optimizer)
        self.step = START

    @property
    def data_rank(self) -> int:
        return self._parallel.data_rank

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step, self._num_gathers = step, 0
        load_policy(self._model, self._directories.get(step, self._start), self._parallel)

    def score(self, token_ids_T: NDArray[np.int32]) -> NDArray[np.float32]:
        return score(self._trainer, token_ids_T)

    def tensors(self) -> Sequence[Publishable]:
        left_out = EXPERT if self._step == EXPERT_LEFT_OUT else "nothing"
        return [tensor for tensor in self._source.tensors() if not tensor.spec.name.startswith(left_out)]

    def gather(
        self, specs: Sequence[TensorSpec], places: Mapping[str, torch.Tensor] | None, *, target: int, timeout_s: float
    ) -> int:
        number, self._num_gathers = self._num_gathers, self._num_gathers + 1
        self._script.begin_gather(self._rank, number, target)
        num_bytes = self._source.gather(specs, self._swapped(places), target=target, timeout_s=timeout_s)
        names = [spec.name for spec in specs]
        self._script.end_gather(self._rank, number, target, names=names, num_bytes=num_bytes)
        if self._step == SENDER_FAILS_ONCE and number == 1 and places is not None:
            raise RuntimeError("scripted failure of the gather")
        return num_bytes

    def flatten(self, specs: Sequence[TensorSpec], places: Mapping[str, torch.Tensor]) -> int:
        swapped = self._swapped(places)
        assert swapped is not None
        return self._source.flatten(specs, swapped)

    def _swapped(self, places: Mapping[str, torch.Tensor] | None) -> Mapping[str, torch.Tensor] | None:
        gate, up = (EXPERT + f"{part}_proj.weight" for part in ("gate", "up"))
        if self._step != GATE_UP_SWAPPED or places is None or gate not in places:
            return places
        return {**places, gate: places[up], up: places[gate]}


def run_live_actor(
    rank: int, port: int, start: Path, other: Path, script: Script = Script(), layout: LayoutConfig = EXPERT_PARALLEL
) -> None:
    """For `run_ranks` and `started`, with as many ranks as the layout has."""
    torch.set_num_threads(1)
    source = LiveSource(rank, start, other, script, layout)
    serve(rank, port, source, script, data_rank=source.data_rank)
