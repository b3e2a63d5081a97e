"""A plugin of sglang (entry point group `sglang.srt.plugins`): no registration of host memory with CUDA."""

from typing import Any


def register() -> None:
    from sglang.srt.mem_cache.pool_host import common  # here: sglang imports its plugins before itself

    common._cuda_host_register = _leave_unregistered


def _leave_unregistered(*_: Any, **__: Any) -> None:
    """Pinned memory only speeds copies to a GPU up."""
