"""A plugin of sglang (entry point group `sglang.srt.plugins`): three things that it does otherwise where a GPU is."""

from typing import Any


def register() -> None:
    # here: sglang imports its plugins before itself
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    common._cuda_host_register = _leave_unregistered
    handlers.AttentionBackendRegistry.register("torch_native", _latent_attention)
    factory.get_rope_cpu = _with_plain_rope(factory.get_rope, factory.get_rope_cpu)


def _leave_unregistered(*_: Any, **__: Any) -> None:
    """Pinned memory only speeds copies to a GPU up."""


def _with_plain_rope(plain: Any, scaled: Any) -> Any:
    """Of latent attention: on a CPU sglang asks for YaRN, which Moonlight has not. Its plain one works too."""

    def get_rope(size: int, rotary: int, longest: int, base: int, halves: bool, scaling: Any, *rest: Any) -> Any:
        values = (size, rotary, longest, base, halves, scaling)
        return scaled(*values, *rest) if scaling else plain(*values, *rest[:-1])  # the last one is the device

    return get_rope


def _latent_attention(*_: Any) -> Any:
    """torch's attention reads keys and values from the cache, which holds latents: so queries must be latent too.

    Unregistered, it would get the method of Triton's: whole heads for the first part of a prompt.
    """
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA
