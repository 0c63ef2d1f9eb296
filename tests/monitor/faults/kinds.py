"""The kinds of faults, and what the monitor has to say of each."""

from __future__ import annotations

from dataclasses import dataclass

from ckptd.monitor.verdict import VerdictKind

__all__ = ["CLEAN", "FAULTS", "KINDS", "FaultKind"]


@dataclass(frozen=True)
class FaultKind:
    """One row of the matrix.

    Attributes
    ----------
    name
        As the command line takes it.
    wanted
        Classes that are right; none for a fault after which nobody is to be accused.
    culprit
        What a right verdict names: ``rank``, ``group`` (one that holds the victim, or a rank of
        it), ``node``, or nothing.
    hang
        Whether a floor has to pass first, so that latency is counted from its end.
    nodes
        Nodes that the job pretends to have.
    pause_s
        How long a pause lasts, as a multiple of the floor; for kinds that go on afterwards.
    """

    name: str
    wanted: tuple[VerdictKind, ...] = ()
    culprit: str = ""
    hang: bool = False
    nodes: int = 1
    pause: float = 0.0


_HANG = (VerdictKind.HANG,)
_CALLS_DIFFER = (VerdictKind.MISMATCH, VerdictKind.DESYNC)

FAULTS = (
    FaultKind("stop", _HANG, "rank", hang=True),
    FaultKind("sleep", _HANG, "rank", hang=True),
    FaultKind("gil", _HANG, "rank", hang=True),
    FaultKind("spin", _HANG, "rank", hang=True),
    FaultKind("kill", (VerdictKind.CRASH,), "rank"),
    FaultKind("segv", (VerdictKind.CRASH,), "rank"),
    FaultKind("exit", (VerdictKind.CRASH,), "rank"),
    FaultKind("raise", (VerdictKind.CRASH,), "rank"),
    FaultKind("skip", _CALLS_DIFFER, "rank"),
    FaultKind("wrong-op", _CALLS_DIFFER, "rank"),
    FaultKind("wrong-size", _CALLS_DIFFER, "rank"),
    FaultKind("wrong-root", _CALLS_DIFFER, "rank"),
    FaultKind("wrong-reduce", _CALLS_DIFFER, "rank"),
    FaultKind("opposite", (VerdictKind.DEADLOCK,), "group", hang=True),
    FaultKind("partition", (VerdictKind.COMM_HANG,), "group", hang=True),
    FaultKind("frozen-comm", (VerdictKind.COMM_HANG,), "group", hang=True),
    FaultKind("slow", (VerdictKind.SLOW_RANK,), "rank"),
    # All that is of the node is stopped; the kernel answers, as of a machine that is frozen.
    FaultKind("node", (*_HANG, VerdictKind.CRASH, VerdictKind.CANNOT_SAY), "node", True, 2),
    FaultKind("corrupt", (VerdictKind.CORRUPTION,), "rank"),
)
"""Each is to be found and its culprit named."""

CLEAN = (
    FaultKind("none"),
    FaultKind("checkpoint-pause", pause=2.0),
    FaultKind("evaluation-pause", pause=2.0),
    FaultKind("all-pause", pause=0.8),
    FaultKind("agent-killed"),
    FaultKind("daemon-killed"),
)
"""Nobody is to be accused of anything."""

KINDS = {kind.name: kind for kind in (*FAULTS, *CLEAN)}
