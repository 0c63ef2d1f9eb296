from __future__ import annotations

from typing import Any

import pytest

from ckptd.errors import NotFoundError
from ckptd.monitor.incidents.tracker import Casebook, Moment, follows, latency, same_cause
from ckptd.monitor.report import ProbeResult, Stack
from ckptd.monitor.settings import WatchSettings
from ckptd.monitor.verdict import Kind, Suspect, Target, Verdict


def verdict(kind: Kind, *ranks: int, groups: tuple[int, ...] = (), **other: Any) -> Verdict:
    usual: dict[str, Any] = {
        "evidence": (),
        "rules_out": (),
        "refuted_by": "",
        "action": "",
        "numbers": {},
    }
    suspects = tuple(Suspect(Target.RANK, str(r), 0.95) for r in ranks)
    return Verdict(kind=kind, suspects=suspects, groups=groups, **(usual | other))


def moment(now: float, **other: Any) -> Moment:
    usual: dict[str, Any] = {"nodes": 100, "node_of": {r: f"n{r // 8}" for r in range(800)}}
    return Moment(now=now, unix=1e9 + now, **(usual | other))


class Book:
    """A casebook, and the moment."""

    def __init__(self, **settings: Any) -> None:
        self.book = Casebook("my job!", WatchSettings(**settings))
        self.now = 0.0

    def judge(self, *verdicts: Verdict, after: float = 0.25, **other: Any) -> Any:
        self.now += after
        return self.book.judge(verdicts, moment(self.now, **other))


@pytest.mark.parametrize(
    ("kind", "rounds"),
    [
        (Kind.CRASH, 1),
        (Kind.MISMATCH, 1),
        (Kind.DESYNC, 1),
        (Kind.SLOW_RANK, 1),
        (Kind.HANG, 2),
        (Kind.DEADLOCK, 2),
        (Kind.COMM_HANG, 2),
        (Kind.CANNOT_SAY, 2),
    ],
)
def test_how_often_a_verdict_must_hold(kind: Kind, rounds: int) -> None:
    book = Book()
    for k in range(rounds):
        opened = book.judge(verdict(kind, 3)).opened
        assert bool(opened) == (k == rounds - 1)
    assert opened[0].id == "my-job--1"
    assert opened[0].nodes == ("n0",)


def test_two_verdicts_of_one_round_on_one_cause_confirm_nothing() -> None:
    book = Book()
    hang, circle = verdict(Kind.HANG, 3), verdict(Kind.DEADLOCK, 3, 4)
    assert not book.judge(hang, circle).opened
    assert not book.judge(after=0.25).opened  # gone again
    assert not book.judge(hang, circle).opened
    assert len(book.judge(hang, circle).opened) == 1


def test_a_mismatch_without_a_majority_must_hold() -> None:
    both = verdict(Kind.MISMATCH, 3)
    both = Verdict(
        **{f: getattr(both, f) for f in both.__struct_fields__ if f != "suspects"},
        suspects=(Suspect(Target.RANK, "3", 0.5), Suspect(Target.RANK, "4", 0.5)),
    )
    book = Book()
    assert not book.judge(both).opened
    assert book.judge(both).opened


def test_two_causes_are_two_incidents() -> None:
    book = Book(confirm=1)
    changes = book.judge(verdict(Kind.SLOW_RANK, 3), verdict(Kind.HANG, 9))
    assert [i.kind for i in changes.opened] == ["slow rank", "non-communication hang"]
    assert not book.judge(verdict(Kind.SLOW_RANK, 3), verdict(Kind.HANG, 9)).opened
    assert book.judge(verdict(Kind.SLOW_RANK, 4)).opened


def test_other_figures_are_no_news_and_other_suspects_are() -> None:
    book = Book(confirm=1)
    book.judge(verdict(Kind.HANG, 3, numbers={"idle s": 31.0}))
    changes = book.judge(verdict(Kind.HANG, 3, numbers={"idle s": 31.5}))
    assert changes.updated == ()
    assert book.book.incidents[0].verdict.numbers["idle s"] == 31.5
    changes = book.judge(verdict(Kind.HANG, 3, 60))
    assert [i.nodes for i in changes.updated] == [("n0", "n7")]


def test_what_stands_still_may_turn_out_to_be_something_else() -> None:
    book = Book(confirm=1)
    book.judge(verdict(Kind.CANNOT_SAY, 3))
    changes = book.judge(verdict(Kind.HANG, 3))
    assert changes.opened == ()
    assert [i.kind for i in changes.updated] == ["non-communication hang"]
    # When less is heard again, what was known stays.
    book.judge(verdict(Kind.CANNOT_SAY, 3))
    assert book.book.incidents[0].kind == "non-communication hang"


def test_waits_beside_a_crash_are_its_consequences() -> None:
    book = Book(confirm=1)
    book.judge(verdict(Kind.CRASH, 3))
    changes = book.judge(verdict(Kind.CRASH, 3), verdict(Kind.DEADLOCK, 70, groups=(4,)))
    assert changes.opened == ()
    assert changes.updated[0].consequences == ("then: deadlock",)
    assert book.judge(verdict(Kind.SLOW_RANK, 70)).opened


def test_an_incident_closes_only_when_others_have_been_seen_for_long() -> None:
    book = Book(confirm=1)
    book.judge(verdict(Kind.HANG, 3))
    assert book.judge(after=14.0).closed == ()
    assert [i.state for i in book.judge(after=2.0).closed] == ["closed"]
    assert book.judge(after=2.0).closed == ()
    assert book.judge(verdict(Kind.HANG, 3)).opened[0].id == "my-job--2"


def test_early_only_what_is_plain_is_told() -> None:
    book = Book(confirm=1)
    kinds = (Kind.HANG, Kind.COMM_HANG, Kind.DEADLOCK, Kind.CANNOT_SAY, Kind.MISMATCH)
    changes = book.judge(*(verdict(k, 10 * i) for i, k in enumerate(kinds)), early=True)
    assert [i.kind for i in changes.opened] == ["mismatch"]
    assert book.judge(verdict(Kind.CRASH, 90), early=True, generation=1).opened


def test_closed_ones_are_forgotten_when_there_are_many() -> None:
    book = Book(confirm=1, kept=3)
    for rank in range(6):
        book.judge(verdict(Kind.SLOW_RANK, rank))
        book.judge(after=20.0)
    assert [i.id for i in book.book.incidents] == [f"my-job--{n}" for n in (4, 5, 6)]
    with pytest.raises(NotFoundError):
        book.book.get("my-job--1")


def test_evidence_goes_to_what_is_open() -> None:
    book = Book(confirm=1)
    book.judge(verdict(Kind.COMM_HANG, 3, groups=(5,)))
    stack = Stack(text="a", how="py-spy")
    (changed,) = book.book.attach({3: stack}, {3: "log"}, {}, 1e9)
    assert (changed.stacks, changed.logs) == ({3: stack}, {3: "log"})
    assert book.book.attach({3: Stack(text="later")}, {}, {}, 1e9) == ()
    results = (ProbeResult(nonce=1, src="a", dst="b", seconds=0.1),)
    assert book.book.attach_probes(results, 1e9)[0].probes == results
    book.judge(after=20.0)
    assert book.book.attach({4: stack}, {}, {}, 1e9) == ()


def test_latency_is_the_age_of_the_sign() -> None:
    assert latency(verdict(Kind.HANG, 1, numbers={"idle s": 31.0, "hung": 1})) == 31.0
    assert latency(verdict(Kind.CRASH, 1)) == 0.0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (verdict(Kind.HANG, 1), verdict(Kind.HANG, 1, 2), True),
        (verdict(Kind.HANG, 1), verdict(Kind.HANG, 2), False),
        (verdict(Kind.HANG, 1), verdict(Kind.SLOW_RANK, 1), False),
        (verdict(Kind.MISMATCH, 1, groups=(7,)), verdict(Kind.DESYNC, 2, groups=(7,)), True),
        (verdict(Kind.MISMATCH, 1, groups=(7,)), verdict(Kind.MISMATCH, 2, groups=(8,)), False),
        (verdict(Kind.CRASH, 1), verdict(Kind.CRASH, 2), True),
        (verdict(Kind.CANNOT_SAY), verdict(Kind.CANNOT_SAY, 4), True),
        (verdict(Kind.CANNOT_SAY, 4), verdict(Kind.HANG, 4), True),
        (verdict(Kind.DEADLOCK, 1, groups=(7,)), verdict(Kind.COMM_HANG, groups=(7,)), True),
    ],
)
def test_what_is_of_one_cause(one: Verdict, other: Verdict, same: bool) -> None:
    assert same_cause(one, other) == same
    assert same_cause(other, one) == same


def test_what_follows_what() -> None:
    crash, hang, slow = verdict(Kind.CRASH, 1), verdict(Kind.HANG, 2), verdict(Kind.SLOW_RANK, 3)
    assert follows(hang, crash)
    assert follows(crash, hang)
    assert not follows(slow, crash)
    assert not follows(hang, slow)
    assert not follows(verdict(Kind.CANNOT_SAY, 1), crash)
