"""What one rank shows at a moment: plain data, made from its ring and its process state.

Everything that diagnoses reads this and nothing else, so that live rings, recorded rings and
simulated jobs are judged by the same code. Times are seconds on the monotonic clock of the rank's
own node; only differences of one view's times mean anything, so clocks of nodes need not agree.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

__all__ = ["CALL", "GROUP", "CallFlag", "Phase", "RankView", "no_calls", "no_groups", "phase_name"]


class Phase(enum.IntEnum):
    """What a rank is about; each phase has time-outs and baselines of its own."""

    INIT = 0
    COMPILE = 1
    TRAIN = 2
    EVAL = 3
    CKPT = 4
    EXIT = 5


def phase_name(number: int) -> str:
    """Return the name of a phase by its number; INIT for a number that is none."""
    return Phase(number).name if 0 <= number <= max(Phase) else Phase.INIT.name


class CallFlag(enum.IntFlag):
    """What is special about a call."""

    VARIABLE = 1
    """Ranks may rightly state different sizes (all-to-all with splits, objects): only the
    operation is compared."""
    ASYNC = 2
    """The caller did not wait for it at once."""
    FAILED = 4
    """It ended with an error."""
    COUNTED = 8
    """Its step is one of an optimizer, counted by the recorder: other ranks may rightly be in
    another one."""


GROUP: np.dtype[Any] = np.dtype(
    [
        ("group", "<u8"),  # hash of the group's name and ranks: the same on all ranks, never 0
        ("size", "<u4"),  # members
        ("entered", "<i8"),  # sequence number of the last call entered; counts from 1, 0 is none
        ("completed", "<i8"),  # of the last call completed
    ]
)
"""One row for each group of the rank.

A point-to-point call belongs to the group of its channel, (process group, sender, receiver): two
members, whose sequence numbers count the sends of the one and the receives of the other, both with
the same `op`.
"""

CALL: np.dtype[Any] = np.dtype(
    [
        ("group", "<u8"),
        ("seq", "<i8"),  # from 1 in each group
        ("op", "<u4"),  # hash of the operation's name and reduction
        ("dtype", "<u4"),  # hash of the element type's name; 0 is unknown
        ("bytes", "<i8"),  # -1 is unknown
        ("root", "<i4"),  # -1 is none
        ("flags", "<u4"),  # CallFlag
        ("site", "<u8"),  # hash of the call site; 0 is unknown
        ("step", "<i8"),  # -1 is unknown
        ("phase", "<u4"),  # Phase
        ("start", "<f8"),  # s
        ("end", "<f8"),  # s; NaN is not completed
    ]
)
"""One row for each recent call, oldest first: in the order in which the rank entered them."""


def no_groups() -> np.ndarray[Any, Any]:
    """Return an empty table of `GROUP` rows."""
    return np.zeros(0, GROUP)


def no_calls() -> np.ndarray[Any, Any]:
    """Return an empty table of `CALL` rows."""
    return np.zeros(0, CALL)


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank shows at the moment `at`.

    Attributes
    ----------
    rank, world
        Global rank, and how many ranks the job has.
    node
        Name of the node, the same for all ranks on it.
    pid
        Process id on its node.
    at
        When the view was taken; the clock of all other times of this view, seconds.
    alive
        Whether the process runs, by pidfd.
    exit_code
        How it ended, negative for a signal; None while it runs or if nobody knows.
    process_state
        The kernel's letter (``R S D T Z``), or empty where it could not be read.
    answers
        Whether a thread of the rank that needs no GIL answered a ping; None if not asked.
    heartbeat
        When the rank's Python heartbeat last moved; NaN before the first.
    moved
        When any counter of the rank (call entered or completed, step, phase, mark) last changed.
    phase, step
        The phase, and the number of the step being made; -1 if steps are not marked.
    steps_done
        Steps completed by this process; for warm-up. Calls of one site count if steps are not
        marked.
    pending_group, pending_seq, pending_since
        The call that the rank is inside or waits for; of several, the oldest. 0, 0, NaN if none.
    groups, calls
        Tables of `GROUP` and `CALL` rows.
    members
        Global ranks of groups in `groups`, in order; may be left out once told.
    """

    rank: int
    world: int
    node: str
    pid: int = 0
    at: float
    alive: bool = True
    exit_code: int | None = None
    process_state: str = ""
    answers: bool | None = None
    heartbeat: float = math.nan
    moved: float
    phase: Phase = Phase.TRAIN
    step: int = -1
    steps_done: int = 0
    pending_group: int = 0
    pending_seq: int = 0
    pending_since: float = math.nan
    groups: np.ndarray[Any, Any] = msgspec.field(default_factory=no_groups)
    calls: np.ndarray[Any, Any] = msgspec.field(default_factory=no_calls)
    members: Mapping[int, tuple[int, ...]] = msgspec.field(default_factory=dict)
