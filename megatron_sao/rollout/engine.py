"""What the rest of the system may ask of an inference engine: records, the error, and the protocol.

`rollout.sglang_client.SGLangEngine` speaks it over HTTP; tests have a fake server of the same contract.
Axis letters: P prompt tokens, G generated tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_sao.types import HEX_ID, Bucket, WeightVersion

PauseMode = Literal["retract", "in_place", "abort"]
"""retract: running requests give up their KV and are recomputed after the resume; in_place: they keep it;
abort: they end at once with what they have. New requests wait in every mode."""

Finish = Literal["stop", "length", "abort"]


class EngineError(RuntimeError):
    """An engine did not do what it was asked. Never a sample: whoever asked drops the episode and counts it.

    `status` is the HTTP status, or None when there was no answer (refused, disconnected, deadline) or the answer was
    not what the contract says.
    """

    def __init__(self, engine: str, call: str, status: int | None, message: str) -> None:
        self.engine, self.call, self.status, self.message = engine, call, status, message
        answered = "no valid answer" if status is None else f"HTTP {status}"
        super().__init__(f"engine {engine}, {call}: {answered}: {message}")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One turn to be sampled at temperature 1 from the model's own distribution.

    >>> GenerateRequest(rid=uuid.uuid4().hex, input_ids=(1, 72, 69), max_new_tokens=64, stop_token_ids=(2,))
    """

    rid: str  # 32 hex digits: SGLang aborts by prefix, so that none may be the prefix of another
    input_ids: tuple[int, ...]  # [P]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()  # these end the turn (and stay in the output); nothing else does
    wants_routed: bool = True  # the routed experts, of an engine that records them
    num_routed: int = 0  # the first tokens whose routed experts are known from earlier turns; at most P

    def __post_init__(self) -> None:
        if not HEX_ID.fullmatch(self.rid):
            raise ValueError(f"a request id must be 32 hex digits (SGLang aborts by prefix), not {self.rid!r}")
        if not self.input_ids:
            raise ValueError(f"request {self.rid} has no input ids: give at least one")
        if self.max_new_tokens < 1:
            raise ValueError(f"request {self.rid}: max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if not 0 <= self.num_routed <= len(self.input_ids):
            raise ValueError(f"request {self.rid}: num_routed = {self.num_routed} of {len(self.input_ids)} input ids")


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """What the engine sampled, token by token. Partial (maybe empty) when `finish` is "abort".

    Raises:
        ValueError: at birth, when log-probs or versions do not belong to the tokens one to one, a log-prob is not
            finite or above 0, a version is negative, or a turn that was not aborted has no token.
    """

    output_ids: tuple[int, ...]  # [G] with the matched stop token
    logprobs: tuple[float, ...]  # [G] natural log, of the distribution that the token was sampled from
    versions: tuple[WeightVersion, ...]  # [G] weights of the forward pass that sampled the token
    finish: Finish
    matched_stop: int | None = None  # the stop token that ended the turn
    cached_tokens: int = 0  # prompt tokens whose KV was not computed anew
    routed_experts: NDArray[np.unsignedinteger] | None = None
    # [P+G-1-num_routed, layers, top_k] from an engine that records them; the dtype's largest value where it did not
    engine: str

    def __post_init__(self) -> None:
        num_tokens = len(self.output_ids)
        if len(self.logprobs) != num_tokens or len(self.versions) != num_tokens:
            raise ValueError(
                f"{num_tokens} tokens came with {len(self.logprobs)} log-probs and {len(self.versions)} versions"
            )
        if not num_tokens and self.finish != "abort":
            raise ValueError(f"no token was generated, yet the turn ended with {self.finish!r}")
        bad = [value for value in self.logprobs if not (math.isfinite(value) and value <= 0)]
        if bad:
            raise ValueError(f"log-probs that are not finite or above 0: {bad[:5]}")
        if any(version < 0 for version in self.versions):
            raise ValueError(f"a token has a negative weight version: {self.versions}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptScore:
    """Log-probs of a given sequence: entry t is that of token t+1 given tokens 0..t."""

    logprobs: tuple[float, ...]  # [P-1]
    cached_tokens: int  # 0 when every forward pass was made for this request
    version: WeightVersion


class Engine(Protocol):
    """One engine. Every call has a deadline of its own; all raise EngineError when the engine fails.

    Calls that publish weights come in the order pause, begin_update, load_bucket (the last one carries the version
    and, unless the pause is in_place, flushes), end_update, resume; join_group before, leave_group after or whenever
    something went wrong.
    """

    @property
    def name(self) -> str: ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn. Cancelling the call aborts the request on the engine.

        Raises:
            ValueError: an input id outside the vocabulary, or more tokens than the engine's limit (nothing is sent).
            EngineError: no answer, or one without a log-prob and a version for each token.
        """
        ...

    async def score(self, input_ids: Sequence[int]) -> PromptScore:
        """Log-probs of `input_ids` [P >= 2] under the served weights; nothing is sampled."""
        ...

    async def abort(self, rid: str) -> None:
        """End that request; it answers with finish "abort". Unknown ids are ignored."""
        ...

    async def pause(self, mode: PauseMode = "retract") -> None: ...

    async def resume(self) -> None: ...

    async def flush(self) -> None:
        """Empty the prefix cache. EngineError (400) while something runs; paused by retract nothing does."""
        ...

    async def begin_update(self) -> bool:
        """Open the update session. False: this engine has none (SGLang before 0.5.21) and needs none."""
        ...

    async def end_update(self) -> None:
        """Close the update session. EngineError (400) when none is open; does nothing on engines without sessions."""
        ...

    async def join_group(
        self,
        *,
        address: str,
        port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout_s: float,
    ) -> None:
        """Join the trainer's update group; returns when all of its ranks have. `backend`: "gloo" or "nccl"."""
        ...

    async def leave_group(self, group_name: str) -> None:
        """Destroy the engine's side of the group. EngineError (400) when it is not in it."""
        ...

    async def load_bucket(
        self, bucket: Bucket, *, group_name: str, version: WeightVersion | None, flush: bool, timeout_s: float
    ) -> None:
        """Receive one broadcast of the group's rank 0 and load its tensors. `version` goes with the last bucket."""
        ...

    async def checksum(self) -> Mapping[str, str]:
        """A digest per tensor, under the engine's own names. EngineError where the engine cannot."""
        ...

    async def reset_tensors(self) -> None:
        """Overwrite all weights with noise, so that a publish that leaves one out is seen."""
        ...

    async def weight_version(self) -> WeightVersion: ...

    async def close(self) -> None:
        """Close the connections; the engine runs on."""
        ...
