"""`JobView`, `RankView`: all ranks at a moment as columns; phases, flags of calls.

The diagnosis reads these and nothing else, so that live rings, recorded rings and simulated jobs
are judged by the same code. Times of a view are seconds on the monotonic clock of the rank's own
node; only differences of one view's times mean anything, so clocks of nodes need not agree.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from ckptd.monitor.stats import Array

# --- one rank -------------------------------------------------------------------------------------


class Phase(enum.IntEnum):
    """The work of a rank; each phase has time-outs and baselines of its own."""

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
    """Special properties of a call."""

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
    QUEUED = 16
    """Its device has not come to it yet: what is before it in the queue still runs."""
    UNSEEN = 32
    """Its end is not known. The time that represents it is when the call was enqueued, or when
    the recorder stopped looking."""


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
    """One rank at the moment `at`.

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
        How it ended, negative for a signal; None while it runs or if unknown.
    process_state
        The kernel's letter (``R S D T Z``), or empty where it could not be read.
    answers
        Whether a thread of the rank that needs no GIL answered a ping; None if not asked. Of one
        that has ended, true if it alone was sent the signal.
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
        Global ranks of groups in `groups`, in order; may be left out once sent.
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


# --- all ranks ------------------------------------------------------------------------------------


NO_EXIT = -(1 << 31)
"""Exit code of a process that runs, or whose exit code is unknown."""

RANK: np.dtype[Any] = np.dtype(
    [
        ("rank", "<i8"),
        ("node", "<i4"),  # index in Job.nodes
        ("pid", "<i8"),  # in its own space of process ids; 0 is unknown
        ("alive", "?"),
        ("exit_code", "<i4"),  # NO_EXIT if none
        ("state", "S1"),
        ("answers", "i1"),  # 1 yes, 0 no, -1 not asked; if ended, 1 is singled out
        ("heartbeat", "<f8"),  # age, s; NaN before the first
        ("idle", "<f8"),  # s since any counter moved
        ("phase", "<i4"),
        ("step", "<i8"),
        ("steps_done", "<i8"),
        ("pending_group", "<u8"),  # 0 is none
        ("pending_seq", "<i8"),
        ("pending_age", "<f8"),  # s; NaN is none
    ]
)
"""One row for each reporting rank."""

JOINED_GROUP: np.dtype[Any] = np.dtype([("row", "<i8"), *GROUP.descr])
"""`GROUP`, and the row of its rank."""

JOINED_CALL: np.dtype[Any] = np.dtype([("row", "<i8"), *CALL.descr])
"""`CALL`, and the row of its rank; times are seconds before the moment, so below 0."""


class AgentView(msgspec.Struct, frozen=True):
    """The state of a node's agent, as far as it is known.

    Attributes
    ----------
    node
        Name of the node.
    missed
        Beats that did not come, in a row.
    reachable
        Whether another node reaches the node; None if not tried.
    """

    node: str
    missed: int = 0
    reachable: bool | None = None


@dataclass(frozen=True)
class JobView:
    """All reporting ranks at a moment.

    Attributes
    ----------
    world
        Ranks that the job has; those that do not report included.
    nodes
        Names of nodes.
    ranks, groups, calls
        Tables of `RANK`, `JOINED_GROUP` and `JOINED_CALL` rows; a rank's calls are in their order.
    members
        Global ranks of each group, where known.
    agents
        Agents of which something is to be said.
    texts, group_names
        What hashes in calls, and groups, represent: for people, nothing is decided by them.
    timeouts
        After how many seconds the backend gives up a call of a group, where known.
    """

    world: int
    nodes: tuple[str, ...]
    ranks: Array
    groups: Array
    calls: Array
    members: Mapping[int, Sequence[int]]
    agents: tuple[AgentView, ...] = ()
    texts: Mapping[int, str] = field(default_factory=dict)
    group_names: Mapping[int, str] = field(default_factory=dict)
    timeouts: Mapping[int, float] = field(default_factory=dict)

    def text(self, number: int) -> str:
        """Return what a hash of a call represents, or the hash in hexadecimal."""
        return self.texts.get(number) or f"{number:08x}"

    def group_name(self, group: int) -> str:
        """Return the name of a group, or its number in hexadecimal."""
        return self.group_names.get(group) or f"{group:016x}"

    @cached_property
    def group_ids(self) -> Array:
        """Groups that some rank reports, sorted."""
        return self._coded[0]

    @cached_property
    def group_codes(self) -> Array:
        """Place in `group_ids` of each row of `groups`."""
        return self._coded[1]

    @cached_property
    def _coded(self) -> tuple[Array, Array]:
        ids, codes = np.unique(self.groups["group"], return_inverse=True)
        return ids, codes

    def code_of(self, groups: Array) -> Array:
        """Return the place in `group_ids` of each group; -1 for one that no rank reports."""
        if not len(self.group_ids):
            return np.full(len(groups), -1)
        at = np.minimum(np.searchsorted(self.group_ids, groups), len(self.group_ids) - 1)
        return np.where(self.group_ids[at] == groups, at, -1)

    @cached_property
    def last_call(self) -> Array:
        """Place in `calls` of each rank's last call; -1 if it has none."""
        out = np.full(len(self.ranks), -1)
        out[self.calls["row"]] = np.arange(len(self.calls))  # the last writer stays
        return out

    @cached_property
    def cohorts(self) -> tuple[Array, Array]:
        """Calls sorted by (group, sequence number), and where each such cohort starts."""
        calls = self.calls
        order = np.lexsort((calls["seq"], calls["group"]))
        group, seq = calls["group"][order], calls["seq"][order]
        new = np.ones(len(order), bool)
        new[1:] = (group[1:] != group[:-1]) | (seq[1:] != seq[:-1])
        return order, np.flatnonzero(new)


def no_job() -> JobView:
    """Return a job of which nothing is known."""
    ranks, groups, calls = (np.zeros(0, dtype) for dtype in (RANK, JOINED_GROUP, JOINED_CALL))
    return JobView(0, (), ranks, groups, calls, {})


def join(views: Iterable[RankView], agents: Iterable[AgentView] = ()) -> JobView:
    """Return the columns of `views`, one view a rank.

    Members in any view are kept. A group whose members are in no view is used, but
    which of its ranks do not report stays unknown.
    """
    views = list(views)
    nodes: dict[str, int] = {}
    members: dict[int, Sequence[int]] = {}
    rows = []
    for v in views:
        node = nodes.setdefault(v.node, len(nodes))
        rows.append(tuple(rank_row(v, node).values()))
        for group, ranks in v.members.items():
            members.setdefault(group, ranks)
    at = np.array([v.at for v in views])
    calls = stacked([v.calls for v in views], JOINED_CALL)
    calls["start"] -= at[calls["row"]]
    calls["end"] -= at[calls["row"]]
    return JobView(
        world=max((v.world for v in views), default=0),
        nodes=tuple(nodes),
        ranks=np.array(rows, RANK),
        groups=stacked([v.groups for v in views], JOINED_GROUP),
        calls=calls,
        members=members,
        agents=tuple(agents),
    )


def rank_row(view: RankView, node: int) -> dict[str, Any]:
    """Return the columns of `RANK` of one view; `node` is an index of the job's nodes."""
    values = (
        view.rank,
        node,
        view.pid,
        view.alive,
        NO_EXIT if view.exit_code is None else view.exit_code,
        view.process_state.encode(),
        -1 if view.answers is None else view.answers,
        view.at - view.heartbeat,
        view.at - view.moved,
        view.phase,
        view.step,
        view.steps_done,
        view.pending_group,
        view.pending_seq,
        view.at - view.pending_since,
    )
    return dict(zip(RANK.names or (), values, strict=True))


def stacked(tables: Sequence[Array], dtype: np.dtype[Any]) -> Array:
    """Return all tables as one of `dtype`, with the index of each one's table as ``row``."""
    sizes = [len(table) for table in tables]
    out = np.zeros(sum(sizes), dtype)
    if len(out):
        out["row"] = np.repeat(np.arange(len(tables)), sizes)
        whole = np.concatenate(tables)
        for name in whole.dtype.names or ():
            out[name] = whole[name]
    return out
