"""What real ranks hold of a model, measured: parameters, gradient buffers, optimizer state, peak of activations.

And what a rehearsal of the longest micro-batch leaves behind. Weights are random: a model is its config.json.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from megatron_sao.config import ActorConfig, CriticConfig, RoleConfig
from megatron_sao.megatron.freeze import freeze
from megatron_sao.megatron.memory import role_memory
from megatron_sao.megatron.model import build_critic, build_policy
from megatron_sao.megatron.parallel import initialize
from megatron_sao.megatron.platform import install
from megatron_sao.megatron.probe import longest_rows, rehearse
from megatron_sao.megatron.shard import Shard
from megatron_sao.megatron.step import Trainer, policy_update, value_update
from tests.support.live_bytes import LiveBytes
from tests.support.te_cpu import TRANSFORMER_ENGINE

MODELS = Path(__file__).parent.parent.parent / "configs" / "models"
_TINY = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 2,
}
_LATENT = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
TINY: dict[str, tuple[str, dict[str, Any]]] = {  # name -> real model, and what is made smaller
    "moe": ("Qwen/Qwen3-30B-A3B-Thinking-2507", {**_TINY, "num_experts": 8}),
    "tied": ("Qwen/Qwen3-30B-A3B-Thinking-2507", {**_TINY, "num_experts": 8, "tie_word_embeddings": True}),
    "wide": (
        "Qwen/Qwen3-30B-A3B-Thinking-2507",
        {**_TINY, "num_experts": 8, "num_hidden_layers": 1, "vocab_size": 20_000},
    ),
    "glm4": ("zai-org/GLM-4.5-Air", {**_TINY, "n_routed_experts": 8}),
    "latent": (
        "zai-org/GLM-5.2",
        {
            **_TINY,
            **_LATENT,
            "num_key_value_heads": 4,
            "qk_head_dim": 24,
            "n_routed_experts": 8,
            "first_k_dense_replace": 1,
            "index_topk": 48,  # so that a row has several trajectories
            "indexer_types": ["full", "shared", "shared", "full"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
    ),
}


def write_models(root: Path) -> None:
    for name, (real, smaller) in TINY.items():
        (root / name).mkdir(parents=True)
        config = json.loads((MODELS / real / "config.json").read_text())
        known = {key: value for key, value in smaller.items() if key in config}
        (root / name / "config.json").write_text(json.dumps({**config, **known}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A role that trains on rows of `num_tokens` tokens."""

    model: str
    layout: dict[str, int]
    role: str = "actor"
    dtype: str = "float32"
    freeze: tuple[str, ...] = ()
    distributed: bool = True
    recompute: str = "none"
    num_tokens: int = 64
    logits_tokens: int = 1024
    overlap: bool = False  # of the optimizer
    approximate: bool = False  # of sparse attention

    @property
    def config(self) -> RoleConfig:
        kind: type[RoleConfig] = ActorConfig if self.role == "actor" else CriticConfig
        optimizer = {"learning_rate": 1e-3, "clip_norm": 1.0, "distributed": self.distributed, "overlap": self.overlap}
        sizes: dict[str, Any] = {"recompute": self.recompute, "max_tokens_per_micro_batch": self.num_tokens}
        if self.role == "actor":
            sizes["logits_tokens"] = self.logits_tokens
        return kind.model_validate({"layout": self.layout, "optimizer": optimizer, **sizes})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    pipeline_rank: int
    num_sequences: int  # of the rows
    rehearsed: tuple[str, str]  # digests before and after a rehearsal


def measure(rank: int, root: Path, cases: dict[str, Case]) -> tuple[dict[str, Held], list[str]]:
    """Each case in turn, in one world; then what rank 0 says of a row, and of buckets, that no memory holds."""
    answers = {}
    for name, case in cases.items():
        trainer = _trainer(rank, root / case.model, case)
        answers[name] = _measure(trainer, case)
        parallel_state.destroy_model_parallel()
    return answers, _too_large(rank, root)


def _trainer(rank: int, directory: Path, case: Case) -> Trainer:
    machine, config = install(), case.config
    place = initialize(config.layout, rank=rank, init_method=None, timeout_s=60, platform=machine)
    torch.manual_seed(0)
    build: Any = build_critic
    if case.role == "actor":
        build = functools.partial(build_policy, logits_tokens=case.logits_tokens)
    model = build(
        directory,
        place,
        machine,
        dtype=getattr(torch, case.dtype),
        recompute=case.recompute,
        approximate_sparse_attention=case.approximate,
    )
    freeze(model, place, case.freeze)
    return Trainer.of(model, place, machine, config.optimizer)


def _measure(trainer: Trainer, case: Case) -> Held:
    before = _digest(trainer)
    rehearse(trainer, case.config)
    after = _digest(trainer)
    shard = longest_rows(trainer, case.num_tokens)
    _update(trainer, shard, case.role)  # Adam makes its state at the first step
    with LiveBytes() as live:
        _update(trainer, shard, case.role)
    buffers = [buffer for chunk in trainer.model.wrapped for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    return Held(
        parameters=_storage_bytes([*trainer.model.parameters(), *_correction_biases(trainer)]),
        gradients=_storage_bytes(buffer.grad_data for buffer in buffers),
        optimizer=_optimizer_bytes(trainer),
        activations=live.peak + _storage_bytes(parallel_state.get_global_memory_buffer().buffer.values()),
        pipeline_rank=trainer.parallel.pipeline_rank,
        num_sequences=len(shard.offsets) - 1,
        rehearsed=(before, after),
    )


def peak_of_update(rank: int, root: Path, case: Case) -> tuple[int, int]:
    """Bytes that a rank holds at the peak of an update, by CUDA's allocator or as live storages, and the plan's."""
    trainer = _trainer(rank, root / case.model, case)
    shard = longest_rows(trainer, case.num_tokens)
    _update(trainer, shard, case.role)  # Adam makes its state at the first step
    if trainer.platform.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        _update(trainer, shard, case.role)
        held = torch.cuda.max_memory_allocated()
    else:
        found = _measure(trainer, case)
        held = found.parameters + found.gradients + found.optimizer + found.activations
    stages = role_memory(
        trainer.model.hf_config,
        case.config,
        dtype=case.dtype,
        frozen=trainer.model.frozen_hf_names,
        transformer_engine=trainer.platform.transformer_engine,
    )
    return held, stages[trainer.parallel.pipeline_rank].total_bytes


def _digest(trainer: Trainer) -> str:
    """Of all that training could notice: weights, buffers, gradients, Adam's state, random numbers."""
    gradients = [b.grad_data for chunk in trainer.model.wrapped for b in chunk.buffers + chunk.expert_parallel_buffers]
    named = [tensor for _, tensor in (*trainer.model.named_parameters(), *trainer.model.named_buffers())]
    adams = [each.optimizer.state for each in trainer.optimizer._megatron.chained_optimizers if each.optimizer]
    found = hashlib.sha256(repr((trainer.optimizer.num_updates, adams)).encode())
    for tensor in (*named, *gradients, torch.get_rng_state()):
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _update(trainer: Trainer, shard: Shard, role: str) -> None:
    ones = np.ones(shard.num_local_action_tokens)
    if role == "critic":
        value_update(trainer, shard, ones)
    else:
        policy_update(trainer, shard, ones, eps_low=0.3, eps_high=5.0, version=0)


def _correction_biases(trainer: Trainer) -> list[torch.Tensor]:
    return [buffer for name, buffer in trainer.model.named_buffers() if name.endswith("expert_bias")]


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the storages below `tensors`, each once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _optimizer_bytes(trainer: Trainer) -> int:
    """Moments and main parameters. Main parameters that are views of the model's are the model's."""
    own = {parameter.untyped_storage()._cdata for parameter in trainer.model.parameters()}
    tensors: list[torch.Tensor] = []
    for chained in trainer.optimizer._megatron.chained_optimizers:
        for parameter, state in chained.optimizer.state.items():
            tensors += [parameter, *(value for value in state.values() if torch.is_tensor(value))]
    return _storage_bytes(t for t in tensors if t.untyped_storage()._cdata not in own)


def _too_large(rank: int, root: Path) -> list[str]:
    """A mask of more bytes than there are addresses (Transformer Engine makes none), and such buckets of a publish.
    Other ranks do not take part: no collective comes before it."""
    case = Case(model="moe", layout={"num_ranks": 4, "expert": 4})
    trainer = _trainer(rank, root / case.model, case)
    tries = [(64, 2**60)] if TRANSFORMER_ENGINE else [(64, 2**60), (12_000_000, 2**30)]
    messages: list[str] = []
    for num_tokens, publish_bytes in tries if rank == 0 else ():
        try:
            rehearse(trainer, dataclasses.replace(case, num_tokens=num_tokens).config, publish_bytes=publish_bytes)
        except RuntimeError as error:
            messages.append(str(error))
    return messages
