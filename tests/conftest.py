"""Fixtures that several test modules share: one live SGLang server for the session, and a way to reach it."""

import asyncio
import json
import os
import secrets
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from megatron_sao.config import EngineConfig
from megatron_sao.rollout.server import SGLangServer
from tests.support.tiny_models import make_tiny_model

pytest_plugins = ["tests.support.asyncio_reports"]
LIVE_MAX_TOKENS = 4096
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class LiveServer:
    """A real SGLang server with a tiny Qwen3-MoE in float32. A test that changes its weights puts them back."""

    server: SGLangServer
    url: str
    api_key: str
    model_path: Path
    vocab_size: int
    max_tokens: int


@pytest.fixture(scope="session")
def live_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("live")
    model = make_tiny_model(directory / "model", seed=0, max_position_embeddings=LIVE_MAX_TOKENS)
    with serving(model, directory / "sglang.log") as server:
        yield server


@contextmanager
def serving(model: Path, log: Path) -> Iterator[LiveServer]:
    """A server of its own for a model."""
    api_key = secrets.token_hex(16)
    config = EngineConfig(
        max_total_tokens=16384,
        cpu_cores=str(max(os.sched_getaffinity(0))),
        start_timeout_s=240.0,
        extra_args=("--enable-return-routed-experts",),
    )
    server = _run(SGLangServer.start(config, model_path=model, dtype="float32", api_key=api_key, log_path=log))
    try:
        yield LiveServer(
            server=server,
            url=server.url,
            api_key=api_key,
            model_path=model,
            vocab_size=json.loads((model / "config.json").read_text())["vocab_size"],
            max_tokens=LIVE_MAX_TOKENS,
        )
    finally:
        _run(server.stop())


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """In a thread: pytest may make this fixture while the loop of an asynchronous one runs."""
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(asyncio.run, coroutine).result()
