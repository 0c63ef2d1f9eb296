"""The leader record: create-only, the newest counts; who may lead next: the larger part."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from ckptd.elastic.leader import (
    FOLDER,
    LOOK_S,
    SIGNS,
    Heartbeat,
    LeaderRecord,
    LeaderView,
    may_stand_in,
    stand_in_pause_s,
)
from ckptd.elastic.log import MembershipLog, entry_key
from ckptd.elastic.places import open_places, own_log
from ckptd.errors import ConflictError, CorruptError, UsageError
from ckptd.store import open_store
from tests.plugins.etcd.server import etcd as etcd


def check_seat(seat: LeaderRecord) -> None:
    assert seat.newest() is None
    assert not seat.still("a")
    first = seat.take(0, "h:1", "a")
    assert seat.newest() == first
    assert seat.still("a")
    with pytest.raises(ConflictError) as caught:
        seat.take(0, "h:2", "b")
    assert "another controller registered first" in caught.value.message
    for number in range(1, 12):
        last = seat.take(number, f"h:{number}", "b")
    assert seat.newest() == last
    assert (seat.still("a"), seat.still("b")) == (False, True)


def test_in_a_folder(tmp_path: Path) -> None:
    check_seat(LeaderRecord(open_store(tmp_path)))


def test_in_etcd(etcd: str) -> None:
    check_seat(LeaderRecord(open_store(f"etcd://{etcd}/seats")))


def test_a_damaged_seat_is_named(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    seat = LeaderRecord(store)
    seat.take(0, "h:1", "a")
    store.put(FOLDER + entry_key(1), b'{"number":1}')
    with pytest.raises(CorruptError) as caught:
        seat.newest()
    assert "not a valid address record of a controller" in caught.value.message


def test_places_by_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_RUN_DIR", str(tmp_path / "run"))
    here = open_places("j", str(tmp_path / "log"))
    assert isinstance(here.log, MembershipLog)
    there = open_places("j", "etcd://a:1,b:2/jobs/j")
    assert there.url == "etcd://a:1,b:2/jobs/j"
    assert open_places("j").url == own_log("j") != own_log("k")
    for url in ("etcd://a:1", "etcd:///x", "etcd://a:1/", "etcd://[::1/x"):
        with pytest.raises(UsageError) as caught:
            open_places("j", url)
        assert "invalid etcd URL" in caught.value.message


def test_the_first_node_stands_in_first() -> None:
    assert 1.0 <= stand_in_pause_s(0) <= 1.2 < stand_in_pause_s(1)
    assert stand_in_pause_s(10_000) < 6


# --- signs of life ------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def check_book(book: LeaderRecord) -> None:
    assert book.signs() == {}
    for beat in (1, 2):
        for name in ("pulse", "silent-a"):
            book.sign(name, Heartbeat(by="x", beat=beat, hears=3, knows=4))
    assert book.signs() == {
        name: Heartbeat(by="x", beat=2, hears=3, knows=4) for name in ("pulse", "silent-a")
    }
    assert book.newest() is None  # a sign is no seat
    book.take(0, "h:1", "a")
    assert book.newest() is not None


def test_signs_in_a_folder(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    check_book(LeaderRecord(store))
    for number, raw in enumerate((b"", b"{}", b"\xff", b'{"by": 1}', b"x" * 5000)):
        store.put(f"{SIGNS}bad-{number}", raw)
    assert len(LeaderRecord(store).signs()) == 2


def test_signs_in_etcd(etcd: str) -> None:
    check_book(LeaderRecord(open_store(f"etcd://{etcd}/job")))


@pytest.mark.parametrize("nodes", range(2, 9))
def test_of_two_parts_at_most_one_has_the_controller_and_the_larger_one_does(nodes: int) -> None:
    for hears in range(1, nodes + 1):
        silent = nodes - hears
        takes = silent > 0 and may_stand_in(0.0, hears, nodes, silent, known=True)
        assert takes == (silent > hears)


def test_a_lone_node_never_takes_it_while_there_is_a_pulse() -> None:
    for nodes, old in itertools.product(range(2, 40), (0.0, 0.5, 1.4)):
        assert not may_stand_in(old, nodes - 1, nodes, 1, known=True)


def test_without_a_pulse_half_of_the_nodes_or_patience_suffice() -> None:
    assert may_stand_in(2.0, 3, 3, 2, known=True)
    assert may_stand_in(2.0, 2, 2, 1, known=True)
    assert not may_stand_in(2.0, 3, 3, 1, known=True)
    assert may_stand_in(7.0, 3, 3, 1, known=True)
    assert may_stand_in(2.0, 3, 3, 1, known=False)
    assert may_stand_in(math.inf, 0, 0, 1, known=True)


def test_signs_are_fresh_by_their_changing(tmp_path: Path) -> None:
    seat, clock = LeaderRecord(open_store(tmp_path)), Clock()
    controller = LeaderView(seat, clock=clock)
    a, b, gone = (LeaderView(seat, name, clock) for name in ("a", "b", "gone"))
    gone.leave()
    controller.leave(2, 3)
    for _ in range(10):
        clock.now += LOOK_S
        controller.leave(2, 3)
        a.say_silent()
    assert a.looked
    assert a.silent() == 1  # what was left long ago is of nobody who lives
    assert not a.may_stand_in(known=True)
    for _ in range(6):
        clock.now += LOOK_S
        controller.leave(1, 3)
        a.say_silent()
        b.say_silent()
    assert a.silent() == b.silent() == 2
    assert a.may_stand_in(known=True)
    for _ in range(2):
        clock.now += 10 * LOOK_S
        a.say_silent()
    assert a.silent() == 1
    assert a.may_stand_in(known=True)  # nobody leaves a pulse


def test_a_place_without_signs_is_nobodys(tmp_path: Path) -> None:
    outlook = LeaderView(LeaderRecord(open_store(tmp_path)), "a", Clock())
    outlook.say_silent()
    assert outlook.may_stand_in(known=True)
