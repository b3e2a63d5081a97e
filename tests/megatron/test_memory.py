"""What `megatron/memory.py` predicts, against what real ranks hold on a CPU; and the rehearsal before step 0.

On Transformer Engine's layer spec the kernels are torch's here (`tests.support.te_cpu`): what its modules keep from
forward to backward is measured, what kernels need for themselves is not.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron_sao.megatron.activations import EXPERT_IMBALANCE, Pass, activations
from megatron_sao.megatron.installed import SPARSE_ATTENTION
from megatron_sao.megatron.mapping.architectures import read_hf_config
from megatron_sao.megatron.mapping.hf_config import HFConfig
from megatron_sao.megatron.memory import StageMemory, frozen_names, role_memory
from megatron_sao.types import ITEM_BYTES
from tests.support.memory_ranks import Case, Held, measure, write_models
from tests.support.ranks import run_ranks
from tests.support.te_cpu import TRANSFORMER_ENGINE

pytestmark = pytest.mark.ranks

CRITIC: dict[str, Any] = {"role": "critic", "freeze": ("*.self_attn.*",)}
CASES = {
    "tensor and expert": Case(model="moe", layout={"num_ranks": 4, "tensor": 2, "expert": 2}),
    "tied, pipeline": Case(model="tied", layout={"num_ranks": 4, "pipeline": 2, "expert": 2}, dtype="bfloat16"),
    "critic, experts apart": Case(model="glm4", layout={"num_ranks": 4, "expert": 4}, dtype="bfloat16", **CRITIC),
    "not distributed": Case(
        model="moe",
        layout={"num_ranks": 4, "tensor": 2},
        dtype="bfloat16",
        distributed=False,
        recompute="selective",
        num_tokens=256,
    ),
    "pipeline, recomputed": Case(
        model="moe", layout={"num_ranks": 4, "pipeline": 2, "expert": 2}, recompute="full", num_tokens=128
    ),
    "virtual stages": Case(
        model="tied",
        layout={"num_ranks": 4, "pipeline": 2, "virtual_stages": 2, "tensor": 2},
        dtype="bfloat16",
        overlap=True,
    ),
    "experts cut": Case(model="moe", layout={"num_ranks": 4, "tensor": 2, "expert_tensor": 2}, recompute="full"),
    "latent attention": Case(model="latent", layout={"num_ranks": 4, "tensor": 2, "expert": 2}),
    "large vocabulary": Case(model="wide", layout={"num_ranks": 4, "tensor": 2}, num_tokens=256, logits_tokens=128),
    "large vocabulary in small pieces": Case(
        model="wide", layout={"num_ranks": 4}, dtype="bfloat16", num_tokens=256, logits_tokens=8
    ),
    "approximate": Case(model="latent", layout={"num_ranks": 4, "expert": 4}, dtype="bfloat16", approximate=True),
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Held]], list[str]]:
    root = tmp_path_factory.mktemp("models")
    write_models(root)
    answers = run_ranks(4, measure, root, CASES, timeout_s=240)
    return root, [held for held, _ in answers], answers[0][1]


def hf_config(root: Path, case: Case) -> HFConfig:
    role: Any = "critic" if case.role == "critic" else "policy"
    return dataclasses.replace(read_hf_config(root / case.model), role=role)


def predicted(root: Path, case: Case) -> tuple[StageMemory, ...]:
    hf = hf_config(root, case)
    return role_memory(
        hf,
        case.config,
        dtype=case.dtype,
        frozen=frozen_names(hf, case.freeze),
        transformer_engine=TRANSFORMER_ENGINE,
    )


@pytest.mark.parametrize("name", CASES)
def test_predicted_states_are_what_every_rank_holds(measured: Any, name: str) -> None:
    root, ranks, _ = measured
    stages = predicted(root, CASES[name])
    for held in (rank[name] for rank in ranks):
        parts = stages[held.pipeline_rank].parts
        for part in ("parameters", "gradients", "optimizer"):
            assert parts[part] == pytest.approx(getattr(held, part), rel=0.03), part


@pytest.mark.parametrize("name", CASES)
def test_predicted_activations_are_the_measured_peak(measured: Any, name: str) -> None:
    """Of the fullest rank in each stage: routers of random weights do not balance the others."""
    root, ranks, _ = measured
    case = CASES[name]
    if TRANSFORMER_ENGINE and hf_config(root, case).computes_sparse:
        pytest.skip("with Transformer Engine the plan counts on fused kernels for sparse attention: none on a CPU")
    if TRANSFORMER_ENGINE and case.config.recompute == "selective":
        pytest.skip("recomputed attention: the fake kernel's own workspace, the scores of a layer, is most of the peak")
    way = Pass(
        layout=case.config.layout,
        item_bytes=ITEM_BYTES[case.dtype],
        max_tokens=case.num_tokens,
        recompute=case.config.recompute,
        transformer_engine=TRANSFORMER_ENGINE,
        logits_tokens=case.logits_tokens,
        expert_imbalance=1.0,
    )
    for pipeline_rank, stage in enumerate(predicted(root, case)):
        peak = max(rank[name].activations for rank in ranks if rank[name].pipeline_rank == pipeline_rank)
        found = activations(hf_config(root, case), way, stage.layers, pipeline_rank)
        assert found.peak_bytes == pytest.approx(peak, rel=0.25)
        way_as_planned = dataclasses.replace(way, expert_imbalance=EXPERT_IMBALANCE)
        assert stage.activations == activations(hf_config(root, case), way_as_planned, stage.layers, pipeline_rank)


@pytest.mark.parametrize("name", CASES)
def test_a_rehearsal_leaves_everything_as_it_was(measured: Any, name: str) -> None:
    _, ranks, _ = measured
    for held in (rank[name] for rank in ranks):
        before, after = held.rehearsed
        assert before == after


def test_a_row_has_the_longest_sequences_that_the_model_takes(measured: Any) -> None:
    """Of 64 tokens: 48 with sparse attention computed densely, all where it is not or an approximation is wanted."""
    _, ranks, _ = measured
    expected = [1 if SPARSE_ATTENTION else 2, 1]
    assert [ranks[0][name].num_sequences for name in ("latent attention", "approximate")] == expected


def test_a_rehearsal_without_enough_memory_says_what_would_help(measured: Any) -> None:
    _, _, (of_buckets, *of_a_mask) = measured
    assert f"tried to allocate {2**60} bytes" in of_buckets
    assert "the largest part is publish, 1073741824.0 GiB: lower publish.bucket_bytes" in of_buckets
    for message in of_a_mask:
        assert "policy, rank 0: the longest micro-batch, 12000000 tokens, does not fit in memory" in message
        assert "tried to allocate 144000000000000 bytes" in message
        assert ", publish 1.0 GiB; the largest part is activations" in message
        assert 'set recompute = "full"; lower max_tokens_per_micro_batch' in message
    assert len(of_a_mask) == 1 - TRANSFORMER_ENGINE
