"""The platform: what Megatron needs on a CPU; where CUDA is present, what it lacks without Transformer Engine."""

import pytest
import torch

from tests.support.ranks import RankError, run_ranks
from tests.support.te_cpu import TRANSFORMER_ENGINE

pytestmark = pytest.mark.ranks


def _on_a_cpu(rank: int) -> dict[str, object]:
    from megatron_sao.megatron import platform

    first = platform.install()
    with torch.device("meta"):
        meta = torch.empty(2)
    return {
        "again": platform.install() is first,
        "backend": first.backend,
        "zeros": str(torch.zeros(1, device="cuda").device),
        "index": str(torch.tensor([1], device=0).device),
        "type": torch.ones(1, dtype=torch.bfloat16).type(),
        "meta": str(meta.device),
    }


def test_cuda_names_mean_the_cpu() -> None:
    (answer,) = run_ranks(1, _on_a_cpu)
    assert answer == {
        "again": True,
        "backend": "gloo",
        "zeros": "cpu",
        "index": "cpu",
        "type": "torch.cuda.BFloat16Tensor",
        "meta": "meta",
    }


def _pretend_cuda(rank: int) -> tuple[str, list[str], bool, bool]:
    """A fake: `torch.cuda` says that it has a device. Nothing is run on it."""
    import megatron.core.tensor_parallel.random as megatron_random
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
    import megatron.core.transformer.multi_latent_attention as latent

    from megatron_sao.megatron import platform

    torch.cuda.is_available = lambda: True  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0  # type: ignore[assignment]
    owners = (torch, torch.cuda, torch.Tensor, megatron_random, token_dispatcher)
    before = [dict(vars(owner)) for owner in owners]
    found = platform.install()
    changed = [
        name
        for owner, old in zip(owners, before, strict=True)
        for name, value in vars(owner).items()
        if old.get(name) is not value
    ]
    return found.backend, changed, found.transformer_engine, latent.HAVE_TE


def test_with_cuda_only_latent_attention_without_transformer_engine_is_touched() -> None:
    assert run_ranks(1, _pretend_cuda) == [("nccl", [], TRANSFORMER_ENGINE, TRANSFORMER_ENGINE)]


def _fail_on_rank_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("a fault of rank one")
    torch.distributed.barrier()


def test_a_failing_rank_ends_all_with_its_traceback() -> None:
    with pytest.raises(RankError, match="(?s)rank 1 failed.*a fault of rank one"):
        run_ranks(2, _fail_on_rank_one)


def _wait_for_ever(rank: int) -> None:
    import time

    time.sleep(1000)


def test_ranks_that_hang_are_ended_at_the_deadline() -> None:
    with pytest.raises(RankError, match=r"ranks \[0, 1\] were not done after 1"):
        run_ranks(2, _wait_for_ever, timeout_s=1)
