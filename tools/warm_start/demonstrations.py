"""Demonstrations of mixed quality: half use the calculator well, the rest fail in ways that practice can repair."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_sao.rollout.environments.chain_sum import calculate
from megatron_sao.rollout.render import Renderer
from megatron_sao.types import Message, Prompt

SHARES: Mapping[str, float] = {
    "call and copy": 0.50,
    "answer without the tool": 0.30,  # and wrongly
    "call and misread": 0.12,  # one digit of the observation changes
    "call with a term left out": 0.08,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """One conversation as the tool episode would lay it out; the last token is an action."""

    kind: str
    token_ids: tuple[int, ...]  # [T]
    is_action: tuple[bool, ...]  # [T]


def demonstrations(
    prompts: Sequence[Prompt], renderer: Renderer, rng: random.Random, shares: Mapping[str, float] = SHARES
) -> Iterator[Demonstration]:
    """One demonstration per prompt, of a kind drawn by `shares`."""
    kinds = rng.choices(list(shares), weights=list(shares.values()), k=len(prompts))
    for prompt, kind in zip(prompts, kinds, strict=True):
        yield _demonstration(prompt, kind, renderer, rng)


def _demonstration(prompt: Prompt, kind: str, renderer: Renderer, rng: random.Random) -> Demonstration:
    expression = prompt.messages[-1].content.removesuffix(" =")
    answer = str(calculate(expression))
    if kind == "answer without the tool":
        turns = [changed(answer, rng)]
    elif kind == "call with a term left out":
        shorter = expression.rsplit(" ", 2)[0]
        turns = [f"calc({shorter})", str(calculate(shorter)), str(calculate(shorter))]
    else:
        final = changed(answer, rng) if kind == "call and misread" else answer
        turns = [f"calc({expression})", answer, final]
    return _lay_out(prompt, kind, turns, renderer)


def changed(number: str, rng: random.Random) -> str:
    """The number with one of its digits replaced by another."""
    place = rng.choice([i for i, char in enumerate(number) if char.isdigit()])
    digit = rng.choice([d for d in "0123456789" if d != number[place]])
    return number[:place] + digit + number[place + 1 :]


def _lay_out(prompt: Prompt, kind: str, turns: Sequence[str], renderer: Renderer) -> Demonstration:
    """`turns` alternate: the model's, the tool's, the model's."""
    token_ids = list(renderer.prompt_ids(prompt.messages))
    is_action = [False] * len(token_ids)
    for index, text in enumerate(turns):
        if index % 2:
            ids = renderer.observation_ids([Message(role="tool", content=text)])
        else:
            ids = (*renderer.plain_ids(text), renderer.stop_token_ids[0])
        token_ids.extend(ids)
        is_action.extend([index % 2 == 0] * len(ids))
    return Demonstration(kind=kind, token_ids=tuple(token_ids), is_action=tuple(is_action))
