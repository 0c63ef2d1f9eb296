"""One incident: a verdict that held, from its first round to its end."""

from __future__ import annotations

import msgspec

from ckptd.monitor.report import ProbeResult, Stack
from ckptd.monitor.verdict import Verdict

__all__ = ["Changes", "Incident"]


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One incident, as it is now; a change makes a new one with the same `id`.

    Attributes
    ----------
    id
        ``{job}-{n}``, with n rising in the life of a daemon's history.
    kind
        Class of the verdict.
    verdict
        The newest one.
    opened_at, updated_at, closed_at
        Unix seconds of the daemon's clock; `closed_at` is None while it is open.
    rounds
        Rounds that showed it.
    state
        ``open`` or ``closed``.
    generation, step
        Newest generation, and largest step of any rank, when it opened; step -1 if unknown.
    enforced
        Whether something was done on account of it, and not only told.
    response
        What was done, or why it was not, in words; empty where nothing was tried.
    action
        What the policy of its class asks for: ``log``, ``ask`` or ``act``.
    latency_s
        How long what it tells had been so when it opened, in seconds: age of the oldest sign.
    nodes
        Nodes of the suspects.
    consequences
        What followed from it, in words: ranks that ended after a crash, say.
    stacks
        By global rank.
    calls
        Last calls of the suspects as text, by global rank.
    logs
        Last lines of output, by global rank.
    probes
        Results of link probes made on its account.
    acknowledged_at, note
        When a person took note of it, and what they wrote; None and empty if nobody has.
    """

    id: str
    kind: str
    verdict: Verdict
    opened_at: float
    updated_at: float
    closed_at: float | None = None
    rounds: int = 1
    state: str = "open"
    generation: int = 0
    step: int = -1
    enforced: bool = False
    response: str = ""
    action: str = "log"
    latency_s: float = 0.0
    nodes: tuple[str, ...] = ()
    consequences: tuple[str, ...] = ()
    stacks: dict[int, Stack] = msgspec.field(default_factory=dict)
    calls: dict[int, str] = msgspec.field(default_factory=dict)
    logs: dict[int, str] = msgspec.field(default_factory=dict)
    probes: tuple[ProbeResult, ...] = ()
    acknowledged_at: float | None = None
    note: str = ""


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """What a round changed in the incidents, each as it is after the round."""

    opened: tuple[Incident, ...] = ()
    updated: tuple[Incident, ...] = ()
    closed: tuple[Incident, ...] = ()
