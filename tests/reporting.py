"""What is shown at the end of a run: lines of tests, and with ``--costs N`` what costs most.

``--budget`` fails a run in which the tests of a slice cost more CPU seconds than pyproject.toml
allows them, on a machine as fast as the one that they were counted on. One and the same suite cost
1,050 CPU seconds on one day and 1,460 on another, so each worker counts what a fixed piece of work
costs, and a slower machine may spend as many times more.

A test asks for the fixture `report` and calls it with a line: counts of a campaign, seeds, worst
cases. Lines and costs travel with the test's own report, so that they also arrive from the worker
processes of pytest-xdist.
"""

from __future__ import annotations

import argparse
import inspect
import mmap
import os
import subprocess
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from statistics import median
from typing import Any

import numpy as np
import pytest

from tests.processes import PATIENCE_S
from tests.simdevice.processes import servers

_PROPERTY, _COST, _PACE = "report-line", "cost", "pace"
_lines: list[tuple[str, str]] = []
_costs: defaultdict[str, Any] = defaultdict(lambda: np.zeros(4))
_paces: list[float] = []
_begun = pytest.StashKey[Any]()


def _now() -> Any:
    """Seconds: of the clock, of this process's CPU, of that of processes that ended for it."""
    own, others = (
        used.ru_utime + used.ru_stime for used in map(getrusage, (RUSAGE_SELF, RUSAGE_CHILDREN))
    )
    return np.array([time.perf_counter(), own, others + _of_ranks()])


def _of_ranks() -> float:
    """Return CPU seconds of the servers that fork ranks, and of what they have waited for."""
    ticks = 0
    for pid in (getattr(forkserver._forkserver, "_forkserver_pid", None), *servers()):
        with suppress(OSError):  # none was started, or this is no Linux
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, words[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


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


def _folders() -> dict[str, Any]:
    folders: defaultdict[str, Any] = defaultdict(lambda: np.zeros(4))
    for name, cost in _costs.items():
        folders["/".join(name.split("/")[:-1][:2])] += cost
    return folders


def over_budget(
    spent: Mapping[str, float], allowed: Mapping[str, float], slower: float = 1.0
) -> list[str]:
    """Return a line for each folder of tests that has spent more CPU seconds than it is allowed.

    Parameters
    ----------
    slower
        How many times more this machine spends on the same work.
    """
    return [
        f"{folder}: {seconds:.0f} CPU s, {allowed[name] * slower:.0f} allowed"
        for folder, seconds in sorted(spent.items())
        if seconds > slower * allowed.get(name := folder.removeprefix("tests/"), float("inf"))
    ]


def pace() -> float:
    """Return the CPU seconds of work as tests have it: Python, fresh memory, a process's start."""
    began = _now()
    for _ in range(2):
        compile(inspect.getsource(argparse), "argparse", "exec")
    with mmap.mmap(-1, size := 64 << 20) as memory:
        memory[:: mmap.PAGESIZE] = bytes(size // mmap.PAGESIZE)
    subprocess.run(
        [sys.executable, "-I", "-c", "import argparse, decimal, json"],
        check=True,
        timeout=PATIENCE_S,
    )
    return float(sum((_now() - began)[1:]))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collect what a worker of pytest-xdist counted."""
    _paces.extend(getattr(node, "workeroutput", {}).get(_PACE, ()))


def _slower(project: Mapping[str, Any]) -> float:
    return max(1.0, median(_paces or [0.0]) / project["tool"]["ckptd"]["cpu-seconds-of-pace"])


def _over_budget(config: pytest.Config) -> list[str]:
    if not config.getoption("budget") or hasattr(config, "workerinput"):
        return []
    project = tomllib.loads((config.rootpath / "pyproject.toml").read_text())
    spent = {name: own + others for name, (_, _, own, others) in _folders().items()}
    return over_budget(spent, project["tool"]["ckptd"]["cpu-seconds"], _slower(project))


TOO_DEAR = 6
"""Exit status of a run in which all tests passed, above their budget; pytest has those up to 5."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """Count before the tests and after them: a machine may have other work for a while."""
    _count(session.config)


def _count(config: pytest.Config) -> None:
    workers = config.getoption("numprocesses", None)
    if config.getoption("budget") and (hasattr(config, "workerinput") or not workers):
        _paces.append(pace())


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Fail a run that is too dear."""
    _count(session.config)
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[_PACE] = _paces
    if _over_budget(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = TOO_DEAR
    yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the costs, by file and by folder, and the lines, by test."""
    if most := terminalreporter.config.getoption("costs"):
        terminalreporter.section(f"the {most} files that cost most, and all folders")
        terminalreporter.write_line(" tests  wall s   CPU s  of these in other processes")
        folders = _folders()
        every = sum(_costs.values(), np.zeros(4))
        rows = [*_dearest(_costs)[:most], *_dearest(folders), ("all", every)]
        for name, (tests, wall, own, others) in rows:
            terminalreporter.write_line(
                f"{tests:6.0f} {wall:7.1f} {own + others:7.1f} {others:7.1f}  {name}"
            )
    if _paces:
        terminalreporter.write_line(f"a fixed piece of work cost {median(_paces):.3f} CPU s")
    if over := _over_budget(terminalreporter.config):
        terminalreporter.section("above the budget of CPU seconds", red=True)
        for line in over:
            terminalreporter.write_line(line)
    if not _lines:
        return
    terminalreporter.section("reports")
    last = ""
    for test, line in sorted(_lines, key=lambda x: x[0]):
        if test != last:
            terminalreporter.write_line(test)
        terminalreporter.write_line(f"  {line}")
        last = test
