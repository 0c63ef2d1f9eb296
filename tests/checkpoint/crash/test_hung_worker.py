"""A worker that hangs (SIGSTOP) or dies: every wait ends, and the next save has a new worker."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import ckptd.checkpoint.save.client as client_module
from ckptd.base.runtime.ranks import LocalBoard
from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.save.client import WriterClient
from ckptd.checkpoint.save.handle import SaveTracker
from ckptd.errors import CkptdError, ProcessError, SaveError
from ckptd.store import StoreSpec
from ckptd.store.base import FaultRule, FaultSpec
from tests.checkpoint.save.saving import Job, values
from tests.processes import PATIENCE_S, stop, wait_for_end


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "root")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "GRACE_S", 1.0)


def finish(act: Callable[[], object]) -> CkptdError:
    """Run what might hang in a thread; return the error that it ended with."""
    errors: list[CkptdError] = []

    def run() -> None:
        try:
            act()
        except CkptdError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "it hangs"
    assert errors
    return errors[0]


def a_slow_write(spec: StoreSpec) -> StoreSpec:
    """Time to stop the worker before it has written anything."""
    return spec.wrapped(FaultSpec((FaultRule("delay", op="writer", delay_s=30.0),)))


def replace_worker(job: Job, root: str) -> None:
    """Do what a checkpointer does at the next save."""
    job.client.close(1.0)
    job.client = WriterClient(StoreSpec(root), LocalBoard())


def test_a_stopped_worker_fails_its_save_and_is_replaced(root: str) -> None:
    job = Job(a_slow_write(StoreSpec(root)))
    handle = job.save(1, values(1), timeout_s=0.5)
    worker = job.client.pid
    stop(worker)
    # Without a time-out of its own: the save's deadline must end it.
    error = finish(handle.durable)
    assert isinstance(error, SaveError)
    assert finish(lambda: job.client.acquire(10, 60.0)) is job.client.dead
    assert isinstance(job.client.dead, ProcessError)
    assert "does not answer" in job.client.dead.message
    wait_for_end(worker)
    assert job.catalogue.latest() is None
    replace_worker(job, root)
    job.save(1, values(1), attempt="0002").durable(PATIENCE_S)
    assert job.catalogue.latest() == CommitName(1, job.generation)
    job.close()


def test_closing_ends_a_stopped_worker(root: str) -> None:
    job = Job(a_slow_write(StoreSpec(root)))
    handle = job.save(1, values(1))
    stop(job.client.pid)
    job.client.close(1.0)
    assert not Path(f"/proc/{job.client.pid}").exists()
    assert isinstance(finish(handle.durable), ProcessError)


def test_a_worker_that_never_starts(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "START_S", 1.0)
    popen = subprocess.Popen

    def stopped(command: list[str], **rest: Any) -> subprocess.Popen[bytes]:
        """Start a process that stops before it runs the command."""
        return popen(["/bin/sh", "-c", 'kill -STOP $$; exec "$@"', "sh", *command], **rest)

    monkeypatch.setattr(subprocess, "Popen", stopped)
    client = WriterClient(StoreSpec(root), LocalBoard())
    handle = SaveTracker(1, 1, "0001", 10)
    job = client_module._Job(handle, "k", *cast("Any", (None, None, None)))
    client._jobs[1] = job
    assert "does not answer" in finish(handle.durable).message
    client.close(5.0)
    assert not Path(f"/proc/{client.pid}").exists()


def test_a_worker_that_still_shows_life_is_left_alone(root: str) -> None:
    """Too slow is not hung: the save fails, its bytes arrive, and the same worker goes on."""
    slow = FaultRule("delay", op="put", key="*/parts/*", delay_s=4.0)
    job = Job(StoreSpec(root).wrapped(FaultSpec((slow,))))
    client_module.GRACE_S = 20.0
    handle = job.save(1, values(1), timeout_s=0.5)
    job.client._jobs[1].deadline = 0.0
    assert "the save did not finish in time" in finish(handle.durable).message
    job.save(2, values(2), attempt="0002").durable(PATIENCE_S)
    assert job.client.dead is None
    job.close()


def test_a_killed_worker_ends_every_wait(root: str) -> None:
    """No time-out given anywhere; the staging buffer, the handle and close() all let go.

    One that is killed with the same save each time it is handed over: the third is the last.
    """
    job = Job(a_slow_write(StoreSpec(root)))
    handle = job.save(1, values(1))
    while not handle.done:
        life = job.client.life
        os.kill(job.client.pid, signal.SIGKILL)
        while job.client.life == life and not handle.done:
            time.sleep(0.01)
    assert isinstance(finish(handle.durable), ProcessError)
    job.client.acquire(10, 1e6)
    job.client.close(1e6)
    replace_worker(job, root)
    job.save(2, values(2)).durable(PATIENCE_S)
    job.close()


def test_an_error_in_the_listening_thread_reaches_the_handle(root: str) -> None:
    class Broken(LocalBoard):
        def peek(self, key: str) -> bytes | None:
            raise ZeroDivisionError

    job = Job(a_slow_write(StoreSpec(root)), board=Broken(0, 2))
    error = finish(job.save(1, values(1)).durable)
    assert isinstance(error, ProcessError)
    assert "ZeroDivisionError" in (error.found or "")
    job.client.close(5.0)
