"""Order of the rules on what stands still, in which they explain each other."""

from __future__ import annotations

import numpy as np

from ckptd.monitor.job import JobView
from ckptd.monitor.rules.crash import crashes, ended
from ckptd.monitor.rules.hang import hangs
from ckptd.monitor.rules.limits import CallLoops, HangLimits, Learned
from ckptd.monitor.rules.mismatch import mismatches, with_newcomers
from ckptd.monitor.stats import Array
from ckptd.monitor.verdict import Verdict


def diagnose(
    job: JobView,
    limits: HangLimits | None = None,
    learned: Learned | None = None,
    stopped: Array | None = None,
    loops: CallLoops | None = None,
) -> tuple[Verdict, ...]:
    """Return what is wrong with `job`, causes before consequences; empty if nothing is.

    A crash explains the ranks that wait for it, and a mismatch those stuck in its group, so that
    neither is reported again as a hang. Slow ranks, slow links and silent corruption are judged
    from other figures: see `slow` and `corruption` beside this module, and `ckptd.monitor.links`.

    Parameters
    ----------
    job
        The moment.
    limits
        Settings; the defaults if left out.
    learned
        What was usual so far, by `ckptd.monitor.rules.limits.learn`.
    stopped
        Ranks that are known to be stopped for long, by `ckptd.monitor.rules.endings`.
    loops
        Where this life of the job goes round.
    """
    limits = limits or HangLimits()
    job = with_newcomers(job)
    gone = ended(job)
    differing = tuple(mismatches(job, limits))
    crashed = tuple(crashes(job, limits))
    explained = gone | _in_groups(job, differing)
    stuck = tuple(hangs(job, limits, learned or Learned(), explained, stopped, loops))
    return (*differing, *crashed, *stuck)


def _in_groups(job: JobView, verdicts: tuple[Verdict, ...]) -> Array:
    groups = np.array([g for v in verdicts for g in v.groups], np.uint64)
    out: Array = np.isin(job.ranks["pending_group"], groups) & (job.ranks["pending_group"] != 0)
    named = [int(name) for verdict in verdicts for name in verdict.names()]
    out |= np.isin(job.ranks["rank"], np.array(named, np.int64))
    return out
