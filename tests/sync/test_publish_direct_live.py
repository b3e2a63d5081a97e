"""Direct sends of a real Megatron actor, in several layouts, into a live SGLang, seen through HF transformers."""

from pathlib import Path

import pytest

from megatron_sao.config import LayoutConfig
from tests.conftest import LiveServer
from tests.controller.test_publish_live import OTHER_PROMPT, hf_logprobs, other_model, running
from tests.support.live_actor import (
    EXPERT_PARALLEL,
    OTHER,
    PIPELINE_PARALLEL,
    TENSOR_AND_EXPERT_PARALLEL,
    TENSOR_PARALLEL,
)
from tests.support.toy_actor import Script, events

__all__ = ["other_model"]
pytestmark = [pytest.mark.live, pytest.mark.ranks]
LAYOUTS = {
    "expert": EXPERT_PARALLEL,
    "tensor": TENSOR_PARALLEL,
    "tensor and expert": TENSOR_AND_EXPERT_PARALLEL,
    "pipeline": PIPELINE_PARALLEL,
}


@pytest.mark.parametrize("name", LAYOUTS)
async def test_direct_sends_are_served_exactly_in_every_layout_and_no_expert_is_gathered(
    name: str, live_server: LiveServer, other_model: Path, tmp_path: Path
) -> None:
    """Every tensor of the engine is checked by its checksum in the first publish; B then arrives over A."""
    layout: LayoutConfig = LAYOUTS[name]
    of_b = hf_logprobs(other_model, OTHER_PROMPT)
    args = (Script(report=tmp_path), layout)
    async with running(live_server, other_model, settings={"sender": "direct"}, actor_args=args) as parts:
        await parts.publisher.first_publish()
        await parts.set_weights(OTHER)
        report = await parts.publisher.publish(1)
        assert report.num_attempts == 1
        assert await parts.engine_against(of_b, OTHER_PROMPT) < 1e-4
        gathered = events(tmp_path, "gathered")
        for event in gathered:
            assert {first_holder(name, layout) for name in event["names"]} == {event["target"]}
            assert layout.tensor > 1 or event["num_bytes"] == 0
            assert event["target"] == 0 or event["num_bytes"] == 0
        assert {event["target"] for event in gathered} == set(range(max(layout.expert, layout.pipeline)))


def first_holder(name: str, layout: LayoutConfig) -> int:
    """Of two ranks; the model has two layers of eight experts."""
    if layout.pipeline == 2:
        return int("layers.0." not in name and "embed_tokens" not in name)
    _, found, number = name.partition(".experts.")
    return int(number.split(".")[0]) // (8 // layout.expert) if found else 0
