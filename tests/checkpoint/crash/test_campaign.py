"""The rest of the matrix of `test_enumeration`: `scripts/test --long`.

Two ranks of which one dies, the worker that dies alone, retention within the window, the steps
inside the stores' calls, and a real S3 gateway.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.crash.campaign import Campaign
from tests.checkpoint.crash.places import LocalPlace, MemoryPlace, S3Place
from tests.checkpoint.crash.zygote import Zygote
from tests.keys import key_pair
from tests.servers import MOTO, RADOSGW, s3_url

Report = Callable[[str], None]
pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]


def finish(campaign: Campaign, report: Report) -> None:
    what = [f"world {campaign.world}, rank {campaign.victim} dies, keep {campaign.keep}"]
    if campaign.inner:
        what.append("inner steps too")
    if campaign.elsewhere:
        what.append("the worker alone")
    report(f"{', '.join(what)}: {campaign.run()}")
    campaign.place.close()
    assert campaign.tally.committed < campaign.tally.deaths
    assert campaign.tally.missed <= campaign.tally.operations // 20
    # A rank that only reports dies before anybody commits.
    assert campaign.victim or campaign.tally.committed


@pytest.mark.parametrize("keep", [None, 1])
@pytest.mark.parametrize(("world", "victim"), [(1, 0), (2, 0), (2, 1)])
def test_local(
    world: int, victim: int, keep: int | None, ram: Path, zygote: Zygote, report: Report
) -> None:
    place = LocalPlace(ram)
    finish(Campaign(place, zygote, world=world, victim=victim, keep=keep, inner=True), report)


@pytest.mark.parametrize(("world", "victim"), [(1, 0), (2, 0), (2, 1)])
def test_the_worker_alone(
    world: int, victim: int, ram: Path, zygote: Zygote, report: Report
) -> None:
    place = LocalPlace(ram)
    finish(Campaign(place, zygote, world=world, victim=victim, keep=1, elsewhere=True), report)


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(("world", "victim"), [(1, 0), (2, 0), (2, 1)])
def test_signed(
    world: int,
    victim: int,
    elsewhere: bool,
    ram: Path,
    zygote: Zygote,
    report: Report,
    tmp_path: Path,
) -> None:
    pytest.importorskip("blake3")
    more: dict[str, Any] = {"inner": not elsewhere, "elsewhere": elsewhere, "keep": 1}
    place, keys = LocalPlace(ram), key_pair(tmp_path, "release")
    finish(Campaign(place, zygote, world=world, victim=victim, keys=keys, **more), report)


@pytest.mark.parametrize("victim", [0, 1])
def test_memory(victim: int, report: Report) -> None:
    place = MemoryPlace(f"campaign-{victim}")
    finish(Campaign(place, None, world=2, victim=victim, keep=1), report)


@pytest.mark.parametrize("server", [MOTO, RADOSGW])
@pytest.mark.parametrize(("world", "victim"), [(1, 0), (2, 0), (2, 1)])
def test_s3(
    world: int,
    victim: int,
    server: str,
    request: pytest.FixtureRequest,
    zygote: Zygote,
    report: Report,
) -> None:
    options: dict[str, Any] = request.getfixturevalue(server)
    place = S3Place(s3_url(), options)
    finish(Campaign(place, zygote, world=world, victim=victim, keep=1, inner=True), report)
