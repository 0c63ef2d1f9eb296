"""What each rank spends by itself in a step: outside communication, whoever it waits for.

The time from the end of a rank's calls to its next call is its own. When it arrives says nothing:
a straggler's partner arrives last as well, because it waited for the straggler before.
"""

from __future__ import annotations

import numpy as np

from ckptd.monitor.stats import Array
from ckptd.monitor.view import Phase

__all__ = ["self_times"]


def self_times(calls: Array, rows: int, phase: Phase = Phase.TRAIN) -> tuple[Array, Array]:
    """Return the seconds that each rank spent by itself in each step.

    A gap counts to the step of the call that ends it. Gaps before another phase's call, or after
    it, are left out: a checkpoint or an evaluation is nobody's slowness.

    Parameters
    ----------
    calls
        Rows of `ckptd.monitor.job.JOINED_CALL`, a rank's in their order.
    rows
        Ranks.
    phase
        The phase that is looked at.

    Returns
    -------
    steps : numpy.ndarray
        Numbers of the steps found, rising.
    seconds : numpy.ndarray
        Shape (steps, ranks); NaN where a rank shows nothing of a step, or its oldest calls of it
        are lost.
    """
    if not len(calls):
        return np.zeros(0, np.int64), np.zeros((0, rows))
    row, step = calls["row"], calls["step"]
    same = np.zeros(len(calls), bool)
    same[1:] = row[1:] == row[:-1]
    gap = calls["start"] - _free_since(calls, same)
    of_phase = calls["phase"] == phase
    kept = same & of_phase & np.roll(of_phase, 1) & (step >= 0) & ~np.isnan(gap)
    # What a rank shows of its oldest step is not all of it.
    first = np.full(rows, np.iinfo(np.int64).max)
    np.minimum.at(first, row, step)
    kept &= step > first[row]
    steps, codes = np.unique(step[kept], return_inverse=True)
    place = codes * rows + row[kept]
    total = np.bincount(place, np.maximum(gap[kept], 0.0), len(steps) * rows)
    seen = np.bincount(place, minlength=len(steps) * rows) > 0
    return steps, np.where(seen, total, np.nan).reshape(len(steps), rows)


def _free_since(calls: Array, same: Array) -> Array:
    """Return when the last call before each call of the same rank ended; NaN if one goes on."""
    ends = np.where(np.isnan(calls["end"]), np.inf, calls["end"])
    # One running maximum over all ranks: each is lifted above whatever came before it.
    finite = ends[np.isfinite(ends)]
    low = min(float(calls["start"].min()), float(finite.min()) if len(finite) else 0.0)
    high = max(float(calls["start"].max()), float(finite.max()) if len(finite) else 0.0)
    span = high - low + 1.0
    lift = np.cumsum(~same) * (2 * span)
    running = np.maximum.accumulate(np.minimum(ends, high + 0.5) - low + lift)
    before = np.roll(running, 1) - np.roll(lift, 1) + low
    out: Array = np.where(same & (before < high + 0.25), before, np.nan)
    return out
