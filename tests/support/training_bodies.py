"""What single tests of `test_training` run on each rank. Apart from it, so that ranks start without transformers."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatron_sao.megatron import step
from megatron_sao.megatron.shard import Shard
from megatron_sao.megatron.step import Trainer, logprobs, policy_update, score, value_update, values
from megatron_sao.megatron.transformer_config import fused
from tests.support.device_reads import watching
from tests.support.training_case import VOCAB_SIZE, digests, whole_model


def three_value_updates(trainer: Trainer, shard: Shard) -> Any:
    before = whole_model(trainer)
    targets = np.linspace(-1, 1, shard.num_local_action_tokens)
    for _ in range(3):
        value_update(trainer, shard, targets)
    (chunk,) = trainer.model.wrapped
    buffered = sum(buffer.numel_unpadded for buffer in chunk.buffers + chunk.expert_parallel_buffers)
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    return before, whole_model(trainer), buffered, trained, digests(trainer)


def three_bfloat16_updates(trainer: Trainer, shard: Shard) -> Any:
    targets = np.linspace(-1, 1, shard.num_local_action_tokens)
    updates = [value_update(trainer, shard, targets) for _ in range(3)]
    mains = [p.main_param for p in trainer.model.parameters() if getattr(p, "main_param", None) is not None]
    finer = [main for main in mains if not torch.equal(main, main.bfloat16().float())]
    types = {p.dtype for name, p in trainer.model.named_parameters() if "value_head" not in name}
    head = {p.dtype for name, p in trainer.model.named_parameters() if "value_head" in name}
    return [u["critic/loss"].value for u in updates], {m.dtype for m in mains}, len(finer), types, head


def poisoned_update(trainer: Trainer, shard: Shard) -> Any:
    before = digests(trainer)
    targets = np.zeros(shard.num_local_action_tokens)
    if trainer.parallel.data_rank == trainer.parallel.data_size - 1:
        targets[0] = 3e38
    with pytest.raises(RuntimeError, match=r"not finite, nothing was stepped: .*rank 1: \S+weight") as error:
        value_update(trainer, shard, targets)
    assert trainer.optimizer.num_updates == 0
    assert digests(trainer) == before
    return str(error.value)


def warming_updates(trainer: Trainer, shard: Shard) -> list[tuple[float, float]]:
    targets = np.zeros(shard.num_local_action_tokens)
    updates = [value_update(trainer, shard, targets) for _ in range(5)]
    return [(u["critic/learning_rate"].value, u["critic/num_updates"].value) for u in updates]


def clipped_update(trainer: Trainer, shard: Shard) -> tuple[float, float, float]:
    before = whole_model(trainer)
    metrics = value_update(trainer, shard, np.linspace(-1, 1, shard.num_local_action_tokens))
    after = whole_model(trainer)
    moved = sum(float(((after[k].astype(np.float64) - before[k]) ** 2).sum()) for k in after) ** 0.5
    parts = [metrics[f"critic/grad_norm_{part}"].value for part in ("head", "experts", "rest")]
    return moved, metrics["critic/grad_norm"].value, float(np.linalg.norm(parts))


def decayed_update(trainer: Trainer, shard: Shard) -> tuple[Any, Any]:
    before = whole_model(trainer)
    value_update(trainer, shard, values(trainer, shard))  # targets are the values: no gradient, so only decay moves
    return before, whole_model(trainer)


def values_of_altered_tokens(trainer: Trainer, shard: Shard) -> tuple[Any, ...]:
    """Values of the shard as it is, with another last token in each trajectory, and with another last but one."""
    last = shard.offsets[1:] - 1
    results = []
    for places in ([], last, last - 1):
        tokens = shard.token_ids.copy()
        tokens[places] = (tokens[places] + 1) % VOCAB_SIZE
        results.append(values(trainer, dataclasses.replace(shard, token_ids=tokens)))
    return tuple(results)


def scored(trainer: Trainer, shard: Shard) -> NDArray[np.float32]:
    return score(trainer, np.random.default_rng(5).integers(0, VOCAB_SIZE, 33).astype(np.int32))


def refused_inputs(trainer: Trainer, shard: Shard) -> None:
    advantages = np.zeros(shard.num_local_action_tokens)
    settings: dict[str, Any] = {"eps_low": 0.3, "eps_high": 5.0}
    with pytest.raises(ValueError, match="sampled with version 5, but 4"):
        policy_update(trainer, shard, advantages, version=4, **settings)
    with pytest.raises(ValueError, match="not finite"):
        policy_update(trainer, shard, advantages + np.nan, version=5, **settings)
    with pytest.raises(ValueError, match="action tokens of this rank"):
        policy_update(trainer, shard, advantages[1:], version=5, **settings)
    with pytest.raises(ValueError, match="at least 2"):
        score(trainer, np.zeros(1, dtype=np.int32))
    assert trainer.optimizer.num_updates == 0


def device_reads(trainer: Trainer, shard: Shard) -> dict[str, list[str]]:
    """What our own code reads of device tensors in the micro-batches of an update and of a scoring; and of a read."""
    advantages = np.linspace(-1, 1, shard.num_local_action_tokens)
    found: dict[str, list[str]] = {}

    def watched(name: str, schedule: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            with watching() as found[name]:
                return schedule(*args, **options)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in ("run_training", "run_scoring"):
            patch.setattr(step, name, watched(name, getattr(step, name)))
        policy_update(trainer, shard, advantages, eps_low=0.3, eps_high=5.0, version=5)
        logprobs(trainer, shard)
    with watching() as found["read"]:
        float(torch.ones(1).nonzero().sum())
    return found


def fused_kernels(trainer: Trainer, shard: Shard) -> str:
    return fused(trainer.model.config)


def all_frozen(trainer: Trainer, shard: Shard) -> None:
    raise AssertionError("not reached")
