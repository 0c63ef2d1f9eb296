"""Ring file of a rank: header, counters, slots, groups, texts; writer and reader; sizes.

The file is memory-mapped, and all its sizes are fixed: header | slots | groups | members | texts

- *header*: the rank's identity (checksummed, never changes), then 8-byte counters that the rank
  stores one at a time.
- *slots*: one for each of the last calls. Its first 8 bytes are the commit index: 0 while the rest
  is written, then the number of the call, counted from 1. Call ``n`` lies in slot
  ``(n - 1) % slots``.
- *groups*: one row for each group of the rank, never moved and never reused.
- *members*: global ranks of groups whose ranks are not an arithmetic progression.
- *texts*: what hashes represent: operations, element types, call sites.

Little-endian throughout. Counters are stored whole by the machine; everything else becomes visible
through a counter or a commit index that is stored after it.
"""

from __future__ import annotations

import enum
import mmap
import os
import stat
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from struct import Struct
from typing import Any, ClassVar, NamedTuple, Self

import msgspec
import numpy as np

from ckptd.errors import CorruptError, NotFoundError, StoreError, UsageError
from ckptd.monitor.job import CALL, GROUP, CallFlag, Phase, RankView

# --- layout ---------------------------------------------------------------------------------------


MAGIC = b"CKPTRING"
VERSION = 1
HEADER_BYTES = 4096

IDENTITY: np.dtype[Any] = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("slots", "<u4"),
        ("groups", "<u4"),
        ("members", "<u4"),
        ("texts", "<u4"),
        ("rank", "<u4"),
        ("world", "<u4"),
        ("pid", "<u4"),
        ("generation", "<u4"),
        ("padding", "<u4"),
        ("started_ns", "<u8"),  # wall clock, for people
        ("birth", "<u8"),  # start of the process in kernel ticks: shows whether a pid was reused
        ("job", "S64"),
        ("node", "S64"),
        ("checksum", "<u4"),  # of all bytes before it
    ]
)

COUNTER = 256
"""Offset of the counters in the header."""


class Counter(enum.IntEnum):
    """The header's counters: signed 8 bytes each. Times are nanoseconds of the monotonic clock."""

    HEARTBEAT = 0
    """When a Python thread of the rank last ran; 0 before the first."""
    INTERPRETED = 1
    """When the main thread last ran Python code that another thread left for it (pending call)."""
    PHASE = 2
    PHASE_SINCE = 3
    STEP = 4
    """-1 while steps are not marked."""
    STEP_SINCE = 5
    STEPS_DONE = 6
    WRITTEN = 7
    """Highest call number that is committed."""
    GROUPS = 8
    MEMBERS = 9
    TEXTS = 10
    STATE = 11
    """See `RecorderState`."""
    LOST = 12
    """Calls that found no room in the table of groups, and so have no slot."""
    COST = 13
    """Nanoseconds that recording a call costs, measured at the start; 0 is not measured."""
    COUNTED = 14
    """1 if steps are those of an optimizer, which ranks may make differently often."""


class RecorderState(enum.IntEnum):
    """The state of the recorder itself."""

    OFF = 0
    """Ended successfully; the ring stays as it was."""
    CALLS = 1
    """Records every call."""
    COUNTERS = 2
    """Knows only how far each group is, from the flight recorder: no slots."""
    ASIDE = 3
    """Failed and stepped aside: nothing is recorded any more. The job goes on."""


SLOT: np.dtype[Any] = np.dtype(
    [
        ("commit", "<u8"),
        ("start", "<u8"),
        ("end", "<u8"),  # 0 while the call is under way
        ("bytes", "<i8"),  # -1 is unknown
        ("seq", "<u4"),
        ("op", "<u4"),
        ("dtype", "<u4"),
        ("root", "<i4"),  # rank within the group; -1 is none
        ("step", "<i4"),
        ("site", "<u4"),
        ("group", "<u2"),
        ("flags", "u1"),
        ("phase", "u1"),
        ("padding", "<u4"),
    ]
)

GROUP_ROW: np.dtype[Any] = np.dtype(
    [
        ("ident", "<u8"),
        ("size", "<u4"),
        ("me", "<u4"),
        ("first", "<i4"),  # global ranks are first + i * stride, or
        ("stride", "<i4"),  # 0: members[first : first + size]; -1 as first: not known
        ("entered_at", "<u8"),
        ("completed_at", "<u8"),
        ("entered", "<u8"),
        ("completed", "<u8"),
        ("name", "S40"),
        ("kind", "S24"),
        ("timeout_ms", "<u8"),  # of the group's calls, by its backend; 0 is unknown
    ]
)

MAKING = "making"
"""Name and kind of a row that counts how often its members have made a process group together.

Its calls have no slots.
"""

TEXT: np.dtype[Any] = np.dtype([("hash", "<u4"), ("text", "S124")])


class RingLimits(NamedTuple):
    """The most that a file may claim; also what the reader is ready to allocate."""

    slots: int = 1 << 17
    groups: int = 1 << 14
    members: int = 1 << 20
    texts: int = 1 << 13
    world: int = 1 << 24


LIMITS = RingLimits()


class RingShape(NamedTuple):
    """How many of each a ring has. The defaults make a file of 0.5 MiB."""

    slots: int = 4096
    groups: int = 512
    members: int = 32768
    texts: int = 512

    def fits(self) -> bool:
        """Whether this is within `LIMITS`."""
        return all(0 < mine <= limit for mine, limit in zip(self, LIMITS, strict=False))

    @property
    def groups_at(self) -> int:
        """Offset of the table of groups."""
        return HEADER_BYTES + self.slots * SLOT.itemsize

    @property
    def members_at(self) -> int:
        """Offset of the members."""
        return self.groups_at + self.groups * GROUP_ROW.itemsize

    @property
    def texts_at(self) -> int:
        """Offset of the texts."""
        return self.members_at + 4 * self.members

    @property
    def total(self) -> int:
        """Bytes of the file."""
        return self.texts_at + self.texts * TEXT.itemsize


def text_hash(text: str) -> int:
    """Return the 32-bit hash under which a text is known in all rings; never 0."""
    return zlib.crc32(text.encode()) or 1


# --- the writer -----------------------------------------------------------------------------------


_BODY = Struct("<QQqIIIiiIHBBI")  # SLOT without its commit index
_pack_body = _BODY.pack_into
_now = time.monotonic_ns
_GROUP_HEAD = Struct("<QIIii")
_MOST_TIMEOUT_S = 1e9
_WORD = 8
_SLOT_WORDS = SLOT.itemsize // _WORD
_END_WORD = 2
_FLAGS_BYTE = 58
_ENTERED_AT, _COMPLETED_AT, _ENTERED, _COMPLETED = 3, 4, 5, 6
# Every call passes by these; a member of an enum takes longer to look up, and to index with.
_SLOTS_WORD = HEADER_BYTES // _WORD
_WRITTEN, _FAILED = Counter.WRITTEN.value, CallFlag.FAILED.value
_UNSEEN, _QUEUED = CallFlag.UNSEEN.value, CallFlag.QUEUED.value


@dataclass(frozen=True, slots=True, kw_only=True)
class RingIdentity:
    """The rank that a ring belongs to.

    Attributes
    ----------
    rank, world
        Global rank, and how many there are.
    job, node
        Names; what exceeds 64 bytes is cut.
    generation
        Which life of the job this is.
    """

    rank: int
    world: int
    job: str = ""
    node: str = ""
    generation: int = 0


class RingGroup:
    """A group's row, and the numbers of its calls. Made by `RingWriter.add_group`."""

    __slots__ = ("_base", "_early", "_words", "completed", "entered", "index")

    def __init__(self, words: memoryview, base: int, index: int, entered: int) -> None:
        self._words = words
        self._base = base
        self._early: set[int] = set()
        self.index = index
        self.entered = entered
        self.completed = entered

    def enter(self, now: int) -> int:
        """Count a call that begins at `now`; return its number."""
        self.entered = seq = self.entered + 1
        words, base = self._words, self._base
        words[base + _ENTERED_AT] = now
        words[base + _ENTERED] = seq
        return seq

    def complete(self, seq: int, now: int) -> None:
        """Count a call that has ended. `completed` is the last of an unbroken run of such."""
        if seq != self.completed + 1:
            if seq > self.completed:
                self._early.add(seq)
            return
        early = self._early
        while early and seq + 1 in early:
            seq += 1
            early.discard(seq)
        self.completed = seq
        words, base = self._words, self._base
        words[base + _COMPLETED_AT] = now
        words[base + _COMPLETED] = seq

    def at_least(self, entered: int, completed: int, now: int) -> None:
        """Raise the counts to those of another counter."""
        words, base = self._words, self._base
        if entered > self.entered:
            self.entered = entered
            words[base + _ENTERED_AT] = now
            words[base + _ENTERED] = entered
        if completed > self.completed:
            self.completed = completed
            words[base + _COMPLETED_AT] = now
            words[base + _COMPLETED] = completed


class RingWriter:
    """Makes the file and writes it. One writer a file; its methods never block.

    `enter` and `leave` may be called by several threads of a process under the GIL.

    Parameters
    ----------
    path
        The file; made with mode 0600, replaces one of the same name in one step. All its space is
        reserved at once, so that a file system that is full later cannot kill the rank.
    identity
        Whose it is.
    shape
        How many slots, groups, members and texts it has.

    Raises
    ------
    StoreError
        kind ``no-space``: the file system has no room, or cannot reserve it.
    UsageError
        The shape is out of bounds, or this machine is big-endian.
    """

    def __init__(self, path: Path, identity: RingIdentity, shape: RingShape | None = None) -> None:
        self.path = path
        self.identity = identity
        self.shape = shape or RingShape()
        if sys.byteorder != "little" or not self.shape.fits():
            raise UsageError(
                "invalid shape of a ring",
                where=str(path),
                wanted="a little-endian machine, and a shape within its limits",
                found=f"{sys.byteorder}-endian, {self.shape}",
            )
        self._map = reserve(path, _identity_bytes(identity, self.shape), self.shape.total)
        self._words = memoryview(self._map).cast("Q")
        self._counters = memoryview(self._map)[COUNTER:HEADER_BYTES].cast("q")
        self._bytes = memoryview(self._map)
        self._numbers = count(1)
        self._slots = self.shape.slots
        self._texts: set[int] = set()
        self._step = -1
        self._phase = int(Phase.INIT)
        self._counters[Counter.STEP] = -1
        self._counters[Counter.PHASE_SINCE] = time.monotonic_ns()

    # --- calls ----------------------------------------------------------------------------------

    def enter(
        self,
        group: RingGroup,
        op: int,
        nbytes: int,
        dtype: int,
        root: int,
        flags: int,
        site: int,
    ) -> tuple[int, int]:
        """Write down a call that begins now; return its number and its number in the group.

        `op`, `dtype` and `site` are hashes of texts (`text`); `flags` is a `CallFlag`.
        """
        now = _now()
        number = next(self._numbers)
        word = _SLOTS_WORD + (number - 1) % self._slots * _SLOT_WORDS
        words = self._words
        words[word] = 0
        seq = group.enter(now)
        _pack_body(
            self._map,
            (word + 1) * _WORD,
            now,
            0,
            nbytes,
            seq & 0xFFFFFFFF,
            op,
            dtype,
            root,
            self._step,
            site,
            group.index,
            flags,
            self._phase,
            0,
        )
        words[word] = number
        counters = self._counters
        if number > counters[_WRITTEN]:  # another thread may have been faster
            counters[_WRITTEN] = number
        return number, seq

    def leave(
        self,
        group: RingGroup,
        number: int,
        seq: int,
        *,
        failed: bool = False,
        at: int | None = None,
        seen: bool = True,
    ) -> None:
        """Write down that a call has ended, now or `at` that time in nanoseconds.

        A slot that serves another call is left alone. Without `seen` the call is marked as one
        whose end is not known.
        """
        now = _now() if at is None else at
        word = _SLOTS_WORD + (number - 1) % self._slots * _SLOT_WORDS
        if self._words[word] == number:
            if failed or not seen:
                more = (_FAILED if failed else 0) | (0 if seen else _UNSEEN)
                self._bytes[word * _WORD + _FLAGS_BYTE] |= more
            self._words[word + _END_WORD] = now
        group.complete(seq, now)

    def reached(self, number: int) -> None:
        """Write down that the device has come to a call that was entered as queued."""
        word = _SLOTS_WORD + (number - 1) % self._slots * _SLOT_WORDS
        if self._words[word] == number:
            self._bytes[word * _WORD + _FLAGS_BYTE] &= 0xFF ^ _QUEUED

    @property
    def address(self) -> int:
        """Where the ring lies in this process, for those who write it without Python."""
        return int(np.frombuffer(self._map, np.uint8).ctypes.data)

    # --- groups and texts -----------------------------------------------------------------------

    def add_group(
        self,
        ident: int,
        size: int,
        me: int,
        ranks: Sequence[int],
        name: str = "",
        kind: str = "",
        entered: int = 0,
        timeout_s: float = 0.0,
    ) -> RingGroup | None:
        """Add a row, whose first call will have number ``entered + 1``; None if no row is free.

        `ident` is the same on all ranks of the group, and never 0. `ranks` are the global ranks in
        order; empty if they are not known. `timeout_s` is how long the backend itself lets a call
        take; 0 is not known.
        """
        index = self._counters[Counter.GROUPS]
        if index >= self.shape.groups:
            return None
        at = self.shape.groups_at + index * GROUP_ROW.itemsize
        first, stride = self._members(ranks)
        _GROUP_HEAD.pack_into(self._map, at, ident, size, me, first, stride)
        row = np.frombuffer(self._map, GROUP_ROW, 1, at)
        row["name"] = _cut(name, 40)
        row["kind"] = _cut(kind, 24)
        row["entered"] = row["completed"] = entered
        row["timeout_ms"] = int(min(max(timeout_s, 0.0), _MOST_TIMEOUT_S) * 1000)
        self._counters[Counter.GROUPS] = index + 1
        return RingGroup(self._words, at // _WORD, index, entered)

    def _members(self, ranks: Sequence[int]) -> tuple[int, int]:
        """Return `first` and `stride` of a row."""
        if not ranks:
            return -1, 0
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        if stride and all(r == ranks[0] + i * stride for i, r in enumerate(ranks)):
            return ranks[0], stride
        used = self._counters[Counter.MEMBERS]
        if used + len(ranks) > self.shape.members:
            return -1, 0
        members = np.frombuffer(self._map, "<u4", self.shape.members, self.shape.members_at)
        members[used : used + len(ranks)] = ranks
        self._counters[Counter.MEMBERS] = used + len(ranks)
        return used, 0

    def ident(self, index: int) -> int:
        """Return the identity of the group in a row."""
        at = self.shape.groups_at + index * GROUP_ROW.itemsize
        return int(np.frombuffer(self._map, GROUP_ROW, 1, at)["ident"][0])

    def text(self, text: str) -> int:
        """Return the hash of a text, and write the text down if there is room."""
        code = text_hash(text)
        used = self._counters[Counter.TEXTS]
        if code not in self._texts and used < self.shape.texts:
            self._texts.add(code)
            at = self.shape.texts_at + used * TEXT.itemsize
            row = np.frombuffer(self._map, TEXT, 1, at)
            row["hash"] = code
            # The end of a path says more than its beginning.
            row["text"] = text.encode()[-TEXT["text"].itemsize :]
            self._counters[Counter.TEXTS] = used + 1
        return code

    # --- the header -----------------------------------------------------------------------------

    def beat(self) -> None:
        """Write down that a thread of this process runs."""
        self._counters[Counter.HEARTBEAT] = time.monotonic_ns()

    def interpreted(self) -> None:
        """Write down that the main thread runs Python code."""
        self._counters[Counter.INTERPRETED] = time.monotonic_ns()

    @property
    def phase(self) -> Phase:
        """The phase of the rank."""
        return Phase(self._phase)

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._phase = int(phase)
        self._counters[Counter.PHASE_SINCE] = time.monotonic_ns()
        self._counters[Counter.PHASE] = self._phase

    @property
    def current_step(self) -> int:
        """The step being made; -1 if steps are not marked."""
        return self._step

    def step(self, step: int) -> None:
        """Write down that step number `step` begins; a step before it is done."""
        counters = self._counters
        if self._step >= 0:
            counters[Counter.STEPS_DONE] += 1
        self._step = step & 0x7FFFFFFF
        counters[Counter.STEP_SINCE] = time.monotonic_ns()
        counters[Counter.STEP] = self._step

    def counted(self, yes: bool) -> None:
        """Write down whether steps are counted, those of an optimizer, or said by the program."""
        self._counters[Counter.COUNTED] = int(yes)

    def lost(self) -> None:
        """Count a call for which there was no room."""
        self._counters[Counter.LOST] += 1

    def cost(self, nanoseconds: int) -> None:
        """Write down what recording a call costs."""
        self._counters[Counter.COST] = nanoseconds

    def state(self, state: RecorderState) -> None:
        """Write down what the recorder does."""
        self._counters[Counter.STATE] = int(state)


def reserve(path: Path, head: bytes, total: int) -> mmap.mmap:
    """Make a file beside its place, with all its space, move it there, and return it mapped.

    Raises
    ------
    StoreError
        kind ``no-space``.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(temporary, flags, 0o600)
        try:
            os.posix_fallocate(fd, 0, total)
            os.pwrite(fd, head, 0)
            mapped = mmap.mmap(fd, total)
            os.rename(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        finally:
            os.close(fd)
    except OSError as error:
        raise StoreError(
            "no room for the ring of a rank",
            kind="no-space",
            where=str(path),
            wanted=f"{total} bytes",
            found=error.strerror or str(error),
        ) from error
    return mapped


def _identity_bytes(identity: RingIdentity, shape: RingShape) -> bytes:
    row = np.zeros((), IDENTITY)
    row["magic"], row["version"] = MAGIC, VERSION
    for name, value in shape._asdict().items():
        row[name] = value
    row["rank"], row["world"] = identity.rank, identity.world
    row["pid"], row["generation"] = os.getpid(), identity.generation
    row["started_ns"], row["birth"] = time.time_ns(), process_birth(os.getpid())
    row["job"], row["node"] = _cut(identity.job, 64), _cut(identity.node, 64)
    row["checksum"] = zlib.crc32(row.tobytes()[: -IDENTITY["checksum"].itemsize])
    return row.tobytes()


def process_birth(pid: int) -> int:
    """Return when a process started, in the kernel's ticks since boot; 0 if it cannot be known."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _cut(text: str, size: int) -> bytes:
    return text.encode()[:size].decode(errors="ignore").encode()


# --- the reader -----------------------------------------------------------------------------------


class RankFile:
    """An open file of a rank; subclasses know what lies in it. Use it in a ``with`` block.

    Parameters
    ----------
    path
        The file.

    Raises
    ------
    NotFoundError
        There is no such file.
    CorruptError
        It is not such a file, or damaged, or of another version.
    StoreError
        kind ``store``: it cannot be opened or read.
    """

    WHAT: ClassVar[str]
    """Noun for the file, in messages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise NotFoundError(f"no {self.WHAT} found", where=str(path)) from error
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            self._read_identity()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; harmless when closed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_identity(self) -> None:
        """Check and keep what the header says, once the file is open."""
        raise NotImplementedError

    def _length(self, least: int) -> int:
        """Return the bytes of a regular file that has `least` at least."""
        info = os.fstat(self._fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size < least:
            raise self._corrupt("a regular file with a header", f"{info.st_size} bytes")
        return info.st_size

    def _pread(self, size: int, at: int) -> bytes:
        try:
            raw = os.pread(self._fd, size, at) if size else b""
        except OSError as error:
            raise self._unreadable(error) from error
        if len(raw) != size:
            raise self._corrupt(f"{size} bytes at {at}", f"{len(raw)}: the file has shrunk")
        return raw

    def _corrupt(self, wanted: str, found: str) -> CorruptError:
        return CorruptError(f"not a {self.WHAT}", where=str(self.path), wanted=wanted, found=found)

    def _unreadable(self, error: OSError) -> StoreError:
        return StoreError(
            f"a {self.WHAT} cannot be read", where=str(self.path), found=error.strerror
        )


Rows = np.ndarray[Any, Any]

_COUNTERS = Struct(f"<{len(Counter)}q")
_NS = 1e-9
_EARLIEST = 1  # 0 represents "never" in all times
_WIDER = 4  # times as many calls are read where the oldest that were read is under way


class RingHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Writer of the ring, and how its recorder is.

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
        There is no such file.
    CorruptError
        Not a regular file, of another size than it says, damaged, or of another version.
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
        """Return the rank of the ring, and its recorder's state; errors as of the class."""
        row, counters = self._identity, self.counters()
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
            shape=self._shape,
        )

    def view(self, calls: int | None = None, *, members: bool = True) -> RankView:
        """Return what the rank shows now; what only its node knows (exit code, ...) is not set.

        Parameters
        ----------
        calls
            How many of the last calls to return at most; None is all that the ring holds. A poll
            that asks for few reads few, and more only to find the oldest call that is under way,
            which is returned as well: a device is hundreds of calls behind its program.
        members
            Whether to return the ranks of the groups, which never change.

        Raises
        ------
        CorruptError, StoreError
            As of the class.
        """
        # Calls first: a call that is returned as entered is then counted by its group as well.
        counters = self.counters()
        written = _within(counters[Counter.WRITTEN], 1 << 62)
        slots = self._read_slots(written, calls)
        groups = self.group_rows()
        wanted = len(slots)
        while len(slots) and not slots["end"][0] and len(slots) < min(written, self._shape.slots):
            before, slots = len(slots), self._read_slots(written, _WIDER * len(slots))
            if len(slots) <= before:
                break
        if len(slots) > wanted:
            slots = _with_oldest_open(slots, wanted)
        counters = self.counters()
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
        """Return what the hashes in calls represent; errors as of the class."""
        used = _within(self.counters()[Counter.TEXTS], self._shape.texts)
        rows = self._rows(TEXT, self._shape.texts_at, used)
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
        groups = self.group_rows()
        slots = _known(slots, groups)
        return slots["commit"].astype(np.int64), _calls(slots, groups)

    def group_infos(self) -> tuple[tuple[int, str, str, float], ...]:
        """Return hash, name, kind and time-out (seconds, 0 is unknown) of each group of the rank.

        Errors as of the class.
        """
        rows = self.group_rows()
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
        self._identity, self._shape = row, shape

    def _read_slots(self, written: int, calls: int | None) -> Rows:
        """Return the slots of the last calls in order, without those that changed meanwhile."""
        total = self._shape.slots
        wanted = min(written, total, total if calls is None else max(calls, 0))
        begin = (written - wanted) % total
        parts = [(begin, min(wanted, total - begin))]
        parts.append((0, wanted - parts[0][1]))
        # Bytes are put together, and not tables: numpy copies tables column by column.
        first, second = (b"".join(self._slots(at, n) for at, n in parts) for _ in range(2))
        numbers = np.arange(written - wanted + 1, written + 1, dtype=np.uint64)
        # Sequence and position disagree: overwritten while read, or corrupt.
        rows, again = np.frombuffer(first, SLOT), np.frombuffer(second, SLOT)["commit"]
        whole: Rows = rows[(rows["commit"] == numbers) & (again == numbers)]
        return whole

    def _slots(self, at: int, number: int) -> bytes:
        return self._pread(SLOT.itemsize * number, HEADER_BYTES + at * SLOT.itemsize)

    def group_rows(self) -> Rows:
        """Return the table of groups as it is, `GROUP_ROW`; errors as of the class."""
        used = _within(self.counters()[Counter.GROUPS], self._shape.groups)
        return self._rows(GROUP_ROW, self._shape.groups_at, used)

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
        shape = self._shape
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
    """Return what the rank of this ring shows; see `RingReader.view` for all about it."""
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


def _with_oldest_open(slots: Rows, wanted: int) -> Rows:
    """Return the last `wanted` slots, and before them the oldest of a call under way."""
    first = len(slots) - wanted
    open_ = np.flatnonzero(slots["end"][:first] == 0)[:1]
    found: Rows = slots[np.concatenate([open_, np.arange(first, len(slots))])]
    return found


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


def _moved(counters: Sequence[int], groups: Rows) -> float:
    stamps = [counters[Counter.PHASE_SINCE], counters[Counter.STEP_SINCE], 0]
    stamps += [int(groups[name].max()) for name in ("entered_at", "completed_at") if len(groups)]
    return max(stamps) * _NS


def _phase(number: int) -> Phase:
    return Phase(number) if number in set(Phase) else Phase.TRAIN


def _within(number: int, limit: int, lowest: int = 0) -> int:
    return min(max(number, lowest), limit)


def _text(raw: bytes) -> str:
    return bytes(raw).decode(errors="replace")
