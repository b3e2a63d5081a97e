"""Which GPUs this machine has for a run: the one answer for placement and engine. No torch, and no CUDA context.

`megatron/platform.py` asks torch itself, inside a rank; it agrees, since a rank is given one of these devices or none.
"""

import ctypes
import importlib.util
import os
import re
from pathlib import Path


def visible_devices() -> tuple[str, ...]:
    """Names as CUDA_VISIBLE_DEVICES takes them. None without a CUDA build of torch, a driver and a device.

    CUDA_VISIBLE_DEVICES hides devices as CUDA reads it: "" and "-1" hide all, and so does -1 what follows it.
    """
    count = _num_driver_devices() if _torch_is_built_for_cuda() else 0
    return name_devices(count, os.environ.get("CUDA_VISIBLE_DEVICES"))


def name_devices(count: int, listed: str | None) -> tuple[str, ...]:
    """The `count` devices that the driver shows, which has obeyed `listed` (and ends it at the first bad name)."""
    if listed is None:
        return tuple(str(index) for index in range(count))
    names = [name.strip() for name in listed.split(",")]
    end = next((index for index, name in enumerate(names) if name in ("", "-1")), len(names))
    return tuple(names[: min(count, end)])


def _torch_is_built_for_cuda() -> bool:
    """Read from `torch/version.py`: a version's suffix does not say it (PyPI has builds of both kinds without one)."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    return re.search(r"^cuda\b[^=\n]*= *['\"]", text, re.MULTILINE) is not None


def _num_driver_devices() -> int:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
