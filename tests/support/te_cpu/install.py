"""Puts the stand-in in its place while Python imports: the extension before megatron.core, the device's answers after
the platform has been found."""

import dataclasses
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


def watch_imports() -> None:
    sys.meta_path.insert(0, _Watcher())


class _Watcher(importlib.abc.MetaPathFinder):
    """Acts when one of two modules is imported for the first time, and leaves all others alone."""

    def __init__(self) -> None:
        self._acted: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in ("megatron.core", "megatron_sao.megatron.platform") or name in self._acted:
            return None
        self._acted.add(name)
        if name == "megatron.core":
            _import_transformer_engine()
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None, f"no {name}"
        assert spec.loader is not None, f"no {name}"
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _announce(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _import_transformer_engine() -> None:
    from tests.support.te_cpu import (
        context_parallel,
        extension,
        matmul,
        norms,
        optimizer,
        permutation,
        rope,
        rows,
        softmax,
    )

    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its own word for: look for no CUDA libraries
    made = extension.make()
    for kernels in (matmul, norms, optimizer, rope, rows, softmax, context_parallel):
        kernels.register(made)
    sys.modules[extension.NAME] = made
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda framework: None
    import transformer_engine.pytorch
    import transformer_engine.pytorch.cpp_extensions.gemm as gemm
    import transformer_engine.pytorch.triton.permutation as triton_kernels

    permutation.register(triton_kernels)
    context_parallel.finish()
    gemm.get_cublas_workspace = _no_workspace
    _register_operators()


def _no_workspace(device: Any, ub: bool, grouped_gemm: bool) -> Any:
    import torch

    workspace = torch.empty(1, dtype=torch.uint8)
    return [workspace] if grouped_gemm else workspace


def _register_operators() -> None:
    """Operators that are declared for CUDA only."""
    from transformer_engine.pytorch.attention import custom_ops

    from tests.support.te_cpu import rows

    for name in ("convert_thd_to_bshd", "convert_bshd_to_thd"):
        getattr(custom_ops, name).register_kernel("cpu", getattr(rows, name))


def _announce(platform: Any) -> None:
    """The platform on a CPU is as it is on CUDA with Transformer Engine and without Apex."""
    find = platform._cpu_platform

    def cpu_platform() -> Any:
        from tests.support.te_cpu import device

        found = find()
        device.pretend()
        fused = platform._fuse_weight_gradients(True)
        return dataclasses.replace(found, transformer_engine=True, fused_weight_gradients=fused)

    platform._cpu_platform = cpu_platform
    platform._complete_megatron = lambda: None
