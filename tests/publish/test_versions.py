"""The book of versions: what is skipped, what stays, what is given up."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from ckptd.publish.versions import SlotChoice, VersionTable
from tests.processes import PATIENCE_S


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def made(book: VersionTable, number: int) -> SlotChoice:
    choice = book.place(number, 10 * number)
    if choice.slot >= 0:
        book.commit(number)
    return choice


def test_the_newest_whole_version_stays_until_there_is_another() -> None:
    book = VersionTable(2, 60.0)
    assert book.newer(0) is None
    assert book.place(1, 10) == SlotChoice(0)
    assert book.newer(0) is None  # it is not whole
    book.commit(1)
    assert book.newer(0) == (1, 10)
    assert book.newer(1) is None
    assert book.place(2, 20) == SlotChoice(1)
    # One is the newest, the other is being filled.
    assert book.place(3, 30).slot == -1
    assert book.newer(0) == (1, 10)
    book.drop(2)
    assert made(book, 4) == SlotChoice(1)
    assert made(book, 5) == SlotChoice(0)
    assert not book.hold(1, "late")


def test_who_has_the_newest_version_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table answered at once that there is none, and the server asked again without a pause."""
    book = VersionTable(2, 60.0)
    made(book, 1)
    waits, found = threading.Event(), list[tuple[int, int] | None]()
    wait_for = book._change.wait_for

    def waiting(predicate: Callable[[], bool], wait_s: float) -> bool:
        waits.set()
        return wait_for(predicate, wait_s)

    monkeypatch.setattr(book._change, "wait_for", waiting)
    thread = threading.Thread(target=lambda: found.append(book.newer(1, PATIENCE_S)))
    thread.start()
    assert waits.wait(PATIENCE_S)
    made(book, 2)
    thread.join(PATIENCE_S)
    assert found == [(2, 20)]


def test_what_is_held_is_not_filled_and_does_not_stop_the_rest() -> None:
    book = VersionTable(2, 60.0)
    made(book, 1)
    assert book.hold(1, "slow")
    for number in range(2, 6):
        assert made(book, number) == SlotChoice(1)  # the other slot, again and again
        assert book.newer(0) == (number, 10 * number)
    assert book.hold(5, "fast")
    assert book.place(6, 60).slot == -1
    assert "2 are held" in book.place(6, 60).reason
    book.release("slow")
    assert made(book, 7) == SlotChoice(0)


def test_a_lease_that_ends_and_a_lost_worker_leave_their_memory() -> None:
    clock = Clock()
    book = VersionTable(2, 60.0, clock)
    made(book, 1)
    book.hold(1, "slow")
    made(book, 2)
    assert book.held == 1
    clock.now = 61.0
    assert book.held == 0
    book.hold(2, "newer")
    assert made(book, 3) == SlotChoice(0, fresh=True)
    book.lose("newer")
    assert made(book, 4) == SlotChoice(1, fresh=True)
    assert made(book, 5) == SlotChoice(0)  # nobody ever held what was there


def test_a_lease_is_renewed_while_its_holder_gets_on() -> None:
    clock = Clock()
    book = VersionTable(2, 60.0, clock)
    made(book, 1)
    assert not book.renew(1, "worker")  # it holds nothing
    for name in ("worker", "stopped"):
        assert book.hold(1, name)
    made(book, 2)
    for now in (50.0, 100.0, 170.0):  # the last time late, and nothing else is there
        clock.now = now
        assert book.renew(1, "worker")
    assert book.held == 1
    assert made(book, 3) == SlotChoice(1)
    book.release("worker")
    assert made(book, 4) == SlotChoice(0, fresh=True)
    assert not book.renew(1, "stopped")
    assert book.hold(4, "lost")
    book.lose("lost")
    assert not book.renew(4, "lost")


def test_whatever_happens_there_is_a_whole_version_and_no_held_one_is_filled() -> None:
    draw = random.Random(1)
    for _ in range(200):
        slots = draw.randint(2, 3)
        clock = Clock()
        book = VersionTable(slots, 5.0, clock)
        held: dict[str, tuple[int, int, float]] = {}
        where: dict[int, int] = {}
        making: set[int] = set()
        newest = 0
        for number in range(1, 40):
            clock.now += draw.random()
            choice = book.place(number, number)
            if choice.slot >= 0:
                for _, slot, end in held.values():
                    assert slot != choice.slot or choice.fresh
                    assert slot != choice.slot or end < clock.now
                held = {h: x for h, x in held.items() if x[1] != choice.slot}
                where = {n: s for n, s in where.items() if s != choice.slot}
                where[number] = choice.slot
                making.add(number)
            for found in list(making):
                if draw.random() < 0.6:
                    making.discard(found)
                    if draw.random() < 0.8:
                        book.commit(found)
                        newest = max(newest, found)
                    else:
                        book.drop(found)
                        del where[found]
            answer = book.newer(0)
            assert (answer is not None) == bool(newest)
            if answer is not None and draw.random() < 0.5:
                name = f"w{draw.randint(0, 2)}"
                book.release(name)
                assert book.hold(answer[0], name)
                held[name] = (answer[0], where[answer[0]], clock.now + 5.0)
            if held and draw.random() < 0.3:
                name = draw.choice(list(held))
                if draw.random() < 0.5:
                    book.release(name)
                    del held[name]
                else:
                    book.lose(name)
                    held[name] = (*held[name][:2], -1.0)


def test_memory_that_is_left_to_a_worker_is_not_filled_after_the_version_in_its_place_failed() -> (
    None
):
    clock = Clock()
    book = VersionTable(2, 60.0, clock)
    made(book, 1)
    book.hold(1, "slow")
    made(book, 2)
    clock.now = 61.0
    assert book.place(3, 30) == SlotChoice(0, fresh=True)
    book.drop(3)  # by a rank that failed before it had other memory
    assert book.place(4, 40) == SlotChoice(0, fresh=True)
    book.commit(4)
    assert made(book, 5) == SlotChoice(1)
    assert made(book, 6) == SlotChoice(0)
