"""How far a benchmark is: on a terminal a bar with rate and time left, elsewhere a line now and then. On stderr."""

import sys
import time
from types import TracebackType

from megatron_sao.controller.report import progress_bar

LINE_EVERY_S = 15.0


class Display:
    """Counts units of work of one kind."""

    def __init__(self, name: str, total: int) -> None:
        self._progress = progress_bar()
        self._live = self._progress.console.is_terminal
        self._task = self._progress.add_task(name, total=total, text="")
        self._name, self._total, self._done = name, total, 0
        self._start_s = self._said_s = time.monotonic()

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._progress.update(self._task, text=text)
        if not self._live:
            sys.stderr.write(f"{self._name}: {text}\n")

    def advance(self, text: str) -> None:
        """One unit is done."""
        self._done += 1
        self._progress.update(self._task, completed=self._done, text=text)
        now_s = time.monotonic()
        if not self._live and (now_s > self._said_s + LINE_EVERY_S or self._done == self._total):
            self._said_s = now_s
            rate = self._done / (now_s - self._start_s)  # with the starts in between, which also lie ahead
            left_s = (self._total - self._done) / rate
            sys.stderr.write(f"{self._name}: {self._done}/{self._total}, {rate:.2f}/s, {left_s:.0f} s left: {text}\n")

    def skip(self, num: int, reason: str) -> None:
        """`num` units will not be done."""
        self._total -= num
        self._progress.update(self._task, total=self._total)
        self.say(f"skipped: {reason}")
