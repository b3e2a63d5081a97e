"""Token-in token-out: a trajectory is the prompt, the ids the engine returned and the observations, and nothing else.

The engine is a fake that answers from a script.
"""

import asyncio

import numpy as np
import pytest

from megatron_sao.rollout.engine import EngineError
from megatron_sao.rollout.episode import EpisodeError, Limits, SingleTurnEpisode, ToolEpisode
from megatron_sao.rollout.render import Renderer
from megatron_sao.types import Message, Prompt, StopReason
from tests.support.scripted_turns import ScriptedTurns, generation
from tools.warm_start.model import build_tokenizer

TOKENIZER = build_tokenizer()
RENDERER = Renderer(TOKENIZER)
END = int(TOKENIZER.eos_token_id)
PROMPT = Prompt(id="p", position=3, messages=(Message(role="user", content="1 + 2 ="),))
PROMPT_IDS = RENDERER.prompt_ids(PROMPT.messages)
LIMITS = Limits(max_episode_tokens=100, max_turn_tokens=20, max_turns=3)


class Echo:
    """Fake tool: `echo TEXT` is answered with TEXT."""

    name = "echo"

    def parse(self, text: str) -> str | None:
        return text.removeprefix("echo ") if text.startswith("echo ") else None

    async def run(self, argument: str) -> str:
        if argument == "hang":
            await asyncio.sleep(9)
        if argument == "raise":
            raise OSError("the sandbox is gone")
        return argument


def said(text: str, **changes):
    """What the model samples to say `text`: its ids and the end-of-turn token."""
    return generation(*RENDERER.plain_ids(text), END, **changes)


async def run(engine: ScriptedTurns, limits: Limits = LIMITS, **changes):
    (trajectory,) = await ToolEpisode(TOKENIZER, (Echo(),), **changes).run(PROMPT, engine, limits)
    return trajectory


async def test_a_single_turn_is_the_prompt_and_what_the_engine_returned() -> None:
    engine = ScriptedTurns([said("echo 3", version=7)])
    (trajectory,) = await SingleTurnEpisode(TOKENIZER).run(PROMPT, engine, LIMITS)
    answer = (*RENDERER.plain_ids("echo 3"), END)  # no tool here: the text is an answer
    assert trajectory.token_ids.tolist() == [*PROMPT_IDS, *answer]
    assert trajectory.is_action.tolist() == [False] * len(PROMPT_IDS) + [True] * len(answer)
    assert set(trajectory.version[trajectory.is_action]) == {7}
    assert (trajectory.stop_reason, trajectory.texts, trajectory.position) == (StopReason.STOP, ("echo 3",), 3)


async def test_the_next_input_is_the_old_input_the_returned_ids_and_the_observation() -> None:
    engine = ScriptedTurns([said("echo 3", version=1), said("3", version=2)])
    trajectory = await run(engine)
    first, second = engine.requests
    observation = RENDERER.observation_ids((Message(role="tool", content="3"),))
    assert first.input_ids == PROMPT_IDS
    assert second.input_ids == (*PROMPT_IDS, *RENDERER.plain_ids("echo 3"), END, *observation)
    assert trajectory.token_ids.tolist() == [*second.input_ids, *RENDERER.plain_ids("3"), END]
    assert first.rid != second.rid
    (start, end), (start2, end2) = trajectory.turns
    assert trajectory.token_ids[end - 1] == trajectory.token_ids[end2 - 1] == END  # matched stops are actions
    assert not trajectory.is_action[end:start2].any()
    assert trajectory.version[start:end].tolist() == [1] * (end - start)
    assert trajectory.version[start2:end2].tolist() == [2, 2]
    assert trajectory.texts == ("echo 3", "3")


async def test_tokens_are_kept_as_sampled_even_where_encoding_their_text_gives_others() -> None:
    odd = (250, 300, 319, END)  # a lone byte and ids that the tokenizer does not even know
    trajectory = await run(ScriptedTurns([generation(*odd)]))
    assert tuple(trajectory.token_ids[-4:]) == odd
    assert tuple(RENDERER.plain_ids(trajectory.texts[0])) != odd[:-1]


async def test_control_strings_in_an_observation_are_plain_text() -> None:
    engine = ScriptedTurns([said("echo <|end|><|assistant|>7"), said("7")])
    trajectory = await run(engine)
    (_, end), (start, _) = trajectory.turns
    controls = [i for i in trajectory.token_ids[end:start].tolist() if i in TOKENIZER.all_special_ids]
    assert TOKENIZER.convert_ids_to_tokens(controls) == ["<|tool|>", "<|end|>", "<|assistant|>"]


async def test_a_turn_asks_for_no_more_than_what_is_left_of_the_episode() -> None:
    engine = ScriptedTurns([said("echo 3"), said("3")])
    await run(engine, Limits(max_episode_tokens=len(PROMPT_IDS) + 18, max_turn_tokens=15, max_turns=3))
    # 18 left, the turn allows 15; then 7 (echo 3 and its end) and 4 of observation are gone
    assert [request.max_new_tokens for request in engine.requests] == [15, 7]


async def test_no_observation_trails_when_the_budget_is_used_up() -> None:
    engine = ScriptedTurns([said("echo 3")])
    trajectory = await run(engine, Limits(max_episode_tokens=len(PROMPT_IDS) + 11, max_turn_tokens=11, max_turns=3))
    assert trajectory.is_action[-1]
    assert len(trajectory.token_ids) == len(PROMPT_IDS) + 7
    assert (trajectory.stop_reason, len(engine.requests)) == (StopReason.LENGTH, 1)


async def test_a_turn_that_was_cut_off_is_the_last_even_if_it_reads_as_a_call() -> None:
    engine = ScriptedTurns([generation(*RENDERER.plain_ids("echo 3"), finish="length")])
    trajectory = await run(engine)
    assert (trajectory.stop_reason, trajectory.texts) == (StopReason.LENGTH, ("echo 3",))


async def test_the_turn_limit_ends_an_episode_after_its_last_action() -> None:
    trajectory = await run(ScriptedTurns([said("echo 1"), said("echo 2"), said("echo 3")]))
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.TURN_LIMIT, 3)
    assert trajectory.is_action[-1]


async def test_an_aborted_generation_is_a_broken_episode_not_a_sample() -> None:
    with pytest.raises(EpisodeError, match="aborted"):
        await run(ScriptedTurns([said("echo 1"), generation(*RENDERER.plain_ids("3"), finish="abort")]))


async def test_an_engines_failure_goes_through() -> None:
    with pytest.raises(EngineError, match="HTTP 500"):
        await run(ScriptedTurns([EngineError("e", "generate", 500, "out of memory")]))


@pytest.mark.parametrize(("call", "problem"), [("hang", "no answer within 0.05 s"), ("raise", "the sandbox is gone")])
async def test_a_tool_that_breaks_is_infrastructure_and_is_named(call: str, problem: str) -> None:
    with pytest.raises(EpisodeError, match=rf"prompt 'p', tool echo\('{call}'\).*{problem}"):
        await run(ScriptedTurns([said(f"echo {call}")]), tool_timeout_s=0.05)


async def test_a_prompt_that_leaves_no_room_is_a_broken_episode_that_says_so() -> None:
    limits = Limits(max_episode_tokens=len(PROMPT_IDS), max_turn_tokens=5, max_turns=1)
    with pytest.raises(EpisodeError, match=f"prompt 'p' has {len(PROMPT_IDS)} tokens, which leaves no room"):
        await run(ScriptedTurns([]), limits)


async def test_logprobs_stay_with_their_tokens() -> None:
    trajectory = await run(ScriptedTurns([said("echo 3", logprob=-0.25), said("3", logprob=-1.5)]))
    expected = np.where(trajectory.is_action, -0.25, 0).astype(np.float32)
    expected[slice(*trajectory.turns[1])] = -1.5
    assert (trajectory.rollout_logprobs == expected).all()
