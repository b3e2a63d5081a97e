"""One run on this machine: all processes started, watched, and stopped again.

    engine server  ┐  (first, where it shares a GPU with a rank)
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
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launch.checks import check, router_shape
from launch.placement import Placement
from launch.processes import Supervisor
from launch.role_processes import start_roles, stop_roles
from launch.run_directory import LOG_DIRECTORY
from launch.tasks import both, in_turn
from launch.watch import Watch
from megatron_sao.channel import ChannelServer
from megatron_sao.config import Config, EngineConfig
from megatron_sao.controller.model_file import vocab_size
from megatron_sao.controller.report import Summary
from megatron_sao.controller.run import Work, load_work, train
from megatron_sao.rollout.server import SGLangServer
from megatron_sao.rollout.sglang_client import SGLangEngine, Timeouts

LOG = logging.getLogger(__name__)


async def run_locally(config: Config, directory: Path, work: Work | None = None) -> Summary:
    """Train by `config` in `directory`. All processes are stopped when it returns or raises.

    Args:
        work: what `load_work` made of `config`; loaded here, before any process, where it is not given.

    Raises:
        ValueError: what a person must change.
        ProcessDied: an engine or a rank died; it is named, with the end of its log.
        RuntimeError: anything else that went wrong in the run.
    """
    placement, work = check(config), work or load_work(config)
    logs, grace_s = directory / LOG_DIRECTORY, config.run.shutdown_timeout_s / 5  # three stages, and the engine
    ranks = Supervisor()
    watch = Watch(ranks)
    LOG.info("starting the engine and the ranks; their logs are in %s", logs)
    for sentence in placement.describe_shared(config.engine.extra_args):
        LOG.info("%s", sentence)
    async with contextlib.AsyncExitStack() as stack:
        private = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sao-")))  # mode 0700
        stack.push_async_callback(asyncio.to_thread, ranks.stop, grace_s)
        server = ChannelServer()
        stack.push_async_callback(server.close)
        starting_roles = start_roles(
            config, server=server, supervisor=ranks, placement=placement, private=private, logs=logs
        )
        starting_engine = stack.enter_async_context(_engine(config, placement, watch, logs))
        parts = starting_engine, starting_roles
        starting = in_turn(*parts) if placement.engine_shares else both(*parts, grace_s=grace_s)
        engine, roles = await watch.over(starting, grace_s=grace_s)
        stack.callback(_fresh_threads)
        training = train(config, work, actor=roles.actor, critic=roles.critic, engine=engine, run_directory=directory)
        summary = await watch.over(training, grace_s=grace_s)
        await stop_roles(roles, ranks)
        return summary


def _fresh_threads() -> None:
    """Before stopping, which uses threads: those of a reward that hangs may take up the loop's whole pool."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(thread_name_prefix="stopping"))


@contextlib.asynccontextmanager
async def _engine(config: Config, placement: Placement, watch: Watch, logs: Path) -> AsyncIterator[SGLangEngine]:
    api_key = secrets.token_hex(32)
    model = config.model
    server = await SGLangServer.start(
        engine_config(config, placement),
        model_path=model.path,
        dtype=model.dtype,
        api_key=api_key,
        log_path=logs / "engine.log",
    )
    watch.engine = server
    client = SGLangEngine(
        server.url,
        api_key=api_key,
        vocab_size=vocab_size(Path(model.path)),
        max_tokens=config.rollout.max_episode_tokens,
        timeouts=Timeouts(request_s=config.engine.request_timeout_s, control_s=config.engine.control_timeout_s),
        router=router_shape(config),
    )
    try:
        yield client
    finally:
        watch.engine = None  # stopped by ourselves from here on
        await client.close()
        await server.stop()


def engine_config(config: Config, placement: Placement) -> EngineConfig:
    """The engine's, with the flags that follow from the rest of the run."""
    devices = placement.engine_args(config.engine.extra_args)
    experts = ("--enable-return-routed-experts",) if config.actor.router_replay else ()
    return config.engine.model_copy(update={"extra_args": (*devices, *experts, *config.engine.extra_args)})
