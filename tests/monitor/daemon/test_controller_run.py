"""Real ranks under ``ckptd run``: what is told of one that stops, dies, or is ended on purpose."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckptd.errors import CkptdError
from ckptd.monitor.daemon.client import DaemonClient
from tests.processes import PATIENCE_S, stop, until

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
line = f"begun {dist.get_rank()} {os.getpid()} {os.environ['CKPTD_GENERATION']}\\n"
os.write(1, line.encode())  # whole, whoever else writes
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
going = torch.ones(1)
while going:
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
    going.fill_(float(dist.get_rank() > 0 or not os.path.exists(sys.argv[1])))
    dist.broadcast(going, 0)
del model  # before its group: see docs/guide/in-process.md
dist.destroy_process_group()
"""


class Job:
    """A job of three ranks on one node; `script` gets the path of a file that asks it to end."""

    def __init__(self, folder: Path, script: str = SCRIPT, *more: str) -> None:
        (folder / "train.py").write_text(script)
        self.end = folder / "end"
        self.lines: list[str] = []
        main = "from ckptd.cli.main import main; main()"
        words = ["run", "--job", "real", "--nproc-per-node", "3", "--set", "steady_s=2", *more]
        self.process = subprocess.Popen(
            [sys.executable, "-c", main, *words, str(folder / "train.py"), str(self.end)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def pids(self, generation: int) -> dict[int, int]:
        """Processes by rank."""
        found = [re.fullmatch(r"begun (\d+) (\d+) (\d+)", line) for line in self.lines]
        return {int(m[1]): int(m[2]) for m in found if m and int(m[3]) == generation}

    def newest(self) -> int:
        found = [re.fullmatch(r"begun \d+ \d+ (\d+)", line) for line in self.lines]
        return max((int(m[1]) for m in found if m), default=0)

    def client(self) -> DaemonClient | None:
        assert self.process.poll() is None, "\n".join(self.lines)
        found = [re.search(r"(http://[^/]+)/\?token=(\w+)", line) for line in self.lines]
        return next((DaemonClient(m[1], m[2]) for m in found if m), None)

    def close(self) -> None:
        self.process.kill()
        self._reader.join(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def job(folder: Path, script: str = SCRIPT, *more: str) -> Iterator[Job]:
    one = Job(folder, script, *more)
    try:
        yield one
    finally:
        one.close()
        print("\n".join(one.lines))


def steps(client: DaemonClient, generation: int) -> bool:
    """Whether all ranks of a generation are watched and have made some steps."""
    try:
        told = client.get("/job")
    except CkptdError:
        return False
    step = told["step"]
    here = told["generation"] == generation and told["ranks_reporting"] == 3
    return here and step is not None and (step["min"] or 0) > 10


def recoveries(client: DaemonClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get("/elastic")["status"]["recoveries"]
    return found


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.parametrize("fault", ["stop", "kill"])
def test_a_fault_of_a_rank(tmp_path: Path, fault: str) -> None:
    with job(tmp_path) as one:
        client = until(one.client, "nothing is watched")
        until(lambda: len(one.pids(one.newest())) == 3, "it does not begin")
        first = one.newest()
        until(lambda: steps(client, first), "it makes no steps")
        told = client.get("/ranks")
        assert len(told["nodes"]) == 1  # ranks and their watcher have one name for it
        assert client.get("/job")["agents"] == {"up": 1, "silent": 0}
        pid = told["pid"][1]
        assert pid == one.pids(first)[1]
        if fault == "stop":
            stop(pid)
        else:
            os.kill(pid, signal.SIGKILL)
        until(lambda: one.newest() > first and len(one.pids(one.newest())) == 3, "no restart")
        until(lambda: steps(client, one.newest()), "the next generation is not watched")
        incidents = client.get("/incidents")["incidents"]
        told = until(lambda: recoveries(client), "no recovery is told")
        one.end.touch()
        assert one.process.wait(120) == 0, "\n".join(one.lines)
    if fault == "kill":
        assert incidents == []  # the launcher saw it, and the controller says why
        assert "ended with -9" in told[-1]["cause"]
        return
    (incident,) = incidents
    assert incident["kind"] == "non-communication hang"
    assert [s["name"] for s in incident["verdict"]["suspects"]] == ["1"]
    assert (incident["state"], incident["enforced"]) == ("closed", True)
    assert incident["response"] == "restart"  # the only node cannot be left out
    assert incident["id"] in told[-1]["cause"]
    assert told[-1]["detect"] >= incident["latency_s"]
    assert incident["latency_s"] < 20.0  # a third less than the floor of a silence in training
