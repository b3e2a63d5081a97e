"""Reads a trace file, whole or cut."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    row: str
    name: str
    start_us: int
    end_us: int
    args: dict[str, Any]

    def overlaps(self, other: "Span") -> bool:
        return self.start_us < other.end_us and other.start_us < self.end_us


def spans(path: Path, *, cut: bool = False) -> list[Span]:
    """In the order in which they ended. A cut file is read as Chrome reads it: the last bracket is optional."""
    events = json.loads(path.read_text() + ("]" if cut else ""))
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return [
        Span(
            row=rows[event["tid"]],
            name=event["name"],
            start_us=event["ts"],
            end_us=event["ts"] + event["dur"],
            args=event["args"],
        )
        for event in events
        if event["ph"] == "X"
    ]


def check_nesting(found: list[Span]) -> None:
    """Spans of one row lie inside or outside of each other: a row can show nothing else."""
    for span in found:
        for other in (other for other in found if other.row == span.row and other.overlaps(span)):
            inside = span.start_us >= other.start_us and span.end_us <= other.end_us
            around = span.start_us <= other.start_us and span.end_us >= other.end_us
            assert inside or around, f"{span} and {other} cross in one row"
