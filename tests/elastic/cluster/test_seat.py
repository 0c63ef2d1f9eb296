"""A node that is cut off costs what a lost one costs: nodes in namespaces, a log that all reach."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.running import COMMAND
from tests.monitor.cluster.namespaces import Network, needs_namespaces
from tests.processes import until

pytestmark = [pytest.mark.dist, pytest.mark.long, pytest.mark.timeout(600)]

DEADLINE_S = 150.0
TRAIN = """\
import os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.environ['CKPTD_NODE']} {dist.get_world_size()}\\n")
    time.sleep(0.1)
"""


class Job:
    """A launcher a node; the controller is on the first."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        script = folder / "train.py"
        script.write_text(TRAIN)
        self.log, self.steps_file = folder / "log", folder / "steps"
        self.steps_file.touch()
        self.launchers: list[subprocess.Popen[str]] = []
        name, secret = f"seat-{secrets.token_hex(3)}", secrets.token_hex(16)
        for node in range(network.count):
            run = Path(f"{os.environ['CKPTD_RUN_DIR']}-{node}")
            run.mkdir(mode=0o700)
            env = {"CKPTD_RUN_DIR": str(run), "CKPTD_SECRET": secret, "GLOO_SOCKET_IFNAME": "eth0"}
            flags = ["--job", name, "--node", f"n{node}", "--nnodes", f"1:{network.count}"]
            flags += ["--rdzv-endpoint", f"{network.address(0)}:29400", "--log", str(self.log)]
            flags += ["--no-watch", "--set", "grow_s=2", "--set", "gather_s=60"]
            with (folder / f"n{node}.out").open("wb") as out:
                command = [*COMMAND, "run", *flags, str(script), str(self.steps_file)]
                self.launchers.append(network.start(node, command, env, stdout=out, stderr=out))
            if node == 0:
                self.until(lambda: self.seats() == 1)

    def seats(self) -> int:
        return len(list((self.log / "controller").glob("0*.json")))

    def rows(self) -> list[str]:
        return self.steps_file.read_text().splitlines()

    def trains(self, nodes: set[str]) -> None:
        """Wait until a step is made, from now on, by exactly these nodes."""
        before = len(self.rows())
        world = str(len(nodes))

        def found() -> bool:
            new = [row.split() for row in self.rows()[before:]]
            return {node for node, size in new if size == world} == nodes

        self.until(found)

    def until(self, what: Callable[[], bool]) -> None:
        until(what, self.words)

    def words(self) -> str:
        files = sorted(self.folder.glob("n*.out"))
        return "\n".join(f"{f.stem}: {f.read_text(errors='replace')[-3000:]}" for f in files)


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    needs_namespaces()
    assert sys.executable
    with Network(getattr(request, "param", 3)) as network:
        job = Job(network, tmp_path)
        job.trains({f"n{node}" for node in range(network.count)})
        yield job


def test_a_lone_node_that_is_cut_off_takes_no_seat(job: Job) -> None:
    seats = job.seats()
    job.network.cut(2)
    job.trains({"n0", "n1"})
    end = time.monotonic() + 20.0
    while time.monotonic() < end:
        assert job.seats() == seats, job.words()
        time.sleep(0.2)
    job.trains({"n0", "n1"})


def test_a_controller_that_is_cut_off_from_most_nodes_is_followed_once(job: Job) -> None:
    seats = job.seats()
    job.network.cut(0)
    job.trains({"n1", "n2"})
    taken = job.seats()
    assert taken > seats
    end = time.monotonic() + 20.0
    while time.monotonic() < end:
        assert job.seats() == taken, job.words()
        time.sleep(0.2)
    job.trains({"n1", "n2"})


@pytest.mark.parametrize("job", [4], indirect=True)
def test_a_stand_in_that_is_cut_off_from_the_others_gives_way_to_them(job: Job) -> None:
    """Node n1 is the first to stand in for the controller that dies with n0."""
    seats, late = job.seats(), job.launchers[2:]
    for launcher in late:
        launcher.send_signal(signal.SIGSTOP)
    job.network.cut(1)
    job.network.kill(0)
    job.until(lambda: job.seats() > seats)
    for launcher in late:
        launcher.send_signal(signal.SIGCONT)
    job.trains({"n2", "n3"})
    end = time.monotonic() + 20.0
    while time.monotonic() < end:
        assert "n1 1" not in job.rows(), job.words()
        time.sleep(0.2)
    job.network.mend(1)
    job.trains({"n1", "n2", "n3"})
    assert "n1 1" not in job.rows(), job.words()
