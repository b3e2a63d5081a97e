"""Processes of a run on this machine: started with a log each, watched, and stopped with everything they started.

Every process leads a session of its own, so that a Ctrl-C at the terminal reaches the run only, and a signal to its
group reaches its children. A process that ended is not reaped before its group is killed: its id cannot be reused then.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

LOG = logging.getLogger(__name__)
POLL_S = 0.1
TAIL_LINES = 25
REAP_S = 5.0  # for the kernel to end what was killed


class ProcessDied(RuntimeError):
    """A process ended that should not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One started process."""

    name: str
    log_path: Path
    popen: "subprocess.Popen[bytes]"

    def status(self) -> int | None:
        """None while it runs; its exit status, or minus the signal that ended it. Does not reap it."""
        if self.popen.returncode is not None:
            return self.popen.returncode
        result = os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status

    def tail(self) -> str:
        return tail(self.log_path)


def tail(path: Path, num_lines: int = TAIL_LINES) -> str:
    """The last lines of a log."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return f"(no log: {error.strerror})"
    return "\n".join(lines[-num_lines:]) or "(the log is empty)"


def describe_status(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


class Supervisor:
    """The processes of one run, in the order of their start. `stop` ends them all; it may be called again."""

    def __init__(self) -> None:
        self._processes: list[Process] = []

    @property
    def processes(self) -> tuple[Process, ...]:
        return tuple(self._processes)

    def start(
        self, name: str, command: Sequence[str], *, log_path: Path, stdin: str = "", environment: Mapping[str, str]
    ) -> Process:
        """Start `command` with `stdin` as its input and both outputs appended to `log_path`.

        Call it from the main thread: a child that asks to die with its parent dies with the thread that started it.
        """
        with log_path.open("ab") as log:
            popen = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        process = Process(name=name, log_path=log_path, popen=popen)
        self._processes.append(process)
        assert popen.stdin is not None, "stdin is a pipe"
        with contextlib.suppress(BrokenPipeError):  # it ended at once: `status` will say so
            popen.stdin.write(stdin.encode())
            popen.stdin.close()
        return process

    def ended(self) -> list[tuple[Process, int]]:
        """Processes that are not running any more, with their status."""
        statuses = [(process, process.status()) for process in self._processes]
        return [(process, status) for process, status in statuses if status is not None]

    async def join(self, timeout_s: float) -> bool:
        """Wait for all processes to end by themselves. False: some did not within `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        while len(self.ended()) < len(self._processes):
            if time.monotonic() > end_s:
                return False
            await asyncio.sleep(POLL_S)
        return True

    def stop(self, timeout_s: float) -> None:
        """SIGTERM to everything, SIGKILL to what is left after `timeout_s`; returns when all of it is gone."""
        others = [other for process in self._processes for other in _descendants(process)]
        for process in self._processes:
            _signal_group(process, signal.SIGTERM)
        end_s = time.monotonic() + timeout_s
        while len(self.ended()) < len(self._processes) and time.monotonic() < end_s:
            time.sleep(POLL_S / 5)
        stubborn = [process.name for process in self._processes if process.status() is None]
        if stubborn:
            LOG.warning("killed after %.0f s of SIGTERM: %s", timeout_s, ", ".join(stubborn))
        for process in self._processes:
            _signal_group(process, signal.SIGKILL)
        _kill(others)
        for process in self._processes:
            _reap(process)
        _wait_gone(others)
        self._processes.clear()


def report(ended: Iterable[tuple[Process, int]]) -> str:
    """Who ended how, and the end of each log."""
    blocks = [
        f"{process.name} {describe_status(status)}. The end of {process.log_path}:\n{process.tail()}"
        for process, status in ended
    ]
    return "\n".join(blocks)


def _descendants(process: Process) -> list[psutil.Process]:
    """What it started and is still there: children at any depth, and its group (orphans of what has ended already)."""
    pid = process.popen.pid
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(pid).children(recursive=True)
        known = {child.pid for child in children} | {pid}
        return [*children, *(other for other in psutil.process_iter() if other.pid not in known and _in(other, pid))]
    return []


def _in(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group
    except ProcessLookupError:
        return False


def _wait_gone(processes: Iterable[psutil.Process]) -> None:
    end_s = time.monotonic() + REAP_S
    while any(_is_there(process) for process in processes) and time.monotonic() < end_s:
        time.sleep(POLL_S / 5)


def _is_there(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _reap(process: Process) -> None:
    """A process that the kernel cannot end yet (a device, a dead file server) does not keep the others from it."""
    try:
        process.popen.wait(REAP_S)
    except subprocess.TimeoutExpired:
        LOG.warning("%s (process %d) is still there after SIGKILL", process.name, process.popen.pid)


def _signal_group(process: Process, number: signal.Signals) -> None:
    if process.popen.returncode is None:  # not reaped: the group's id is still its own
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.popen.pid, number)


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
