"""GLM-4, DeepSeek-V3 and Moonlight from a real Megatron actor of 2 ranks in live SGLang servers of their own.

GLM-5 is not here: SGLang's sparse attention asks for a GPU before it reads a weight.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.conftest import LIVE_MAX_TOKENS, LiveServer, serving
from tests.controller.test_publish_live import OTHER_PROMPT, hf_logprobs, running
from tests.support.live_actor import EXPERT_PARALLEL, OTHER, TENSOR_AND_EXPERT_PARALLEL
from tests.support.tiny_models import MOONLIGHT, ODD_VOCABULARY, make_tiny_model
from tests.support.toy_actor import Script

pytestmark = [pytest.mark.live, pytest.mark.ranks]
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4": {"arch": "glm4_moe"},
    "deepseek": {"arch": "deepseek_v3"},
    # by tensor ranks that do not divide its vocabulary, and without the layer that its config.json promises
    "moonlight": {"arch": "deepseek_v3", "as_transformers_saves": True, **MOONLIGHT, **ODD_VOCABULARY},
}
LAYOUTS = {"glm4": EXPERT_PARALLEL, "deepseek": EXPERT_PARALLEL, "moonlight": TENSOR_AND_EXPERT_PARALLEL}


def make_model(folder: Path, family: str, seed: int) -> Path:
    fields = {"max_position_embeddings": LIVE_MAX_TOKENS, "num_nextn_predict_layers": 1}
    return make_tiny_model(folder, seed=seed, **fields, **FAMILIES[family])


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, LiveServer]]:
    directory = tmp_path_factory.mktemp(request.param)
    with serving(make_model(directory / "model", request.param, 0), directory / "sglang.log") as server:
        yield request.param, server


async def test_the_first_publish_restores_every_tensor_and_a_later_one_brings_other_weights(
    served: tuple[str, LiveServer], tmp_path: Path
) -> None:
    """Shared experts, biases of attention, fused projections of latents, and the bias that decides on experts."""
    family, server = served
    other = make_model(tmp_path / "other", family, 2)
    biases = [
        load_file(path / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"]
        for path in (server.model_path, other)
    ]
    assert not biases[0].equal(biases[1])
    of_a, of_b = (hf_logprobs(model, OTHER_PROMPT) for model in (server.model_path, other))
    async with running(server, other, actor_args=(Script(), LAYOUTS[family])) as parts:
        assert await parts.engine_against(of_a, OTHER_PROMPT) < 1e-4  # as the checkpoint was read from disk
        first = await parts.publisher.first_publish()
        assert first.metrics["publish/logprob_max_difference"].value < 1e-4
        assert await parts.engine_against(of_a, OTHER_PROMPT) < 1e-4
        await parts.set_weights(OTHER)
        await parts.publisher.publish(5)
        assert await parts.engine_against(of_b, OTHER_PROMPT) < 1e-4
