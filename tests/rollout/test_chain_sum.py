"""The splits share no question, the calculator knows sums and nothing else, and reasoning_gym's score decides."""

import pytest

from megatron_sao.rollout.engine import GenerateRequest
from megatron_sao.rollout.environments import chain_sum
from megatron_sao.rollout.episode import Limits
from megatron_sao.rollout.render import Renderer
from tests.support.scripted_turns import ScriptedTurns, generation
from tools.warm_start.model import build_tokenizer

TOKENIZER = build_tokenizer()
RENDERER = Renderer(TOKENIZER)
LIMITS = Limits(max_episode_tokens=96, max_turn_tokens=32, max_turns=2)


def questions(split: chain_sum.Split, size: int, seed: int) -> set[str]:
    return {prompt.messages[0].content for prompt in chain_sum.prompts(split, size, seed=seed)}


@pytest.mark.parametrize("seed", [0, 1])
def test_no_question_is_in_two_splits_or_twice_in_one_even_with_equal_seeds(seed: int) -> None:
    sizes = {"demonstrations": 3000, "train": 3000, "evaluation": 600}
    found = {split: questions(split, size, seed) for split, size in sizes.items()}  # type: ignore[arg-type]
    assert {split: len(texts) for split, texts in found.items()} == sizes
    assert len(set().union(*found.values())) == sum(sizes.values())


def test_the_same_arguments_give_the_same_prompts() -> None:
    assert chain_sum.prompts("train", 50, seed=3) == chain_sum.prompts("train", 50, seed=3)


def test_a_split_too_small_for_its_size_is_an_error_that_says_how_many_there_are() -> None:
    with pytest.raises(ValueError, match=r"split 'evaluation': \d+ distinct questions in .* draws, 500 wanted"):
        chain_sum.prompts("evaluation", 500, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    with pytest.raises(ValueError, match="unknown split 'test'; known: demonstrations, train, evaluation"):
        chain_sum.prompts("test", 5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "value"),
    [("2 + 3", 5), ("37 + 12 - 85", -36), ("10-20-30", -40), ("-4+ 1", -3), (" 7 ", 7), ("007 + 1", 8)],
)
def test_the_calculator_adds_and_subtracts(text: str, value: int) -> None:
    assert chain_sum.calculate(text) == value


@pytest.mark.parametrize("text", ["", "2 +", "2 * 3", "2 ** 9", "1.5", "__import__('os')", "+", "2 3", "²", "1" * 201])
def test_the_calculator_reads_nothing_else(text: str) -> None:
    with pytest.raises(ValueError, match="not a sum of integers"):
        chain_sum.calculate(text)


@pytest.mark.parametrize("digits", ["1 + 1" + " + 1" * 48])
def test_the_calculator_reads_long_sums(digits: str) -> None:
    assert chain_sum.calculate(digits) == 50


@pytest.mark.parametrize(
    ("text", "argument"), [("calc(1 + 2)", "1 + 2"), ("calc()", ""), ("3", None), ("calc(1", None), ("I calc(1)", None)]
)
def test_a_call_is_a_turn_that_is_nothing_but_a_call(text: str, argument: str | None) -> None:
    assert chain_sum.Calculator().parse(text) == argument


def told(request: GenerateRequest) -> str:
    """What stands between the last tool token and the end of its message."""
    return TOKENIZER.decode(list(request.input_ids)).rpartition("<|tool|>")[2].removesuffix("<|end|><|assistant|>")


async def play(*texts: str):
    """The first evaluation prompt's episode with these turns; "{}" stands for its expression."""
    (prompt,) = chain_sum.prompts("evaluation", 1, seed=5)
    expression = prompt.messages[0].content.removesuffix(" =")
    script = [generation(*RENDERER.plain_ids(t.format(expression)), TOKENIZER.eos_token_id) for t in texts]
    engine = ScriptedTurns(script)
    trajectories = await chain_sum.episode(TOKENIZER).run(prompt, engine, LIMITS)
    return prompt, engine, await chain_sum.reward(prompt, trajectories)


async def test_the_calculators_answer_is_the_observation_and_copying_it_earns_the_reward() -> None:
    prompt, _, _ = await play("1")
    answer = prompt.data["entry"]["answer"]
    _, engine, reward = await play("calc({})", answer)
    assert told(engine.requests[1]) == answer
    assert (reward.value, reward.metrics["tool_use"]) == (1.0, 1.0)


@pytest.mark.parametrize("texts", [("1000",), ("calc({})", "1000"), ("calc({})", "calc({})"), ("",)])
async def test_anything_but_the_answer_earns_nothing(texts: tuple[str, ...]) -> None:
    _, _, reward = await play(*texts)
    assert reward.value == 0.0


async def test_an_answer_that_only_contains_the_right_number_earns_nothing() -> None:
    prompt, _, _ = await play("1")
    answer = prompt.data["entry"]["answer"]
    _, _, reward = await play(f"{answer} or so")  # reasoning_gym gives this a part of the score
    assert reward.value == 0.0


async def test_what_the_calculator_cannot_read_is_answered_with_an_error_text() -> None:
    _, engine, reward = await play("calc(2 * 3)", "6")
    assert (told(engine.requests[1]), reward.value) == ("error", 0.0)
