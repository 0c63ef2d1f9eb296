"""Whether the monitor was right about a case, and the matrix of many."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ckptd.monitor.verdict import SuspectKind, VerdictKind
from tests.monitor.faults.case import Case
from tests.monitor.faults.kinds import KINDS

__all__ = ["NOTHING", "Heard", "Outcome", "judge", "matrix", "summary", "table"]

NOTHING = "nothing"


class Heard(msgspec.Struct, frozen=True):
    """One incident as the daemon told it.

    Attributes
    ----------
    kind
        Class.
    names
        ``target name`` of each suspect, likeliest first.
    members
        Global ranks of the groups that it is about.
    after_s
        From the fault to the incident, s; None if no fault was planted.
    evidence
        First sentence.
    """

    kind: str
    names: tuple[str, ...]
    members: tuple[int, ...] = ()
    after_s: float | None = None
    evidence: str = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a case.

    Attributes
    ----------
    case
        What was done.
    verdict
        Class of the first incident, or ``nothing``.
    right_class, right_culprit
        Whether that was right; of a clean kind both say that nobody was accused.
    first
        Whether the likeliest suspect is the culprit, where ranks are named.
    latency_s
        From the fault, or for a hang from the end of the floor, to the incident.
    false_alarms
        Incidents beyond the one, or before the fault.
    heard
        All incidents, in order.
    replay
        What the recording says when it is judged again; None if it was not.
    note
        What else went wrong.
    """

    case: Case
    verdict: str = NOTHING
    right_class: bool = False
    right_culprit: bool = False
    first: bool = False
    latency_s: float | None = None
    false_alarms: int = 0
    heard: tuple[Heard, ...] = ()
    replay: tuple[str, ...] | None = None
    note: str = ""

    @property
    def right(self) -> bool:
        return self.right_class and self.right_culprit and not self.false_alarms and not self.note


def judge(case: Case, heard: Sequence[Heard], nodes: Sequence[str]) -> Outcome:
    """Return what `heard` says about `case`, whose ranks are on `nodes`."""
    kind = KINDS[case.kind]
    told = tuple(heard)
    if not kind.wanted:
        fine = not told
        return Outcome(
            case=case,
            verdict=told[0].kind if told else NOTHING,
            right_class=fine,
            right_culprit=fine,
            false_alarms=len(told),
            heard=told,
        )
    early = [h for h in told if h.after_s is None or h.after_s < 0]
    later = [h for h in told if h not in early]
    # That no suspect yet accuses nobody.
    later = [h for h in later if h.kind != VerdictKind.CANNOT_SAY] or later
    if not later:
        return Outcome(case=case, false_alarms=len(early), heard=told)
    first = later[0]
    right_class = VerdictKind(first.kind) in kind.wanted
    culprit = _names_culprit(case, kind.culprit, first, nodes)
    floor = case.floor if kind.hang and first.kind != VerdictKind.CRASH else 0.0
    return Outcome(
        case=case,
        verdict=first.kind,
        right_class=right_class,
        right_culprit=culprit,
        first=_first(first) == str(case.victim),
        latency_s=None if first.after_s is None else first.after_s - floor,
        # The same verdict of another group, or of a rank beside the victim, is a second alarm.
        false_alarms=len(early) + len(later[1:]),
        heard=told,
    )


def _first(heard: Heard) -> str:
    ranks = [n.split(" ", 1)[1] for n in heard.names if n.startswith(f"{SuspectKind.RANK} ")]
    return ranks[0] if ranks else ""


def _names_culprit(case: Case, what: str, heard: Heard, nodes: Sequence[str]) -> bool:
    """Whether exactly the culprit is named, or a group that it is in."""
    names = set(heard.names)
    ranks = {n for n in names if n.startswith(f"{SuspectKind.RANK} ")}
    victim = f"{SuspectKind.RANK} {case.victim}"
    if what == "node":
        node = case.node(case.victim)
        its = {f"{SuspectKind.RANK} {r}" for r in range(case.world) if case.node(r) == node}
        return f"{SuspectKind.NODE} {nodes[node]}" in names or ranks == its
    if what == "group":
        return case.victim in heard.members or victim in names
    return ranks == {victim}


def matrix(outcomes: Iterable[Outcome]) -> dict[str, dict[str, int]]:
    """Return how often each kind was called what."""
    out: dict[str, Counter[str]] = {}
    for one in outcomes:
        out.setdefault(one.case.kind, Counter())[one.verdict] += 1
    return {kind: dict(count) for kind, count in out.items()}


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a table in Markdown, a row a kind."""
    head = "kind|called|right class|right culprit|first suspect|false alarms|p50 s|p95 s|max s"
    lines = [head, "|".join(["---"] * (head.count("|") + 1))]
    for kind, called in matrix(outcomes).items():
        mine = [o for o in outcomes if o.case.kind == kind]
        times = sorted(o.latency_s for o in mine if o.latency_s is not None and o.right_class)
        wanted = KINDS[kind].wanted
        cells = [
            kind,
            ", ".join(f"{name} {n}" for name, n in sorted(called.items(), key=lambda x: -x[1])),
            _share([o.right_class for o in mine]),
            _share([o.right_culprit for o in mine]),
            _share([o.first for o in mine]) if wanted and KINDS[kind].culprit == "rank" else "",
            str(sum(o.false_alarms for o in mine)),
            *(f"{t:.2f}" for t in _quantiles(times)),
        ]
        lines.append("|".join(cells + [""] * (head.count("|") + 1 - len(cells))))
    return lines


def _share(said: Sequence[bool]) -> str:
    return f"{sum(said)}/{len(said)}"


def _quantiles(times: Sequence[float]) -> list[float]:
    if not times:
        return []
    if len(times) == 1:
        return [times[0]] * 3
    cuts = statistics.quantiles(times, n=20, method="inclusive")
    return [cuts[9], cuts[18], times[-1]]


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the figures of all kinds together."""
    faults = [o for o in outcomes if KINDS[o.case.kind].wanted]
    return {
        "cases": len(outcomes),
        "faults": len(faults),
        "right class": sum(o.right_class for o in faults),
        "right culprit": sum(o.right_class and o.right_culprit for o in faults),
        "false alarms": sum(o.false_alarms for o in outcomes),
    }
