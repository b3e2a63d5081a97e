"""Where Megatron-core runs: CUDA with NCCL, or a CPU with gloo. The only place that patches anything.

Without CUDA, `install` gives the names of `torch.cuda` that Megatron-core calls while it trains a meaning on the CPU.
With CUDA it changes nothing, but for what Megatron-core lacks where Transformer Engine or Apex is not installed.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import megatron.core.post_training.modelopt.layers as whole_layers
import megatron.core.tensor_parallel.layers as megatron_layers
import megatron.core.tensor_parallel.random as megatron_random
import megatron.core.transformer.moe.moe_utils as moe_utils
import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
import megatron.core.transformer.multi_latent_attention as multi_latent_attention
import megatron.core.utils as megatron_utils
import torch

from megatron_sao.megatron.installed import SPARSE_ATTENTION

_CPU = torch.device("cpu")
_ABSORBED = "megatron.core.transformer.experimental_attention_variant.absorbed_mla"  # not in every version
_FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")
_installed: list["Platform"] = []
SparseKernels = Literal["none", "tilelang", "cudnn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """What the rest of the package may ask about the machine."""

    device: torch.device
    backend: Literal["gloo", "nccl"]
    transformer_engine: bool  # the layer spec: Transformer Engine's, or Megatron-core's local one
    fused_weight_gradients: bool  # the product that makes a weight's gradient adds it to the float32 buffer
    sparse_kernels: SparseKernels = "none"  # for sparse attention; none: scores of all pairs, in float32


def install() -> Platform:
    """Find the platform, and prepare Megatron-core for it. The second call returns what the first one did."""
    if not _installed:
        _installed.append(_cuda_platform() if torch.cuda.is_available() else _cpu_platform())
    return _installed[0]


def _cuda_platform() -> Platform:
    has_transformer_engine = importlib.util.find_spec("transformer_engine") is not None
    if not has_transformer_engine:
        _complete_megatron()
    return Platform(
        device=torch.device("cuda", torch.cuda.current_device()),
        backend="nccl",
        transformer_engine=has_transformer_engine,
        fused_weight_gradients=_fuse_weight_gradients(has_transformer_engine),
        sparse_kernels=_sparse_kernels(),
    )


def _fuse_weight_gradients(has_transformer_engine: bool) -> bool:
    """Whether every linear layer can. Transformer Engine's do by themselves; Megatron's own (the output layer, and all
    of the local spec) refuse to be built without Apex's kernel, and get Transformer Engine's product in its place."""
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None:
        return True
    if has_transformer_engine:
        megatron_layers.fused_weight_gradient_mlp_cuda = _WeightGradients
        megatron_layers._grad_accum_fusion_available = True
    return has_transformer_engine


class _WeightGradients:
    """What Megatron calls of Apex's module, as Transformer Engine's layers compute it (2.9 and newer)."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: torch.Tensor, output_gradient: torch.Tensor, main_grad: torch.Tensor) -> None:
        """Adds the product of [tokens, out] and [tokens, in] to the gradient [out, in]."""
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        general_gemm(
            inputs,
            output_gradient,
            out_dtype=main_grad.dtype,
            layout="NT",
            out=main_grad,
            accumulate=True,
            use_split_accumulator=True,
            grad=True,
        )

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def _sparse_kernels() -> SparseKernels:
    """Those whose packages are all there, by Megatron's own account."""
    if SPARSE_ATTENTION and not megatron_utils._missing_cudnn_dsa_kernel_dependencies():
        return "cudnn"
    if SPARSE_ATTENTION and not megatron_utils._missing_tilelang_dsa_kernel_dependencies():
        return "tilelang"
    return "none"


def _cpu_platform() -> Platform:
    _stand_in_for_torch_cuda()
    _send_cuda_tensors_to_the_cpu()
    _stand_in_for_cuda_random_states()
    _complete_megatron()
    torch.compiler.set_stance("force_eager")  # Megatron compiles the router's count of tokens: a minute for no gain
    return Platform(device=_CPU, backend="gloo", transformer_engine=False, fused_weight_gradients=False)


class _Stream:
    """A stream on a machine where everything is done when the call returns. Also serves as an event."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _nothing(self, *_: Any) -> None:
        return None

    wait_stream = wait_event = wait = record = synchronize = _nothing

    def record_event(self, *_: Any) -> "_Stream":
        return self

    def query(self) -> bool:
        return True


@contextlib.contextmanager
def _in_stream(_: Any) -> Iterator[None]:
    yield


def _stand_in_for_torch_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _Stream()
    cuda.stream = _in_stream
    cuda.synchronize = lambda *_, **__: None
    cuda.manual_seed = torch.manual_seed
    for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor", "IntTensor", "LongTensor", "DoubleTensor"):
        setattr(cuda, name, getattr(torch, name))


def _send_cuda_tensors_to_the_cpu() -> None:
    """`torch.zeros(1, device="cuda")`, `tensor.cuda()`; optimizers compare `type()` with `torch.cuda.FloatTensor`."""
    with _CPU:  # torch lists the functions that obey `with device` at its first use: before they are replaced
        torch.empty(0)
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    tensor.record_stream = lambda self, _: None
    tensor.type = _cuda_type_names(torch.Tensor.type)
    token_dispatcher.maybe_move_tensor_to_cpu = _splits_as_numpy


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)  # that a copy to a GPU would need
        return factory(*args, **kwargs)

    create.__name__ = factory.__name__
    create.__doc__ = factory.__doc__
    return create


def _is_cuda(device: Any) -> bool:
    return isinstance(device, int) or str(device).startswith("cuda")


def _cuda_type_names(original: Callable[..., Any]) -> Callable[..., Any]:
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    return type_


def _stand_in_for_cuda_random_states() -> None:
    """Megatron keeps one random state per kind of parallelism: here they are states of the CPU's generator."""

    def get_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(new_state)

    cuda: Any = torch.cuda
    cuda.get_rng_state, cuda.set_rng_state = get_state, set_state
    cuda.random.get_rng_state, cuda.random.set_rng_state = get_state, set_state
    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state


def _complete_megatron() -> None:
    """What it takes from Transformer Engine without asking whether that is there: latent attention above all."""
    if not hasattr(moe_utils, "te_general_gemm"):  # named without Transformer Engine, but defined only with it
        moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False  # true whenever its names can be imported; isinstance() of them then fails
    latent_modules = [multi_latent_attention]
    if SPARSE_ATTENTION:
        latent_modules.append(importlib.import_module(_ABSORBED))
    for module in latent_modules:
        if module.Linear is None:  # 0.17 and newer know it only beside Transformer Engine
            module.Linear = whole_layers.Linear


def _splits_as_numpy(value: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron converts only tensors that leave a GPU; all-to-all wants the splits as numbers here too."""
    if as_numpy and torch.is_tensor(value):
        return value.numpy()
    return value
