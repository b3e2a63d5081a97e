"""What asyncio can only write into the log: an exception that nobody awaited, a session or transport left open."""

import gc
import logging
from collections.abc import Iterator

import pytest


class Reports(logging.Handler):
    """Keeps the errors of the `asyncio` logger until they are taken."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(logging.Formatter().format(record))

    def take(self) -> str:
        texts, self._texts = self._texts, []
        return "\n".join(texts)


REPORTS = Reports()


def pytest_configure() -> None:
    logging.getLogger("asyncio").addHandler(REPORTS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Fails the test in whose time a report came: tasks report when collected, so it may be an earlier test's."""
    yield
    if text := REPORTS.take():
        pytest.fail(f"asyncio reported, in this test or before it:\n{text}", pytrace=False)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tasks that nothing has collected yet report now, not while the interpreter ends."""
    gc.collect()
    if text := REPORTS.take():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nasyncio reported after the last test:\n{text}")
