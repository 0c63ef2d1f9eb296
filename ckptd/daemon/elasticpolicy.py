"""Which response an incident has: who is left out, and whether the ranks start again. Pure.

The policy of a class says whether it is carried out (``act``), offered (``ask``), or neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptd.elastic.wire import NodeRow, Status
from ckptd.monitor.incident import Incident
from ckptd.monitor.verdict import Kind, Target

__all__ = ["RUN_POLICY", "Response", "is_over", "response"]

RUN_POLICY: Mapping[Kind, str] = {
    Kind.HANG: "act",
    Kind.COMM_HANG: "act",
    Kind.DEADLOCK: "act",
    Kind.DESYNC: "act",
    Kind.MISMATCH: "act",
    Kind.SLOW_RANK: "ask",
    Kind.SLOW_LINK: "ask",
    Kind.CORRUPTION: "ask",
}
"""The policy where there is a controller and nobody says otherwise."""

_AGAIN_S = 3600.0
"""What was answered so shortly before is not cured by the same answer."""
_PROGRAM = frozenset({Kind.DEADLOCK, Kind.DESYNC, Kind.MISMATCH})
_SLOW = frozenset({Kind.SLOW_RANK, Kind.SLOW_LINK})
_ENDS = frozenset({Target.NODE, Target.SENDER, Target.RECEIVER})


@dataclass(frozen=True)
class Response:
    """What is to be done.

    Attributes
    ----------
    nodes
        Who is left out; the ranks start again in any case.
    text
        For people, in a few words: what a button says.
    alone
        Whether it may be done without a person, where the policy says ``act``.
    """

    nodes: tuple[str, ...]
    text: str
    alone: bool = True


def response(
    incident: Incident, status: Status | None, before: Iterable[Incident], wanted: str
) -> Response | None:
    """Return the response to an incident; None if it has none.

    Parameters
    ----------
    incident
        What happened.
    status
        What the controller knows; None if it has told nothing.
    before
        Other incidents that are remembered.
    wanted
        What the policy of the class says; ``incident.action`` is less where the budget of
        isolations is used up.
    """
    kind = incident.verdict.kind
    earlier = [i for i in before if _like(i, incident)]
    if kind in _PROGRAM:
        # The program's defect: whoever is left out, it comes again. Once it may have been chance.
        return Response((), "restart", alone=not earlier)
    if kind in _SLOW:
        nodes = _running(_nodes(incident), status)
        spare = nodes and _spares(status) >= len(nodes)
        return _leave_out(nodes, alone=True) if spare else None
    if kind is Kind.CORRUPTION:
        return _leave_out(_running(incident.nodes, status), alone=True)
    if kind not in (Kind.HANG, Kind.COMM_HANG):
        return None  # a crash is seen by the launcher; of what cannot be said nothing follows
    if wanted == "act" and incident.action == "ask":
        return Response((), "restart")  # nodes may not be left out any more, and the job stands
    at_fault = _nodes(incident)
    cannot_run = kind is Kind.COMM_HANG or incident.verdict.numbers.get("cannot run", 0) > 0
    if not cannot_run and not any(set(at_fault) & set(i.nodes) for i in earlier):
        return Response((), "restart")
    return _leave_out(_running(at_fault, status), alone=True) or Response((), "restart")


def is_over(incident: Incident, status: Status) -> bool:
    """Whether the generation of an incident is one that the controller has ended already."""
    return 0 < incident.generation < status.generation


def _like(other: Incident, incident: Incident) -> bool:
    """Whether another incident of the class was answered not long before."""
    recent = 0 <= incident.opened_at - other.opened_at < _AGAIN_S
    same = other.id != incident.id and other.kind == incident.kind
    return same and recent and other.enforced


def _nodes(incident: Incident) -> tuple[str, ...]:
    """Return the nodes at fault: of communication those that probes name, and not all members."""
    if incident.verdict.kind in (Kind.COMM_HANG, Kind.SLOW_LINK):
        named = [s.name for s in incident.verdict.suspects if s.target in _ENDS]
        return tuple(dict.fromkeys(named))
    return incident.nodes


def _running(nodes: Sequence[str], status: Status | None) -> tuple[str, ...]:
    """Return those of `nodes` that the controller knows to run ranks; none if that were all."""
    if status is None:
        return ()
    here = {row.name for row in status.nodes if row.running and row.up}
    chosen = tuple(n for n in nodes if n in here)
    return chosen if len(chosen) < len(here) else ()


def _spares(status: Status | None) -> int:
    rows: Sequence[NodeRow] = () if status is None else status.nodes
    return sum(row.spare and row.up and row.slots > 0 and row.out_until_s == 0 for row in rows)


def _leave_out(nodes: tuple[str, ...], *, alone: bool) -> Response | None:
    if not nodes:
        return None
    return Response(nodes, f"exclude {', '.join(nodes)} and restart", alone=alone)
