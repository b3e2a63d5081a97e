"""Checks that need GPUs: skipped with a reason elsewhere, and told in one table at the end of `make test-gpu`.

`pytest tests/gpu --bodies-on-cpu` runs those whose bodies know no device on the CPU, over gloo.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_sao.rollout.devices import visible_devices
from tests.support.ranks import run_ranks

Ranks = Callable[..., list[Any]]
Figure = Callable[[str, float, float], None]
_ON_CPU = "--bodies-on-cpu"
_ROWS: list[tuple[str, str, str, str, str]] = []
"""Check, GPUs, figure, bar, outcome."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(_ON_CPU, action="store_true", help="the same checks on the CPU, where their bodies can")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    devices, on_cpu = visible_devices(), config.getoption(_ON_CPU, default=False)
    for item in items:
        if (marker := item.get_closest_marker("gpu")) is None:
            continue
        if on_cpu and "ranks_" in getattr(item, "fixturenames", ()):
            continue
        if len(devices) < marker.args[0]:
            item.add_marker(pytest.mark.skip(reason=f"needs {marker.args[0]} GPUs, {len(devices)} are visible"))


@pytest.fixture
def ranks_(request: pytest.FixtureRequest) -> Ranks:
    """`run_ranks` on GPUs, or on the CPU where that was asked for."""
    gpus = not request.config.getoption(_ON_CPU, default=False)
    return lambda *args, **options: run_ranks(*args, **{"timeout_s": 240, **options}, gpus=gpus)


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Figure:
    """Note a figure and its bar for the table, and hold it to it."""

    def check(what: str, value: float, bar: float) -> None:
        request.node.user_properties.append((what, (value, bar)))
        assert value <= bar, f"{what}: {value:.3g} is above {bar:.3g}"

    return check


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[Any]:
    report: pytest.TestReport = yield
    marker = item.get_closest_marker("gpu")
    if marker is not None and (report.when == "call" or (report.when == "setup" and not report.passed)):
        outcome = {"passed": "ok", "failed": "FAILED"}.get(report.outcome, "skipped: " + _reason(report))
        found = [(name, f"{value:.3g}", f"{bar:.3g}") for name, (value, bar) in item.user_properties] or [("", "", "")]  # type: ignore[misc]
        for name, value, bar in found:
            _ROWS.append((f"{item.name}{': ' * bool(name)}{name}", str(marker.args[0]), value, bar, outcome))
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """A Markdown table, where these checks were asked for by name."""
    if not any("gpu" in argument for argument in config.args):
        return
    on_cpu = config.getoption(_ON_CPU, default=False)
    names = "no GPU: on the CPU" if on_cpu else f"{len(visible_devices())} GPUs are visible"
    terminalreporter.write_line(f"\n{names}\n\n| check | GPUs | figure | bar | |\n|---|---|---|---|---|")
    for row in _ROWS:
        terminalreporter.write_line(f"| {' | '.join(row)} |")


def _reason(report: pytest.TestReport) -> str:
    return str(report.longrepr[-1]).removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
