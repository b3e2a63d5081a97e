"""A failed run says who is to blame. FAKE ranks (trivial processes), engine and training; real supervision."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch import local, watch
from launch.processes import ProcessDied, Supervisor
from launch.role_processes import Roles
from megatron_sao.channel import Answer, LocalChannel, RoleDied
from megatron_sao.config import Config, load
from tests.launch.test_launch import CONFIG

SLEEP = "import time; print('loading weights', flush=True); time.sleep(60)"
Training = Callable[["FakeEngine", list[int]], Awaitable[Any]]


class FakeEngine:
    """An SGLangServer, as far as `launch.local` sees it."""

    url = "http://127.0.0.1:9"

    def __init__(self, log_path: Path) -> None:
        self.log_path, self.is_alive = log_path, True
        log_path.write_text("scheduler hit an exception: out of memory\n")

    @classmethod
    async def start(cls, *_: Any, log_path: Path, **__: Any) -> "FakeEngine":
        return cls(log_path)

    def alive(self) -> bool:
        return self.is_alive

    async def stop(self) -> None:
        self.is_alive = False


def fake_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: Training) -> Awaitable[Any]:
    """`run_locally` on two ranks and an engine that do nothing; `train` gets the engine and the ranks' ids."""
    engines: list[FakeEngine] = []
    ranks: list[int] = []

    async def start_roles(_: Config, *, supervisor: Supervisor, logs: Path, **__: Any) -> Roles:
        for name in ("actor rank 0", "actor rank 1"):
            log_path = logs / f"{name.replace(' ', '-')}.log"
            process = supervisor.start(name, (sys.executable, "-c", SLEEP), log_path=log_path, environment=os.environ)
            ranks.append(process.popen.pid)
            while not log_path.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        channel = LocalChannel("actor", lambda command, tensors: Answer())
        return Roles(actor=channel, critic=channel)

    async def start_engine(*args: Any, **kwargs: Any) -> FakeEngine:
        engines.append(await FakeEngine.start(*args, **kwargs))
        return engines[0]

    monkeypatch.setattr(local, "start_roles", start_roles)
    monkeypatch.setattr(local.SGLangServer, "start", start_engine)
    monkeypatch.setattr(local, "load_work", lambda config: None)
    monkeypatch.setattr(local, "train", lambda *_, **__: train(engines[0], ranks))
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    (tmp_path / "config.toml").write_text(CONFIG.format(directory=tmp_path / "run", model=tmp_path))
    (tmp_path / "logs").mkdir()
    return local.run_locally(load(tmp_path / "config.toml"), tmp_path)


async def test_a_rank_that_is_killed_in_mid_training_is_named_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its channel says that it is gone before anybody has looked at the process."""

    async def train(engine: FakeEngine, ranks: list[int]) -> None:
        psutil.Process(ranks[1]).kill()
        raise RoleDied("actor", "actor_update")

    with pytest.raises(ProcessDied) as caught:
        await fake_run(tmp_path, monkeypatch, train)
    assert str(caught.value).startswith("actor rank 1 was killed by SIGKILL. The end of ")
    assert "actor-rank-1.log:\nloading weights\n(seen as: actor is gone (in actor_update)" in str(caught.value)
    assert "engine" not in str(caught.value)


async def test_an_engine_that_dies_is_named_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def train(engine: FakeEngine, ranks: list[int]) -> None:
        engine.is_alive = False
        await asyncio.sleep(60)

    with pytest.raises(ProcessDied, match=r"^the engine died. The end of .*engine.log:\nscheduler hit .* memory"):
        await fake_run(tmp_path, monkeypatch, train)


async def test_an_error_while_everything_is_alive_keeps_its_own_message_and_everything_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "BLAME_S", 0.3)
    started: list[int] = []

    async def train(engine: FakeEngine, ranks: list[int]) -> None:
        started.extend(ranks)
        raise RuntimeError("16 episodes in a row are broken")

    with pytest.raises(RuntimeError, match=r"^16 episodes in a row are broken$"):
        await fake_run(tmp_path, monkeypatch, train)
    assert len(started) == 2
    assert not [pid for pid in started if psutil.pid_exists(pid)]
