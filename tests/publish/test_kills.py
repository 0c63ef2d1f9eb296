"""Any process of a publish dies at any phase: no mixture, no hang, and the others go on.

A few lives in every run; all of them, counted, in the campaign (marker long).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.publish.kills import POINTS, Kill, KillWorld

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

Report = Callable[[str], None]


def live(folder: Path, spec: Kill) -> KillWorld:
    folder.mkdir()
    world = KillWorld(folder, spec)
    world.run()
    world.judge()
    assert (folder / "killed").exists(), f"nothing came to that point: {spec}"
    return world


@pytest.mark.parametrize(
    "spec",
    [
        Kill("worker writes a part", 0, "worker-0", nth=5),
        Kill("worker pulls", 1, "trainer-0", nth=3, far=True),
        Kill("worker applies changes", 0, "server-1", far=True),
    ],
    ids=str,
)
def test_one_process_dies(tmp_path: Path, spec: Kill) -> None:
    live(tmp_path / "life", spec)


def every_kill() -> list[Kill]:
    """Return all lives of the campaign."""
    out = []
    for point, (kind, *_) in POINTS.items():
        # The leader asks for its rollout.
        callers = (0, 0) if point == "worker asks for the newest" else (0, 1)
        mine = [Kill(point, c, f"{kind}-{rank}") for rank, c in enumerate(callers)]
        others = [p for p in ("trainer", "server", "worker") if p != kind]
        if point in ("trainer starts its server", "trainer closes"):
            others.remove("worker")  # none has begun, or all have ended
        mine += [Kill(point, 0, f"{party}-{rank}") for party in others for rank in (0, 1)]
        calls = (1, 2, 9) if point in ("worker pulls", "worker writes a part") else (1,)
        ways = (True,) if point in FAR else (False, True) if point in WAYS else (False,)
        out += [replace(k, nth=n, far=far) for k in mine for n in calls for far in ways]
    return out


FAR = ("worker pulls", "worker applies changes")
"""Points of what comes over sockets alone; from the second version on it is what changed."""
WAYS = ("worker has all", "worker applies", "worker writes a part")
"""Points of what comes over sockets as well as of what is mapped."""


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_each_process_at_each_point(tmp_path: Path, report: Report) -> None:
    tally: Counter[str] = Counter()
    for number, spec in enumerate(every_kill()):
        world = live(tmp_path / str(number), spec)
        tally["lives"] += 1
        tally[f"{spec.victim[:-2]} dies"] += 1
        ends = [w.value for w in world.workers if w.value is not None]
        tally["workers with a whole version, or what they had before"] += sum(
            not e.state_corrupted for e in ends
        )
        tally["workers that said their tensors are of no version"] += sum(
            e.state_corrupted for e in ends
        )
        tally["late workers that got the newest"] += world.late is not None
    report(f"publish, a kill at each point: {dict(tally)}")
