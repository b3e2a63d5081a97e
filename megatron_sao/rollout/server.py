"""Starts, watches and stops one SGLang server: `python -m sglang.launch_server`, unmodified, on a GPU or a CPU.

The server binds loopback unless the config says otherwise. (The store through which torch joins the server's own ranks
listens on every interface at a random port; torch gives SGLang no choice.) Its key travels in a file that only this
user can read and that is gone once the server is up: it is neither in argv, which every user of the machine sees, nor
in the log.
"""

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path

import aiohttp
import psutil

from megatron_sao.config import EngineConfig
from megatron_sao.rollout import sglang_cpu, supervise

LOG = logging.getLogger(__name__)
PORT_ATTEMPTS = 3
LOG_TAIL_LINES = 30
POLL_S = 0.2
PROBE_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = supervise.GRACE_S + 3.0
PORT_TAKEN = "address already in use"
PROGRESS_S = 20.0
NOT_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

EXACT_FLOAT32 = {"NVIDIA_TF32_OVERRIDE": "0"}
"""For cuBLAS, in engine and ranks: float32 products in full. SGLang asks for TF32 (10 bits of mantissa) where some
models route, and Transformer Engine in every float32 layer: the two would choose other experts, with other log-probs.
"""


class SGLangServer:
    """A running server. Whoever has it calls `stop`; it also ends when this process does, however that comes."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str, log_path: Path) -> None:
        self.url = url
        self.log_path = log_path
        self._process = process

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        model_path: str | Path,
        dtype: str,
        api_key: str,
        log_path: Path,
        prefix: Sequence[str] = (),
    ) -> "SGLangServer":
        """Returns when the server answers with its key. Cancelling stops it.

        Args:
            prefix: of its command, e.g. ("ip", "netns", "exec", NAME). The port must be given then: whether one is
                free in another network namespace is not seen from here.

        Raises:
            ValueError: the configured port is taken, or the model directory does not exist.
            RuntimeError: it ended, or did not answer within `start_timeout_s`; with the tail of its log.
        """
        _check_model(model_path)
        if prefix and not config.port:
            raise ValueError(f"a server behind {' '.join(prefix)} needs engine.port: a free one is not seen from here")
        deadline = time.monotonic() + config.start_timeout_s
        for attempt in range(PORT_ATTEMPTS):
            port = config.port if prefix else _port(config.host, config.port)
            with tempfile.TemporaryDirectory(prefix="sao-engine-") as directory:  # mode 0700
                key_file = Path(directory) / "key.yaml"
                key_file.write_text(json.dumps({"api-key": api_key}), encoding="utf-8")  # JSON is YAML
                command = launch_command(config, port=port, model_path=model_path, dtype=dtype, key_file=key_file)
                process = _launch([*prefix, *command], config, api_key, log_path)
                server = cls(process, f"http://{config.host}:{port}", log_path)
                if await server._wait_until_ready(api_key, deadline, may_lose_port=attempt < PORT_ATTEMPTS - 1):
                    return server
        raise AssertionError("the last attempt returns or raises")

    def alive(self) -> bool:
        return self._process.poll() is None

    def tail(self) -> str:
        """The last lines of the log."""
        try:
            return "\n".join(self._log().splitlines()[-LOG_TAIL_LINES:])
        except OSError as error:
            return f"(no log: {error})"

    def _log(self) -> str:
        """What this server has written: every attempt to start begins an empty one."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    async def stop(self) -> None:
        """End every process of the server, in at most `STOP_TIMEOUT_S` and a moment. May be called again."""
        if not self.alive():
            return
        supervisor = psutil.Process(self._process.pid)
        processes = [supervisor, *supervisor.children(recursive=True)]
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, STOP_TIMEOUT_S)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    async def _wait_until_ready(self, api_key: str, deadline: float, *, may_lose_port: bool) -> bool:
        """False: another process took the free port first. Everything but True leaves no process behind."""
        outcome = "did not answer before its deadline"
        ready, start_s, said_s = False, time.monotonic(), 0.0
        try:
            while time.monotonic() < deadline:
                if not self.alive():
                    outcome = f"ended with status {self._process.returncode}"
                    break
                if PORT_TAKEN in self._log().lower():  # SGLang does not always end then
                    outcome = "lost its port to another process"
                    break
                if ready := await _answers(self.url, api_key):
                    return True
                await asyncio.sleep(POLL_S)
                if (waited_s := time.monotonic() - start_s) > said_s + PROGRESS_S:
                    said_s = waited_s
                    LOG.info("the engine is starting, %.0f s; its log is %s", waited_s, self.log_path)
        finally:
            if not ready:
                await self.stop()
        if may_lose_port and PORT_TAKEN in self._log().lower():
            return False
        raise RuntimeError(
            f"the SGLang server for {self.url} {outcome}. Look for the cause in {self.log_path} (a wrong model "
            "directory, too little memory, or engine.start_timeout_s too short for this machine). Its end:\n"
            f"{self.tail()}"
        )


def launch_command(config: EngineConfig, *, port: int, model_path: str | Path, dtype: str, key_file: Path) -> list[str]:
    """The server's argv. `-P`: its imports do not depend on the directory that a run was started in."""
    flags = {
        "--model-path": str(model_path),
        "--host": config.host,
        "--port": str(port),
        "--dtype": dtype,
        "--tp": str(config.tensor),
        "--weight-version": "0",
        "--config": str(key_file),
    }
    if config.max_total_tokens is not None:
        flags["--max-total-tokens"] = str(config.max_total_tokens)
    arguments = [part for flag in flags.items() for part in flag]
    cpu = sglang_cpu.FLAGS if sglang_cpu.is_needed() else ()
    launcher = [sys.executable, "-P", "-m", "sglang.launch_server"]
    return [*launcher, *arguments, "--sleep-on-idle", *cpu, *config.extra_args]


def child_environment(parent: Mapping[str, str], config: EngineConfig) -> dict[str, str]:
    """`parent` without proxies and without a rank's variables; offline, since the model is a local directory.

    On a loopback host gloo meets there too, as on the ranks' side. (NCCL's interface is left alone: it is the same
    choice on both sides, and only the owner of a machine with GPUs knows a better one.)
    """
    kept = {
        name: value
        for name, value in parent.items()
        if not name.lower().endswith("_proxy") and name not in NOT_INHERITED
    }
    fixed = {
        "NO_PROXY": "*",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health answers at once, and during a pause too
    }
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if _is_loopback(config.host) else {}
    if not sglang_cpu.is_needed():
        return {**EXACT_FLOAT32, **kept, **fixed, **loopback}
    cores = resolve_cores(config.cpu_cores, num_ranks=config.tensor, allowed=os.sched_getaffinity(0))
    return {**kept, **fixed, **loopback, **sglang_cpu.environment(cores, parent.get("PYTHONPATH"))}


def resolve_cores(cores: str | None, *, num_ranks: int, allowed: Collection[int]) -> str | None:
    """`engine.cpu_cores` as SGLang reads it: groups of cores, "0-3,8", one for each rank, with "|" between them.

    "last" is the highest core that this process may use; with several ranks the highest ones, one for each.

    Raises:
        ValueError: a core that this process may not use (SGLang would not start), or that is no number.
    """
    usable = sorted(allowed)
    if cores is None:
        return None
    if cores == "last":
        if num_ranks > len(usable):
            raise ValueError(f'engine.cpu_cores = "last" with tensor = {num_ranks}: only cores {usable} are allowed')
        return "|".join(str(core) for core in usable[-num_ranks:])
    try:
        wanted = {core for group in cores.split("|") for core in sglang_cpu.core_numbers(group)}
    except ValueError as error:
        raise ValueError(f'engine.cpu_cores = {cores!r} is not "last", and not like "1", "0-3,8" or "0|1"') from error
    if wanted - set(usable):
        raise ValueError(
            f"engine.cpu_cores = {cores!r}: this process may use cores {usable}, not {sorted(wanted - set(usable))}; "
            'name others, or "last" for the highest one'
        )
    return cores


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False


def _launch(command: list[str], config: EngineConfig, api_key: str, log_path: Path) -> "subprocess.Popen[bytes]":
    log_path.write_bytes(b"")
    supervisor = [sys.executable, "-P", "-m", "megatron_sao.rollout.supervise", str(os.getpid()), str(log_path)]
    process = subprocess.Popen(
        [*supervisor, *command],
        env=child_environment(os.environ, config),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=log_path.open("ab"),
        start_new_session=True,  # a Ctrl-C at the terminal reaches the run, which then stops this in order
    )
    assert process.stdin is not None, "stdin is a pipe"
    process.stdin.write(api_key.encode() + b"\n")
    process.stdin.close()
    return process


def _check_model(path: str | Path) -> None:
    if not (Path(path) / "config.json").is_file():
        raise ValueError(f"model.path = {str(path)!r} is not a model directory: it has no config.json")


def _port(host: str, configured: int) -> int:
    """The configured port, or a free one (another process may take it meanwhile; `start` then tries again)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, configured))
        except OSError as error:
            raise ValueError(
                f"engine.port = {configured} on {host} cannot be used ({error.strerror}): "
                "stop what holds it, or set engine.port = 0 for a free one"
            ) from error
        return int(probe.getsockname()[1])


async def _answers(url: str, api_key: str) -> bool:
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {api_key}"}
    async with aiohttp.ClientSession(timeout=timeout, headers=headers, trust_env=False) as session:
        try:
            return await _is_ok(session, url + "/health") and await _is_ok(session, url + "/model_info")
        except (aiohttp.ClientError, TimeoutError):
            return False


async def _is_ok(session: aiohttp.ClientSession, url: str) -> bool:
    async with session.get(url) as response:
        return response.status == HTTPStatus.OK
