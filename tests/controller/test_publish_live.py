"""A publish from a real Megatron actor (2 ranks, EP 2) into a live SGLang server, seen through HF transformers."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_sao.channel import Channel, ChannelServer, DropBatch
from megatron_sao.config import PublishConfig
from megatron_sao.controller.publish import Publisher
from megatron_sao.rollout.sglang_client import SGLangEngine
from megatron_sao.sync.verify import fixed_prompt, logprob_difference
from tests.conftest import LIVE_MAX_TOKENS, LiveServer
from tests.support.live_actor import (
    EXPERT_LEFT_OUT,
    GATE_UP_SWAPPED,
    NUM_RANKS,
    OTHER,
    SENDER_FAILS_ONCE,
    START,
    run_live_actor,
)
from tests.support.ranks import run_ranks
from tests.support.tiny_models import load_hf, make_tiny_model
from tests.support.toy_actor import KEY

pytestmark = [pytest.mark.live, pytest.mark.ranks]
PROMPT = fixed_prompt(320)
OTHER_PROMPT = tuple((7 * token + 3) % 256 for token in range(40))


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory, live_server: LiveServer) -> Path:
    """Checkpoint B: the live server's own is A."""
    folder = tmp_path_factory.mktemp("other")
    return make_tiny_model(folder, seed=2, max_position_embeddings=LIVE_MAX_TOKENS)


def hf_logprobs(model: Path, ids: tuple[int, ...]) -> list[float]:
    tokens = torch.tensor([ids])
    with torch.no_grad():
        logprobs = load_hf(model)(tokens).logits[0].float().log_softmax(-1)
    return [float(x) for x in logprobs[:-1].gather(1, tokens[0, 1:, None])[:, 0]]


@dataclass(frozen=True)
class Parts:
    publisher: Publisher
    actor: Channel
    engine: SGLangEngine

    async def set_weights(self, step: int) -> None:
        await self.actor.call(DropBatch(batch_id=step), timeout_s=60)

    async def engine_against(self, logprobs: list[float], ids: tuple[int, ...]) -> float:
        score = await self.engine.score(ids)
        assert score.cached_tokens == 0
        return logprob_difference(score.logprobs, logprobs)


@asynccontextmanager
async def running(
    live_server: LiveServer,
    other_model: Path,
    *,
    settings: Mapping[str, Any] = {},
    actor_args: Sequence[Any] = (),
    url: str | None = None,
) -> AsyncIterator[Parts]:
    """At the end the engine serves checkpoint A again, as version 0, whatever happened to it."""
    channels = ChannelServer()
    port = await channels.start("127.0.0.1", KEY)
    paths = (live_server.model_path, other_model)
    ranks = asyncio.create_task(
        asyncio.to_thread(run_ranks, NUM_RANKS, run_live_actor, port, *paths, *actor_args, timeout_s=180)
    )
    engine = SGLangEngine(
        url or live_server.url, api_key=live_server.api_key, vocab_size=live_server.vocab_size, max_tokens=4096
    )
    try:
        actor = await channels.accept("actor", 90)
        config = {"bucket_bytes": 200_000, "timeout_s": 30, "first_timeout_s": 30, "logprob_tolerance": 1e-4}
        publisher = Publisher(
            [engine], actor, PublishConfig(**{**config, **settings}), engine_ranks=1, fixed_prompt=PROMPT
        )
        parts = Parts(publisher, actor, engine)
        try:
            yield parts
        finally:
            await parts.set_weights(START)
            await publisher.publish(0, full=True)
            await publisher.close()
    finally:
        await engine.close()
        await channels.close()
        await asyncio.wait_for(ranks, 60)


async def test_a_publish_from_a_real_actor_makes_a_real_engine_serve_exactly_these_weights(
    live_server: LiveServer, other_model: Path
) -> None:
    of_a, of_b = (hf_logprobs(model, OTHER_PROMPT) for model in (live_server.model_path, other_model))
    async with running(live_server, other_model) as parts:
        first = await parts.publisher.first_publish()
        assert first.metrics["publish/logprob_max_difference"].value < 1e-4
        assert first.num_bytes == sum(parameter.nbytes for parameter in load_hf(live_server.model_path).parameters())
        assert await parts.engine_against(of_a, OTHER_PROMPT) < 1e-4
        await parts.set_weights(OTHER)
        assert await parts.engine_against(of_b, OTHER_PROMPT) > 0.1  # not before the publish
        report = await parts.publisher.publish(5)
        assert report.metrics["publish/logprob_max_difference"].value < 1e-4
        assert await parts.engine_against(of_b, OTHER_PROMPT) < 1e-4
        assert await parts.engine.weight_version() == 5


@pytest.mark.parametrize("broken", [EXPERT_LEFT_OUT, GATE_UP_SWAPPED])
async def test_one_wrong_expert_in_the_first_publish_is_named_and_the_engine_stays_paused(
    live_server: LiveServer, other_model: Path, broken: int
) -> None:
    async with running(live_server, other_model) as parts:
        await parts.set_weights(broken)
        with pytest.raises(
            RuntimeError, match=r"other than they were loaded from disk: model\.layers\.1\.mlp\.experts\.w"
        ):
            await parts.publisher.first_publish()
        assert not parts.publisher.engines_are_known


@pytest.mark.parametrize("broken", [EXPERT_LEFT_OUT, GATE_UP_SWAPPED])
async def test_one_wrong_expert_in_a_later_publish_is_seen_by_the_log_probs(
    live_server: LiveServer, other_model: Path, broken: int
) -> None:
    async with running(live_server, other_model) as parts:
        await parts.set_weights(OTHER)
        await parts.publisher.publish(1, full=True)
        await parts.set_weights(broken)
        with pytest.raises(RuntimeError, match="differ on the fixed prompt"):
            await parts.publisher.publish(2)


async def test_a_sender_that_fails_in_the_middle_is_survived_by_a_real_engine_and_repaired_by_a_full_publish(
    live_server: LiveServer, other_model: Path
) -> None:
    of_b = hf_logprobs(other_model, OTHER_PROMPT)
    async with running(live_server, other_model) as parts:
        await parts.set_weights(SENDER_FAILS_ONCE)
        report = await parts.publisher.publish(3)
        assert (report.num_attempts, report.full) == (2, True)
        assert await parts.engine_against(of_b, OTHER_PROMPT) < 1e-4
