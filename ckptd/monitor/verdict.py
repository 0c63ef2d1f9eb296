"""`Verdict`: kinds, suspects, evidence, confidence; kinds with which a job stands still."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec


class VerdictKind(enum.StrEnum):
    """Class of a verdict."""

    CRASH = "crash"
    MISMATCH = "mismatch"
    DESYNC = "desync"
    HANG = "non-communication hang"
    DEADLOCK = "deadlock"
    COMM_HANG = "communication hang"
    SLOW_RANK = "slow rank"
    SLOW_LINK = "slow link"
    CORRUPTION = "silent corruption"
    NOT_FINITE = "not finite"
    CANNOT_SAY = "cannot say"


STOPS = frozenset(
    {
        VerdictKind.CRASH,
        VerdictKind.MISMATCH,
        VerdictKind.DESYNC,
        VerdictKind.HANG,
        VerdictKind.DEADLOCK,
        VerdictKind.COMM_HANG,
    }
)
"""With one of these the whole job stands still."""


class SuspectKind(enum.StrEnum):
    """Kinds of suspects."""

    RANK = "rank"
    NODE = "node"
    GROUP = "group"
    SENDER = "sender"
    RECEIVER = "receiver"
    LINK = "link"


class Suspect(msgspec.Struct, frozen=True):
    """One suspect of a verdict.

    Attributes
    ----------
    target
        What `name` names.
    name
        Rank, name of a node, group in hexadecimal, or ``a>b`` for a link.
    confidence
        From 0 to 1. The shares of suspects of which only one can be meant add up to 1 at most.
    detail
        What this suspect shows, in a few words.
    """

    target: SuspectKind
    name: str
    confidence: float
    detail: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One diagnosis of one moment, with all that is needed to doubt it.

    Attributes
    ----------
    kind
        Its class.
    suspects
        Likeliest first. Empty where no rank or node can be named.
    evidence
        Sentences, most telling first.
    rules_out
        What the evidence excludes.
    refuted_by
        What, if seen, would show this verdict wrong.
    action
        What to do about it.
    numbers
        Figures to check it with: counters, ages in seconds, limits in seconds, scores.
    groups
        Groups concerned.
    place
        Where in the program the first suspect was last seen: the line of its last call. Empty if
        unknown.
    """

    kind: VerdictKind
    suspects: tuple[Suspect, ...]
    evidence: tuple[str, ...]
    rules_out: tuple[str, ...]
    refuted_by: str
    action: str
    numbers: Mapping[str, float]
    groups: tuple[int, ...] = ()
    place: str = ""

    def names(self, target: SuspectKind = SuspectKind.RANK) -> tuple[str, ...]:
        """Return the names of the suspects of one target, likeliest first."""
        return tuple(s.name for s in self.suspects if s.target is target)
