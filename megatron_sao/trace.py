"""What ran when: a file in Chrome's trace format, which chrome://tracing and Perfetto open.

One row per name. Every span is written when it ends, so that memory is bounded, and the file of a run that was killed
can be opened too (the format's last bracket is optional).
"""

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Arg = int | float | str


@dataclass(slots=True, eq=False)
class _Span:
    name: str
    args: dict[str, Arg]
    start_us: int
    task: object  # that opened it


@dataclass(slots=True)
class _Lane:
    tid: int
    open: list[_Span] = field(default_factory=list)


class Trace:
    """>>> trace = Trace(run_directory / "trace.json")
    >>> with trace.span("actor", "actor_update", batch_id=3):
    ...     await channel.call(command, timeout_s=60.0)
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._start_ns = time.monotonic_ns()
        self._rows: dict[str, list[_Lane]] = {}
        self._num_lanes = 0
        self._file.write(b"[\n" + _event("M", "process_name", tid=0, args={"name": "sao"}))

    @contextmanager
    def span(self, row: str, name: str, **args: Arg) -> Iterator[None]:
        """From here to the end of the block, awaits included. Spans of one task nest; those of several tasks that
        overlap lie in further rows of that name ("publish (2)"), since a row shows nothing but nests.
        """
        lane = self._lane(row)
        span = _Span(name, args, self._now_us(), _current_task())
        lane.open.append(span)
        try:
            yield
        finally:
            self._end(lane, span)

    def close(self) -> None:
        """Ends the spans that are open, and the file: it is valid JSON then. What comes later is left out."""
        for lane in itertools.chain(*self._rows.values()):
            for span in list(lane.open):
                self._end(lane, span)
        if not self._file.closed:
            self._file.write(b"\n]\n")
            self._file.close()

    def _lane(self, row: str) -> _Lane:
        task = _current_task()
        lanes = self._rows.setdefault(row, [])
        for lane in lanes:
            if all(span.task is task for span in lane.open):
                return lane
        self._num_lanes += 1
        lanes.append(_Lane(self._num_lanes))
        name = row if len(lanes) == 1 else f"{row} ({len(lanes)})"
        self._write(_event("M", "thread_name", tid=self._num_lanes, args={"name": name}))
        return lanes[-1]

    def _end(self, lane: _Lane, span: _Span) -> None:
        if span in lane.open:
            lane.open.remove(span)
            times = {"ts": span.start_us, "dur": self._now_us() - span.start_us}
            self._write(_event("X", span.name, tid=lane.tid, args=span.args, **times))

    def _write(self, event: bytes) -> None:
        if not self._file.closed:
            self._file.write(b",\n" + event)

    def _now_us(self) -> int:
        return (time.monotonic_ns() - self._start_ns) // 1000


class NoTrace(Trace):
    """Writes nothing."""

    def __init__(self) -> None: ...

    @contextmanager
    def span(self, row: str, name: str, **args: Arg) -> Iterator[None]:
        yield

    def close(self) -> None: ...


def _event(phase: str, name: str, **fields: Any) -> bytes:
    return json.dumps({"ph": phase, "name": name, "pid": 0, **fields}).encode()


def _current_task() -> object:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop: plain code nests like one task
        return None
