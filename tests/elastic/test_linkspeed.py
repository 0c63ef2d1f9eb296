"""What a node knows of its links, and which nodes count as slow."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.elastic.linkspeed import keep_measured, measured, of_cards, paces


def test_what_was_measured_is_kept_for_a_day(tmp_path: Path) -> None:
    assert measured(tmp_path) == 0
    keep_measured(2.5e9, tmp_path)
    assert measured(tmp_path) == 2_500_000_000
    assert [path.name for path in tmp_path.iterdir()] == ["link.json"]
    for age, expected in ((86_000, 3_000_000_000), (87_000, 0), (-1000, 0)):
        text = f'{{"bytes_per_s": 3e9, "at": {time.time() - age}}}'
        (tmp_path / "link.json").write_text(text)
        assert measured(tmp_path) == expected
    keep_measured(2e9, tmp_path / "absent")  # nowhere to write is no error


@pytest.mark.parametrize("speed", [0.0, -1.0, math.nan, math.inf, -math.inf, 1e30, 3.0])
def test_absurd_measures_are_not_kept(speed: float, tmp_path: Path) -> None:
    keep_measured(speed, tmp_path)
    assert not (tmp_path / "link.json").exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b'{"bytes_per_s": null, "at": 1}',
        b'{"bytes_per_s": NaN, "at": 1}',
        b'{"bytes_per_s": 1e999, "at": 1e999}',
        b'{"bytes_per_s": -5, "at": %d}' % time.time(),
        b'{"bytes_per_s": 1e300, "at": %d}' % time.time(),
        os.urandom(100_000),
    ],
)
def test_a_damaged_measure_is_none(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "link.json").write_bytes(raw)
    assert measured(tmp_path) == 0


def port(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


def test_cards_say_how_fast_they_are(tmp_path: Path) -> None:
    assert of_cards(tmp_path) == 0
    for name, speed, state in (("lo", "0", "up"), ("e0", "25000", "up"), ("e1", "100000", "down")):
        port(tmp_path / "net" / name, speed=speed, operstate=state)
    (tmp_path / "net" / "e0" / "device").mkdir()
    (tmp_path / "net" / "e1" / "device").mkdir()
    port(tmp_path / "net" / "e2", speed="-1", operstate="up")
    (tmp_path / "net" / "e2" / "device").mkdir()
    assert of_cards(tmp_path) == 25 * 10**9 // 8
    for number, state in enumerate(("4: ACTIVE", "4: ACTIVE", "1: DOWN")):
        rate = "400 Gb/sec (4X NDR)"
        port(tmp_path / "infiniband" / f"mlx5_{number}" / "ports" / "1", rate=rate, state=state)
    assert of_cards(tmp_path) == 100 * 10**9


def test_speeds_are_compared_with_their_like() -> None:
    assert paces([]) == []
    alike = [(3 * 10**9, 50 * 10**9), (int(2.5e9), 50 * 10**9), (0, 40 * 10**9), (0, 0)]
    assert paces(alike) == [0, 0, 0, 0]
    # A quarter of the card's speed; a link with a bad cable; both; absurd ones.
    slow = [(0, 12 * 10**9), (3 * 10**8, 50 * 10**9), (3 * 10**8, 12 * 10**9)]
    assert paces([*alike, *slow, (10**30, 3)]) == [0, 0, 0, 0, 2, 3, 3, 0]
    assert paces([(10**4, 0), (10**13, 0)]) == [6, 0]


@given(st.lists(st.tuples(st.integers(0, 1 << 62), st.integers(0, 1 << 62))))
def test_any_speeds_have_a_pace(speeds: list[tuple[int, int]]) -> None:
    found = paces(speeds)
    assert len(found) == len(speeds)
    assert all(0 <= one <= 6 for one in found)
