"""Ranks that the kernel shows as stopped, sheet after sheet: by a signal, or by a debugger.

A profiler that takes a stack stops a process as well, for a moment. How long one is stopped is
counted in what its own agent tells, so that an agent that pauses does not make it longer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ckptd.monitor.stats import Array

__all__ = ["Stopped"]


@dataclass
class Stopped:
    """Since when each process is shown as stopped; no clock."""

    _since: dict[tuple[int, int], float] = field(default_factory=dict)

    def longer(self, rows: Array, seconds: float) -> Array:
        """Return which rows were shown as stopped all along for longer than `seconds`.

        Parameters
        ----------
        rows
            Rows of `ckptd.monitor.sheet.SHEET_RANK`, of this round.
        seconds
            How long is long.
        """
        out = np.zeros(len(rows), bool)
        halted = (rows["alive"] != 0) & np.isin(rows["state"], np.array([b"T", b"t"]))
        before, self._since = self._since, {}
        for row in np.flatnonzero(halted).tolist():
            key = (int(rows["rank"][row]), int(rows["pid"][row]))
            idle = float(rows["idle"][row])
            first = min(before.get(key, idle), idle)  # less: it ran between
            self._since[key] = first
            out[row] = idle - first > seconds
        return out
