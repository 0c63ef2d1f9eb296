"""Crashes after a collective's time-out (NCCL watchdog), and the ranks that were waited for."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

import numpy as np

from ckptd.monitor.job import CallFlag, JobView
from ckptd.monitor.rules.hang import place_of, waits
from ckptd.monitor.rules.naming import rank_suspects
from ckptd.monitor.stats import Array
from ckptd.monitor.verdict import Suspect, SuspectKind

_SHARE = 0.95
"""Of a time-out: a backend's clock begins a little after the recorder's."""
_DUMPING_S = 120.0
"""A backend that aborts its process writes for so long at most what it knows."""
_MOST_TOLD = 8


@dataclass(frozen=True)
class GivenUp:
    """The first call that a backend gave up after its time-out, and what explains it.

    Attributes
    ----------
    suspects
        Ranks that were waited for and were in no call; if there are none, the group.
    evidence
        Where every rank was when the call was given up.
    waited_s, timeout_s
        How long the call lasted, and the time-out of its group.
    place
        Where the first suspect was last seen.
    """

    suspects: tuple[Suspect, ...]
    evidence: tuple[str, ...]
    waited_s: float
    timeout_s: float
    place: str


def given_up(job: JobView) -> GivenUp | None:
    """Return the first call that was given up by its time-out as the last one of a rank, if any.

    Counters of calls, which outlive the processes, show which ranks were waited for.
    """
    calls, last = job.calls, job.last_call
    rows = np.flatnonzero(last >= 0)
    mine = calls[last[rows]]
    timeouts = np.array([job.timeouts.get(int(g), 0.0) for g in mine["group"]], np.float64)
    failed = (mine["flags"] & CallFlag.FAILED) != 0
    aborted = np.isnan(mine["end"]) & (job.ranks["exit_code"][rows] == -signal.SIGABRT)
    spent = np.where(failed, mine["end"], 0.0) - mine["start"]
    late = (timeouts > 0) & (spent >= _SHARE * timeouts)
    late &= failed | (aborted & (spent <= timeouts + _DUMPING_S))
    if not late.any():
        return None
    ends = np.where(failed, mine["end"], mine["start"] + timeouts)
    one = int(np.flatnonzero(late)[np.argmin(ends[late])])
    at = float(ends[one])
    held = (failed | np.isnan(mine["end"])) & (mine["start"] < at)
    inside = rows[held]
    then = _at_that_moment(job, mine[held], inside, at)
    wait = waits(then, np.zeros(len(job.ranks), bool))
    roots = np.flatnonzero(wait.root)
    call, group = mine[one], int(mine["group"][one])
    waited = at - float(call["start"])
    what = f"call {int(call['seq'])} of {job.group_name(group)}"
    first = (
        f"the backend gave {what} up on rank {job.ranks['rank'][rows[one]]} after {waited:.1f} s, "
        f"by its time-out of {timeouts[one]:g} s"
    )
    told = [first, *(_where(then, int(row)) for row in inside[:_MOST_TOLD])]
    if len(roots):
        told.insert(1, f"{len(inside)} ranks waited for {len(roots)} in no call")
        detail = f"in no call, and others waited for it for {waited:.1f} s"
        suspects = rank_suspects(job, roots[:64], 0.9, [detail] * len(roots[:64]))
        return GivenUp(
            suspects, tuple(told), waited, float(timeouts[one]), place_of(job, int(roots[0]))
        )
    if wait.complete[rows[one]]:
        told.insert(1, "all its members had entered it: the network or a device held it up")
    named = Suspect(SuspectKind.GROUP, f"{group:016x}", 0.9, job.group_name(group))
    return GivenUp((named,), tuple(told), waited, float(timeouts[one]), place_of(job, rows[one]))


def _at_that_moment(job: JobView, calls: Array, rows: Array, at: float) -> JobView:
    """Return `job` as it was at `at`: ranks in `rows` inside `calls`, no other one in any."""
    ranks, groups = job.ranks.copy(), job.groups.copy()
    ranks["alive"] = True
    ranks["pending_group"] = ranks["pending_seq"] = 0
    ranks["pending_group"][rows], ranks["pending_seq"][rows] = calls["group"], calls["seq"]
    ranks["pending_age"][rows] = at - calls["start"]
    # What was entered later, when the others had given up, does not count.
    later = job.calls[job.calls["start"] >= at]
    for row, group in set(zip(later["row"].tolist(), later["group"].tolist(), strict=True)):
        first = later["seq"][(later["row"] == row) & (later["group"] == group)].min()
        there = (groups["row"] == row) & (groups["group"] == group)
        groups["entered"][there] = np.minimum(groups["entered"][there], first - 1)
    return replace(job, ranks=ranks, groups=groups)


def _where(job: JobView, row: int) -> str:
    rank = job.ranks[row]
    call = job.calls[job.last_call[row]]
    site = job.texts.get(int(call["site"]))
    return (
        f"then rank {rank['rank']} was in call {int(rank['pending_seq'])} of "
        f"{job.group_name(int(rank['pending_group']))} for {float(rank['pending_age']):.1f} s"
    ) + (f", at {site}" if site else "")
