"""Models on GPUs against transformers on the CPU, and layouts against one rank: the bodies of the CPU's tests."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_sao.rollout.devices import visible_devices
from tests.gpu.conftest import Figure, Ranks
from tests.megatron.test_megatron_layouts import MODELS
from tests.megatron.test_router_replay import distance, sequences
from tests.support import memory_ranks
from tests.support.megatron_ranks import SEQUENCES, packed_and_alone
from tests.support.memory_ranks import peak_of_update, write_models
from tests.support.replay_bodies import gradients_by_routes
from tests.support.routing_reference import chosen_by_hf
from tests.support.te_cpu import TRANSFORMER_ENGINE
from tests.support.tiny_models import load_hf, make_tiny_model
from tests.support.training_case import Case, disturbed, make_batch, start_logprobs, three_steps

FAMILIES = ("moe", "dense_tied", "glm4", "deepseek", "glm5_shared_indexers")
LOGPROB_BARS = {"float32": 1e-4, "bfloat16": 0.04}
"""Nats: the largest difference; in bfloat16 the mean, since rounding gives a token near a tie another expert: GLM-5's
largest is 0.24 between transformers' own two types, at the two tokens whose experts differ, and 0.05 at all others."""
TYPICAL_BAR = 0.1
"""Nats, bfloat16: the largest difference of the median token, which few tokens with other experts do not move."""
ONE_EACH = (((5,), (3, 1), (0, 2), (4,)),)
UNEVEN = (((5, 3), (0, 4, 1)), ((2,), ()))
LAYOUTS = [
    pytest.param(Case(num_ranks=2, tensor=2, plan=ONE_EACH), marks=pytest.mark.gpu(2), id="tensor 2"),
    pytest.param(Case(num_ranks=2, expert=2, plan=UNEVEN), marks=pytest.mark.gpu(2), id="expert 2"),
    pytest.param(Case(num_ranks=2, expert_tensor=2, plan=UNEVEN), marks=pytest.mark.gpu(2), id="expert tensor 2"),
    pytest.param(
        Case(num_ranks=2, tensor=2, expert_tensor=2, plan=ONE_EACH), marks=pytest.mark.gpu(2), id="tensor and expert t."
    ),
    pytest.param(Case(num_ranks=2, pipeline=2, plan=ONE_EACH), marks=pytest.mark.gpu(2), id="pipeline 2"),
    pytest.param(
        Case(num_ranks=8, pipeline=2, tensor=2, expert=2, plan=UNEVEN, overlap=True),
        marks=pytest.mark.gpu(8),
        id="pipeline 2 x tensor 2 x data 2 x expert 2, overlap",
    ),
]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", LOGPROB_BARS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_transformers(
    family: str, dtype: str, tmp_path: Path, ranks_: Ranks, figure: Figure
) -> None:
    arch, overrides = MODELS[family]
    directory = make_tiny_model(tmp_path, arch=arch, seed=1, dtype=getattr(torch, dtype), **overrides)
    reference = load_hf(directory)
    (answer,) = ranks_(1, packed_and_alone, {"num_ranks": 1}, directory, dtype)
    packed, start, differences, apart = answer["packed"].float().log_softmax(-1), 0, [], []
    for sequence, alone in zip(SEQUENCES, answer["alone"], strict=True):
        part = packed[start : start + len(sequence)]
        with torch.no_grad():
            expected = reference(torch.tensor([sequence])).logits[0].log_softmax(-1)
        differences.append((part - expected).abs())
        apart.append((part - alone.float().log_softmax(-1)).abs().flatten())
        start += len(sequence)
    figure(
        f"nats from transformers, sparse kernels {answer['sparse_kernels']}",
        size_of(differences, dtype),
        LOGPROB_BARS[dtype],
    )
    typical = float(torch.cat(differences).amax(-1).median())
    figure("nats from transformers, largest of the median token", typical, min(TYPICAL_BAR, 2.5 * LOGPROB_BARS[dtype]))
    figure("nats between a row and its sequences alone", size_of(apart, dtype), LOGPROB_BARS[dtype])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), seed=1))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", LOGPROB_BARS)
def test_at_lag_zero_the_actor_gives_the_same_logprobs_in_any_packing(
    dtype: str, directory: str, ranks_: Ranks, figure: Figure
) -> None:
    found = [
        ranks_(1, start_logprobs, directory, case)[0] for case in (Case(dtype=dtype), Case(dtype=dtype, plan=ONE_EACH))
    ]
    figure("nats", size_of([torch.from_numpy(np.abs(found[0] - found[1]))], dtype), LOGPROB_BARS[dtype])


@pytest.mark.gpu(1)
def test_replayed_experts_give_the_gradients_of_the_routers_own(tmp_path: Path, ranks_: Ranks, figure: Figure) -> None:
    directory = str(make_tiny_model(tmp_path, seed=1, num_hidden_layers=4, mlp_only_layers=[1]))
    own = np.concatenate(chosen_by_hf(directory, sequences(make_batch())))
    routes = {"none": None, "own": own, "other": (own + 1) % 8}
    (answer,) = ranks_(1, gradients_by_routes, directory, Case(plan=ONE_EACH, distributed=False), routes)
    figure("of a gradient's norm", distance(answer["own"][1], answer["none"][1]), 1e-4)
    assert distance(answer["other"][1], answer["none"][1]) > 0.1


@pytest.mark.parametrize("case", LAYOUTS)
def test_three_sao_steps_of_a_layout_are_those_of_one_rank(
    case: Case, directory: str, ranks_: Ranks, figure: Figure
) -> None:
    if case.expert_tensor > case.tensor and not visible_devices():
        pytest.skip("gathers unequal numbers of tokens, which gloo cannot")
    rollout = disturbed(ranks_(1, start_logprobs, directory, Case())[0])
    (expected,) = ranks_(1, three_steps, directory, Case(), rollout)
    found = ranks_(case.num_ranks, three_steps, directory, case, rollout)[0]
    for role in ("actor", "critic"):
        figure(
            f"largest difference of a weight of the {role}",
            largest(found["after"][role], expected["after"][role]),
            2e-5,
        )
        assert largest(expected["after"][role], expected["before"][role]) > 1e-3


@pytest.mark.parametrize("tensor", [pytest.param(n, marks=pytest.mark.gpu(2 * n)) for n in (1, 2)])
def test_context_ranks_give_the_logprobs_of_one_rank(
    tensor: int, directory: str, ranks_: Ranks, figure: Figure
) -> None:
    """In bfloat16: the attention that they share takes nothing else on a GPU."""
    if not (visible_devices() or TRANSFORMER_ENGINE):
        pytest.skip("context parallelism needs Transformer Engine")
    split = Case(num_ranks=2 * tensor, context=2, tensor=tensor, dtype="bfloat16", plan=ONE_EACH)
    cases = (Case(dtype="bfloat16", plan=ONE_EACH), split)
    found = [ranks_(case.num_ranks, start_logprobs, directory, case)[0] for case in cases]
    figure("nats", size_of([torch.from_numpy(np.abs(found[0] - found[1]))], "bfloat16"), LOGPROB_BARS["bfloat16"])


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("model", "recompute"), [("moe", "none"), ("moe", "full"), ("latent", "none")])
def test_the_plan_is_what_the_allocator_says(
    model: str, recompute: str, tmp_path: Path, ranks_: Ranks, figure: Figure
) -> None:
    """Of rows long enough for activations to be most of it."""
    write_models(tmp_path)
    num_tokens = 8192 if visible_devices() else 256
    case = memory_ranks.Case(
        model=model, layout={"num_ranks": 1}, dtype="bfloat16", recompute=recompute, num_tokens=num_tokens
    )
    ((held, planned),) = ranks_(1, peak_of_update, tmp_path, case)
    figure("planned bytes over held ones, less 1", abs(planned / held - 1), 0.25)


def size_of(differences: list[torch.Tensor], dtype: str) -> float:
    every = torch.cat([each.flatten() for each in differences])
    return float(every.max() if dtype == "float32" else every.mean())


def largest(found: dict[str, Any], expected: dict[str, Any]) -> float:
    assert found.keys() == expected.keys()
    return max(float(np.abs(found[name] - expected[name]).max()) for name in expected)
