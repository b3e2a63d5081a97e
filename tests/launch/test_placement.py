"""Which process is on which GPU: one each where there are enough, shared where that is possible and wanted."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from launch.local import engine_config
from launch.placement import Placement, place
from launch.role_processes import rank_specs
from launch.tasks import in_turn
from megatron_sao.config import Config, load
from megatron_sao.roles.spec import ActorSpec
from tests.launch.test_launch import CONFIG

ONE_RANK = ("actor.layout.num_ranks=1", "actor.layout.expert=1", "critic.layout.num_ranks=1")
TWO_RANKS = ("actor.layout.num_ranks=2", "actor.layout.expert=2", "critic.layout.num_ranks=1")
SHARED, NOT_SHARED = "cluster.share_gpus=true", "cluster.share_gpus=false"


def config_of(tmp_path: Path, *overrides: str) -> Config:
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.format(directory=tmp_path / "run", model="no/model"))
    return load(path, overrides)


def parts(placement: Placement) -> tuple[Any, ...]:
    return placement.actor, placement.critic, placement.engine, placement.engine_base


@pytest.mark.parametrize(
    ("overrides", "devices", "placed"),
    [
        (ONE_RANK, "a", ("a", "a", "a", 0)),  # by itself
        (ONE_RANK, "ab", ("a", "b", "b", 1)),  # the engine beside the critic: a publish stays on NCCL
        (ONE_RANK, "abc", ("a", "b", "c", 2)),
        ((*ONE_RANK, SHARED), "abcd", ("a", "b", "c", 2)),  # nothing to share
        ((*ONE_RANK, NOT_SHARED), "abc", ("a", "b", "c", 2)),
        (TWO_RANKS, "abcd", ("ab", "c", "d", 3)),
        ((*TWO_RANKS, SHARED), "abc", ("ab", "c", "c", 2)),
        ((*TWO_RANKS, SHARED), "ab", ("ab", "a", "b", 1)),
        ((*TWO_RANKS, SHARED, "engine.tensor=2"), "abc", ("ab", "c", "bc", 1)),
        ((*ONE_RANK, "engine.tensor=2"), "ab", ("a", "b", "ab", 0)),
        (TWO_RANKS, "", ("", "", "", 0)),  # the CPU
        ((*TWO_RANKS, SHARED), "", ("", "", "", 0)),
    ],
)
def test_worlds_are_spread_over_what_is_there(
    tmp_path: Path, overrides: tuple[str, ...], devices: str, placed: tuple[str, str, str, int]
) -> None:
    placement = place(config_of(tmp_path, *overrides), list(devices))
    assert parts(placement) == (tuple(placed[0]), tuple(placed[1]), tuple(placed[2]), placed[3])
    assert placement.environment("critic", 0) == ({"CUDA_VISIBLE_DEVICES": placed[1][0]} if devices else {})
    for world in placed[:3]:
        assert len(set(world)) == len(world), "NCCL takes a device once"


@pytest.mark.parametrize(
    ("overrides", "devices", "words"),
    [
        (TWO_RANKS, "abc", "the run needs 4 GPUs (actor.layout.num_ranks = 2, critic.layout.num_ranks = 1, "),
        (TWO_RANKS, "abc", "only where each role has one rank: cluster.share_gpus = true shares them all the same"),
        ((*TWO_RANKS, SHARED), "a", "so each of actor.layout.num_ranks must be at most 1"),
        (TWO_RANKS, "a", "so each of actor.layout.num_ranks must be at most 1"),
        ((*ONE_RANK, SHARED, "engine.tensor=2"), "a", "so each of engine.tensor must be at most 1"),
        ((*ONE_RANK, NOT_SHARED), "ab", "2 are visible; cluster.share_gpus = true lets roles and engine share them"),
        ((*ONE_RANK, NOT_SHARED), "a", 'CUDA_VISIBLE_DEVICES="" uses the CPU'),
    ],
)
def test_what_cannot_be_or_was_not_wanted_shared_is_refused_with_a_remedy(
    tmp_path: Path, overrides: tuple[str, ...], devices: str, words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        place(config_of(tmp_path, *overrides), list(devices))


@pytest.mark.parametrize(("devices", "backend"), [("a", "gloo"), ("ab", None), ("abc", None), ("", None)])
def test_a_publish_goes_through_gloo_where_a_sender_and_the_engine_share_a_gpu(
    tmp_path: Path, devices: str, backend: str | None
) -> None:
    config = config_of(tmp_path, *ONE_RANK)
    placement = place(config, list(devices))
    assert placement.publish_backend == backend
    specs = rank_specs(config, port=1, key=b"k" * 32, private=tmp_path, publish_backend=placement.publish_backend)
    assert [spec.publish_backend for spec in specs if isinstance(spec, ActorSpec)] == [backend]


def test_an_engine_that_shares_takes_its_part_of_the_memory_and_no_more_unless_it_is_told(tmp_path: Path) -> None:
    config = config_of(tmp_path, *ONE_RANK)
    alone, beside_critic, beside_all = (place(config, list(devices)) for devices in ("abc", "ab", "a"))
    assert engine_config(config, alone).extra_args == ("--base-gpu-id", "2")
    assert engine_config(config, beside_critic).extra_args == ("--base-gpu-id", "1", "--mem-fraction-static", "0.25")
    assert engine_config(config, beside_all).extra_args == ("--base-gpu-id", "0", "--mem-fraction-static", "0.25")
    for given in ("['--mem-fraction-static', '0.5']", "['--mem-fraction-static=0.5']"):
        told = config_of(tmp_path, *ONE_RANK, f"engine.extra_args={given}")
        assert engine_config(told, beside_all).extra_args == ("--base-gpu-id", "0", *told.engine.extra_args)


def test_the_split_is_said(tmp_path: Path) -> None:
    config = config_of(tmp_path, *ONE_RANK)
    alone, beside_critic, beside_all = (
        list(place(config, list(devices)).describe_shared(())) for devices in ("abc", "ab", "a")
    )
    assert alone == []
    (sentence,) = beside_critic
    assert sentence.startswith("GPU b is shared by critic rank 0 and the engine, which starts first (--base-gpu-id 1 ")
    first, last = beside_all
    assert "GPU a is shared by actor rank 0, critic rank 0 and the engine" in first
    assert "--mem-fraction-static 0.25) and takes this part of what is free; the ranks share the rest" in first
    assert last.startswith("a publish goes through gloo")


async def test_of_two_in_turn_the_second_waits_for_the_first_and_does_not_begin_if_that_fails() -> None:
    seen: list[str] = []

    async def part(name: str, error: Exception | None = None) -> str:
        seen.append(f"{name} begins")
        await asyncio.sleep(0.01)
        seen.append(f"{name} ends")
        if error:
            raise error
        return name

    assert await in_turn(part("engine"), part("roles")) == ("engine", "roles")
    assert seen == ["engine begins", "engine ends", "roles begins", "roles ends"]
    with pytest.raises(RuntimeError, match="no memory"):
        await in_turn(part("engine", RuntimeError("no memory")), part("more roles"))
    assert "more roles begins" not in seen
