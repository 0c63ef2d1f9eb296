"""Cost of a rank that is lost in the middle of a step, and of being ready for that.

    python bench/midstep.py [--reps N] [--steps N]

Three gloo ranks share 24 micro-batches, each of 0.1 s that is slept and not computed. The third is
killed, with its node's memory, when it has computed two or six of its eight; the others are
interrupted at once, and go on in the same processes with what they have kept, or, as without it,
with the whole step. A launcher of the tests plays the controller. Then the cost of a step without a
fault, in processor time: two ranks train a network of 4 million parameters on 8 micro-batches, with
DDP's own all-reduce, with canonical sums, and with canonical sums that are kept.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import midstep_worker as worker
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))  # scripts have their own folder there

from ckptd.elastic import (
    CanonicalGradients,
    ElasticSampler,
    KeptGradients,
    Schedule,
    scale_gradients,
)
from ckptd.testing.ranks import run_ranks
from tests.elastic.torch.session.minilauncher import MiniJob
from tests.processes import until

WAYS = ("all-reduce", "canonical", "kept")
SCHEDULE = Schedule(size=512, microbatch=64, microbatches=8)
WIDTH, DEPTH = 1024, 4


def lost(folder: Path, keeps: bool, stop: int) -> dict[str, float]:
    """Lose a rank; return what that has cost."""
    environ = {"KEEPS": str(int(keeps)), "STOP": str(stop)}
    job = MiniJob(folder, Path(worker.__file__), [str(folder)], **environ)
    try:
        job.begin("a", "b", "c")
        until((folder / "reached").exists, (folder / "c.out").read_text)
        at = job.kill("c")
        job.interrupt()
        job.begin("a", "b")
        job.done()
    finally:
        job.close()
    files = list(folder.glob("?.jsonl"))
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    begun = max(row["at"] for row in rows if row.get("began") == 2)
    done = max(r["at"] for r in rows if r.get("done") == worker.STEP)
    computed = sum("added" in row for row in rows)
    return {
        "again": computed - worker.STEPS * worker.SCHEDULE.microbatches,
        "begun": begun - at,
        "done": done - at,
    }


def healthy(steps: int) -> dict[str, list[float]]:
    """Return the seconds of processor time of each step, the ways in alternation."""
    torch.set_num_threads(1)
    spent: dict[str, list[float]] = {}
    programs = {way: _program(way) for way in WAYS}
    for number in range(steps + 2):
        for way, step in programs.items():
            dist.barrier()
            begun = time.process_time()  # the machine may have other work
            step()
            if number >= 2:
                spent.setdefault(way, []).append(time.process_time() - begun)
    return spent


def _program(way: str) -> Callable[[], None]:
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    sampler = ElasticSampler(SCHEDULE)
    sums = (
        KeptGradients().resume(model, sampler)
        if way == "kept"
        else CanonicalGradients(model.parameters(), microbatches=SCHEDULE.microbatches)
    )
    data = torch.randn(512, WIDTH)

    def step() -> None:
        for index in sampler.indices:
            ids = slice(index * SCHEDULE.microbatch, (index + 1) * SCHEDULE.microbatch)
            if way == "all-reduce" and index == sampler.indices[-1]:
                ddp(data[ids]).square().sum().backward()
                continue
            with ddp.no_sync():
                ddp(data[ids]).square().sum().backward()
            if way != "all-reduce":
                sums.add(index, SCHEDULE.microbatch)
        if way != "all-reduce":
            sums.reduce()
        scale_gradients(model.parameters(), SCHEDULE.batch, averaged=way == "all-reduce")
        optimizer.step()
        optimizer.zero_grad()
        sampler.advance()

    return step


def main() -> None:
    options = common.arguments(__doc__, steps=40)
    root = Path(__file__).parents[1]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    found: dict[str, list[dict[str, float]]] = {}
    cases = [(keeps, stop) for stop in (2, 6) for keeps in (False, True)]
    for _ in range(options.reps):
        for keeps, stop in cases:
            # Names of sockets are short.
            folder = Path(tempfile.mkdtemp(prefix="mid-"))
            os.environ["CKPTD_RUN_DIR"] = str(folder / "run")
            (folder / "run").mkdir(0o700)
            row = lost(folder, keeps, stop)
            found.setdefault(f"{stop} of 8, {'kept' if keeps else 'whole step'}", []).append(row)
            shutil.rmtree(folder, ignore_errors=True)
    spent = run_ranks(2, healthy, options.steps, deadline_s=900.0)[0]
    rows = [[case, *_medians(runs)] for case, runs in found.items()]
    text = (
        f"Medians of {options.reps} alternating repetitions; 24 micro-batches a step.\n\n"
        + common.table(
            ["lost after", "computed again", "kill to begun s", "kill to the step's end s"], rows
        )
        + f"\n\nA step without a fault, median of {options.steps} in alternation, 16.8 MB of "
        "gradients; processor time of one rank:\n\n"
        + common.table(
            ["way", "CPU ms", "by canonical sums (aim 1.03)"],
            [
                [way, 1e3 * statistics.median(times), _ratio(spent, way)]
                for way, times in spent.items()
            ],
        )
    )
    command = f"python bench/midstep.py --reps {options.reps} --steps {options.steps}"
    common.publish("midstep", command, text, {"lost": found, "steps": spent})


def _medians(runs: list[dict[str, float]]) -> list[Any]:
    again = statistics.median(run["again"] for run in runs)
    return [int(again), *(common.median(runs, key) for key in ("begun", "done"))]


def _ratio(spent: dict[str, list[float]], way: str) -> float:
    pairs = zip(spent[way], spent["canonical"], strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


if __name__ == "__main__":
    main()
