"""What actor and critic have in common: batches, export, and saying what they are made of."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import JsonValue

from megatron_sao.channel import Answer, Command, Describe, DropBatch, Export, LoadBatch, Tensors
from megatron_sao.data.routed_experts import ExpertReader
from megatron_sao.megatron.checkpoint import export
from megatron_sao.megatron.freeze import FreezeReport
from megatron_sao.megatron.layer_specs import attention_of, is_sparse
from megatron_sao.megatron.shard import Shard
from megatron_sao.megatron.step import Trainer
from megatron_sao.megatron.transformer_config import fused
from megatron_sao.roles.shards import shard_of
from megatron_sao.roles.worker import Role

LOG = logging.getLogger(__name__)


class Building:
    """A role until its model is there. The first command, Describe, builds it: a failure is an ordinary answer."""

    def __init__(self, build: Callable[[], Role]) -> None:
        self._build = build
        self._role: Role | None = None

    def handle(self, command: Command, tensors: Tensors) -> Answer:
        if self._role is None:
            if not isinstance(command, Describe):
                raise ValueError(f"{command.name} came before describe, which builds the model")
            self._role = self._build()
        return self._role.handle(command, tensors)


class TrainedRole:
    """One rank of a model that is trained on batches."""

    def __init__(
        self,
        trainer: Trainer,
        frozen: FreezeReport,
        *,
        role: Literal["policy", "critic"],
        source_directory: Path,
        experts: ExpertReader | None = None,
    ) -> None:
        """`experts`: the recorded ones, which this model replays."""
        self.trainer, self._experts = trainer, experts
        self._frozen, self._role, self._source_directory = frozen, role, source_directory
        self._shards: dict[int, Shard] = {}

    def handle(self, command: Command, tensors: Tensors) -> Answer:
        match command:
            case Describe():
                return Answer(data=self.describe())
            case LoadBatch():
                self._shards[command.batch_id] = self._load(command, tensors)
            case DropBatch():
                self._shards.pop(command.batch_id, None)
            case Export():
                self._export(Path(command.directory))
            case _:
                raise ValueError(f"a {self._role} does not know the command {command.name}")
        return Answer()

    def shard(self, batch_id: int) -> Shard:
        return self._shards[batch_id]

    def _load(self, command: LoadBatch, tensors: Tensors) -> Shard:
        data_rank = self.trainer.parallel.data_rank
        shard = shard_of(command, tensors, data_rank)
        if self._experts is None:
            return shard
        ids = [command.trajectory_ids[place] for row in command.plan[data_rank] for place in row]
        experts, num_missing = self._experts.read(ids, np.diff(shard.offsets).tolist())
        return dataclasses.replace(shard, routed_experts=experts, num_missing_routed=num_missing)

    def describe(self) -> dict[str, JsonValue]:
        """Which code paths are in use, and how large things are. The first lines of a run's log."""
        parallel, platform = self.trainer.parallel, self.trainer.platform
        model, te = self.trainer.model, platform.transformer_engine
        rows = "packed rows (thd)" if te else "a block-diagonal causal mask"
        sparse, attention = is_sparse(model.config), attention_of(model.hf_config)
        approximates = attention.max_exact_tokens is not None and model.chunks[0].max_tokens is None
        names = ("tensor", "context", "expert", "expert_tensor", "expert_data", "pipeline", "data")
        sizes = {name: getattr(parallel, f"{name}_size") for name in names}
        sizes |= {"virtual_stages": parallel.virtual_stages}
        return {
            "model": model.hf_config.architecture,
            "role": self._role,
            "layout": f"{parallel.world_size} ranks: {', '.join(f'{name} {size}' for name, size in sizes.items())}",
            "sequence_parallel": parallel.sequence_parallel,
            "device": platform.device.type,
            "backend": platform.backend,
            "layer_spec": "transformer_engine" if te else "local",
            "attention": attention.kind if sparse else f"{attention.kind} with {rows}",
            "approximate_sparse_attention": approximates and not sparse,
            "optimizer": self.trainer.optimizer.kind,
            "overlap": model.wrapped[0].ddp_config.overlap_grad_reduce,
            "recompute": model.config.recompute_granularity or "none",
            "fused": fused(model.config),
            "router_replay": self._experts is not None,
            "dispatcher": model.config.moe_token_dispatcher_type if model.config.num_moe_experts else "none (dense)",
            "dtype": str(model.config.params_dtype).removeprefix("torch."),
            **dataclasses.asdict(self._frozen),
        }

    def log_description(self) -> None:
        LOG.info("%s", ", ".join(f"{key} {value}" for key, value in self.describe().items()))

    def _export(self, directory: Path) -> None:
        export(self.trainer.model, self._source_directory, directory, self.trainer.parallel, role=self._role)
