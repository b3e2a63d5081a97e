"""The stand-in for Transformer Engine's extension, and the fused paths that the product takes with it (`make test-te`).

All other tests that run Megatron run on Transformer Engine's layer spec there too.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.te_cpu import TRANSFORMER_ENGINE
from tests.support.tiny_models import make_tiny_model
from tests.support.training_bodies import fused_kernels
from tests.support.training_case import FUSIONS, Case, with_trainer

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not TRANSFORMER_ENGINE, reason="Transformer Engine's wheel is not here: make test-te"),
]


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, tuple[Any, Any]], str]:
    """In a process whose Triton interprets: its environment says so before Triton is imported."""
    file = tmp_path_factory.mktemp("kernels") / "pairs.pt"
    command = [sys.executable, "-m", "tests.support.te_kernels", str(file)]
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return torch.load(file)


def test_an_unknown_kernel_says_its_name_and_what_it_was_given(computed: Any) -> None:
    assert computed[1].startswith("transformer_engine_torch.fp8_transpose(torch.float32[2, 3], 7, out=None): ")


@pytest.mark.parametrize(("kind", "how_many"), [("rope", 6), ("permutation", 2), ("sorted", 1), ("weight", 2)])
def test_fused_kernels_compute_what_their_references_do(computed: Any, kind: str, how_many: int) -> None:
    """Forward and backward: rotary embedding as Transformer Engine's unfused one, permutation as its own Triton kernels
    in Triton's interpreter, weight gradients as a sum of products."""
    pairs = {name: pair for name, pair in computed[0].items() if name.startswith(kind)}
    assert len(pairs) == how_many
    for name, (found, wanted) in pairs.items():
        for number, (got, want) in enumerate(zip(found, wanted, strict=True)):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=lambda why: f"{name}, {number}: {why}")  # noqa: B023


@pytest.mark.parametrize("unfused", [(), FUSIONS], ids=["fused", "unfused"])
def test_every_kernel_that_can_be_fused_is(tmp_path: Path, unfused: tuple[str, ...]) -> None:
    """And none where a test of training compares with the others (`test_training.LAYOUTS`)."""
    directory = str(make_tiny_model(tmp_path / "model", seed=1))
    (found,) = run_ranks(1, with_trainer, directory, Case(unfused=unfused), "actor", fused_kernels, {})
    assert found == ("nothing" if unfused else "rotary embedding + activation + permutation + weight gradients")
