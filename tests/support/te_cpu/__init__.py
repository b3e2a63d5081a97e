"""A FAKE Transformer Engine device, used in tests only: Transformer Engine's own Python code computes on a CPU.

PyPI's `transformer_engine` wheel is pure Python; its C++ extension `transformer_engine_torch` needs CUDA. Here the
kernels that the tests meet are plain torch, the questions about the device are answered as a Hopper would, and the
platform says that Transformer Engine is there. A kernel that is not here raises NotImplementedError with its name and
the shapes that it was called with: it never gives a result in silence.

    extension         the module, its enumerations, and the refusal of what is unknown
    matmul norms softmax rows rope optimizer    kernels of the extension, each with `register(extension)`
    context_parallel  its thd kernels and fused attention, where the file is there
    permutation       the Triton kernels of the MoE permutation
    device            answers about the device
    install           the order of it all; `hook/sitecustomize.py` calls it in every process that has hook/ on its
                      PYTHONPATH, before megatron.core is imported

What it does not show: flash attention and cuDNN's, the kernels' own arithmetic (sums here are float32 or wider), FP8,
streams, NCCL, and the memory of kernels (unfused attention keeps all scores, which a GPU never holds).
"""

import importlib.util

import pytest

TRANSFORMER_ENGINE = importlib.util.find_spec("transformer_engine") is not None
"""Whether these tests run on Transformer Engine's layer spec: `make test-te` installs its wheel, nothing else does."""

needs_te = pytest.mark.skipif(
    not TRANSFORMER_ENGINE, reason="context parallelism needs Transformer Engine: make test-te"
)
