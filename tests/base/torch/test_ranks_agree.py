"""Agreement between ranks: one outcome for all, and nobody waits for the dead."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
from torch.distributed import HashStore

from ckptd.base.runtime import ranks as base_ranks
from ckptd.base.runtime.ranks import LocalBoard
from ckptd.base.torch import ranks
from ckptd.base.torch.ranks import Agreement, JobBoard
from ckptd.errors import CkptdError, CorruptError, DeadlineError
from ckptd.testing.ranks import rank_outcomes
from tests.processes import PATIENCE_S


def boards_of(world: int, made: type[LocalBoard] = LocalBoard) -> list[LocalBoard]:
    first = made(0, world)
    return [first, *(made(r, world, first) for r in range(1, world))]


def at_each(boards: list[LocalBoard], work: Any, timeout_s: float) -> list[Any]:
    """Run ``work(agreement)`` in a thread a board; return what each returned or raised."""

    def run(board: LocalBoard) -> Any:
        try:
            return work(Agreement(board, timeout_s))
        except CkptdError as error:
            return error

    with ThreadPoolExecutor(len(boards)) as threads:
        return list(threads.map(run, boards))


def everywhere(world: int, work: Any, timeout_s: float = 20.0) -> list[Any]:
    return at_each(boards_of(world), work, timeout_s)


class Idle(LocalBoard):
    """A board of ranks that all wait: a wait is over when no other rank could end it any more.

    The time that the ranks see passes there, and nowhere else: a machine that is busy makes no
    rank late.
    """

    present = 0
    now_s = 0.0
    _waits: ClassVar[dict[LocalBoard, tuple[str, float]]] = {}

    @classmethod
    def monotonic(cls) -> float:
        return cls.now_s

    def get(self, key: str, timeout_s: float) -> bytes:
        with self._changed:
            end = Idle.now_s + timeout_s
            self._waits[self] = key, end
            self._pass()
            while key not in self._values and Idle.now_s < end:
                assert self._changed.wait(PATIENCE_S)
            del self._waits[self]
        return super().get(key, 0.0)

    def leave(self) -> None:
        with self._changed:
            Idle.present -= 1
            self._pass()

    def _pass(self) -> None:
        """Let the time pass until the first wait is over, if all wait."""
        waits = self._waits.values()
        if len(waits) == Idle.present and not any(key in self._values for key, _ in waits):
            Idle.now_s = max(Idle.now_s, min((end for _, end in waits), default=0.0))
            self._changed.notify_all()


def where_some_are_missing(
    world: int, missing: Iterable[int], work: Any, patch: pytest.MonkeyPatch
) -> tuple[list[Any], list[LocalBoard]]:
    """Run it on all other ranks; return what they raised, and all boards."""
    boards = boards_of(world, Idle)
    there = [board for board in boards if board.rank not in missing]
    patch.setattr(Idle, "present", len(there))
    patch.setattr(base_ranks, "time", Idle)
    patch.setattr(ranks, "time", Idle)

    def run(agreement: Agreement) -> None:
        try:
            work(agreement)
        finally:
            assert isinstance(agreement.board, Idle)
            agreement.board.leave()

    return at_each(there, run, 0.5), boards


def test_what_is_posted_does_not_stay() -> None:
    def work(agreement: Agreement) -> int:
        most = 0
        for step in range(1000):
            assert agreement.on_rank_zero("step", lambda step=step: step) == step
            if step % 3 == 0:
                agreement.no_errors(None)
            if step % 100 == 0:
                agreement.all_reports("now", b"", b"".join)
                agreement.in_tree("now", b"", b"".join)
            if step % 20 == 0:
                agreement.no_errors(None)  # or rank 0 runs ahead, and its keys are needed
                most = max(most, len(agreement.board._values) + len(agreement.board._counts))
        return most

    assert max(everywhere(3, work)) < 3 * 64 + 20


def test_rank_zero_does_it_once() -> None:
    calls: list[int] = []

    def work(agreement: Agreement) -> Any:
        def act() -> list[int]:
            calls.append(agreement.board.rank)
            return [1, 2]

        return agreement.on_rank_zero("act", act), agreement.on_rank_zero("none", lambda: None)

    assert everywhere(3, work) == [([1, 2], None)] * 3
    assert calls == [0]


def test_reports_become_one_value() -> None:
    def work(agreement: Agreement) -> bytes:
        own = b"%d" % agreement.board.rank
        return agreement.all_reports("ranks", own, b" ".join)

    assert everywhere(3, work) == [b"0 1 2"] * 3
    assert everywhere(1, work) == [b"0"]


@pytest.fixture
def fan(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let few ranks make a tree of several levels."""
    monkeypatch.setattr(ranks, "_FAN", 4)
    return 4


@pytest.mark.parametrize("world", [1, 2, 4, 5, 6, 16, 17, 70])
def test_values_are_joined_by_a_few_ranks_each(world: int, fan: int) -> None:
    most: list[int] = []

    def work(agreement: Agreement) -> tuple[bytes, bytes]:
        def join(values: list[bytes]) -> bytes:
            most.append(len(values))
            return b"".join(values)

        own = bytes([agreement.board.rank])
        return agreement.in_tree("all", own, join), agreement.all_reports("all", own, b"".join)

    assert everywhere(world, work) == [(bytes(range(world)),) * 2] * world
    levels = next(n for n in range(9) if fan**n >= world)
    assert max(most) <= 1 + (fan - 1) * levels
    assert len(most) == world


class Counting(HashStore):
    """Counts round trips, and what is deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("set", "get", "check", "multi_get", "add", "delete_key"):
            self.calls += 1
        return super().__getattribute__(name)


class Ahead(JobBoard):
    """The board of a rank that posts, and does not wait for the answer."""

    def get(self, key: str, timeout_s: float) -> bytes:
        raise Posted


class Posted(Exception):
    pass


@pytest.mark.parametrize("world", [8, 1000, 4000])
@pytest.mark.parametrize("late", [0, 3])
def test_rank_zero_makes_few_round_trips_for_thousands_of_reports(world: int, late: int) -> None:
    """At three a rank it made 49,000 for 16,384 ranks."""
    store, secret = Counting(), b"a secret of no digits, but long"
    first = Agreement(JobBoard(store, 0, world, "job/", secret), PATIENCE_S)

    def post(rank: int) -> None:
        other = Agreement(Ahead(store, rank, world, "job/", secret), PATIENCE_S)
        with pytest.raises(Posted):
            other.all_reports("ranks", b"%d" % rank, b" ".join)

    for rank in range(world - 1, late, -1):
        post(rank)
    store.calls = 0
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(first.all_reports, "ranks", b"0", b" ".join)
        for rank in range(late, 0, -1):
            time.sleep(0.01)
            post(rank)
        assert answer.result(PATIENCE_S) == b" ".join(b"%d" % rank for rank in range(world))
    assert late or store.calls < 30


@pytest.mark.parametrize("failing", [0, 1, 16, 39])
@pytest.mark.usefixtures("fan")
def test_an_error_in_joining_is_everybodys(failing: int) -> None:
    def work(agreement: Agreement) -> Any:
        def join(values: list[bytes]) -> bytes:
            if agreement.board.rank == failing:
                raise CorruptError("bad", kind="digest", where="there")
            return b""

        return agreement.in_tree("name", b"", join)

    errors = everywhere(40, work)
    assert all(isinstance(e, CorruptError) and e.where == "there" for e in errors)


@pytest.mark.parametrize("missing", [(17, 19), (20,), (16,), (3, 32)])
@pytest.mark.parametrize("reports", [False, True])
@pytest.mark.usefixtures("fan")
def test_ranks_that_are_missing_in_a_tree_are_named(
    missing: tuple[int], reports: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that post to others, and ranks to which others post."""

    def work(agreement: Agreement) -> Any:
        return (agreement.all_reports if reports else agreement.in_tree)("name", b"", b"".join)

    errors, _ = where_some_are_missing(40, missing, work, monkeypatch)
    assert len(errors) == 40 - len(missing)
    assert all(isinstance(e, DeadlineError) for e in errors)
    assert {e.found for e in errors} == {f"missing ranks {[*missing]}"}


def test_the_answer_counts_where_the_store_ends_with_rank_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(*_: Any) -> None:
        raise CkptdError("the job's store is gone", kind="board-lost")

    monkeypatch.setattr(LocalBoard, "delete", gone)
    joined = everywhere(3, lambda agreement: agreement.all_reports("now", b"x", b"".join))
    assert joined == [b"xxx"] * 3


@pytest.mark.parametrize("late", [5, 16])
@pytest.mark.usefixtures("fan")
def test_a_rank_that_comes_after_the_error_raises_it(
    late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(agreement: Agreement) -> Any:
        agreement.all_reports("name", b"", b"".join)

    errors, boards = where_some_are_missing(24, [late], work, monkeypatch)
    monkeypatch.setattr(Idle, "present", 1)
    errors += at_each([boards[late]], work, 0.5)
    assert [e.found for e in errors] == [f"missing ranks [{late}]"] * 24


@pytest.mark.parametrize("reports", [False, True])
def test_an_error_of_rank_zero_is_everybodys(reports: bool) -> None:
    def fail(*_: Any) -> bytes:
        raise CorruptError("bad", kind="digest", where="there")

    def work(agreement: Agreement) -> Any:
        if reports:
            return agreement.all_reports("name", b"", fail)
        return agreement.on_rank_zero("name", fail)

    errors = everywhere(3, work)
    assert all(isinstance(e, CorruptError) and e.where == "there" for e in errors)


def test_an_error_of_any_rank_is_everybodys() -> None:
    def work(agreement: Agreement) -> None:
        rank = agreement.board.rank
        agreement.no_errors(CorruptError(f"of {rank}", kind="digest") if rank == 2 else None)

    assert [e.message for e in everywhere(4, work)] == ["of 2"] * 4
    assert everywhere(4, lambda agreement: agreement.no_errors(None)) == [None] * 4


@pytest.mark.parametrize("failing", [0, 1])
def test_what_a_program_raises_is_raised_there_and_ends_the_wait_of_others(failing: int) -> None:
    """As where a function for names raises: ranks waited for their whole time."""

    def fails() -> None:
        raise KeyError("of the program")

    def work(agreement: Agreement) -> Any:
        mine = agreement.board.rank == failing
        with pytest.raises(KeyError if mine else CkptdError) as caught:
            agreement.on_every_rank(fails if mine else lambda: None)
        if failing == 0:
            with pytest.raises(KeyError if mine else CkptdError):
                agreement.on_rank_zero("name", fails)
        return None if mine else (caught.value.kind, caught.value.found)

    found = everywhere(3, work, timeout_s=600.0)
    others = [("crashed", "KeyError('of the program')")] * 2
    assert found == [*others[:failing], None, *others[failing:]]


def test_missing_ranks_are_named_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(agreement: Agreement) -> Any:
        return agreement.all_reports("name", b"", b"".join)

    errors, _ = where_some_are_missing(4, (1, 3), work, monkeypatch)
    assert len(errors) == 2
    assert all(isinstance(e, DeadlineError) for e in errors)
    assert all(e.found == "missing ranks [1, 3]" for e in errors)


def rank_that_may_die(dying: int, reports: bool) -> str:
    ranks._FAN = 2  # so that rank 2 is one to which others post
    agreement = Agreement(ranks.board_of(None, 600.0), 600.0)
    agreement.on_rank_zero("all are here", lambda: None)
    if agreement.board.rank == dying:
        os._exit(7)
    try:
        if reports:
            agreement.all_reports("name", b"", b"".join)
        else:
            agreement.no_errors(None)
    except CkptdError as error:
        return f"{error.kind}: {error.where}"
    return "nobody noticed"


@pytest.mark.dist
@pytest.mark.parametrize(("reports", "dying"), [(False, 1), (True, 1), (True, 2), (True, 3)])
def test_a_dead_rank_is_noticed_long_before_the_time_is_up(reports: bool, dying: int) -> None:
    outcomes = rank_outcomes(4, rank_that_may_die, dying, reports, grace_s=PATIENCE_S)
    assert outcomes[dying].exit_code == 7
    for rank in {0, 1, 2, 3} - {dying}:
        assert str(outcomes[rank].value).startswith(f"rank-died: rank {dying}")
