"""What real ranks hold of a model, measured: parameters, gradient buffers, optimizer state, peak of activations."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_sao.config import ActorConfig, CriticConfig, LayoutConfig, OptimizerConfig, RoleConfig
from megatron_sao.megatron.freeze import freeze
from megatron_sao.megatron.model import build_critic, build_policy
from megatron_sao.megatron.parallel import initialize
from megatron_sao.megatron.platform import install
from megatron_sao.megatron.shard import Shard
from megatron_sao.megatron.step import Trainer, policy_update, value_update
from tests.live_bytes import LiveBytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A role that trains on rows of `num_tokens` tokens, as many rows as there are pipeline stages."""

    model: str  # directory below the models' root
    layout: dict[str, int]
    role: str = "actor"
    dtype: str = "float32"
    freeze: tuple[str, ...] = ()
    distributed: bool = True
    recompute: str = "none"
    num_tokens: int = 16

    @property
    def config(self) -> RoleConfig:
        optimizer = OptimizerConfig(learning_rate=1e-3, clip_norm=1.0, distributed=self.distributed)
        kind: type[RoleConfig] = ActorConfig if self.role == "actor" else CriticConfig
        return kind.model_validate(
            {
                "layout": LayoutConfig(**self.layout),
                "optimizer": optimizer,
                "recompute": self.recompute,
                "max_tokens_per_micro_batch": self.num_tokens,
            }
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    pipeline_rank: int


def measure(rank: int, root: Path, cases: dict[str, Case]) -> dict[str, Held]:
    """Each case in turn, in one world."""
    answers = {}
    for name, case in cases.items():
        answers[name] = _measure(rank, root / case.model, case)
        parallel_state.destroy_model_parallel()
    return answers


def trainer_of(rank: int, directory: Path, case: Case) -> Trainer:
    machine = install()
    config = case.config
    place = initialize(config.layout, rank=rank, init_method=None, timeout_s=60, platform=machine)
    torch.manual_seed(0)
    build: Any = build_policy if case.role == "actor" else build_critic
    model = build(directory, place, machine, dtype=getattr(torch, case.dtype), recompute=case.recompute)
    freeze(model, place, case.freeze)
    return Trainer.of(model, place, machine, config.optimizer)


def _measure(rank: int, directory: Path, case: Case) -> Held:
    trainer = trainer_of(rank, directory, case)
    shard = rows_of(trainer, case.num_tokens, case.config.layout.pipeline)
    _update(trainer, shard, case.role)  # Adam makes its state at the first step
    with LiveBytes() as live:
        _update(trainer, shard, case.role)
    return Held(
        parameters=storage_bytes(trainer.model.parameters()),
        gradients=storage_bytes(
            b.grad_data for chunk in trainer.model.wrapped for b in chunk.buffers + chunk.expert_parallel_buffers
        ),
        optimizer=optimizer_bytes(trainer),
        activations=live.peak + storage_bytes(parallel_state.get_global_memory_buffer().buffer.values()),
        pipeline_rank=trainer.parallel.pipeline_rank,
    )


def rows_of(trainer: Trainer, num_tokens: int, num_rows: int) -> Shard:
    """Rows of one trajectory each, all of it actions but the first token."""
    total = num_tokens * num_rows
    is_action = np.arange(total) % num_tokens > 0
    vocab_size = trainer.model.hf_config.vocab_size
    return Shard(
        offsets=np.arange(0, total + 1, num_tokens),
        token_ids=np.random.default_rng(3).integers(0, vocab_size, total).astype(np.int32),
        is_action=is_action,
        rollout_logprobs=np.where(is_action, -5.7, 0.0).astype(np.float32),
        version=is_action.astype(np.int32) - 1,
        micro_batches=tuple((row,) for row in range(num_rows)),
        num_action_tokens=int(is_action.sum()) * trainer.parallel.data_size,
    )


def _update(trainer: Trainer, shard: Shard, role: str) -> None:
    ones = np.ones(shard.num_local_action_tokens)
    if role == "critic":
        value_update(trainer, shard, ones)
    else:
        policy_update(trainer, shard, ones, eps_low=0.9, eps_high=1e9, version=0)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the storages below `tensors`, each once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def optimizer_bytes(trainer: Trainer) -> int:
    """Moments and main parameters. Main parameters that are views of the model's are the model's."""
    own = {parameter.untyped_storage()._cdata for parameter in trainer.model.parameters()}
    tensors: list[torch.Tensor] = []
    for chained in trainer.optimizer._megatron.chained_optimizers:
        for parameter, state in chained.optimizer.state.items():
            tensors += [parameter, *(value for value in state.values() if torch.is_tensor(value))]
    return storage_bytes(t for t in tensors if t.untyped_storage()._cdata not in own)


def agree(value: int) -> int:
    """The largest over all ranks."""
    found = torch.tensor(value)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found)
