"""Lines that tests want to be seen at the end of a run: counts of a campaign, seeds, worst cases.

A test asks for the fixture `report` and calls it with a line. Lines travel with the test's own
report, so that they also arrive from the worker processes of pytest-xdist.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

_PROPERTY = "report-line"
_lines: list[tuple[str, str]] = []


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Return a function that adds a line to the end of the run."""
    return lambda line: record_property(_PROPERTY, line)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the lines of a test that ended, here or in a worker."""
    if report.when == "teardown":
        _lines.extend((report.nodeid, str(v)) for k, v in report.user_properties if k == _PROPERTY)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the lines, by test."""
    if not _lines:
        return
    terminalreporter.section("reports")
    last = ""
    for test, line in sorted(_lines, key=lambda x: x[0]):
        if test != last:
            terminalreporter.write_line(test)
        terminalreporter.write_line(f"  {line}")
        last = test
