"""Who may take the controller's seat: the larger part, and never while it is heard."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from ckptd.elastic.etcd import Etcd, EtcdSeat
from ckptd.elastic.seat import SIGNS, SeatBook, StoreSeat
from ckptd.elastic.signs import LOOK_S, Outlook, Sign, may_stand_in
from ckptd.store import open_store
from tests.elastic.test_log import etcd as etcd


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def check_book(book: SeatBook) -> None:
    assert book.signs() == {}
    for beat in (1, 2):
        for name in ("pulse", "silent-a"):
            book.sign(name, Sign(by="x", beat=beat, hears=3, knows=4))
    assert book.signs() == {
        name: Sign(by="x", beat=2, hears=3, knows=4) for name in ("pulse", "silent-a")
    }
    assert book.newest() is None  # a sign is no seat
    book.take(0, "h:1", "a")
    assert book.newest() is not None


def test_in_a_folder(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    check_book(StoreSeat(store))
    for number, raw in enumerate((b"", b"{}", b"\xff", b'{"by": 1}', b"x" * 5000)):
        store.put(f"{SIGNS}bad-{number}", raw)
    assert len(StoreSeat(store).signs()) == 2


def test_in_etcd(etcd: str) -> None:
    check_book(EtcdSeat(Etcd([etcd]), "/job/controller/"))


@pytest.mark.parametrize("nodes", range(2, 9))
def test_of_two_parts_at_most_one_has_the_controller_and_the_larger_one_does(nodes: int) -> None:
    for hears in range(1, nodes + 1):
        silent = nodes - hears
        takes = silent > 0 and may_stand_in(0.0, hears, nodes, silent, met=True)
        assert takes == (silent > hears)


def test_a_lone_node_never_takes_it_while_there_is_a_pulse() -> None:
    for nodes, old in itertools.product(range(2, 40), (0.0, 0.5, 1.4)):
        assert not may_stand_in(old, nodes - 1, nodes, 1, met=True)


def test_without_a_pulse_half_of_the_nodes_or_patience_suffice() -> None:
    assert may_stand_in(2.0, 3, 3, 2, met=True)
    assert may_stand_in(2.0, 2, 2, 1, met=True)
    assert not may_stand_in(2.0, 3, 3, 1, met=True)
    assert may_stand_in(7.0, 3, 3, 1, met=True)
    assert may_stand_in(2.0, 3, 3, 1, met=False)
    assert may_stand_in(math.inf, 0, 0, 1, met=True)


def test_signs_are_fresh_by_their_changing(tmp_path: Path) -> None:
    seat, clock = StoreSeat(open_store(tmp_path)), Clock()
    controller = Outlook(seat, clock=clock)
    a, b, gone = (Outlook(seat, name, clock) for name in ("a", "b", "gone"))
    gone.leave()
    controller.leave(2, 3)
    for _ in range(10):
        clock.now += LOOK_S
        controller.leave(2, 3)
        a.say_silent()
    assert a.looked
    assert a.silent() == 1  # what was left long ago is of nobody who lives
    assert not a.may_stand_in(met=True)
    for _ in range(6):
        clock.now += LOOK_S
        controller.leave(1, 3)
        a.say_silent()
        b.say_silent()
    assert a.silent() == b.silent() == 2
    assert a.may_stand_in(met=True)
    for _ in range(2):
        clock.now += 10 * LOOK_S
        a.say_silent()
    assert a.silent() == 1
    assert a.may_stand_in(met=True)  # nobody leaves a pulse


def test_a_place_without_signs_is_nobodys(tmp_path: Path) -> None:
    outlook = Outlook(StoreSeat(open_store(tmp_path)), "a", Clock())
    outlook.say_silent()
    assert outlook.may_stand_in(met=True)
