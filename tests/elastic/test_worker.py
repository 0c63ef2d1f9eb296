"""Workers and the launcher of their node, over a real socket."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.elastic.lease import LeaseFile, WorkerLease
from ckptd.elastic.messages import (
    Attach,
    FenceNow,
    FromWorker,
    Go,
    Loaded,
    Mark,
    Out,
    Progress,
    Saved,
    SaveNow,
    ToWorker,
    Welcome,
)
from ckptd.elastic.worker import WorkerLink
from ckptd.elastic.workerend import LauncherEnd, WorkerEnd
from ckptd.errors import ProcessError
from tests.processes import PATIENCE_S, until

Heard = queue.Queue[tuple[WorkerEnd, FromWorker | None]]


@pytest.fixture
def heard() -> Heard:
    return queue.Queue()


@pytest.fixture
def launcher(tmp_path: Path, heard: Heard) -> Iterator[LauncherEnd]:
    end = LauncherEnd(tmp_path / "s", lambda worker, said: heard.put((worker, said)))
    yield end
    end.close()


@pytest.fixture
def link(launcher: LauncherEnd, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerLink]:
    monkeypatch.setenv("CKPTD_LAUNCHER", str(launcher.path))
    monkeypatch.setenv("CKPTD_GENERATION", "3")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(WorkerLink, "_tried", 0)  # another test of this process may have looked
    found = WorkerLink.current()
    assert found is not None
    yield found
    found.close()


def next_of(heard: Heard) -> tuple[WorkerEnd, FromWorker | None]:
    return heard.get(timeout=PATIENCE_S)


def test_without_a_launcher() -> None:
    assert WorkerLink.current() is None
    WorkerLink._tried = 0


def test_a_worker_says_who_it_is(link: WorkerLink, heard: Heard) -> None:
    worker, said = next_of(heard)
    assert said == worker.attach
    assert isinstance(said, Attach)
    assert (said.rank, said.generation, said.session) == (1, 3, False)
    assert worker.pid == said.pid
    assert WorkerLink.current() is link
    link.hold_session()
    assert next_of(heard)[1] == Attach(worker.pid, 1, 3, session=True)


def test_what_is_told_twice_is_sent_once(link: WorkerLink, heard: Heard) -> None:
    next_of(heard)
    for _ in range(2):
        link.loaded(3, 5)
        link.committed(3, 6)
    link.committed(2, 9)  # of an earlier generation, by a thread that was late
    link.committed(3, 7)
    said = [next_of(heard)[1] for _ in range(5)]
    assert said == [
        Mark(3, "loaded"),
        Loaded(generation=3, step=5),
        Mark(3, "stepped"),
        Progress(generation=3, step=6),
        Progress(generation=3, step=7),
    ]


def test_a_save_that_is_asked_for(link: WorkerLink, heard: Heard) -> None:
    worker, _ = next_of(heard)
    assert worker.send(SaveNow(generation=2))  # of a generation that is over
    assert worker.send(Welcome(3, 1.5, 60.0))
    until(lambda: link.welcome == Welcome(3, 1.5, 60.0))
    assert not link.save_asked
    worker.send(SaveNow(generation=3))
    until(lambda: link.save_asked)
    assert link.take_save()
    assert not link.take_save()
    link.serves(8)
    link.committed(3, 7)  # began before it was asked for
    link.committed(3, 8)
    said = [next_of(heard)[1] for _ in range(4)]
    assert said == [
        Mark(3, "stepped"),
        Progress(generation=3, step=7),
        Progress(generation=3, step=8),
        Saved(generation=3, step=8),
    ]


def test_another_generation(link: WorkerLink, heard: Heard) -> None:
    worker, _ = next_of(heard)
    said: queue.Queue[ToWorker | None] = queue.Queue()
    link.listen(said.put)
    worker.send(FenceNow(4, 0))
    assert said.get(timeout=PATIENCE_S) == FenceNow(4, 0)
    link.out(3)
    assert next_of(heard)[1] == Out(3)
    worker.send(Go(4, {"RANK": "0"}))
    assert said.get(timeout=PATIENCE_S) == Go(4, {"RANK": "0"})
    link.goes_on(4, 0)
    assert next_of(heard)[1] == Attach(worker.pid, 0, 4)
    link.committed(4, 1)
    assert next_of(heard)[1] == Mark(4, "stepped")


def test_a_launcher_that_is_gone(link: WorkerLink, launcher: LauncherEnd) -> None:
    said: queue.Queue[ToWorker | None] = queue.Queue()
    link.listen(said.put)
    launcher.close()
    assert said.get(timeout=PATIENCE_S) is None
    assert link.gone
    link.committed(3, 1)


def test_a_worker_that_dies(launcher: LauncherEnd, heard: Heard) -> None:
    code = (
        "import sys, time\nfrom ckptd.elastic.worker import WorkerLink\n"
        "link = WorkerLink.current()\nlink.mark('imported')\n"
        "while link.welcome is None: time.sleep(0.01)\nlink.out(0)\n"
        "assert not {'torch'} & {*sys.modules}\nsys.stdin.read()"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        env={"CKPTD_LAUNCHER": str(launcher.path), "PYTHONPATH": ":".join(sys.path)},
    )
    end, _ = next_of(heard)
    assert end.pid == worker.pid
    assert next_of(heard)[1] == Mark(0, "imported")
    end.send(Welcome(0))
    assert next_of(heard)[1] == Out(0)
    worker.kill()
    assert next_of(heard) == (end, None)
    worker.wait(PATIENCE_S)
    until(lambda: not end.send(Welcome(0)))
    assert worker.stdin is not None
    worker.stdin.close()


def test_a_stranger_is_not_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[object] = []
    end = LauncherEnd(tmp_path / "s", lambda *said: heard.append(said), lambda pid: False)
    monkeypatch.setenv("CKPTD_LAUNCHER", str(end.path))
    monkeypatch.setattr(WorkerLink, "_tried", 0)  # another test of this process may have looked
    link = WorkerLink.current()
    assert link is not None
    until(lambda: link.gone)
    link.close()
    end.close()
    assert heard == []


@pytest.mark.parametrize("raw", [b"\xff\xff\xff\xff\0", b"\x01\0\0\0\0\xc1", b""])
def test_nonsense_is_not_heard(launcher: LauncherEnd, heard: Heard, raw: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(str(launcher.path))
        sock.sendall(raw)
        if not raw:
            sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
    assert heard.empty()


def test_a_forked_child_is_no_worker(link: WorkerLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert WorkerLink.current() is None
    monkeypatch.undo()
    WorkerLink._current, WorkerLink._tried = link, os.getpid()


def test_a_lease(tmp_path: Path) -> None:
    file = LeaseFile(tmp_path / "lease")
    lease = WorkerLease(str(file.path))
    over = [lease.over]
    for left_s in (3600.0, -0.001):
        file.extend(time.monotonic() + left_s)
        over.append(lease.over)
    assert over == [False, False, True]
    assert len(file.path.read_bytes()) == 8
    file.close()
    lease.close()
    lease.close()


def test_a_lease_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="cannot be mapped"):
        WorkerLease(str(tmp_path / "none"))
    (tmp_path / "short").write_bytes(b"1")
    with pytest.raises(ProcessError, match="cannot be mapped"):
        WorkerLease(str(tmp_path / "short"))


def test_no_place_to_listen(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="cannot create its socket"):
        LauncherEnd(tmp_path / ("x" * 120), lambda *_: None)
    assert not [t for t in threading.enumerate() if t.name == "ckptd-workers"]
