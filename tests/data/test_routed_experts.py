"""Recorded experts on their way from a (fake) engine to a training rank: whole, checked, and gone afterwards."""

import base64
import copy
import dataclasses
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.local import check, engine_config
from launch.placement import Placement
from launch.role_processes import rank_specs
from launch.run_directory import run_directory
from megatron_sao.data.buffer import TrajectoryBuffer
from megatron_sao.data.routed_experts import ExpertFiles, ExpertReader, RouterShape, expert_file
from megatron_sao.rollout.engine import EngineError, GenerateRequest
from megatron_sao.rollout.episode import Limits, ToolEpisode
from megatron_sao.types import Trajectory
from tests.roles.test_roles import config_of
from tests.rollout.test_episode import END, RENDERER, TOKENIZER, Echo
from tests.rollout.test_episode import PROMPT as EPISODE_PROMPT
from tests.support.engines import PROMPT, Sender, Subject, eventually, fake_subject
from tests.support.fake_engine import experts_of
from tests.support.tiny_models import make_tiny_model

ROUTER = RouterShape(num_layers=3, top_k=2, num_experts=8)
READER = ExpertReader(directory=Path(), shape=ROUTER, layers=(1, 2))
TRAJECTORY_ID = "0" * 32


def test_ids_travel_as_the_smallest_unsigned_integers_with_one_value_to_spare() -> None:
    for num_experts, dtype in ((8, "uint8"), (255, "uint8"), (256, "uint16"), (512, "uint16")):
        shape = dataclasses.replace(ROUTER, num_experts=num_experts)
        assert shape.dtype.name == dtype
        assert shape.missing >= num_experts


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_the_shape_is_read_from_a_models_config(name: str) -> None:
    assert RouterShape.of({"num_hidden_layers": 3, "num_experts_per_tok": 2, name: 8}) == ROUTER


def test_a_turn_brings_the_rows_that_are_not_known_yet() -> None:
    with pytest.raises(ValueError, match="num_routed = 9 of 8 input ids"):
        GenerateRequest(rid=TRAJECTORY_ID, input_ids=PROMPT, max_new_tokens=1, num_routed=9)


async def test_every_row_of_an_episode_of_two_turns_is_asked_for_once() -> None:
    answers = [[*RENDERER.plain_ids("echo 3"), END], [*RENDERER.plain_ids("3"), END]]
    async with fake_subject(token_delay_s=0.0, router=ROUTER, answer=lambda _: answers.pop(0)) as subject:
        assert subject.fake is not None
        limits = Limits(max_episode_tokens=200, max_turn_tokens=20, max_turns=2)
        (trajectory,) = await ToolEpisode(TOKENIZER, (Echo(),)).run(EPISODE_PROMPT, subject.engine, limits)
        starts = [body["routed_experts_start_len"] for path, body in subject.fake.calls if path == "/generate"]
    assert starts == [0, trajectory.turns[0][1] - 1]  # the last token of a turn has no row until the next one
    assert trajectory.routed_experts is not None
    assert trajectory.routed_experts.dtype == np.uint8
    assert (trajectory.routed_experts == experts_of(ROUTER, trajectory.token_ids[:-1].tolist())).all()


async def test_an_episode_that_is_not_trained_on_asks_for_none() -> None:
    async with fake_subject(token_delay_s=0.0, router=ROUTER) as subject:
        assert subject.fake is not None
        limits = Limits(max_episode_tokens=200, max_turn_tokens=20, max_turns=1, wants_routed=False)
        (trajectory,) = await ToolEpisode(TOKENIZER, ()).run(EPISODE_PROMPT, subject.engine, limits)
        assert not any("return_routed_experts" in body for path, body in subject.fake.calls if path == "/generate")
    assert trajectory.routed_experts is None


Edit = Callable[[dict[str, Any], np.ndarray], Any]
LIES: dict[str, tuple[Edit, str]] = {
    "the flag is not given": (lambda meta, _: meta.pop("routed_experts"), "--enable-return-routed-experts"),
    "a row too few": (lambda _, rows: rows[:-1], r"72 routed experts, not 13 \* 3 \* 2"),
    "a layer too few": (lambda _, rows: rows[:, 1:], "52 routed experts"),
    "another top-k": (lambda _, rows: rows[:, :, :1], "39 routed experts"),
    "an expert that is not there": (lambda _, rows: rows + 1, "from 1 to 8: there are 8"),
    "a negative expert": (lambda _, rows: rows - 1, "from -1 to 6"),
    "an expert twice": (lambda _, rows: np.where(rows == 4, 5, rows), "the same expert twice"),
    "no base64": (lambda meta, _: meta.update(routed_experts="?"), "base64|padding|data"),
}


@pytest.mark.parametrize("lie", LIES)
async def test_experts_that_do_not_fit_the_tokens_are_an_error(lie: str) -> None:
    edit, message = LIES[lie]

    def edited(answer: dict[str, Any]) -> dict[str, Any]:
        meta = (answer := copy.deepcopy(answer))["meta_info"]
        raw = base64.b64decode(meta["routed_experts"])
        rows = edit(meta, np.frombuffer(raw, np.int32).reshape(-1, ROUTER.num_layers, ROUTER.top_k))
        if isinstance(rows, np.ndarray):
            meta["routed_experts"] = base64.b64encode(rows.astype(np.int32).tobytes()).decode()
        return answer

    async with fake_subject(token_delay_s=0.0, router=ROUTER) as subject:
        assert subject.fake is not None
        subject.fake.faults.edit_generation = edited
        with pytest.raises(EngineError, match=message):
            await subject.generate(6)


@pytest.mark.parametrize(("mode", "num_missing"), [("retract", -1), ("in_place", 0)])
async def test_what_was_computed_anew_under_other_weights_is_missing(mode: Any, num_missing: int) -> None:
    """Retracted: the record of all before the switch is that of the second computation. In place: of the first."""
    async with fake_subject(router=ROUTER) as subject:
        generation = await across_a_switch(subject, mode)
    first_new = generation.versions.index(1)
    expected = experts_of(ROUTER, [*PROMPT, *generation.output_ids[:-1]]).astype(np.uint8)
    expected[: len(PROMPT) + first_new - 1 if num_missing else 0] = ROUTER.missing
    assert generation.routed_experts is not None
    assert (generation.routed_experts == expected).all()


async def across_a_switch(subject: Subject, mode: Any) -> Any:
    _, turn = subject.start(60)

    async def samples() -> bool:
        return subject.fake is not None and any(request.output for request in subject.fake._requests.values())

    assert await eventually(samples)
    await subject.engine.pause(mode)
    async with Sender(subject) as sender:
        await subject.engine.begin_update()
        await sender.send(subject.weights, version=1, flush=mode == "retract")
        await subject.engine.end_update()
    await subject.engine.resume()
    return await turn


def trajectory_of(name: str = TRAJECTORY_ID, ids: Any = "random") -> Trajectory:
    if isinstance(ids, str):
        rng = np.random.default_rng(0)
        ids = np.stack([rng.permutation(8)[:2] for _ in range(12)]).reshape(4, 3, 2).astype(np.uint8)
    return Trajectory(
        id=name,
        episode_id=name,
        prompt_id="p",
        position=0,
        token_ids=np.arange(5, dtype=np.int32),
        is_action=np.arange(5) > 1,
        rollout_logprobs=np.where(np.arange(5) > 1, -1, 0).astype(np.float32),
        version=np.where(np.arange(5) > 1, 0, -1).astype(np.int32),
        reward=np.zeros(5, np.float32),
        turns=((2, 5),),
        stop_reason="stop",  # type: ignore[arg-type]
        engine="e",
        started_s=0.0,
        finished_s=1.0,
        routed_experts=ids,
    )


@pytest.mark.parametrize("ids", [np.zeros((5, 3, 2), np.uint8), np.zeros((4, 3), np.uint8), np.zeros((4, 3, 2), int)])
def test_a_trajectory_with_experts_of_another_shape_is_refused_at_birth(ids: Any) -> None:
    with pytest.raises(ValueError, match=r"not unsigned ids \[4, layers, top_k\]"):
        trajectory_of(ids=ids)


def test_a_rank_reads_its_layers_and_counts_what_is_missing(tmp_path: Path) -> None:
    first, second = trajectory_of(), trajectory_of("1" * 32)
    holed = np.array(second.routed_experts)
    holed[1] = ROUTER.missing
    files = ExpertFiles(tmp_path / "files")
    kept = files.write((first, dataclasses.replace(second, routed_experts=holed)))
    assert [trajectory.routed_experts for trajectory in kept] == [None, None]
    reader = dataclasses.replace(READER, directory=tmp_path / "files")
    ids, num_missing = reader.read([second.id, first.id], [5, 5])
    assert first.routed_experts is not None
    assert (ids[5:9] == first.routed_experts[:, 1:]).all()
    assert np.flatnonzero((ids == -1).all(axis=(1, 2))).tolist() == [1, 4, 9]  # a hole and two last tokens
    assert num_missing == 3
    assert reader.read([], [])[0].shape == (0, 2, 2)
    assert sorted(path.suffix for path in (tmp_path / "files").iterdir()) == [".npy", ".npy"]
    files.remove(kept)
    assert not list((tmp_path / "files").iterdir())
    files.close()
    assert not (tmp_path / "files").exists()


BROKEN: dict[str, tuple[Any, str]] = {
    "no file": (None, "cannot be read"),
    "no array": (b"oops", "cannot be read"),
    "a row too few": (
        np.zeros((3, 3, 2), np.uint8),
        r"\[3, 3, 2\], a trajectory of 5 tokens has uint8\[4, 3, 2\]",
    ),
    "a layer too few": (np.zeros((4, 2, 2), np.uint8), r"uint8\[4, 2, 2\]"),
    "another dtype": (np.zeros((4, 3, 2), np.uint16), "uint16"),
    "an expert twice in a layer with experts": (np.zeros((4, 3, 2), np.uint8), "one twice"),
    "an expert that is not there": (np.tile(np.array([0, 8], np.uint8), (4, 3, 1)), "expert above 7"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_is_not_its_trajectorys_is_refused(case: str, tmp_path: Path) -> None:
    content, message = BROKEN[case]
    path = expert_file(tmp_path, TRAJECTORY_ID)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(READER, directory=tmp_path).read([TRAJECTORY_ID], [5])


def test_an_episode_that_left_the_experts_out_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its episode must join"):
        ExpertFiles(tmp_path / "files").write((trajectory_of(ids=None),))


async def test_a_file_lives_as_long_as_the_slot_of_its_episode(tmp_path: Path) -> None:
    files = ExpertFiles(tmp_path / "files")
    buffer = TrajectoryBuffer(2, max_token_lag=0, on_free=files.remove)
    for name in ("a" * 32, "b" * 32):
        buffer.put(await buffer.reserve(timeout_s=1), files.write((trajectory_of(name),)))
    taken = await buffer.take(1, timeout_s=1, version=0)
    assert len(list((tmp_path / "files").iterdir())) == 2
    buffer.release(taken)
    assert [path.stem for path in (tmp_path / "files").iterdir()] == ["b" * 32]
    with pytest.raises(TimeoutError):
        await buffer.take(1, timeout_s=0.05, version=1)  # it is stale by now, and dropped
    assert not list((tmp_path / "files").iterdir())


def test_replay_is_refused_for_a_dense_model_and_switches_the_engines_record_on(tmp_path: Path) -> None:
    dense, sparse = (make_tiny_model(tmp_path / arch, arch=arch) for arch in ("qwen3", "qwen3_moe"))  # type: ignore[arg-type]
    changes: dict[str, Any] = {"actor": {"router_replay": True}, "run": {"directory": str(tmp_path / "run")}}
    with pytest.raises(ValueError, match="Qwen3ForCausalLM.*has no experts: set it to false"):
        check(config_of(dense, **changes))
    config = config_of(sparse, **changes)
    check(config)
    assert engine_config(config, Placement()).extra_args == ("--enable-return-routed-experts",)
    assert engine_config(config_of(sparse), Placement()).extra_args == ()
    specs = rank_specs(config, port=1, key=b"k" * 32, private=tmp_path)
    assert specs[0].expert_directory == str(tmp_path / "run" / ".routed-experts")  # type: ignore[union-attr]


def test_what_a_killed_run_left_is_removed_when_the_next_one_starts(tmp_path: Path) -> None:
    config = config_of(make_tiny_model(tmp_path / "model"), run={"directory": str(tmp_path / "run")})
    with run_directory(config) as directory:
        pass
    (directory / ".routed-experts").mkdir()  # as a kill leaves it
    expert_file(directory / ".routed-experts", uuid.uuid4().hex).write_bytes(b"")
    with run_directory(config):
        assert not list(tmp_path.rglob(".routed-experts"))
