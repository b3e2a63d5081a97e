"""Processes are started, watched and stopped with all that they started. Trivial children, real signals."""

import asyncio
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launch import processes
from launch.processes import ProcessDied, Supervisor, tail
from launch.watch import Watch

ENVIRONMENT = {"PATH": os.environ["PATH"]}
SAY_PID = "import os, sys, time\nprint(os.getpid(), flush=True)\n"
SLEEP = SAY_PID + "time.sleep(60)\n"
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP
PARENT = """
import subprocess, sys
code = {code!r}
child = subprocess.Popen([sys.executable, "-c", code], start_new_session={leaves})
{then}
"""


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    supervisor.stop(1.0)


def start(supervisor: Supervisor, tmp_path: Path, code: str, name: str = "child") -> Path:
    log_path = tmp_path / f"{name}.log"
    command = [sys.executable, "-c", textwrap.dedent(code)]
    supervisor.start(name, command, log_path=log_path, environment=ENVIRONMENT)
    return log_path


def pids(log_path: Path, count: int) -> list[int]:
    """The process ids that children have written to their log."""
    end_s = time.monotonic() + 20
    while time.monotonic() < end_s:
        lines = log_path.read_text().split()
        if len(lines) >= count:
            return [int(line) for line in lines]
        time.sleep(0.02)
    raise AssertionError(f"{log_path} has fewer than {count} process ids: {log_path.read_text()}")


def test_input_reaches_the_process_and_both_outputs_its_log(supervisor: Supervisor, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print(sys.stdin.read().upper()); print('bad', file=sys.stderr)"]
    process = supervisor.start("echo", command, log_path=tmp_path / "log", stdin="word", environment=ENVIRONMENT)
    assert process.popen.wait(20) == 0
    assert tail(tmp_path / "log").split() == ["WORD", "bad"] or tail(tmp_path / "log").split() == ["bad", "WORD"]


def test_stop_ends_all_within_a_moment(supervisor: Supervisor, tmp_path: Path) -> None:
    logs = [start(supervisor, tmp_path, SLEEP, f"child{i}") for i in range(3)]
    children = [pid for log in logs for pid in pids(log, 1)]
    start_s = time.monotonic()
    supervisor.stop(10.0)
    assert time.monotonic() - start_s < 5
    assert not [pid for pid in children if psutil.pid_exists(pid)]
    assert supervisor.processes == ()


def test_a_process_that_ignores_sigterm_is_killed_at_the_deadline(
    supervisor: Supervisor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (pid,) = pids(start(supervisor, tmp_path, STUBBORN, "mule"), 1)
    supervisor.stop(0.3)
    assert not psutil.pid_exists(pid)
    assert "killed after 0 s of SIGTERM: mule" in caplog.text


def test_a_process_that_the_kernel_does_not_end_does_not_save_the_others(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first one's wait never succeeds (a FAKE of a process stuck in the kernel)."""
    monkeypatch.setattr(processes, "REAP_S", 0.1)
    logs = [start(supervisor, tmp_path, SLEEP, name) for name in ("stuck", "other")]
    children = [pid for log in logs for pid in pids(log, 1)]

    def wait(timeout: float) -> int:
        raise subprocess.TimeoutExpired("stuck", timeout)

    stuck = supervisor.processes[0].popen
    with monkeypatch.context() as patch:
        patch.setattr(stuck, "wait", wait)
        supervisor.stop(1.0)
    assert f"stuck (process {children[0]}) is still there after SIGKILL" in caplog.text
    assert not psutil.pid_exists(children[1])
    stuck.wait(10)


@pytest.mark.parametrize("leaves", [False, True], ids=["in its group", "in a session of its own"])
def test_a_grandchild_that_ignores_sigterm_is_ended_too(supervisor: Supervisor, tmp_path: Path, leaves: bool) -> None:
    code = PARENT.format(code=STUBBORN, leaves=leaves, then=SLEEP)
    both = pids(start(supervisor, tmp_path, code), 2)
    supervisor.stop(2.0)
    assert not [pid for pid in both if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


def test_an_orphan_of_a_process_that_has_ended_is_ended_too(supervisor: Supervisor, tmp_path: Path) -> None:
    log = start(supervisor, tmp_path, PARENT.format(code=STUBBORN, leaves=False, then="sys.exit(0)"))
    (orphan,) = pids(log, 1)
    while not supervisor.ended():
        time.sleep(0.02)
    supervisor.stop(1.0)
    assert not psutil.pid_exists(orphan) or psutil.Process(orphan).status() == "zombie"


async def test_watch_names_the_process_that_died_its_status_and_the_end_of_its_log(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    start(supervisor, tmp_path, SLEEP, "engine")
    start(supervisor, tmp_path, "print('line'); raise SystemExit('no memory')", "actor rank 1")
    with pytest.raises(ProcessDied, match=r"^actor rank 1 ended with status 1.*actor rank 1.log:\n(.*\n)*no memory"):
        await asyncio.wait_for(Watch(supervisor).until_one_dies(), 20)


async def test_watch_names_a_signal(supervisor: Supervisor, tmp_path: Path) -> None:
    start(supervisor, tmp_path, "import os; os.kill(os.getpid(), 9)", "critic rank 0")
    with pytest.raises(ProcessDied, match=r"critic rank 0 was killed by SIGKILL.*\n\(the log is empty\)"):
        await asyncio.wait_for(Watch(supervisor).until_one_dies(), 20)


async def test_join_waits_for_processes_that_end_by_themselves(supervisor: Supervisor, tmp_path: Path) -> None:
    start(supervisor, tmp_path, "import time; time.sleep(0.2)", "short")
    assert await supervisor.join(20.0)
    start(supervisor, tmp_path, SLEEP, "long")
    assert not await supervisor.join(0.2)


def test_the_end_of_a_long_log_is_shown_and_a_missing_one_is_said(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(str(i) for i in range(100)))
    assert tail(log, 3) == "97\n98\n99"
    assert tail(tmp_path / "none") == "(no log: No such file or directory)"
