"""Finds reads of device tensors' values, each of which makes the host wait for a GPU; without a GPU, on the CPU."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_OPERATORS = {
    "_local_scalar_dense",
    "equal",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
    "_unique2",
}
_METHODS = {"cpu", "item", "numpy", "tolist"}  # on the CPU some of them call no operator
_OURS = ("megatron_sao.", "tests.support.training_bodies")  # not the stand-ins of kernels in tests.support.te_cpu


@contextmanager
def watching() -> Iterator[list[str]]:
    """Fills the list: operator, module and line of each read that this project's code makes. Megatron's are its own.

    A copy to the CPU by `to` is not seen, nor what only a backward reads.
    """
    found: list[str] = []
    with _Methods(found), _Operators(found):
        yield found


class _Operators(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        if name in _OPERATORS or any(index is not None and index.dtype is torch.bool for index in indices):
            _note(self._found, name)
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _METHODS:
            _note(self._found, name)
        return func(*args, **(kwargs or {}))


def _note(found: list[str], name: str) -> None:
    """The caller is the innermost function that is neither torch's nor of this module."""
    frame: Any = sys._getframe(1)
    while frame is not None and _module(frame).startswith(("torch.", "contextlib", __name__)):
        frame = frame.f_back
    if frame is not None and _module(frame).startswith(_OURS):
        found.append(f"{name} in {_module(frame)}:{frame.f_lineno}")


def _module(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", ""))
