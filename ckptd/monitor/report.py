"""Messages of agents and daemon: `NodeReport`, evidence, orders; columns, bounds, size limits.

A `NodeReport` is what the ranks of one node show at a moment (of several nodes, from a forwarder).
It holds ages in place of times, so that clocks never cross nodes. Each of its tables is declared
once, with the bounds of its columns: `from_views` clips to them, `unpack_report` refuses what lies
outside, since all of a report is untrusted where it arrives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import zstandard

from ckptd.decoding import Decoder, msgpack_decoder
from ckptd.errors import CorruptError
from ckptd.monitor.collectives import COLLECTIVE, SIZES, WORD
from ckptd.monitor.job import (
    JOINED_CALL,
    JOINED_GROUP,
    RANK,
    AgentView,
    JobView,
    Phase,
    RankView,
    rank_row,
    stacked,
)
from ckptd.monitor.ring import RecorderState
from ckptd.monitor.stats import Array

VERSION = 1

REPORT_RANK: np.dtype[Any] = np.dtype(
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
        ("recorder", "u1"),  # ckptd.monitor.ring.RecorderState
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
        ("self_s", "<f8"),  # outside calls; see ckptd.monitor.rules.slow
        ("inside_s", "<f8"),  # in calls
        ("wall_s", "<f8"),
    ]
)
"""One row for each step that a rank has finished, sent once."""

SUM: np.dtype[Any] = np.dtype(
    [
        ("row", "<i8"),
        ("step", "<i8"),
        ("what", "<u4"),  # 0 checksum of replicas, 1 norm of a gradient, 2 call that is not finite
        ("set", "<u8"),  # ranks with the same number hold the same values
        ("value", "<u8"),  # the checksum, or the bits of a float64
    ]
)
"""One row for each checksum or norm that a rank took, sent once."""

USAGE: np.dtype[Any] = np.dtype(
    [
        ("row", "<i8"),
        ("cpu", "<f8"),  # cores, since the row before; NaN is unknown
        ("memory", "<i8"),  # resident bytes
        ("threads", "<i8"),
    ]
)
"""One row for each rank now and then: what its process uses of the machine."""

TABLES: Mapping[str, np.dtype[Any]] = {
    "ranks": REPORT_RANK,
    "groups": JOINED_GROUP,
    "calls": JOINED_CALL,
    "gaps": GAP,
    "steps": STEP,
    "sums": SUM,
    "collectives": COLLECTIVE,
    "usage": USAGE,
}
"""Tables of a report, by the name of their field."""

_COUNT = 1 << 62
_LONGEST_S = 1e9
"""Ages above 30 years are nonsense."""
_PHASES = (0, max(Phase))

BOUNDS: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "ranks": {
        "alive": (0, 1),
        "answers": (-1, 1),
        "phase": _PHASES,
        "step": (-1, _COUNT),
        "steps_done": (0, _COUNT),
        "pending_seq": (0, _COUNT),
        "pid": (0, 1 << 32),
        "generation": (0, 1 << 32),
        "recorder": (0, max(RecorderState)),
        "lost": (0, _COUNT),
        "written": (0, _COUNT),
    },
    "groups": {"entered": (0, _COUNT), "completed": (0, _COUNT)},
    "calls": {
        "seq": (0, _COUNT),
        "bytes": (-1, _COUNT),
        "root": (-1, 1 << 30),
        "step": (-1, _COUNT),
        "phase": _PHASES,
    },
    "gaps": {"phase": _PHASES},
    "steps": {"step": (0, _COUNT), "phase": _PHASES},
    "sums": {"step": (-1, _COUNT), "what": (0, 2)},
    "collectives": {"size": (0, len(SIZES))},
    "usage": {"memory": (0, _COUNT), "threads": (0, _COUNT)},
}
"""Least and largest value of columns of integers."""

_AGES: Mapping[str, Mapping[str, bool]] = {
    "ranks": {"idle": True, "heartbeat": False, "pending_age": False, "lived": False},
    "gaps": {"seconds": True},
    "steps": {"self_s": False, "inside_s": False, "wall_s": False},
    "usage": {"cpu": False},
}
"""Columns of ages, and whether each row must have one (NaN is unknown)."""


_MOST_RANKS = 1 << 17
_MOST_ROWS = 1 << 22
_MOST_WORLD = 1 << 24
_Count = Annotated[int, msgspec.Meta(ge=0, lt=_COUNT)]
_Seconds = Annotated[float, msgspec.Meta(ge=0.0, lt=_LONGEST_S)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=_MOST_WORLD)]
_Hash = Annotated[int, msgspec.Meta(ge=0)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Word = Annotated[str, msgspec.Meta(max_length=128)]
_Text = Annotated[str, msgspec.Meta(max_length=256)]
_Lines = Annotated[str, msgspec.Meta(max_length=1 << 18)]
_Ranks = Annotated[tuple[_Rank, ...], msgspec.Meta(max_length=_MOST_RANKS)]


class Sign(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a node's hardware or kernel shows; never a verdict by itself.

    Attributes
    ----------
    what
        In a few words, the same as on other nodes: ``link down``.
    text
        The line that people read.
    kinds
        Classes of verdicts that it speaks for.
    weight
        Share of the doubt in such a verdict that it takes away.
    source
        Name of the source; filled in by the agent.
    age_s
        Seconds since it was last seen; filled in by the agent.
    """

    what: _Word
    text: _Text
    kinds: Annotated[tuple[_Word, ...], msgspec.Meta(max_length=16)]
    weight: Annotated[float, msgspec.Meta(ge=0.0, le=0.9)] = 0.5
    source: _Word = ""
    age_s: _Seconds = 0.0


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
        Seconds since its last report; set by forwarders, 0 from the agent itself.
    signs
        What its hardware and kernel showed lately.
    """

    address: _Word = ""
    cpu_s: _Seconds = 0.0
    overruns: _Count = 0
    rings: _Count = 0
    bad_rings: _Count = 0
    recorder_s: Annotated[float, msgspec.Meta(ge=0.0, lt=float(_COUNT))] = 0.0
    age_s: _Seconds = 0.0
    signs: Annotated[tuple[Sign, ...], msgspec.Meta(max_length=64)] = ()


_SHOWN_RANKS = 8


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

    name: _Word = ""
    kind: _Word = ""
    first: int = 0
    stride: int = 0
    size: _Count = 0
    listed: bytes = b""
    timeout_s: Annotated[float, msgspec.Meta(ge=0.0, le=_LONGEST_S)] = 0.0

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
        """Return the global ranks in order; empty if unknown."""
        if self.stride:
            return range(self.first, self.first + self.size * self.stride, self.stride)
        return tuple(np.frombuffer(self.listed, "<u4").tolist())

    def told(self) -> tuple[str, str]:
        """Return kind and name as people know them; PyTorch has words where none are."""
        if self.kind == "default_pg":
            return "", "default group"
        if self.kind != "undefined":
            return self.kind, self.name
        ranks = self.ranks()
        if isinstance(ranks, range) and ranks.step == 1 and len(ranks) > 2:
            shown = f"{ranks[0]}-{ranks[-1]}"
        else:
            shown = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
            if len(ranks) > _SHOWN_RANKS:
                shown += f", ..., {ranks[-1]}"
        # The number stays: a program may have several groups of the same ranks.
        return "", f"group {self.name}" + (f" of ranks {shown}" if shown else "")


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """One node, or several by way of a forwarder, at a moment.

    Attributes
    ----------
    version
        Of this form.
    job
        Name of the job.
    source
        Names one life of the sender: random, hexadecimal.
    number
        Rises with each report of the source: an older or equal one is not taken.
    nodes, agents
        Names of nodes, and how their agents are, in the same order.
    ranks, groups, calls, gaps, steps, sums, collectives, usage
        Tables as bytes; see `table` and `TABLES`. Rows of groups and calls come in the order of
        their ranks' rows; a rank's calls in the order in which it entered them.
    after
        Number of the report of this source after which the increments in `collectives` begin: the
        last that is known to have been taken.
    members
        Groups by their hash; sent once by each source, and again when orders ask for it.
    texts
        What hashes of operations, element types and call sites represent; sent likewise.
    """

    version: int = VERSION
    job: _Name
    source: _Name
    number: _Count
    nodes: tuple[_Name, ...] = ()
    agents: tuple[AgentState, ...] = ()
    ranks: bytes = b""
    groups: bytes = b""
    calls: bytes = b""
    gaps: bytes = b""
    steps: bytes = b""
    sums: bytes = b""
    collectives: bytes = b""
    usage: bytes = b""
    after: _Count = 0
    members: dict[_Hash, GroupInfo] = msgspec.field(default_factory=dict)
    texts: dict[_Hash, _Text] = msgspec.field(default_factory=dict)

    def table(self, name: str) -> Array:
        """Return the rows of one table of `TABLES`, read-only."""
        raw: bytes = getattr(self, name)
        return np.frombuffer(raw, TABLES[name])


class LinkProbe(msgspec.Struct, frozen=True, kw_only=True):
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

    nonce: _Count
    from_node: _Name
    to_node: _Name
    address: _Name
    size: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = 1 << 17


class AgentOrders(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon's answer to a report.

    Attributes
    ----------
    period_s
        How long to wait before the next report, in seconds.
    tell
        Whether members and texts are to be sent again.
    stacks
        Ranks whose stacks are wanted.
    calls
        Ranks of which the next report is to hold the last 512 calls.
    probes
        Links to measure, one after another.
    """

    period_s: Annotated[float, msgspec.Meta(gt=0.0, lt=3600.0)] = 0.25
    tell: bool = False
    stacks: _Ranks = ()
    calls: _Ranks = ()
    probes: Annotated[tuple[LinkProbe, ...], msgspec.Meta(max_length=_MOST_ROWS)] = ()

    def of_part(self, nodes: Sequence[str], ranks: Sequence[int]) -> AgentOrders:
        """Return the part of these orders for some nodes and ranks: for forwarders."""
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

    text: _Lines
    how: _Word = ""
    taken_s: _Seconds = 0.0


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one probe.

    Attributes
    ----------
    nonce, src, dst
        Order, and names of both nodes.
    seconds
        The least of its repetitions; infinite if none came back.
    error
        Why none came back.
    shows
        ``link``: `seconds` are of the link. ``node``: the node answers, and no probe went to it, as
        it is busy, did not greet, or nothing listens there; or one did, and an end had no CPU for
        most of the time. ``nothing``: no probe could be sent.
    """

    nonce: _Count
    src: _Name
    dst: _Name
    seconds: Annotated[float, msgspec.Meta(gt=0.0)]
    error: _Text = ""
    shows: Literal["link", "node", "nothing"] = "link"


class Fencing(msgspec.Struct, frozen=True, kw_only=True):
    """Order of a controller that ends the ranks of all generations before one.

    Attributes
    ----------
    below
        Ranks of a generation from 1 to before this one end on purpose.
    reason
        Why, in a few words.
    """

    below: _Count
    reason: Annotated[str, msgspec.Meta(max_length=2000)] = ""


class EvidenceReport(msgspec.Struct, frozen=True, kw_only=True):
    """Stacks, logs and probes that were ordered.

    Attributes
    ----------
    version, job, source, number
        As of a report; numbers of reports and findings of a source are counted apart.
    stacks
        By global rank.
    probes
        Results.
    logs
        Last lines of a rank's output, by global rank.
    """

    version: int = VERSION
    job: _Name
    source: _Name
    number: _Count
    stacks: Annotated[dict[_Rank, Stack], msgspec.Meta(max_length=_MOST_RANKS)] = msgspec.field(
        default_factory=dict
    )
    probes: Annotated[tuple[ProbeResult, ...], msgspec.Meta(max_length=_MOST_ROWS)] = ()
    logs: Annotated[dict[_Rank, _Lines], msgspec.Meta(max_length=_MOST_RANKS)] = msgspec.field(
        default_factory=dict
    )


class ReportLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a report may hold, beside what its fields declare.

    Attributes
    ----------
    packed, unpacked
        Bytes as sent, and after decompression.
    nodes, ranks, world
        Of one report; of the job.
    rows, collectives
        Of each other table; of that of collectives.
    members, texts
        Entries; `listed` bounds the members of all groups together.
    """

    packed: int = 32 << 20
    unpacked: int = 128 << 20
    nodes: int = 1 << 14
    ranks: int = _MOST_RANKS
    world: int = _MOST_WORLD
    rows: int = _MOST_ROWS
    collectives: int = 1 << 13
    members: int = 1 << 18
    listed: int = 1 << 22
    texts: int = 1 << 16


STATES = frozenset([b"", *(bytes([letter]) for letter in b"RSDTtZXxKWPI")])
"""Letters of the kernel for the state of a process."""


def bad(wanted: str, found: object) -> CorruptError:
    """Return the error of a message that is not what it should be."""
    return CorruptError(
        "not a valid message between agent and daemon", wanted=wanted, found=str(found)[:200]
    )


def check_report(report: NodeReport, limits: ReportLimits) -> None:
    """Raise `CorruptError`, unless all of `report` is usable."""
    _check_version(report)
    nodes, agents = report.nodes, report.agents
    _need(len(nodes) <= limits.nodes, f"at most {limits.nodes} nodes", len(nodes))
    _need(len(agents) == len(nodes), "an agent for each node", len(agents))
    _need(len(set(nodes)) == len(nodes), "different names of nodes", "the same")
    for name, dtype in TABLES.items():
        size, most = len(getattr(report, name)), getattr(limits, name, limits.rows)
        _need(size % dtype.itemsize == 0, f"whole rows of {name}", size)
        _need(size <= most * dtype.itemsize, f"at most {most} rows of {name}", size)
        rows = report.table(name)
        for column, (low, high) in BOUNDS[name].items():
            _within(rows[column], low, high, f"{column} of {name}")
        for column, known in _AGES.get(name, {}).items():
            _ages(rows[column], f"{column} of {name}", known=known)
    ranks = report.table("ranks")
    _check_ranks(ranks, len(nodes), limits)
    for name, dtype in TABLES.items():
        if "row" not in (dtype.names or ()):
            continue
        rows = report.table(name)["row"]
        _within(rows, 0, len(ranks) - 1, f"row of {name}")
        if name in ("groups", "calls"):
            _need(bool((rows[1:] >= rows[:-1]).all()), f"{name} in the order of ranks", "not")
    _check_calls(report)
    _check_collectives(report)
    _check_members(report, limits)


def _check_version(message: NodeReport | EvidenceReport) -> None:
    _need(message.version == VERSION, f"version {VERSION}", message.version)


def _check_ranks(ranks: Array, nodes: int, limits: ReportLimits) -> None:
    _within(ranks["world"], 1, limits.world, "world")
    _need(bool((ranks["rank"] >= 0).all()), "ranks from 0", "less")
    _need(bool((ranks["rank"] < ranks["world"]).all()), "ranks below the world", "more")
    _within(ranks["node"], 0, nodes - 1, "node")
    _need(
        bool(np.isin(ranks["state"], list(STATES)).all()), "states of processes", "another letter"
    )
    inside = ranks["pending_group"] != 0
    _need(not np.isnan(ranks["pending_age"][inside]).any(), "an age of each pending call", "NaN")


def _check_calls(report: NodeReport) -> None:
    groups, calls = report.table("groups"), report.table("calls")
    _need(bool((groups["group"] != 0).all()), "groups other than 0", "0")
    _ages(-calls["start"], "start of a call", known=True)
    _ages(-calls["end"], "end of a call")
    _need(not (calls["end"] < calls["start"]).any(), "calls that end after they start", "before")


def _check_collectives(report: NodeReport) -> None:
    rows = report.table("collectives")
    _need(report.after < max(report.number, 1), "the number of an earlier report", report.after)
    _need(bool((rows["op"] != b"").all()), "an operation", "none")
    for text in {*rows["op"].tolist(), *rows["kind"].tolist()}:
        _need(WORD.fullmatch(text) is not None, "the word for a label", repr(text))
    values = rows["values"]
    _need(bool(((values >= 0) & (values < _COUNT)).all()), "increments", "negative or endless")


def _check_members(report: NodeReport, limits: ReportLimits) -> None:
    _need(len(report.members) <= limits.members, f"at most {limits.members} groups", "more")
    listed = 0
    for ident, info in report.members.items():
        _need(ident != 0, "the hash of a group", ident)
        _need(info.size <= limits.world, "a size", info.size)
        ends = (info.first, info.first + max(info.size - 1, 0) * info.stride)
        _need(min(ends) >= 0 and max(ends) < limits.world, "global ranks", ends)
        _need(len(info.listed) in (0, 4 * info.size), "a rank for each member", len(info.listed))
        _need(not (info.stride and info.listed), "ranks told in one way", "two")
        listed += len(info.listed) // 4
    _need(listed <= limits.listed, f"at most {limits.listed} listed ranks", listed)
    _need(len(report.texts) <= limits.texts, f"at most {limits.texts} texts", len(report.texts))


# --- one thing ----------------------------------------------------------------------------------


def _need(true: bool, wanted: str, found: object) -> None:
    if not true:
        raise bad(wanted, found)


def _within(values: Array, low: int, high: int, what: str) -> None:
    if len(values):
        least, most = int(values.min()), int(values.max())
        if least < low or most > high:
            raise bad(f"{what} from {low} to {high}", f"{least} to {most}")


def _ages(values: Array, what: str, *, known: bool = False) -> None:
    """Check ages: finite and not negative; NaN where an age need not be `known`."""
    if not known:
        values = values[~np.isnan(values)]
    if not bool(((values >= 0) & (values < _LONGEST_S)).all()):
        raise bad(f"ages of {what}", "negative, endless or not a number")


Message = TypeVar("Message", NodeReport, AgentOrders, EvidenceReport, Fencing)

_PLAIN, _PACKED = b"\x00", b"\x01"
_PACK_ABOVE = 4096
_RATIO = 512
_encoder = msgspec.msgpack.Encoder()
_reports = msgpack_decoder(NodeReport)
_orders = msgpack_decoder(AgentOrders)
_found = msgpack_decoder(EvidenceReport)
_fencing = msgpack_decoder(Fencing)


def pack(message: NodeReport | AgentOrders | EvidenceReport | Fencing) -> bytes:
    """Return the bytes of a message: msgpack, with zstd where that is worth it."""
    raw = _encoder.encode(message)
    if len(raw) <= _PACK_ABOVE:
        return _PLAIN + raw
    return _PACKED + zstandard.ZstdCompressor(level=1).compress(raw)


def unpack_report(data: bytes, limits: ReportLimits | None = None) -> NodeReport:
    """Return the report that `data` holds, with everything checked.

    Raises
    ------
    CorruptError
        These bytes are not a report, or it claims more than `limits`.
    """
    limits = limits or ReportLimits()
    report = _decoded(data, _reports, limits)
    check_report(report, limits)
    return report


def unpack_evidence(data: bytes, limits: ReportLimits | None = None) -> EvidenceReport:
    """Return the findings that `data` holds; errors as of `unpack_report`."""
    found = _decoded(data, _found, limits or ReportLimits())
    _check_version(found)
    return found


def unpack_orders(data: bytes) -> AgentOrders:
    """Return the orders that `data` holds; errors as of `unpack_report`."""
    return _decoded(data, _orders, ReportLimits())


def unpack_fencing(data: bytes, limits: ReportLimits | None = None) -> Fencing:
    """Return the fencing that `data` holds; errors as of `unpack_report`."""
    return _decoded(data, _fencing, limits or ReportLimits())


def _decoded(data: bytes, decoder: Decoder[Message], limits: ReportLimits) -> Message:
    if not 0 < len(data) <= limits.packed:
        raise bad(f"1 to {limits.packed} bytes", f"{len(data)} bytes")
    try:
        return decoder.decode(_plain(data, limits))
    except msgspec.MsgspecError as error:
        raise bad("a message of this version of ckptd", str(error)) from error


def _plain(data: bytes, limits: ReportLimits) -> bytes | memoryview:
    head, body = data[:1], memoryview(data)[1:]
    if head == _PLAIN:
        return body
    if head != _PACKED:
        raise bad("a message of this version of ckptd", f"first byte {head.hex()}")
    most = min(limits.unpacked, (1 << 20) + _RATIO * len(body))
    try:
        # Without a stated size the decompressor would decide itself how much it allocates.
        size = zstandard.frame_content_size(body)
        if not 0 < size <= most:
            raise bad(f"1 to {most} bytes, stated", str(size))
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=size)
    except zstandard.ZstdError as error:
        raise bad("a zstd frame", str(error)) from error


# --- reports from views, and a job from reports ---------------------------------------------------


_CLIPPED_S = 9e8


class RankNote(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a rank beside its view; see `ckptd.monitor.report.REPORT_RANK`."""

    generation: int = 0
    lived: float = float("nan")
    recorder: RecorderState = RecorderState.CALLS
    lost: int = 0
    written: int = 0


def from_views(
    views: Sequence[RankView],
    *,
    job: str,
    source: str,
    number: int,
    notes: Mapping[int, RankNote] | None = None,
    agents: Mapping[str, AgentState] | None = None,
    members: Mapping[int, GroupInfo] | None = None,
    texts: Mapping[int, str] | None = None,
    after: int = 0,
    **tables: Array,
) -> NodeReport:
    """Return the report of `views`, one view a rank.

    What a damaged ring makes a view say is brought within bounds, so that the report as a whole
    can be taken.

    Parameters
    ----------
    views
        Of the ranks of a node, or of several.
    job, source, number
        Head of the report.
    notes
        By rank.
    agents
        By name of node. A node without ranks is part of the report if it is here.
    members, texts
        To be sent this time; members default to those of the views.
    after
        As of `NodeReport`.
    **tables
        Rows of ``gaps``, ``steps``, ``sums`` and ``collectives``.
    """
    agents, notes = agents or {}, notes or {}
    nodes = tuple(dict.fromkeys([*(v.node for v in views), *agents]))
    place = {node: i for i, node in enumerate(nodes)}
    plain = RankNote()
    ranks = [_row(v, place[v.node], notes.get(v.rank, plain)) for v in views]
    if members is None:
        told = {g: r for v in views for g, r in v.members.items()}
        members = {g: GroupInfo.of(r) for g, r in told.items()}
    report = NodeReport(
        job=job,
        source=source,
        number=number,
        nodes=nodes,
        agents=tuple(agents.get(node, AgentState()) for node in nodes),
        ranks=np.array(ranks, REPORT_RANK).tobytes(),
        groups=_groups(views).tobytes(),
        calls=_calls(views).tobytes(),
        members=dict(members),
        texts=dict(texts or {}),
        after=after,
    )
    packed = {n: t.astype(TABLES[n], copy=False).tobytes() for n, t in tables.items()}
    return msgspec.structs.replace(report, **packed)


def _row(v: RankView, node: int, note: RankNote) -> tuple[object, ...]:
    row = rank_row(v, node)
    row["state"] = row["state"] if row["state"] in STATES else b""
    row["heartbeat"] = _age(row["heartbeat"])
    row["idle"] = np.nan_to_num(_age(row["idle"]), nan=0.0)
    pending = np.nan_to_num(_age(row["pending_age"]))
    row["pending_age"] = pending if v.pending_group else np.nan
    row |= msgspec.structs.asdict(note) | {"world": v.world, "lived": _age(note.lived)}
    return tuple(row[name] for name in REPORT_RANK.names or ())


def _age(seconds: float) -> float:
    # A stamp may be newer than the moment at which the view was begun.
    return min(max(seconds, 0.0), _CLIPPED_S) if seconds == seconds else seconds


def _clipped(table: Array, name: str) -> Array:
    """Bring the columns of a table within their bounds."""
    for column, (low, high) in BOUNDS[name].items():
        table[column] = np.clip(table[column], low, high)
    return table


def _groups(views: Sequence[RankView]) -> Array:
    out = stacked([v.groups for v in views], JOINED_GROUP)
    return _clipped(out[out["group"] != 0], "groups")


def _calls(views: Sequence[RankView]) -> Array:
    out = _clipped(stacked([v.calls for v in views], JOINED_CALL), "calls")
    at = np.array([v.at for v in views])[out["row"]]
    out["start"] = -np.clip(at - out["start"], 0, _CLIPPED_S)
    out["end"] = np.maximum(-np.clip(at - out["end"], 0, _CLIPPED_S), out["start"])
    return out


# --- many into one ------------------------------------------------------------------------------


def merge(
    reports: Sequence[NodeReport],
    ages: Sequence[float],
    *,
    job: str,
    source: str,
    number: int,
    members: Mapping[int, GroupInfo] | None = None,
    texts: Mapping[int, str] | None = None,
    collectives: Array | None = None,
    after: int = 0,
) -> NodeReport:
    """Return one report with everything of `reports`: what a forwarder passes on.

    Parameters
    ----------
    reports
        The newest of each source. Gaps, steps and sums of those that were passed on before must
        have been taken out.
    ages
        Seconds since each arrived; added to the age of its agents.
    job, source, number
        Head of the report.
    members, texts
        To be sent this time; those of the reports if left out.
    collectives, after
        What all reports so far add up to, as of `ckptd.monitor.collectives.Outbox`: increments of
        several sources, which begin at different moments, are not added here.
    """
    nodes: dict[str, AgentState] = {}
    for report, age in zip(reports, ages, strict=True):
        for node, agent in zip(report.nodes, report.agents, strict=True):
            nodes[node] = msgspec.structs.replace(agent, age_s=agent.age_s + age)
    names = tuple(nodes)
    if members is None:
        members = {g: info for report in reports for g, info in report.members.items()}
    if texts is None:
        texts = {h: text for report in reports for h, text in report.texts.items()}
    report = NodeReport(
        job=job,
        source=source,
        number=number,
        nodes=names,
        agents=tuple(nodes.values()),
        members=dict(members),
        texts=dict(texts),
        after=after,
    )
    stacked = (name for name in TABLES if name != "collectives")
    tables = {name: _stacked(reports, name, names).tobytes() for name in stacked}
    tables["collectives"] = b"" if collectives is None else collectives.tobytes()
    return msgspec.structs.replace(report, **tables)


def _stacked(reports: Sequence[NodeReport], name: str, nodes: Sequence[str]) -> Array:
    """Return all rows of one table, with rows and nodes numbered again.

    Bytes are put together, and not tables: numpy copies tables column by column.
    """
    out = np.frombuffer(b"".join([getattr(s, name) for s in reports]), TABLES[name]).copy()
    counts = [len(getattr(s, name)) // TABLES[name].itemsize for s in reports]
    if name == "ranks":
        place = {node: i for i, node in enumerate(nodes)}
        offset = np.cumsum([0, *(len(s.nodes) for s in reports)])[:-1]
        table = np.array([place[node] for s in reports for node in s.nodes], np.int32)
        if len(out):
            out["node"] = table[out["node"] + np.repeat(offset, counts)]
    elif "row" in (out.dtype.names or ()):
        ranks = [len(s.ranks) // REPORT_RANK.itemsize for s in reports]
        out["row"] += np.repeat(np.cumsum([0, *ranks])[:-1], counts)
    return out


def job_of(
    reports: Sequence[NodeReport],
    members: Mapping[int, Sequence[int]],
    agents: Sequence[AgentView] = (),
) -> JobView:
    """Return the columns of the job that `reports` show; see `gathered`."""
    return gathered(reports, members, agents)[0]


def gathered(
    reports: Sequence[NodeReport],
    members: Mapping[int, Sequence[int]],
    agents: Sequence[AgentView] = (),
    silent: Collection[str] = (),
    fenced: int = 0,
) -> tuple[JobView, Array]:
    """Return the columns of the job that `reports` show, a row a rank, and its `REPORT_RANK` rows.

    Of a rank in several reports, the process that runs counts, then the newer generation,
    then the younger process. Dead processes of earlier generations are left out.

    Ages are those of the reports' moments: what a rank did since its report is not known, and
    ageing it with the report would make a pause of an agent a hang of its ranks.

    Parameters
    ----------
    reports
        The newest of each source.
    members
        Global ranks of groups, where known.
    agents
        Agents of which something is to be said.
    silent
        Nodes whose rows do not count: their forwarder has had no report of them for long.
    fenced
        Ranks of a generation from 1 to before this one do not count: they end on purpose.
    """
    nodes = tuple(dict.fromkeys(node for s in reports for node in s.nodes))
    ranks = _stacked(reports, "ranks", nodes)
    groups, calls = _stacked(reports, "groups", nodes), _stacked(reports, "calls", nodes)
    kept = _living(ranks) & ~ended_on_purpose(ranks, fenced)
    if silent:
        kept &= ~np.isin(ranks["node"], [i for i, node in enumerate(nodes) if node in silent])
    if not kept.all():
        ranks, groups, calls = ranks[kept], _of(groups, kept), _of(calls, kept)
    columns = np.zeros(len(ranks), RANK)
    for name in RANK.names or ():
        columns[name] = ranks[name]
    world = int(ranks["world"].max()) if len(ranks) else 0
    return JobView(world, nodes, columns, groups, calls, members, tuple(agents)), ranks


def ended_on_purpose(ranks: Array, fenced: int) -> Array:
    """Return which rows are of a life that a controller ends; one without a number is none."""
    generation = ranks["generation"]
    return (generation > 0) & (generation < fenced)


def selected(job: JobView, kept: Array) -> JobView:
    """Return `job` with those rows of ranks only that `kept` says."""
    groups, calls = _of(job.groups, kept), _of(job.calls, kept)
    return replace(job, ranks=job.ranks[kept], groups=groups, calls=calls)


def _living(ranks: Array) -> Array:
    """Return which rows represent their rank."""
    newest = int(ranks["generation"].max()) if len(ranks) else 0
    kept: Array = (ranks["alive"] != 0) | (ranks["generation"] == newest)
    if len(np.unique(ranks["rank"])) < len(ranks):
        order = np.lexsort(
            (-ranks["lived"], ranks["generation"], ranks["alive"], kept, ranks["rank"])
        )
        last = np.append(ranks["rank"][order][1:] != ranks["rank"][order][:-1], True)
        chosen = np.zeros(len(ranks), bool)
        chosen[order[last]] = True
        kept &= chosen
    return kept


def _of(table: Array, kept: Array) -> Array:
    number = np.cumsum(kept) - 1
    out: Array = table[kept[table["row"]]]
    out["row"] = number[out["row"]]
    return out
