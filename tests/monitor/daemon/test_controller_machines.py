"""A job on several machines is watched as one: launchers that share no run folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from ckptd.elastic.messages import Status
from ckptd.elastic.operator import OperatorLink
from ckptd.elastic.places import open_places
from ckptd.errors import CkptdError
from ckptd.monitor.daemon.client import DaemonClient
from tests.cli.running import COMMAND
from tests.monitor.daemon.test_controller_run import SCRIPT
from tests.processes import PATIENCE_S, free_port, stop, until

JOB, SECRET = "machines", "0123456789abcdef0123456789abcdef"


class Machine:
    """A launcher that finds nothing of the others but by addresses and the log."""

    def __init__(self, job: Folder, name: str, address: str, run: str) -> None:
        self.name, self.lines = name, list[str]()
        words = ["run", "--job", JOB, "--node", name, "--local-addr", address, "--nnodes", "1:2"]
        words += ["--rdzv-endpoint", job.endpoint, "--log", job.log, "--set", "steady_s=2"]
        words += [str(job.path / "train.py"), str(job.path / "end")]
        environ = {**os.environ, "CKPTD_RUN_DIR": run, "CKPTD_SECRET": SECRET}
        self.process = subprocess.Popen(
            [*COMMAND, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environ,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def pid(self, generation: int) -> int | None:
        """The rank of a generation that runs here."""
        found = [re.search(r"begun (\d+) (\d+) (\d+)", line) for line in self.lines]
        return next((int(m[2]) for m in found if m and int(m[3]) == generation), None)

    def daemon(self) -> DaemonClient | None:
        """The daemon that this launcher has started."""
        found = [re.search(r"(http://[^/]+)/\?token=(\w+)", line) for line in self.lines]
        return next((DaemonClient(m[1], m[2]) for m in found if m), None)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Folder:
    """What the machines share."""

    def __init__(self, path: Path) -> None:
        (path / "train.py").write_text(SCRIPT)
        self.path, self.log = path, str(path / "log")
        self.endpoint = f"127.0.0.1:{free_port()}"

    def seat(self) -> str:
        newest = open_places(JOB, self.log).leader.newest()
        return newest.address if newest is not None else ""


@contextmanager
def machines(folder: Folder, stack: ExitStack) -> Iterator[dict[str, Machine]]:
    """Three machines, the first of which is the endpoint's, for a job that needs two."""
    here: dict[str, Machine] = {}
    try:
        for number, name in enumerate("abc", 1):
            run = stack.enter_context(TemporaryDirectory())  # short enough for sockets
            here[name] = Machine(folder, name, f"127.0.0.{number}", run)
            stack.callback(here[name].close)
            until(folder.seat, "no controller")
        yield here
    finally:
        for one in here.values():
            print(f"--- {one.name}", *one.lines, sep="\n")


def watched(client: DaemonClient, ranks: int) -> bool:
    """Whether all ranks are watched by this daemon and have made some steps."""
    try:
        told = client.get("/job")
    except CkptdError:
        return False
    step = told["step"]
    return told["ranks_reporting"] == ranks and step is not None and (step["min"] or 0) > 10


def members(status: Status) -> set[str]:
    return {row.name for row in status.nodes if row.running == status.generation}


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.timeout(600)
def test_a_stopped_rank_of_another_machine_is_found_and_the_daemon_is_replaced(
    tmp_path: Path,
) -> None:
    folder = Folder(tmp_path)
    with ExitStack() as stack, machines(folder, stack) as here:
        operator = OperatorLink(folder.seat, JOB, SECRET.encode(), timeout_s=60.0)
        stack.callback(operator.close)
        client: DaemonClient = until(here["a"].daemon, "no daemon")
        assert here["b"].daemon() is here["c"].daemon() is None
        until(lambda: all(row.up for row in operator.status().nodes), "not all are there")
        until(lambda: watched(client, 2), "not all ranks are watched")
        status = operator.status()
        assert status.daemon == client.url
        victim = next(name for name in sorted(members(status)) if name != "a")
        pid = here[victim].pid(status.generation)
        assert pid is not None
        stop(pid)
        after = until(lambda: replaced(operator, status.generation), "no other generation")
        assert victim not in members(after)
        assert len(members(after)) == 2
        incidents: list[dict[str, Any]] = client.get("/incidents")["incidents"]
        assert [i["kind"] for i in incidents] == ["non-communication hang"]
        assert incidents[0]["response"] == f"exclude {victim} and restart"

        # The machine with the controller and the daemon is lost.
        until(lambda: watched(client, 2), "the next generation is not watched")
        here["a"].process.send_signal(signal.SIGKILL)
        now = until(lambda: replaced(operator, after.generation), "the job does not go on")
        until(lambda: moved(operator, here, client.url), "the watchers have not moved")
        (tmp_path / "end").touch()
        assert here[min(members(now))].process.wait(120) == 0


def daemon_at(here: dict[str, Machine], url: str) -> DaemonClient | None:
    return next((d for one in here.values() if (d := one.daemon()) and d.url == url), None)


def replaced(operator: OperatorLink, generation: int) -> Status | None:
    """Return the status once a later generation runs."""
    try:
        status = operator.status()
    except CkptdError:
        return None
    running = status.state == "running" and status.generation > generation
    return status if running and members(status) else None


def moved(operator: OperatorLink, here: dict[str, Machine], url: str) -> bool:
    """Whether all ranks are watched by another daemon than that at `url`."""
    try:
        status = operator.status()
    except CkptdError:
        return False
    other = daemon_at(here, status.daemon) if status.daemon != url else None
    return other is not None and watched(other, status.world)
