"""Lives of a job as agents see them: restarts, ends at different times, pauses nobody marked."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import numpy as np
import pytest

from ckptd.monitor.job import Phase, RankView
from ckptd.monitor.report import EvidenceReport, RankNote, Stack
from ckptd.monitor.ring import RecorderState
from ckptd_simulated.job import Mesh, play, views
from tests.monitor.jobs import changed, inside, outside
from tests.monitor.watched import JOB, PERIOD, Fed, told

MESH = Mesh(2, 2, 4)


@functools.cache
def base() -> list[RankView]:
    return views(play(MESH, [], np.random.default_rng(0), age=0.1))


def training(step: int, *, life: int = 0, ranks: Iterable[int] = range(16)) -> list[RankView]:
    """Ranks between two steps: nobody waits for anybody."""
    seen = []
    for v in base():
        if v.rank in ranks:
            groups = v.groups.copy()
            groups["entered"] += step
            groups["completed"] = groups["entered"]
            now = {"pending_group": 0, "pending_seq": 0, "pending_since": float("nan")}
            here = {"pid": 100 * life + v.rank + 1, "step": step, "steps_done": step}
            seen.append(changed(v, groups=groups, calls=v.calls[:0], **here, **now))
    return seen


def starting(life: int, ranks: Iterable[int]) -> list[RankView]:
    """Ranks of a new life that have imported their modules and made no call."""
    return [
        changed(v, phase=Phase.INIT, step=-1, steps_done=0, groups=v.groups[:0])
        for v in training(0, life=life, ranks=ranks)
    ]


def gone(seen: list[RankView], codes: Mapping[int, int | None]) -> list[RankView]:
    """The same with ranks ended: with 0 or None in good order."""
    out = []
    for v in seen:
        if v.rank in codes:
            v = changed(v, alive=False, exit_code=codes[v.rank], process_state="Z")
            v = changed(v, phase=Phase.EXIT) if codes[v.rank] in (0, None) else v
        out.append(v)
    return out


def notes(life: int) -> dict[int, RankNote]:
    return {r: RankNote(generation=life, lived=10.0) for r in range(MESH.ranks)}


@pytest.mark.parametrize("agents_too", [False, True])
def test_a_restart_by_the_launcher_is_no_second_incident(agents_too: bool) -> None:
    """One rank crashes, torchrun ends the others, and all begin anew from an earlier step."""
    fed = Fed()
    fed.notes = notes(0)
    fed.settle(training(40))
    fed.show(gone(training(41), {6: -11}), rounds=2)
    rest: dict[int, int | None] = {**dict.fromkeys(range(8), -6), 6: -11}
    fed.show(gone(training(41), rest), rounds=2)
    rest |= dict.fromkeys(range(8, 16), -15)
    fed.show(gone(training(41), rest), rounds=20)
    if agents_too:
        fed.life = "b"
    # The ranks of the new life come one after the other, beside what is left of the old one.
    fed.notes = {r: RankNote(generation=int(r < 4), lived=10.0) for r in range(16)}
    old = gone(training(41), rest)
    fed.show([*starting(1, range(4)), *old[4:]], rounds=12)
    fed.notes = notes(1)
    fed.show(starting(1, range(12)), rounds=12)
    for step in range(30, 70):
        fed.show(training(step, life=1), rounds=2)
    assert told(fed.opened) == [("crash", ("6",))]
    assert [i.id for i in fed.closed] == [fed.opened[0].id]
    assert fed.watch.generation == 1
    assert [i.state for i in fed.watch.incidents] == ["closed"]


@pytest.mark.parametrize("code", [0, None])
@pytest.mark.parametrize("agent_stays", [True, False])
def test_a_node_that_is_done_earlier_is_not_missed(code: int | None, agent_stays: bool) -> None:
    """Its ranks have ended in good order; those of the other node go on among themselves."""
    fed = Fed()
    fed.notes = notes(0)
    fed.settle(training(40))
    first = dict.fromkeys(range(8, 16), code)
    fed.notes |= {r: RankNote(recorder=RecorderState.OFF) for r in range(8, 16)}
    for step in range(41, 161):  # for 30 s
        seen = gone(training(40), first)[8:]
        fed.send([*training(step, ranks=range(8)), *(seen if agent_stays or step < 43 else ())])
        fed.round()
    fed.notes |= {r: RankNote(recorder=RecorderState.OFF) for r in range(16)}
    last: dict[int, int | None] = dict.fromkeys(range(16), code)
    fed.show(gone(training(161), last), rounds=100)
    assert told(fed.opened) == []


@pytest.mark.parametrize("code", [0, None])
def test_a_node_that_is_done_is_not_missed_by_who_waits_for_others(code: int | None) -> None:
    """The others take their time in a call of a group that it is not a member of."""
    fed = Fed()
    mine, theirs = 5, 6

    def moment(age: float) -> list[RankView]:
        return [
            *(inside(r, mine, 9, age=age, size=2, world=4, node="n0") for r in (0, 1)),
            *(
                changed(
                    outside(r, theirs, 9, idle=1.0, size=2, world=4, node="n1"),
                    alive=False,
                    exit_code=code,
                    phase=Phase.EXIT,
                )
                for r in (2, 3)
            ),
        ]

    fed.settle(
        [inside(r, mine if r < 2 else theirs, 9, age=0.1, size=2, world=4) for r in range(4)]
    )
    fed.notes = {r: RankNote(recorder=RecorderState.OFF) for r in (2, 3)}
    for age in np.arange(0.25, 10.0, 0.25).tolist():
        fed.show(moment(age))
    assert told(fed.opened) == []


@pytest.mark.parametrize("state", ["t", "S"])
def test_a_pause_in_a_debugger_is_told_once(state: str) -> None:
    """Nobody said that it would pause; the others wait for it for ten minutes."""
    fed = Fed()
    fed.settle([inside(r, 5, 9, age=0.1, size=4) for r in range(4)])
    for age in np.arange(0.5, 600.0, 15.0).tolist():
        others = [inside(r, 5, 9, age=age, size=4) for r in range(3)]
        fed.now += 15.0 - PERIOD
        fed.show([*others, outside(3, 5, 8, idle=age, size=4, process_state=state)])
    assert told(fed.opened) == [("non-communication hang", ("3",))]
    assert fed.closed == []
    for seq in range(10, 60):
        fed.now += 0.75
        fed.show([inside(r, 5, seq, age=0.1, size=4) for r in range(4)])
    assert len(fed.opened) == 1
    assert [i.state for i in fed.watch.incidents] == ["closed"]


def test_a_hang_after_a_restart_has_the_stacks_of_its_own_processes() -> None:
    fed = Fed()
    for life in range(2):
        fed.notes = {r: RankNote(generation=life, lived=10.0) for r in range(4)}
        fed.settle([inside(r, 5, 9, age=0.1, size=4) for r in range(4)])
        for age in np.arange(0.5, 35.0, 0.5).tolist():
            others = [inside(r, 5, 9, age=age, size=4) for r in range(3)]
            fed.show([*others, outside(3, 5, 8, idle=age, size=4)])
        assert fed.watch.orders("n1-a", fed.now).stacks == (3,)
        stacks = {3: Stack(text=f"of life {life}")}
        found = EvidenceReport(job=JOB, source="n1-a", number=life, stacks=stacks)
        fed.watch.take_found(found, fed.now)
        fed.show([*others, outside(3, 5, 8, idle=40.0, size=4)])
    assert told(fed.opened) == [("non-communication hang", ("3",))] * 2
    assert [i.stacks[3].text for i in fed.watch.incidents] == ["of life 0", "of life 1"]
