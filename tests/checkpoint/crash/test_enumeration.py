"""kill -9 at every store operation of a save: the step is whole or absent, and all else holds.

The dry run lists the operations; then a fresh life dies before each of them, and after each change;
here of some only, and of another part of them in each test: the long form of `test_campaign` leaves
none out.
See `tests.checkpoint.crash.campaign` for what is asserted, and `test_campaign` for the rest of the
matrix.
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
from tests.servers import MOTO, s3_url

Report = Callable[[str], None]
pytestmark = pytest.mark.timeout(900)


def test_local(ram: Path, zygote: Zygote, report: Report) -> None:
    campaign = Campaign(LocalPlace(ram), zygote, keep=1)
    report(f"local, with retention, every tenth operation: {campaign.run(slice(0, None, 10))}")
    assert 0 < campaign.tally.committed < campaign.tally.deaths


def test_local_inner_steps(ram: Path, zygote: Zygote, report: Report) -> None:
    campaign = Campaign(LocalPlace(ram), zygote, inner=True)
    report(f"local, every eighth of the inner steps too: {campaign.run(slice(1, None, 8))}")
    assert 0 < campaign.tally.committed < campaign.tally.deaths


def test_memory(report: Report) -> None:
    campaign = Campaign(MemoryPlace("crash"), None, keep=1)
    report(f"memory, with retention, every fourth operation: {campaign.run(slice(1, None, 4))}")
    assert 0 < campaign.tally.committed < campaign.tally.deaths


@pytest.mark.parametrize("server", [MOTO])
def test_s3(server: str, request: pytest.FixtureRequest, zygote: Zygote, report: Report) -> None:
    options: dict[str, Any] = request.getfixturevalue(server)
    place = S3Place(s3_url(), options)
    campaign = Campaign(place, zygote, after=False)
    report(f"{server}, every ninth operation: {campaign.run(slice(2, None, 9))}")
    place.close()
    assert 0 < campaign.tally.committed < campaign.tally.deaths


@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_ranks(victim: int, ram: Path, zygote: Zygote, report: Report) -> None:
    campaign = Campaign(LocalPlace(ram), zygote, world=2, victim=victim)
    report(f"local, rank {victim} of 2, every sixth operation: {campaign.run(slice(0, None, 6))}")


@pytest.mark.parametrize(
    ("world", "victim", "elsewhere", "only"),
    [
        (1, 0, False, slice(3, None, 12)),
        (2, 0, False, slice(2, None, 13)),
        (2, 1, False, slice(4, None, 9)),
        (1, 0, True, slice(5, None, 16)),
    ],
)
def test_each_step_is_signed(
    world: int,
    victim: int,
    elsewhere: bool,
    only: slice,
    ram: Path,
    zygote: Zygote,
    report: Report,
    tmp_path: Path,
) -> None:
    """Whatever counts afterwards is read by its key alone, the step before as well."""
    pytest.importorskip("blake3")
    keys, place = key_pair(tmp_path, "release"), LocalPlace(ram)
    campaign = Campaign(
        place, zygote, world=world, victim=victim, elsewhere=elsewhere, keys=keys, keep=1
    )
    report(f"signed, rank {victim} of {world}, some operations: {campaign.run(only)}")
    assert campaign.tally.committed < campaign.tally.deaths


def test_who_takes_a_commit_over_leaves_no_signature_of_its_own(
    ram: Path, zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next writing process signed the commit that was there, and nothing removed that file."""
    pytest.importorskip("blake3")
    keys, place = key_pair(tmp_path, "release"), LocalPlace(ram)
    campaign = Campaign(place, zygote, world=2, elsewhere=True, keys=keys, keep=1)
    find = campaign._find_points
    monkeypatch.setattr(campaign, "_find_points", lambda: [p for p in find() if p.op == "put-new"])
    tally = campaign.run()
    assert (tally.deaths, tally.missed) == (2, 0)
    assert tally.committed


def test_the_worker_alone(ram: Path, zygote: Zygote, report: Report) -> None:
    campaign = Campaign(LocalPlace(ram), zygote, elsewhere=True)
    report(
        f"local, the worker alone, every sixteenth operation: {campaign.run(slice(1, None, 16))}"
    )
