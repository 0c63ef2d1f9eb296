"""What tells a process that does something from one that hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ckptd.monitor.agent import processes
from ckptd.monitor.agent.processes import Doing, Process

SPIN = "while True: pass"
WRITES = "import os, time\nwhile True: os.write(2, bytes(1 << 16)); time.sleep(0.1)"
CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"
SLEEPS = "import time; time.sleep(1000)"


@contextmanager
def running(program: str) -> Iterator[Process]:
    child = subprocess.Popen(
        [sys.executable, "-c", f"print('x', flush=True)\n{program}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert child.stdout is not None
    child.stdout.read(2)
    found = Process.find(child.pid, 0)
    assert found is not None
    try:
        yield found
    finally:
        found.close()

        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()


def _busy(process: Process, most: int = 500) -> bool:
    """Whether it is found busy in so many looks, each a second later by its own clock."""
    one = Doing()
    return any(one.look(process, 5, float(n)) or time.sleep(0.3) for n in range(most))


@pytest.mark.parametrize("program", [SPIN, CHILD])
def test_whoever_computes_is_busy_its_children_too(program: str) -> None:
    with running(program) as process:
        assert _busy(process)


def test_whoever_writes_is_busy() -> None:
    with running(WRITES) as process:
        assert _busy(process)


def test_whoever_sleeps_is_not() -> None:
    with running(SLEEPS) as process:
        one = Doing()
        one.look(process, 5, 0.0)
        # What it used until now counts for the first look only.
        assert not one.look(process, 5, 1e9)
        assert not _busy(process, 5)


def test_whoever_runs_python_is_busy_for_a_while() -> None:
    with running(SLEEPS) as process:
        one = Doing()
        one.look(process, 5, 0.0)
        assert one.look(process, 6, 1000.0)
        assert one.look(process, 6, 1000.0 + processes._BUSY_S)
        assert not one.look(process, 6, 1001.0 + processes._BUSY_S)
        one.look(process, 7, 2000.0)
        one.forget()
        assert not one.look(process, 7, 2000.5)


def test_whoever_waits_for_a_cpu_is_starved_and_whoever_sleeps_is_not() -> None:
    """Two that spin on one CPU: each waits half of the time."""
    cpu = min(os.sched_getaffinity(0))
    with running(SPIN) as one, running(SPIN) as other, running(SLEEPS) as third:
        for process in (one, other, third):
            os.sched_setaffinity(process.pid, {cpu})
        looks = Doing(), Doing()
        end = time.monotonic() + 60
        while looks[0].starved_s < 1.0 and time.monotonic() < end:
            for look, process in zip(looks, (one, third), strict=True):
                look.look(process, 5, time.monotonic())
            time.sleep(0.1)
        assert looks[0].starved_s >= 1.0
        assert looks[1].starved_s < 0.5
        looks[0].forget()
        assert looks[0].starved_s == 0.0
