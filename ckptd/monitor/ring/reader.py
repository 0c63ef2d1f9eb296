"""Reads a rank's ring, while the rank writes it or long after: files nobody vouches for.

What a file claims is checked before anything is allocated, a slot that was being written is left
out, and whatever else is wrong is an error with a name.
"""

from __future__ import annotations

import time
import zlib
from pathlib import Path
from struct import Struct
from typing import Any

import msgspec
import numpy as np

from ckptd.monitor.ring.layout import (
    COUNTER,
    GROUP_ROW,
    HEADER_BYTES,
    IDENTITY,
    LIMITS,
    MAGIC,
    MAKING,
    SLOT,
    TEXT,
    VERSION,
    Counter,
    RecorderState,
    RingShape,
)
from ckptd.monitor.ring.rankfile import RankFile
from ckptd.monitor.view import CALL, GROUP, CallFlag, Phase, RankView

__all__ = ["RingHeader", "RingReader", "read"]

Rows = np.ndarray[Any, Any]

_COUNTERS = Struct(f"<{len(Counter)}q")
_NS = 1e-9
_MOST_TIMEOUT_S = 1e9
_EARLIEST = 1  # 0 stands for "never" in all times


class RingHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Who writes the ring, and how its recorder is.

    Attributes
    ----------
    rank, world, pid, generation, job, node
        As the rank stated them.
    birth
        Start of the process in kernel ticks, 0 if unknown: another process may have its pid now.
    started_ns
        Wall clock at the start of the recorder.
    state
        What the recorder does.
    interpreted
        When the main thread last ran Python code that another thread left for it, seconds of the
        monotonic clock; 0 before the first.
    lost
        Calls that found no room in the table of groups.
    written
        Calls written so far; those before the last `shape.slots` are overwritten.
    shape
        How much the ring holds.
    """

    rank: int
    world: int
    pid: int
    generation: int
    job: str
    node: str
    birth: int
    started_ns: int
    state: RecorderState
    interpreted: float
    lost: int
    written: int
    shape: RingShape


class RingReader(RankFile):
    """An open ring. Closing it is all it ever owes; use it in a ``with`` block.

    Parameters
    ----------
    path
        The file.

    Raises
    ------
    NotFoundError
        kind ``no-ring``: there is no such file.
    CorruptError
        kind ``bad-ring``: not a regular file, of another size than it says, damaged, or of another
        version.
    StoreError
        kind ``store``: it cannot be opened or read.
    """

    WHAT = "ring of a rank"

    def __init__(self, path: Path) -> None:
        self._members: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._members_left = LIMITS.members
        super().__init__(path)

    # --- what others ask ------------------------------------------------------------------------

    def header(self) -> RingHeader:
        """Return who writes the ring, and how its recorder is; errors as of the class."""
        return self._header(self._read_counters())

    def view(self, calls: int | None = None, *, members: bool = True) -> RankView:
        """Return what the rank shows now; what only its node knows (exit code, ...) is not set.

        Parameters
        ----------
        calls
            How many of the last calls to tell at most; None is all that the ring holds. A poll
            that asks for few reads few.
        members
            Whether to tell the ranks of the groups, which never change.

        Raises
        ------
        CorruptError, StoreError
            As of the class.
        """
        # Calls first: a call that is told as entered is then counted by its group as well.
        counters = self._read_counters()
        slots = self._read_slots(_within(counters[Counter.WRITTEN], 1 << 62), calls)
        groups = self._read_groups()
        counters = self._read_counters()
        rows = _calls(slots, groups)
        if counters[Counter.COUNTED] == 1:
            rows["flags"] |= np.uint32(CallFlag.COUNTED)
        heartbeat = counters[Counter.HEARTBEAT]
        return RankView(
            rank=int(self._identity["rank"]),
            world=int(self._identity["world"]),
            node=_text(self._identity["node"]),
            pid=int(self._identity["pid"]),
            at=time.monotonic(),
            heartbeat=heartbeat * _NS if heartbeat >= _EARLIEST else float("nan"),
            moved=_moved(counters, groups),
            phase=_phase(counters[Counter.PHASE]),
            step=_within(counters[Counter.STEP], 1 << 62, lowest=-1),
            steps_done=_within(counters[Counter.STEPS_DONE], 1 << 62),
            groups=_groups(groups),
            calls=rows,
            members=self._read_members(groups) if members else {},
            **_pending(rows, groups),
        )

    def texts(self) -> dict[int, str]:
        """Return what the hashes in calls stand for; errors as of the class."""
        shape = self._shape()
        used = _within(self._read_counters()[Counter.TEXTS], shape.texts)
        rows = self._rows(TEXT, shape.texts_at, used)
        return {int(row["hash"]): _text(row["text"]) for row in rows}

    # --- what a poll asks -----------------------------------------------------------------------

    def counters(self) -> tuple[int, ...]:
        """Return the header's counters, by `Counter`; one small read. Errors as of the class."""
        return _COUNTERS.unpack(self._pread(_COUNTERS.size, COUNTER))

    def calls_since(self, number: int) -> tuple[Rows, Rows]:
        """Return the numbers of the calls above `number` that the ring still holds, and the calls.

        Rows of `CALL`, in order; errors as of the class.
        """
        written = _within(self.counters()[Counter.WRITTEN], 1 << 62)
        slots = self._read_slots(written, max(written - number, 0))
        groups = self._read_groups()
        slots = _known(slots, groups)
        return slots["commit"].astype(np.int64), _calls(slots, groups)

    def group_rows(self) -> Rows:
        """Return the table of groups as it is, `GROUP_ROW`; errors as of the class."""
        return self._read_groups()

    def group_infos(self) -> tuple[tuple[int, str, str, float], ...]:
        """Return hash, name, kind and time-out (seconds, 0 is unknown) of each group of the rank.

        Errors as of the class.
        """
        rows = self._read_groups()
        return tuple(
            (
                int(row["ident"]),
                _text(row["name"]),
                _text(row["kind"]),
                min(int(row["timeout_ms"]) / 1000, _MOST_TIMEOUT_S),
            )
            for row in rows[rows["ident"] != 0]
        )

    # --- the bytes ------------------------------------------------------------------------------

    def _read_identity(self) -> None:
        length = self._length(HEADER_BYTES)
        raw = self._pread(IDENTITY.itemsize, 0)
        row: np.void = np.frombuffer(raw, IDENTITY)[0]
        if row["magic"] != MAGIC or row["version"] != VERSION:
            raise self._corrupt(f"a ring of version {VERSION}", repr(raw[:12]))
        if row["checksum"] != zlib.crc32(raw[: -IDENTITY["checksum"].itemsize]):
            raise self._corrupt("the checksum of the header", f"{int(row['checksum']):#x}")
        shape = RingShape(*(int(row[name]) for name in RingShape._fields))
        if not shape.fits() or length != shape.total:
            raise self._corrupt("the size that its header says", f"{length} bytes, {shape}")
        if not 0 <= int(row["rank"]) < int(row["world"]) <= LIMITS.world:
            raise self._corrupt("a rank of a world", f"{int(row['rank'])} of {int(row['world'])}")
        self._identity = row

    def _shape(self) -> RingShape:
        return RingShape(*(int(self._identity[name]) for name in RingShape._fields))

    def _header(self, counters: list[int]) -> RingHeader:
        row = self._identity
        state = counters[Counter.STATE]
        return RingHeader(
            rank=int(row["rank"]),
            world=int(row["world"]),
            pid=int(row["pid"]),
            generation=int(row["generation"]),
            job=_text(row["job"]),
            node=_text(row["node"]),
            birth=int(row["birth"]),
            started_ns=int(row["started_ns"]),
            state=RecorderState(state) if state in set(RecorderState) else RecorderState.ASIDE,
            interpreted=max(counters[Counter.INTERPRETED], 0) * _NS,
            lost=_within(counters[Counter.LOST], 1 << 62),
            written=_within(counters[Counter.WRITTEN], 1 << 62),
            shape=self._shape(),
        )

    def _read_counters(self) -> list[int]:
        return list(self.counters())

    def _read_slots(self, written: int, calls: int | None) -> Rows:
        """Return the slots of the last calls in order, without those that changed meanwhile."""
        total = self._shape().slots
        wanted = min(written, total, total if calls is None else max(calls, 0))
        begin = (written - wanted) % total
        parts = [(begin, min(wanted, total - begin))]
        parts.append((0, wanted - parts[0][1]))
        # Bytes are put together, and not tables: numpy copies tables column by column.
        first, second = (b"".join(self._slots(at, n) for at, n in parts) for _ in range(2))
        numbers = np.arange(written - wanted + 1, written + 1, dtype=np.uint64)
        # A slot of an older or newer call than its place says was being overwritten, or is a lie.
        rows, again = np.frombuffer(first, SLOT), np.frombuffer(second, SLOT)["commit"]
        whole: Rows = rows[(rows["commit"] == numbers) & (again == numbers)]
        return whole

    def _slots(self, at: int, number: int) -> bytes:
        return self._pread(SLOT.itemsize * number, HEADER_BYTES + at * SLOT.itemsize)

    def _read_groups(self) -> Rows:
        shape = self._shape()
        used = _within(self._read_counters()[Counter.GROUPS], shape.groups)
        return self._rows(GROUP_ROW, shape.groups_at, used)

    def _read_members(self, groups: Rows) -> dict[int, tuple[int, ...]]:
        """Return the ranks of the groups that state some; those of a group never change."""
        found = {}
        for row in groups:
            key = (int(row["first"]), int(row["stride"]), int(row["size"]))
            if key not in self._members:
                self._members[key] = self._members_of(*key)
            if self._members[key] and row["ident"]:
                found[int(row["ident"])] = self._members[key]
        return found

    def _members_of(self, first: int, stride: int, size: int) -> tuple[int, ...]:
        world = int(self._identity["world"])
        shape = self._shape()
        if first < 0 or not 0 < size <= min(world, self._members_left):
            return ()
        self._members_left -= size
        if stride:
            ranks = range(first, first + size * stride, stride)
            return tuple(ranks) if min(ranks) >= 0 and max(ranks) < world else ()
        if first + size > shape.members:
            return ()
        listed = self._rows(np.dtype("<u4"), shape.members_at + 4 * first, size)
        return tuple(listed.tolist()) if int(listed.max()) < world else ()

    def _rows(self, dtype: np.dtype[Any], at: int, number: int) -> Rows:
        return np.frombuffer(self._pread(dtype.itemsize * number, at), dtype)


def read(path: Path, calls: int | None = None) -> RankView:
    """Return what the rank shows whose ring this is; see `RingReader.view` for all about it."""
    with RingReader(path) as reader:
        return reader.view(calls)


def _known(slots: Rows, groups: Rows) -> Rows:
    """Return the slots of calls of groups that are in the table."""
    slots = slots[slots["group"] < len(groups)]
    known: Rows = slots[groups["ident"][slots["group"]] != 0]
    return known


def _calls(slots: Rows, groups: Rows) -> Rows:
    """Return slots as rows of `CALL`; calls of groups that are not in the table are left out."""
    slots = _known(slots, groups)
    rows = np.zeros(len(slots), CALL)
    for name in ("op", "dtype", "bytes", "root", "site", "step", "phase"):
        rows[name] = slots[name]
    rows["group"] = groups["ident"][slots["group"]]
    rows["seq"] = slots["seq"]
    rows["flags"] = slots["flags"]
    rows["start"] = slots["start"] * _NS
    rows["end"] = np.where(slots["end"] >= _EARLIEST, slots["end"] * _NS, np.nan)
    rows["phase"] = np.minimum(rows["phase"], max(Phase))
    return rows


def _groups(groups: Rows) -> Rows:
    rows = np.zeros(len(groups), GROUP)
    rows["group"], rows["size"] = groups["ident"], groups["size"]
    for name in ("entered", "completed"):
        rows[name] = np.minimum(groups[name], 1 << 62)
    # A call completes after it was entered, and may have done so between two reads.
    rows["entered"] = np.maximum(rows["entered"], rows["completed"])
    kept: Rows = rows[rows["group"] != 0]
    return kept


def _pending(calls: Rows, groups: Rows) -> dict[str, Any]:
    """Return the oldest call that has not ended, as arguments of a view."""
    waiting = calls[np.isnan(calls["end"])]
    found = [(float(c["start"]), int(c["group"]), int(c["seq"])) for c in waiting[:1]]
    making = (groups["kind"] == MAKING.encode()) & (groups["entered"] > groups["completed"])
    found += [
        (float(g["entered_at"]) * _NS, int(g["ident"]), int(min(g["entered"], 1 << 62)))
        for g in groups[making & (groups["ident"] != 0)]
    ]
    if not found:
        return {}
    since, group, seq = min(found)
    return {"pending_group": group, "pending_seq": seq, "pending_since": since}


def _moved(counters: list[int], groups: Rows) -> float:
    stamps = [counters[Counter.PHASE_SINCE], counters[Counter.STEP_SINCE], 0]
    stamps += [int(groups[name].max()) for name in ("entered_at", "completed_at") if len(groups)]
    return max(stamps) * _NS


def _phase(number: int) -> Phase:
    return Phase(number) if number in set(Phase) else Phase.TRAIN


def _within(number: int, limit: int, lowest: int = 0) -> int:
    return min(max(number, lowest), limit)


def _text(raw: bytes) -> str:
    return bytes(raw).decode(errors="replace")
