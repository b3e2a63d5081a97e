"""Calls a reward function that somebody else wrote, and trusts nothing that it answers."""

import asyncio
import importlib
import math
from collections.abc import Awaitable, Callable
from numbers import Real
from typing import Any

from megatron_sao.types import Prompt, Reward, Trajectory

RewardFunction = Callable[[Prompt, tuple[Trajectory, ...]], Awaitable[Reward]]


class RewardError(RuntimeError):
    """A reward function did not answer with a usable reward. The episode is dropped and counted, never scored 0."""

    def __init__(self, reward: RewardFunction, prompt: Prompt, problem: str) -> None:
        self.reward_name, self.prompt_id = name_of(reward), prompt.id
        super().__init__(f"reward function {self.reward_name}, prompt {prompt.id!r}: {problem}")


def load_object(import_path: str) -> Any:
    """The object that `package.module:name` names.

    Raises:
        ValueError: no such module, or it has no such name.
    """
    module_name, _, name = import_path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"import path {import_path!r}: there is no module {error.name!r}") from error
    if not hasattr(module, name):
        raise ValueError(f"import path {import_path!r}: module {module_name!r} has no {name!r}")
    return getattr(module, name)


def name_of(reward: RewardFunction) -> str:
    module = getattr(reward, "__module__", type(reward).__module__)
    return f"{module}:{getattr(reward, '__qualname__', type(reward).__qualname__)}"


async def call_reward(
    reward: RewardFunction,
    prompt: Prompt,
    trajectories: tuple[Trajectory, ...],
    *,
    reward_range: tuple[float, float],
    timeout_s: float,
) -> Reward:
    """The reward of one episode.

    Raises:
        RewardError: it raised, took longer than `timeout_s`, or answered with something else than a Reward whose
            value and metrics are finite and whose value lies in `reward_range` (ends included).
    """
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            answer = await reward(prompt, trajectories)
    except TimeoutError as error:
        problem = f"no answer within {timeout_s:g} s" if deadline.expired() else "raised TimeoutError"
        raise RewardError(reward, prompt, problem) from error
    except Exception as error:  # noqa: BLE001 - a border: whatever it raises becomes a counted RewardError
        raise RewardError(reward, prompt, f"raised {type(error).__name__}: {error}") from error
    _check(answer, reward, prompt, reward_range)
    return answer


def _check(answer: object, reward: RewardFunction, prompt: Prompt, reward_range: tuple[float, float]) -> None:
    if not isinstance(answer, Reward):
        raise RewardError(reward, prompt, f"answered {answer!r} ({type(answer).__name__}), not a Reward")
    low, high = reward_range
    if not low <= answer.value <= high:
        raise RewardError(reward, prompt, f"the value {answer.value!r} is outside reward_range [{low:g}, {high:g}]")
    for key, value in answer.metrics.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise RewardError(reward, prompt, f"the metric {key!r} is {value!r}, not a finite number")
