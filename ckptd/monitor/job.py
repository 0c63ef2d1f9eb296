"""All ranks of a job at a moment, as columns: what the diagnosis works on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from ckptd.monitor.stats import Array
from ckptd.monitor.view import CALL, GROUP, RankView

__all__ = [
    "JOINED_CALL",
    "JOINED_GROUP",
    "NO_EXIT",
    "RANK",
    "AgentView",
    "JobView",
    "join",
    "no_job",
]

NO_EXIT = -(1 << 31)
"""Exit code of a process that runs, or whose end nobody saw."""

RANK: np.dtype[Any] = np.dtype(
    [
        ("rank", "<i8"),
        ("node", "<i4"),  # index in Job.nodes
        ("pid", "<i8"),  # in its own space of process ids; 0 is unknown
        ("alive", "?"),
        ("exit_code", "<i4"),  # NO_EXIT if none
        ("state", "S1"),
        ("answers", "i1"),  # 1 yes, 0 no, -1 not asked
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
    """What is known of a node's agent.

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
        Global ranks of each group, where told.
    agents
        Agents of which something is to be said.
    texts, group_names
        What hashes in calls, and groups, stand for: for people, nothing is decided by them.
    timeouts
        After how many seconds the backend gives a call of a group up, where told.
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
        """Return what a hash of a call stands for, or the hash in hexadecimal."""
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
        """Return the place in `group_ids` of each group; -1 for one that nobody reports."""
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

    Members told by any view are kept. A group of which no view tells its members is used, but
    which of its ranks do not report stays unknown.
    """
    views = list(views)
    nodes: dict[str, int] = {}
    members: dict[int, Sequence[int]] = {}
    rows = []
    for v in views:
        node = nodes.setdefault(v.node, len(nodes))
        rows.append(_row(v, node))
        for group, ranks in v.members.items():
            members.setdefault(group, ranks)
    at = np.array([v.at for v in views])
    calls = _joined([v.calls for v in views], JOINED_CALL)
    calls["start"] -= at[calls["row"]]
    calls["end"] -= at[calls["row"]]
    return JobView(
        world=max((v.world for v in views), default=0),
        nodes=tuple(nodes),
        ranks=np.array(rows, RANK),
        groups=_joined([v.groups for v in views], JOINED_GROUP),
        calls=calls,
        members=members,
        agents=tuple(agents),
    )


def _row(v: RankView, node: int) -> tuple[Any, ...]:
    return (
        v.rank,
        node,
        v.pid,
        v.alive,
        NO_EXIT if v.exit_code is None else v.exit_code,
        v.process_state.encode(),
        -1 if v.answers is None else v.answers,
        v.at - v.heartbeat,
        v.at - v.moved,
        v.phase,
        v.step,
        v.steps_done,
        v.pending_group,
        v.pending_seq,
        v.at - v.pending_since,
    )


def _joined(tables: list[Array], dtype: np.dtype[Any]) -> Array:
    sizes = [len(t) for t in tables]
    out = np.zeros(sum(sizes), dtype)
    if tables:
        out["row"] = np.repeat(np.arange(len(tables)), sizes)
        whole = np.concatenate(tables)
        for name in whole.dtype.names or ():
            out[name] = whole[name]
    return out
