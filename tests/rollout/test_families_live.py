"""GLM-4 and DeepSeek-V3 from a real Megatron actor (2 ranks, EP 2) in live SGLang servers of their own.

GLM-5 is not here: SGLang's sparse attention asks for a GPU before it reads a weight.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.conftest import LIVE_MAX_TOKENS, LiveServer, serving
from tests.controller.test_publish_live import OTHER_PROMPT, hf_logprobs, running
from tests.support.live_actor import OTHER
from tests.support.tiny_models import Arch, make_tiny_model

pytestmark = [pytest.mark.live, pytest.mark.ranks]
ARCHS: tuple[Arch, ...] = ("glm4_moe", "deepseek_v3")


def make_model(folder: Path, arch: Arch, seed: int) -> Path:
    return make_tiny_model(
        folder, arch=arch, seed=seed, max_position_embeddings=LIVE_MAX_TOKENS, num_nextn_predict_layers=1
    )


@pytest.fixture(scope="module", params=ARCHS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Arch, LiveServer]]:
    directory = tmp_path_factory.mktemp(request.param)
    with serving(make_model(directory / "model", request.param, 0), directory / "sglang.log") as server:
        yield request.param, server


async def test_the_first_publish_restores_every_tensor_and_a_later_one_brings_other_weights(
    served: tuple[Arch, LiveServer], tmp_path: Path
) -> None:
    """Shared experts, biases of attention, fused projections of latents, and the bias that decides on experts."""
    arch, server = served
    other = make_model(tmp_path / "other", arch, 2)
    biases = [
        load_file(path / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"]
        for path in (server.model_path, other)
    ]
    assert not biases[0].equal(biases[1])
    of_a, of_b = (hf_logprobs(model, OTHER_PROMPT) for model in (server.model_path, other))
    async with running(server, other) as parts:
        assert await parts.engine_against(of_a, OTHER_PROMPT) < 1e-4  # as the checkpoint was read from disk
        first = await parts.publisher.first_publish()
        assert first.metrics["publish/logprob_max_difference"].value < 1e-4
        assert await parts.engine_against(of_a, OTHER_PROMPT) < 1e-4
        await parts.set_weights(OTHER)
        await parts.publisher.publish(5)
        assert await parts.engine_against(of_b, OTHER_PROMPT) < 1e-4
