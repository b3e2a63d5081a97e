"""Whatever user code does to the event loop, a signal ends the process in bounded time. Trivial coroutines."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = """
import asyncio, subprocess, sys, time
from launch import bounded

bounded.TERMINATE_S = 0.3

async def main():
    {body}

try:
    bounded.run(main(), force_after_s={force_after_s})
    print("done", flush=True)
    bounded.leave(0)
except bounded.Interrupted as error:
    print(error, flush=True)
    bounded.leave(128 + error.number)
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
BLOCKED = {
    "it sleeps in the loop": "time.sleep(60)",
    "it computes in the loop": "any(i < 0 for i in iter(int, 1))",
    "it swallows the cancellation": """
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass""",
}


def start(body: str, *, force_after_s: float) -> "subprocess.Popen[str]":
    code = SCRIPT.format(body=body, force_after_s=force_after_s)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("name", BLOCKED)
def test_a_loop_that_does_not_stop_is_ended_with_all_its_children(name: str) -> None:
    child = f"print(subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]).pid, flush=True)"
    with start(f"{child}\n    {BLOCKED[name].strip()}", force_after_s=0.5) as process:
        try:
            lines = {line(process), line(process)}
            (pid,) = (int(text) for text in lines - {"up"})
            time.sleep(0.1)  # for the block to begin
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 128 + signal.SIGTERM
            assert process.stderr is not None
            assert "SIGTERM: stopping everything" in process.stderr.read()
            assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        finally:
            process.kill()


def test_a_coroutine_that_stops_does_so_at_once() -> None:
    with start("print('up', flush=True)\n    await asyncio.sleep(60)", force_after_s=30) as process:
        assert line(process) == "up"
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 128 + signal.SIGINT
        assert line(process) == "stopped by SIGINT"


def test_a_thread_that_never_ends_does_not_keep_a_finished_run() -> None:
    body = "asyncio.ensure_future(asyncio.to_thread(time.sleep, 60))\n    await asyncio.sleep(0.1)"
    with start(body, force_after_s=30) as process:
        try:
            assert process.wait(10) == 0
            assert line(process) == "done"
        finally:
            process.kill()
