"""Direct sends of a real Megatron actor, in several layouts, into a live SGLang, seen through HF transformers."""

from pathlib import Path

import pytest

from megatron_sao.config import LayoutConfig
from tests.conftest import LiveServer
from tests.live_actor import EXPERT_PARALLEL, OTHER, START, TENSOR_AND_EXPERT_PARALLEL, TENSOR_PARALLEL
from tests.test_publish_live import OTHER_PROMPT, hf_logprobs, other_model, running
from tests.toy_actor import Script, events

__all__ = ["other_model"]
pytestmark = [pytest.mark.live, pytest.mark.ranks]
LAYOUTS = {"expert": EXPERT_PARALLEL, "tensor": TENSOR_PARALLEL, "tensor and expert": TENSOR_AND_EXPERT_PARALLEL}


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
        await parts.set_weights(START)
        experts = [event for event in events(tmp_path, "gathered") if any(".experts." in n for n in event["names"])]
        expert_ranks = {event["target"] for event in experts if all(".experts." in n for n in event["names"])}
        assert expert_ranks >= ({0, 1} if layout.expert == 2 else set())
        assert {event["target"] for event in events(tmp_path, "gathered")} == ({0, 1} if layout.expert == 2 else {0})
        if layout.tensor == 1:
            assert sum(event["num_bytes"] for event in events(tmp_path, "gathered")) == 0
        assert not any(event["num_bytes"] for event in experts if event["target"] == 1)
