"""A fake engine for episode tests: it answers `generate` from a script. All else of the protocol is not there."""

import asyncio
from collections.abc import Awaitable, Callable

from megatron_sao.rollout.engine import EngineError, GenerateRequest, Generation

Answer = Generation | EngineError
Script = Callable[[GenerateRequest], Awaitable[Answer]]


def generation(*ids: int, finish: str = "stop", version: int = 0, logprob: float = -0.5) -> Generation:
    return Generation(
        output_ids=ids,
        logprobs=(logprob,) * len(ids),
        versions=(version,) * len(ids),
        finish=finish,  # type: ignore[arg-type]
        engine="scripted",
    )


class ScriptedTurns:
    """Fake. `answers`: one per request in order, or a function of the request. `requests` keeps what was asked."""

    name = "scripted"

    def __init__(self, answers: list[Answer] | Script) -> None:
        self._answers = answers
        self.requests: list[GenerateRequest] = []
        self.num_running = 0
        self.max_running = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            await asyncio.sleep(0)
            answers = self._answers
            answer = answers.pop(0) if isinstance(answers, list) else await answers(request)
        finally:
            self.num_running -= 1
        if isinstance(answer, EngineError):
            raise answer
        return answer
