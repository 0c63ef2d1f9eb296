"""A real Slurm cluster for tests, and a process in an allocation of it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.processes import until

__all__ = ["Cluster", "slurm"]

_SCRIPT = Path(__file__).parents[3] / "scripts" / "slurm"
_NO_CLUSTER = 3
_START_S = 300


class Cluster:
    """One cluster: four nodes on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        self.environ["SLURM_CONF"] = str(folder / "slurm.conf")

    def run(self, *argv: str, timeout_s: float = 60.0) -> str:
        """Run a command of Slurm; return what it printed."""
        done = subprocess.run(
            argv, env=self.environ, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def allocation(self, nodes: int) -> Iterator[dict[str, str]]:
        """Give the environment of a process in an allocation; it is released at the end."""
        with tempfile.NamedTemporaryFile("w", suffix=".sh") as script:
            script.write("#!/bin/sh\nsleep 600\n")
            script.flush()
            job = self.run(
                "sbatch",
                "--parsable",
                f"--nodes={nodes}",
                "--no-kill",
                "--requeue",
                "--output=/dev/null",
                script.name,
            ).strip()
        try:
            until(lambda: self.state(job) == "R", f"job {job} runs")
            nodelist = self.run("squeue", "-h", "-j", job, "-o", "%N").strip()
            yield {**self.environ, "SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": nodelist}
        finally:
            self.cancel(job)

    def state(self, job: str) -> str:
        """Return a job's state in Slurm's letters; empty if it knows none."""
        return self.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%t").strip()

    def steps(self, environ: dict[str, str]) -> list[str]:
        """Return the names of the steps of an allocation's launchers."""
        lines = self.run("squeue", "-h", "-s", "-j", environ["SLURM_JOB_ID"], "-o", "%j").split()
        return [line for line in lines if line.startswith("ckptd-")]

    def cancel(self, job: str) -> None:
        """End a job, and wait until its nodes are free."""
        with suppress(AssertionError):  # it may have ended by itself
            self.run("scancel", "--full", "--signal=KILL", job)
            self.run("scancel", job)
        until(lambda: self.state(job) not in ("R", "CG", "PD"), f"job {job} has ended")

    def lose(self, node: str) -> None:
        """Kill a node: its slurmd, and the managers and processes of its steps, at once."""
        pids = [int((self.folder / "own" / node).read_text())]
        log = str(self.folder / "log" / f"{node}.log")
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (path / "cmdline").read_bytes()
                if words.startswith(b"slurmstepd") and log in _open_files(path):
                    managed = psutil.Process(int(path.name))
                    pids += [managed.pid, *(p.pid for p in managed.children(recursive=True))]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def revive(self, node: str) -> None:
        """Start the slurmd of a node that was lost."""
        subprocess.run([_SCRIPT, "node", self.folder, node], check=True, timeout=60)
        back = ("idle", "allocated", "mixed")
        until(lambda: self.node_state(node) in back, f"{node} is back")

    def node_state(self, node: str) -> str:
        """Return a node's state in Slurm's words."""
        return self.run("sinfo", "-h", "-n", node, "-o", "%T").strip()

    def idle(self) -> None:
        """Wait until all nodes are free."""
        until(lambda: self.run("sinfo", "-h", "-o", "%T").split() == ["idle"], "all are idle")


def _open_files(process: Path) -> set[str]:
    found = set()
    for link in (process / "fd").iterdir():
        with suppress(OSError):
            found.add(os.readlink(link))
    return found


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    """Give a cluster of four nodes, or skip the test and say why."""
    with tempfile.TemporaryDirectory(prefix="ckslurm") as parent:
        folder = Path(parent) / "c"
        started = subprocess.run(
            [_SCRIPT, "start", folder, "--owner", str(os.getpid())],
            capture_output=True,
            text=True,
            timeout=_START_S,
            check=False,
        )
        if started.returncode == _NO_CLUSTER:
            pytest.skip(f"no Slurm: {started.stderr.strip()}")
        assert started.returncode == 0, started.stderr
        try:
            yield Cluster(folder)
        finally:
            subprocess.run([_SCRIPT, "stop", folder], check=True, timeout=60)
