"""GLM-5 as a whole: what the model holds, what is only carried through, and what becomes of each."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_sao.megatron.installed import SPARSE_ATTENTION
from megatron_sao.sync.plan import Publishable
from tests.support.family_ranks import BIAS, lengths_that_are_refused, publish_and_export
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("glm5")
    kinds = ["full", "shared", "full"]
    make_tiny_model(
        root / "disk", arch="glm_moe_dsa", seed=4, dtype=torch.bfloat16, indexer_types=kinds, num_nextn_predict_layers=1
    )
    tensors, wholes = run_ranks(2, publish_and_export, root / "disk", root)[0]
    return {"disk": read(root / "disk"), "tensors": tensors, "wholes": wholes, "root": root}


def read(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_a_full_publish_restores_all_that_an_engine_holds(story: dict[str, Any]) -> None:
    """All but the layer of multi-token prediction, which it does not load: bias and indexers too, in their types."""
    expected = {name: tensor for name, tensor in story["disk"].items() if ".layers.3." not in name}
    published: tuple[Publishable, ...] = story["tensors"]
    assert {tensor.spec.name for tensor in published} == expected.keys()
    for name, tensor in expected.items():
        assert story["wholes"][name].dtype is tensor.dtype
        assert torch.equal(story["wholes"][name], tensor), name


def test_later_publishes_send_what_is_trained_and_the_buffers(story: dict[str, Any]) -> None:
    published: tuple[Publishable, ...] = story["tensors"]
    buffers = {tensor.spec.name for tensor in published if tensor.is_buffer}
    assert buffers == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)}
    untrained = {tensor.spec.name for tensor in published if not tensor.trained and not tensor.is_buffer}
    assert untrained == {
        name for name in story["disk"] if ".layers.0." in name or (".layers.2." in name and "indexer" in name)
    }


def test_a_correction_bias_stays_what_it_is(story: dict[str, Any]) -> None:
    assert story["disk"][BIAS].dtype is torch.float32
    assert not torch.equal(story["disk"][BIAS], story["disk"][BIAS].bfloat16().float())
    assert torch.equal(story["wholes"]["bias after a step"], story["disk"][BIAS])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_export_of_any_type_keeps_buffers_and_carried_tensors(story: dict[str, Any], dtype: torch.dtype) -> None:
    exported = read(story["root"] / str(dtype))
    assert exported.keys() == story["disk"].keys()
    for name, tensor in story["disk"].items():
        carried = ".layers.3." in name or ("indexer" in name and not SPARSE_ATTENTION)
        kept = tensor.dtype is torch.float32 or carried
        assert exported[name].dtype is (tensor.dtype if kept else dtype)
        assert torch.equal(exported[name].float(), tensor.float()), name


def test_sequences_above_index_topk_are_refused_unless_sparse_or_an_approximation_is_wanted(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", arch="glm_moe_dsa", index_topk=8)
    run_ranks(1, lengths_that_are_refused, tmp_path / "model")
