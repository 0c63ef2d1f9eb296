"""What is shown at the end of a run: lines of tests, and with ``--costs N`` what costs most.

A test asks for the fixture `report` and calls it with a line: counts of a campaign, seeds, worst
cases. Lines and costs travel with the test's own report, so that they also arrive from the worker
processes of pytest-xdist.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

import numpy as np
import pytest

_PROPERTY, _COST = "report-line", "cost"
_lines: list[tuple[str, str]] = []
_costs: defaultdict[str, Any] = defaultdict(lambda: np.zeros(4))
_begun = pytest.StashKey[Any]()


def _now() -> Any:
    """Seconds: of the clock, of this process's CPU, of that of processes it has waited for."""
    used = [getrusage(who) for who in (RUSAGE_SELF, RUSAGE_CHILDREN)]
    return np.array([time.perf_counter(), *(u.ru_utime + u.ru_stime for u in used)])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note when a test begins."""
    item.stash[_begun] = _now()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[pytest.TestReport]:
    """Write what the test has cost into the report of its end."""
    report: pytest.TestReport = yield
    if call.when == "teardown" and _begun in item.stash:
        report.user_properties.append((_COST, (_now() - item.stash[_begun]).tolist()))
    return report


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Return a function that adds a line to the end of the run."""
    return lambda line: record_property(_PROPERTY, line)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the lines and costs of a test that ended, here or in a worker."""
    if report.when == "teardown":
        _lines.extend((report.nodeid, str(v)) for k, v in report.user_properties if k == _PROPERTY)
        for cost in (v for k, v in report.user_properties if k == _COST):
            _costs[report.nodeid.partition("::")[0]] += [1, *cost]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the costs, by file, and the lines, by test."""
    if most := terminalreporter.config.getoption("costs"):
        terminalreporter.section(f"the {most} files that cost most")
        terminalreporter.write_line(" tests  wall s   CPU s  of these in other processes")
        rows = sorted(_costs.items(), key=lambda row: row[1][2] + row[1][3], reverse=True)
        every = sum(_costs.values(), np.zeros(4))
        for name, (tests, wall, own, others) in [*rows[:most], ("all", every)]:
            terminalreporter.write_line(
                f"{tests:6.0f} {wall:7.1f} {own + others:7.1f} {others:7.1f}  {name}"
            )
    if not _lines:
        return
    terminalreporter.section("reports")
    last = ""
    for test, line in sorted(_lines, key=lambda x: x[0]):
        if test != last:
            terminalreporter.write_line(test)
        terminalreporter.write_line(f"  {line}")
        last = test
