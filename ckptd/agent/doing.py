"""Whether a process does anything, though its counters stand still: it computes, reads or writes.

A rank that evaluates, saves or reads data while the others wait looks like one that hangs. What
tells them apart is what the kernel counts of it, of its threads and of its children: CPU time and
bytes. Its own heartbeat costs less than what counts here.

A rank that is ready to run, and has no CPU to run on, stands still as well. That time is the
machine's and not the rank's: it is counted, and taken off.
"""

from __future__ import annotations

import os
from contextlib import suppress

from ckptd.agent.processes import Process

__all__ = ["Doing"]

_EVERY_S = 1.0
_BUSY_S = 5.0
"""What did something so shortly before still does: readers wait for a disk now and then."""
_LEAST_SHARE = 0.03
"""Of a core; a heartbeat takes a tenth of it."""
_LEAST_BYTES = 4096
_MOST_CHILDREN = 64
_MOST_THREADS = 64
_TICKS = 100  # of the kernel's clock in /proc, the same on all Linux machines of today


class Doing:
    """What one process does; `look` now and then.

    Attributes
    ----------
    starved_s
        How long it was ready to run and had to wait for a CPU, since the first look or `forget`:
        of each second what the thread had that waited most.
    """

    def __init__(self) -> None:
        self._before: tuple[float, int, int, int] | None = None
        self._delays: dict[str, int] = {}
        self._busy = float("-inf")
        self.starved_s = 0.0

    def forget(self) -> None:
        """Begin anew: it has moved, and was not looked at meanwhile."""
        self._before, self._busy, self.starved_s = None, float("-inf"), 0.0

    def look(self, process: Process, interpreted: int, now: float) -> bool:
        """Return whether the process has done something lately.

        Parameters
        ----------
        process
            Which.
        interpreted
            A stamp that moves while its main thread runs Python code.
        now
            Monotonic seconds.
        """
        before = self._before
        if before is None or now - before[0] >= _EVERY_S:
            ticks, moved = _spent(process)
            earlier, self._delays = self._delays, _delays(process.pid)
            self._before = (now, ticks, moved, interpreted)
            if before is not None:
                share = (ticks - before[1]) / _TICKS / (now - before[0])
                wrote = moved - before[2] >= _LEAST_BYTES
                if share >= _LEAST_SHARE or wrote or interpreted != before[3]:
                    self._busy = now
                longest = max((d - earlier.get(t, d) for t, d in self._delays.items()), default=0)
                self.starved_s += min(longest * 1e-9, now - before[0])
        return now - self._busy <= _BUSY_S


def _delays(pid: int) -> dict[str, int]:
    """Return for how many nanoseconds each thread of a process has waited for a CPU so far."""
    found = {}
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task")[:_MOST_THREADS]:
            with suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{pid}/task/{thread}/schedstat", "rb") as file:
                    found[thread] = int(file.read().split()[1])
    return found


def _spent(process: Process) -> tuple[int, int]:
    """Return ticks of CPU and bytes read and written, of a process and its living children."""
    ticks, moved = process.spent()
    with suppress(OSError, ValueError):
        with open(f"/proc/{process.pid}/task/{process.pid}/children", "rb") as file:
            children = [int(word) for word in file.read().split()]
        for child in children[:_MOST_CHILDREN]:
            with suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{child}/stat", "rb") as file:
                    words = file.read().rpartition(b")")[2].split()
                ticks += sum(map(int, words[11:15]))
    return ticks, moved
