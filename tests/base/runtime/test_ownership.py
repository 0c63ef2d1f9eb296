"""Objects of one process in real forked children, and calls that meet one another."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import pytest

from ckptd.base.runtime import ownership
from ckptd.base.runtime.ownership import OfOneProcess, in_child, not_within, one_at_a_time
from ckptd.errors import UsageError
from tests.processes import PATIENCE_S


def in_a_child(act: Callable[[], object]) -> str:
    """Return what `act` returned, or raised, in a forked child."""
    said, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            word = str(act())
        except UsageError as error:
            word = f"{error.kind}: {error.where}"
        except BaseException as error:  # noqa: BLE001 - said
            word = repr(error)
        os.write(says, word.encode())
        os._exit(0)
    os.close(says)
    os.waitpid(pid, 0)
    with open(said) as file:
        return file.read()


class Above:
    """What the other one inherits, behind `OfOneProcess`."""

    def ask(self) -> str:
        return "asked"


class Owner(OfOneProcess, Above):
    inert = frozenset({"close", "__exit__"})

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.number = 7

    @property
    def twice(self) -> int:
        return 2 * self.number

    def use(self) -> str:
        return "used"

    def close(self) -> None:
        self._close()

    def _close(self) -> None:
        self.closed.append("closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Any:
        return iter([1])


def test_a_child_is_refused_by_name() -> None:
    owner = Owner()
    for act in (lambda: owner.use(), lambda: owner._close(), lambda: list(owner)):
        assert in_a_child(act).startswith("forked: Owner.")
    assert in_a_child(lambda: owner.ask()).startswith("forked: Owner.ask in process")
    assert (owner.use(), owner.ask()) == ("used", "asked")


def test_what_is_read_stays() -> None:
    owner = Owner()
    assert in_a_child(lambda: (owner.number, owner.twice, isinstance(owner, Owner))) == str(
        (7, 14, True)
    )


def test_what_lets_go_does_nothing_also_when_it_was_bound_before() -> None:
    owner = Owner()
    bound, leave = owner.close, owner.__exit__
    for act in (lambda: owner.close(), bound, lambda: owner.__exit__(None), lambda: leave(None)):
        assert in_a_child(lambda act=act: (act(), owner.closed)) == "(None, [])"
    with owner:
        child = in_a_child(lambda: owner.closed)
    assert (child, owner.closed) == ("[]", ["closed"])


def test_a_child_of_a_child_is_refused_as_well() -> None:
    owner = Owner()
    assert in_a_child(lambda: in_a_child(lambda: owner.use())).startswith("forked")
    assert in_a_child(lambda: Owner().use()) == "used"
    assert in_a_child(lambda: in_a_child(Owner().use)) == "used"


def test_nothing_is_kept_alive_for_it() -> None:
    gc.collect()
    owner = Owner()
    many, dead = len(ownership._hooks), weakref.ref(owner)
    del owner
    gc.collect()
    assert dead() is None
    assert len(ownership._hooks) == many - 1


class Noting:
    def __init__(self, name: str, notes: list[str], *, fails: bool = False) -> None:
        self.name, self.notes, self.fails = name, notes, fails
        in_child(self.note)

    def note(self) -> None:
        self.notes.append(self.name)
        if self.fails:
            raise ValueError(self.name)


def test_later_ones_come_first_and_one_that_fails_stops_none() -> None:
    notes: list[str] = []
    kept = [Noting(n, notes, fails=n == "b") for n in "abc"]
    assert in_a_child(lambda: "".join(notes)) == "cba"
    assert not notes
    assert len(kept) == 3


# -- one call at a time ----------------------------------------------------------------------------


class Calls:
    def __init__(self) -> None:
        self.within: Callable[[], object] = lambda: None
        self.done = 0

    @one_at_a_time
    def first(self) -> None:
        self.within()
        self.done += 1

    @one_at_a_time
    def second(self) -> str:
        return "second"

    def change(self) -> str:
        not_within(self, "first", "change")
        return "changed"


def refusal(call: Callable[[], object]) -> UsageError:
    with pytest.raises(UsageError) as caught:
        call()
    assert caught.value.kind == "under-way"
    return caught.value


def test_a_signal_handler_is_refused_what_its_own_frame_is_at() -> None:
    calls, found = Calls(), []

    def handler(number: int, frame: FrameType | None) -> None:
        found.extend(refusal(c) for c in (calls.second, calls.first, calls.change))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        calls.within = lambda: os.kill(os.getpid(), signal.SIGUSR1)
        calls.first()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [str(e.where).split(":")[0] for e in found] == [
        "second() within first()",
        "first() within first()",
        "change() within first()",
    ]
    assert (calls.done, calls.second(), calls.change()) == (1, "second", "changed")


def test_another_thread_is_refused_meanwhile() -> None:
    calls, began, end = Calls(), threading.Event(), threading.Event()
    calls.within = lambda: (began.set(), end.wait(PATIENCE_S))
    thread = threading.Thread(target=calls.first)
    thread.start()
    began.wait(PATIENCE_S)
    error = refusal(calls.second)
    end.set()
    thread.join()
    assert "in another thread" in str(error.where)
    assert (calls.done, calls.second()) == (1, "second")


def test_an_error_ends_a_call() -> None:
    calls = Calls()

    def fails() -> None:
        raise ValueError

    calls.within = fails
    with pytest.raises(ValueError):
        calls.first()
    assert calls.second() == "second"


def test_an_interrupt_at_any_line_leaves_the_next_call_free() -> None:
    """Also in the lines that note the end of a call."""
    code = Calls.second.__code__  # of the wrapper
    hit = 0
    for at in range(1, 200):
        calls, left = Calls(), at

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal left
            if frame.f_code is not code:
                return None
            if event == "line":
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt
            return trace

        old = sys.gettrace()
        sys.settrace(trace)
        try:
            calls.second()
        except KeyboardInterrupt:
            hit += 1
        finally:
            sys.settrace(old)
        assert calls.second() == "second"
        if left > 0:
            break
    assert hit >= 6
