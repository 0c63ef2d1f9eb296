"""What is asked of agents about suspects, once each, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ckptd.monitor.job import JobView
from ckptd.monitor.report import EvidenceReport, GroupInfo, Stack
from ckptd.monitor.verdict import Verdict, VerdictKind

__all__ = ["WantedEvidence", "calls_text", "suspected_ranks"]

MOST = 8
"""Ranks of one verdict of which stacks are taken."""
BESIDE = 2
"""Ranks that wait, beside the suspects: what they wait in says much."""
AGAIN_S = 60.0
"""The same rank is asked again after so long."""
KEPT_S = 120.0
SHOWN = 32
"""Calls of a rank that are told as text."""
_STACKS = frozenset(
    {
        VerdictKind.HANG,
        VerdictKind.DEADLOCK,
        VerdictKind.COMM_HANG,
        VerdictKind.MISMATCH,
        VerdictKind.DESYNC,
        VerdictKind.CANNOT_SAY,
    }
)


@dataclass
class WantedEvidence:
    """Ranks to ask about, and what was found lately; no clock."""

    stacks: dict[int, Stack] = field(default_factory=dict)
    logs: dict[int, str] = field(default_factory=dict)
    _asked: dict[int, float] = field(default_factory=dict)
    _wanted: set[int] = field(default_factory=set)
    _came: dict[int, float] = field(default_factory=dict)

    def want(self, verdicts: Iterable[Verdict], job: JobView, now: float) -> None:
        """Ask for the stacks of suspects that stand still, and of some that wait for them."""
        for verdict in verdicts:
            if verdict.kind not in _STACKS:
                continue
            named = suspected_ranks(verdict, job)[:MOST]
            inside = job.ranks["rank"][job.ranks["pending_group"] != 0]
            others = [r for r in inside[: MOST + BESIDE].tolist() if r not in named][:BESIDE]
            for rank in [*named, *others]:
                if now - self._asked.get(rank, -np.inf) > AGAIN_S:
                    self._asked[rank] = now
                    self._wanted.add(rank)

    def orders(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return of which of these ranks stacks are wanted; each is told once."""
        if not self._wanted:
            return ()
        out = tuple(sorted(self._wanted.intersection(ranks)))
        self._wanted.difference_update(out)
        return out

    def take(self, found: EvidenceReport, now: float) -> None:
        """Keep what was found, for as long as it may concern an incident."""
        for rank in (*found.stacks, *found.logs):
            self._came[rank] = now
        self.stacks.update(found.stacks)
        self.logs.update(found.logs)

    def forget(self, now: float) -> None:
        """Drop what is old."""
        for rank in [r for r, at in self._came.items() if now - at > KEPT_S]:
            del self._came[rank]
            self.stacks.pop(rank, None)
            self.logs.pop(rank, None)
        self._asked = {r: at for r, at in self._asked.items() if now - at <= AGAIN_S}
        self._wanted &= self._asked.keys()


def suspected_ranks(verdict: Verdict, job: JobView) -> list[int]:
    """Return the ranks that a verdict names; if none, some that are inside its groups."""
    named = [int(n) for n in verdict.names() if n.isdecimal()]
    if named:
        return named
    inside = np.isin(job.ranks["pending_group"], np.array(verdict.groups, np.uint64))
    out: list[int] = job.ranks["rank"][inside][:MOST].tolist()
    return out


def calls_text(
    job: JobView, ranks: Iterable[int], texts: Mapping[int, str], names: Mapping[int, GroupInfo]
) -> dict[int, str]:
    """Return the last calls of ranks as lines of text, the oldest first."""
    out = {}
    for rank in ranks:
        row = np.flatnonzero(job.ranks["rank"] == rank)
        if not len(row):
            continue
        first, last = np.searchsorted(job.calls["row"], [row[0], row[0] + 1])
        calls = job.calls[max(first, last - SHOWN) : last]
        if len(calls):
            out[rank] = "\n".join(_line(call, texts, names) for call in calls)
    return out


def _line(call: np.void, texts: Mapping[int, str], names: Mapping[int, GroupInfo]) -> str:
    op = texts.get(int(call["op"]), f"{int(call['op']):08x}")
    info = names.get(int(call["group"]))
    told = (info.kind or info.name) if info is not None else ""
    group = told or f"{int(call['group']):016x}"
    spent = call["end"] - call["start"]
    ended = f"took {spent:.6f} s" if spent == spent else "goes on"
    site = texts.get(int(call["site"]), "")
    return (
        f"{call['start']:+.3f} s  {group} #{int(call['seq'])}  {op}  "
        f"{int(call['bytes'])} bytes  step {int(call['step'])}  {ended}  {site}"
    ).rstrip()
