"""Recoveries inside a Slurm allocation: restarted workers, a lost node, restarted launchers.

A real Slurm of four nodes on this machine (``scripts/slurm``, as root), one batch job with a rank
on each node. Cases take turns; measured is from the fault until a later generation has made its
first step. ``worker`` (level 1): a rank is killed. ``launcher`` (level 1): a launcher's step is
killed, and the others go on without it. ``relaunch`` (level 2): a rank ends before it has made a
step, the second time in a row, so that all launchers are killed and started as new steps. ``step``:
``srun`` of ``true`` in the allocation, for comparison.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import msgspec
from common import arguments, median, publish, table

from ckptd.elastic.operator import OperatorLink
from ckptd.elastic.places import open_places
from tests.plugins.slurm.cluster import Cluster
from tests.plugins.slurm.job import Job

ROOT = Path(__file__).parent.parent
ALL = {"n1", "n2", "n3", "n4"}
_PARTS = ("detect", "fence", "plan", "spawn", "import", "init", "load", "first_step", "again")


def main() -> None:
    options = arguments(__doc__)
    with tempfile.TemporaryDirectory(prefix="ckslurm") as parent:
        folder = Path(parent) / "c"
        subprocess.run([ROOT / "scripts/slurm", "start", folder], check=True, timeout=300)
        try:
            data = measure(Cluster(folder), Path(options.dir), options.reps)
        finally:
            subprocess.run([ROOT / "scripts/slurm", "stop", folder], check=True, timeout=60)
    tell(data, f"python bench/slurm.py --reps {options.reps}")


def measure(cluster: Cluster, folder: Path, reps: int) -> dict[str, list[dict[str, Any]]]:
    job = Job(cluster, folder, 10_000_000, "--set", "grow_s=1", "--set", "flaps=1000")
    cases: dict[str, Callable[[Job], dict[str, Any]]] = {
        "worker": worker,
        "launcher": launcher,
        "relaunch": relaunch,
        "step": step,
    }
    data: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    try:
        generation = job.until_on(ALL)
        for _ in range(reps):
            for name, case in cases.items():
                load = os.getloadavg()[0]
                data[name].append({**case(job), "others": load})
                # A launcher less: the job grows again, which is not measured.
                job.until(lambda: set(job.newest()[1]) == ALL, "all nodes train again")
                generation = job.until_on(ALL, after=generation - 1, more=20)
    finally:
        cluster.cancel(job.number)
    return data


def worker(job: Job) -> dict[str, Any]:
    before, pids, _ = job.newest()
    began = time.time()
    os.kill(pids["n3"], signal.SIGKILL)
    return recovered(job, began, before)


def launcher(job: Job) -> dict[str, Any]:
    before = job.newest()[0]
    step_id = job.step_of("n3")
    began = time.time()
    job.cluster.run("scancel", "--signal=KILL", step_id)
    return recovered(job, began, before)


def relaunch(job: Job) -> dict[str, Any]:
    before, pids, _ = job.newest()
    (job.folder / "poison").touch()
    os.kill(pids["n3"], signal.SIGKILL)
    told = job.folder / "poisoned"
    job.until(lambda: told.exists() and bool(told.read_text()), "the second rank ends")
    began = float(told.read_text())
    told.unlink()
    return recovered(job, began, before)


def step(job: Job) -> dict[str, Any]:
    """Time a step of one task in the same allocation, from outside of it."""
    began = time.time()
    argv = [
        "srun",
        f"--jobid={job.number}",
        "--overlap",
        "--mem=0",
        "--quiet",
        "-N1",
        "-n1",
        "true",
    ]
    job.cluster.run(*argv)
    return {"seconds": time.time() - began}


def recovered(job: Job, began: float, before: int) -> dict[str, Any]:
    def first() -> float:
        later = [x["at"] for x in job.lines() if x["generation"] > before and x["at"] > began]
        return min(later, default=0.0)

    job.until(lambda: first() > began, "a later generation makes a step")
    seconds, told = first() - began, {}

    def known() -> bool:
        told.update(status(job))
        return int(told.get("to", 0)) > before

    job.until(known, "the controller tells of it")
    parts = {part: round(float(told.get(part) or 0.0), 3) for part in _PARTS}
    return {"seconds": seconds, "level": told.get("level"), **parts}


def status(job: Job) -> dict[str, Any]:
    """Return the newest recovery, as the controller tells it."""
    name, folder = f"slurm-{job.number}", job.folder / f"ckptd-{job.number}"
    seat = open_places(name, str(folder / "log")).leader

    def address() -> str:
        newest = seat.newest()
        return newest.address if newest is not None else ""

    link = OperatorLink(address, name, (folder / "secret").read_text().encode())
    try:
        recoveries = link.status().recoveries
    finally:
        link.close()
    found: dict[str, Any] = msgspec.to_builtins(recoveries[-1]) if recoveries else {}
    return found


def tell(data: dict[str, list[dict[str, Any]]], command: str) -> None:
    rows = []
    for name, samples in data.items():
        seconds = sorted(s["seconds"] for s in samples)
        parts = [median(samples, p) if p in samples[0] else float("nan") for p in _PARTS]
        level = samples[0].get("level", "–")
        rows.append([name, level, len(seconds), median(samples, "seconds")])
        rows[-1] += [seconds[-1], median(samples, "others"), *parts]
    text = table(["case", "level", "runs", "median s", "worst s", "load", *_PARTS], rows)
    publish("slurm", command, text, data)


if __name__ == "__main__":
    main()
