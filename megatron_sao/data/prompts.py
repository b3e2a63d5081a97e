"""The order in which prompts are admitted: every prompt once per epoch, shuffled anew, resumable from two numbers."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_sao.types import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptStreamState:
    """All that a stream over the same source needs to go on."""

    seed: int
    position: int  # of the next prompt
    source_size: int


class PromptStream:
    """An endless stream over a finite source. The k-th prompt depends on the source, the seed and k alone.

    Raises:
        ValueError: the source is empty, smaller than `min_size` (the slots), or repeats an id.
    """

    def __init__(self, source: Sequence[Prompt], *, seed: int, min_size: int = 1) -> None:
        if len(source) < max(1, min_size):
            raise ValueError(
                f"the prompt source has {len(source)} prompts, at least {max(1, min_size)} are needed (one per slot): "
                "give more prompts, or lower trajectories_per_step or max_lag"
            )
        if len({prompt.id for prompt in source}) != len(source):
            raise ValueError("the prompt source repeats a prompt id: ids must tell prompts apart")
        self._source = source
        self._seed = seed
        self._position = 0
        self._epoch = -1
        self._order: Sequence[int] = ()

    def next(self) -> Prompt:
        """The next prompt, with its place in the stream as `position`."""
        epoch, place = divmod(self._position, len(self._source))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self._source)).tolist()
        prompt = dataclasses.replace(self._source[self._order[place]], position=self._position)
        self._position += 1
        return prompt

    def state(self) -> PromptStreamState:
        return PromptStreamState(seed=self._seed, position=self._position, source_size=len(self._source))

    def restore(self, state: PromptStreamState) -> None:
        """Go on where `state` was taken.

        Raises:
            ValueError: the state is of a source of another size or of another seed.
        """
        if (state.seed, state.source_size) != (self._seed, len(self._source)):
            raise ValueError(
                f"the prompt stream was saved with seed {state.seed} over {state.source_size} prompts, this one has "
                f"seed {self._seed} over {len(self._source)}: go on with the same source and seed"
            )
        self._position = state.position
