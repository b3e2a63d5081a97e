"""One rank of a bare Megatron-core loop: `python -m tools.bench.bare_megatron`, commands on stdin, answers on stdout.

The yardstick of `sao bench step`. It builds the same model, DDP and optimizer as a role, holds its packed rows as
tensors (ids, positions, attention masks, action positions), and on "go" does nothing but the work of the model:

    critic: K times (forward, backward, optimizer step), then one forward      loss: sum of the actions' values
    actor:  forward, backward, optimizer step                                  loss: Megatron's cross-entropy, summed

The actor's logits are those of every token, by Megatron's own output layer; its loss takes the actions' among them.

It has no channel, no packing, no metrics and no losses of the method. Ends when its stdin does, and with its parent.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
from torch import Tensor

from megatron_sao.megatron.checkpoint import load_critic, load_policy
from megatron_sao.megatron.freeze import freeze
from megatron_sao.megatron.layer_specs import attention_inputs
from megatron_sao.megatron.model import build_critic, build_policy
from megatron_sao.megatron.parallel import initialize
from megatron_sao.megatron.platform import Platform, install
from megatron_sao.megatron.step import Trainer
from megatron_sao.roles.main import die_with
from tools.bench.step_records import GO, BareSpec, Done, Row, Work, read_rows


class Prepared:
    """A row as tensors on the device, with its mask."""

    def __init__(self, row: Row, platform: Platform) -> None:
        def tensor(array: Any) -> Tensor:
            return torch.from_numpy(array).to(platform.device)

        self.token_ids, self.positions = tensor(row.token_ids_B)[None], tensor(row.positions_B)[None]
        lengths = np.bincount(row.segments_B).tolist()
        self.mask, self.packed = attention_inputs(lengths, device=platform.device, packed=platform.transformer_engine)
        actions = tensor(row.actions_a)
        self.states, self.targets = actions - 1, self.token_ids[0, actions]
        self.num_actions = torch.tensor(len(actions), dtype=torch.int, device=platform.device)


class BareLoop:
    """The model with its rows."""

    def __init__(self, spec: BareSpec) -> None:
        platform = install()
        parallel = initialize(
            spec.layout, rank=spec.rank, init_method=spec.init_method, timeout_s=spec.timeout_s, platform=platform
        )
        build, load = (build_policy, load_policy) if spec.role == "actor" else (build_critic, load_critic)
        model = build(spec.directory, parallel, platform, dtype=torch.float32, recompute="none")
        load(model, spec.directory, parallel)
        freeze(model, parallel, spec.freeze)
        trainer = Trainer.of(model, parallel, platform, spec.optimizer)
        (self._model,), self._optimizer = trainer.model.wrapped, trainer.optimizer
        (self._policy,) = trainer.model.chunks
        self._spec = spec
        self._rows = [Prepared(row, platform) for row in read_rows(Path(spec.rows))]
        self._counts = dict.fromkeys(Work.model_fields, 0)
        self._model.register_forward_hook(self._count_forward)

    def step(self) -> Done:
        """One step's work of this role, counted where it happens."""
        self._counts = dict.fromkeys(self._counts, 0)
        start_s = time.perf_counter()
        for _ in range(self._spec.num_updates):
            self._update()
        updated_s = time.perf_counter()
        if self._spec.role == "critic":
            self._values()
        values_s = time.perf_counter() - updated_s
        return Done(work=Work(**self._counts), updates_s=updated_s - start_s, values_s=values_s)

    def _update(self) -> None:
        self._model.zero_grad_buffer()

        def forward_step(rows: Iterator[Prepared], model: Any) -> tuple[Tensor, Any]:
            row = next(rows)
            return self._forward(model, row), lambda output: (self._loss(output, row), row.num_actions, {})

        self._schedule(forward_step, forward_only=False)
        self._optimizer.step()
        self._counts["num_optimizer_steps"] += 1

    def _values(self) -> None:
        def forward_step(rows: Iterator[Prepared], model: Any) -> tuple[Tensor, Any]:
            row = next(rows)
            return self._forward(model, row), lambda output, non_loss_data: output[0, row.states]

        with torch.no_grad():
            self._schedule(forward_step, forward_only=True)

    def _schedule(self, forward_step: Any, *, forward_only: bool) -> None:
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(self._rows),
            model=[self._model],
            num_microbatches=len(self._rows),
            seq_length=max(row.token_ids.shape[1] for row in self._rows),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _forward(self, model: Any, row: Prepared) -> Tensor:
        output: Tensor = model(row.token_ids, row.positions, row.mask, packed_seq_params=row.packed)
        return output

    def _loss(self, output: Tensor, row: Prepared) -> Tensor:
        if self._spec.role == "critic":
            return output[0, row.states].sum()
        logits: Tensor = ColumnParallelLinear.forward(self._policy.output_layer, output)[0]
        return vocab_parallel_cross_entropy(logits[row.states], row.targets[:, None]).sum()  # type: ignore[no-any-return]

    def _count_forward(self, _: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._counts["num_forwards"] += 1
        self._counts["num_tokens"] += inputs[0].numel()
        if output.requires_grad:
            output.register_hook(self._count_backward)

    def _count_backward(self, _: Tensor) -> None:
        self._counts["num_backwards"] += 1


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints goes into the log
    logging.basicConfig(level=logging.INFO)
    spec = BareSpec.model_validate_json(sys.stdin.readline())
    die_with(spec.parent_pid)
    torch.set_num_threads(spec.num_threads)
    loop = BareLoop(spec)
    answers.write(json.dumps({"ready": spec.rank}) + "\n")
    while sys.stdin.readline().strip() == GO:
        answers.write(loop.step().model_dump_json() + "\n")
    os._exit(0)  # groups would wait for their peers in their destructors


if __name__ == "__main__":
    main()
