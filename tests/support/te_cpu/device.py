"""What Transformer Engine asks about the device, answered for a Hopper of which nothing else is there."""

import types
from typing import Any

import torch

_PROPERTIES = types.SimpleNamespace(
    multi_processor_count=132, total_memory=80 << 30, name="H100 (a fake of the tests)", major=9, minor=0
)


def pretend() -> None:
    """After the platform has been found: before, `torch.cuda.is_available` must tell the truth."""
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.get_device_capability = lambda *_: (_PROPERTIES.major, _PROPERTIES.minor)
    cuda.get_device_properties = lambda *_: _PROPERTIES
    cuda.is_current_stream_capturing = lambda: False
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_, **__: None
    tensor: Any = torch.Tensor
    tensor.is_cuda = property(lambda self: True)
    tensor.to = _to_without_cuda(torch.Tensor.to)


def _to_without_cuda(original: Any) -> Any:
    def is_cuda(value: Any) -> bool:
        return isinstance(value, (str, torch.device)) and str(value).startswith("cuda")

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(value for value in args if not is_cuda(value))
        kwargs = {key: value for key, value in kwargs.items() if not is_cuda(value)}
        return original(self, *args, **kwargs) if args or kwargs else self

    return to
