"""No worker outlives its agent or its lease."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from ckptd.base.runtime.agentlink import AgentPlace, connect_agent, reach
from ckptd.checkpoint.save.messages import AskEnd, visit
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


@pytest.mark.forks
def test_what_must_outlive_a_trainer_is_not_marked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The node's agent, the watcher and a writing process, started as the product starts them."""
    token = os.urandom(8).hex()
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    ours, theirs = socket.socketpair()
    with ours, theirs, ExitStack() as stack:
        place = AgentPlace("guarded", "n", str(tmp_path))
        stack.enter_context(connect_agent(place))
        stack.callback(lambda: visit(_reached(place), AskEnd(now=True)))
        for words in (
            ["ckptd.monitor.agent.watched", "--job", "j", "--daemon", "http://127.0.0.1:1"],
            ["ckptd.checkpoint.save.writer", str(theirs.fileno())],
        ):
            keeper = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
            )
            stack.callback(keeper.communicate, timeout=PATIENCE_S)
            stack.callback(keeper.kill)
            until(lambda pid=keeper.pid: _imports_ckptd(pid))
        plain = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        stack.callback(plain.communicate, b"\n", timeout=PATIENCE_S)
        until(lambda: plain.pid in marked(token))
        kept = {p.pid for p in psutil.Process().children() if token in p.environ().values()}
        assert len(kept) == 4
        assert marked(token) == {plain.pid}


def test_the_guard_names_modules_that_are_there() -> None:
    for words in guard._OURS:
        flag, _, module = words.decode().partition("\0")
        assert flag == "-m"
        spec = importlib.util.find_spec(module)
        assert spec is not None
        if spec.submodule_search_locations is not None:
            assert importlib.util.find_spec(f"{module}.__main__") is not None


def _reached(place: AgentPlace) -> socket.socket:
    found = reach(place.socket)
    assert found is not None
    return found


def _imports_ckptd(pid: int) -> bool:
    """Tell whether a process has come as far as its program: native code of msgspec is mapped."""
    with open(f"/proc/{pid}/maps") as file:
        return "msgspec" in file.read()
