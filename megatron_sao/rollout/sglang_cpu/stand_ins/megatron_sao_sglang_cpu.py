"""A plugin of sglang (entry point group `sglang.srt.plugins`): two things that it does otherwise where a GPU is."""

from typing import Any


def register() -> None:
    # here: sglang imports its plugins before itself
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    common._cuda_host_register = _leave_unregistered
    handlers.AttentionBackendRegistry.register("torch_native", _latent_attention)


def _leave_unregistered(*_: Any, **__: Any) -> None:
    """Pinned memory only speeds copies to a GPU up."""


def _latent_attention(*_: Any) -> Any:
    """torch's attention reads keys and values from the cache, which holds latents: so queries must be latent too.

    Unregistered, it would get the method of Triton's: whole heads for the first part of a prompt.
    """
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA
