"""The forms of what agents and the daemon say to each other; `ckptd.monitor.sheet` has them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ckptd.monitor.collectives import COLLECTIVE
from ckptd.monitor.job import JOINED_CALL, JOINED_GROUP, RANK
from ckptd.monitor.stats import Array

__all__ = [
    "GAP",
    "SHEET_RANK",
    "STEP",
    "SUM",
    "TABLES",
    "VERSION",
    "AgentState",
    "Fencing",
    "Found",
    "GroupInfo",
    "Orders",
    "Probe",
    "ProbeResult",
    "Sheet",
    "SheetLimits",
    "Stack",
]

VERSION = 1

SHEET_RANK: np.dtype[Any] = np.dtype(
    [
        # The process id stands where it stood before the columns of a job had it.
        *[
            (name, "u1" if name == "alive" else RANK[name].str)
            for name in RANK.names or ()
            if name != "pid"
        ],
        ("world", "<i8"),  # ranks that it believes the job to have
        ("pid", RANK["pid"].str),
        ("generation", "<i8"),
        ("lived", "<f8"),  # age of the process, s; NaN is unknown
        ("recorder", "u1"),  # ckptd.monitor.ringlayout.RecorderState
        ("lost", "<i8"),  # calls that found no room in the ring's table of groups
        ("written", "<i8"),  # calls recorded by the process so far
    ]
)
"""One row for each rank: the columns of `ckptd.monitor.job.RANK`, and what only a node knows."""

GAP: np.dtype[Any] = np.dtype(
    [
        ("site", "<u8"),  # of the call after whose end the rank was by itself
        ("phase", "<u4"),
        ("op", "<u4"),
        ("seconds", "<f8"),
    ]
)
"""The longest time between the end of such a call and the same rank's next call."""

STEP: np.dtype[Any] = np.dtype(
    [
        ("row", "<i8"),
        ("step", "<i8"),
        ("phase", "<u4"),
        ("self_s", "<f8"),  # outside calls; see ckptd.monitor.selftime
        ("inside_s", "<f8"),  # in calls
        ("wall_s", "<f8"),
    ]
)
"""One row for each step that a rank has finished and that was not told before."""

SUM: np.dtype[Any] = np.dtype(
    [
        ("row", "<i8"),
        ("step", "<i8"),
        ("what", "<u4"),  # 0 checksum of replicas, 1 norm of a gradient
        ("set", "<u8"),  # ranks with the same number hold the same values
        ("value", "<u8"),  # the checksum, or the bits of a float64
    ]
)
"""One row for each checksum or norm that a rank took and that was not told before."""

TABLES: Mapping[str, np.dtype[Any]] = {
    "ranks": SHEET_RANK,
    "groups": JOINED_GROUP,
    "calls": JOINED_CALL,
    "gaps": GAP,
    "steps": STEP,
    "sums": SUM,
    "collectives": COLLECTIVE,
}
"""Tables of a sheet, by the name of their field."""


class AgentState(msgspec.Struct, frozen=True, kw_only=True):
    """How the agent of one node is.

    Attributes
    ----------
    address
        ``host:port`` where it answers link probes; empty if it does not.
    cpu_s
        CPU seconds that it has used.
    overruns
        Calls that were overwritten before it read them.
    rings
        Ring files that it reads.
    bad_rings
        Ring files that it cannot read.
    recorder_s
        Seconds that recording has cost its ranks: calls times what one costs, as measured there.
    age_s
        Seconds since it was heard of; set by forwarders, 0 from the agent itself.
    """

    address: str = ""
    cpu_s: float = 0.0
    overruns: int = 0
    rings: int = 0
    bad_rings: int = 0
    recorder_s: float = 0.0
    age_s: float = 0.0


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Name and members of a group.

    Attributes
    ----------
    name, kind
        As the program calls it (``dp``, ``tp``, ...); empty if unknown.
    first, stride, size
        Global ranks are ``first + i * stride``. With stride 0 they are in `listed`.
    listed
        Global ranks in order, 4 bytes each, little-endian.
    timeout_s
        After how long the backend itself gives a call of the group up, seconds; 0 is unknown.
    """

    name: str = ""
    kind: str = ""
    first: int = 0
    stride: int = 0
    size: int = 0
    listed: bytes = b""
    timeout_s: float = 0.0

    @staticmethod
    def of(ranks: Sequence[int], name: str = "", kind: str = "") -> GroupInfo:
        """Return the info of a group with these global ranks, in order."""
        size = len(ranks)
        stride = ranks[1] - ranks[0] if size > 1 else 1
        if size and stride and all(r == ranks[0] + i * stride for i, r in enumerate(ranks)):
            return GroupInfo(name=name, kind=kind, first=ranks[0], stride=stride, size=size)
        listed = np.array(ranks, "<u4").tobytes()
        return GroupInfo(name=name, kind=kind, size=size, listed=listed)

    def ranks(self) -> Sequence[int]:
        """Return the global ranks in order; empty if not told."""
        if self.stride:
            return range(self.first, self.first + self.size * self.stride, self.stride)
        return tuple(np.frombuffer(self.listed, "<u4").tolist())


class Sheet(msgspec.Struct, frozen=True, kw_only=True):
    """One node, or several by way of a forwarder, at a moment.

    Attributes
    ----------
    version
        Of this form.
    job
        Whose sheet it is.
    source
        Names one life of the sender: random, hexadecimal.
    number
        Rises with each sheet of the source: an older or equal one is not taken.
    nodes, agents
        Names of nodes, and how their agents are, in the same order.
    ranks, groups, calls, gaps, steps, sums, collectives
        Tables as bytes; see `table` and `TABLES`. Rows of groups and calls come in the order of
        their ranks' rows; a rank's calls in the order in which it entered them.
    after
        Number of the sheet of this source after which the increments in `collectives` begin: the
        last that is known to have been taken.
    members
        Groups by their hash; told once by each source, and again when the orders say so.
    texts
        What hashes of operations, element types and call sites stand for; told likewise.
    """

    version: int = VERSION
    job: str
    source: str
    number: int
    nodes: tuple[str, ...] = ()
    agents: tuple[AgentState, ...] = ()
    ranks: bytes = b""
    groups: bytes = b""
    calls: bytes = b""
    gaps: bytes = b""
    steps: bytes = b""
    sums: bytes = b""
    collectives: bytes = b""
    after: int = 0
    members: dict[int, GroupInfo] = msgspec.field(default_factory=dict)
    texts: dict[int, str] = msgspec.field(default_factory=dict)

    def table(self, name: str) -> Array:
        """Return the rows of one table of `TABLES`, read-only."""
        raw: bytes = getattr(self, name)
        return np.frombuffer(raw, TABLES[name])


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """One link to measure.

    Attributes
    ----------
    nonce
        Says which order a result belongs to.
    from_node, to_node
        Names of the nodes.
    address
        ``host:port`` of the other node's responder.
    size
        Bytes that are sent and come back.
    """

    nonce: int
    from_node: str
    to_node: str
    address: str
    size: int = 1 << 17


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What the daemon answers to a sheet.

    Attributes
    ----------
    period_s
        How long to wait before the next sheet, in seconds.
    tell
        Whether members and texts are to be told again.
    stacks
        Ranks whose stacks are wanted.
    calls
        Ranks of which the next sheet is to hold the last 512 calls.
    probes
        Links to measure, one after another.
    """

    period_s: float = 0.25
    tell: bool = False
    stacks: tuple[int, ...] = ()
    calls: tuple[int, ...] = ()
    probes: tuple[Probe, ...] = ()

    def of_part(self, nodes: Sequence[str], ranks: Sequence[int]) -> Orders:
        """Return what of these orders concerns the nodes and ranks named: for forwarders."""
        here, mine = set(nodes), set(ranks)
        return msgspec.structs.replace(
            self,
            stacks=tuple(r for r in self.stacks if r in mine),
            calls=tuple(r for r in self.calls if r in mine),
            probes=tuple(p for p in self.probes if p.from_node in here),
        )


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    """Stacks of one rank's threads, as text.

    Attributes
    ----------
    text
        The stacks, or why there are none.
    how
        What took them: ``py-spy``, ``kernel``, or empty if they could not be taken.
    taken_s
        Seconds that it took.
    """

    text: str
    how: str = ""
    taken_s: float = 0.0


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one probe showed.

    Attributes
    ----------
    nonce, src, dst
        Order, and names of both nodes.
    seconds
        The least of its repetitions; infinite if none came back.
    error
        Why none came back.
    """

    nonce: int
    src: str
    dst: str
    seconds: float
    error: str = ""


class Fencing(msgspec.Struct, frozen=True, kw_only=True):
    """What a controller does to the ranks: it ends those of all generations before one.

    Attributes
    ----------
    below
        Ranks of a generation from 1 to before this one end on purpose.
    reason
        Why, in a few words.
    """

    below: int
    reason: str = ""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What was found on orders.

    Attributes
    ----------
    version, job, source, number
        As of a sheet; numbers of sheets and findings of a source are counted apart.
    stacks
        By global rank.
    probes
        Results.
    logs
        Last lines of a rank's output, by global rank.
    """

    version: int = VERSION
    job: str
    source: str
    number: int
    stacks: dict[int, Stack] = msgspec.field(default_factory=dict)
    probes: tuple[ProbeResult, ...] = ()
    logs: dict[int, str] = msgspec.field(default_factory=dict)


class SheetLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a message may hold.

    Attributes
    ----------
    packed, unpacked
        Bytes as sent, and after decompression.
    nodes, ranks, world
        Of one sheet; of the job.
    rows, collectives
        Of each other table; of that of collectives.
    members, texts
        Entries; `listed` bounds the members of all groups together.
    name, text, stack
        Characters of a name, of a text, of a stack.
    """

    packed: int = 32 << 20
    unpacked: int = 128 << 20
    nodes: int = 1 << 14
    ranks: int = 1 << 17
    world: int = 1 << 24
    rows: int = 1 << 22
    collectives: int = 1 << 13
    members: int = 1 << 18
    listed: int = 1 << 22
    texts: int = 1 << 16
    name: int = 128
    text: int = 256
    stack: int = 1 << 18
