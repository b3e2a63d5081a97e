"""Freezing by HF name: the same tensors whatever Megatron calls them, and no pattern that does nothing."""

import re
from typing import Any

import pytest

from tests.support.megatron_ranks import freeze_reports
from tests.support.ranks import run_ranks
from tests.support.te_cpu import TRANSFORMER_ENGINE
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.ranks

PATTERNS: dict[str, tuple[str, ...]] = {
    "none": (),
    "attention": ("*.self_attn.*",),
    "attention and router": ("*.self_attn.*", "*.mlp.gate.*"),
    "experts of a layer": ("model.layers.1.mlp.experts.*",),
    "first projections of experts": ("model.layers.1.mlp.experts.*.gate_proj.*", "model.layers.1.mlp.experts.*.up_*"),
    "one expert": ("model.layers.1.mlp.experts.3.*",),
    "all experts but one": ("model.layers.1.mlp.experts.[!3].*",),
    "second projection of one expert": ("model.layers.0.mlp.experts.0.down_proj.weight",),
    "matches nothing": ("*.self_attn.*", "*.attention.*"),
    "half of a fused tensor": ("*.q_proj.weight",),
    "everything": ("*",),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = make_tiny_model(tmp_path_factory.mktemp("model") / "policy")
    return run_ranks(1, freeze_reports, directory, PATTERNS)[0]  # type: ignore[no-any-return]


def test_frozen_attention_is_every_token_mixer_and_nothing_else(answers: dict[str, Any]) -> None:
    report, frozen = answers["attention"]
    kinds = ("linear_proj", "linear_qkv", "q_layernorm", "k_layernorm")
    assert frozen == {f"decoder.layers.{layer}.self_attention.{kind}.weight" for layer in (0, 1) for kind in kinds}
    # per layer q [96,64], k and v [48,64], o [64,96], two norms [24]
    numbers = 2 * (96 * 64 + 2 * 48 * 64 + 64 * 96 + 2 * 24)
    assert (report.num_frozen_tensors, report.num_frozen) == (12, numbers)
    assert report.saved_bytes == numbers * (4 + 8)  # float32: gradient, two moments


def test_counts_add_up_to_the_whole_model(answers: dict[str, Any]) -> None:
    totals = {
        (report.num_frozen_tensors + report.num_trained_tensors, report.num_frozen + report.num_trained)
        for report, _ in (answers[case] for case in ("none", "attention", "attention and router", "experts of a layer"))
    }
    assert len(totals) == 1
    report, frozen = answers["none"]
    assert (report.num_frozen, report.saved_bytes, frozen) == (0, 0, set())


def test_routers_and_a_layers_experts_can_be_frozen(answers: dict[str, Any]) -> None:
    routers = {f"decoder.layers.{layer}.mlp.router.weight" for layer in (0, 1)}
    assert answers["attention and router"][1] - answers["attention"][1] == routers
    first, second = (experts_of_layer_one(f"linear_fc{number}") for number in (1, 2))
    assert answers["first projections of experts"][1] == first
    assert answers["experts of a layer"][1] == first | second


def experts_of_layer_one(kind: str) -> set[str]:
    """As the local spec and Transformer Engine's name the weights of its 8 experts."""
    if TRANSFORMER_ENGINE:
        return {f"decoder.layers.1.mlp.experts.{kind}.weight{expert}" for expert in range(8)}
    return {f"decoder.layers.1.mlp.experts.local_experts.{expert}.{kind}.weight" for expert in range(8)}


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("one expert", r"freeze 1 experts of a layer \(model.layers.1.mlp.experts.3.gate_proj.weight\) and train 7"),
        ("all experts but one", r"train 1 \(model.layers.1.mlp.experts.3.gate_proj.weight\), which Transformer Engine"),
        ("second projection of one expert", r"for all, model.layers.0.mlp.experts.\*.down_proj.weight, or for none"),
    ],
)
def test_some_experts_of_a_layer_are_refused(answers: dict[str, Any], case: str, says: str) -> None:
    """In every layer spec: one config means the same in all."""
    assert re.search(says, answers[case])


def test_a_pattern_that_matches_nothing_is_an_error_that_shows_names(answers: dict[str, Any]) -> None:
    assert "match no tensor: '*.attention.*'" in answers["matches nothing"]
    assert "model.layers.0.self_attn.q_proj.weight" in answers["matches nothing"]


def test_a_megatron_tensor_is_never_half_frozen(answers: dict[str, Any]) -> None:
    assert "freeze model.layers.0.self_attn.q_proj.weight and train" in answers["half of a fused tensor"]


def test_something_must_be_left_to_train(answers: dict[str, Any]) -> None:
    assert "leave nothing to train" in answers["everything"]
