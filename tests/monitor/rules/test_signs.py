"""What the hardware shows raises and lowers verdicts, and makes none."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from ckptd.monitor.job import Phase
from ckptd.monitor.report import AgentState, Sign
from ckptd.monitor.rules.limits import HangLimits
from ckptd.monitor.rules.signs import SIGN_S, with_signs
from ckptd.monitor.settings import WatchSettings
from ckptd.monitor.verdict import Suspect, SuspectKind, Verdict, VerdictKind
from ckptd_simulated.job import Mesh
from tests.monitor.jobs import inside, outside
from tests.monitor.watched import Fed, clean

XID = Sign(
    what="xid 79",
    text="Xid 79 of GPU 3",
    kinds=(VerdictKind.HANG, VerdictKind.CRASH),
    weight=0.6,
    source="gpus",
)
NODE_OF = {0: "a", 1: "b", 2: "c"}


def verdict(*suspects: tuple[str, float], kind: VerdictKind = VerdictKind.HANG) -> Verdict:
    return Verdict(
        kind=kind,
        suspects=tuple(Suspect(SuspectKind.RANK, name, share) for name, share in suspects),
        evidence=("2 ranks wait",),
        rules_out=(),
        refuted_by="a counter moves",
        action="restart",
        numbers={"idle s": 9.0},
        place="train.py:9",
    )


def shares(of: Verdict) -> list[tuple[str, float]]:
    return [(s.name, s.confidence) for s in of.suspects]


def test_a_sign_on_the_node_of_one_of_two_suspects_decides() -> None:
    signs = {"a": (), "b": (XID,), "c": ()}
    told = with_signs(verdict(("0", 0.5), ("1", 0.5)), signs, NODE_OF)
    assert shares(told) == [("1", 0.615), ("0", 0.385)]
    assert told.evidence[1:] == ("node b: gpus: Xid 79 of GPU 3",)
    assert told.place == "", "the line is that of the other suspect"
    assert with_signs(told, signs, NODE_OF) == told, "it counts once"


def test_a_sign_that_most_nodes_show_makes_less_sure() -> None:
    signs = {"a": (XID,), "b": (XID,), "c": ()}
    told = with_signs(verdict(("1", 0.8)), signs, NODE_OF)
    assert shares(told) == [("1", 0.32)]
    assert told.evidence[1] == "node b: gpus: Xid 79 of GPU 3, as on most nodes"


@pytest.mark.parametrize(
    ("kind", "where", "added"),
    [
        (VerdictKind.MISMATCH, "b", []),
        (VerdictKind.HANG, "c", ["node c, which is not suspected: gpus: Xid 79 of GPU 3"]),
    ],
)
def test_other_signs_change_no_share(kind: VerdictKind, where: str, added: list[str]) -> None:
    given = verdict(("1", 0.8), kind=kind)
    told = with_signs(given, {"a": (), "b": (), "c": (), where: (XID,)}, NODE_OF)
    assert shares(told) == [("1", 0.8)]
    assert list(told.evidence[1:]) == added
    assert told.place == "train.py:9"


def test_ends_of_links_and_nodes_are_suspects_too() -> None:
    given = msgspec.structs.replace(
        verdict(),
        suspects=(
            Suspect(SuspectKind.LINK, "a>b", 0.4),
            Suspect(SuspectKind.SENDER, "b", 0.3),
            Suspect(SuspectKind.GROUP, "00ff", 0.2),
        ),
    )
    told = with_signs(given, {"a": (), "b": (XID,), "c": ()}, NODE_OF)
    assert [(s.target, s.confidence) for s in told.suspects] == [
        (SuspectKind.LINK, 0.447),
        (SuspectKind.SENDER, 0.424),
        (SuspectKind.GROUP, 0.118),
    ] or sum(s.confidence for s in told.suspects) <= 1.001


def test_lines_are_bounded_and_plain() -> None:
    ugly = msgspec.structs.replace(XID, text="\x1b[2J\nfake")
    signs = {f"n{k}": (ugly,) * 9 for k in range(5)}
    told = with_signs(verdict(("1", 0.8)), signs, NODE_OF)
    assert len(told.evidence) == 9
    assert all(line.isprintable() for line in told.evidence)


# --- in a watch -----------------------------------------------------------------------------------


def watched(signs: Sequence[Sign] = ()) -> Fed:
    """A watch of a job of two nodes, of which the second's rank does not come to a call."""
    fed = Fed(WatchSettings(limits=HangLimits(floors=dict.fromkeys(Phase, 1.0))))
    fed.agents = {"n1": AgentState(signs=tuple(signs))}
    waiting = [inside(r, 5, 9, age=0.1, size=3, node="n0") for r in range(2)]
    fed.settle([*waiting, outside(2, 5, 8, idle=0.2, size=3, node="n1")])
    for k in range(20):
        seen = [inside(r, 5, 9, age=0.1 + 0.25 * k, size=3, node="n0") for r in range(2)]
        fed.show([*seen, outside(2, 5, 8, idle=0.2 + 0.25 * k, size=3, node="n1")])
    return fed


def test_a_hang_is_surer_with_a_sign_and_nothing_else_changes() -> None:
    (plain,) = watched().opened
    (sure,) = watched([XID]).opened
    assert plain.verdict.names() == sure.verdict.names() == ("2",)
    before, after = (i.verdict.suspects[0].confidence for i in (plain, sure))
    assert after == pytest.approx(before + 0.6 * (1 - before), abs=0.002)
    assert sure.verdict.evidence[-1] == "node n1: gpus: Xid 79 of GPU 3"
    assert (sure.action, sure.nodes) == (plain.action, plain.nodes) == ("log", ("n1",))
    old = msgspec.structs.replace(XID, age_s=SIGN_S + 1)
    (late,) = watched([old]).opened
    assert late.verdict == plain.verdict


def test_signs_alone_make_no_verdict() -> None:
    every = msgspec.structs.replace(XID, kinds=tuple(VerdictKind), weight=0.9)
    fed = Fed()
    mesh = Mesh(4, 2, 4)
    fed.agents = {f"n{k}": AgentState(signs=(every,)) for k in range(4)}
    fed.settle(clean(mesh))
    for _ in range(40):
        fed.show(clean(mesh))
    assert fed.opened == []


def test_a_sign_that_comes_after_a_crash_is_told_with_it() -> None:
    fed = Fed()
    alive = [outside(r, 5, 8, idle=0.1, size=3, node=f"n{r}") for r in range(3)]
    fed.settle(alive)
    dead = msgspec.structs.replace(alive[1], alive=False, exit_code=-9)
    fed.show([alive[0], dead, alive[2]], 4)
    assert [i.kind for i in fed.opened] == ["crash"]
    fed.agents = {"n1": AgentState(signs=(XID,))}
    fed.show([alive[0], dead, alive[2]], 4)
    (known,) = fed.watch.incidents
    assert known.verdict.evidence.count("node n1: gpus: Xid 79 of GPU 3") == 1
