"""The ring of a rank: what it did last, in a file that outlives it and that others may read.

The rank writes with plain stores into shared memory: no system call, no lock, nothing that waits.
Whoever reads does not trust a byte of it, and needs nothing of the rank: a ring can be read while
the rank is stopped, holds the GIL, spins or is dead. See `ckptd.monitor.ring.layout` for the bytes.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from struct import Struct

import numpy as np

from ckptd.errors import StoreError, UsageError
from ckptd.monitor.ring.layout import (
    COUNTER,
    GROUP_ROW,
    HEADER_BYTES,
    IDENTITY,
    MAGIC,
    SLOT,
    TEXT,
    VERSION,
    Counter,
    RecorderState,
    RingShape,
    text_hash,
)
from ckptd.monitor.view import CallFlag, Phase

__all__ = ["RingGroup", "RingIdentity", "RingWriter", "process_birth", "reserve"]

_BODY = Struct("<QQqIIIiiIHBBI")  # SLOT without its commit index
_pack_body = _BODY.pack_into
_now = time.monotonic_ns
_GROUP_HEAD = Struct("<QIIii")
_MOST_TIMEOUT_S = 1e9
_WORD = 8
_SLOT_WORDS = SLOT.itemsize // _WORD
_GROUP_WORDS = GROUP_ROW.itemsize // _WORD
_END_WORD = 2
_FLAGS_BYTE = 58
_ENTERED_AT, _COMPLETED_AT, _ENTERED, _COMPLETED = 3, 4, 5, 6
# Every call passes by these; a member of an enum takes longer to look up, and to index with.
_SLOTS_WORD = HEADER_BYTES // _WORD
_WRITTEN, _FAILED = Counter.WRITTEN.value, CallFlag.FAILED.value


@dataclass(frozen=True, slots=True, kw_only=True)
class RingIdentity:
    """Whose ring it is.

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
        """Take counts that somebody else made."""
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
        kind ``bad-ring``: the shape is out of bounds, or this machine is big-endian.
    """

    def __init__(self, path: Path, identity: RingIdentity, shape: RingShape | None = None) -> None:
        self.path = path
        self.identity = identity
        self.shape = shape or RingShape()
        if sys.byteorder != "little" or not self.shape.fits():
            raise UsageError(
                "a ring cannot be made like this",
                kind="bad-ring",
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
    ) -> None:
        """Write down that a call has ended, now or `at` that time in nanoseconds.

        A slot that serves another call is left alone.
        """
        now = _now() if at is None else at
        word = _SLOTS_WORD + (number - 1) % self._slots * _SLOT_WORDS
        if self._words[word] == number:
            if failed:
                self._bytes[word * _WORD + _FLAGS_BYTE] |= _FAILED
            self._words[word + _END_WORD] = now
        group.complete(seq, now)

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
        """What the rank is about."""
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
