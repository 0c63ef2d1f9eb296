"""Processes that stop and go on, and pulls that take long: deadlines, leases, and who goes on."""

from __future__ import annotations

import ast
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ckptd
from ckptd.checkpoint.torch.copy import Snapshot
from ckptd.checkpoint.torch.saver import wait_for_copying
from ckptd.errors import CkptdError, UsageError
from ckptd.publish import client, pull
from ckptd.publish.link import ServerLink
from tests.processes import PATIENCE_S, stop, until
from tests.programs import Program
from tests.publish.kills import slots_of
from tests.reshard.torch.layout.jobs import Tree, differing, whole
from tests.reshard.torch.layout.test_binder import FUSED, WHOLE, fused

pytestmark = pytest.mark.timeout(120)

TIMEOUT_S = 3.0
BUSY_S = 8.0
"""What a busy machine may add to a wait; without one deadline they were 20 s and more."""
STATE = {"model": whole(1)}


@pytest.fixture
def subscriber(tmp_path: Path) -> Iterator[ckptd.Subscriber]:
    into = Tree(fused(whole(99)))
    with ckptd.Subscriber(FUSED, into, tmp_path / "at", timeout_s=TIMEOUT_S) as found:
        yield found


def holds(subscriber: ckptd.Subscriber, step: int) -> bool:
    found = dict(subscriber._state["model"].state_dict())
    return not differing(found, fused(whole(step)))


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_server_that_is_stopped_is_waited_for_once(
    tmp_path: Path, subscriber: ckptd.Subscriber
) -> None:
    with ckptd.Publisher(WHOLE, tmp_path / "at") as publisher:
        assert publisher.publish(1, STATE).wait(PATIENCE_S)
        with stopped(publisher.server_pid):
            begun = time.monotonic()  # not connected: neither by the Unix socket nor over TCP
            assert subscriber.update(1.0) is None
            assert time.monotonic() - begun < 1.0 + BUSY_S
        assert subscriber.update(30.0) is not None
        with stopped(publisher.server_pid):  # connected
            begun = time.monotonic()
            assert subscriber.update() is None
            assert time.monotonic() - begun < BUSY_S
    assert holds(subscriber, 1)


def test_a_subscriber_that_was_closed_connects_no_more(
    tmp_path: Path, subscriber: ckptd.Subscriber
) -> None:
    with ckptd.Publisher(WHOLE, tmp_path / "at") as publisher:
        assert publisher.publish(1, STATE).wait(PATIENCE_S)
        subscriber.close()
        with pytest.raises(UsageError, match="closed"):
            subscriber.update(30.0)
    assert holds(subscriber, 99)


def test_a_server_that_stops_in_a_pull_ends_it_after_the_time_for_one_answer(
    tmp_path: Path, subscriber: ckptd.Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscriber._far, subscriber._answer_s = True, BUSY_S
    monkeypatch.setattr(pull, "_MESSAGE_BYTES", 1 << 10)
    with ckptd.Publisher(WHOLE, tmp_path / "at") as publisher:
        assert publisher.publish(1, STATE).wait(PATIENCE_S)
        calls = 0
        read = ServerLink.read

        def stops(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:  # what is asked for after it, is not answered
                stop(publisher.server_pid)
            return read(*args)

        monkeypatch.setattr(ServerLink, "read", stops)
        begun = time.monotonic()
        assert subscriber.update() is None
        assert TIMEOUT_S / 2 < time.monotonic() - begun < TIMEOUT_S + BUSY_S
        assert holds(subscriber, 99)
        os.kill(publisher.server_pid, signal.SIGCONT)
        assert subscriber.update(30.0) is not None
    assert holds(subscriber, 1)


def test_a_trainer_waits_once_for_a_leader_that_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_ANSWER_S", 1.0)
    with ckptd.Publisher(WHOLE, tmp_path / "at") as publisher:
        assert publisher.publish(1, STATE).wait(PATIENCE_S)
        with stopped(publisher.server_pid):
            begun = time.monotonic()
            for step in range(2, 20):
                publication = publisher.publish(step, STATE)
                assert "does not answer" in publication.skipped
            assert 1.0 <= time.monotonic() - begun < 1.0 + BUSY_S
        publication = publisher.publish(20, STATE, wait_s=30.0)
        assert publication.wait(PATIENCE_S)
        for step in range(21, 25):  # no slot is lost
            assert publisher.publish(step, STATE).wait(PATIENCE_S)


def test_a_publisher_is_abandoned_without_waits(
    tmp_path: Path, subscriber: ckptd.Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a session does when it leaves a generation; `close` completes what is copied."""
    go_on = threading.Event()
    rest = Snapshot.copy_rest

    def slow(snapshot: Snapshot) -> None:
        go_on.wait(PATIENCE_S)
        rest(snapshot)

    publisher = ckptd.Publisher(WHOLE, tmp_path / "at")
    assert publisher.publish(1, STATE).wait(PATIENCE_S)
    monkeypatch.setattr(Snapshot, "copy_rest", slow)
    monkeypatch.setattr(client, "_ANSWER_S", 100.0)
    publication = publisher.publish(2, STATE)
    begun = time.monotonic()
    publisher.abandon()
    publisher.abandon()
    publisher.close()
    assert time.monotonic() - begun < 30.0  # neither for an answer nor for what copies
    assert not wait_for_copying(time.monotonic())  # a session waits for that next
    go_on.set()
    assert wait_for_copying(time.monotonic() + 30.0)
    with pytest.raises(CkptdError):
        publication.wait(PATIENCE_S)
    report = subscriber.update(10.0)
    assert report is None or report.version.step == 1  # whole, while its server is there


WORKER = """
import sys, time
from pathlib import Path
import ckptd
from ckptd.publish import pull
from ckptd.publish.link import ServerLink
from tests.reshard.torch.layout.jobs import Tree, differing, whole
from tests.reshard.torch.layout.test_binder import FUSED, fused
at, pulling, last = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
pull._MESSAGE_BYTES = 1 << 10
read, calls = ServerLink.read, 0
def slow(*args):
    global calls
    calls += 1
    if calls == 3:
        pulling.touch()
    time.sleep(0.1 if calls < 50 else 0.0)
    return read(*args)
ServerLink.read = slow
into = Tree(fused(whole(99)))
with ckptd.Subscriber(FUSED, into, at) as subscriber:
    subscriber._far = True
    steps = []
    while last not in steps:
        report = subscriber.update(5.0)
        if report is not None:
            steps.append(report.version.step)
            assert not differing(dict(into.state_dict()), fused(whole(steps[-1])))
print(steps)
"""


def test_a_worker_that_is_stopped_in_a_pull_holds_up_nothing_and_goes_on_with_the_newest(
    tmp_path: Path,
) -> None:
    lease_s, last = 1.0, 8
    pulling = tmp_path / "pulling"
    with ckptd.Publisher(WHOLE, tmp_path / "at", lease_s=lease_s) as publisher:
        assert publisher.publish(1, STATE).wait(PATIENCE_S)
        worker = Program("-c", WORKER, tmp_path / "at", pulling, str(last))
        until(pulling.exists, "the worker pulls")
        with stopped(worker.pid):
            begun = time.monotonic()
            for step in range(2, last + 1):
                # The other slot is filled again and again, and after the lease this one.
                publication = publisher.publish(step, {"model": whole(step)})
                assert publication.wait(PATIENCE_S)
                time.sleep(2 * lease_s / last)
            assert time.monotonic() - begun > lease_s
            assert len(slots_of(publisher.server_pid)) <= 2  # what it held is its own
        out, _ = worker.communicate(timeout=60)
    steps = ast.literal_eval(out)
    assert steps[-1] == last
    assert set(steps) <= {1, last}


def test_the_lease_of_a_pull_that_gets_on_is_renewed(
    tmp_path: Path, subscriber: ckptd.Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that of one that does not is not: see `test_versions`."""
    subscriber._far, subscriber._answer_s = True, BUSY_S
    monkeypatch.setattr(pull, "_MESSAGE_BYTES", 1 << 10)
    read, lease_s, calls = ServerLink.read, 0.5, 0
    with ckptd.Publisher(WHOLE, tmp_path / "at", lease_s=lease_s) as publisher:
        assert publisher.publish(1, STATE).wait(PATIENCE_S)

        def slow(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            time.sleep(0.1)
            if calls % 4 == 0:  # the trainer goes on: each time a slot is filled
                publication = publisher.publish(1 + calls, STATE)
                assert publication.skipped or publication.wait(PATIENCE_S)
            return read(*args)

        monkeypatch.setattr(ServerLink, "read", slow)
        begun = time.monotonic()
        report = subscriber.update()
        assert report is not None
        assert time.monotonic() - begun > 2 * lease_s
        assert report.version.step == 1
    assert holds(subscriber, 1)
