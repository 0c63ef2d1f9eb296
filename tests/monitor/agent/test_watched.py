"""Watching within a node's agent, however that was started, and in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.base.runtime.agentlink import AgentPlace, connect_agent
from ckptd.base.runtime.host import host_id, node_name
from tests.cli.running import COMMAND
from tests.monitor.agent.daemons import SECRET, daemon
from tests.monitor.agent.writers import writers
from tests.processes import PATIENCE_S, agents_in, until


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CKPTD_SECRET", SECRET.decode())
    monkeypatch.setenv("CKPTD_RINGS", str(tmp_path / "rings"))


def test_an_agent_that_is_run_watches(tmp_path: Path) -> None:
    with daemon() as there, writers(tmp_path / "rings", 2, job="mine") as ranks:
        command = [*COMMAND, "agent", "run", "--job", "mine", "--node", "n", "--watch", there.url]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            until(lambda: len(there.rows()) == 2, "two ranks")
            assert there.sheets[-1].job == "mine"
            assert there.sheets[-1].nodes == ("n",)
            assert there.sheets[-1].agents[0].address.startswith("127.0.0.1:")
            os.kill(ranks[0].pid, signal.SIGKILL)
            until(lambda: not there.rows()[0]["alive"], "a death")
            process.terminate()
            assert process.wait(PATIENCE_S) == 0


def test_ranks_of_other_jobs_and_nodes_are_left_alone(tmp_path: Path) -> None:
    with daemon() as there, writers(tmp_path / "rings", 2, job="other"):
        command = [*COMMAND, "agent", "run", "--job", "mine", "--node", "n", "--watch", there.url]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            until(lambda: len(there.sheets) > 3, "sheets")
            assert there.rows() == {}
            process.terminate()
            assert process.wait(PATIENCE_S) == 0


def test_an_agent_that_a_checkpointer_starts_watches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemon() as there:
        monkeypatch.setenv("CKPTD_DAEMON", there.url)
        sock = connect_agent(AgentPlace("mine", host_id()))
        try:
            until(lambda: there.sheets, "a sheet")
            assert there.sheets[0].job == "mine"
            assert there.sheets[0].nodes == (node_name(),)
        finally:
            sock.close()
            for pid in agents_in(Path(os.environ["CKPTD_RUN_DIR"])):
                os.kill(pid, signal.SIGTERM)


def test_a_watcher_ends_with_its_standard_input() -> None:
    with daemon() as there:
        command = [sys.executable, "-m", "ckptd.monitor.agent.watched", "--job", "j", "--node", "n"]
        with subprocess.Popen(
            [*command, "--daemon", there.url, "--floor", "train=3"], stdin=subprocess.PIPE
        ) as process:
            until(lambda: there.sheets, "a sheet")
            assert there.sheets[0].nodes == ("n",)
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    "words", [["--daemon", "nonsense"], ["--daemon", "http://a:1", "--floor", "train=x"]]
)
def test_what_is_wrong_is_said(words: list[str]) -> None:
    command = [sys.executable, "-m", "ckptd.monitor.agent.watched", "--job", "j", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1
    assert "wanted" in done.stderr
