"""A reward function is somebody else's code: whatever it does wrong is an error that names it and the prompt."""

import asyncio
import dataclasses

import pytest

from megatron_sao.rollout.reward import RewardError, call_reward, load_object
from megatron_sao.types import Message, Prompt, Reward

PROMPT = Prompt(id="sum/7", position=0, messages=(Message(role="user", content="x"),))


@dataclasses.dataclass
class Answers:
    """A reward function with a fixed answer (an exception is raised)."""

    answer: object

    async def __call__(self, prompt, trajectories):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def call(reward, *, reward_range=(0.0, 1.0)):
    return await call_reward(reward, PROMPT, (), reward_range=reward_range, timeout_s=0.05)


@pytest.mark.parametrize("value", [0.0, 0.5, 1, 1.0])
async def test_a_value_in_range_ends_included_is_a_reward(value: float) -> None:
    assert (await call(Answers(Reward(value=value)))).value == value


def broken_at_birth(value: object) -> Reward:
    """A Reward that got around its own check."""
    reward = Reward(value=0.0)
    object.__setattr__(reward, "value", value)
    return reward


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (broken_at_birth(float("nan")), "value nan is outside"),
        (Reward(value=1.5), r"value 1.5 is outside reward_range \[0, 1\]"),
        (Reward(value=-1), "value -1 is outside"),
        (0.5, r"answered 0.5 \(float\), not a Reward"),
        (None, r"answered None \(NoneType\)"),
        (ZeroDivisionError("by zero"), "raised ZeroDivisionError: by zero"),
        (TimeoutError(), "raised TimeoutError"),
        (Reward(value=1, metrics={"speed": float("inf")}), "metric 'speed' is inf"),
        (Reward(value=1, metrics={"speed": "fast"}), "metric 'speed' is 'fast'"),  # type: ignore[dict-item]
    ],
)
async def test_what_is_no_reward_is_an_error_that_says_whose(answer: object, problem: str) -> None:
    with pytest.raises(
        RewardError, match=rf"reward function tests.rollout.test_reward:Answers, prompt 'sum/7': .*{problem}"
    ):
        await call(Answers(answer))


async def not_a_number(prompt, trajectories):
    return Reward(value=float("nan"))


async def hangs(prompt, trajectories):
    await asyncio.sleep(9)


async def test_nan_is_refused_where_the_reward_is_made() -> None:
    with pytest.raises(RewardError, match="not_a_number.*sum/7.*finite"):
        await call(not_a_number)


async def test_a_reward_that_hangs_is_given_up() -> None:
    with pytest.raises(RewardError, match="test_reward:hangs, prompt 'sum/7': no answer within 0.05 s"):
        await call(hangs)


def not_async(prompt, trajectories):
    return Reward(value=1.0)


async def test_a_reward_that_is_not_async_is_an_error() -> None:
    with pytest.raises(RewardError, match="not_async.*raised TypeError"):
        await call(not_async)


async def test_being_cancelled_is_not_the_rewards_failure() -> None:
    task = asyncio.create_task(call_reward(hangs, PROMPT, (), reward_range=(0, 1), timeout_s=9))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_an_import_path_names_an_object_or_is_an_error() -> None:
    assert load_object("tests.rollout.test_reward:hangs").__name__ == "hangs"
    with pytest.raises(ValueError, match="there is no module 'tests.nowhere'"):
        load_object("tests.nowhere:hangs")
    with pytest.raises(ValueError, match="module 'tests.rollout.test_reward' has no 'nothing'"):
        load_object("tests.rollout.test_reward:nothing")
