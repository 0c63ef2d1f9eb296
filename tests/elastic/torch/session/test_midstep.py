"""A step that loses ranks is finished with what the others have computed of it, to the bit."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.elastic.messages import Loaded
from ckptd.testing.ranks import run_ranks
from tests.elastic.torch.session import midstep
from tests.elastic.torch.session.midstep import SCHEDULE, STEPS, random_plan
from tests.elastic.torch.session.minilauncher import MiniJob
from tests.processes import until

Plan = dict[str, tuple[int, str, int]]
MakeJob = Callable[..., MiniJob]


@pytest.fixture
def make_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeJob]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[4]), *sys.path]))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    jobs: list[MiniJob] = []

    def make(folder: Path = tmp_path, **environ: str) -> MiniJob:
        folder.mkdir(exist_ok=True)
        jobs.append(MiniJob(folder, Path(midstep.__file__), [str(folder)], **environ))
        jobs[-1].forks = True
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


def alone(folder: Path) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    midstep.train(midstep.World.of({}), folder, midstep.KeptGradients())
    return rows_of(folder, "alone")


def kept_of(step: int, rows: list[dict[str, Any]]) -> set[int]:
    """Return what a rank has kept of a step, after all that it has noted."""
    kept: set[int] = set()
    for row in rows:
        if row.get("loaded", step - 1) != step - 1:
            kept = set()  # a generation that begins with another step drops what is of this one
        elif row.get("step") == step and not row["extra"]:
            kept.add(row["added"])
    return kept


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Any, ...]]:
    """What each step is to come to: samples, loss, parameters."""
    (rows,) = run_ranks(1, alone, tmp_path_factory.mktemp("alone"))
    return {row["done"]: outcome(row) for row in rows if "done" in row}


def outcome(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["samples"], row["loss"], row["parameters"]


def rows_of(folder: Path, node: str) -> list[dict[str, Any]]:
    path = folder / f"{node}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def lose(job: MiniJob, plan: Plan) -> None:
    """Kill the nodes of a plan where they stop, and have the others leave the generation.

    Where one stops another may wait for it: that is killed in its wait.
    """
    reached = [job.folder / f"reached-{job.generation}-{name}" for name in plan]
    until(lambda: any(path.exists() for path in reached), f"none comes to {plan}")
    with suppress(TimeoutError):
        until(lambda: all(path.exists() for path in reached), within_s=0.5)
    for name in plan:
        job.kill(name)
    job.interrupt()


def go_on(job: MiniJob, plan: Plan, *joining: str) -> None:
    """Begin the next generation, which ends as a plan says."""
    (job.folder / "plan").write_text(json.dumps(plan))
    job.begin(*job.members, *joining)


def check(job: MiniJob, uninterrupted: dict[int, tuple[Any, ...]], names: list[str]) -> int:
    """Each step comes to what it is to; return how many micro-batches were computed again.

    What ranks that are left had computed of the step after the loaded one was not.
    """
    rows = {name: rows_of(job.folder, name) for name in names}
    known = [row for of in rows.values() for row in of]
    assert {row["done"] for row in known if "done" in row} == set(uninterrupted)
    for row in known:
        if "done" in row:
            assert outcome(row) == uninterrupted[row["done"]]
    for first in (row for row in known if "loaded" in row and row["generation"] > 1):
        step, generation = first["loaded"] + 1, first["generation"]
        members = [of for of in rows.values() if any(generation == r["generation"] for r in of)]
        before = [[r for r in of if r["generation"] < generation] for of in members]
        kept = set().union(*(kept_of(step, of) for of in before))
        ahead = max((row.get("step", 0) for of in before for row in of), default=0)
        if ahead <= step + 1:
            # One that was just added may not be noted yet when its rank is interrupted.
            most = len(kept) + len(members)
            assert len(kept) <= first["found"] <= most, (step, kept, generation)
    return sum("added" in row for row in known) - STEPS * SCHEDULE.microbatches


def last_words(job: MiniJob) -> set[str]:
    """Wait until all have ended; return the digests of their parameters."""
    return {text[-64:] for text in job.done()}


@pytest.mark.dist
def test_a_step_goes_on_without_the_ranks_that_it_loses(
    make_job: MakeJob, uninterrupted: dict[int, tuple[Any, ...]]
) -> None:
    """One between micro-batches, one in the recovery itself, one in the sum over all ranks."""
    job = make_job()
    plans: list[Plan] = [
        {"d": (1, "added", 1)},
        {"c": (0, "resume", 0)},
        {"b": (0, "all_gather_into_tensor", 0)},
    ]
    (job.folder / "plan").write_text(json.dumps(plans[0]))
    job.begin(*"abcd")
    for plan, then in zip(plans, [*plans[1:], {}], strict=True):
        lose(job, plan)
        go_on(job, then)
    assert last_words(job) == {uninterrupted[STEPS][-1]}
    assert check(job, uninterrupted, [*"abcd"]) <= 24, "two steps' worth"


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(50))
def test_random_losses(
    make_job: MakeJob, uninterrupted: dict[int, tuple[Any, ...]], seed: int
) -> None:
    """Ranks are lost anywhere, one or two at once, also in recoveries, and others join."""
    chance = random.Random(seed)
    job = make_job(PAUSE_S="0.002")
    names = [*"abcd"]
    timed = seed % 5 == 0
    plan = {} if timed else random_plan(names, chance)
    (job.folder / "plan").write_text(json.dumps(plan))
    job.begin(*names)
    losses: list[list[str]] = []
    while len(job.members) > 1 and job.generation < 4:
        if timed:  # anywhere at all
            node = job.members[-1]
            job.nodes[node].until(Loaded, job.generation)
            time.sleep(chance.random() * 0.2)
            job.kill(node)
            job.interrupt()
            losses.append([f"{node} at any time"])
        else:
            lose(job, plan)
            losses.append([f"{point} {nth} of step {step}" for step, point, nth in plan.values()])
        joining = [f"j{job.generation}"] if chance.random() < 0.3 else []
        names += joining
        left = [*job.members, *joining]
        last = timed or len(left) < 2 or job.generation == 3
        plan = {} if last else random_plan(left, chance)
        go_on(job, plan, *joining)
        if last:
            break
    assert last_words(job) == {uninterrupted[STEPS][-1]}
    again = check(job, uninterrupted, names)
    print(f"schedule {seed}: lost {losses}, {again} micro-batches computed again")
