"""Runs a server, and sees to it that none of its processes outlives whoever started it.

    python -m megatron_sao.rollout.supervise PARENT_PID LOG_FILE COMMAND...

SGLang starts processes of its own, and leaves them behind when it is killed at the wrong moment. This process adopts
every orphan among its descendants, and ends them all when its parent is gone (however it died), when it is told to by
SIGTERM, or when the command ends. Its stdin brings one line: a secret that is kept out of the log. The exit status is
the command's.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
SHARED_MEMORY = Path("/dev/shm")
LEFT_BEHIND = ("sglang_loads_", "sgl_shm_", "sem.mp-")
POLL_S = 0.25
GRACE_S = 2.0  # between SIGTERM and SIGKILL; nothing is lost: an engine keeps no state on disk


def main(arguments: Sequence[str]) -> int:
    parent, log_path, command = int(arguments[0]), Path(arguments[1]), list(arguments[2:])
    secret = sys.stdin.buffer.readline().strip()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=_prepare_child,  # this process has one thread yet
    )
    assert child.stdout is not None, "stdout is a pipe"
    copier = threading.Thread(target=_copy_log, args=(child.stdout, log_path, secret), daemon=True)
    copier.start()
    _wait(child, parent)
    _end(child)
    copier.join(timeout=GRACE_S)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _prepare_child() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # should this process be killed itself
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")


def _wait(child: "subprocess.Popen[bytes]", parent: int) -> None:
    """Until the child ended, the parent is gone, or a signal says to stop."""
    while child.poll() is None and os.getppid() == parent:
        received = signal.sigtimedwait(SIGNALS, POLL_S)
        if received is not None and received.si_signo != signal.SIGCHLD:
            return


def _end(child: "subprocess.Popen[bytes]") -> None:
    files = _shared_memory()
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
    while descendants := psutil.Process().children(recursive=True):
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        child.poll()
        _reap_orphans(child.pid)
        time.sleep(0.01)
    child.wait()
    for file in files:
        file.unlink(missing_ok=True)


def _shared_memory() -> list[Path]:
    """Shared memory that descendants have mapped, of the kinds that SGLang leaves behind when it is killed. Found by
    inode: a semaphore is mapped under a name that it no longer has.
    """
    inodes = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
            inodes |= {line.split()[4] for line in maps.splitlines() if str(SHARED_MEMORY) in line}
    found = []
    for path in SHARED_MEMORY.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.name.startswith(LEFT_BEHIND) and str(path.stat().st_ino) in inodes:
                found.append(path)
    return found


def _reap_orphans(child_pid: int) -> None:
    for process in psutil.Process().children():
        if process.pid != child_pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def _copy_log(source: BinaryIO, path: Path, secret: bytes) -> None:
    with path.open("ab", buffering=0) as log:
        for line in source:
            log.write(line.replace(secret, b"***") if secret else line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
