"""Joining the events of all ranks: whatever the order, the same figures."""

from __future__ import annotations

import random
from statistics import median
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from ckptd.events.event import (
    AnyEvent,
    LoadDone,
    SaveBegun,
    SaveDurable,
    SaveFailed,
    SaveSkipped,
    Span,
    VersionApplied,
    VersionPublished,
)
from ckptd.events.profile import Profiles, SaveProfile

SECOND = 10**9


def ids(step: int = 1, rank: int = 0, attempt: str = "0001") -> dict[str, Any]:
    return {"step": step, "generation": 1, "attempt": attempt, "rank": rank}


def span(name: str, busy_s: float, *, at_s: float = 0.0, **fields: Any) -> Span:
    took = int(busy_s * SECOND)
    given = ids() | {"tier": "local", "duration_ns": took} | fields
    return Span(name=name, start_ns=int(at_s * SECOND), busy_ns=took, **given)


def profile(*events: AnyEvent) -> SaveProfile:
    profiles = Profiles()
    for event in events:
        profiles.add(event)
    (found,) = profiles.saves()
    return found


events = st.one_of(
    st.builds(
        Span,
        name=st.sampled_from(["call", "gate_wait", "digest", "write", "gather", "commit", "own"]),
        step=st.integers(0, 3),
        generation=st.integers(1, 2),
        attempt=st.sampled_from(["a", "b"]),
        rank=st.integers(0, 4),
        tier=st.sampled_from(["", "local"]),
        start_ns=st.integers(0, 1000),
        duration_ns=st.integers(0, 1000),
        busy_ns=st.integers(0, 1000),
        bytes=st.integers(0, 1000),
        error=st.sampled_from(["", "", "broken"]),
    ),
    *(
        st.builds(
            kind,
            step=st.integers(0, 3),
            generation=st.integers(1, 2),
            attempt=st.sampled_from(["a", "b"]),
            rank=st.integers(0, 4),
            at_ns=st.integers(0, 1000),
            **more,
        )
        for kind, more in (
            (SaveBegun, {}),
            (SaveDurable, {"tier": st.sampled_from(["local", "remote"])}),
            (SaveFailed, {"message": st.text(max_size=3)}),
            (SaveSkipped, {"reason": st.text(max_size=3)}),
        )
    ),
)


@given(st.lists(events, max_size=60), st.integers(1, 5), st.randoms())
def test_the_order_of_events_does_not_matter(
    some: list[AnyEvent], last: int, dice: random.Random
) -> None:
    first, second = Profiles(last), Profiles(last)
    for event in some:
        first.add(event)
    shuffled = some.copy()
    dice.shuffle(shuffled)
    for event in shuffled:
        second.add(event)
    assert first.saves() == second.saves()
    assert first.left_out == second.left_out


def test_published_versions_are_no_saves() -> None:
    profiles = Profiles()
    profiles.add(VersionPublished(step=1, generation=0, rank=0, at_ns=1, number=1))
    profiles.add(VersionApplied(step=1, generation=0, rank=0, at_ns=2, number=1))
    assert profiles.saves() == []
    assert profiles.left_out == 0


@given(st.lists(events, max_size=60))
def test_every_figure_is_that_of_the_events(some: list[AnyEvent]) -> None:
    profiles = Profiles()
    for event in some:
        profiles.add(event)
    for save in profiles.saves():
        mine = [
            e
            for e in some
            if (e.step, e.generation, e.attempt) == (save.step, save.generation, save.attempt)
        ]
        assert save.ranks == len({e.rank for e in mine})
        assert save.begun_ns <= min(
            (e.time_ns for e in mine if not isinstance(e, Span) or e.name != "retention"),
        )
        for phase in save.phases:
            spans = [
                e
                for e in mine
                if isinstance(e, Span) and (e.name, e.tier) == (phase.name, phase.tier)
            ]
            sums: dict[int, int] = {}
            for e in spans:
                sums[e.rank] = sums.get(e.rank, 0) + e.busy_ns
            assert phase.ranks == len(sums)
            assert phase.max_s == max(sums.values()) / 1e9
            assert phase.min_s == min(sums.values()) / 1e9
            assert phase.median_s == median(sums.values()) / 1e9
            assert sums[phase.slowest_rank] == max(sums.values())
            assert phase.bytes == sum(e.bytes for e in spans)


@given(st.lists(events, max_size=80), st.integers(1, 30))
def test_figures_are_bounded(some: list[AnyEvent], most: int) -> None:
    profiles = Profiles(100, most)
    for event in some:
        profiles.add(event)
    held = sum(
        s.ranks + sum(p.ranks for p in s.phases) + len(s.durable_s) for s in profiles.saves()
    )
    assert held <= most


def test_stall_is_the_call_and_the_gate() -> None:
    found = profile(
        span("call", 1.0), span("acquire", 0.5), span("gate_wait", 2.0), span("call", 4.0, rank=1)
    )
    assert found.stall is not None
    assert (found.stall.min_s, found.stall.max_s, found.stall.slowest_rank) == (3.0, 4.0, 1)


def test_the_slowest_phase_is_one_that_works() -> None:
    found = profile(span("call", 9.0), span("gather", 8.0), span("write", 2.0), span("digest", 1.0))
    assert found.slowest == "write"
    assert [p.name for p in found.phases] == ["call", "digest", "write", "gather"]
    assert profile(SaveBegun(**ids(), at_ns=1)).slowest == ""


def test_outcomes() -> None:
    begun = SaveBegun(**ids(), at_ns=0)
    durable = SaveDurable(**ids(), at_ns=3 * SECOND, tier="local")
    failed = SaveFailed(**ids(), at_ns=0, message="disk full")
    assert profile(begun).outcome == "unfinished"
    assert profile(begun, durable).durable_s == {"local": 3.0}
    assert profile(failed, durable).outcome == "durable"
    assert (profile(failed).outcome, profile(failed).reason) == ("failed", "disk full")
    assert profile(SaveSkipped(**ids(), at_ns=0, reason="full")).outcome == "skipped"
    # The trainers may be dead when the commit comes.
    assert profile(begun, span("commit", 1.0)).outcome == "durable"
    for name in ("call", "gather", "commit"):
        lost = profile(begun, span(name, 1.0, error="no-space"))
        assert (lost.outcome, lost.reason) == ("failed", "no-space")
    assert profile(begun, span("retention", 1.0, error="store")).outcome == "unfinished"


def test_total_time_leaves_retention_out() -> None:
    found = profile(
        span("call", 1.0), span("commit", 1.0, at_s=3.0), span("retention", 9.0, at_s=4)
    )
    assert found.seconds == 4.0


def test_loads_are_no_saves() -> None:
    profiles = Profiles()
    for name in ("fetch", "fill", "verify"):
        profiles.add(span(name, 1.0, attempt=""))
    profiles.add(LoadDone(step=1, generation=1, rank=0, at_ns=1, duration_ns=1))
    assert (profiles.saves(), profiles.loads) == ([], 1)


def test_only_the_newest_are_kept() -> None:
    profiles = Profiles(last=3)
    for step in (5, 1, 9, 3, 7, 5):
        profiles.add(SaveBegun(**ids(step), at_ns=0))
    assert [s.step for s in profiles.saves()] == [5, 7, 9]
    assert profiles.left_out == 2
