"""The short form of `tests.checkpoint.crash.roots`; the long one has 500 kills."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.crash.roots import KINDS, campaign

Report = Callable[[str], None]


def test_roots_that_vanish_and_refill(ram: Path, report: Report) -> None:
    with campaign(ram) as played:
        for seed in range(2):  # with a worker of their own: no process is started
            played.play(seed, kills=4)
    report(f"roots, short: {played.tally}")
    assert not played.tally.violations
    assert sum(played.tally.kills.values()) >= 8


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_five_hundred_kills(ram: Path, report: Report) -> None:
    with campaign(ram) as played:
        for seed in range(100, 150):
            played.play(seed, kills=10)
    report(f"roots: {played.tally}")
    assert not played.tally.violations
    assert sum(played.tally.kills.values()) >= 500
    assert {k for k in played.tally.kills if k != "agent"} == set(KINDS)
    assert played.tally.durable > 500
