"""Any process of a publish dies at any phase: no mixture, no hang, and the others go on.

A few lives in every run; all of them, counted, in the campaign (marker long).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.publish.killpoints import POINTS, Kill
from tests.publish.kills import KillWorld
from tests.servers import s3_moto, s3_url

__all__ = ["s3_moto"]

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

Report = Callable[[str], None]


def live(folder: Path, spec: Kill, env: dict[str, str] | None = None) -> KillWorld:
    folder.mkdir()
    world = KillWorld(folder, spec, env or {})
    world.run()
    world.judge()
    assert (folder / "killed").exists(), f"nothing came to that point: {spec}"
    return world


@pytest.mark.parametrize(
    "spec",
    [
        Kill("worker writes a part", 0, "worker-0", nth=5),
        Kill("worker pulls", 1, "trainer-0", nth=3, far=True),
        # Whether changes come in place of whole blocks is a matter of time: see the campaign.
        Kill("worker pulls", 0, "server-1", nth=3, far=True),
    ],
    ids=str,
)
def test_one_process_dies(tmp_path: Path, spec: Kill) -> None:
    live(tmp_path / "life", spec)


@pytest.fixture
def bucket(s3_moto: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Variables by which processes, and this one, reach the server of buckets."""
    found = {
        "AWS_ENDPOINT_URL": s3_moto["endpoint_url"],
        "AWS_ACCESS_KEY_ID": s3_moto["key"],
        "AWS_SECRET_ACCESS_KEY": s3_moto["secret"],
        "AWS_DEFAULT_REGION": s3_moto["region"],
    }
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found


def test_one_process_dies_and_all_goes_through_a_folder(tmp_path: Path) -> None:
    spec = Kill("server commits", 0, "trainer-0", nth=2, to=f"file://{tmp_path}/live")
    live(tmp_path / "life", spec)


@pytest.mark.s3
def test_one_process_dies_and_all_goes_through_a_bucket(
    tmp_path: Path, bucket: dict[str, str]
) -> None:
    spec = Kill("server commits", 0, "server-0", nth=2, to=s3_url())
    live(tmp_path / "life", spec, bucket)


STORED = {
    "server takes the place": (1,),
    "server orders a version": (1, 2, 3),
    "server writes its share": (1, 2, 3),
    "server syncs its share": (2, 3),
    "server writes an object": (2, 3, 4),
    "server commits": (1, 2, 3),
    "server deletes": (1, 2),
    "worker looks into the store": (1,),
    "worker reads an object": (1, 2, 3),
    "worker fills its mirror": (1, 2),
    "worker proves its mirror": (1, 2),
    "worker has all": (1,),
    "worker applies": (1,),
    "worker writes a part": (1, 5),
    "trainer chose a slot": (1,),
    "trainer seals": (1,),
    "trainer counts its share": (1,),
    "trainer closes": (1,),
}
"""Points of what goes through a store, and at which calls."""
OF_ONE = ("server takes the place", "server orders a version", "server commits", "server deletes")


def every_stored_kill(to: str) -> list[Kill]:
    """Return all lives of the campaign through a store."""
    out = []
    for point, calls in STORED.items():
        kind = POINTS[point][0]
        ranks = (0,) if point in (*OF_ONE, "worker looks into the store") else (0, 1)
        others = [p for p in ("trainer", "server", "worker") if p != kind]
        if point in ("server takes the place", "trainer closes"):
            others.remove("worker")
        mine = [Kill(point, r, f"{kind}-{r}") for r in ranks]
        mine += [Kill(point, 0, f"{party}-0") for party in others]
        out += [replace(k, nth=n, to=to) for k in mine for n in calls]
    return out


@pytest.mark.long
@pytest.mark.s3
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_each_process_at_each_point_of_a_store(
    tmp_path: Path, report: Report, bucket: dict[str, str], kind: str
) -> None:
    tally: Counter[str] = Counter()
    for number, spec in enumerate(every_stored_kill("")):
        to = s3_url() if kind == "bucket" else f"file://{tmp_path}/live-{number}"
        world = live(tmp_path / str(number), replace(spec, to=to), bucket)
        counted(tally, spec, world)
    report(f"publish through a {kind}, a kill at each point: {dict(tally)}")


def every_kill() -> list[Kill]:
    """Return all lives of the campaign over connections."""
    out = []
    for point, (kind, *_) in POINTS.items():
        if kind == "server" or "mirror" in point or "store" in point or "object" in point:
            continue
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


def counted(tally: Counter[str], spec: Kill, world: KillWorld) -> None:
    """Count a life."""
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
        counted(tally, spec, world)
    report(f"publish, a kill at each point: {dict(tally)}")
