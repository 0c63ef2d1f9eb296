"""When two verdicts tell of one cause, and when one tells what another led to."""

from __future__ import annotations

from ckptd.monitor.verdict import Kind, Target, Verdict

__all__ = ["CALLS", "STANDING", "follows", "same_cause", "touching"]

STANDING = frozenset({Kind.HANG, Kind.DEADLOCK, Kind.COMM_HANG, Kind.CANNOT_SAY})
"""Something stands still; which of these it is may show only with more reports."""

CALLS = frozenset({Kind.MISMATCH, Kind.DESYNC})
"""Members of a group make different calls: both show of one that was left out."""

_LEADS_ON = frozenset({Kind.CRASH, *CALLS, *STANDING})


def touching(one: Verdict, other: Verdict) -> bool:
    """Whether two verdicts name a suspect or a group that is the same, or none at all."""
    mine, theirs = _named(one), _named(other)
    return bool(mine & theirs) or not (mine and theirs)


def _named(verdict: Verdict) -> set[tuple[str, str]]:
    names = {(str(s.target), s.name) for s in verdict.suspects}
    return names | {(str(Target.GROUP), f"{g:016x}") for g in verdict.groups}


def same_cause(known: Verdict, new: Verdict) -> bool:
    """Whether `new` tells of what `known` tells."""
    if known.kind is new.kind is Kind.CRASH:
        # Processes end one after the other; silent nodes are told each by itself.
        return bool(known.names() and new.names()) or touching(known, new)
    for family in (STANDING, CALLS):
        if known.kind in family and new.kind in family:
            return known.kind is new.kind is Kind.CANNOT_SAY or touching(known, new)
    return known.kind is new.kind and touching(known, new)


def follows(known: Verdict, new: Verdict) -> bool:
    """Whether `new` may be what `known` led to: ends and waits after what stopped the job."""
    if known.kind not in _LEADS_ON:
        return False
    if new.kind is Kind.CRASH:
        return known.kind is not Kind.CANNOT_SAY
    return new.kind in STANDING and known.kind in (Kind.CRASH, *CALLS)
