"""Replayed experts in Megatron's training forward, against transformers with the same experts, in several layouts."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatron_sao.types import Batch
from tests.megatron.test_megatron_layouts import _disk_gradients
from tests.support.ranks import run_ranks
from tests.support.replay_bodies import LAYERS, Routes, gradients_by_routes, weights_of
from tests.support.routing_reference import chosen_by_hf, force
from tests.support.te_cpu import needs_te
from tests.support.tiny_models import load_hf, make_tiny_model
from tests.support.training_case import Case, make_batch

pytestmark = pytest.mark.ranks
NUM_EXPERTS, TOP_K = 8, 2
World = Callable[[str], list[dict[str, Any]]]
ONE_EACH = (((5,), (3, 1), (0, 2), (4,)),)
CASES = {
    "recompute": Case(plan=ONE_EACH, distributed=False, recompute="full"),
    "tensor 2 x expert 2": Case(num_ranks=2, tensor=2, expert=2, plan=(((1, 0), (2, 5, 4, 3)),), distributed=False),
    "pipeline 2 x virtual 2, recompute": Case(
        num_ranks=2,
        pipeline=2,
        virtual_stages=2,
        plan=ONE_EACH,
        distributed=False,
        recompute="full",
    ),
    "tensor 2 x data 2 x expert 2, recompute, an empty micro-batch": Case(
        num_ranks=4, tensor=2, expert=2, plan=(((5, 3), (0, 4, 1)), ((2,), ())), distributed=False, recompute="full"
    ),
}
CONTEXT_CASES = {
    "context 2, recompute": Case(num_ranks=2, context=2, plan=ONE_EACH, distributed=False, recompute="full"),
    "context 2 x tensor 2 x expert 4": Case(
        num_ranks=4, context=2, tensor=2, expert=4, plan=ONE_EACH, distributed=False
    ),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    return str(make_tiny_model(path, seed=1, num_hidden_layers=4, mlp_only_layers=[1]))


@pytest.fixture(scope="module")
def routes(directory: str) -> dict[str, Routes]:
    """Transformers' own, random other ones, those with every fourth row missing, and no row at all."""
    rng, batch = np.random.default_rng(3), make_batch()
    own = np.concatenate(chosen_by_hf(directory, sequences(batch)))
    other = rng.permuted(np.broadcast_to(np.arange(NUM_EXPERTS), (*own.shape[:2], NUM_EXPERTS)), axis=-1)
    other = np.ascontiguousarray(other[..., :TOP_K]).astype(np.int16)
    holes = other.copy()
    holes[::4] = -1
    return {"none": None, "own": own, "missing": np.full_like(own, -1), "other": other, "holes": holes}


@pytest.fixture(scope="module")
def expected(directory: str, routes: dict[str, Routes]) -> dict[str, Any]:
    return {name: reference(directory, routes[name]) for name in ("none", "other", "holes")}


@pytest.fixture(scope="module")
def world(directory: str, routes: dict[str, Routes]) -> World:
    """The answers of the ranks of a case, which run once."""

    @functools.cache
    def run(name: str) -> list[dict[str, Any]]:
        case = (CASES | CONTEXT_CASES)[name]
        return run_ranks(case.num_ranks, gradients_by_routes, directory, case, routes)

    return run


@pytest.fixture(params=[*CASES, *(pytest.param(name, marks=needs_te) for name in CONTEXT_CASES)])
def told(request: pytest.FixtureRequest, world: World) -> list[dict[str, Any]]:
    return world(request.param)


def sequences(batch: Batch) -> list[np.ndarray]:
    return [batch.token_ids[batch.offsets[i] : batch.offsets[i + 1]] for i in range(len(batch.trajectory_ids))]


def reference(directory: str, ids: Routes) -> dict[str, torch.Tensor]:
    """Gradients of the weighted sum of log-probs, divided by the number of actions; each trajectory on its own."""
    batch, model = make_batch(), load_hf(directory)
    weights = np.zeros(len(batch.token_ids), np.float32)
    weights[batch.is_action] = weights_of(batch.num_action_tokens)
    for tokens, start, end in zip(sequences(batch), batch.offsets[:-1], batch.offsets[1:], strict=True):
        if ids is not None:
            force(model, ids[start:end])
        row = torch.from_numpy(tokens.astype(np.int64))[None]
        logprobs = model(row).logits[0, :-1].log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]
        (-(logprobs * torch.from_numpy(weights[start + 1 : end])).sum() / batch.num_action_tokens).backward()
    return _disk_gradients(model)


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Largest over the tensors, of the norm of the difference to the norm."""
    assert found.keys() == wanted.keys()
    return max(float((found[k] - wanted[k]).norm() / wanted[k].norm().clamp_min(1e-12)) for k in wanted)


def test_replay_of_the_routers_own_choice_changes_nothing(told: list[dict[str, Any]]) -> None:
    assert {layer for answer in told for layer in answer["layers"]} == set(LAYERS)
    for answer in told:
        assert answer["own"][0] == pytest.approx(answer["none"][0], rel=1e-6)
    assert distance(told[0]["own"][1], told[0]["none"][1]) <= 1e-6


def test_where_no_row_was_recorded_the_router_chooses(told: list[dict[str, Any]]) -> None:
    for answer in told:
        assert answer["missing"][0] == answer["none"][0]
    assert all(torch.equal(told[0]["missing"][1][name], tensor) for name, tensor in told[0]["none"][1].items())


@pytest.mark.parametrize("name", ["none", "other", "holes"])
def test_gradients_with_given_experts_are_those_of_transformers(
    told: list[dict[str, Any]], expected: dict[str, Any], name: str
) -> None:
    assert distance(told[0][name][1], expected[name]) <= 1e-4
    assert name == "none" or distance(told[0][name][1], expected["none"]) > 0.1


def test_gradients_reach_every_router(told: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for layer in LAYERS:
        name = f"model.layers.{layer}.mlp.gate.weight"
        found, wanted = told[0]["other"][1][name], expected["other"][name]
        assert wanted.norm() > 1e-4
        assert (found - wanted).norm() <= 1e-4 * wanted.norm()


def test_several_micro_batches_may_be_in_flight(world: World) -> None:
    """Every forward before the first backward, which computes the layers anew."""
    (answer,) = world("recompute")
    divided = {name: tensor / make_batch().num_action_tokens for name, tensor in answer["in flight"].items()}
    assert distance(divided, answer["other"][1]) <= 1e-5


def test_scores_of_every_kind_of_router_are_gathered_over_the_given_experts(world: World) -> None:
    """Softmax over the chosen, softmax over all, and DeepSeek's: sigmoid, correction bias, groups, scaling."""
    assert world("recompute")[0]["kinds"] == {"chosen": True, "all": True, "sigmoid": True}
