"""What is shown at the end of a run: lines of tests, and with ``--costs N`` what costs most.

A test asks for the fixture `report` and calls it with a line: counts of a campaign, seeds, worst
cases. Lines and costs travel with the test's own report, so that they also arrive from the worker
processes of pytest-xdist.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

import numpy as np
import pytest

_PROPERTY, _COST = "report-line", "cost"
_lines: list[tuple[str, str]] = []
_costs: defaultdict[str, Any] = defaultdict(lambda: np.zeros(4))
_begun = pytest.StashKey[Any]()


def _now() -> Any:
    """Seconds: of the clock, of this process's CPU, of that of processes that ended for it."""
    own, others = (
        used.ru_utime + used.ru_stime for used in map(getrusage, (RUSAGE_SELF, RUSAGE_CHILDREN))
    )
    return np.array([time.perf_counter(), own, others + _of_ranks()])


def _of_ranks() -> float:
    """Return CPU seconds of the fork server and of the ranks that it has started and waited for."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # none was started, or this is no Linux
        return 0.0
    return sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")


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


def _dearest(costs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(costs.items(), key=lambda row: row[1][2] + row[1][3], reverse=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the costs, by file and by folder, and the lines, by test."""
    if most := terminalreporter.config.getoption("costs"):
        terminalreporter.section(f"the {most} files that cost most, and all folders")
        terminalreporter.write_line(" tests  wall s   CPU s  of these in other processes")
        folders: defaultdict[str, Any] = defaultdict(lambda: np.zeros(4))
        for name, cost in _costs.items():
            folders["/".join(name.split("/")[:-1][:2])] += cost
        every = sum(_costs.values(), np.zeros(4))
        rows = [*_dearest(_costs)[:most], *_dearest(folders), ("all", every)]
        for name, (tests, wall, own, others) in rows:
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
