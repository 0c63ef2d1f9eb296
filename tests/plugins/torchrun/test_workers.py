"""Workers are seen to end, stopped and killed behind the back of who has started them."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from ckptd_torchrun.workers import Workers
from tests.processes import PATIENCE_S, until

_SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
_FAIL = [sys.executable, "-S", "-c", "import os; os._exit(3)"]


@pytest.fixture
def ended() -> queue.Queue[int]:
    return queue.Queue()


@pytest.fixture
def workers(ended: queue.Queue[int]) -> Iterator[Workers]:
    found = Workers(ended.put)
    yield found
    found.kill(PATIENCE_S)
    found.close()


def _start(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, start_new_session=True)


def test_the_end_of_a_worker_is_told_and_left_to_its_parent(
    workers: Workers, ended: queue.Queue[int]
) -> None:
    workers.expect()
    first, second = _start(*_SLEEP), _start(*_FAIL)
    assert ended.get(timeout=PATIENCE_S) == 3
    assert workers.complete() == 2
    assert second.wait(PATIENCE_S) == 3
    first.send_signal(signal.SIGTERM)
    assert ended.get(timeout=PATIENCE_S) == -signal.SIGTERM
    assert first.wait(PATIENCE_S) == -signal.SIGTERM
    assert workers.failed


def test_only_what_is_started_when_it_is_expected_is_a_worker(workers: Workers) -> None:
    processes = [_start(*_SLEEP)]
    try:
        workers.expect()
        processes.append(workers.start_other(_SLEEP))
        worker = _start(*_SLEEP)
        processes.append(worker)
        assert workers.complete() == 1
        processes.append(_start(*_SLEEP))
        assert workers.look() == {worker.pid}
        assert workers.kill(PATIENCE_S)
        assert worker.wait(PATIENCE_S) == -signal.SIGKILL
        assert [p.poll() for p in processes if p is not worker] == [None] * 3
    finally:
        for process in processes:
            process.kill()
            process.wait(PATIENCE_S)


def test_frozen_workers_have_not_ended_for_their_parent_and_can_be_killed(
    workers: Workers, ended: queue.Queue[int]
) -> None:
    workers.expect()
    worker = _start(*_SLEEP)
    workers.complete()
    workers.freeze()
    until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED, "they stop")
    assert worker.poll() is None
    assert workers.kill(PATIENCE_S)
    assert ended.get(timeout=PATIENCE_S) == -signal.SIGKILL
    assert worker.wait(PATIENCE_S) == -signal.SIGKILL
