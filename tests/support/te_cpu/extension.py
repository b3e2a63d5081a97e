"""The module `transformer_engine_torch`, whose unknown kernels refuse to compute."""

import enum
import importlib.machinery
import types
from collections.abc import Callable
from typing import Any

import torch

NAME = "transformer_engine_torch"
TORCH_TYPES = {
    0: torch.uint8,
    2: torch.int32,
    4: torch.float32,
    5: torch.float16,
    6: torch.bfloat16,
}
"""By the number of an extension's DType."""

_MEMBERS = {
    "DType": {
        "kByte": 0,
        "kInt32": 2,
        "kFloat32": 4,
        "kFloat16": 5,
        "kBFloat16": 6,
        "kFloat8E4M3": 7,
        "kFloat8E5M2": 8,
        "kFloat4E2M1": 10,
    },
    "FP8FwdTensors": {
        f"GEMM{i}_{kind}": 3 * i + j - 3 for i in (1, 2, 3) for j, kind in enumerate(("INPUT", "WEIGHT", "OUTPUT"))
    },
    "FP8BwdTensors": {
        f"GRAD_{kind}{i}": 2 * i + j - 2 for i in (1, 2, 3) for j, kind in enumerate(("OUTPUT", "INPUT"))
    },
    "NVTE_Fused_Attn_Backend": {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2},
}
"""Of the enumerations whose values or whole sets of names Transformer Engine's Python code compares."""


class _OpenEnumeration(type):
    """A class whose members come to be when they are named: Transformer Engine only hands them back to its kernels."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        member = _Member(len(cls.__dict__))
        member.name = name
        setattr(cls, name, member)
        return member


class _Member(int):
    name: str

    def __repr__(self) -> str:
        return self.name


class Extension(types.ModuleType):
    """What has not been registered is an enumeration or a class (upper case), or a kernel that raises."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _OpenEnumeration(name, (), {}) if name[0].isupper() else _refusal(name)
        setattr(self, name, value)
        return value


def _refusal(name: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = [_shape(value) for value in args] + [f"{key}={_shape(value)}" for key, value in kwargs.items()]
        raise NotImplementedError(f"{NAME}.{name}({', '.join(given)}): tests/support/te_cpu has no stand-in for it")

    kernel.__name__ = name
    return kernel


def _shape(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if torch.is_tensor(value) else repr(value)


def make() -> Extension:
    """The extension without kernels: enumerations and versions."""
    extension = Extension(NAME)
    extension.__spec__ = importlib.machinery.ModuleSpec(NAME, None)
    for name, members in _MEMBERS.items():
        setattr(extension, name, enum.IntEnum(name, members))
    extension.get_cudnn_version = lambda: 91400
    extension.get_cublasLt_version = lambda: 130000  # below 13.3: one GEMM an expert, not the grouped-tensor path
    extension.get_num_cublas_streams = lambda: 1
    extension.ubuf_built_with_mpi = lambda: False
    extension.get_fused_attn_backend = lambda *_, **__: (extension.NVTE_Fused_Attn_Backend.NVTE_No_Backend, "on a CPU")
    return extension
