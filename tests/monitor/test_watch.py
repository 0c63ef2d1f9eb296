from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from ckptd.errors import ConflictError, NotFoundError, RefusedError
from ckptd.monitor.job import Phase, RankView
from ckptd.monitor.report import (
    AgentState,
    EvidenceReport,
    GroupInfo,
    NodeReport,
    ProbeResult,
    RankNote,
    Stack,
    from_views,
    merge,
    pack,
    unpack_report,
)
from ckptd.monitor.ring import RecorderState
from ckptd.monitor.rules.limits import HangLimits
from ckptd.monitor.settings import WatchSettings
from ckptd.monitor.verdict import SuspectKind, VerdictKind
from ckptd.monitor.watch import JobWatch
from ckptd_simulated.job import Fault, Mesh, Planted, play, views
from tests.monitor.jobs import changed, inside, outside
from tests.monitor.watched import JOB, START, Fed, clean, infos, told

SMALL, MIDDLE, LARGE = Mesh(2, 2, 4), Mesh(8, 4, 8), Mesh(160, 8, 8)
MESHES = [
    pytest.param(SMALL, id="16"),
    pytest.param(MIDDLE, id="256"),
    pytest.param(LARGE, id="10240", marks=pytest.mark.long),
]
KINDS = {
    Planted.HANG: VerdictKind.HANG,
    Planted.STOP: VerdictKind.HANG,
    Planted.CRASH: VerdictKind.CRASH,
    Planted.SKIP: VerdictKind.MISMATCH,
    Planted.SIZE: VerdictKind.MISMATCH,
    Planted.SWAP: VerdictKind.DEADLOCK,
    Planted.LINK: VerdictKind.COMM_HANG,
}


def fault(mesh: Mesh, kind: Planted, rng: np.random.Generator) -> Fault:
    rank = int(rng.integers(mesh.ranks))
    length = int((mesh.program[mesh.place[1][rank]] >= 0).sum())
    first = mesh.place[1][rank] == 0
    call = {
        Planted.SIZE: length - 3,
        Planted.SKIP: length - (4 if first else 5),
        Planted.LINK: length - 2,
    }
    return Fault(kind, rank, call.get(kind, 1))


def stage_of(mesh: Mesh, rank: int) -> set[str]:
    return {str(mesh.tp * (rank // mesh.tp) + k) for k in range(mesh.tp)}


@pytest.mark.parametrize("kind", Planted)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_planted_fault_is_one_incident_that_names_it(mesh: Mesh, kind: Planted) -> None:
    rng = np.random.default_rng(3)
    planted = fault(mesh, kind, rng)
    fed = Fed()
    fed.settle(clean(mesh))
    fed.show(play(mesh, [planted], rng), rounds=4)
    assert [i.kind for i in fed.opened] == [KINDS[kind]]
    named = set(fed.opened[0].verdict.names())
    if kind is Planted.LINK:
        assert named == stage_of(mesh, planted.rank)
    elif kind is Planted.SIZE and mesh.dp == 2:
        assert str(planted.rank) in named  # of two that differ nobody knows who is right
        assert len(named) == 2
    else:
        assert named == {str(planted.rank)}
    assert fed.opened[0].nodes[0] == f"n{planted.rank // mesh.per_node}" or len(named) == 2
    assert fed.opened[0].state == "open"
    assert fed.watch.incidents[0].rounds > fed.opened[0].rounds


@pytest.mark.parametrize("mesh", MESHES)
def test_a_job_that_is_well_has_no_incident(mesh: Mesh) -> None:
    fed = Fed()
    for rounds in (3, 8, 20, 33):
        fed.settle(clean(mesh, rounds))
    assert fed.opened == []


def test_through_a_forwarder_it_is_the_same() -> None:
    rng = np.random.default_rng(3)
    planted = fault(MIDDLE, Planted.HANG, rng)
    fed = Fed()
    for number, job in enumerate([clean(MIDDLE), *3 * [play(MIDDLE, [planted], rng)]]):
        seen = views(job)
        for half in (0, 1):
            parts = [
                from_views(
                    [v for v in seen if v.node == f"n{n}"], job=JOB, source=f"n{n}", number=number
                )
                for n in range(half, MIDDLE.nodes, 2)
            ]
            one = merge(parts, [0.1] * len(parts), job=JOB, source=f"f{half}", number=number)
            fed.watch.take(unpack_report(pack(one)), fed.now)
        fed.round()
        fed.now += 2 * fed.watch.settings.settle_s * (number == 0)
    assert told(fed.opened) == [("non-communication hang", (str(planted.rank),))]
    assert {a.source for a in fed.watch.agents} == {"f0", "f1"}
    assert len(fed.watch.agents) == MIDDLE.nodes


def test_clocks_of_nodes_change_nothing() -> None:
    rng = np.random.default_rng(3)
    job = play(SMALL, [fault(SMALL, Planted.HANG, rng)], rng)
    shift = {"n0": 1e5, "n1": -7777.0}
    moved = []
    for v in views(job):
        by = shift[v.node]
        rows = v.calls.copy()
        rows["start"] += by
        rows["end"] += by
        moved.append(
            msgspec.structs.replace(
                v,
                at=v.at + by,
                moved=v.moved + by,
                heartbeat=v.heartbeat + by,
                pending_since=v.pending_since + by,
                calls=rows,
            )
        )
    one, other = Fed(), Fed()
    for fed, seen in ((one, views(job)), (other, moved)):
        fed.settle(clean(SMALL))
        fed.show(seen, rounds=3)
    assert told(one.opened) == told(other.opened)
    assert [c[0] for c in told(one.opened)] == ["non-communication hang"]
    for name, value in one.opened[0].verdict.numbers.items():
        assert other.opened[0].verdict.numbers[name] == pytest.approx(value, abs=1e-3)


# --- who may say what ---------------------------------------------------------------------------


def plain(**other: Any) -> NodeReport:
    return NodeReport(**({"job": JOB, "source": "a", "number": 5} | other))


def test_sheets_of_another_job_are_refused() -> None:
    with pytest.raises(RefusedError) as caught:
        JobWatch(JOB).take(plain(job="other"), 0.0)
    assert "this message belongs to another job" in caught.value.message
    with pytest.raises(RefusedError):
        JobWatch(JOB).take_found(EvidenceReport(job="other", source="a", number=0), 0.0)


@pytest.mark.parametrize("number", [5, 4, 0])
def test_sheets_that_came_before_are_refused(number: int) -> None:
    watch = JobWatch(JOB)
    watch.take(plain(), 0.0)
    with pytest.raises(ConflictError) as caught:
        watch.take(plain(number=number), 1.0)
    assert "this report, or a newer one of its source" in caught.value.message
    watch.take(plain(number=6), 1.0)
    watch.take(plain(source="b", number=0), 1.0)


def test_findings_that_came_before_are_refused() -> None:
    watch = JobWatch(JOB)
    watch.take(plain(), 0.0)
    watch.take_found(EvidenceReport(job=JOB, source="a", number=0), 0.0)
    with pytest.raises(ConflictError):
        watch.take_found(EvidenceReport(job=JOB, source="a", number=0), 0.0)


def test_without_sheets_nothing_happens() -> None:
    watch = JobWatch(JOB)
    for k in range(3):
        assert watch.round(float(k)).opened == ()
    assert len(watch.job(3.0).ranks) == 0


# --- who is not heard ---------------------------------------------------------------------------


def test_agents_that_fall_silent_make_no_incident() -> None:
    fed = Fed()
    fed.settle(clean(SMALL))
    for _ in range(200):
        fed.show(clean(SMALL), skip=["n1"])
    assert fed.opened == []
    assert {a.node: a.silent for a in fed.watch.agents} == {"n0": False, "n1": True}
    assert set(fed.watch.job(fed.now).ranks["rank"].tolist()) == set(range(8))


def test_ranks_do_not_age_while_their_agent_is_away() -> None:
    """An agent that is not scheduled for a while must not make its ranks stand still."""
    fed = Fed(WatchSettings(limits=HangLimits(floors=dict.fromkeys(Phase, 1.0))))
    waiting = [inside(r, 5, 9, age=0.1, size=4, node="n0") for r in range(3)]
    late = outside(3, 5, 8, idle=0.2, size=4, node="n1")
    fed.settle([*waiting, late])
    for k in range(12):  # for 3 s; those of the other agent go on to wait
        seen = [inside(r, 5, 9, age=0.1 + 0.25 * k, size=4, node="n0") for r in range(3)]
        fed.show([*seen, late], skip=["n1"])
    assert fed.opened == []


def test_a_silent_node_that_nobody_reaches_is_a_crash() -> None:
    fed = Fed()
    fed.agents = {f"n{k}": AgentState(address=f"h{k}:1") for k in range(4)}
    mesh = Mesh(4, 2, 4)
    fed.settle(clean(mesh))
    asked = []
    for _ in range(120):
        fed.show(clean(mesh), skip=["n2"])
        for node in ("n0", "n1", "n3"):
            for probe in fed.watch.orders(f"{node}-a", fed.now).probes:
                asked.append(probe)
                answer = ProbeResult(
                    nonce=probe.nonce, src=node, dst=probe.to_node, seconds=np.inf, error="no route"
                )
                found = EvidenceReport(
                    job=JOB, source=f"{node}-a", number=len(asked), probes=(answer,)
                )
                fed.watch.take_found(found, fed.now)
    assert {p.to_node for p in asked} == {"n2"}
    assert [i.kind for i in fed.opened] == ["crash"]
    assert fed.opened[0].verdict.names(SuspectKind.NODE) == ("n2",)


def test_a_node_that_refuses_is_there() -> None:
    fed = Fed()
    fed.agents = {f"n{k}": AgentState(address=f"h{k}:1") for k in range(4)}
    mesh = Mesh(4, 2, 4)
    fed.settle(clean(mesh))
    for _ in range(120):
        fed.show(clean(mesh), skip=["n2"])
        for node in ("n0", "n1", "n3"):
            for probe in fed.watch.orders(f"{node}-a", fed.now).probes:
                answer = ProbeResult(
                    nonce=probe.nonce,
                    src=node,
                    dst=probe.to_node,
                    seconds=np.inf,
                    error="Connection refused",
                    shows="node",
                )
                number = probe.nonce
                found = EvidenceReport(job=JOB, source=f"{node}-a", number=number, probes=(answer,))
                fed.watch.take_found(found, fed.now)
    assert fed.opened == []


def test_an_agent_that_starts_anew_takes_its_place() -> None:
    fed = Fed()
    fed.settle(clean(SMALL))
    fed.life = "b"
    fed.settle(clean(SMALL))
    assert fed.opened == []
    assert {a.source for a in fed.watch.agents} == {"n0-b", "n1-b"}
    assert len(fed.watch.job(fed.now).ranks) == SMALL.ranks


# --- after a start ------------------------------------------------------------------------------


def test_a_daemon_that_starts_in_a_hang_waits_until_it_has_settled() -> None:
    rng = np.random.default_rng(3)
    hung = play(SMALL, [Fault(Planted.HANG, 5, 1)], rng)
    fed = Fed()
    fed.show(hung, rounds=8)
    assert fed.opened == []
    fed.now += fed.watch.settings.settle_s
    fed.show(hung, rounds=4)
    assert told(fed.opened) == [("non-communication hang", ("5",))]


def test_a_daemon_that_starts_beside_a_dead_rank_says_so_at_once() -> None:
    fed = Fed()
    fed.show(play(SMALL, [Fault(Planted.CRASH, 5, 1)], np.random.default_rng(3)))
    assert told(fed.opened) == [("crash", ("5",))]


def test_a_daemon_asks_for_members_until_it_has_them() -> None:
    fed = Fed()
    fed.show(clean(SMALL))
    assert fed.watch.orders("n0-a", fed.now).tell
    fed.show(clean(SMALL), members=infos(SMALL))
    assert not fed.watch.orders("n0-a", fed.now).tell
    assert len(fed.watch.sources.names) == len(infos(SMALL))
    assert not fed.watch.orders("nobody", fed.now).tell


def test_a_restart_goes_on_with_what_was_open() -> None:
    rng = np.random.default_rng(3)
    hung = play(SMALL, [Fault(Planted.HANG, 5, 1)], rng)
    fed = Fed()
    fed.settle(clean(SMALL))
    fed.show(hung, rounds=4)
    again = Fed(incidents=fed.watch.incidents)
    again.settle(hung)
    again.show(hung, rounds=3)
    assert again.opened == []
    assert [i.id for i in again.watch.incidents] == [i.id for i in fed.watch.incidents]
    again.show(clean(SMALL))
    again.now += again.watch.settings.close_s + 1
    again.show(clean(SMALL))
    assert [i.state for i in again.watch.incidents] == ["closed"]
    again.show(play(SMALL, [Fault(Planted.CRASH, 1, 1)], rng))
    assert again.opened[0].id == f"{JOB}-2"


# --- ends of processes --------------------------------------------------------------------------


def ended(seen: list[RankView], codes: dict[int, int | None]) -> list[RankView]:
    return [
        changed(v, alive=False, exit_code=codes[v.rank], process_state="Z", answers=None)
        if v.rank in codes
        else v
        for v in seen
    ]


def idle(mesh: Mesh = SMALL) -> list[RankView]:
    """Ranks between two steps: nobody waits for anybody."""
    return [
        changed(v, pending_group=0, pending_seq=0, pending_since=float("nan"), calls=v.calls[:0])
        for v in views(play(mesh, [], np.random.default_rng(0), age=0.1))
    ]


@pytest.mark.parametrize("code", [-9, -11, -7, 1, 134])
def test_an_end_that_nobody_asked_for_is_a_crash(code: int) -> None:
    fed = Fed()
    fed.settle(idle())
    fed.show(ended(idle(), {6: code}), rounds=4)  # within a second
    assert told(fed.opened) == [("crash", ("6",))]


@pytest.mark.parametrize("code", [0, -15, -2])
def test_the_end_of_a_job_is_no_crash(code: int) -> None:
    """Ranks end one after the other, as they are told to or because they are done."""
    fed = Fed()
    fed.settle(idle())
    gone: dict[int, int | None] = {}
    for rank in range(SMALL.ranks):
        gone[rank] = code
        if rank % 6 == 5:
            fed.show(ended(idle(), gone))
    fed.show(ended(idle(), gone), rounds=200)
    assert fed.opened == []


def test_an_end_in_good_order_is_none_though_nobody_saw_its_code() -> None:
    fed = Fed()
    fed.settle(idle())
    fed.notes = {r: RankNote(recorder=RecorderState.OFF) for r in range(SMALL.ranks)}
    fed.show(ended(idle(), dict.fromkeys(range(8))), rounds=30)
    fed.show(ended(idle(), dict.fromkeys(range(16))), rounds=30)
    assert fed.opened == []


def test_who_leaves_while_others_wait_is_a_crash() -> None:
    fed = Fed()
    seen = [inside(r, 5, 9, age=3.0, size=4, node="n0") for r in range(3)]
    gone = changed(outside(3, 5, 8, idle=3.0, size=4, node="n1"), alive=False, exit_code=0)
    fed.settle([inside(r, 5, 9, age=0.1, size=4) for r in range(4)])
    fed.show([*seen, gone], rounds=3)
    assert told(fed.opened) == [("crash", ("3",))]


def test_who_is_told_to_end_alone_is_a_crash_after_a_second() -> None:
    fed = Fed()
    fed.settle(idle())
    fed.show(ended(idle(), {6: -15}), rounds=3)
    assert fed.opened == []
    fed.show(ended(idle(), {6: -15}), rounds=4)
    assert told(fed.opened) == [("crash", ("6",))]


def test_what_follows_a_crash_is_told_with_it() -> None:
    fed = Fed()
    fed.settle(idle())
    fed.show(ended(idle(), {6: -9}), rounds=2)
    fed.show(ended(idle(), {6: -9, 1: 1, 2: 1}), rounds=2)
    rest = dict.fromkeys(range(SMALL.ranks), -15) | {1: 1, 2: -6, 6: -9}
    fed.show(ended(idle(), rest), rounds=100)
    assert told(fed.opened) == [("crash", ("6",))]
    incident = fed.watch.incidents[0]
    assert incident.verdict.names() == ("6",)
    assert "rank 2: signal 6" in incident.consequences
    assert not any(line.startswith("rank 6:") for line in incident.consequences)


def test_an_error_is_told_after_the_signal_that_led_to_it() -> None:
    """A peer's end with an error may be seen before the end of the rank that it lost."""
    fed = Fed()
    fed.settle(idle())
    fed.show(ended(idle(), {1: 1}))
    fed.show(ended(idle(), {1: 1, 6: -11}), rounds=3)
    assert told(fed.opened) == [("crash", ("6",))]


def test_a_crash_after_a_restart_is_another() -> None:
    fed = Fed()
    fed.settle(idle())
    fed.show(ended(idle(), {6: -9}))
    fed.notes = {r: RankNote(generation=1) for r in range(SMALL.ranks)}
    fed.show(idle(), rounds=2)
    fed.show(ended(idle(), {2: -9}))
    assert told(fed.opened) == [("crash", ("6",)), ("crash", ("2",))]


def test_ends_after_a_mismatch_are_told_with_it() -> None:
    rng = np.random.default_rng(3)
    planted = fault(Mesh(4, 2, 4), Planted.SIZE, rng)
    mesh = Mesh(4, 2, 4)
    fed = Fed()
    fed.settle(idle(mesh))
    job = play(mesh, [planted], rng)
    fed.show(job, rounds=2)
    fed.show(ended(views(job), {planted.rank: -6}), rounds=8)
    assert told(fed.opened) == [("mismatch", (str(planted.rank),))]
    assert fed.watch.incidents[0].consequences == (f"rank {planted.rank}: signal 6",)


@pytest.mark.parametrize("state", [RecorderState.ASIDE, RecorderState.OFF])
def test_a_recorder_that_has_stepped_aside_makes_nobody_hang(state: RecorderState) -> None:
    """Its counters stand still for ever, and the others' go on."""
    settings = WatchSettings(limits=HangLimits(floors=dict.fromkeys(Phase, 1.0)))
    fed = Fed(settings)
    fed.settle([inside(r, 5, 9, age=0.1, size=4) for r in range(4)])
    fed.notes = {3: RankNote(recorder=state)}
    for k in range(12):
        fed.show(
            [
                *(inside(r, 5, 10 + k, age=0.2, size=4) for r in range(3)),
                outside(3, 5, 9, idle=100.0, size=4),
            ]
        )
    assert fed.opened == []
    assert len(fed.watch.job(fed.now).ranks) == 4


# --- an incident's life -------------------------------------------------------------------------


def test_an_incident_ends_when_it_is_not_seen_any_more() -> None:
    rng = np.random.default_rng(3)
    fed = Fed()
    fed.settle(clean(SMALL))
    fed.show(play(SMALL, [Fault(Planted.HANG, 5, 1)], rng), rounds=4)
    fed.show(clean(SMALL), rounds=4)
    assert fed.closed == []
    fed.now += fed.watch.settings.close_s
    fed.show(clean(SMALL))
    assert [i.state for i in fed.closed] == ["closed"]
    assert fed.closed[0].closed_at is not None
    assert fed.closed[0].opened_at < fed.closed[0].closed_at
    fed.show(play(SMALL, [Fault(Planted.HANG, 5, 1)], rng), rounds=4)
    assert len(fed.opened) == 2


def test_what_two_rounds_show_is_told_and_what_one_shows_is_not() -> None:
    rng = np.random.default_rng(3)
    hung = play(SMALL, [Fault(Planted.HANG, 5, 1)], rng)
    fed = Fed()
    fed.settle(clean(SMALL))
    for _ in range(5):
        fed.show(hung)
        fed.show(clean(SMALL))
    assert fed.opened == []


def test_a_round_without_news_confirms_nothing() -> None:
    rng = np.random.default_rng(3)
    fed = Fed()
    fed.settle(clean(SMALL))
    fed.show(play(SMALL, [Fault(Planted.HANG, 5, 1)], rng))
    for _ in range(100):
        fed.round()
    assert fed.opened == []


def test_people_can_say_that_they_have_seen_it() -> None:
    fed = Fed()
    fed.show(play(SMALL, [Fault(Planted.CRASH, 5, 1)], np.random.default_rng(3)))
    ident = fed.opened[0].id
    fed.watch.acknowledge(ident, "on it", fed.now)
    assert fed.watch.incidents[0].note == "on it"
    assert fed.watch.incidents[0].acknowledged_at == pytest.approx(fed.now + 1e9)
    with pytest.raises(NotFoundError) as caught:
        fed.watch.acknowledge("job-99", "", fed.now)
    assert "unknown incident" in caught.value.message


def test_stacks_of_suspects_are_asked_for_once_and_kept() -> None:
    rng = np.random.default_rng(3)
    fed = Fed()
    fed.settle(clean(SMALL))
    fed.show(play(SMALL, [Fault(Planted.HANG, 5, 1)], rng))
    orders = fed.watch.orders("n0-a", fed.now)
    assert 5 in orders.stacks
    assert 5 in orders.calls
    assert len(orders.stacks) <= 3
    assert fed.watch.orders("n0-a", fed.now).stacks == ()
    assert fed.watch.orders("n1-a", fed.now).stacks == ()
    stack = Stack(text="main.py:7", how="py-spy")
    found = EvidenceReport(
        job=JOB, source="n0-a", number=1, stacks={5: stack}, logs={5: "last words"}
    )
    fed.watch.take_found(found, fed.now)
    fed.show(play(SMALL, [Fault(Planted.HANG, 5, 1)], rng), rounds=3)
    incident = fed.watch.incidents[0]
    assert incident.stacks[5] == stack
    assert incident.logs[5] == "last words"
    assert "bytes" in incident.calls[5]


# --- pauses ------------------------------------------------------------------------


def test_pauses_that_agents_tell_are_learned() -> None:
    waiting = [inside(r, 5, 9, age=100.0, size=4) for r in range(3)]
    last = outside(3, 5, 8, idle=100.0, size=4)
    rows = clean(SMALL).calls[:1]
    calls = np.zeros(1, last.calls.dtype)
    for name in calls.dtype.names or ():
        calls[name] = rows[name]
    calls["group"], calls["seq"], calls["start"], calls["end"] = 5, 8, -101.0, -100.5
    calls["start"] += last.at
    calls["end"] += last.at
    seen = [*waiting, changed(last, calls=calls)]
    gaps = np.zeros(1, [("site", "<u8"), ("phase", "<u4"), ("op", "<u4"), ("seconds", "<f8")])
    for name in ("site", "phase", "op"):
        gaps[name] = rows[name]
    gaps["seconds"] = 90.0
    for known, kinds in ((False, ["non-communication hang"]), (True, [])):
        fed = Fed()
        fed.settle([inside(r, 5, 9, age=0.1, size=4) for r in range(4)])
        if known:
            sheet = from_views((), job=JOB, source="x", number=0, gaps=gaps)
            fed.watch.take(unpack_report(pack(sheet)), fed.now)
        fed.show(seen, rounds=3)
        assert [i.kind for i in fed.opened] == kinds


# --- settings -----------------------------------------------------------------------------------


def test_the_period_grows_with_the_job() -> None:
    fed = Fed()
    fed.show(clean(SMALL))
    assert fed.watch.orders("n0-a", fed.now).period_s == pytest.approx(0.25)
    many = JobWatch(JOB)
    for k in range(500):
        many.take(plain(source=f"s{k}"), START)
    assert many.orders("s0", START).period_s == pytest.approx(2.0)


def test_what_a_policy_asks_for_is_said_within_the_budget() -> None:
    settings = WatchSettings(policy={VerdictKind.CRASH: "act", VerdictKind.MISMATCH: "ask"})
    fed, mesh = Fed(settings), Mesh(16, 8, 8)
    fed.settle(idle(mesh))
    actions = []
    for generation, rank in enumerate((0, 100, 200)):
        fed.notes = {r: RankNote(generation=generation) for r in range(mesh.ranks)}
        fed.show(ended(idle(mesh), {rank: -9}))
        actions.append(fed.opened[-1].action)
        fed.show(idle(mesh))
    assert actions == ["act", "act", "ask"]
    assert not any(i.enforced for i in fed.opened)


def test_names_of_groups_are_those_first_told() -> None:
    fed = Fed()
    fed.show(clean(SMALL), members={9: GroupInfo.of((0, 1), "a", "dp")})
    assert fed.watch.sources.names[9].kind == "dp"
    assert tuple(fed.watch.sources.members[9]) == (0, 1)
