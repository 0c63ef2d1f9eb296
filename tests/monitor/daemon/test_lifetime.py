"""What time is spent on: compared with an oracle that replays a timeline of whole steps."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.events.event import Opened, VersionApplied, VersionPublished
from ckptd.monitor.daemon.lifetime import TimeSpent, Versions
from ckptd.monitor.daemon.rounds import RoundResult
from ckptd.monitor.incidents import Incident
from ckptd.monitor.job import JOINED_CALL, RANK, CallFlag, JobView, Phase, no_job
from ckptd.monitor.verdict import Verdict, VerdictKind

PERIOD_S = 0.25
CLOSES_AFTER_S = 15.0
RANKS = 4


def incident(kind: VerdictKind, opened: float, latency: float, **numbers: float) -> Incident:
    verdict = Verdict(
        kind=kind,
        suspects=(),
        evidence=("it is so",),
        rules_out=(),
        refuted_by="",
        action="",
        numbers=numbers,
    )
    return Incident(
        id=f"j-{opened}",
        kind=str(kind),
        verdict=verdict,
        opened_at=opened,
        updated_at=opened,
        latency_s=latency,
    )


@dataclass
class Timeline:
    """A job as it was: rounds of a daemon go to `spent`, whole seconds to `wanted`."""

    spent: TimeSpent = field(default_factory=TimeSpent)
    wanted: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    now: float = 0.0
    step: int = 0
    done: int = 0
    high: int = 0
    counted: bool = False
    seen: list[Incident] = field(default_factory=list)
    due: float = 0.0
    slack: float = 2 * PERIOD_S
    """Seconds by which rounds may differ from the truth, for each thing that happens."""

    def job(self, phase: Phase, alive: bool, code: int) -> JobView:
        ranks = np.zeros(RANKS, RANK)
        ranks["rank"], ranks["alive"], ranks["phase"] = np.arange(RANKS), alive, phase
        ranks["exit_code"] = code
        ranks["step"], ranks["steps_done"] = self.step, self.done
        calls = np.zeros(1, JOINED_CALL)
        calls["flags"] = CallFlag.COUNTED if self.counted else 0
        return JobView(RANKS, ("n0",), ranks, no_job().groups, calls, {})

    def goes_on(
        self,
        seconds: float,
        phase: Phase = Phase.TRAIN,
        shows: Incident | None = None,
        *,
        alive: bool = True,
        code: int = -9,
        reports: bool = True,
    ) -> None:
        """Make the rounds of so many seconds, in which nothing of the job changes."""
        end = self.now + seconds
        while self.due <= end:
            at = self.due
            if shows is not None and at >= shows.opened_at:
                shows = replace_at(shows, at)
                self.seen = [i for i in self.seen if i.id != shows.id] + [shows]
            still = [i for i in self.seen if at - i.updated_at < CLOSES_AFTER_S]
            job = self.job(phase, alive, code) if reports else no_job()
            self.spent.add(RoundResult(1, at, at, job, incidents=tuple(still), period_s=PERIOD_S))
            self.due += PERIOD_S
        self.now = end

    def steps(self, count: int, step_s: float, shows: Incident | None = None) -> None:
        for _ in range(count):
            self.goes_on(step_s, shows=shows)
            self.step += 1
            self.done += 1
            again = self.step <= self.high and not self.counted
            self.wanted["again" if again else "TRAIN"] += step_s
            self.high = max(self.high, self.step)
        self.slack += step_s

    def slow(self, count: int, step_s: float, share: float) -> None:
        """Make steps of which a share is what a slow rank costs, told after 20 of them."""
        before = self.wanted["TRAIN"]
        self.steps(20, step_s)
        told = incident(VerdictKind.SLOW_RANK, self.now, 20 * step_s, **{"share of a step": share})
        self.steps(count, step_s, told)
        lost = share * (self.wanted["TRAIN"] - before)
        self.wanted["TRAIN"] -= lost
        self.wanted["slow"] += lost
        self.slack += 4 * step_s

    def hangs(self, seconds: float) -> None:
        """Stand still, and go on: told after five seconds, over with the next step."""
        self.goes_on(seconds, shows=incident(VerdictKind.HANG, self.now + 5.0, 5.0))
        self.wanted["stuck"] += seconds
        self.slack += 2 * PERIOD_S

    def crashes(self, seconds: float, back: int, reports: bool) -> None:
        """End, and begin again `back` steps before."""
        told = incident(VerdictKind.CRASH, self.now + 1.0, 1.0)
        self.goes_on(seconds, shows=told, alive=False, reports=reports)
        self.wanted["restarting"] += seconds
        self.step, self.done = max(self.step - back, 0), 0
        self.goes_on(1.0, Phase.INIT)
        self.wanted["INIT"] += 1.0
        self.slack += 2 * PERIOD_S

    def phase(self, phase: Phase, seconds: float) -> None:
        self.goes_on(seconds, phase)
        self.wanted[phase.name] += seconds
        self.slack += 2 * PERIOD_S


def replace_at(one: Incident, at: float) -> Incident:
    return msgspec.structs.replace(one, updated_at=at)


ACTS: Any = st.one_of(
    st.tuples(st.just("steps"), st.integers(5, 80), st.sampled_from([0.1, 0.4, 2.0])),
    st.tuples(st.just("slow"), st.integers(5, 60), st.just(0.4), st.sampled_from([0.2, 0.5])),
    st.tuples(st.just("hangs"), st.sampled_from([8.0, 20.0, 60.0])),
    st.tuples(st.just("crashes"), st.sampled_from([3.0, 30.0]), st.integers(0, 60), st.booleans()),
    st.tuples(st.just("phase"), st.sampled_from([Phase.CKPT, Phase.EVAL]), st.just(12.0)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ACTS, min_size=1, max_size=8), st.booleans())
def test_time_is_what_an_oracle_of_whole_steps_says(
    acts: list[tuple[Any, ...]], counted: bool
) -> None:
    line = Timeline(counted=counted)
    line.steps(30, 0.2)
    for name, *arguments in acts:
        getattr(line, name)(*arguments)
        if counted and name == "crashes":
            line.step = line.high = 0
        line.steps(20, 0.2)
    line.goes_on(PERIOD_S)
    told = line.spent.document()
    assert told is not None
    kinds = {*told.seconds, *line.wanted}
    for kind in kinds:
        difference = told.seconds.get(kind, 0.0) - line.wanted[kind]
        assert abs(difference) <= line.slack, (kind, told.seconds, dict(line.wanted))
    assert sum(told.seconds.values()) == pytest.approx(sum(line.wanted.values()), abs=1.0)


def test_an_incident_costs_what_it_lasts_and_not_until_it_is_closed() -> None:
    line = Timeline()
    line.steps(50, 0.2)
    line.hangs(20.0)
    line.steps(200, 0.2)
    told = line.spent.document()
    assert told is not None
    assert told.seconds["stuck"] == pytest.approx(20.0, abs=0.8)
    assert told.share == pytest.approx(50.0 / 70.0, abs=0.02)


def test_while_it_hangs_that_is_said() -> None:
    line = Timeline()
    line.steps(50, 0.2)
    line.goes_on(30.0, shows=incident(VerdictKind.HANG, line.now + 5.0, 5.0))
    told = line.spent.document()
    assert told is not None
    assert told.seconds["stuck"] == pytest.approx(30.0, abs=0.8)


def test_before_the_first_rank_and_after_a_good_end_nothing_is_lost() -> None:
    line = Timeline()
    line.goes_on(60.0, reports=False)
    assert line.spent.document() is None
    line.steps(50, 0.2)
    line.goes_on(600.0, Phase.EXIT, alive=False, code=0)
    told = line.spent.document()
    assert told is not None
    assert told.seconds["waiting"] == pytest.approx(660.0, abs=0.8)
    assert told.share == pytest.approx(1.0)
    # Another run of the job begins at 0, and makes no step again.
    line.step = line.done = line.high = 0
    line.steps(50, 0.2)
    told = line.spent.document()
    assert told is not None
    assert "again" not in told.seconds


def test_ranks_that_mark_no_step_train() -> None:
    line = Timeline(step=-1)
    line.goes_on(30.0)
    line.goes_on(10.0, shows=incident(VerdictKind.DEADLOCK, line.now, 2.0))
    line.goes_on(30.0)
    told = line.spent.document()
    assert told is not None
    assert told.seconds["TRAIN"] == pytest.approx(60.0, abs=1.6)
    assert told.seconds["stuck"] == pytest.approx(10.0, abs=1.6)


def test_steps_that_are_counted_from_a_loaded_one_are_made_again() -> None:
    line = Timeline(counted=True)
    line.steps(100, 0.2)
    line.crashes(3.0, back=60, reports=True)
    line.steps(100, 0.2)
    told = line.spent.document()
    assert told is not None
    assert told.seconds["again"] == pytest.approx(12.0, abs=0.8)
    assert told.seconds["TRAIN"] == pytest.approx(28.0, abs=0.8)


def test_steps_that_are_counted_from_0_may_be_new_ones() -> None:
    line = Timeline(counted=True)
    line.steps(100, 0.2)
    line.crashes(3.0, back=100, reports=True)
    line.steps(100, 0.2)
    told = line.spent.document()
    assert told is not None
    assert "again" not in told.seconds


def _head(pid: int) -> Opened:
    return Opened(host="h", pid=pid, clock="c", wall_ns=0, monotonic_ns=0)


def _published(pid: int, number: int, at: int, skipped: str = "") -> tuple[Opened, Any]:
    at_ns = at * 1_000_000_000
    event = VersionPublished(
        step=10 * number, generation=0, rank=0, at_ns=at_ns, number=number, skipped=skipped
    )
    return _head(pid), event


def _applied(pid: int, number: int, at: int, received: int = 0, **more: int) -> tuple[Opened, Any]:
    at_ns = at * 1_000_000_000
    event = VersionApplied(
        step=10 * number,
        generation=0,
        rank=0,
        at_ns=at_ns,
        number=number,
        received=received,
        **more,
    )
    return _head(pid), event


def test_versions_are_those_of_the_newest_publisher() -> None:
    found = [
        *(_published(1, number, 10 + number) for number in range(1, 90)),
        _applied(7, 80, 95, bytes=1000),  # of a publisher before
        *(_published(2, number, 200 + number) for number in range(1, 71)),
        _published(2, 71, 300, skipped="both slots are held"),
        _applied(3, 1, 202, bytes=100, received=100),
        _applied(3, 69, 280, bytes=60, unchanged=40, received=5),
        _applied(4, 67, 281, bytes=100),
        _applied(4, 0, 282, bytes=9),  # of a root
        _applied(5, 3, 203, bytes=100),  # it is gone, or stopped long ago
    ]
    for order in (found, found[::-1]):
        versions = Versions()
        assert versions.document() is None
        for head, event in order:
            versions.add(head, event)
        document = versions.document()
        assert document is not None
        assert (document.number, document.step, document.published_at) == (70, 700, 270.0)
        assert (document.workers, document.behind) == (2, 3)
        assert (document.received, document.whole, document.mapped) == (105, 200, 200)


def test_a_publisher_of_the_same_process_begins_again() -> None:
    versions = Versions()
    for head, event in (
        _published(1, 1, 1),
        _published(1, 2, 2),
        _applied(2, 2, 3, bytes=1),
        _published(1, 1, 4),
    ):
        versions.add(head, event)
    document = versions.document()
    assert document is not None
    assert (document.number, document.workers, document.mapped) == (1, 0, 0)
