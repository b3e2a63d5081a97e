"""`sao` starts fast: a command loads what it needs and no more. Counted in modules, not in seconds."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch.benches import bench, benches
from launch.cli import command, parse_arguments
from megatron_sao.megatron.installed import OPTIONS_OF_GLM_DSA, SPARSE_ATTENTION, transformer_options

ROOT = Path(__file__).parent.parent.parent
MATH = "configs/qwen3-30b-a3b-math.toml"
SECONDS = {"torch", "transformers", "megatron", "sglang", "scipy", "tensorboard", "reasoning_gym"}  # each takes some
TENTHS = {"aiohttp", "numpy", "pydantic", "rich", "safetensors"}
RUN = """
import json, sys
from launch.cli import command
status = 0
try:
    status = command(sys.argv[2:])
except SystemExit as error:
    status = error.code
with open(sys.argv[1], "w") as file:
    json.dump([status, sorted({name.partition(".")[0] for name in sys.modules})], file)
"""


def run(tmp_path: Path, *arguments: str) -> tuple[int, set[str], str]:
    """Exit status, packages that were loaded, and what was said."""
    file = tmp_path / "modules.json"
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(file), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    status, loaded = json.loads(file.read_text())
    return status, set(loaded), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected_status", "may_load"),
    [
        (("--help",), 0, set()),
        (("--version",), 0, set()),
        (("train",), 2, set()),
        (("bench", "--help"), 0, set()),
        (("train", "no/such-file.toml"), 2, {"numpy", "pydantic"}),
        (("train", MATH), 2, {"numpy", "pydantic"}),  # there is no such model directory
        (("plan", MATH), 0, {"numpy", "pydantic", "rich"}),
        (("plan", "configs/glm-5.2.toml"), 0, {"numpy", "pydantic", "rich"}),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_a_command_loads_what_it_needs_and_no_more(
    tmp_path: Path, arguments: tuple[str, ...], expected_status: int, may_load: set[str]
) -> None:
    status, loaded, said = run(tmp_path, *arguments)
    assert status == expected_status, said
    assert loaded & (SECONDS | TENTHS) <= may_load


def test_what_megatron_can_compute_is_the_same_read_in_its_source_and_asked() -> None:
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    options = {field.name for field in dataclasses.fields(TransformerConfig)}
    inherited = {field.name for field in dataclasses.fields(ModelParallelConfig)}
    assert options - inherited <= transformer_options()
    assert options & OPTIONS_OF_GLM_DSA == transformer_options() & OPTIONS_OF_GLM_DSA
    assert (options >= OPTIONS_OF_GLM_DSA) is SPARSE_ATTENTION


def test_the_version_names_the_libraries_and_those_that_are_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command(["--version"])
    lines = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    assert stop.value.code == 0
    assert list(lines) == ["megatron-sao", "torch", "megatron-core", "sglang", "transformer-engine"]
    import megatron.core
    import torch

    assert (lines["torch"], lines["megatron-core"]) == (torch.__version__, megatron.core.__version__)
    assert lines["transformer-engine"] == "not installed" or lines["transformer-engine"][0].isdigit()


@pytest.mark.parametrize("name", ["train", "plan"])
def test_without_a_file_a_command_says_what_the_file_is_and_names_some(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        command([name])
    said = capsys.readouterr().err
    assert stop.value.code == 2
    for text in ("required: CONFIG\n", "CONFIG is a TOML file", "docs/config.md", f"sao {name} --help"):
        assert text in said
    examples = [word for word in said.split() if word.startswith("configs/")]
    assert len(examples) == 2
    assert all((ROOT / example).is_file() for example in examples)


@pytest.mark.parametrize(
    ("path", "is_said"),
    [
        ("Qwen/Qwen3-30B-A3B", True),
        ("runs/quickstart-start", False),  # lies where runs do: made by a tool
        ("/models/Qwen3-30B-A3B", False),
        ("Qwen3-30B-A3B", False),
        ("../models/Qwen3-30B-A3B", False),
    ],
)
def test_a_model_path_that_may_be_a_name_on_the_hub_is_told_how_to_get_the_directory(
    capsys: pytest.CaptureFixture[str], path: str, is_said: bool
) -> None:
    for name in ("train", "plan"):
        assert command([name, str(ROOT / MATH), f"model.path={path}"]) == 2
        said = capsys.readouterr().err
        assert "no config.json" in said
        assert ("hf download" in said) is is_said
        if is_said:
            remedy = f"hf download {path} --local-dir models/Qwen3-30B-A3B` and give model.path=models/Qwen3-30B-A3B"
            assert remedy in said


def test_a_run_in_the_working_directory_is_told_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", str(ROOT / MATH), "model.path=no/such-model", "run.directory=."]) == 2
    assert "hf download no/such-model" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "fault"), [("{bad", "is not JSON: "), ("[]", "holds a list, not an object")])
def test_a_config_json_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, fault: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    for name in ("train", "plan"):
        assert command([name, str(ROOT / MATH), f"model.path={tmp_path}"]) == 2
        assert f"{tmp_path / 'config.json'} {fault}" in capsys.readouterr().err


def test_every_bench_is_found_by_name_and_has_what_the_command_calls() -> None:
    found = benches()
    assert list(found) == ["publish", "step"]
    for name, summary in found.items():
        module = bench(name)
        assert callable(module.run)
        assert callable(module.add_arguments)
        assert (module.__doc__ or "").startswith(summary)


def test_overrides_may_follow_an_option() -> None:
    options = parse_arguments(["plan", MATH, "run.seed=1", "--search", "run.loop=serial", "--gpus", "8", "run.seed=2"])
    assert options.overrides == ["run.seed=1", "run.loop=serial", "run.seed=2"]
    assert (options.search, options.gpus) == (True, 8)


@pytest.mark.parametrize("arguments", [("plan", MATH, "--serach"), ("train", MATH, "run.seed=1", "-x", "run.seed=2")])
def test_an_option_that_is_not_known_is_refused(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_arguments(arguments)
    assert stop.value.code == 2
    assert (
        f"unrecognized arguments: {next(each for each in arguments if each.startswith('-'))}" in capsys.readouterr().err
    )


@pytest.mark.parametrize("file", ["no/such/plan.json", "configs"])
def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    capsys: pytest.CaptureFixture[str], file: str
) -> None:
    for arguments in (["plan", MATH], ["bench", "publish"]):
        with pytest.raises(SystemExit) as stop:
            parse_arguments([*arguments, "--json", file])
        assert stop.value.code == 2
        assert f"argument --json: {'' if file == 'configs' else 'cannot write '}{file}" in capsys.readouterr().err
