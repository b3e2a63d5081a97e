"""Runs a server, and sees to it that none of its processes outlives whoever started it.

    python -m megatron_sao.rollout.supervise PARENT_PID LOG_FILE COMMAND...

SGLang starts processes of its own, and leaves them behind when it is killed at the wrong moment. This process adopts
every orphan among its descendants, and ends them all when its parent is gone (however it died), when it is told to by
SIGTERM, or when the command ends. Nor do their files: they get a temporary directory of their own, and their shared
memory is noted while they live (a server whose scheduler was killed ends its own tree at once, and who mapped what can
no longer be seen then). Its stdin brings one line: a secret that is kept out of the log. The exit status is the
command's.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
SHARED_MEMORY = Path("/dev/shm")
LEFT_BEHIND = ("sglang_loads_", "sgl_shm_", "sem.mp-")
NUM_PARENT_BYTES = 50  # a socket's path has 107; sao-*/pymp-*/listener-* takes 45 of them
SETTLE_S = 5.0  # a file that nobody here has mapped this long after its last change is another server's
POLL_S = 0.25
GRACE_S = 2.0  # between SIGTERM and SIGKILL; nothing is lost: an engine keeps no state on disk


def main(arguments: Sequence[str]) -> int:
    parent, log_path, command = int(arguments[0]), Path(arguments[1]), list(arguments[2:])
    secret = sys.stdin.buffer.readline().strip()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    with tempfile.TemporaryDirectory(prefix="sao-", dir=_short_parent(), ignore_cleanup_errors=True) as directory:
        return _supervise(command, parent, log_path=log_path, secret=secret, temporary=directory)


def _supervise(command: list[str], parent: int, *, log_path: Path, secret: bytes, temporary: str) -> int:
    child = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": temporary},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=_prepare_child,  # this process has one thread yet
    )
    assert child.stdout is not None, "stdout is a pipe"
    copier = threading.Thread(target=_copy_log, args=(child.stdout, log_path, secret), daemon=True)
    copier.start()
    shared = SharedMemoryFiles()
    try:
        _wait(child, parent, shared)
    finally:
        _end(child)
        shared.unlink()
    copier.join(timeout=GRACE_S)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _short_parent() -> str:
    """Where temporary files go, or /tmp where that is too long for the path of a socket."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= NUM_PARENT_BYTES else "/tmp"


def _prepare_child() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # should this process be killed itself
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")


def _wait(child: "subprocess.Popen[bytes]", parent: int, shared: "SharedMemoryFiles") -> None:
    """Until the child ended, the parent is gone, or a signal says to stop."""
    while child.poll() is None and os.getppid() == parent:
        received = signal.sigtimedwait(SIGNALS, POLL_S)
        if received is not None and received.si_signo != signal.SIGCHLD:
            break
        shared.note()
    shared.note()


def _end(child: "subprocess.Popen[bytes]") -> None:
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


class SharedMemoryFiles:
    """Files of the kinds that SGLang leaves behind when it is killed, as far as a descendant was seen to have them
    mapped. Known by inode, which tmpfs does not use twice: a semaphore is mapped under a name that it no longer has,
    and a name may come to mean another server's file.
    """

    def __init__(self) -> None:
        self._ours: set[int] = set()
        self._others: set[int] = set()

    def note(self) -> None:
        """Look who has the new files mapped; costs one listing where there is none."""
        new = {inode: changed for _, inode, changed in _candidates() if inode not in self._ours | self._others}
        if not new:
            return
        self._ours |= new.keys() & _mapped(psutil.Process().children(recursive=True))
        settled = {inode for inode, changed in new.items() if time.time() - changed > SETTLE_S}
        self._others |= settled - self._ours

    def unlink(self) -> None:
        """Remove what is still there, but for what a process that lives has mapped."""
        left = [(path, inode) for path, inode, _ in _candidates() if inode in self._ours]
        in_use = _mapped(psutil.process_iter()) if left else set()
        for path, inode in left:
            if inode not in in_use:
                path.unlink(missing_ok=True)


def _candidates() -> list[tuple[Path, int, float]]:
    """Path, inode, and the time of the last change of each file that could be an SGLang server's."""
    found = []
    for path in SHARED_MEMORY.iterdir():
        if path.name.startswith(LEFT_BEHIND):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                found.append((path, status.st_ino, status.st_ctime))
    return found


def _mapped(processes: Iterable[psutil.Process]) -> set[int]:
    """The inodes of the shared memory that these processes have mapped, as far as this user may see."""
    inodes: set[int] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
            inodes |= {int(line.split()[4]) for line in maps.splitlines() if f" {SHARED_MEMORY}/" in line}
    return inodes


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
