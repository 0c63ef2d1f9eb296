"""Snapshots in a node's memory, as a store: own ranks' shares, guests of other nodes."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ckptd.checkpoint.format.names import DATA, CommitName, parse_data_folder
from ckptd.checkpoint.save.arena import CONTROL_BYTES, Slot
from ckptd.checkpoint.save.drain import StagedShard
from ckptd.errors import ConflictError, NotFoundError, SaveError, StoreError, size_text
from ckptd.store.base import (
    ObjectInfo,
    OpenFile,
    SizedWriter,
    Store,
    Writer,
    as_bytes_view,
    check_end,
    check_key,
    check_prefix,
)
from ckptd.store.memory import MemoryStore
from ckptd.types import ByteRange

_SPARE = 2
"""Segments kept for the next guests: filling fresh pages takes ten times as long."""


class GuestMemory:
    """Segments for other nodes' snapshots: those in use, and spare ones. Thread-safe.

    Attributes
    ----------
    budget
        Bytes that segments in use may have together; None: as much as there is memory.
    """

    def __init__(self) -> None:
        self.budget: int | None = None
        self._lock = threading.Lock()
        self._spare: list[Slot] = []
        self._given = 0

    def take(self, size: int) -> Slot:
        """Return a segment of at least `size` bytes.

        Raises
        ------
        StoreError
            kind ``no-space``: there is no memory for it, or it is beyond the budget.
        """
        with self._lock:
            fitting = [s for s in self._spare if s.nbytes >= size]
            if fitting:
                best = min(fitting, key=lambda s: s.nbytes)
                self._spare.remove(best)
                self._given += best.nbytes
                return best
            self._close_spare()  # too small for what comes now
            if self.budget is not None and self._given + size > self.budget:
                found = f"{size_text(self._given)} of {size_text(self.budget)} in use"
                raise _no_space(size_text(size), found)
            self._given += size
        segment = None
        try:
            segment = Slot(0, size)
            segment.allocate()  # it is filled from a connection, where it lies
            return segment
        except SaveError as error:
            if segment is not None:
                segment.close()
            with self._lock:
                self._given -= size
            raise _no_space(error.wanted, error.found) from error

    def give_back(self, segment: Slot, *, again: bool = True) -> None:
        """Take a segment back; one that may still be read is not filled `again`."""
        with self._lock:
            self._given -= segment.nbytes
            if again and len(self._spare) < _SPARE:
                self._spare.append(segment)
                return
        segment.close()

    def close(self) -> None:
        """Free the spare segments. Idempotent."""
        with self._lock:
            self._close_spare()

    def _close_spare(self) -> None:
        for segment in self._spare:
            segment.close()
        self._spare.clear()


def _no_space(wanted: str | None, found: str | None) -> StoreError:
    return StoreError(
        "no memory for another node's snapshot",
        kind="no-space",
        wanted=wanted,
        found=found,
        hint="leave more memory on the nodes, give Peer() a larger budget_bytes, or leave it out",
    )


_RANKED = re.compile(r"(?:parts/)?r([0-9]{5,8})(?:\.safetensors|\.digests)?")


@dataclass(frozen=True, slots=True)
class _Small:
    body: bytes
    at: float

    @property
    def size(self) -> int:
        return len(self.body)


@dataclass(frozen=True, slots=True)
class _Own:
    """The data file of a rank of this node."""

    shard: StagedShard
    at: float

    @property
    def size(self) -> int:
        return len(self.shard.header) + self.shard.data_bytes


@dataclass(slots=True)
class _Guest:
    """A large object of another node, in a segment of its own."""

    segment: Slot
    size: int
    at: float
    lent: bool = False
    """Its descriptor was handed to a reader: the segment must not be filled again."""


_Object = _Small | _Own | _Guest


class AgentMemoryStore(Store):
    """Own shares and guests. Thread-safe; `close` releases all memory."""

    capabilities = MemoryStore.capabilities
    url = "memory://agent"

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self._lock = threading.RLock()
        self._objects: dict[str, _Object] = {}
        self._mine: dict[tuple[str, int], StagedShard] = {}
        """Shares of this node's ranks by folder and rank."""
        self.segments = GuestMemory()
        """Memory of guests."""
        self._adopted: set[int] = set()

    # -- shares of this node -----------------------------------------------------------------------

    def keep(self, shard: StagedShard) -> None:
        """Put a share in memory, in place of what its slot shard before."""
        now = time.time()
        with self._lock:
            self.forget_slot(shard.slot)
            self._mine[shard.save.folder, shard.plan.rank] = shard
            if shard.header:
                self._objects[shard.key] = _Own(shard, now)
            self._objects |= {key: _Small(body, now) for key, body in shard.small.items()}

    def forget_slot(self, slot: Slot) -> None:
        """Take down what lies in a slot, which is about to hold something else."""
        with self._lock:
            for place, shard in list(self._mine.items()):
                if shard.slot is slot:
                    self._take_down(*place)

    def adopt(self, slots: Iterable[Slot]) -> None:
        """Take over the slots of a trainer that is gone: those with a share live on here."""
        with self._lock:
            kept = {id(shard.slot) for shard in self._mine.values() if shard.is_whole}
            for slot in slots:
                if id(slot) in kept:
                    self._adopted.add(id(slot))
                else:
                    self.forget_slot(slot)
                    slot.close()

    def shares(self) -> list[StagedShard]:
        """Return the shares of this node's ranks that are whole, oldest first."""
        with self._lock:
            whole = [shard for shard in self._mine.values() if shard.is_whole]
        return sorted(whole, key=lambda h: (h.save.generation, h.save.step))

    # -- clearing ----------------------------------------------------------------------------------

    def folders(self) -> dict[str, tuple[CommitName, str]]:
        """Return the attempts of which something is here, by folder."""
        with self._lock:
            names = {key.split("/")[1] for key in self._objects if key.startswith(DATA)}
        found = ((f"{DATA}{name}/", parse_data_folder(name)) for name in names)
        return {folder: parsed for folder, parsed in found if parsed is not None}

    def clear(self, old: Callable[[CommitName], bool], *, guests: bool) -> None:
        """Take down the attempts that are `old`.

        Parameters
        ----------
        guests
            Other nodes' shares, else this node's.
        """
        for folder in [f for f, (name, _) in self.folders().items() if old(name)]:
            with self._lock:
                for rank in self._ranks(folder):
                    if ((folder, rank) in self._mine) is not guests:
                        self._take_down(folder, rank)
                self._drop_shared(folder)

    def _ranks(self, folder: str) -> set[int]:
        return {rank for k in self._objects if (rank := _rank_of(k, folder)) is not None}

    def _take_down(self, folder: str, rank: int) -> None:
        for key in [k for k in self._objects if _rank_of(k, folder) == rank]:
            self._drop(key)
        shard = self._mine.pop((folder, rank), None)
        if shard is not None:
            self._drop_shared(folder)
            if id(shard.slot) in self._adopted:
                self._adopted.discard(id(shard.slot))
                shard.slot.close()

    def _drop_shared(self, folder: str) -> None:
        """Drop what the ranks of an attempt share, once nothing of any rank is left."""
        if not self._ranks(folder):
            for key in [k for k in self._objects if k.startswith(folder)]:
                self._drop(key)

    def _drop(self, key: str) -> None:
        with self._lock:
            found = self._objects.pop(key, None)
            if isinstance(found, _Guest):
                self.segments.give_back(found.segment, again=not found.lent)

    def clear_all(self) -> None:
        """Take down everything."""
        with self._lock:
            for place in list(self._mine):
                self._take_down(*place)
            for key in list(self._objects):
                self._drop(key)

    def close(self) -> None:
        """Free all shares, guests and spare segments. Idempotent."""
        with self._lock:
            self.clear_all()
            self.segments.close()

    # -- the store ---------------------------------------------------------------------------------

    def _find(self, key: str) -> _Object:
        check_key(key)
        with self._lock:
            found = self._objects.get(key)
            if not self._is_whole(key):
                found = None
        if found is None:
            raise self._gone(key)
        return found

    def _gone(self, key: str) -> NotFoundError:
        return NotFoundError("no such object", where=f"{self.url}/{key}")

    def _is_whole(self, key: str) -> bool:
        """Tell whether what a key of an own share belongs to is still there."""
        folder = key[: key.find("/", len(DATA)) + 1]
        rank = _rank_of(key, folder)
        shard = None if rank is None else self._mine.get((folder, rank))
        return shard is None or shard.is_whole

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """Return the whole object, or exactly `byte_range` of it."""
        found = self._find(key)
        span = byte_range or ByteRange(0, found.size)
        check_end(f"{self.url}/{key}", span.end, found.size)  # before it is allocated
        if isinstance(found, _Small):
            return found.body[span.start : span.end]
        buffer = bytearray(span.end - span.start)
        self._fill(key, found, span.start, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` of the object."""
        self._fill(key, self._find(key), offset, as_bytes_view(buffer))

    def _fill(self, key: str, found: _Object, offset: int, view: memoryview) -> None:
        check_end(f"{self.url}/{key}", offset + len(view), found.size)
        try:
            _copy(found, offset, view)
        except ValueError:  # its memory was given back meanwhile
            raise self._gone(key) from None
        # Or it was filled again while it was read.
        if not isinstance(found, _Small) and self._find(key) is not found:
            raise self._gone(key)

    def open_file(self, key: str) -> OpenFile | None:
        """Give the segment that holds the object; of an own share the header lies elsewhere."""
        found = self._find(key)
        with self._lock:
            if isinstance(found, _Own):
                shift = CONTROL_BYTES - len(found.shard.header)
                return OpenFile(os.dup(found.shard.slot.fd), shift)
            if isinstance(found, _Guest):
                found.lent = True
                return OpenFile(os.dup(found.segment.fd), CONTROL_BYTES)
        return None

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Keep a copy of `data`."""
        check_key(key)
        with self._lock:
            if create_only and key in self._objects:
                raise ConflictError(
                    "the object exists already", kind="exists", where=f"{self.url}/{key}"
                )
            self._drop(key)
            self._objects[key] = _Small(bytes(data), time.time())

    def writer(self, key: str, size: int) -> Writer:
        """Begin a guest of exactly `size` bytes, for which there must be memory."""
        return _GuestWriter(self, check_key(key), size)

    def _put_guest(self, key: str, segment: Slot, size: int) -> None:
        with self._lock:
            self._drop(key)
            self._objects[key] = _Guest(segment, size, time.time())

    def stat(self, key: str) -> ObjectInfo:
        """Return size and time of one object."""
        found = self._find(key)
        return ObjectInfo(key, found.size, found.at)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below `prefix`, in key order; shares that are no longer whole not."""
        check_prefix(prefix)
        with self._lock:
            found = sorted(
                (k, o.size, o.at)
                for k, o in self._objects.items()
                if k.startswith(prefix) and self._is_whole(k)
            )
        for key, size, at in found:
            yield ObjectInfo(key, size, at)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; one that is gone already is no error."""
        checked = [check_key(k) for k in keys]
        with self._lock:
            for key in checked:
                self._drop(key)

    def sync(self, prefix: str) -> None:
        """Do nothing: memory has no durability to wait for."""
        check_prefix(prefix)


class _GuestWriter(SizedWriter):
    def __init__(self, memory: AgentMemoryStore, key: str, size: int) -> None:
        super().__init__(key, size)
        self._memory = memory
        self._segment: Slot | None = memory.segments.take(size)

    def _append(self, view: memoryview) -> None:
        if self._segment is not None:
            self._segment.data[self.written : self.written + len(view)] = view

    def _finish(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            self._memory._put_guest(self.key, segment, self.size)

    def _drop(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            self._memory.segments.give_back(segment)


def _copy(found: _Object, offset: int, view: memoryview) -> None:
    """Fill `view` from `offset` of an object that is long enough."""
    if isinstance(found, _Small):
        view[:] = found.body[offset : offset + len(view)]
    elif isinstance(found, _Guest):
        view[:] = found.segment.data[offset : offset + len(view)]
    else:
        head = found.shard.header[offset : offset + len(view)]
        view[: len(head)] = head
        start = max(0, offset - len(found.shard.header))
        rest = len(view) - len(head)
        view[len(head) :] = found.shard.slot.data[start : start + rest]


def _rank_of(key: str, folder: str) -> int | None:
    """Return whose share an object of an attempt is; None for what several ranks share."""
    match = _RANKED.fullmatch(key[len(folder) :]) if key.startswith(folder) else None
    return int(match[1]) if match else None
