"""What PyPI's sglang lacks to start on a CPU. Nothing here is used where CUDA is.

`stand_ins/` goes on the PYTHONPATH of the server's processes, and of no other:
- `sitecustomize.py`: names of two packages that sglang imports and, on a CPU, never calls: its compiled kernels
  (not on PyPI for a CPU; without AMX instructions sglang takes its torch paths) and torchvision.
- `megatron_sao_sglang_cpu*` (an entry point of sglang's own plugin mechanism): `--enable-return-routed-experts`
  registers a host buffer with CUDA; here there is nothing to register it with. And torch's attention gets the queries
  that its cache of latents asks for (DeepSeek-V3), which may have plain rotary embeddings (Moonlight).
"""

from collections.abc import Mapping
from pathlib import Path

from megatron_sao.rollout.devices import visible_devices

STAND_INS = Path(__file__).parent / "stand_ins"

KEPT_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**33)}
"""glibc gives a buffer above 32 MiB back to the kernel after each use; receiving into new pages takes as long as
copying them."""

FLAGS = ("--device", "cpu", "--attention-backend", "torch_native")


def is_needed() -> bool:
    """Whether sglang must run on the CPU: where placement finds no GPU either."""
    return not visible_devices()


def environment(cores: str | None, python_path: str | None) -> Mapping[str, str]:
    """Variables for the server: `cores` as SGLANG_CPU_OMP_THREADS_BIND reads them ("1", or "0|1" for two ranks).

    SGLang heeds them where its own kernels run (AMX). Elsewhere every rank would compute with a thread for each core of
    the machine, and a thread that must wait for its core makes all the others wait: the number of threads is said too.
    """
    variables = {
        "SGLANG_USE_CPU_ENGINE": "1",
        **KEPT_MEMORY,
        "PYTHONPATH": ":".join(part for part in (str(STAND_INS), python_path) if part),
    }
    if cores is None:
        return variables
    num_threads = max(len(core_numbers(group)) for group in cores.split("|"))
    return variables | {"SGLANG_CPU_OMP_THREADS_BIND": cores, "OMP_NUM_THREADS": str(num_threads)}


def core_numbers(group: str) -> set[int]:
    """Of one rank's cores, such as "0-3,8". Raises ValueError where it is no such text."""
    ranges = [part.partition("-") for part in group.split(",")]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
