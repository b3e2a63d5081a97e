"""What a benchmark found: one record per case, as a table for a person and as JSON for a program.

A case is JSON. Keys with a meaning of their own: `bar` (the number that it must reach, null: none), `met` (whether it
did, null without a bar), `skipped` (why the case could not be run here; it then has no numbers).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue
from rich.console import Console
from rich.table import Table

from megatron_sao.controller.report import write_atomically

MIN_TABLE_WIDTH = 180  # in a file, where rich would take 80

Case = Mapping[str, JsonValue]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """`columns` are the keys that the table shows, all of them where it is empty. The JSON has every key."""

    title: str
    cases: tuple[Case, ...]
    columns: tuple[str, ...] = ()

    @property
    def num_missed(self) -> int:
        return sum(case.get("met") is False for case in self.cases)

    def table(self) -> Table:
        """One row a case; a mapping inside a case is one cell."""
        keys = self.columns or tuple(dict.fromkeys(key for case in self.cases for key in case))
        table = Table(title=self.title, title_justify="left")
        for key in keys:
            numbers = all(isinstance(case.get(key), int | float | None) for case in self.cases)
            heading = key.replace("_", " ")  # it wraps at spaces
            table.add_column(heading, justify="right" if numbers else "left", no_wrap=not numbers)
        for case in self.cases:
            table.add_row(*(_cell(case.get(key)) for key in keys), style="red" if case.get("met") is False else None)
        return table

    def show(self, console: Console | None = None) -> None:
        console = console or Console()
        if not console.is_terminal:
            console.width = max(console.width, MIN_TABLE_WIDTH)
        console.print(self.table())
        for case in self.cases:
            if "skipped" in case:
                console.print(f"skipped, {_identity(case)}: {case['skipped']}", highlight=False)

    def write(self, path: Path) -> None:
        """The whole file or none of it."""
        data = {"title": self.title, "cases": [dict(case) for case in self.cases]}
        write_atomically(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


def _cell(value: JsonValue) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "NO"
        case float():
            return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
        case int():
            return f"{value:,}" if abs(value) >= 10_000 else str(value)
        case dict():
            return "\n".join(f"{key.removesuffix('_s')} {_cell(part)}" for key, part in value.items())
        case list():
            return " .. ".join(_cell(part) for part in value)
    return value


def _identity(case: Case) -> str:
    """The case by its settings: what is neither a result nor the reason."""
    settings = {key: value for key, value in case.items() if key not in ("skipped", "bar", "met") and value is not None}
    return ", ".join(f"{key} {_cell(value)}" for key, value in settings.items())
