"""An engine whose work is seen in the trace: a row that says when it generates and when it is paused."""

from contextlib import ExitStack

from megatron_sao.rollout.engine import Engine, GenerateRequest, Generation, PauseMode
from megatron_sao.trace import Trace


class TracedEngine:
    """The engine, with spans "generating" while a request is in flight and "paused" from a pause to its resume.

    There are millions of requests, so none has a span of its own. All other calls are the engine's own.
    """

    def __init__(self, engine: Engine, trace: Trace) -> None:
        self._engine, self._trace = engine, trace
        self._num_running, self._paused = 0, False
        self._state, self._span = "", ExitStack()
        self.name = engine.name
        self.score, self.abort, self.flush = engine.score, engine.abort, engine.flush
        self.begin_update, self.end_update = engine.begin_update, engine.end_update
        self.join_group, self.leave_group, self.load_bucket = engine.join_group, engine.leave_group, engine.load_bucket
        self.checksum, self.reset_tensors = engine.checksum, engine.reset_tensors
        self.weight_version, self.close = engine.weight_version, engine.close

    async def generate(self, request: GenerateRequest) -> Generation:
        self._now(num_running=self._num_running + 1, paused=self._paused)
        try:
            return await self._engine.generate(request)
        finally:
            self._now(num_running=self._num_running - 1, paused=self._paused)

    async def pause(self, mode: PauseMode = "retract") -> None:
        self._now(num_running=self._num_running, paused=True)
        await self._engine.pause(mode)

    async def resume(self) -> None:
        await self._engine.resume()
        self._now(num_running=self._num_running, paused=False)

    def _now(self, *, num_running: int, paused: bool) -> None:
        self._num_running, self._paused = num_running, paused
        state = "paused" if paused else "generating" if num_running else ""
        if state != self._state:
            self._span.close()
            self._state = state
            if state:
                self._span.enter_context(self._trace.span(self.name, state))
