"""Files of events: bounded, appended to, whole up to the last line."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from ckptd import events
from ckptd.errors import StoreError
from ckptd.events.event import SaveBegun, SaveFailed
from ckptd.events.eventfiles import EventFolder
from ckptd.events.sink import JsonlSink
from tests.processes import PATIENCE_S


def begun(step: int) -> SaveBegun:
    return SaveBegun(step=step, generation=1, attempt="a", rank=0, at_ns=events.now_ns())


def lines(folder: Path) -> list[list[Any]]:
    return [
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted(folder.glob("*.jsonl"))
    ]


def test_a_file_begins_with_who_writes_it(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path, version="1.2")
    sink.write(begun(5))
    sink.close()
    ((head, event),) = lines(tmp_path)
    assert (head["event"], head["schema"], head["pid"]) == ("Opened", 1, os.getpid())
    assert (head["version"], head["host"]) == ("1.2", os.uname().nodename)
    offset = head["wall_ns"] - head["monotonic_ns"]
    assert event["at_ns"] > offset
    assert (event["event"], event["step"]) == ("SaveBegun", 5)


def test_full_files_are_followed_and_the_oldest_go(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path, file_bytes=2000, files_kept=3)
    for i in range(200):
        sink.write(begun(i))
    sink.close()
    files = lines(tmp_path)
    assert len(files) == 3
    assert all(f[0]["event"] == "Opened" for f in files)
    steps = [e["step"] for f in files for e in f[1:]]
    assert steps == list(range(steps[0], 200))
    assert all(p.stat().st_size < 2200 for p in tmp_path.iterdir())


def test_a_full_disk_costs_lines_and_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink = JsonlSink(tmp_path)
    sink.write(begun(1))
    real, short = os.write, [7, -1]

    def full(fd: int, raw: bytes) -> int:
        if not short:
            return real(fd, raw)
        if (n := short.pop(0)) < 0:
            raise OSError(errno.ENOSPC, "full")
        return real(fd, raw[:n])

    monkeypatch.setattr("ckptd.events.sink.os.write", full)
    for step in (2, 3, 4):
        sink.write(begun(step))
    sink.close()
    assert caplog.text.count("events are lost") == 1
    folder = EventFolder.open(str(tmp_path))
    assert [e.step for _, e in folder.read()] == [1, 4]
    assert (folder.lost, folder.skipped) == (2, 1)


def test_what_cannot_be_written_as_text_is_lost_and_counted(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    bad = SaveFailed(step=1, generation=1, rank=0, at_ns=1, message="\udcff")
    sink.write(bad)
    sink.write(begun(2))
    sink.close()
    folder = EventFolder.open(str(tmp_path))
    assert [e.step for _, e in folder.read()] == [2]
    assert folder.lost == 1


def test_events_that_were_dropped_before_are_told(tmp_path: Path) -> None:
    dropped = 0
    sink = JsonlSink(tmp_path, dropped=lambda: dropped)
    sink.write(begun(1))
    dropped = 12
    sink.write(begun(2))
    sink.write(begun(3))
    sink.close()
    folder = EventFolder.open(str(tmp_path))
    assert [e.step for _, e in folder.read()] == [1, 2, 3]
    assert folder.lost == 12


def test_recording_to_one_folder_twice_is_one_file(tmp_path: Path) -> None:
    first, second = events.record(tmp_path), events.record(str(tmp_path))
    events.emit(begun(1))
    assert os.environ[events.FOLDER_VARIABLE] == str(tmp_path)
    first.close()
    events.emit(begun(2))
    second.close()
    assert events.FOLDER_VARIABLE not in os.environ
    events.emit(begun(3))
    ((_, *found),) = lines(tmp_path)
    assert [e["step"] for e in found] == [1, 2]


def test_what_is_recorded_before_the_first_event_is_recorded_once(tmp_path: Path) -> None:
    """The first event reads the variable that `record` has set: not a second one who records."""
    program = """if True:
        import os, sys
        from ckptd import events
        from tests.events.test_sink import begun
        recording = events.record(sys.argv[1])
        events.emit(begun(1))
        recording.close()
        sys.exit(events.FOLDER_VARIABLE in os.environ)"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    fresh = {n: v for n, v in os.environ.items() if n != events.FOLDER_VARIABLE}
    assert subprocess.run(command, env=fresh).returncode == 0
    inherited = {**fresh, events.FOLDER_VARIABLE: str(tmp_path)}
    assert subprocess.run(command, env=inherited).returncode == 1, "the environment's goes on"


def test_a_folder_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError) as caught:
        events.record(tmp_path / "file" / "below")
    assert "events cannot be written here" in caught.value.message


def python(code: str, folder: Path) -> subprocess.Popen[str]:
    """Start a process that emits; it prints a line when it has."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"CKPTD_EVENTS": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    )


def ended(code: str, folder: Path) -> int:
    with python(code, folder) as process:
        return process.wait(PATIENCE_S)


EMIT = """
    import itertools, os, sys
    from ckptd import events
    def emit(step):
        events.emit(events.SaveBegun(step=step, generation=1, attempt="a", rank=0, at_ns=1))
"""


def test_the_environment_names_a_folder_and_an_exit_loses_nothing(tmp_path: Path) -> None:
    assert ended(EMIT + "    for i in range(1000): emit(i)\n", tmp_path / "new") == 0
    folder = EventFolder.open(str(tmp_path / "new"))
    assert [e.step for _, e in folder.read()] == list(range(1000))


def test_a_process_without_events_leaves_no_file(tmp_path: Path) -> None:
    assert ended("import ckptd.events", tmp_path / "new") == 0
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_does_not_stop_the_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert ended(EMIT + "    emit(1)\n", tmp_path / "file") == 0


def test_a_forked_child_has_its_own_file(tmp_path: Path) -> None:
    code = """
    emit(1)
    if os.fork() == 0:
        emit(2)
        sys.exit()
    os.wait()
    emit(3)
    """
    assert ended(EMIT + code, tmp_path) == 0
    assert sorted([e["step"] for e in f[1:]] for f in lines(tmp_path)) == [[1, 3], [2]]


def test_a_kill_leaves_whole_lines(tmp_path: Path) -> None:
    code = """
    for i in itertools.count():
        emit(i)
        if i % 1000 == 999:
            print(i, flush=True)
    """
    with python(EMIT + code, tmp_path) as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        until = time.monotonic() + 60.0  # another thread writes what is emitted
        while sum(f.stat().st_size for f in tmp_path.glob("*.jsonl")) < 100_000:
            assert time.monotonic() < until
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    folder = EventFolder.open(str(tmp_path))
    steps = [e.step for _, e in folder.read()]
    assert len(steps) > 100
    assert steps == sorted(set(steps))
    assert (folder.skipped, folder.unreadable) == (0, 0)
