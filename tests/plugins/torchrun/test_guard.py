"""No worker outlives its agent or its lease."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ckptd.elastic.lease import LeaseFile
from ckptd_torchrun import guard
from ckptd_torchrun.guard import TOKEN_VARIABLE, children_of, marked
from tests.processes import PATIENCE_S, until

# An agent: its guard, then one worker in a session of its own, which has a child.
_AGENT = """
import os, subprocess, sys, time
guard, token, lease = sys.argv[1:]
subprocess.Popen([sys.executable, "-I", "-S", guard, str(os.getpid()), token, lease],
                 stdin=subprocess.DEVNULL, start_new_session=True)
os.environ["CKPTD_TORCHRUN"] = token
code = "import subprocess, sys; subprocess.run(['sleep', '600'])"
worker = subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
print(worker.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def lease(tmp_path: Path) -> LeaseFile:
    folder = tmp_path / "t-1"
    folder.mkdir()
    return LeaseFile(folder / "lease")


def _agent(lease: LeaseFile, token: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    agent = subprocess.Popen(
        [sys.executable, "-S", "-c", _AGENT, str(guard.__file__), token, str(lease.path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert agent.stdout is not None
    worker = psutil.Process(int(agent.stdout.readline()))
    agent.stdout.close()
    until(lambda: len(marked(token)) == 2)
    return agent, worker


def test_workers_die_with_their_agent_and_its_files_go(lease: LeaseFile) -> None:
    token = os.urandom(8).hex()
    agent, worker = _agent(lease, token)
    assert worker.pid in children_of(agent.pid)
    agent.kill()
    agent.wait(PATIENCE_S)
    until(lambda: not marked(token))
    until(lambda: not lease.path.exists())
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_an_agent_that_died_before_its_guard_ran(lease: LeaseFile) -> None:
    token = os.urandom(8).hex()
    lease.extend(time.monotonic() + 600.0)
    agent = subprocess.Popen(["true"])
    agent.wait(PATIENCE_S)
    worker = subprocess.Popen(
        ["sleep", "600"], env={**os.environ, TOKEN_VARIABLE: token}, start_new_session=True
    )
    command = [sys.executable, "-I", "-S", str(guard.__file__)]
    command += [str(agent.pid), token, str(lease.path)]
    try:
        assert subprocess.run(command, timeout=PATIENCE_S).returncode == 0
        assert worker.wait(PATIENCE_S) == -signal.SIGKILL
    finally:
        worker.kill()
    assert not lease.path.exists()


def test_workers_die_when_their_lease_is_over_and_not_before(lease: LeaseFile) -> None:
    token = os.urandom(8).hex()
    lease.extend(time.monotonic() + 600.0)
    agent, worker = _agent(lease, token)
    try:
        # The agent is stopped: it sees nothing of it.
        psutil.Process(agent.pid).suspend()
        assert worker.is_running()
        lease.extend(time.monotonic() - 0.1)
        until(lambda: worker.status() == psutil.STATUS_ZOMBIE)
        assert agent.poll() is None
    finally:
        agent.kill()
        agent.wait(PATIENCE_S)
    until(lambda: not marked(token))


def test_what_must_outlive_a_trainer_is_not_marked(tmp_path: Path) -> None:
    token = os.urandom(8).hex()
    package = tmp_path / "ckptd"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "agent.py").write_text("input()")
    environ = os.environ | {TOKEN_VARIABLE: token}
    pipe = {"stdin": subprocess.PIPE, "env": environ, "cwd": tmp_path}
    plain = subprocess.Popen([sys.executable, "-c", "input()"], **pipe)  # type: ignore[call-overload]
    keeper = subprocess.Popen([sys.executable, "-m", "ckptd.checkpoint.agent"], **pipe)  # type: ignore[call-overload]
    try:
        until(lambda: plain.pid in marked(token))
        assert marked(token) == {plain.pid}
    finally:
        for process in (plain, keeper):
            process.communicate(b"\n", timeout=PATIENCE_S)
