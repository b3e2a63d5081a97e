"""Memory of a process of this machine, as Linux counts it."""

import re
from pathlib import Path


def resident_bytes(pid: int) -> int:
    return _status(pid, "VmRSS")


def peak_bytes(pid: int) -> int:
    """The most that was resident since the start or `reset_peak`."""
    return _status(pid, "VmHWM")


def reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="utf-8")


def _status(pid: int, key: str) -> int:
    match = re.search(rf"^{key}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None, f"Linux says {key} of every process"
    return int(match[1]) * 1024
