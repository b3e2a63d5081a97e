"""One run on this machine: all processes started, watched, and stopped again.

    engine server  ┐
    actor ranks    ├─ in parallel ──> controller.run.train ──> roles stop ──> summary
    critic ranks   ┘
    watch: whoever dies ends the run

Waits for the processes to come up (deadlines of the configuration), then for training; unblocked by its end, by the
death of a process, or by a cancellation (Ctrl-C, SIGTERM). Whatever happens, every process is gone afterwards.
"""

import asyncio
import contextlib
import logging
import secrets
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from launch.placement import Placement, place, visible_devices
from launch.processes import POLL_S, ProcessDied, Supervisor, report
from launch.role_processes import start_roles, stop_roles
from launch.run_directory import LOG_DIRECTORY
from launch.tasks import both, unless
from megatron_sao.channel import ChannelServer, RoleDied, RoleError
from megatron_sao.config import Config, EngineConfig
from megatron_sao.controller.report import Summary
from megatron_sao.controller.run import load_work, train, vocab_size
from megatron_sao.rollout.server import SGLangServer
from megatron_sao.rollout.sglang_client import SGLangEngine, Timeouts

LOG = logging.getLogger(__name__)
BLAME_S = 3.0  # after an error: for the process behind it to be seen dead


class Processes:
    """Everything that a run has started: the ranks, and the engine once it is up."""

    def __init__(self) -> None:
        self.ranks = Supervisor()
        self.engine: SGLangServer | None = None

    def died(self) -> str | None:
        """Who is gone that should be there, with the end of its log."""
        ended = self.ranks.ended()
        if ended:
            return report(ended)
        if self.engine is not None and not self.engine.alive():
            return f"the engine died. The end of {self.engine.log_path}:\n{self.engine.tail()}"
        return None

    async def watch(self) -> None:
        """Ends only by raising ProcessDied, or by cancellation."""
        while self.died() is None:  # noqa: ASYNC110  (the kernel sets no event)
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(POLL_S)  # one that took another with it is named too
        raise ProcessDied(self.died())

    async def blame(self, error: Exception) -> None:
        """Raise ProcessDied if `error` is what the death of a process looks like from here."""
        end_s = time.monotonic() + BLAME_S
        while time.monotonic() < end_s:
            if who := self.died():
                raise ProcessDied(f"{who}\n(seen as: {error})") from error
            await asyncio.sleep(POLL_S)


async def run_locally(config: Config, directory: Path) -> Summary:
    """Train by `config` in `directory`. All processes are stopped when it returns or raises.

    Raises:
        ValueError: what a person must change.
        ProcessDied: an engine or a rank died; it is named, with the end of its log.
        RuntimeError: anything else that went wrong in the run.
    """
    placement = check(config)
    processes = Processes()
    try:
        return await _run(config, directory, processes, placement)
    except (RoleDied, RoleError, OSError, RuntimeError) as error:
        if not isinstance(error, ProcessDied):
            await processes.blame(error)
        raise


async def _run(config: Config, directory: Path, processes: Processes, placement: Placement) -> Summary:
    logs, grace_s = directory / LOG_DIRECTORY, config.run.shutdown_timeout_s / 5  # three stages, and the engine
    LOG.info("starting the engine and the ranks; their logs are in %s", logs)
    async with contextlib.AsyncExitStack() as stack:
        private = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sao-")))  # mode 0700
        stack.push_async_callback(asyncio.to_thread, processes.ranks.stop, grace_s)
        server = ChannelServer()
        stack.push_async_callback(server.close)
        starting_roles = start_roles(
            config, server=server, supervisor=processes.ranks, placement=placement, private=private, logs=logs
        )
        starting_engine = stack.enter_async_context(_engine(config, placement, processes, logs))
        starting = both(starting_roles, starting_engine, grace_s=grace_s)
        roles, engine = await unless(processes.watch(), starting, grace_s=grace_s)
        training = train(config, load_work(config), actor=roles.actor, critic=roles.critic, engine=engine, run_directory=directory)
        summary = await unless(processes.watch(), training, grace_s=grace_s)
        await stop_roles(roles, processes.ranks)
        return summary


@contextlib.asynccontextmanager
async def _engine(
    config: Config, placement: Placement, processes: Processes, logs: Path
) -> AsyncIterator[SGLangEngine]:
    api_key = secrets.token_hex(32)
    model = config.model
    server = await SGLangServer.start(
        _on_its_devices(config.engine, placement),
        model_path=model.path,
        dtype=model.dtype,
        api_key=api_key,
        log_path=logs / "engine.log",
    )
    processes.engine = server
    client = SGLangEngine(
        server.url,
        api_key=api_key,
        vocab_size=vocab_size(Path(model.path)),
        max_tokens=config.rollout.max_episode_tokens,
        timeouts=Timeouts(request_s=config.engine.request_timeout_s, control_s=config.engine.control_timeout_s),
    )
    try:
        yield client
    finally:
        await client.close()
        await server.stop()


def _on_its_devices(engine: EngineConfig, placement: Placement) -> EngineConfig:
    if not placement.engine:
        return engine
    return engine.model_copy(update={"extra_args": ("--base-gpu-id", str(placement.engine_base), *engine.extra_args)})


def check(config: Config) -> Placement:
    """What can be seen before anything is written or started. Raises ValueError."""
    path = config.model.path
    if not (Path(path) / "config.json").is_file():
        raise ValueError(f"model.path = {path!r} is not a model directory: it has no config.json")
    return place(config, visible_devices())
