"""What ran when: a file in Chrome's trace format, which chrome://tracing and Perfetto open.

One row per name. A span is written when it ends, so that memory is bounded, and the file of a run that was killed can
be opened too (the format's last bracket is optional).
"""

import asyncio
import itertools
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOG = logging.getLogger(__name__)
Arg = int | float | str


@dataclass(slots=True, eq=False)
class _Span:
    row: str
    name: str
    args: dict[str, Arg]
    start_us: int
    task: object  # that opened it


class Trace:
    """For code in an event loop.

    >>> with trace.span("actor", "actor_update", batch_id=3):
    ...     await channel.call(command, timeout_s=60.0)
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._file.write(b'[\n{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "sao"}}')
        self._rows: list[str] = []
        self._open: list[_Span] = []

    @contextmanager
    def span(self, row: str, name: str, **args: Arg) -> Iterator[None]:
        """From here to the end of the block, awaits included. Spans of one task nest; those of several tasks that
        overlap lie in further rows of that name ("publish (2)"), since a row can show nothing but nests.
        """
        task = asyncio.current_task()
        span = _Span(self._row(row, task), name, args, _now_us(), task)
        self._open.append(span)
        try:
            yield
        finally:
            self._end(span)

    def close(self) -> None:
        """Ends the spans that are open, and the file: it is valid JSON then. What comes later is left out."""
        for span in list(self._open):
            self._end(span)
        if not self._file.closed:
            self._file.write(b"\n]\n")
            self._file.close()

    def _row(self, name: str, task: object) -> str:
        rows = itertools.chain([name], (f"{name} ({number})" for number in itertools.count(2)))
        row = next(row for row in rows if all(span.task is task for span in self._open if span.row == row))
        if row not in self._rows:
            self._rows.append(row)
            self._write("M", "thread_name", row, {"name": row})
        return row

    def _end(self, span: _Span) -> None:
        if span in self._open:
            self._open.remove(span)
            self._write("X", span.name, span.row, span.args, ts=span.start_us, dur=_now_us() - span.start_us)

    def _write(self, phase: str, name: str, row: str, args: dict[str, Any], **times: int) -> None:
        event = {"ph": phase, "name": name, "pid": 0, "tid": self._rows.index(row), "args": args, **times}
        if self._file.closed:
            return
        try:
            self._file.write(b",\n" + json.dumps(event).encode())
        except OSError as error:  # a full disk must not end a publish
            LOG.warning("the trace ends here: %s", error)
            self._file.close()


class NoTrace(Trace):
    """Writes nothing."""

    def __init__(self) -> None: ...

    @contextmanager
    def span(self, row: str, name: str, **args: Arg) -> Iterator[None]:
        yield

    def close(self) -> None: ...


def _now_us() -> int:
    return time.monotonic_ns() // 1000
