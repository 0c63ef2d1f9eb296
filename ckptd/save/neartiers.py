"""What a node keeps of its job's snapshots: memory, a folder, and the way to its peer's memory."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptd.errors import CkptdError, ConflictError, NotFoundError, SaveError, StoreError
from ckptd.format.names import DATA, CommitName, parse_data_folder
from ckptd.save.arena import CONTROL_BYTES, KEEPING, Slot
from ckptd.save.peers import KnownNode
from ckptd.save.shard import Held
from ckptd.save.tiers import NEAR, TierSpec
from ckptd.store import StoreSpec
from ckptd.store.base import (
    Capabilities,
    Names,
    ObjectInfo,
    OpenFile,
    SizedWriter,
    Store,
    Writer,
    as_bytes_view,
    check_end,
    check_key,
    check_prefix,
    children_of,
)
from ckptd.types import ByteRange

if TYPE_CHECKING:
    from ckptd.store.net import StoreServer

__all__ = ["Near", "Segments", "Shelf"]


_SPARE = 2
"""Kept for the next guests: filling fresh pages takes ten times as long."""


class Segments:
    """Segments given out and spare ones. Thread-safe.

    Attributes
    ----------
    budget
        Bytes that all of them may have together; None is as much as there is memory.
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
                found = f"{self._given / 1e9:.2f} of {self.budget / 1e9:.2f} GB in use"
                raise _no_space(f"{size / 1e9:.2f} GB", found)
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
        """Take a segment back; one that somebody may still read is not filled `again`."""
        with self._lock:
            self._given -= segment.nbytes
            if again and len(self._spare) < _SPARE:
                self._spare.append(segment)
                return
        segment.close()

    def close(self) -> None:
        """Let go of the spare ones. Idempotent."""
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

    held: Held
    at: float

    @property
    def size(self) -> int:
        return len(self.held.header) + self.held.data_bytes


@dataclass(slots=True)
class _Guest:
    """A large object of another node, in a segment of its own."""

    segment: Slot
    size: int
    at: float
    lent: bool = False
    """Somebody reads it by its descriptor: the segment must not be filled anew."""


_Object = _Small | _Own | _Guest


class Shelf(Store):
    """Own shares and guests. Thread-safe; `close` lets go of all memory."""

    capabilities = Capabilities(
        create_only=True,
        consistent_list=True,
        durable=False,
        local_files=False,
        shared=False,
        parallel=4,
        block_bytes=8 << 20,
    )

    def __init__(self, url: str = "memory://shelf") -> None:
        self.url = url
        self.options: dict[str, Any] = {}
        self._lock = threading.RLock()
        self._objects: dict[str, _Object] = {}
        self._mine: dict[tuple[str, int], Held] = {}
        """Shares of this node's ranks by folder and rank."""
        self.segments = Segments()
        """Memory of guests."""
        self._adopted: set[int] = set()

    # -- shares of this node -----------------------------------------------------------------------

    def keep(self, held: Held) -> None:
        """Put a share on the shelf, in place of what its slot held before."""
        now = time.time()
        with self._lock:
            self.forget_slot(held.slot)
            self._mine[held.save.folder, held.rank] = held
            if held.header:
                self._objects[held.key] = _Own(held, now)
            self._objects |= {key: _Small(body, now) for key, body in held.small.items()}

    def forget_slot(self, slot: Slot) -> None:
        """Take down what lies in a slot, which is about to hold something else."""
        with self._lock:
            for place, held in list(self._mine.items()):
                if held.slot is slot:
                    self._take_down(*place)

    def adopt(self, slots: Iterable[Slot]) -> None:
        """Take over the slots of a trainer that is gone: those with a share live on here."""
        with self._lock:
            kept = {id(held.slot) for held in self._mine.values() if held.is_whole}
            for slot in slots:
                if id(slot) in kept:
                    self._adopted.add(id(slot))
                else:
                    self.forget_slot(slot)
                    slot.close()

    def shares(self) -> list[Held]:
        """Return the shares of this node's ranks that are whole, oldest first."""
        with self._lock:
            whole = [held for held in self._mine.values() if held.is_whole]
        return sorted(whole, key=lambda h: (h.save.generation, h.save.step))

    # -- clearing ----------------------------------------------------------------------------------

    def folders(self) -> dict[str, tuple[CommitName, str]]:
        """Return the attempts of which something is here, by folder."""
        with self._lock:
            names = {key.split("/")[1] for key in self._objects if key.startswith(DATA)}
        found = ((f"{DATA}{name}/", parse_data_folder(name)) for name in names)
        return {folder: parsed for folder, parsed in found if parsed is not None}

    def clear_before(self, name: CommitName, *, guests: bool) -> None:
        """Take down attempts of earlier generations and steps than `name`.

        Parameters
        ----------
        guests
            Other nodes' shares, else this node's.
        """
        for folder, (other, _) in self.folders().items():
            if (other.generation, other.step) < (name.generation, name.step):
                with self._lock:
                    self._clear(folder, guests=guests)

    def clear(self, name: CommitName, *, guests: bool) -> None:
        """Take down the attempts of one step and generation; `guests` as above."""
        for folder, (other, _) in self.folders().items():
            if other == name:
                with self._lock:
                    self._clear(folder, guests=guests)

    def _clear(self, folder: str, *, guests: bool) -> None:
        for rank in self._ranks(folder):
            if ((folder, rank) in self._mine) is not guests:
                self._take_down(folder, rank)
        self._drop_shared(folder)

    def _ranks(self, folder: str) -> set[int]:
        return {rank for k in self._objects if (rank := _rank_of(k, folder)) is not None}

    def _take_down(self, folder: str, rank: int) -> None:
        for key in [k for k in self._objects if _rank_of(k, folder) == rank]:
            self._drop(key)
        held = self._mine.pop((folder, rank), None)
        if held is not None:
            self._drop_shared(folder)
            if id(held.slot) in self._adopted:
                self._adopted.discard(id(held.slot))
                held.slot.close()

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
        """Let go of everything. Idempotent."""
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
        held = None if rank is None else self._mine.get((folder, rank))
        return held is None or held.is_whole

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
        # Or it was filled anew while it was read.
        if not isinstance(found, _Small) and self._find(key) is not found:
            raise self._gone(key)

    def open_file(self, key: str) -> OpenFile | None:
        """Give the segment that holds the object; of an own share the header lies elsewhere."""
        found = self._find(key)
        with self._lock:
            if isinstance(found, _Own):
                shift = CONTROL_BYTES - len(found.held.header)
                return OpenFile(os.dup(found.held.slot.fd), shift)
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

    def children(self, prefix: str = "") -> Names:
        """Return names directly below `prefix`, sorted."""
        return children_of((info.key for info in self.list(prefix)), prefix)

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
    def __init__(self, shelf: Shelf, key: str, size: int) -> None:
        super().__init__(key, size)
        self._shelf = shelf
        self._segment: Slot | None = shelf.segments.take(size)

    def _append(self, view: memoryview) -> None:
        if self._segment is not None:
            self._segment.data[self.written : self.written + len(view)] = view

    def _finish(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            self._shelf._put_guest(self.key, segment, self.size)

    def _drop(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            self._shelf.segments.give_back(segment)


def _copy(found: _Object, offset: int, view: memoryview) -> None:
    """Fill `view` from `offset` of an object that is long enough."""
    if isinstance(found, _Small):
        view[:] = found.body[offset : offset + len(view)]
    elif isinstance(found, _Guest):
        view[:] = found.segment.data[offset : offset + len(view)]
    else:
        head = found.held.header[offset : offset + len(view)]
        view[: len(head)] = head
        start = max(0, offset - len(found.held.header))
        rest = len(view) - len(head)
        view[len(head) :] = found.held.slot.data[start : start + rest]


def _rank_of(key: str, folder: str) -> int | None:
    """Return whose share an object of an attempt is; None for what several ranks share."""
    match = _RANKED.fullmatch(key[len(folder) :]) if key.startswith(folder) else None
    return int(match[1]) if match else None


_log = logging.getLogger("ckptd")
_PEER_RETRY_S = 1.0
_LOST = 64
"""Snapshots of which it is remembered that they will never be complete."""


class Near:
    """The near tiers of one node, shared by the ranks on it. Thread-safe.

    Attributes
    ----------
    shelf
        What lies in memory, guests included.
    here
        Where trainers of this node read it; empty before `serve_here`.
    neighbours
        Nodes of which the next trainers are told, as the last ones said.
    """

    def __init__(self) -> None:
        self.shelf = Shelf()
        self.here = ""
        self.neighbours: tuple[KnownNode, ...] = ()
        self._lock = threading.RLock()
        self._arrived = threading.Condition()
        self._last_came = 0.0
        self._local: Store | None = None
        self._local_spec: StoreSpec | None = None
        self._local_keep = 1
        self._left: list[Store] = []
        self._keeping: list[str] = []
        self._peer: Store | None = None
        self._peer_of = ("", "")
        self._root_id = ""
        self._complete: dict[str, list[CommitName]] = {}
        self._lost: deque[tuple[str, CommitName]] = deque(maxlen=_LOST)
        self._used: dict[str, int] = {}
        self._key = ""
        self._servers: dict[str, StoreServer] = {}

    # -- the tiers ---------------------------------------------------------------------------------

    def prepare(self, tiers: tuple[TierSpec, ...]) -> None:
        """Open what `tiers` need. Every rank of a job names the same ones.

        Raises
        ------
        StoreError
            The folder cannot be opened.
        """
        with self._arrived:
            self._last_came = time.monotonic()
            self._arrived.notify_all()
        with self._lock:
            self._keeping = [tier.name for tier in tiers if tier.name in KEEPING]
        for tier in tiers:
            if tier.name == "peer":
                self.shelf.segments.budget = tier.budget_bytes
            if tier.store is not None:
                with self._lock:
                    self._local_keep = tier.keep
                    if tier.store == self._local_spec:
                        continue
                    if self._local is not None:  # a new life names another one
                        self._leave_local(self._local)
                    self._local, self._local_spec = tier.store.open(), tier.store

    def wait_next(self, since: float, timeout_s: float) -> bool:
        """Tell whether a trainer comes after `since` (`time.monotonic`), within `timeout_s`."""
        with self._arrived:
            return self._arrived.wait_for(lambda: self._last_came > since, timeout_s)

    def _leave_local(self, store: Store) -> None:
        """Serve a folder no more; it stays open for what is still written there."""
        self._left.append(store)
        self._complete.pop("local", None)
        server = self._servers.pop("local", None)
        if server is not None:
            server.close()

    def belongs(self, root_id: str) -> None:
        """Say of which root what comes now is; what is there of another goes.

        A root that was deleted and made anew has the same URL, and counts generations from 1.
        """
        with self._lock:
            old, self._root_id = self._root_id, root_id
            if old in ("", root_id):
                return
            self._complete.clear()
            self._lost.clear()
        _log.warning("the root is another one than it was: what is in memory of that one goes")
        self.shelf.clear_all()

    @property
    def local(self) -> Store:
        """The folder of this node."""
        if self._local is None:
            raise StoreError("this node's agent was given no folder", kind="no-tier")
        return self._local

    @property
    def peer(self) -> Store:
        """The memory of the node that keeps this one's shares.

        Raises
        ------
        StoreError
            kind ``no-peer``: no other node is known.
        """
        with self._lock:
            if self._peer is None:
                raise StoreError(
                    "no other node keeps this one's snapshots",
                    kind="no-peer",
                    hint="a job of several nodes has peers; CKPTD_NODE names a node",
                )
            return self._peer

    def set_peer(self, url: str, secret: str) -> None:
        """Say whose memory the peer tier is; an empty URL: nobody's."""
        with self._lock:
            if (url, secret) == self._peer_of:
                return
            # Not tried for long: meanwhile a slot is taken, and the next save brings another peer.
            options = {"secret": secret, "retry_s": _PEER_RETRY_S}
            old, self._peer = self._peer, StoreSpec(url, options).open() if url else None
            self._peer_of = url, secret
        if old is not None:
            old.close()

    # -- what is there -----------------------------------------------------------------------------

    @contextmanager
    def using(self, folder: str) -> Iterator[None]:
        """Keep an attempt in the folder from being deleted within the block."""
        with self._lock:
            self._used[folder] = self._used.get(folder, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                self._used[folder] -= 1
                if not self._used[folder]:
                    del self._used[folder]

    def completed(self, tier: str, name: CommitName) -> None:
        """Take in that every rank's share of a snapshot is on a tier; older ones go.

        A tier is cleared for what survives as much as it does, so that whatever may die next
        leaves one whole snapshot.
        """
        with self._lock:
            names = self._complete.setdefault(tier, [])
            if name in names:
                return
            names.append(name)
            names.sort(key=_age)
            names[:] = names[-max(8, self._local_keep) :]
        if tier == "local":
            self._clear_local()
        if tier in ("peer", "root"):
            self.shelf.clear_before(name, guests=True)
        if tier in ("memory", "peer", "root"):
            self._clear_own()

    def is_complete(self, tier: str, name: CommitName) -> bool:
        """Tell whether a snapshot is complete on a tier, as far as is known here."""
        with self._lock:
            return name in self._complete.get(tier, ())

    def lost(self, tier: str, name: CommitName) -> None:
        """Take in that a snapshot will never be complete on a tier; what guests left of it goes."""
        with self._lock:
            self._lost.append((tier, name))
        if tier == "peer" and not self.is_complete("peer", name):
            self.shelf.clear(name, guests=True)

    def is_lost(self, tier: str, name: CommitName) -> bool:
        """Tell whether a snapshot is known never to be complete on a tier."""
        with self._lock:
            return (tier, name) in self._lost

    def newest(self, tier: str) -> CommitName | None:
        """Return the newest snapshot that is complete on a tier, as far as is known here."""
        with self._lock:
            names = self._complete.get(tier)
            return names[-1] if names else None

    def complete_on(self, name: CommitName) -> tuple[str, ...]:
        """Return the near tiers on which a snapshot is complete, as far as is known here."""
        with self._lock:
            return tuple(t for t in NEAR if name in self._complete.get(t, ()))

    @property
    def folder(self) -> str | None:
        """URL of this node's folder, or None."""
        return None if self._local is None else self._local.url

    def _clear_own(self) -> None:
        """Take down own shares that no tier needs: those older than the newest complete ones.

        As long as a tier has none that is complete, what it is to have one day stays.
        """
        with self._lock:
            newest = [self.newest(tier) for tier in self._keeping]
            known = [name for name in newest if name is not None]
            bounds = [min(known, key=_age)] if known and len(known) == len(newest) else []
            root = self.newest("root")
            bounds += [] if root is None else [root]
        if bounds:
            self.shelf.clear_before(max(bounds, key=_age), guests=False)

    def _clear_local(self) -> None:
        with self._lock:
            store = self._local
            names = self._complete["local"][-self._local_keep :]
            used = set(self._used)
        if store is None or len(names) < self._local_keep:
            return
        try:
            for child in store.children(DATA):
                parsed = parse_data_folder(child)
                folder = DATA + child
                old = parsed is not None and _age(parsed[0]) < _age(names[0])
                if old and folder not in used:
                    store.sweep(folder, older_than_s=0.0)  # what a death in mid-write left
                    store.delete([info.key for info in store.list(folder)])
        except CkptdError as error:
            _log.warning("old snapshots stay in %s: %s", store.url, error.message)

    # -- other nodes -------------------------------------------------------------------------------

    def serve_here(self, path: str) -> None:
        """Let the trainers of this node read what lies in memory.

        Parameters
        ----------
        path
            Of a Unix socket: large objects are handed over as descriptors, without a copy.
        """
        self.here = self._serve("here", self.shelf, f"ckptd+unix://{path}", read_only=True)

    def serve(self, bind: str, key: str = "") -> tuple[str, str, str]:
        """Let other nodes read, and put their snapshots into this one's memory.

        A new life of the job may have another secret than the last one: its key counts from then
        on, for whoever connects.

        Parameters
        ----------
        bind
            Address of this node by which the others reach it.
        key
            What they have to know, hexadecimal; empty: one is drawn.

        Returns
        -------
        memory, local, secret
            URLs, and what opens them if it was drawn here; `local` is empty without a folder.

        Raises
        ------
        UsageError
            kind ``bad-option``: the key is none.
        """
        from ckptd.store.net import new_secret

        with self._lock:
            if key not in ("", self._key) or not self._key:
                self._key = key or new_secret()
                for server in self._servers.values():
                    server.change_secret(self._key)
        host = f"[{bind}]" if ":" in bind else bind
        url = f"ckptd://{host}:0"
        memory = self._serve("memory", self.shelf, url, allow=_guests_only)
        local = "" if self._local is None else self._serve("local", self._local, url)
        return memory, local, "" if key else self._key

    def _serve(self, name: str, store: Store, url: str, **options: Any) -> str:
        from ckptd.store.net import StoreServer

        with self._lock:
            if name not in self._servers:
                options.setdefault("read_only", name != "memory")
                self._servers[name] = StoreServer(store, url, secret=self._key, **options)
            return self._servers[name].url

    def hide(self) -> None:
        """Leave the place where trainers of this node read to the next agent. Idempotent."""
        with self._lock:
            server = self._servers.pop("here", None)
        if server is not None:
            server.close()

    def close(self) -> None:
        """Serve nobody any more and let go of everything. Idempotent."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()
        for store in (self._peer, self._local, *self._left, self.shelf):
            if store is not None:
                store.close()


def _age(name: CommitName) -> tuple[int, int]:
    return name.generation, name.step


def _guests_only(op: str, key: str) -> bool:
    """Other nodes put snapshots here, and delete nothing."""
    return op not in ("delete", "sweep") and (not key or key.startswith(DATA))
