"""The quickstart's start policy: made once, whole or not at all, from demonstrations that look like episodes."""

import dataclasses
import json
import random
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer, Qwen3MoeForCausalLM

from megatron_sao import config
from megatron_sao.rollout.environments import chain_sum
from megatron_sao.rollout.episode import Limits, ToolEpisode
from megatron_sao.rollout.render import Renderer
from tests.support.scripted_turns import ScriptedTurns, generation
from tools import quickstart
from tools.warm_start import demonstrations, training
from tools.warm_start.model import VOCAB_SIZE, build_config, build_tokenizer

ROOT = Path(__file__).parent.parent.parent

TOKENIZER = build_tokenizer()
RENDERER = Renderer(TOKENIZER)
PROMPTS = chain_sum.prompts("demonstrations", 400)


@pytest.fixture(scope="module")
def settings() -> config.Config:
    return config.load(quickstart.CONFIG)


def test_the_runs_splits_share_no_question_and_fill_the_slots(settings: config.Config) -> None:
    sources = quickstart.split_prompts(settings)  # asserts that none is shared
    assert len(sources["train"]) >= 10_000
    assert len(sources["evaluation"]) >= settings.evaluation.num_prompts >= 256


def test_a_shared_question_stops_the_quickstart(settings: config.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_sum, "split_of", lambda question: "train")
    monkeypatch.setattr(chain_sum, "prompts", lambda *args, **kwargs: PROMPTS)
    with pytest.raises(AssertionError, match="share a question"):
        quickstart.split_prompts(settings)


def test_the_model_has_about_a_million_parameters_and_sizes_that_shard() -> None:
    shape = build_config(TOKENIZER)
    num_parameters = Qwen3MoeForCausalLM(shape).num_parameters()
    assert 0.6e6 <= num_parameters <= 1.5e6
    assert shape.num_experts >= 8
    assert not shape.tie_word_embeddings
    sizes = (shape.vocab_size, shape.num_attention_heads, shape.num_key_value_heads, shape.num_experts)
    assert all(size % 2 == 0 for size in (*sizes, shape.moe_intermediate_size))
    assert len(TOKENIZER) <= VOCAB_SIZE


@pytest.mark.parametrize("kind", demonstrations.SHARES)
async def test_a_demonstration_is_laid_out_as_the_episode_lays_out_the_same_turns(kind: str) -> None:
    for prompt in PROMPTS[:20]:
        (shown,) = demonstrations.demonstrations([prompt], RENDERER, random.Random(0), {kind: 1.0})
        turns = actions(shown)
        engine = ScriptedTurns([generation(*turn) for turn in turns])
        limits = Limits(max_episode_tokens=96, max_turn_tokens=32, max_turns=2)
        (trajectory,) = await ToolEpisode(TOKENIZER, (chain_sum.Calculator(),)).run(prompt, engine, limits)
        assert trajectory.token_ids.tolist() == list(shown.token_ids)
        assert trajectory.is_action.tolist() == list(shown.is_action)
        reward = await chain_sum.reward(prompt, (trajectory,))
        assert reward.value == (kind == "call and copy")


def actions(shown: demonstrations.Demonstration) -> list[list[int]]:
    turns: list[list[int]] = []
    for i, (token, is_action) in enumerate(zip(shown.token_ids, shown.is_action, strict=True)):
        if is_action and not shown.is_action[i - 1]:
            turns.append([])
        if is_action:
            turns[-1].append(token)
    return turns


def test_half_of_the_demonstrations_are_good() -> None:
    assert sum(demonstrations.SHARES.values()) == pytest.approx(1.0)
    shown = demonstrations.demonstrations(PROMPTS, RENDERER, random.Random(1))
    counts = Counter(demonstration.kind for demonstration in shown)
    assert counts["call and copy"] / len(PROMPTS) == pytest.approx(0.5, abs=0.08)


def test_the_longest_conversation_fits_in_the_configs_limits(settings: config.Config) -> None:
    prompts = chain_sum.prompts("demonstrations", 2000)
    shown = list(demonstrations.demonstrations(prompts, RENDERER, random.Random(0), {"call and copy": 1.0}))
    limits = settings.rollout
    assert max(len(d.token_ids) for d in shown) <= limits.max_episode_tokens
    assert max(len(turn) for d in shown for turn in actions(d)) <= limits.max_turn_tokens


TINY = training.Recipe(num_updates=2, batch_size=4)


def make(target: Path, monkeypatch: pytest.MonkeyPatch, recipe: training.Recipe = TINY) -> int:
    """The quickstart's main with two updates; a policy that has learned nothing is let through."""
    monkeypatch.setattr(training, "Recipe", lambda: recipe)
    monkeypatch.setattr(quickstart, "MIDDLING", (0.0, 1.0))
    return quickstart.main(
        [
            f"model.path='{target}'",
            "evaluation.prompts_args={split='evaluation', size=8}",
            "rollout.prompts_args={split='train', size=50}",
            "rollout.max_turn_tokens=8",
        ]
    )


def test_the_start_policy_is_made_once_and_anew_when_the_recipe_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "runs" / "start"
    assert make(target, monkeypatch) == 0
    written = (target / "model.safetensors").stat().st_mtime_ns
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompt = PROMPTS[0].messages
    assert Renderer(tokenizer).prompt_ids(prompt) == RENDERER.prompt_ids(prompt)
    assert Qwen3MoeForCausalLM.from_pretrained(target).config.vocab_size == VOCAB_SIZE

    capsys.readouterr()
    make(target, monkeypatch)
    assert "up to date" in capsys.readouterr().out
    assert (target / "model.safetensors").stat().st_mtime_ns == written

    make(target, monkeypatch, dataclasses.replace(TINY, num_updates=3))
    assert (target / "model.safetensors").stat().st_mtime_ns != written
    assert json.loads((target / quickstart.RECORD).read_text())["recipe"]["num_updates"] == 3
    assert [path.name for path in target.parent.iterdir()] == ["start"]  # nothing half-written is left


def test_a_failed_write_leaves_the_old_policy_and_nothing_else(tmp_path: Path) -> None:
    class Fails:
        def save_pretrained(self, directory: Path) -> None:
            raise OSError("no space left on device")

    target = tmp_path / "start"
    target.mkdir()
    (target / "old").write_text("kept")
    with pytest.raises(OSError, match="no space left"):
        quickstart.write(Fails(), TOKENIZER, target, {})  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.rglob("*")] == ["start", "old"]


def test_the_same_recipe_gives_the_same_weights() -> None:
    def weights() -> list:
        policy = training.train(TOKENIZER, PROMPTS, TINY, progress=lambda *_: None)
        return [parameter.detach().clone() for parameter in policy.parameters()]

    assert all((one == other).all() for one, other in zip(weights(), weights(), strict=True))


@pytest.mark.parametrize("gpu", ["", "GPU 0: one"])
def test_what_make_would_run_is_shell(gpu: str) -> None:
    """And on a GPU it says what differs there."""
    commands = subprocess.run(
        ["make", "-n", "quickstart", f"GPU={gpu}"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    ).stdout
    subprocess.run(["sh", "-n"], input=commands, text=True, check=True, timeout=30)
    assert ("actor.layout.num_ranks=1" in commands) == bool(gpu)
    assert ("weights are bfloat16" in commands) == bool(gpu)
