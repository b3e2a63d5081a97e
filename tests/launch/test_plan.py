"""`sao plan`: what a run would need, from a configuration and a config.json alone."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from launch.cli import command
from launch.estimate import Workload
from launch.plan import GPU_BYTES, make_plan
from launch.search import RoleSearch
from megatron_sao.config import Config, load
from megatron_sao.megatron.installed import SPARSE_ATTENTION
from megatron_sao.megatron.mapping.architectures import read_hf_config
from megatron_sao.rollout.reward import load_object

CONFIGS = Path(__file__).parent.parent.parent / "configs"
MATH = CONFIGS / "qwen3-30b-a3b-math.toml"
RECIPES = {  # totals without multi-token prediction; active with embedding and output layer
    "qwen3-30b-a3b-math": {"params_total": 30_532_122_624, "params_active": 3.35, "nodes": 5},
    "qwen3-30b-a3b-swe": {"params_total": 30_532_122_624, "params_active": 3.35, "nodes": 5},
    "qwen3-235b-a22b": {"params_total": 235_093_634_560, "params_active": 22.19, "nodes": 14},
    "glm-4.5-air": {"params_total": 106_852_251_264, "params_active": 13.42, "nodes": 14, "params_mtp": 2_375_059_584},
    "glm-5.2": {"params_total": 743_377_019_904, "params_active": 41.25, "nodes": 34, "params_mtp": 9_952_920_576},
}


def plan(config: Path, file: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    status = command(["plan", str(config), *arguments, "--json", str(file)])
    return status, json.loads(file.read_text()) if file.exists() else {}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, dict[str, Any]]]:
    out = tmp_path_factory.mktemp("plans")
    return {name: plan(CONFIGS / f"{name}.toml", out / f"{name}.json") for name in RECIPES}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_gpus_and_counts_its_parameters_to_the_unit(plans: Any, name: str) -> None:
    (status, found), expected = plans[name], RECIPES[name]
    assert status == 0
    assert found["fits"] is True
    assert [role["fits"] for role in found["roles"].values()] == [True] * 3
    assert found["params_total"] == expected["params_total"]
    assert found["params_mtp"] == expected.get("params_mtp", 0)
    assert found["params_active"] / 1e9 == pytest.approx(expected["params_active"], abs=0.005)
    assert found["nodes"] == expected["nodes"]
    assert found["gpus"] == sum(role["gpus"] for role in found["roles"].values()) <= 8 * found["nodes"]


@pytest.mark.parametrize("name", RECIPES)
def test_the_ranks_of_a_recipe_hold_the_model_once_and_their_copies(plans: Any, name: str) -> None:
    """Per stage: copies of every tensor that is not cut, so at least the model and at most a twentieth more."""
    _, found = plans[name]
    layout = load(CONFIGS / f"{name}.toml").actor.layout
    copies = layout.data * layout.context
    ranks = layout.num_ranks // layout.pipeline
    held = sum(stage["params_per_gpu"] for stage in found["roles"]["actor"]["stages"]) * ranks
    assert held >= found["params_total"] * min(copies, layout.expert_data) * 0.99
    assert held <= found["params_total"] * max(copies, layout.expert_data) * 1.1


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_papers_numbers_and_paths_that_import(name: str) -> None:
    config = load(CONFIGS / f"{name}.toml")
    is_coding = config.rollout.max_turns == 300
    assert (config.algorithm.eps_low, config.algorithm.eps_high) == ((0.8, 3.0) if is_coding else (0.3, 5.0))
    assert config.rollout.max_turns in (50, 300)
    assert (config.rollout.max_episode_tokens, config.rollout.trajectories_per_step) == (131072, 128)
    assert config.critic.num_updates == 2
    for path in (config.rollout.prompts, config.rollout.episode, config.rollout.reward):
        load_object(path)


def test_glm_52_fits_whichever_attention_megatron_computes() -> None:
    config = load(CONFIGS / "glm-5.2.toml")
    hf = read_hf_config(CONFIGS / "models/zai-org/GLM-5.2")
    for computes_sparse in (False, True):
        planned = make_plan(config, dataclasses.replace(hf, computes_sparse=computes_sparse))
        assert planned.fits
        assert planned.num_gpus <= 272


@pytest.mark.parametrize("name", ["qwen3-30b-a3b-math", "qwen3-235b-a22b", "glm-4.5-air"])
def test_a_recipes_layouts_are_nearly_as_fast_as_the_best_of_their_sizes(name: str) -> None:
    """By the estimate: within a tenth, for some recipes leave more memory free than the fastest layout does."""
    config = load(CONFIGS / f"{name}.toml")
    hf = read_hf_config(CONFIGS / "models" / config.model.path)
    for role, of in ((config.actor, "policy"), (config.critic, "critic")):
        of_role = dataclasses.replace(hf, role=of)
        best = RoleSearch(config=config, role=role, hf=of_role).best(role.layout.num_ranks)[0]
        assert Workload.of(config, role, of_role).seconds(role).total <= 1.1 * best.seconds.total


def test_frozen_attention_of_a_critic_has_neither_gradients_nor_optimizer_state(plans: Any) -> None:
    _, found = plans["qwen3-30b-a3b-math"]
    (stage,) = found["roles"]["critic"]["stages"]
    attention = 48 * (2048 * (4096 + 512 + 512 + 4096) // 4 + 2 * 128)  # q, k, v, o cut in 4; two norms are not
    assert stage["params_frozen_per_gpu"] == attention
    assert stage["gradients"] == pytest.approx(4 * (stage["params_per_gpu"] - attention), rel=1e-4)
    saved = attention * (4 + 12 // 4)  # Adam's state and the main copy lie on 4 context ranks
    assert found["roles"]["critic"]["saved_by_freezing_bytes"] == pytest.approx(saved, rel=1e-3)


def test_experts_are_cut_over_expert_ranks_and_states_over_their_copies(plans: Any) -> None:
    _, found = plans["qwen3-30b-a3b-math"]
    (stage,) = found["roles"]["actor"]["stages"]
    experts = 48 * 16 * 3 * 2048 * 768  # of 128, 8 ranks have 16 each
    dense = 48 * 2048 * (4096 + 512 + 512 + 4096) // 4 + 2 * 151936 * 2048 // 4
    copied = 48 * (2048 * 128 + 2 * 2048 + 2 * 128) + 2048
    assert stage["params_per_gpu"] == experts + dense + copied
    assert stage["parameters"] == pytest.approx(2 * (experts + dense + copied), rel=1e-4)
    assert stage["optimizer"] == pytest.approx(12 * (experts // 2 + (dense + copied) // 4), rel=1e-4)


def test_the_table_says_who_holds_what_and_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", str(CONFIGS / "glm-5.2.toml")]) == 0
    shown = capsys.readouterr().out
    for text in (
        "743.38 B parameters, 41.25 B active",
        "272 H200-141GB in 34 nodes of 8",
        f"96-127 │ {58 if SPARSE_ATTENTION else 59}-77  │ final norm, output layer",
        "expert rank e holds experts 8e to 8e+7 of 256",
        "the busiest expert rank sees 1.5 x the average",
        "of its parameters are frozen",
        "records up to 164 MB of experts for an episode, 58.5 GiB for 384 slots",
    ):
        assert text in shown


def test_a_part_of_a_vocabulary_has_its_padding_in_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = json.loads((CONFIGS / "models/Qwen/Qwen3-30B-A3B-Thinking-2507/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**copy, "vocab_size": 151_937}))
    assert command(["plan", str(MATH), f"model.path={tmp_path}"]) == 0
    assert "the vocabulary (37985 of 151937)" in capsys.readouterr().out


def test_recomputation_context_and_stages_make_activations_smaller(tmp_path: Path) -> None:
    def activations(*overrides: str) -> int:
        _, found = plan(MATH, tmp_path / "plan.json", *overrides)
        return int(found["roles"]["actor"]["parts"]["activations"])

    usual = activations()
    assert activations("actor.recompute=none") > 3 * usual
    assert activations("actor.layout.context=2") == pytest.approx(2 * usual, rel=0.1)
    assert activations("actor.layout.tensor=2") > 1.5 * usual


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("actor.layout={num_ranks=6, tensor=6}",),
            r"actor.layout: tensor = 6 does not divide .*32: 1, 2, 4, 8, 16, 32",
        ),
        (
            ("critic.layout={num_ranks=12, expert=12}",),
            r"critic.layout: expert = 12 does not divide the experts, 128: 1, 2, 4, ",
        ),
        (("actor.layout={num_ranks=64, pipeline=64}",), "at most 48 stages"),
        (("actor.layout={num_ranks=6, tensor=4}",), "num_ranks must be a multiple of 4"),
        (("engine.tensor=3",), "engine: tensor = 3 does not divide"),
        (
            ("engine.extra_args=['--mem-fraction-static', 'much']",),
            "engine.extra_args: --mem-fraction-static = 'much' is not a number",
        ),
        (
            ("model.dtype=float32",),
            r"actor\.layout: context = 4 with float32: .*set model.dtype = bfloat16, or context = 1",
        ),
        (("cluster.gpu=T4",), "'A100-80GB', 'H100-80GB', 'H200-141GB' or 'B200-180GB'"),
        (
            ("model.path=no/such-model",),
            "there is no config.json in no/such-model or in .*: set model.path to its directory",
        ),
        (("critic.freeze=['*.attention.*']",), "freeze patterns that match no tensor"),
        ((f"model.path={CONFIGS}/models/zai-org/GLM-5.2",), "exceeds index_topk = 2048 of .*GLM-5.2"),
        (("actor.layout.contxt=2",), "unknown key 'actor.layout.contxt'"),
    ],
)
def test_bad_input_is_status_2_and_says_what_would_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    status, found = plan(MATH, tmp_path / "plan.json", *overrides)
    assert (status, found) == (2, {})
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("overrides", "role", "message"),
    [
        (
            ("actor.max_tokens_per_micro_batch=2000000",),
            "actor",
            "the largest part is activations.*lower max_tok",
        ),
        (("actor.recompute=none",), "actor", 'the largest part is activations.*set recompute = "full"'),
        (
            ("actor.optimizer.distributed=false", "actor.max_tokens_per_micro_batch=262144"),
            "actor",
            "the largest part is optimizer.*optimizer.distributed = true",
        ),
        (("engine.tensor=1",), "engine", "more engine.tensor ranks"),
        (("engine.max_total_tokens=100000000",), "engine", "100000000 are wanted"),
        (("engine.extra_args=['--mem-fraction-static','0.999']",), "engine", "a lower --mem-fraction-static"),
        (("engine.extra_args=['--mem-fraction-static=0.999']",), "engine", "a lower --mem-fraction-static"),
    ],
)
def test_what_does_not_fit_is_status_1_and_says_what_would_help(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, overrides: tuple[str, ...], role: str, message: str
) -> None:
    status, found = plan(MATH, tmp_path / "plan.json", *overrides)
    assert (status, found["fits"]) == (1, False)
    assert [name for name, each in found["roles"].items() if not each["fits"]] == [role]
    assert found["roles"][role]["bytes_per_gpu"] == sum(found["roles"][role]["parts"].values())
    assert re.search(f"{role} does not fit: .*{message}", capsys.readouterr().out)


def test_a_model_directory_comes_before_the_copies_of_config_files(tmp_path: Path) -> None:
    copy = json.loads((CONFIGS / "models/Qwen/Qwen3-30B-A3B-Thinking-2507/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**copy, "num_hidden_layers": 24}))
    _, found = plan(MATH, tmp_path / "plan.json", f"model.path={tmp_path}")
    assert found["roles"]["actor"]["stages"][0]["layers"] == [[0, 24]]


def test_an_engine_cuts_experts_over_the_ranks_that_hold_the_same_ones(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    copy = json.loads((CONFIGS / "models/Qwen/Qwen3-30B-A3B-Thinking-2507/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**copy, "moe_intermediate_size": 772}))
    assert plan(MATH, tmp_path / "plan.json", f"model.path={tmp_path}", "engine.tensor=8") == (2, {})
    assert (
        "engine: tensor = 8 cuts each expert in 8, which does not divide its feed-forward size, 772: 1, 2, 4 would"
        in (capsys.readouterr().err)
    )
    arguments = (f"model.path={tmp_path}", "engine.tensor=8", "engine.extra_args=['--ep-size', '2']")
    assert plan(MATH, tmp_path / "plan.json", *arguments)[0] == 0


def test_the_gpus_of_a_config_are_those_that_are_known() -> None:
    known = Config.model_fields["cluster"].annotation.model_fields["gpu"].annotation.__args__  # type: ignore[union-attr]
    assert GPU_BYTES.keys() == set(known)
