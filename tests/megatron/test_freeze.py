"""Freezing by HF name: the same tensors whatever Megatron calls them, and no pattern that does nothing."""

from typing import Any

import pytest

from tests.support.megatron_ranks import freeze_reports
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.ranks

PATTERNS: dict[str, tuple[str, ...]] = {
    "none": (),
    "attention": ("*.self_attn.*",),
    "attention and router": ("*.self_attn.*", "*.mlp.gate.*"),
    "one expert": ("model.layers.1.mlp.experts.3.*",),
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
        for report, _ in (answers[case] for case in ("none", "attention", "attention and router", "one expert"))
    }
    assert len(totals) == 1
    report, frozen = answers["none"]
    assert (report.num_frozen, report.saved_bytes, frozen) == (0, 0, set())


def test_a_router_and_a_single_expert_can_be_frozen(answers: dict[str, Any]) -> None:
    routers = {f"decoder.layers.{layer}.mlp.router.weight" for layer in (0, 1)}
    assert answers["attention and router"][1] - answers["attention"][1] == routers
    fc = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc"
    assert answers["one expert"][1] == {f"{fc}1.weight", f"{fc}2.weight"}


def test_a_pattern_that_matches_nothing_is_an_error_that_shows_names(answers: dict[str, Any]) -> None:
    assert "match no tensor: '*.attention.*'" in answers["matches nothing"]
    assert "model.layers.0.self_attn.q_proj.weight" in answers["matches nothing"]


def test_a_megatron_tensor_is_never_half_frozen(answers: dict[str, Any]) -> None:
    assert "freeze model.layers.0.self_attn.q_proj.weight and train" in answers["half of a fused tensor"]


def test_something_must_be_left_to_train(answers: dict[str, Any]) -> None:
    assert "leave nothing to train" in answers["everything"]
