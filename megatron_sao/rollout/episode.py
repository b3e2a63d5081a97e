"""How one prompt becomes trajectories: token-in token-out over one or many turns.

The next request's input ids are the previous ones, the ids that the engine returned, and the observation's ids; no
sampled token is ever made from text. A matched stop token is an action token. A trajectory ends with an action.

Axis letters: T all tokens of a trajectory.
"""

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from megatron_sao.rollout.engine import Engine, GenerateRequest, Generation
from megatron_sao.rollout.render import Renderer
from megatron_sao.types import Message, Prompt, StopReason, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    max_episode_tokens: int  # prompt, actions and observations of one trajectory
    max_turn_tokens: int
    max_turns: int
    wants_routed: bool = True  # see GenerateRequest


class EpisodeError(RuntimeError):
    """An episode broke for a reason that is not the model's doing: it is dropped and counted, never scored 0."""


class Episode(Protocol):
    async def run(self, prompt: Prompt, engine: Engine, limits: Limits) -> tuple[Trajectory, ...]:
        """Run the prompt to its end: one trajectory per segment, without rewards.

        Raises:
            EngineError, EpisodeError: broken by infrastructure, or the prompt leaves no room in `max_episode_tokens`.
        """
        ...


class Tool(Protocol):
    """Something the model may call. Its own failures are infrastructure; what the model got wrong is an answer."""

    name: str

    def parse(self, text: str) -> str | None:
        """The argument, when this turn's text calls the tool, else None."""
        ...

    async def run(self, argument: str) -> str:
        """The observation's text."""
        ...


class ToolEpisode:
    """Turns until the model writes one without a tool call, or a limit is reached.

    The first tool that can parse a turn's text is run; its answer is the next observation, as a message of role `tool`.
    A turn that is cut off by its token limit is the last one.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Tool],
        *,
        tool_timeout_s: float = 60.0,
        append_only: bool = False,
    ) -> None:
        self._renderer = Renderer(tokenizer, append_only=append_only)
        self._tools = tuple(tools)
        self._tool_timeout_s = tool_timeout_s

    async def run(self, prompt: Prompt, engine: Engine, limits: Limits) -> tuple[Trajectory, ...]:
        tape = _Tape(prompt=prompt, prompt_ids=self._renderer.prompt_ids(prompt.messages), limits=limits)
        stop_token_ids = self._renderer.stop_token_ids
        while True:
            generation = await _sample(engine, tape.request(stop_token_ids))
            text = self._renderer.text_of(generation.output_ids)
            tape.act(generation, text)
            if generation.finish == "length":
                return (tape.trajectory(StopReason.LENGTH),)
            call = self._call_in(text)
            if call is None:
                return (tape.trajectory(StopReason.STOP),)
            if tape.num_turns == limits.max_turns:
                return (tape.trajectory(StopReason.TURN_LIMIT),)
            message = Message(role="tool", content=await self._observe(prompt, *call))
            observation = self._renderer.observation_ids((message,))
            if not tape.has_room_after(observation):
                return (tape.trajectory(StopReason.LENGTH),)
            tape.observe(observation)

    def _call_in(self, text: str) -> tuple[Tool, str] | None:
        calls = ((tool, tool.parse(text)) for tool in self._tools)
        return next(((tool, argument) for tool, argument in calls if argument is not None), None)

    async def _observe(self, prompt: Prompt, tool: Tool, argument: str) -> str:
        try:
            async with asyncio.timeout(self._tool_timeout_s):
                return await tool.run(argument)
        except TimeoutError as error:
            problem = f"no answer within {self._tool_timeout_s:g} s"
            raise EpisodeError(f"prompt {prompt.id!r}, tool {tool.name}({argument!r}): {problem}") from error
        except Exception as error:  # noqa: BLE001 - a border: a broken tool is a dropped and counted episode
            problem = f"raised {type(error).__name__}: {error}"
            raise EpisodeError(f"prompt {prompt.id!r}, tool {tool.name}({argument!r}): {problem}") from error


class SingleTurnEpisode(ToolEpisode):
    """One prompt, one answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, append_only: bool = False) -> None:
        super().__init__(tokenizer, (), append_only=append_only)


async def _sample(engine: Engine, request: GenerateRequest) -> Generation:
    generation = await engine.generate(request)
    if generation.finish == "abort":
        raise EpisodeError(f"engine {generation.engine} aborted request {request.rid}")
    return generation


@dataclass(kw_only=True, slots=True)
class _Tape:
    """The tokens of one trajectory while it grows. Only ever appended to."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    limits: Limits
    started_s: float = field(default_factory=time.time)
    token_ids: list[int] = field(init=False)  # [T]
    is_action: list[bool] = field(init=False)  # [T]
    logprobs: list[float] = field(init=False)  # [T]
    versions: list[int] = field(init=False)  # [T]
    turns: list[tuple[int, int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    routed_experts: list[NDArray[np.unsignedinteger]] = field(default_factory=list)  # of each turn, where recorded
    engine: str = ""

    def __post_init__(self) -> None:
        if len(self.prompt_ids) >= self.limits.max_episode_tokens:
            raise EpisodeError(
                f"prompt {self.prompt.id!r} has {len(self.prompt_ids)} tokens, which leaves no room for an action in "
                f"max_episode_tokens = {self.limits.max_episode_tokens}: raise it, or leave the prompt out"
            )
        self.token_ids, self.is_action, self.logprobs, self.versions = [], [], [], []
        self.observe(self.prompt_ids)

    @property
    def num_turns(self) -> int:
        return len(self.turns)

    def request(self, stop_token_ids: tuple[int, ...]) -> GenerateRequest:
        """Ask for the next turn, within the turn's limit and what is left of the whole episode's budget."""
        left = self.limits.max_episode_tokens - len(self.token_ids)
        return GenerateRequest(
            rid=uuid.uuid4().hex,
            input_ids=tuple(self.token_ids),
            max_new_tokens=min(self.limits.max_turn_tokens, left),
            stop_token_ids=stop_token_ids,
            wants_routed=self.limits.wants_routed,
            num_routed=sum(map(len, self.routed_experts)),
        )

    def has_room_after(self, ids: Sequence[int]) -> bool:
        return len(self.token_ids) + len(ids) < self.limits.max_episode_tokens

    def observe(self, ids: Sequence[int]) -> None:
        self._extend(ids, is_action=False, logprobs=[0.0] * len(ids), versions=[-1] * len(ids))

    def act(self, generation: Generation, text: str) -> None:
        start = len(self.token_ids)
        self._extend(generation.output_ids, is_action=True, logprobs=generation.logprobs, versions=generation.versions)
        self.turns.append((start, len(self.token_ids)))
        self.texts.append(text)
        if generation.routed_experts is not None:
            self.routed_experts.append(generation.routed_experts)
        self.engine = generation.engine

    def trajectory(self, stop_reason: StopReason) -> Trajectory:
        return Trajectory(
            id=uuid.uuid4().hex,
            episode_id=uuid.uuid4().hex,
            prompt_id=self.prompt.id,
            position=self.prompt.position,
            token_ids=np.asarray(self.token_ids, dtype=np.int32),
            is_action=np.asarray(self.is_action, dtype=bool),
            rollout_logprobs=np.asarray(self.logprobs, dtype=np.float32),
            version=np.asarray(self.versions, dtype=np.int32),
            reward=np.zeros(len(self.token_ids), dtype=np.float32),
            turns=tuple(self.turns),
            texts=tuple(self.texts),
            stop_reason=stop_reason,
            engine=self.engine,
            started_s=self.started_s,
            finished_s=time.time(),
            routed_experts=np.concatenate(self.routed_experts) if self.routed_experts else None,
        )

    def _extend(
        self, ids: Sequence[int], *, is_action: bool, logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        self.token_ids.extend(ids)
        self.is_action.extend([is_action] * len(ids))
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)
