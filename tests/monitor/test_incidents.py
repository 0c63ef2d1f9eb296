from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from ckptd.errors import NotFoundError
from ckptd.monitor.incidents import (
    IncidentTracker,
    RoundFacts,
    follows,
    latency,
    same_cause,
)
from ckptd.monitor.report import ProbeResult, Stack
from ckptd.monitor.settings import WatchSettings
from ckptd.monitor.verdict import Suspect, SuspectKind, Verdict, VerdictKind


def verdict(kind: VerdictKind, *ranks: int, groups: tuple[int, ...] = (), **other: Any) -> Verdict:
    usual: dict[str, Any] = {
        "evidence": (),
        "rules_out": (),
        "refuted_by": "",
        "action": "",
        "numbers": {},
    }
    suspects = tuple(Suspect(SuspectKind.RANK, str(r), 0.95) for r in ranks)
    return Verdict(kind=kind, suspects=suspects, groups=groups, **(usual | other))


def moment(now: float, **other: Any) -> RoundFacts:
    usual: dict[str, Any] = {"nodes": 100, "node_of": {r: f"n{r // 8}" for r in range(800)}}
    return RoundFacts(now=now, unix=1e9 + now, **(usual | other))


class Book:
    """A casebook, and the moment."""

    def __init__(self, **settings: Any) -> None:
        self.book = IncidentTracker("my job!", WatchSettings(**settings))
        self.now = 0.0

    def judge(self, *verdicts: Verdict, after: float = 0.25, **other: Any) -> Any:
        self.now += after
        return self.book.judge(verdicts, moment(self.now, **other))


@pytest.mark.parametrize(
    ("kind", "rounds"),
    [
        (VerdictKind.CRASH, 1),
        (VerdictKind.MISMATCH, 1),
        (VerdictKind.DESYNC, 1),
        (VerdictKind.SLOW_RANK, 1),
        (VerdictKind.HANG, 2),
        (VerdictKind.DEADLOCK, 2),
        (VerdictKind.COMM_HANG, 2),
        (VerdictKind.CANNOT_SAY, 2),
    ],
)
def test_how_often_a_verdict_must_hold(kind: VerdictKind, rounds: int) -> None:
    book = Book()
    for k in range(rounds):
        opened = book.judge(verdict(kind, 3)).opened
        assert bool(opened) == (k == rounds - 1)
    assert opened[0].id == "my-job--1"
    assert opened[0].nodes == ("n0",)


def test_two_verdicts_of_one_round_on_one_cause_confirm_nothing() -> None:
    book = Book()
    hang, circle = verdict(VerdictKind.HANG, 3), verdict(VerdictKind.DEADLOCK, 3, 4)
    assert not book.judge(hang, circle).opened
    assert not book.judge(after=0.25).opened  # gone again
    assert not book.judge(hang, circle).opened
    assert len(book.judge(hang, circle).opened) == 1


def test_a_mismatch_without_a_majority_must_hold() -> None:
    both = verdict(VerdictKind.MISMATCH, 3)
    both = Verdict(
        **{f: getattr(both, f) for f in both.__struct_fields__ if f != "suspects"},
        suspects=(Suspect(SuspectKind.RANK, "3", 0.5), Suspect(SuspectKind.RANK, "4", 0.5)),
    )
    book = Book()
    assert not book.judge(both).opened
    assert book.judge(both).opened


def test_two_causes_are_two_incidents() -> None:
    book = Book(confirm=1)
    changes = book.judge(verdict(VerdictKind.SLOW_RANK, 3), verdict(VerdictKind.HANG, 9))
    assert [i.kind for i in changes.opened] == ["slow rank", "non-communication hang"]
    assert not book.judge(verdict(VerdictKind.SLOW_RANK, 3), verdict(VerdictKind.HANG, 9)).opened
    assert book.judge(verdict(VerdictKind.SLOW_RANK, 4)).opened


def test_other_figures_are_no_news_and_other_suspects_are() -> None:
    book = Book(confirm=1)
    book.judge(verdict(VerdictKind.HANG, 3, numbers={"idle s": 31.0}))
    changes = book.judge(verdict(VerdictKind.HANG, 3, numbers={"idle s": 31.5}))
    assert changes.updated == ()
    assert book.book.incidents[0].verdict.numbers["idle s"] == 31.5
    changes = book.judge(verdict(VerdictKind.HANG, 3, 60))
    assert [i.nodes for i in changes.updated] == [("n0", "n7")]


def test_what_stands_still_may_turn_out_to_be_something_else() -> None:
    book = Book(confirm=1)
    book.judge(verdict(VerdictKind.CANNOT_SAY, 3))
    changes = book.judge(verdict(VerdictKind.HANG, 3))
    assert changes.opened == ()
    assert [i.kind for i in changes.updated] == ["non-communication hang"]
    # When less is heard again, what was known stays.
    book.judge(verdict(VerdictKind.CANNOT_SAY, 3))
    assert book.book.incidents[0].kind == "non-communication hang"


def test_waits_beside_a_crash_are_its_consequences() -> None:
    book = Book(confirm=1)
    book.judge(verdict(VerdictKind.CRASH, 3))
    changes = book.judge(
        verdict(VerdictKind.CRASH, 3), verdict(VerdictKind.DEADLOCK, 70, groups=(4,))
    )
    assert changes.opened == ()
    assert changes.updated[0].consequences == ("then: deadlock",)
    assert book.judge(verdict(VerdictKind.SLOW_RANK, 70)).opened


def test_an_incident_closes_only_when_others_have_been_seen_for_long() -> None:
    book = Book(confirm=1)
    book.judge(verdict(VerdictKind.HANG, 3))
    assert book.judge(after=14.0).closed == ()
    assert [i.state for i in book.judge(after=2.0).closed] == ["closed"]
    assert book.judge(after=2.0).closed == ()
    assert book.judge(verdict(VerdictKind.HANG, 3)).opened[0].id == "my-job--2"


def test_the_same_rank_may_hang_again_after_a_restart() -> None:
    """The tracker took it for the open incident of the generation before, and reported nothing."""
    book = Book(confirm=1)
    assert book.judge(verdict(VerdictKind.HANG, 3), verdict(VerdictKind.SLOW_RANK, 70)).opened
    again = book.judge(
        verdict(VerdictKind.HANG, 3), verdict(VerdictKind.SLOW_RANK, 70), generation=1
    )
    assert [(i.kind, i.generation) for i in again.opened] == [("non-communication hang", 1)]


def test_early_only_what_is_plain_is_told() -> None:
    book = Book(confirm=1)
    kinds = (
        VerdictKind.HANG,
        VerdictKind.COMM_HANG,
        VerdictKind.DEADLOCK,
        VerdictKind.CANNOT_SAY,
        VerdictKind.MISMATCH,
    )
    changes = book.judge(*(verdict(k, 10 * i) for i, k in enumerate(kinds)), early=True)
    assert [i.kind for i in changes.opened] == ["mismatch"]
    assert book.judge(verdict(VerdictKind.CRASH, 90), early=True, generation=1).opened


def test_closed_ones_are_forgotten_when_there_are_many() -> None:
    book = Book(confirm=1, kept=3)
    for rank in range(6):
        book.judge(verdict(VerdictKind.SLOW_RANK, rank))
        book.judge(after=20.0)
    assert [i.id for i in book.book.incidents] == [f"my-job--{n}" for n in (4, 5, 6)]
    with pytest.raises(NotFoundError):
        book.book.get("my-job--1")


def test_evidence_goes_to_what_is_open() -> None:
    book = Book(confirm=1)
    book.judge(verdict(VerdictKind.COMM_HANG, 3, groups=(5,)))
    stack = Stack(text="a", how="py-spy")
    (changed,) = book.book.attach({3: stack}, {3: "log"}, {}, 1e9)
    assert (changed.stacks, changed.logs) == ({3: stack}, {3: "log"})
    assert book.book.attach({3: Stack(text="later")}, {}, {}, 1e9) == ()
    results = (ProbeResult(nonce=1, src="a", dst="b", seconds=0.1),)
    assert book.book.attach_probes(results, 1e9)[0].probes == results
    book.judge(after=20.0)
    assert book.book.attach({4: stack}, {}, {}, 1e9) == ()


def test_latency_is_the_age_of_the_sign() -> None:
    assert latency(verdict(VerdictKind.HANG, 1, numbers={"idle s": 31.0, "hung": 1})) == 31.0
    assert latency(verdict(VerdictKind.CRASH, 1)) == 0.0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (verdict(VerdictKind.HANG, 1), verdict(VerdictKind.HANG, 1, 2), True),
        (verdict(VerdictKind.HANG, 1), verdict(VerdictKind.HANG, 2), False),
        (verdict(VerdictKind.HANG, 1), verdict(VerdictKind.SLOW_RANK, 1), False),
        (
            verdict(VerdictKind.MISMATCH, 1, groups=(7,)),
            verdict(VerdictKind.DESYNC, 2, groups=(7,)),
            True,
        ),
        (
            verdict(VerdictKind.MISMATCH, 1, groups=(7,)),
            verdict(VerdictKind.MISMATCH, 2, groups=(8,)),
            False,
        ),
        (verdict(VerdictKind.CRASH, 1), verdict(VerdictKind.CRASH, 2), True),
        (verdict(VerdictKind.CANNOT_SAY), verdict(VerdictKind.CANNOT_SAY, 4), True),
        (verdict(VerdictKind.CANNOT_SAY, 4), verdict(VerdictKind.HANG, 4), True),
        (
            verdict(VerdictKind.DEADLOCK, 1, groups=(7,)),
            verdict(VerdictKind.COMM_HANG, groups=(7,)),
            True,
        ),
    ],
)
def test_what_is_of_one_cause(one: Verdict, other: Verdict, same: bool) -> None:
    assert same_cause(one, other) == same
    assert same_cause(other, one) == same


def test_what_follows_what() -> None:
    crash, hang, slow = (
        verdict(VerdictKind.CRASH, 1),
        verdict(VerdictKind.HANG, 2),
        verdict(VerdictKind.SLOW_RANK, 3),
    )
    assert follows(hang, crash)
    assert follows(crash, hang)
    assert not follows(slow, crash)
    assert not follows(hang, slow)
    assert not follows(verdict(VerdictKind.CANNOT_SAY, 1), crash)


def test_calls_that_a_backend_ends_a_rank_for_are_the_cause_of_its_end() -> None:
    book = Book()
    crash = replace(
        verdict(VerdictKind.CRASH, 3), suspects=(Suspect(SuspectKind.RANK, "3", 0.95, "signal 6"),)
    )
    (opened,) = book.judge(crash).opened
    differ = verdict(VerdictKind.MISMATCH, 3)
    changes = book.judge(crash, differ, after=1.0, pid_of={3: 4711})
    assert changes.opened == ()
    (now,) = changes.updated
    assert (now.id, now.kind) == (opened.id, "mismatch")
    assert now.consequences == ("rank 3: signal 6",)
    assert now.pids == {3: ("n0", 4711)}
    after = replace(crash, evidence=("rank 5: exit code 1",))
    (later,) = book.judge(differ, after).updated
    assert (later.kind, later.consequences[-2:]) == (
        "mismatch",
        ("rank 3: signal 6", "rank 5: exit code 1"),
    )


def test_calls_of_another_rank_are_not_why_a_rank_ended() -> None:
    book = Book()
    book.judge(verdict(VerdictKind.CRASH, 3))
    (opened,) = book.judge(verdict(VerdictKind.MISMATCH, 4), after=1.0).opened
    assert opened.kind == "mismatch"
