"""The matrix, the clean run and the upsets of the monitor, as parts of a campaign."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.monitor.faults.case import Case
from tests.monitor.faults.clean import watched
from tests.monitor.faults.judge import table
from tests.monitor.faults.kinds import CLEAN, FAULTS
from tests.monitor.faults.load import Load
from tests.monitor.faults.run import run, same_again
from tests.monitor.faults.upset import UPSETS, upset
from tests.monitor.faults.zygote import Zygote

pytestmark = [pytest.mark.long, pytest.mark.dist, pytest.mark.timeout(7200)]

Report = Callable[[str], None]


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as started:
        yield started


def test_most_faults_are_found_and_their_culprits_named(
    zygote: Zygote, tmp_path: Path, report: Report
) -> None:
    kinds = [kind.name for kind in FAULTS]
    with Load(2):
        outcomes = run(zygote, kinds, range(5), 2.0, tmp_path, again=True)
    for line in table(outcomes):
        report(line)
    right = sum(o.right_class and o.right_culprit for o in outcomes)
    assert right >= 0.95 * len(outcomes)
    assert all(same_again(o) for o in outcomes if o.replay is not None)


def test_nobody_is_accused_without_a_fault(zygote: Zygote, tmp_path: Path, report: Report) -> None:
    with Load(2):
        outcomes = run(zygote, [k.name for k in CLEAN], range(5), 2.0, tmp_path, again=False)
    for line in table(outcomes):
        report(line)
    assert all(o.right for o in outcomes), [o for o in outcomes if not o.right]


def test_a_long_clean_job(zygote: Zygote, tmp_path: Path, report: Report) -> None:
    case = Case(kind="none", seed=0, loop="hand", floor=5.0, every=50, compile=True)
    said = watched(zygote, case, tmp_path / "job", 30.0, 2)
    report(f"{said.collectives} collectives, {said.steps} steps, {len(said.incidents)} incidents")
    assert said.fine, said
    assert said.collectives >= 100_000


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", UPSETS)
def test_an_upset_of_the_monitor_changes_nothing(
    kind: str, seed: int, zygote: Zygote, tmp_path: Path
) -> None:
    if kind == "full" and os.geteuid():
        pytest.skip("a file system without room needs root")
    said = upset(zygote, kind, seed, tmp_path, {})
    assert said.fine, said
