"""Which response an incident has."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ckptd.elastic.messages import NodeRow, Status
from ckptd.elastic.policy import Shape
from ckptd.monitor.daemon.response import RUN_POLICY, Response, is_over, response
from ckptd.monitor.incidents import Incident
from ckptd.monitor.verdict import Suspect, SuspectKind, Verdict, VerdictKind

NOW = 1000.0


def incident(kind: VerdictKind, *suspects: Suspect, **fields: Any) -> Incident:
    numbers = fields.pop("numbers", {})
    verdict = Verdict(
        kind=kind,
        suspects=suspects,
        evidence=(),
        rules_out=(),
        refuted_by="",
        action="",
        numbers=numbers,
    )
    usual: dict[str, Any] = {"id": "j-9", "nodes": ("n2",), "generation": 3, "action": "act"}
    more = {**usual, **fields}
    return Incident(kind=str(kind), verdict=verdict, opened_at=NOW, updated_at=NOW, **more)


def status(*spares: str, running: int = 4, generation: int = 3) -> Status:
    rows = [NodeRow(name=f"n{i}", up=True, slots=2, running=3) for i in range(running)]
    rows += [NodeRow(name=name, up=True, slots=2, spare=True) for name in spares]
    return Status(
        job="j",
        state="running",
        reason="",
        since=0.0,
        at=0.0,
        generation=generation,
        step=1,
        shape=None,
        world=8,
        planned=Shape(1, 8, 1),
        nodes=tuple(rows),
    )


def done(one: Incident, **fields: Any) -> Incident:
    """The same, an hour less a minute before, and it was acted on."""
    new = {"id": "j-1", "opened_at": NOW - 3540, "enforced": True, **fields}
    return msgspec.structs.replace(one, **new)


RESTART = Response((), "restart")
OUT = Response(("n2",), "exclude n2 and restart")
STOPPED = incident(VerdictKind.HANG, numbers={"cannot run": 1})
BUSY = incident(VerdictKind.HANG, numbers={"cannot run": 0})
LINK = incident(
    VerdictKind.COMM_HANG, Suspect(SuspectKind.GROUP, "f00", 0.9), nodes=("n0", "n1", "n2")
)
NAMED = incident(
    VerdictKind.COMM_HANG, Suspect(SuspectKind.SENDER, "n2", 0.9), nodes=("n0", "n1", "n2")
)


@pytest.mark.parametrize(
    ("one", "before", "expected"),
    [
        (STOPPED, (), OUT),
        (BUSY, (), RESTART),
        (BUSY, (done(BUSY),), OUT),
        (BUSY, (done(BUSY, nodes=("n1",)),), RESTART),
        (BUSY, (done(BUSY, enforced=False),), RESTART),
        (BUSY, (done(BUSY, opened_at=NOW - 3660),), RESTART),
        (LINK, (), RESTART),
        (NAMED, (), OUT),
        (incident(VerdictKind.DESYNC), (), RESTART),
        (incident(VerdictKind.CORRUPTION), (), OUT),
        (incident(VerdictKind.SLOW_RANK), (), None),
        (incident(VerdictKind.CRASH), (), None),
        (incident(VerdictKind.CANNOT_SAY), (), None),
    ],
)
def test_each_class_has_its_response(
    one: Incident, before: tuple[Incident, ...], expected: Response | None
) -> None:
    assert response(one, status(), (*before, one), "act") == expected


@pytest.mark.parametrize("kind", [VerdictKind.DEADLOCK, VerdictKind.DESYNC, VerdictKind.MISMATCH])
def test_a_defect_of_the_program_is_answered_once_without_a_person(kind: VerdictKind) -> None:
    one = incident(kind)
    first, second = (response(one, status(), b, "act") for b in ((), (done(one),)))
    assert first is not None
    assert second is not None
    assert (first.nodes, first.alone) == ((), True)
    assert (second.nodes, second.alone) == ((), False)


def _working(**more: Any) -> Incident:
    """Rank 0 evaluates while the others wait."""
    numbers = {"cannot run": 0, "runs": 1, "idle s": 40.0, "limit s": 30.0, "engine s": 1800.0}
    one = incident(VerdictKind.HANG, numbers=numbers, step=70)
    verdict = msgspec.structs.replace(one.verdict, place="t.py:9", numbers=numbers | more)
    return msgspec.structs.replace(one, verdict=verdict)


def test_a_rank_that_runs_is_not_acted_on_before_its_backend_gives_up() -> None:
    told = response(_working(), status(), (), "act")
    assert told is not None
    assert (told.nodes, told.alone) == ((), False)
    # Its node is sound, however often it takes long.
    late = response(_working(**{"idle s": 1801.0}), status(), (done(BUSY),), "act")
    assert late == RESTART
    for kind, age in (
        (VerdictKind.DEADLOCK, "age s"),
        (VerdictKind.COMM_HANG, "since last arrival s"),
    ):
        numbers = {"runs": 1, age: 40.0, "engine s": 100.0}
        early = response(incident(kind, numbers=numbers), status(), (), "act")
        assert early is not None
        assert not early.alone
        assert response(incident(kind, numbers=numbers | {age: 101.0}), status(), (), "act")


def test_one_that_does_nothing_has_several_times_its_limit() -> None:
    for idle, alone in ((40.0, False), (119.0, False), (121.0, True)):
        found = response(_working(runs=0, **{"idle s": idle}), status(), (), "act")
        assert found is not None
        assert found.alone == alone


def test_the_same_place_is_not_acted_on_twice_without_a_step_between() -> None:
    one = _working(runs=0, **{"idle s": 200.0})
    before = done(one, nodes=("n1",))
    for step, alone in ((70, False), (71, True)):
        again = response(msgspec.structs.replace(one, step=step), status(), (before,), "act")
        assert again is not None
        assert again.alone == alone
    # Whoever is stopped does not get well by waiting.
    stopped = _working(**{"cannot run": 1, "runs": 0})
    assert response(stopped, status(), (done(stopped),), "act") == OUT


def test_verdicts_on_the_calls_of_a_program_that_may_run_on_are_a_persons() -> None:
    assert RUN_POLICY[VerdictKind.DESYNC] == RUN_POLICY[VerdictKind.MISMATCH] == "ask"


def test_a_slow_rank_is_swapped_where_there_is_a_spare() -> None:
    assert response(incident(VerdictKind.SLOW_RANK), status("n9"), (), "ask") == OUT
    link = incident(VerdictKind.SLOW_LINK, Suspect(SuspectKind.LINK, "n1>n2", 0.9))
    assert response(link, status("n9"), (), "ask") is None  # neither end is named


def test_all_nodes_that_run_are_never_left_out() -> None:
    alone = msgspec.structs.replace(STOPPED, nodes=("n0",))
    assert response(alone, status(running=1), (), "act") == RESTART
    assert response(STOPPED, None, (), "act") == RESTART


def test_where_the_budget_is_used_up_nobody_is_left_out() -> None:
    less = msgspec.structs.replace(STOPPED, action="ask")
    assert response(less, status(), (), "act") == RESTART
    assert response(less, status(), (), "ask") == OUT


def test_an_incident_of_a_fenced_generation_is_over() -> None:
    assert not is_over(STOPPED, status())
    assert is_over(STOPPED, status(generation=4))
    unknown = msgspec.structs.replace(STOPPED, generation=0)
    assert not is_over(unknown, status(generation=4))


def test_a_crash_is_the_launchers() -> None:
    assert VerdictKind.CRASH not in RUN_POLICY
