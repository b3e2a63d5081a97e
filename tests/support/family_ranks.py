"""What the ranks of `test_carried_tensors` run. Apart from it, so that ranks start without transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_sao.config import OptimizerConfig
from megatron_sao.megatron import checkpoint
from megatron_sao.megatron.freeze import freeze
from megatron_sao.megatron.installed import SPARSE_ATTENTION
from megatron_sao.megatron.mapping.transfer import gather, hf_tensors
from megatron_sao.megatron.model import build_policy
from megatron_sao.megatron.step import Trainer, score
from megatron_sao.megatron.weight_files import carried_tensors
from megatron_sao.sync.plan import Publishable, make_plan
from megatron_sao.sync.source import MegatronSource
from tests.support.megatron_ranks import SEQUENCES, gradients, join, row_of

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def publish_and_export(rank: int, directory: Path, out: Path) -> tuple[tuple[Publishable, ...], dict[str, Tensor]]:
    """What a bfloat16 policy of 2 expert ranks publishes, in full, after a backward; its exports in both types."""
    place, machine = join(rank, {"num_ranks": 2, "expert": 2})
    policy = build_policy(directory, place, machine, dtype=torch.bfloat16)
    checkpoint.load_policy(policy, directory, place)
    report = freeze(policy, place, ("*.layers.0.*",))
    assert report.num_frozen_tensors + report.num_trained_tensors == sum(
        not t.is_buffer for t in hf_tensors(policy, place)
    )
    source = MegatronSource(policy, place, carried_tensors(directory))
    specs = [tensor.spec for tensor in source.tensors()]
    plan = make_plan(source.tensors(), bucket_bytes=20_000, full=True)
    buckets = [[spec.name for spec in bucket.tensors] for bucket in plan.buckets]
    apart = [names for names in buckets if sum("q_a_proj" in n or "kv_a_proj" in n for n in names) % 2]
    assert not apart, "SGLang needs both in one bucket"
    wholes = (
        {spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs} if rank == 0 else None
    )
    source.gather(specs, wholes, target=0, timeout_s=60)
    if wholes is not None:
        source.flatten(specs, wholes)
    for dtype in (torch.bfloat16, torch.float32):
        checkpoint.export(policy, directory, out / str(dtype), place, role="policy", dtype=dtype)
    gradients(policy, place, row_of(SEQUENCES, 1), machine)
    after = gather(policy, place, [BIAS])
    return source.tensors(), {**(wholes or {}), "bias after a step": after.get(BIAS, torch.empty(0))}


def lengths_that_are_refused(rank: int, directory: Path) -> None:
    """index_topk is 8: dense attention refuses a sequence of 9 tokens, unless it may be approximate."""
    place, machine = join(rank, {})
    for approximate in (False, True):
        model: Any = build_policy(
            directory, place, machine, dtype=torch.float32, approximate_sparse_attention=approximate
        )
        trainer = Trainer.of(model, place, machine, OptimizerConfig(learning_rate=1e-6, clip_norm=1.0))
        assert len(score(trainer, np.arange(8, dtype=np.int32))) == 7
        if SPARSE_ATTENTION or approximate:
            assert len(score(trainer, np.arange(9, dtype=np.int32))) == 8
        else:
            with pytest.raises(ValueError, match="a sequence of 9 tokens: above index_topk = 8"):
                score(trainer, np.arange(9, dtype=np.int32))
