"""``ckptd slurm`` in batch jobs of a real Slurm: faults cost ranks, not the allocation."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.plugins.slurm.cluster import Cluster, slurm
from tests.plugins.slurm.job import Job

__all__ = ["slurm"]

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.long,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.timeout(900),
]

ALL = {"n1", "n2", "n3", "n4"}


@pytest.fixture
def job(slurm: Cluster, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(steps: int, *options: str, every: int = 10) -> Job:
        jobs.append(Job(slurm, tmp_path, steps, *options, every=every))
        return jobs[-1]

    slurm.idle()
    yield make
    for one in jobs:
        slurm.cancel(one.number)


def test_a_job_that_finishes_is_complete(slurm: Cluster, job: Callable[..., Job]) -> None:
    one = job(30)
    one.until(lambda: slurm.state(one.number) == "CD", "the job is complete")
    _, pids, step = one.newest()
    assert set(pids) == ALL
    assert step == 30
    told = next(line for line in one.out().splitlines() if '"requeued"' in line)
    assert json.loads(told)["kind"] == "done"
    secret = one.folder / f"ckptd-{one.number}" / "secret"
    assert secret.stat().st_mode & 0o077 == 0


def test_ranks_launchers_and_nodes_are_lost(slurm: Cluster, job: Callable[..., Job]) -> None:
    one = job(100_000, "--set", "grow_s=1")
    first = one.until_on(ALL)
    os.kill(one.newest()[1]["n3"], signal.SIGKILL)
    second = one.until_on(ALL, after=first)
    step = one.newest()[2]
    old = one.step_of("n2")
    slurm.run("scancel", "--signal=KILL", old)
    # A launcher takes its place in the allocation, and the job grows again.
    one.until(lambda: one.step_of("n2") not in ("", old), "another launcher on n2")
    third = one.until_on(ALL, after=second)
    assert one.newest()[2] > step
    slurm.lose("n4")
    try:
        # Long before Slurm takes it for dead.
        one.until_on(ALL - {"n4"}, after=third)
        assert slurm.state(one.number) == "R"
    finally:
        slurm.revive("n4")


def test_a_rank_that_is_stopped_is_found(slurm: Cluster, job: Callable[..., Job]) -> None:
    one = job(100_000)
    first = one.until_on(ALL, more=20)
    one.until(lambda: "is watched: http" in one.out(), "the job is watched")
    os.kill(one.newest()[1]["n3"], signal.SIGSTOP)
    one.until_on(ALL - {"n3"}, after=first)
    assert "non-communication hang" in one.out()


def test_a_drained_node_is_left_and_usr1_requeues(slurm: Cluster, job: Callable[..., Job]) -> None:
    one = job(100_000, every=100_000)  # nothing is saved otherwise
    first = one.until_on(ALL)
    slurm.run("scontrol", "update", "NodeName=n4", "State=DRAIN", "Reason=cable")
    try:
        one.until_on(ALL - {"n4"}, after=first)
        assert "n4 will be taken away" in one.out()
    finally:
        slurm.run("scontrol", "update", "NodeName=n4", "State=RESUME")
    slurm.run("scancel", "--batch", "--signal=USR1", one.number)
    one.until(lambda: slurm.state(one.number) == "PD", "the job is requeued")
    generation, _, step = one.newest()
    # Slurm would wait for two minutes.
    slurm.run("scontrol", "update", f"JobId={one.number}", "StartTime=now")
    one.until_on(ALL, after=generation)
    again = [line for line in one.lines() if line["batch"] == "1"]
    assert 1 < min(line["step"] for line in again) <= step + 1, "it goes on from what USR1 saved"
