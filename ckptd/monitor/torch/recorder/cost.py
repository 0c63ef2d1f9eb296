"""Cost of recording a call, measured at the start."""

from __future__ import annotations

import statistics
import time

from ckptd.monitor.ring import RecorderState, RingShape, RingWriter
from ckptd.monitor.torch.recorder.hook import idle_group
from ckptd.monitor.torch.recorder.sources import MakeSource

_CALLS = 200
_SMALL = RingShape(slots=64, groups=8, members=8, texts=64)


def call_cost(make: MakeSource, ring: RingWriter) -> int:
    """Return how many nanoseconds longer a call takes with a source of calls than without.

    The median of some hundred calls that reach no network, recorded in a ring of their own. 0 for a
    source that reports none. No source may be in use.

    Parameters
    ----------
    make
        Makes the source.
    ring
        Beside which the other one lies for the moment.

    Raises
    ------
    Exception
        Whatever the source raises that does not work here.
    """
    failures: list[BaseException] = []
    path = ring.path.with_suffix(".cost")
    trial_ring = RingWriter(path, ring.identity, _SMALL)
    try:
        source = make(trial_ring, failures.append)
        if source.state is not RecorderState.CALLS:
            return 0
        without = _call_ns()
        source.start()
        try:
            recorded = _call_ns()
        finally:
            source.stop()
    finally:
        path.unlink()
    if failures:
        raise RuntimeError("recording failed while it was measured") from failures[0]
    return max(recorded - without, 0)


def _call_ns() -> int:
    group, tensor = idle_group()
    clock = time.perf_counter_ns
    taken = []
    for _ in range(_CALLS):
        start = clock()
        group.allreduce([tensor]).wait()
        taken.append(clock() - start)
    return int(statistics.median(taken))
