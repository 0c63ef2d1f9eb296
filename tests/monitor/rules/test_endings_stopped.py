"""A rank that the kernel shows as stopped hangs at once, one that is so for a moment does not."""

from __future__ import annotations

import numpy as np
import pytest

from ckptd.monitor.job import Phase, RankView
from tests.monitor import jobs
from tests.monitor.watched import Fed, told

ROUNDS = 40  # 10 s, which is less than any floor


def _moment(age: float, states: dict[int, str], *, entered: bool = False) -> list[RankView]:
    """Ranks 0 to 2 wait in a call, and 3 is before it, or in it as well."""
    seen = [jobs.inside(r, 7, 10, age, 4) for r in range(3)]
    last = jobs.inside(3, 7, 10, age, 4) if entered else jobs.outside(3, 7, 9, age, 4)
    return [
        jobs.changed(v, process_state=states.get(v.rank, "S"), node="n0") for v in (*seen, last)
    ]


def _shown(states: dict[int, str], *, entered: bool = False, every: int = 1) -> Fed:
    """Show stopped ranks in each round, or in one of `every`."""
    fed = Fed()
    fed.settle(_moment(0.0, {}, entered=entered))
    for n, age in enumerate((0.25 * np.arange(1, ROUNDS)).tolist()):
        fed.show(_moment(age, states if n % every == 0 else {}, entered=entered))
    return fed


@pytest.mark.parametrize("entered", [False, True])
@pytest.mark.parametrize("state", ["T", "t"])
def test_a_stopped_rank_is_told_before_the_floor(state: str, entered: bool) -> None:
    fed = _shown({3: state}, entered=entered)
    assert told(fed.opened) == [("non-communication hang", ("3",))]
    assert "stopped" in fed.opened[0].verdict.suspects[0].detail
    assert fed.opened[0].latency_s < 5.0


def test_a_profiler_that_stops_it_for_a_moment_now_and_then_makes_no_hang() -> None:
    assert not _shown({3: "t"}, every=2).opened


def test_a_job_that_is_stopped_as_a_whole_waits_for_nobody() -> None:
    assert not _shown(dict.fromkeys(range(4), "T")).opened


def test_a_stopped_rank_that_nobody_waits_for_is_left_alone() -> None:
    fed = Fed()
    for age in (0.25 * np.arange(ROUNDS)).tolist():
        seen = [jobs.outside(r, 7, 9, age if r == 3 else 0.0, 4) for r in range(4)]
        fed.show([jobs.changed(v, process_state="T" if v.rank == 3 else "R") for v in seen])
    assert not fed.opened


def test_an_agent_that_pauses_does_not_make_it_longer() -> None:
    """Its newest sheet shows a profiler at work; those of another node go on coming."""
    fed = Fed()
    fed.settle(_moment(0.0, {}))
    fed.show(_moment(20.0, {3: "t"}))
    for age in (20.0 + 0.25 * np.arange(12)).tolist():
        fed.send([jobs.changed(v, at=jobs.NOW + age) for v in [jobs.view(5, world=8, node="n1")]])
        fed.round()
    assert not fed.opened


def _told(views: list[RankView]) -> list[tuple[str, tuple[str, ...]]]:
    """What is told of ranks of which nothing changes for 15 s but their age."""
    fed = Fed()
    fed.settle([jobs.changed(v, moved=jobs.NOW) for v in views])
    for age in (0.25 * np.arange(1, 60)).tolist():
        aged = [jobs.changed(v, at=v.at + age, heartbeat=v.at + age) for v in views]
        fed.show(aged)
    return told(fed.opened)


def test_one_that_is_stopped_in_a_call_that_has_let_the_others_go() -> None:
    """The others wait in the next call, so that nobody is beside it in its own."""
    ahead = [jobs.inside(r, 7, 11, 0.0, 4, process_state="S", node="n0") for r in range(3)]
    last = jobs.inside(3, 7, 10, 0.0, 4, process_state="T", node="n0")
    assert _told([*ahead, last]) == [("non-communication hang", ("3",))]


def _without_calls(*states: str) -> list[RankView]:
    """Ranks of which nothing shows what they wait for: a key of the job store, say."""
    return [
        jobs.view(r, process_state=state, node="n0", moved=jobs.NOW, phase=Phase.INIT, steps_done=0)
        for r, state in enumerate(states)
    ]


def test_one_that_is_stopped_while_no_other_moves_though_no_call_shows_that_it_waits() -> None:
    assert _told(_without_calls("S", "S", "T", "S")) == [("non-communication hang", ("2",))]


@pytest.mark.parametrize("states", ["SRTS", "TTTT", "SSSS"])
def test_while_another_does_something_or_all_are_stopped_nothing_is_said(states: str) -> None:
    assert _told(_without_calls(*states)) == []


def _pipeline(states: str) -> list[RankView]:
    """Ranks 2 and 3 each wait for the one before, in a group of two; 0 and 1 are in no call."""
    pairs = [{n: (2, 4, 4) for n in (r, r + 1) if 1 <= n <= 3} for r in range(4)]
    free = [jobs.view(r, groups=jobs.groups(pairs[r]), moved=jobs.NOW) for r in (0, 1)]
    waits = [
        jobs.inside(r, r, 5, 0.0, 4, groups=jobs.groups(pairs[r] | {r: (2, 5, 4)})) for r in (2, 3)
    ]
    seen = zip([*free, *waits], states, strict=True)
    return [jobs.changed(view, process_state=state, node="n0") for view, state in seen]


@pytest.mark.parametrize(
    ("states", "named"), [("TSSS", "0"), ("SSSS", "1"), ("TRSS", "1"), ("STSS", "1")]
)
def test_who_sleeps_in_no_call_is_not_named_beside_one_that_is_stopped(
    states: str, named: str
) -> None:
    """Rank 1 waits for a key of the job store, which is a thread of rank 0."""
    fed = Fed()
    fed.settle(_pipeline("SSSS"))
    for age in (0.25 * np.arange(1, 160)).tolist():
        fed.show([jobs.changed(v, at=v.at + age, heartbeat=v.at + age) for v in _pipeline(states)])
    assert told(fed.opened) == [("non-communication hang", (named,))]
