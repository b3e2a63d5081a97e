"""Who of a run's processes is gone that should be there, and whether an error comes from that."""

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

from launch.processes import POLL_S, ProcessDied, Supervisor, report, tail
from launch.tasks import unless

ResultT = TypeVar("ResultT")
BLAME_S = 3.0  # after an error: for the process behind it to be seen dead


class Server(Protocol):
    """An engine's server process."""

    log_path: Path

    def alive(self) -> bool: ...


class Watch:
    """Over the ranks, and over the engine while `engine` is set."""

    def __init__(self, ranks: Supervisor) -> None:
        self._ranks = ranks
        self.engine: Server | None = None

    async def over(self, work: Coroutine[Any, Any, ResultT], *, grace_s: float) -> ResultT:
        """The result of `work`, which is cancelled when a process ends, with `grace_s` to clean up.

        Raises:
            ProcessDied: naming all processes that ended, with the ends of their logs; also when `work` failed first
                because of that (a closed connection is seen sooner than an ended process).
            ValueError, or whatever else `work` raised while everybody was alive.
        """
        try:
            return await unless(self.until_one_dies(), work, grace_s=grace_s)
        except (ProcessDied, ValueError):
            raise
        except Exception as error:
            await self._blame(error)
            raise

    async def until_one_dies(self) -> None:
        """Ends only by raising ProcessDied, or by cancellation."""
        while self._dead() is None:  # noqa: ASYNC110  (the kernel sets no event)
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(POLL_S)  # one that took another with it is named too
        raise ProcessDied(self._dead())

    async def _blame(self, error: Exception) -> None:
        end_s = time.monotonic() + BLAME_S
        while self._dead() is None and time.monotonic() < end_s:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(POLL_S)
        if who := self._dead():
            raise ProcessDied(f"{who}\n(seen as: {error})") from error

    def _dead(self) -> str | None:
        ended = self._ranks.ended()
        if ended:
            return report(ended)
        if self.engine is not None and not self.engine.alive():
            return f"the engine died. The end of {self.engine.log_path}:\n{tail(self.engine.log_path)}"
        return None
