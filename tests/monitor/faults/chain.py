"""The real agents and the real daemon around a job, each a process of its own."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from ckptd.base.net.signing import access_token
from ckptd.monitor.injection import SWITCH
from tests.monitor.faults.case import Case
from tests.monitor.faults.judge import Heard
from tests.processes import free_port, until

__all__ = ["Chain", "nodes_of"]

_CLI = "import sys; from ckptd.cli.main import main; main(sys.argv[1:])"
_START_S = 60.0


def nodes_of(case: Case) -> list[str]:
    """Return the names of the nodes that the ranks of `case` pretend to be on."""
    return [f"node{n}" for n in range(case.nodes)]


class Chain:
    """Watches one job from `folder`; leave the ``with`` block to end its processes.

    Attributes
    ----------
    url
        Of the daemon.
    daemon, agents
        The processes; agents in the order of nodes.
    """

    def __init__(self, case: Case, folder: Path, options: Sequence[str] = ()) -> None:
        self.case, self.folder = case, folder
        self.options = list(options)
        self.secret = secrets.token_hex(24)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._token = access_token(self.secret.encode())
        self._ended: list[subprocess.Popen[bytes]] = []
        for node in nodes_of(case):
            (folder / "rings" / node).mkdir(parents=True, exist_ok=True)
        (folder / "run").mkdir(mode=0o700, exist_ok=True)
        self.daemon = self.start_daemon()
        self.agents = [self.start_agent(n) for n in range(case.nodes)]

    # --- processes ------------------------------------------------------------------------------

    def environment(self, node: int = 0) -> dict[str, str]:
        """Return what a process of node number `node` has in its environment."""
        name = nodes_of(self.case)[node]
        return {
            "CKPTD_SECRET": self.secret,
            "CKPTD_RUN_DIR": str(self.folder / "run"),
            "CKPTD_RINGS": str(self.folder / "rings" / name),
            "CKPTD_NODE": name,
            "CKPTD_JOB": self.case.name,
            SWITCH: "1",
            "OMP_NUM_THREADS": "1",
        }

    def start_daemon(self) -> subprocess.Popen[bytes]:
        """Start the daemon; it has the same port and history each time."""
        command = [sys.executable, "-c", _CLI, "serve", "--job", self.case.name]
        command += ["--port", str(self.port), "--history", str(self.folder / "history.db")]
        command += ["--floor", f"train={self.case.floor}", *self.options]
        return self._start("daemon.log", command, 0)

    def start_agent(self, node: int) -> subprocess.Popen[bytes]:
        """Start the agent of node number `node`."""
        command = [sys.executable, "-m", "ckptd.monitor.agent.watched", "--job", self.case.name]
        command += ["--daemon", self.url, "--floor", f"train={self.case.floor}"]
        return self._start(f"agent-{node}.log", command, node)

    def _start(self, log: str, command: list[str], node: int) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | self.environment(node),
                cwd=Path(__file__).resolve().parents[3],
            )

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Let a process die as by a power cut."""
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()

    def close(self) -> None:
        """End all processes; those that are stopped too."""
        for process in (*self.agents, self.daemon):
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGCONT)
        for process in (*self.agents, self.daemon):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- what the daemon says -------------------------------------------------------------------

    def get(self, path: str) -> bytes:
        """Return the answer to GET of ``/api/v1`` and `path`."""
        request = urllib.request.Request(
            f"{self.url}/api/v1{path}", headers={"Authorization": f"Bearer {self._token}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            told: bytes = answer.read()
        return told

    def json(self, path: str) -> Any:
        return msgspec.json.decode(self.get(path))

    def job(self) -> Mapping[str, Any] | None:
        """Return what the daemon says of the job; None while it does not answer."""
        try:
            told: Mapping[str, Any] = self.json("/job")
        except (OSError, urllib.error.URLError):
            if self.daemon.poll() is not None:
                raise RuntimeError((self.folder / "daemon.log").read_text()[-2000:]) from None
            return None
        return told

    def wait_for_ranks(self, limit_s: float = _START_S) -> None:
        """Return when the daemon hears of all ranks."""
        world = self.case.world

        def complete() -> bool:
            told = self.job()
            return told is not None and told["ranks_reporting"] == world

        until(complete, "all ranks to report", limit_s)

    def heard(self, planted_at: float | None) -> list[Heard]:
        """Return all incidents so far, the oldest first."""
        told = self.json("/incidents?limit=100")["incidents"]
        return [self._heard(one, planted_at) for one in sorted(told, key=lambda i: i["opened_at"])]

    def _heard(self, incident: Mapping[str, Any], planted_at: float | None) -> Heard:
        verdict = incident["verdict"]
        after = None if planted_at is None else incident["opened_at"] - planted_at
        return Heard(
            incident["kind"],
            tuple(f"{s['target']} {s['name']}" for s in verdict["suspects"]),
            tuple(incident.get("members", ())),
            after,
            (verdict["evidence"] or ("",))[0],
        )
