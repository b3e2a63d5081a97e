"""One answer to which GPUs there are, for placement, engine and ranks. The driver and torch's build are fakes."""

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launch import placement
from megatron_sao.rollout import devices, sglang_cpu
from megatron_sao.rollout.devices import name_devices, visible_devices


def _machine(monkeypatch: pytest.MonkeyPatch, *, num_devices: int, cuda_build: bool) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "_num_driver_devices", lambda: num_devices)
    monkeypatch.setattr(devices, "_torch_is_built_for_cuda", lambda: cuda_build)


def test_a_cpu_build_of_torch_uses_no_gpu_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, num_devices=8, cuda_build=False)
    assert visible_devices() == ()
    assert sglang_cpu.is_needed()


def test_placement_and_engine_ask_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, num_devices=2, cuda_build=True)
    assert placement.visible_devices is visible_devices
    assert visible_devices() == ("0", "1")
    assert not sglang_cpu.is_needed()
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert visible_devices() == ()
        assert sglang_cpu.is_needed()


@pytest.mark.parametrize(
    ("count", "listed", "names"),
    [
        (3, None, ("0", "1", "2")),
        (2, "5, 7", ("5", "7")),
        (1, "GPU-8932f937", ("GPU-8932f937",)),
        (2, "0,1,-1,2", ("0", "1")),
        (8, "-1", ()),
        (8, "", ()),
        (8, "-1,0", ()),
        (1, "0,99,1", ("0",)),  # CUDA ends the list at a device that is not there
        (0, "0", ()),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(count: int, listed: str | None, names: tuple[str, ...]) -> None:
    assert name_devices(count, listed) == names


@pytest.mark.parametrize(
    ("line", "cuda"),
    [("cuda: Optional[str] = None", False), ("cuda: Optional[str] = '12.9'", True), ("cuda = '11.8'", True)],
)
def test_torchs_own_file_says_what_it_was_built_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, cuda: bool
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\ndebug = False\n{line}\nhip: Optional[str] = None\n")
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda _: found)
    assert devices._torch_is_built_for_cuda() is cuda


def test_this_machines_torch_agrees() -> None:
    assert devices._torch_is_built_for_cuda() == (torch.version.cuda is not None)
    assert bool(visible_devices()) == torch.cuda.is_available()


def test_a_driver_without_a_device_counts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_device(_: Any) -> Any:
        return SimpleNamespace(cuInit=lambda _: 100, cuDeviceGetCount=lambda _: 100)

    monkeypatch.setattr(ctypes, "CDLL", no_device)
    assert devices._num_driver_devices() == 0
