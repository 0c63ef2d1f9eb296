"""Stacks of ranks that run, are stopped, or have ended; with py-spy and without."""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from ckptd.monitor.agent import evidence
from ckptd.monitor.agent.evidence import (
    EvidenceTaker,
    last_output,
    output_files,
    py_spy,
    take_stack,
    take_stacks,
)
from tests.processes import PATIENCE_S, stop, until

STUCK = """
import time
def deep_inside():
    print(flush=True)
    time.sleep(600)
deep_inside()
"""


@contextmanager
def stuck() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("same", [True, False])
def test_the_last_output_is_that_of_files(same: bool, tmp_path: Path) -> None:
    program = "import sys, time; print('x' * 20000); print('out', flush=True);"
    program += "print('wrong', file=sys.stderr, flush=True); time.sleep(600)"
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        command = [sys.executable, "-c", program]
        process = subprocess.Popen(command, stdout=out, stderr=out if same else err)
    try:
        until(lambda: "wrong" in last_output(process.pid), "nothing is printed")
        shown = last_output(process.pid)
        assert len(shown) <= 2 * 8192
        assert shown.endswith("x\nout\nwrong" if same else "x\nout")
        assert shown.count("wrong") == 1
    finally:
        process.kill()
        process.wait()
    assert last_output(process.pid) == ""


def test_a_pipe_is_not_read() -> None:
    with stuck() as one:
        assert last_output(one.pid) == ""


def fake_py_spy(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "py-spy"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(evidence, "py_spy", lambda: str(program))


def test_a_stopped_rank_shows_its_stack() -> None:
    assert py_spy() is not None
    with stuck() as one, stuck() as two:
        stop(one.pid)
        found = take_stacks([(3, one.pid), (5, two.pid)], timeout_s=60)
        assert sorted(found) == [3, 5]
        if any("forbids it" in stack.text for stack in found.values()):
            pytest.skip("STACKS OF PYTHON ARE NOT TESTED: the kernel forbids py-spy here")
        for stack in found.values():
            assert stack.how == "py-spy"
            assert "deep_inside" in stack.text
            assert stack.taken_s > 0
        assert "stopped" in found[3].text
        assert one.poll() is None


def test_a_process_that_has_ended() -> None:
    with stuck() as process:
        pid = process.pid
    stack = take_stack(pid)
    assert stack.how == ""
    assert "has ended" in stack.text


def test_a_zombie() -> None:
    with stuck() as process:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert "zombie" in take_stack(process.pid, 60).text


def test_without_py_spy_the_kernel_says_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "py_spy", lambda: None)
    with stuck() as process:
        stack = take_stack(process.pid)
    assert stack.how == "kernel"
    assert "py-spy, of the extra monitor, is not installed" in stack.text
    assert f"thread {process.pid}" in stack.text


def test_what_forbids_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_py_spy(tmp_path, monkeypatch, "echo 'Error: Permission denied (os error 13)' >&2; exit 1")
    with stuck() as process:
        stack = take_stack(process.pid)
    assert stack.how == "kernel"
    assert "CAP_SYS_PTRACE" in stack.text


def test_one_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_py_spy(tmp_path, monkeypatch, "exec sleep 600")
    with stuck() as process:
        stack = take_stack(process.pid, timeout_s=0.2)
    assert "was not done after" in stack.text


def test_endless_text_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_py_spy(tmp_path, monkeypatch, "head -c 1000000 /dev/zero | tr '\\0' x; echo; echo end")
    with stuck() as process:
        stack = take_stack(process.pid, 60)
    assert len(stack.text) <= 1 << 16
    assert "In the kernel" in stack.text


def test_the_output_of_a_process_that_has_ended_is_in_its_files(tmp_path: Path) -> None:
    with (tmp_path / "err").open("w") as file:
        program = "import sys; sys.stderr.write('KeyError: 1'); sys.stderr.flush(); input()"
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=file, stderr=file
        )
    until(lambda: "KeyError" in last_output(process.pid), "nothing is printed")
    files = output_files(process.pid)
    process.communicate(b"\n")
    assert last_output(None) == ""
    assert last_output(None, files) == "KeyError: 1"


def test_ranks_that_print_to_one_file_are_named_before_it(tmp_path: Path) -> None:
    got = queue.Queue[dict[int, str]]()
    taker = EvidenceTaker(b"", lambda _stacks, logs, _probes: got.put(logs))
    program = "import sys; sys.stderr.write('KeyError: 1'); sys.stderr.flush(); input()"
    processes = []
    for rank in range(3):
        with (tmp_path / f"err{rank // 2}").open("a") as file:
            command = [sys.executable, "-c", program]
            processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stderr=file))
    try:
        for rank, process in enumerate(processes):
            taker.follow(rank, process.pid)
        for process in processes:
            process.communicate(b"\n")
        taker.wanted(dict.fromkeys(range(3), None))
        logs = got.get(timeout=PATIENCE_S)
    finally:
        taker.close()
    together = "printed by ranks 0, 1:\nKeyError: 1KeyError: 1"
    assert logs == {0: together, 1: together, 2: "KeyError: 1"}


def test_the_dump_of_a_rank_that_has_ended_is_among_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path(__file__).parents[2] / "plugins" / "nccl" / "flight" / "pickled" / "rank0_"
    entry = EntryPoint("lines", "ckptd_nccl.flightrecorder:lines", "ckptd.dumps")
    monkeypatch.setattr(evidence, "entries", lambda group: [entry])
    env = os.environ | {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "trace")}
    came: queue.Queue[dict[int, str]] = queue.Queue()
    taker = EvidenceTaker(b"", lambda stacks, logs, probes: came.put(logs))
    with subprocess.Popen([sys.executable, "-c", STUCK], env=env, stdout=subprocess.PIPE) as one:
        assert one.stdout is not None
        one.stdout.readline()
        taker.follow(3, one.pid)
        one.kill()
    shutil.copyfile(real, tmp_path / "trace3")
    taker.wanted({3: None})
    lines = came.get(timeout=60)[3].splitlines()
    assert [line.startswith("flight recorder: 2") for line in lines] == [True] * len(lines)
    assert lines[-1].endswith("entered, not ended")
    os.utime(tmp_path / "trace3", (1e9, 1e9))
    assert evidence.dump_lines(str(tmp_path / "trace3")) == [], "it is of an earlier failure"
    assert evidence.dump_lines(str(tmp_path)) == evidence.dump_lines("\0") == []
    taker.close()
