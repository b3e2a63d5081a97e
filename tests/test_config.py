"""A config is data with one owner: unknown keys, bad values and contradictions are errors that say what to do."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from megatron_sao import config

ROOT = Path(__file__).parent.parent
MINIMAL = """
[run]
directory = "runs/x"
num_steps = 3
[model]
path = "m"
[algorithm]
eps_low = 0.3
eps_high = 5.0
[rollout]
prompts = "a.b:c"
episode = "a.b:c"
reward = "a.b:c"
max_episode_tokens = 64
max_turn_tokens = 16
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "x.toml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.name)
def test_every_config_in_the_repository_parses(path: Path) -> None:
    assert config.load(path).run.num_steps >= 1


def test_defaults_are_the_methods(minimal: Path) -> None:
    c = config.load(minimal)
    assert (c.actor.optimizer.learning_rate, c.critic.optimizer.learning_rate) == (1e-6, 5e-6)
    assert (c.actor.optimizer.clip_norm, c.critic.optimizer.clip_norm) == (1.0, 10.0)
    assert (c.critic.num_updates, c.algorithm.alpha, c.algorithm.lambda_critic) == (2, 1.5, 1.0)
    assert c.rollout.num_slots == 2 * 128


def test_overrides_are_toml_values_and_bare_words_are_strings(minimal: Path) -> None:
    overrides = ["run.num_steps=7", "actor.layout.num_ranks = 2", "run.directory=runs/y", "actor.freeze=['a.*']"]
    c = config.load(minimal, overrides)
    assert (c.run.num_steps, c.actor.layout.num_ranks, c.run.directory, c.actor.freeze) == (7, 2, "runs/y", ("a.*",))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.num_step=3", r"unknown key 'run.num_step'; known here: .*num_steps"),
        ("critic.layout.tp=2", r"unknown key 'critic.layout.tp'; known here: context, expert, expert_tensor, .*tensor"),
        ("actor.hidden_dropout=0.1", "dropout must be 0"),
        ("rollout.temperature=0.7", "both must be 1"),
        ("rollout.top_p=0.9", "both must be 1"),
        ("algorithm.eps_low=1.0", "eps_low"),
        ("algorithm.eps_high=0.0", "eps_high"),
        ("actor.layout.tensor=2", "does not divide num_ranks"),
        ("critic.max_tokens_per_micro_batch=32", "is below"),
        ("algorithm.lambda_critic=0.9", "before_updates"),
        ("algorithm.alpha=1.0", "algorithm.alpha"),
        ("engine.port=99999", "engine.port"),
        ("rollout.reward_range=[1, 0]", "holds no two rewards"),
        ("actor.optimizer.betas=[2.0, 0.9]", "betas"),
        ("evaluation={prompts='a.b:c', num_prompts=1}", "num_prompts"),
        ("critic.max_critic_only_steps=3", "critic_only_steps"),
        ("rollout.prompts=nonsense", "rollout.prompts"),
        ("run.num_steps=three", "run.num_steps"),
        ("run", "key.path=value"),
        ("run.seed.x=1", "is a value, not a table|run.seed"),
    ],
)
def test_bad_values_are_refused_with_the_reason(minimal: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config.load(minimal, [override])


def test_missing_keys_and_files_are_named(minimal: Path, tmp_path: Path) -> None:
    minimal.write_text(MINIMAL.replace("num_steps = 3", ""))
    with pytest.raises(ValueError, match=r"missing key 'run\.num_steps'"):
        config.load(minimal)
    with pytest.raises(ValueError, match="cannot read the config"):
        config.load(tmp_path / "absent.toml")
    minimal.write_text("[run")
    with pytest.raises(ValueError, match="is not TOML"):
        config.load(minimal)


def test_the_reference_page_lists_every_key() -> None:
    text = (ROOT / "docs" / "config.md").read_text()
    missing = [key for key in keys(config.Config, "") if f"| `{key}` |" not in text]
    assert not missing, f"docs/config.md does not list {missing}"


def keys(part: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in part.model_fields.items():
        types = [field.annotation, *getattr(field.annotation, "__args__", ())]
        nested = [t for t in types if isinstance(t, type) and issubclass(t, BaseModel)]
        if nested:
            yield from keys(nested[0], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_config_imports_without_torch() -> None:
    code = "import sys, megatron_sao.config, megatron_sao.types, megatron_sao.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
