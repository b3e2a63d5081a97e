"""Sums and differences of integers from reasoning_gym's `chain_sum`, with a calculator the model may call.

A prompt is one user message, e.g. `37 + 12 - 85 =`. The model either answers (`-36`) or writes `calc(37 + 12 - 85)`,
gets the result as an observation and then answers. Score: reasoning_gym's own, 1.0 counts as 1 and all else as 0.

reasoning_gym draws item i with `Random(seed + i)`, so neighbouring seeds repeat items. A question therefore belongs to
a split by the hash of its text, whatever seed it was drawn with: the splits cannot share one.
"""

import functools
import hashlib
import re
from collections.abc import Mapping
from typing import Any, Literal

import reasoning_gym
from transformers import PreTrainedTokenizerBase

from megatron_sao.rollout.episode import ToolEpisode
from megatron_sao.types import Message, Prompt, Reward, Trajectory

Split = Literal["demonstrations", "train", "evaluation"]
SPLIT_SHARES: Mapping[Split, int] = {"demonstrations": 45, "train": 45, "evaluation": 10}
"""Of 100 hash buckets, in this order."""

CALL = re.compile(r"calc\(([^()]*)\)")
MAX_EXPRESSION_CHARS = 200
_EXPRESSION = re.compile(r"\s*[+-]?\s*\d+(?:\s*[+-]\s*\d+)*\s*", re.ASCII)
_TERM = re.compile(r"([+-]?)\s*(\d+)", re.ASCII)


def prompts(
    split: Split,
    size: int,
    *,
    seed: int = 0,
    min_terms: int = 2,
    max_terms: int = 3,
    min_digits: int = 2,
    max_digits: int = 2,
) -> tuple[Prompt, ...]:
    """`size` prompts of one split, no two with the same question; `data["entry"]` is reasoning_gym's item.

    Raises:
        ValueError: an unknown split, or ranges with too few distinct questions for `size`.
    """
    if split not in SPLIT_SHARES:
        raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLIT_SHARES)}")
    num_draws = 40 * size + 1000
    items = reasoning_gym.create_dataset(
        "chain_sum",
        min_terms=min_terms,
        max_terms=max_terms,
        min_digits=min_digits,
        max_digits=max_digits,
        seed=seed,
        size=num_draws,
    )
    found: dict[str, Mapping[str, Any]] = {}
    for index in range(num_draws):
        if len(found) == size:
            break
        item = items[index]
        question = item["metadata"]["expression"] + " ="
        if split_of(question) == split:
            found.setdefault(question, item)
    if len(found) < size:
        raise ValueError(
            f"split {split!r}: {len(found)} distinct questions in {num_draws} draws, {size} wanted: "
            "widen min/max_terms or min/max_digits, or ask for fewer"
        )
    return tuple(
        Prompt(
            id=f"chain_sum/{question}",
            position=position,
            messages=(Message(role="user", content=question),),
            data={"entry": item},
        )
        for position, (question, item) in enumerate(found.items())
    )


def split_of(question: str) -> Split:
    """The split that a question belongs to, by the hash of its text."""
    bucket = int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big") % 100
    for split, share in SPLIT_SHARES.items():
        if bucket < share:
            return split
        bucket -= share
    raise AssertionError("the shares of the splits sum to 100")


def calculate(expression: str) -> int:
    """The value of integers joined by + and -.

    >>> calculate("37 + 12 - 85")
    -36

    Raises:
        ValueError: anything else in it, or more than 200 characters.
    """
    if len(expression) > MAX_EXPRESSION_CHARS or not _EXPRESSION.fullmatch(expression):
        raise ValueError(f"not a sum of integers: {expression[:MAX_EXPRESSION_CHARS]!r}")
    terms = _TERM.findall(expression)
    return sum(-int(digits) if sign == "-" else int(digits) for sign, digits in terms)


class Calculator:
    """The tool `calc(37 + 12 - 85)`. What it cannot read is answered with `error`: the model's fault, not the run's."""

    name = "calc"

    def parse(self, text: str) -> str | None:
        """The argument of a call when the text is one call and nothing else, else None (a final answer)."""
        match = CALL.fullmatch(text.strip())
        return match.group(1) if match else None

    async def run(self, argument: str) -> str:
        try:
            return str(calculate(argument))
        except ValueError:
            return "error"


def episode(tokenizer: PreTrainedTokenizerBase, *, tool_timeout_s: float = 10.0) -> ToolEpisode:
    """The episode of this environment: answer, or call the calculator and then answer."""
    return ToolEpisode(tokenizer, tools=(Calculator(),), tool_timeout_s=tool_timeout_s)


async def reward(prompt: Prompt, trajectories: tuple[Trajectory, ...]) -> Reward:
    """1 when reasoning_gym gives the last turn's text the full score, else 0."""
    final = trajectories[-1]
    score = _scorer().score_answer(final.texts[-1], prompt.data["entry"])
    used_tool = float(len(final.turns) > 1)
    return Reward(value=float(score == 1.0), metrics={"tool_use": used_tool, "num_turns": float(len(final.turns))})


@functools.cache
def _scorer() -> Any:
    return reasoning_gym.create_dataset("chain_sum", seed=0, size=1)
