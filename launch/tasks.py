"""Two coroutines with one outcome."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

FirstT = TypeVar("FirstT")
SecondT = TypeVar("SecondT")


async def both(
    first: Coroutine[Any, Any, FirstT], second: Coroutine[Any, Any, SecondT], *, grace_s: float
) -> tuple[FirstT, SecondT]:
    """Both results. The first failure cancels the other one, which has `grace_s` to clean up."""
    tasks = asyncio.ensure_future(first), asyncio.ensure_future(second)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
        return tasks[0].result(), tasks[1].result()
    finally:
        await _end(tasks, grace_s)


async def in_turn(first: Coroutine[Any, Any, FirstT], second: Coroutine[Any, Any, SecondT]) -> tuple[FirstT, SecondT]:
    """Both results; the second one begins when the first has ended, and not at all if that fails."""
    try:
        return await first, await second
    finally:
        second.close()


async def unless(danger: Coroutine[Any, Any, None], work: Coroutine[Any, Any, FirstT], *, grace_s: float) -> FirstT:
    """The result of `work`, unless `danger` raises before. Whichever is left over is cancelled."""
    watching, working = asyncio.ensure_future(danger), asyncio.ensure_future(work)
    try:
        await asyncio.wait((watching, working), return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
        return await working
    finally:
        await _end((watching, working), grace_s)


async def _end(tasks: tuple["asyncio.Future[Any]", ...], grace_s: float) -> None:
    for task in tasks:
        task.cancel()
    done, _ = await asyncio.wait(tasks, timeout=grace_s)
    for task in done:
        if not task.cancelled():
            task.exception()  # seen; the one that counts is on its way already
