"""What agents and the daemon send each other: reports and evidence go up, orders come down.

A `NodeReport` is what the ranks of one node show at a moment (of several nodes, from a forwarder).
It holds ages in place of times, so that clocks never cross nodes. Each of its tables is declared
once, with the bounds of its columns: `from_views` clips to them, `unpack_report` refuses what lies
outside, since all of a report is untrusted where it arrives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import numpy as np
import zstandard

from ckptd.decoding import msgpack_decoder
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

__all__ = [
    "GAP",
    "REPORT_RANK",
    "STEP",
    "SUM",
    "TABLES",
    "AgentOrders",
    "AgentState",
    "EvidenceReport",
    "Fencing",
    "GroupInfo",
    "LinkProbe",
    "NodeReport",
    "ProbeResult",
    "RankNote",
    "ReportLimits",
    "Stack",
    "from_views",
    "gathered",
    "job_of",
    "merge",
    "pack",
    "selected",
    "unpack_evidence",
    "unpack_fencing",
    "unpack_orders",
    "unpack_report",
]


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
        ("what", "<u4"),  # 0 checksum of replicas, 1 norm of a gradient
        ("set", "<u8"),  # ranks with the same number hold the same values
        ("value", "<u8"),  # the checksum, or the bits of a float64
    ]
)
"""One row for each checksum or norm that a rank took, sent once."""

TABLES: Mapping[str, np.dtype[Any]] = {
    "ranks": REPORT_RANK,
    "groups": JOINED_GROUP,
    "calls": JOINED_CALL,
    "gaps": GAP,
    "steps": STEP,
    "sums": SUM,
    "collectives": COLLECTIVE,
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
    "sums": {"step": (-1, _COUNT), "what": (0, 1)},
    "collectives": {"size": (0, len(SIZES))},
}
"""Least and largest value of columns of integers."""

_AGES: Mapping[str, Mapping[str, bool]] = {
    "ranks": {"idle": True, "heartbeat": False, "pending_age": False, "lived": False},
    "gaps": {"seconds": True},
    "steps": {"self_s": False, "inside_s": False, "wall_s": False},
}
"""Columns of ages, and whether each row must have one (NaN is unknown)."""


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
        """Return the global ranks in order; empty if unknown."""
        if self.stride:
            return range(self.first, self.first + self.size * self.stride, self.stride)
        return tuple(np.frombuffer(self.listed, "<u4").tolist())


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
    ranks, groups, calls, gaps, steps, sums, collectives
        Tables as bytes; see `table` and `TABLES`. Rows of groups and calls come in the order of
        their ranks' rows; a rank's calls in the order in which it entered them.
    after
        Number of the report of this source after which the increments in `collectives` begin: the
        last that is known to have been taken.
    members
        Groups by their hash; sent once by each source, and again when orders ask for it.
    texts
        What hashes of operations, element types and call sites stand for; sent likewise.
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

    nonce: int
    from_node: str
    to_node: str
    address: str
    size: int = 1 << 17


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

    period_s: float = 0.25
    tell: bool = False
    stacks: tuple[int, ...] = ()
    calls: tuple[int, ...] = ()
    probes: tuple[LinkProbe, ...] = ()

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

    text: str
    how: str = ""
    taken_s: float = 0.0


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
    job: str
    source: str
    number: int
    stacks: dict[int, Stack] = msgspec.field(default_factory=dict)
    probes: tuple[ProbeResult, ...] = ()
    logs: dict[int, str] = msgspec.field(default_factory=dict)


class ReportLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a message may hold.

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


STATES = frozenset([b"", *(bytes([letter]) for letter in b"RSDTtZXxKWPI")])
"""Letters of the kernel for the state of a process."""


def bad(wanted: str, found: object) -> CorruptError:
    """Return the error of a message that is not what it should be."""
    return CorruptError(
        "not a valid message between agent and daemon",
        kind="bad-sheet",
        wanted=wanted,
        found=str(found)[:200],
    )


def check_report(sheet: NodeReport, limits: ReportLimits) -> None:
    """Raise `CorruptError`, kind ``bad-sheet``, unless all of `sheet` is usable."""
    _check_head(sheet, limits)
    _check_nodes(sheet, limits)
    for name, dtype in TABLES.items():
        size, most = len(getattr(sheet, name)), getattr(limits, name, limits.rows)
        _need(size % dtype.itemsize == 0, f"whole rows of {name}", size)
        _need(size <= most * dtype.itemsize, f"at most {most} rows of {name}", size)
        rows = sheet.table(name)
        for column, (low, high) in BOUNDS[name].items():
            _within(rows[column], low, high, f"{column} of {name}")
        for column, known in _AGES.get(name, {}).items():
            _ages(rows[column], f"{column} of {name}", known=known)
    ranks = sheet.table("ranks")
    _check_ranks(ranks, len(sheet.nodes), limits)
    for name, ordered in (("groups", True), ("calls", True), ("steps", False), ("sums", False)):
        rows = sheet.table(name)["row"]
        _within(rows, 0, len(ranks) - 1, f"row of {name}")
        if ordered:
            _need(bool((rows[1:] >= rows[:-1]).all()), f"{name} in the order of ranks", "not")
    _check_calls(sheet)
    _check_collectives(sheet)
    _check_members(sheet, limits)


def _check_head(message: NodeReport | EvidenceReport, limits: ReportLimits) -> None:
    _need(message.version == VERSION, f"version {VERSION}", message.version)
    for name, text in (("job", message.job), ("source", message.source)):
        _need(0 < len(text) <= limits.name, f"a {name} of 1 to {limits.name} characters", len(text))
    _need(0 <= message.number < _COUNT, "a number", message.number)


def _check_nodes(sheet: NodeReport, limits: ReportLimits) -> None:
    nodes, agents = sheet.nodes, sheet.agents
    _need(len(nodes) <= limits.nodes, f"at most {limits.nodes} nodes", len(nodes))
    _need(len(agents) == len(nodes), "an agent for each node", len(agents))
    _need(len(set(nodes)) == len(nodes), "different names of nodes", "the same")
    _names(nodes, limits.name, "name of a node")
    for agent in agents:
        _need(len(agent.address) <= limits.name, "a short address", len(agent.address))
        _need(0 <= agent.cpu_s < _LONGEST_S, "CPU seconds", agent.cpu_s)
        _need(0 <= agent.recorder_s < _COUNT, "seconds", agent.recorder_s)
        _need(0 <= agent.age_s < _LONGEST_S, "an age", agent.age_s)
        least = min(agent.overruns, agent.rings, agent.bad_rings)
        _need(least >= 0, "counts", least)
        most = max(agent.overruns, agent.rings, agent.bad_rings)
        _need(most < _COUNT, "counts", most)


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


def _check_calls(sheet: NodeReport) -> None:
    groups, calls = sheet.table("groups"), sheet.table("calls")
    _need(bool((groups["group"] != 0).all()), "groups other than 0", "0")
    _ages(-calls["start"], "start of a call", known=True)
    _ages(-calls["end"], "end of a call")
    _need(not (calls["end"] < calls["start"]).any(), "calls that end after they start", "before")


def _check_collectives(sheet: NodeReport) -> None:
    rows = sheet.table("collectives")
    _need(0 <= sheet.after < max(sheet.number, 1), "the number of an earlier sheet", sheet.after)
    _need(bool((rows["op"] != b"").all()), "an operation", "none")
    for text in {*rows["op"].tolist(), *rows["kind"].tolist()}:
        _need(WORD.fullmatch(text) is not None, "the word for a label", repr(text))
    values = rows["values"]
    _need(bool(((values >= 0) & (values < _COUNT)).all()), "increments", "negative or endless")


def _check_members(sheet: NodeReport, limits: ReportLimits) -> None:
    _need(len(sheet.members) <= limits.members, f"at most {limits.members} groups", "more")
    listed = 0
    for ident, info in sheet.members.items():
        _need(0 < ident < 1 << 64, "the hash of a group", ident)
        _names((info.name, info.kind), limits.name, "name of a group", least=0)
        _need(0 <= info.size <= limits.world, "a size", info.size)
        ends = (info.first, info.first + max(info.size - 1, 0) * info.stride)
        _need(min(ends) >= 0 and max(ends) < limits.world, "global ranks", ends)
        _need(len(info.listed) in (0, 4 * info.size), "a rank for each member", len(info.listed))
        _need(not (info.stride and info.listed), "ranks told in one way", "two")
        _need(0 <= info.timeout_s <= _LONGEST_S, "a time-out", info.timeout_s)
        listed += len(info.listed) // 4
    _need(listed <= limits.listed, f"at most {limits.listed} listed ranks", listed)
    _need(len(sheet.texts) <= limits.texts, f"at most {limits.texts} texts", len(sheet.texts))
    _hashes(sheet.texts)
    _names(sheet.texts.values(), limits.text, "text", least=0)


def check_evidence(found: EvidenceReport, limits: ReportLimits) -> None:
    """Raise `CorruptError`, kind ``bad-sheet``, unless all of `found` is usable."""
    _check_head(found, limits)
    for ranks in (found.stacks, found.logs):
        _need(len(ranks) <= limits.ranks, f"at most {limits.ranks} ranks", len(ranks))
        _ranks(ranks, limits)
    for stack in found.stacks.values():
        _need(len(stack.text) <= limits.stack, "a stack", f"{len(stack.text)} characters")
        _need(len(stack.how) <= limits.name, "a short name", len(stack.how))
        _need(0 <= stack.taken_s < _LONGEST_S, "seconds", stack.taken_s)
    _names(found.logs.values(), limits.stack, "log", least=0)
    _need(len(found.probes) <= limits.rows, f"at most {limits.rows} probes", len(found.probes))
    for probe in found.probes:
        _need(0 <= probe.nonce < _COUNT, "a nonce", probe.nonce)
        _names((probe.src, probe.dst), limits.name, "name of a node")
        # Infinite says that nothing came back; NaN is below nothing.
        _need(probe.seconds > 0, "seconds above 0", probe.seconds)
        _need(len(probe.error) <= limits.text, "a short error", len(probe.error))


def check_orders(orders: AgentOrders, limits: ReportLimits) -> None:
    """Raise `CorruptError`, kind ``bad-sheet``, unless all of `orders` is usable."""
    _need(0 < orders.period_s < 3600, "a period below an hour", orders.period_s)
    for ranks in (orders.stacks, orders.calls):
        _need(len(ranks) <= limits.ranks, f"at most {limits.ranks} ranks", len(ranks))
        _ranks(ranks, limits)
    _need(len(orders.probes) <= limits.rows, f"at most {limits.rows} probes", len(orders.probes))
    for probe in orders.probes:
        _need(0 <= probe.nonce < _COUNT, "a nonce", probe.nonce)
        _names((probe.from_node, probe.to_node, probe.address), limits.name, "name of a node")
        _need(0 < probe.size <= 1 << 24, "a probe of at most 16 MiB", probe.size)


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


def _names(texts: Iterable[str], most: int, what: str, *, least: int = 1) -> None:
    for text in texts:
        if not least <= len(text) <= most:
            raise bad(f"a {what} of {least} to {most} characters", f"{len(text)} characters")


def _hashes(keys: Iterable[int]) -> None:
    for key in keys:
        if not 0 <= key < 1 << 64:
            raise bad("a hash", key)


def _ranks(ranks: Iterable[int], limits: ReportLimits) -> None:
    for rank in ranks:
        if not 0 <= rank < limits.world:
            raise bad("a rank", rank)


Message = TypeVar("Message", NodeReport, AgentOrders, EvidenceReport, Fencing)

_PLAIN, _PACKED = b"\x00", b"\x01"
_PACK_ABOVE = 4096
_RATIO = 512
_encoder = msgspec.msgpack.Encoder()
_sheets = msgpack_decoder(NodeReport)
_orders = msgpack_decoder(AgentOrders)
_found = msgpack_decoder(EvidenceReport)
_fencing = msgpack_decoder(Fencing)
_MOST_GENERATION = 1 << 62
_MOST_REASON = 2000


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
        kind ``bad-sheet``: these bytes are not a report, or it claims more than `limits`.
    """
    limits = limits or ReportLimits()
    sheet = _decoded(data, _sheets, limits)
    check_report(sheet, limits)
    return sheet


def unpack_evidence(data: bytes, limits: ReportLimits | None = None) -> EvidenceReport:
    """Return the findings that `data` holds; errors as of `unpack_report`."""
    limits = limits or ReportLimits()
    found = _decoded(data, _found, limits)
    check_evidence(found, limits)
    return found


def unpack_orders(data: bytes, limits: ReportLimits | None = None) -> AgentOrders:
    """Return the orders that `data` holds; errors as of `unpack_report`."""
    limits = limits or ReportLimits()
    orders = _decoded(data, _orders, limits)
    check_orders(orders, limits)
    return orders


def unpack_fencing(data: bytes, limits: ReportLimits | None = None) -> Fencing:
    """Return the fencing that `data` holds; errors as of `unpack_report`."""
    fencing = _decoded(data, _fencing, limits or ReportLimits())
    if not 0 <= fencing.below < _MOST_GENERATION or len(fencing.reason) > _MOST_REASON:
        raise bad("a generation, and a reason in a few words", f"generation {fencing.below}")
    return fencing


def _decoded(
    data: bytes, decoder: msgspec.msgpack.Decoder[Message], limits: ReportLimits
) -> Message:
    if not 0 < len(data) <= limits.packed:
        raise bad(f"1 to {limits.packed} bytes", f"{len(data)} bytes")
    try:
        return decoder.decode(_plain(data, limits))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
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
    """What is known of a rank beside its view; see `ckptd.monitor.report.REPORT_RANK`."""

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
    sheet = NodeReport(
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
    return msgspec.structs.replace(sheet, **packed)


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
    sheets: Sequence[NodeReport],
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
    """Return one report with everything of `sheets`: what a forwarder passes on.

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
    for sheet, age in zip(sheets, ages, strict=True):
        for node, agent in zip(sheet.nodes, sheet.agents, strict=True):
            nodes[node] = msgspec.structs.replace(agent, age_s=agent.age_s + age)
    names = tuple(nodes)
    if members is None:
        members = {g: info for sheet in sheets for g, info in sheet.members.items()}
    if texts is None:
        texts = {h: text for sheet in sheets for h, text in sheet.texts.items()}
    sheet = NodeReport(
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
    tables = {name: _stacked(sheets, name, names).tobytes() for name in stacked}
    tables["collectives"] = b"" if collectives is None else collectives.tobytes()
    return msgspec.structs.replace(sheet, **tables)


def _stacked(sheets: Sequence[NodeReport], name: str, nodes: Sequence[str]) -> Array:
    """Return all rows of one table, with rows and nodes numbered anew.

    Bytes are put together, and not tables: numpy copies tables column by column.
    """
    out = np.frombuffer(b"".join([getattr(s, name) for s in sheets]), TABLES[name]).copy()
    counts = [len(getattr(s, name)) // TABLES[name].itemsize for s in sheets]
    if name == "ranks":
        place = {node: i for i, node in enumerate(nodes)}
        offset = np.cumsum([0, *(len(s.nodes) for s in sheets)])[:-1]
        table = np.array([place[node] for s in sheets for node in s.nodes], np.int32)
        if len(out):
            out["node"] = table[out["node"] + np.repeat(offset, counts)]
    elif "row" in (out.dtype.names or ()):
        ranks = [len(s.ranks) // REPORT_RANK.itemsize for s in sheets]
        out["row"] += np.repeat(np.cumsum([0, *ranks])[:-1], counts)
    return out


def job_of(
    sheets: Sequence[NodeReport],
    members: Mapping[int, Sequence[int]],
    agents: Sequence[AgentView] = (),
    silent: Collection[str] = (),
) -> JobView:
    """Return the columns of the job that `sheets` show; see `gathered`."""
    return gathered(sheets, members, agents, silent)[0]


def gathered(
    sheets: Sequence[NodeReport],
    members: Mapping[int, Sequence[int]],
    agents: Sequence[AgentView] = (),
    silent: Collection[str] = (),
    fenced: int = 0,
) -> tuple[JobView, Array]:
    """Return the columns of the job that `sheets` show, one row a rank, and its `REPORT_RANK` rows.

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
    nodes = tuple(dict.fromkeys(node for s in sheets for node in s.nodes))
    ranks = _stacked(sheets, "ranks", nodes)
    groups, calls = _stacked(sheets, "groups", nodes), _stacked(sheets, "calls", nodes)
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
    out: Array = (generation > 0) & (generation < fenced)
    return out


def selected(job: JobView, kept: Array) -> JobView:
    """Return `job` with those rows of ranks only that `kept` says."""
    groups, calls = _of(job.groups, kept), _of(job.calls, kept)
    return replace(job, ranks=job.ranks[kept], groups=groups, calls=calls)


def _living(ranks: Array) -> Array:
    """Return which rows stand for their rank."""
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
