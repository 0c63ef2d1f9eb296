"""Which response an incident has: who is left out, and whether the ranks start again. Pure.

The policy of a class says whether it is carried out (``act``), offered (``ask``), or neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptd.elastic.wire import NodeRow, Status
from ckptd.monitor.incidents.incident import Incident
from ckptd.monitor.rules.limits import ENGINE_S
from ckptd.monitor.verdict import Kind, Target

__all__ = ["RUN_POLICY", "Response", "is_over", "response"]

RUN_POLICY: Mapping[Kind, str] = {
    Kind.HANG: "act",
    Kind.COMM_HANG: "act",
    Kind.DEADLOCK: "act",
    Kind.DESYNC: "ask",
    Kind.MISMATCH: "ask",
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
    before = tuple(before)
    kind = incident.verdict.kind
    earlier = [i for i in before if _like(i, incident)]
    if kind in _PROGRAM:
        # The program's defect: whoever is left out, it comes again. Once it may have been chance.
        return Response((), "restart", alone=not earlier and not _too_soon(incident))
    if kind in _SLOW:
        nodes = _running(_nodes(incident), status)
        spare = nodes and _spares(status) >= len(nodes)
        return _leave_out(nodes, alone=True) if spare else None
    if kind is Kind.CORRUPTION:
        return _leave_out(_running(incident.nodes, status), alone=True)
    if kind not in (Kind.HANG, Kind.COMM_HANG):
        return None  # a crash is seen by the launcher; of what cannot be said nothing follows
    cannot_run = incident.verdict.numbers.get("cannot run", 0) > 0
    alone = cannot_run or not (_too_soon(incident) or _in_vain(incident, before))
    if not alone or _busy(incident):
        # Its node is sound: what takes long there takes long on another one.
        return Response((), "restart", alone=alone)
    if wanted == "act" and incident.action == "ask":
        return Response((), "restart")  # nodes may not be left out any more, and the job stands
    at_fault = _nodes(incident)
    cannot_run |= kind is Kind.COMM_HANG
    if not cannot_run and not any(set(at_fault) & set(i.nodes) for i in earlier):
        return Response((), "restart")
    return _leave_out(_running(at_fault, status), alone=True) or Response((), "restart")


def is_over(incident: Incident, status: Status) -> bool:
    """Whether the generation of an incident is one that the controller has ended already."""
    return 0 < incident.generation < status.generation


_PATIENCE = 4
_STANDING_S = ("idle s", "since last arrival s", "age s")


def _busy(incident: Incident) -> bool:
    """Whether a rank that is named computes, reads or writes."""
    return incident.verdict.numbers.get("runs", 0) > 0


def _too_soon(incident: Incident) -> bool:
    """Whether what stands still may well go on by itself.

    A rank that does something evaluates, saves or reads data, and a restart would only make it
    begin again: it has the time after which the backend itself gives up. One that does nothing
    waits for something that no counter shows: it has several times its limit.
    """
    numbers = incident.verdict.numbers
    stood = next((numbers[name] for name in _STANDING_S if name in numbers), 0.0)
    if _busy(incident):
        return stood < numbers.get("engine s", ENGINE_S)
    return incident.verdict.kind is Kind.HANG and stood < _PATIENCE * numbers.get("limit s", 0.0)


def _in_vain(incident: Incident, before: Iterable[Incident]) -> bool:
    """Whether a restart for what stood still at the same place has brought no step beyond it."""
    place = incident.verdict.place
    return bool(place) and any(
        other.id != incident.id
        and other.enforced
        and other.verdict.place == place
        and incident.step <= other.step
        for other in before
    )


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
