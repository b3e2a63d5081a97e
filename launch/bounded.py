"""Runs a coroutine that shares its event loop with user code, and ends in bounded time whatever that code does.

A reward may block the loop, swallow a cancellation, or hang in a thread. The first SIGINT or SIGTERM cancels the
coroutine; what has not ended `force_after_s` later is killed, this process last. Later signals change nothing.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

import psutil

ResultT = TypeVar("ResultT")
CLOSE_S = 2.0  # for what is left in the loop to end
TERMINATE_S = 2.0  # between SIGTERM and SIGKILL, when stopping is forced: the engine's supervisor cleans up


class Interrupted(Exception):
    """A signal ended the run."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}")
        self.number = number


def run(main: Coroutine[Any, Any, ResultT], *, force_after_s: float) -> ResultT:
    """The result of `main`, from the main thread. Threads that user code has left behind are not waited for.

    Raises:
        Interrupted: a signal cancelled it, and it has ended in order.
    """
    loop, ended = asyncio.new_event_loop(), threading.Event()
    running = loop.create_task(main)
    received: list[signal.Signals] = []

    def stop(
        number: int, _: object
    ) -> None:  # between two bytecodes of the main thread, also where the loop is blocked
        if received or loop.is_closed():
            return
        received.append(signal.Signals(number))
        os.write(2, f"\n{received[0].name}: stopping everything\n".encode())
        threading.Thread(target=_force, args=(ended, number, force_after_s), daemon=True).start()
        loop.call_soon_threadsafe(running.cancel)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return loop.run_until_complete(running)
    except asyncio.CancelledError:
        if received:
            raise Interrupted(received[0]) from None
        raise
    finally:
        _close(loop)
        ended.set()
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(status: int) -> NoReturn:
    """End this process now. An ordinary exit waits for the threads of user code."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(status)


def _close(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=CLOSE_S))
    with contextlib.suppress(TimeoutError):
        loop.run_until_complete(asyncio.wait_for(loop.shutdown_asyncgens(), CLOSE_S))
    loop.close()


def _force(ended: threading.Event, number: int, after_s: float) -> None:
    if ended.wait(after_s):
        return
    os.write(2, f"sao: error: not stopped after {after_s:g} s (does a reward block the event loop?): killed\n".encode())
    children = psutil.Process().children(recursive=True)
    _each(children, signal.SIGTERM)
    psutil.wait_procs(children, timeout=TERMINATE_S)
    _each([*children, *psutil.Process().children(recursive=True)], signal.SIGKILL)
    os._exit(128 + number)


def _each(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
