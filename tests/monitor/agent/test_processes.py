"""Processes are found, and how they end is known, collected by their parent or not."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ckptd.monitor.agent.processes import Process, exit_code_of
from ckptd.monitor.ring import process_birth
from tests.processes import stop, until


@contextmanager
def child(then: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """Give a process that does `then` once its input ends."""
    code = f"import os, sys\nsys.stdin.read()\n{then}"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def found(process: subprocess.Popen[bytes]) -> Process:
    out = Process.find(process.pid, process_birth(process.pid))
    assert out is not None
    return out


def until_ended(process: Process) -> None:
    end = time.monotonic() + 60
    while process.runs():
        assert time.monotonic() < end
        time.sleep(0.005)


def end_input(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()


@pytest.mark.parametrize(
    ("then", "code"),
    [
        ("", 0),
        ("sys.exit(7)", 7),
        ("os.kill(os.getpid(), 9)", -9),
        ("os.abort()", -signal.SIGABRT),
    ],
)
def test_how_it_ended_before_it_is_collected(then: str, code: int) -> None:
    with child(then) as process:
        watched = found(process)
        assert watched.runs()
        assert watched.exit_code() is None
        end_input(process)
        until_ended(watched)
        assert watched.state() == "Z"
        assert watched.exit_code() == code
        watched.close()


def test_how_it_ended_after_it_was_collected() -> None:
    with child("sys.exit(7)") as process:
        watched = found(process)
        end_input(process)
        process.wait()
        until_ended(watched)
        # Older kernels have forgotten it by now, and that is said rather than guessed.
        assert watched.exit_code() in (7, None)
        assert watched.state() == ""
        watched.close()


def test_what_was_seen_stays_known() -> None:
    with child("sys.exit(7)") as process:
        watched = found(process)
        end_input(process)
        until_ended(watched)
        assert watched.exit_code() == 7
        process.wait()
        assert watched.exit_code() == 7
        watched.close()


def test_a_stopped_process_runs() -> None:
    with child() as process:
        watched = found(process)
        stop(process.pid)
        assert watched.state() == "T"
        assert watched.runs()
        watched.close()


def test_another_process_with_the_same_number_is_not_taken() -> None:
    with child() as process:
        assert Process.find(process.pid, process_birth(process.pid) + 1) is None


def test_no_such_process() -> None:
    with child() as process:
        pid, birth = process.pid, process_birth(process.pid)
    assert Process.find(pid, birth) is None
    assert Process.find(0, 0) is None
    assert Process.find(-1, 0) is None


def test_threads_that_wake_are_counted() -> None:
    with child() as process:
        watched = found(process)
        end = time.monotonic() + 60
        while not watched.turns():  # it has hardly begun
            assert time.monotonic() < end
        watched.close()
    assert watched.turns() == 0


def test_what_it_uses_of_the_machine() -> None:
    with child() as process:
        watched = found(process)
        until(lambda: watched.usage()[1] > 1 << 16)  # it has only just been started
        ticks, memory, threads = watched.usage()
        assert ticks >= 0
        assert 1 << 16 < memory < 1 << 36
        assert threads >= 1
    assert watched.usage() == (0, 0, 0)
    watched.close()


def test_no_descriptor_is_left() -> None:
    gc.collect()  # or what others left is closed meanwhile
    before = len(os.listdir("/proc/self/fd"))
    with child() as process:
        watched = found(process)
        watched.close()
        watched.close()
        assert Process.find(process.pid, 1) is None
        end_input(process)
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("status", "code"), [(0, 0), (7 << 8, 7), (9, -9), (0x80 | 6, -6)])
def test_wait_status(status: int, code: int) -> None:
    assert exit_code_of(status) == code
