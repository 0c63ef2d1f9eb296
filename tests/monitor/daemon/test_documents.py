from __future__ import annotations

import numpy as np
import pytest

from ckptd.monitor.daemon.documents import IncidentDocument, MeshDocument, Names, RanksDocument
from ckptd.monitor.daemon.rounds import STATUS, RankTable
from ckptd.monitor.incidents import Incident
from ckptd.monitor.job import JobView
from ckptd.monitor.report import GroupInfo
from ckptd.monitor.rules.slow import SHARE
from ckptd.monitor.verdict import Suspect, SuspectKind, Verdict, VerdictKind
from ckptd_simulated.job import Fault, Mesh, Planted, play

MESH = Mesh(2, 2, 4)
NAMES = Names({}, {})


def job(*faults: Fault, age: float = 0.0, silent: tuple[int, ...] = ()) -> JobView:
    return play(
        MESH, faults, np.random.default_rng(1), rounds=None if faults else 3, age=age, silent=silent
    )


def blamed(kind: VerdictKind, *suspects: tuple[SuspectKind, str]) -> Incident:
    verdict = Verdict(
        kind=kind,
        suspects=tuple(Suspect(t, n, 0.9) for t, n in suspects),
        evidence=(),
        rules_out=(),
        refuted_by="",
        action="",
        numbers={},
    )
    return Incident(id="j-1", kind=kind, verdict=verdict, opened_at=0, updated_at=0)


def told(ranks: RankTable, since: int | None = None) -> list[int]:
    return [int(r) for r in RanksDocument.of(ranks, NAMES, 0.0, since).rank]


def status(ranks: RankTable, rank: int) -> str:
    return STATUS[int(ranks.rows["status"][rank])]


def test_only_what_changed_is_told() -> None:
    ranks = RankTable()
    ranks.update(job(), (), {}, {})
    first = ranks.revision
    assert told(ranks) == list(range(16))
    assert told(ranks, 0) == list(range(16))
    ranks.update(job(), (), {}, {})
    assert told(ranks, first) == []
    ranks.update(job(), (), {3: 1.5}, {4: 0.2})
    assert told(ranks, first) == [3, 4]
    assert told(ranks, ranks.revision) == []
    ranks.update(job(), (), {3: 1.501}, {4: 0.2001})
    assert told(ranks, ranks.revision - 1) == []


def test_another_process_of_a_rank_is_told() -> None:
    now = job()
    ranks = RankTable()
    ranks.update(now, (), {}, {})
    assert RanksDocument.of(ranks, NAMES, 0.0).pid == [None] * 16
    now.ranks["pid"][3] = 4711
    ranks.update(now, (), {}, {})
    assert told(ranks, ranks.revision - 1) == [3]
    assert RanksDocument.of(ranks, NAMES, 0.0).pid[2:5] == [None, 4711, None]


def test_ages_are_told_when_they_pass_a_limit() -> None:
    hang = Fault(Planted.HANG, 5, 2)
    ranks = RankTable()
    ranks.update(job(hang, age=12.0), (), {}, {})
    before = ranks.revision
    ranks.update(job(hang, age=20.0), (), {}, {})
    assert told(ranks, before) == []
    ranks.update(job(hang, age=31.0), (), {}, {})
    assert told(ranks, before) == list(range(16))


def test_status() -> None:
    ranks = RankTable()
    hang = job(Fault(Planted.HANG, 5, 2), age=10.0)
    ranks.update(hang, (), {}, {})
    assert status(ranks, 5) == "ok"
    assert status(ranks, 6) == "waiting"
    ranks.update(hang, [blamed(VerdictKind.HANG, (SuspectKind.RANK, "5"))], {}, {})
    assert status(ranks, 5) == "suspect"
    ranks.update(hang, [blamed(VerdictKind.SLOW_RANK, (SuspectKind.RANK, "7"))], {}, {})
    assert status(ranks, 7) == "slow"
    ranks.update(hang, [blamed(VerdictKind.SLOW_LINK, (SuspectKind.NODE, "n1"))], {}, {})
    assert [status(ranks, r) for r in range(8, 16)] == ["suspect"] * 8
    dead = job(Fault(Planted.CRASH, 2, 1), age=1.0)
    ranks.update(dead, [blamed(VerdictKind.CRASH, (SuspectKind.RANK, "2"))], {}, {})
    assert status(ranks, 2) == "dead"


def test_ranks_of_a_silent_agent_stay_with_what_was_known() -> None:
    ranks = RankTable()
    ranks.update(job(), (), {}, {})
    ranks.update(job(silent=(1,)), (), {}, {})
    assert told(ranks) == list(range(16))
    assert [status(ranks, r) for r in (7, 8)] == ["ok", "silent"]
    assert ranks.nodes == ["n0", "n1"]


def test_documents_of_nothing_and_of_a_dead_rank() -> None:
    ranks = RankTable()
    assert told(ranks) == []
    ranks.update(job(Fault(Planted.CRASH, 2, 1), age=5.0), (), {}, {})
    body = RanksDocument.of(ranks, Names({}, {1: "all_reduce"}), 0.0)
    assert body.exit_code[2] == -9
    assert body.exit_code[3] is None
    assert body.alive.tolist().count(False) == 1
    assert any(text and text.startswith("all_reduce ") for text in body.pending)


def groups(mesh: Mesh, *kinds: str) -> dict[int, GroupInfo]:
    grid = np.arange(mesh.ranks).reshape(mesh.dp, mesh.pp, mesh.tp)
    lines = {
        "tp": grid.reshape(-1, mesh.tp),
        "pp": grid.transpose(0, 2, 1).reshape(-1, mesh.pp),
        "dp": grid.transpose(1, 2, 0).reshape(-1, mesh.dp),
    }
    every = [(kind, line.tolist()) for kind in kinds for line in lines[kind]]
    return {k + 1: GroupInfo.of(line, "g", f"mesh_{kind}") for k, (kind, line) in enumerate(every)}


def test_mesh_of_groups() -> None:
    infos = groups(MESH, "tp", "dp", "pp")
    members = {k: info.ranks() for k, info in infos.items()}
    mesh = MeshDocument.of(Names(infos, {}), members, np.arange(16))
    assert mesh is not None
    assert mesh.axes == ["pp", "dp", "tp"]
    d, p, t = MESH.place
    assert mesh.coords.tolist() == np.stack([p, d, t], axis=1).tolist()


@pytest.mark.parametrize("kinds", [(), ("tp",), ("dp", "tp")])
def test_no_mesh_where_groups_do_not_tell_ranks_apart(kinds: tuple[str, ...]) -> None:
    infos = groups(MESH, *kinds)
    members = {k: info.ranks() for k, info in infos.items()}
    assert MeshDocument.of(Names(infos, {}), members, np.arange(16)) is None


def test_kinds_are_few() -> None:
    infos = {k: GroupInfo(kind=f"kind {k}") for k in range(100)}
    names = Names(infos, {})
    assert len({names.kind(k) for k in infos}) == 33
    assert Names({}, {}).kind(999) == "group"
    assert Names({1: GroupInfo(kind="default_pg")}, {}).kind(1) == "world"
    assert Names({1: GroupInfo(kind="undefined")}, {}).kind(1) == "group"
    assert Names({1: GroupInfo(kind="a\nb")}, {}).kind(1) == "other"


def test_a_group_without_a_name_is_shown_with_its_ranks() -> None:
    first, second = (GroupInfo.of((0, 2), name, "undefined") for name in ("1", "2"))
    names = Names({1: first, 2: second, 3: GroupInfo.of(range(4), "0", "default_pg")}, {})
    assert names.group(1) == "group 1 of ranks 0, 2"
    assert names.group(2) != names.group(1)  # the same ranks, and calls of its own
    assert names.group(3) == "default group"


@pytest.mark.parametrize(
    ("kind", "suspects", "nodes", "numbers", "told", "cost"),
    [
        (
            VerdictKind.HANG,
            [("rank", "5", "stopped by a signal or a debugger")],
            ("n1",),
            {"idle s": 35.2, "waiting": 15.0},
            "Rank 5 on n1 has not moved for 35 s: stopped by a signal or a debugger; 15 ranks wait",
            1.0,
        ),
        (
            VerdictKind.CRASH,
            [("node", "n0", ""), ("rank", "3", "signal 9"), ("rank", "4", "signal 9")],
            ("n0",),
            {},
            "Ranks 3, 4 on n0 have ended: signal 9",
            1.0,
        ),
        (
            VerdictKind.COMM_HANG,
            [("group", "00000000000000ff", "dp 0")],
            (),
            {},
            "Group dp 0: it is so",
            1.0,
        ),
        (
            VerdictKind.SLOW_LINK,
            [("link", f"a>{n}", "") for n in "bcdef"],
            (),
            {},
            "Links a>b, a>c, a>d and 2 more: it is so",
            None,
        ),
        (VerdictKind.SLOW_RANK, [("rank", "5", "")], ("n1",), {SHARE: 0.4}, "It is so", 0.4),
        (VerdictKind.CANNOT_SAY, [], (), {}, "It is so", None),
    ],
)
def test_an_incident_begins_with_a_sentence(
    kind: VerdictKind,
    suspects: list[tuple[str, str, str]],
    nodes: tuple[str, ...],
    numbers: dict[str, float],
    told: str,
    cost: float | None,
) -> None:
    verdict = Verdict(
        kind=kind,
        suspects=tuple(Suspect(SuspectKind(t), n, 0.9, d) for t, n, d in suspects),
        evidence=("it is so",),
        rules_out=(),
        refuted_by="",
        action="",
        numbers=numbers,
    )
    one = Incident(
        id="j-1", kind=str(kind), verdict=verdict, opened_at=1.0, updated_at=2.0, nodes=nodes
    )
    document = IncidentDocument.of(one)
    assert (document.headline, document.cost) == (told, cost)
