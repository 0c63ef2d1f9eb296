"""Source of last resort: PyTorch's own counters of calls of each group, copied into the ring.

In it: how often they are copied.

The flight recorder counts calls that were enqueued and that have completed, for each group. There
are no single calls then: late ranks are seen; sizes, call sites and times are not. Its count of
completed calls stays too low where two of gloo's threads end one at the same time.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from torch.distributed import distributed_c10d

from ckptd.monitor.ring import RecorderState, RingWriter
from ckptd.monitor.torch.recorder.calls import Groups, calls_so_far
from ckptd.monitor.torch.recorder.finite import FiniteCheck
from ckptd.monitor.torch.recorder.sources import Broken

_EVERY_S = 0.5


class CounterSource:
    """Copies PyTorch's counters into the ring, twice a second."""

    name = "counters"
    state = RecorderState.COUNTERS

    def __init__(self, ring: RingWriter, broken: Broken) -> None:
        self._broken = broken
        self._groups = Groups(ring, counted=True)
        self._on = True
        self._next = 0.0

    def start(self) -> None:
        """See `Source`."""
        _status()

    def silence(self) -> None:
        """See `Source`."""
        self._on = False

    def look(self, finite: FiniteCheck) -> None:
        """See `Source`; it sees no single calls."""

    def stop(self) -> None:
        """See `Source`."""
        if self._on:
            self._copy()
        self._on = False

    def beat(self) -> None:
        """See `Source`."""
        now = time.monotonic()
        if self._on and now >= self._next:
            self._next = now + _EVERY_S
            self._copy()

    def _copy(self) -> None:
        try:
            status = _status()
            for i, group in enumerate(list(distributed_c10d._world.pg_map)):
                row = self._groups.of(group)
                if row is not None:
                    entered = calls_so_far(group)
                    row.at_least(
                        entered, _completed(status.get(str(i)), entered), time.monotonic_ns()
                    )
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            self._broken(error)


def _status() -> dict[str, Any]:
    """Return the flight recorder's counters by the number of the group in this process."""
    dump: Any = vars(torch._C._distributed_c10d)["_dump_fr_trace_json"]
    status = json.loads(dump(includeCollectives=False))["pg_status"]
    if not isinstance(status, dict):
        raise TypeError("the flight recorder has no table of groups")
    return status


def _completed(status: Any, entered: int) -> int:
    """Return the completed calls of a group, of which `entered` were entered a moment later.

    Where the numbers cannot be those of one group nothing is claimed to be under way.
    """
    if not isinstance(status, dict):
        return entered
    enqueued = int(status.get("last_enqueued_collective", -1))
    completed = int(status.get("last_completed_collective", -1))
    return max(completed, 0) if 0 <= enqueued <= entered else entered
