"""Ranks that have no ring yet, found by their processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.monitor.agent.report import Unborn
from ckptd.monitor.job import Phase, RankView
from tests.monitor import jobs
from tests.processes import stop


def _waiting(age: float = 5.0, **other: object) -> list[RankView]:
    """Rank 0 of two has waited for so long in the making of a group."""
    return [jobs.inside(0, 7, 1, age, 2, **{"phase": Phase.INIT, "node": "n", **other})]


@pytest.fixture
def importing(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Rank 1, which has not come to its ring, and a child of it with the same environment."""
    nested = "import subprocess, sys, time; subprocess.run([sys.executable, '-c', {!r}])"
    said = {"RANK": "1", "WORLD_SIZE": "2", "CKPTD_RINGS": str(tmp_path), "CKPTD_GENERATION": "3"}
    sleeps = "print('x', flush=True); import time; time.sleep(1000)"
    child = subprocess.Popen(
        [sys.executable, "-c", nested.format(sleeps)],
        env=os.environ | said,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdout is not None
    child.stdout.read(2)
    yield child
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()


def test_the_oldest_process_of_a_rank_that_others_wait_for(
    importing: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    unborn = Unborn(tmp_path, "n")
    ((view, note),) = unborn.views(jobs.NOW, _waiting(), 3)
    assert (view.rank, view.world, view.pid, view.node) == (1, 2, importing.pid, "n")
    assert (note.generation, view.phase, view.process_state) == (3, Phase.INIT, "S")
    stop(importing.pid)
    end = time.monotonic() + 60
    states = []
    while "T" not in states and time.monotonic() < end:
        states = [v.process_state for v, _ in unborn.views(jobs.NOW + 1, _waiting(), 3)]
    assert states == ["T"]
    ((later, _),) = unborn.views(jobs.NOW + 9, _waiting(), 3)
    assert later.at - later.moved == pytest.approx(9.0)


@pytest.mark.parametrize(
    ("seen", "generation"),
    [
        (_waiting(0.5), 3),  # nobody has waited for long
        (_waiting(pending_group=0), 3),
        (_waiting(phase=Phase.TRAIN), 3),  # all have come once
        (_waiting(), 4),  # another life
        ([*_waiting(), jobs.view(1, 2)], 3),  # it has its ring
        ([], 3),
    ],
)
def test_otherwise_nothing_is_seen_of_it(
    importing: subprocess.Popen[bytes], tmp_path: Path, seen: list[RankView], generation: int
) -> None:
    assert list(Unborn(tmp_path, "n").views(jobs.NOW, seen, generation)) == []
    assert list(Unborn(tmp_path / "other", "n").views(jobs.NOW, _waiting(), 3)) == []
