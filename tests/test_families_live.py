"""GLM-4 from a real Megatron actor (2 ranks, EP 2) in a live SGLang server of its own, seen through HF transformers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.conftest import LIVE_MAX_TOKENS, LiveServer, serving
from tests.live_actor import OTHER
from tests.test_publish_live import OTHER_PROMPT, hf_logprobs, running
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.live, pytest.mark.ranks]


def make_model(folder: Path, seed: int) -> Path:
    return make_tiny_model(
        folder, arch="glm4_moe", seed=seed, max_position_embeddings=LIVE_MAX_TOKENS, num_nextn_predict_layers=1
    )


@pytest.fixture(scope="module")
def glm4_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("glm4")
    with serving(make_model(directory / "model", 0), directory / "sglang.log") as server:
        yield server


async def test_the_first_publish_restores_every_tensor_and_a_later_one_brings_other_weights(
    glm4_server: LiveServer, tmp_path: Path
) -> None:
    """Shared experts, biases of attention, and the correction bias, which decides which experts are chosen."""
    other = make_model(tmp_path / "other", 2)
    biases = [
        load_file(path / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"]
        for path in (glm4_server.model_path, other)
    ]
    assert not biases[0].equal(biases[1])
    of_a, of_b = (hf_logprobs(model, OTHER_PROMPT) for model in (glm4_server.model_path, other))
    async with running(glm4_server, other) as parts:
        assert await parts.engine_against(of_a, OTHER_PROMPT) < 1e-4  # as the checkpoint was read from disk
        first = await parts.publisher.first_publish()
        assert first.metrics["publish/logprob_max_difference"].value < 1e-4
        assert await parts.engine_against(of_a, OTHER_PROMPT) < 1e-4
        await parts.set_weights(OTHER)
        await parts.publisher.publish(5)
        assert await parts.engine_against(of_b, OTHER_PROMPT) < 1e-4
