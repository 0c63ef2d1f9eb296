"""Roles of processes (controller, agent, rank, worker, operator, reader): rights at each server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Role = Literal["controller", "agent", "rank", "worker", "operator", "reader"]


@dataclass(frozen=True, slots=True)
class Certified:
    """The role and the node that a certificate names."""

    role: str
    node: str


@dataclass(frozen=True, slots=True)
class Asks:
    """The messages that may pass at one kind of door.

    Attributes
    ----------
    serves
        The role that answers there.
    may
        Names of messages that a client may send, by its role.
    of_job
        Whether both ends are of the job's authority, and not of one of this door's own key.
    """

    serves: Role
    may: Mapping[str, frozenset[str]]
    of_job: bool = True


_READS = frozenset({"Get", "Read", "Open", "Stat", "List", "Children"})
_WRITES = frozenset({"Put", "BeginWriter", "Delete", "Sync", "Sweep", "AbortWriter"})
_PULLS = frozenset(
    {"AskAbout", "AskWhere", "AskNewest", "AskHold", "AskRelease", "AskTensors", "AskMap"}
    | {"AskChanged", "AskRead", "AskSource", "AskProved"}
)

_COUNTS = frozenset({"AskCommit", "AskDrop", "AskStore", "AskStored"})

DOORS: Mapping[str, Asks] = {
    "controller": Asks(
        "controller",
        {
            "agent": frozenset({"Beat", "Envelope", "Hosting", "Timed"}),
            "operator": frozenset({"Ask", "Subscribe", "OperatorCommand", "Announce"}),
        },
    ),
    "store": Asks(
        "agent",
        {
            "agent": _READS | _WRITES,
            "rank": _READS | _WRITES,
            "worker": _READS,
            "operator": _READS,
            "reader": _READS,
        },
        of_job=False,
    ),
    "publish 4": Asks("rank", {"rank": _PULLS | _COUNTS, "worker": _PULLS}),
    "pass on 1": Asks("worker", {"worker": frozenset({"AskPassed", "AskPart"})}),
    "probe": Asks("agent", {"agent": frozenset({"_Ping", "_Take", "_Give"})}),
    "preflight": Asks(
        "agent", {"agent": frozenset({"NodeHello", "Tested", "ClockReading", "Probed"})}
    ),
}
