"""Versions as objects of a store: names, records, shares; who may write a place; what is deleted.

In it: sign of life of a publisher, after which silence it is gone; how often stored.

A version is there when its manifest is, which rank 0's server creates once all ranks have written
their shares. A share is one object or two: what changed since the version before in the store, and
at anchors all bytes. Each begins with an index: for each block the digest of its new bytes, and
for changes the length of its delta. What a publisher writes is below its generation, a number that
it has created a claim for: a newer generation hides all that an older one still writes.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.base.digest import DIGEST_BYTES, digest
from ckptd.decoding import Decoder, msgpack_decoder
from ckptd.errors import (
    CkptdError,
    ConflictError,
    CorruptError,
    NotFoundError,
    RefusedError,
)
from ckptd.publish.blocks import BLOCK_BYTES
from ckptd.publish.deltas import encode
from ckptd.publish.messages import PublishedAbout, PublishedTensor, StoredShare, StoreOrder
from ckptd.publish.versions import VersionTable
from ckptd.store.base import RetrySpec, Store, StoreSpec
from ckptd.types import dtype_of

U8 = NDArray[np.uint8]
T = TypeVar("T")
_log = logging.getLogger("ckptd")

CLAIMS, VERSIONS, DATA = "publishers/", "versions/", "data/"
BEAT_S = 5.0
"""Between two signs of life of a publisher, in seconds."""
GONE_S = 20.0
"""A publisher without one for so long is gone, by the clock of the one that waits."""
_TICK_S = 0.5
_ABSENT_S = 60.0
"""For so long not all ranks' servers may ask what to write, in seconds."""
_LAST_S = 900.0
"""A version is given up after so long where the trainer is gone, in seconds."""
_KEY = re.compile(r"[a-z]+/([0-9]{8})(?:-([0-9]{12}))?")
_DATA_KEY = re.compile(
    r"data/([0-9]{8})/(?:about|rank-[0-9]{8}|([0-9]{12})/[0-9]{8}-(?:full|delta))"
)


class Claim(msgspec.Struct, frozen=True):
    """A publisher of a place; `beat` rises while it lives."""

    epoch: str
    holder: str
    beat: int = 0
    ending: bool = False
    closed: bool = False


class StoredVersion(msgspec.Struct, frozen=True):
    """A manifest.

    Attributes
    ----------
    base
        The version that changes are since; 0 for none.
    at
        When it was stored, in seconds since 1970, by the publisher's clock.
    about
        Digest of the object that has the `PublishedAbout`.
    shares
        By rank.
    """

    epoch: str
    number: int
    step: int
    base: int
    at: float
    about: bytes
    shares: tuple[StoredShare, ...]


class StoredRank(msgspec.Struct, frozen=True):
    """The tensors of a rank, and the bytes of its slots."""

    nbytes: int
    tensors: tuple[PublishedTensor, ...]


CLAIM = msgpack_decoder(Claim)
VERSION = msgpack_decoder(StoredVersion)
RANK = msgpack_decoder(StoredRank)
ABOUT = msgpack_decoder(PublishedAbout)


def sealed(record: msgspec.Struct) -> bytes:
    """Return a record as it is stored: behind its digest."""
    raw = msgspec.msgpack.encode(record)
    return digest(raw) + raw


def unsealed(raw: bytes, decoder: Decoder[T], where: str) -> T:
    """Return a record; `CorruptError` where it is none."""
    if digest(raw[DIGEST_BYTES:]) != raw[:DIGEST_BYTES]:
        raise CorruptError("a record of a publisher is damaged", kind="digest", where=where)
    try:
        return decoder.decode(raw[DIGEST_BYTES:])
    except msgspec.MsgspecError as error:
        raise CorruptError(
            "a record of a publisher is of another version",
            kind="version",
            where=where,
            found=error,
        ) from None


def open_place(url: str) -> Store:
    """Open the store of a place; errors as `ckptd.store.open_store`."""
    return StoreSpec(url).wrapped(RetrySpec(deadline_s=30.0)).open()


def claim_key(generation: int) -> str:
    """Return the name of a claim."""
    return f"{CLAIMS}{generation:08d}"


def version_key(generation: int, number: int) -> str:
    """Return the name of a manifest."""
    return f"{VERSIONS}{generation:08d}-{number:012d}"


def data_key(generation: int, name: str, number: int | None = None) -> str:
    """Return the name of an object of a publisher, or of one of its versions."""
    folder = "" if number is None else f"{number:012d}/"
    return f"{DATA}{generation:08d}/{folder}{name}"


def numbers_of(key: str) -> tuple[int, int]:
    """Return generation and number that a name of a claim or manifest has."""
    found = _KEY.fullmatch(key)
    if found is None:
        raise CorruptError("an unknown object is among those of a publisher", where=key)
    return int(found[1]), int(found[2] or 0)


class BlockMap:
    """The blocks of a rank's slot, in the order of its objects.

    Attributes
    ----------
    first
        Number of the first block of each tensor.
    starts, ends
        Of the blocks, in bytes of the slot.
    sizes
        Bytes of an element.
    """

    def __init__(self, tensors: Sequence[PublishedTensor]) -> None:
        self.first: dict[str, int] = {}
        known: dict[int, int] = {}
        starts, ends, sizes, count = [], [], [], 0
        for tensor in tensors:
            size = dtype_of(tensor.dtype).itemsize
            if tensor.numel and tensor.start in known:  # tied tensors are stored once
                self.first[tensor.name] = known[tensor.start]
                continue
            at = np.arange(0, tensor.numel * size, BLOCK_BYTES, dtype=np.int64)
            self.first[tensor.name] = count
            if len(at):
                known[tensor.start] = count
            starts.append(at + tensor.start)
            ends.append(np.minimum(at + BLOCK_BYTES, tensor.numel * size) + tensor.start)
            sizes.append(np.full(len(at), size))
            count += len(at)
        self.starts, self.ends, self.sizes = (
            np.concatenate([np.empty(0, np.int64), *x]).astype(np.int64)
            for x in (starts, ends, sizes)
        )

    def __len__(self) -> int:
        return len(self.starts)

    def digests(self, found: Mapping[str, Sequence[bytes]]) -> U8:
        """Return the digests of all blocks, a row each, out of those of tensors."""
        out = np.zeros((len(self), DIGEST_BYTES), np.uint8)
        for name, first in self.first.items():
            raw = b"".join(found[name])
            rows = np.frombuffer(raw, np.uint8).reshape(-1, DIGEST_BYTES)
            out[first : first + len(rows)] = rows
        return out

    def runs(self) -> list[tuple[int, int]]:
        """Return first byte and end of what lies together in the slot."""
        new = np.flatnonzero(self.starts[1:] != self.ends[:-1]) + 1
        firsts, lasts = [0, *new.tolist()], [*new.tolist(), len(self)]
        pairs = zip(firsts, lasts, strict=True) if len(self) else ()
        return [(int(self.starts[a]), int(self.ends[b - 1])) for a, b in pairs]


class ShareWriter:
    """Writes the objects of one rank."""

    def __init__(self, store: Store, generation: int, rank: int, described: StoredRank) -> None:
        self._store = store
        self._generation = generation
        self._rank = rank
        self.blocks = BlockMap(described.tensors)
        self._nbytes = int((self.blocks.ends - self.blocks.starts).sum())
        raw = sealed(described)
        self._described = digest(raw)
        self._known: dict[int, U8] = {}
        store.put(data_key(generation, f"rank-{rank:08d}"), raw)

    def write(
        self,
        order: StoreOrder,
        new: memoryview,
        found: Mapping[str, Sequence[bytes]],
        old: memoryview | None,
    ) -> StoredShare:
        """Write what is new in a slot, and all of it where that is ordered or is less.

        Parameters
        ----------
        found
            Digests of its blocks.
        old
            The slot of the version that changes are since; None: it is gone.
        """
        digests, before = self.blocks.digests(found), self._known.get(order.base)
        deltas = None
        if old is not None and before is not None:
            deltas = self._deltas(np.frombuffer(new, np.uint8), digests, old, before)
        kept = {} if before is None else {order.base: before}
        self._known = kept | {order.number: digests}
        index = digests.tobytes()
        full = delta = 0
        if deltas is not None:
            sizes = np.array([len(d) for d in deltas], "<u4")
            delta = self._put(order.number, "delta", [index, sizes.tobytes(), b"".join(deltas)])
        if order.full or deltas is None:
            full = self._put(
                order.number, "full", [index, *(new[slice(*r)] for r in self.blocks.runs())]
            )
        self._store.sync(data_key(self._generation, "", order.number))
        return StoredShare(full, delta, digest(index), self._described)

    def _put(self, number: int, kind: str, parts: Sequence[bytes | memoryview]) -> int:
        size = sum(map(len, parts))
        key = data_key(self._generation, f"{self._rank:08d}-{kind}", number)
        with self._store.writer(key, size) as writer:
            for part in parts:
                writer.write(memoryview(part))
            writer.commit()
        return size

    def _deltas(self, new: U8, digests: U8, was: memoryview, before: U8) -> list[bytes] | None:
        """Return the change of each block; None where all bytes are hardly more."""
        old, left = np.frombuffer(was, np.uint8), self._nbytes // 2
        same = (digests == before).all(1)
        out: list[bytes] = []
        blocks = self.blocks
        for rests, start, end, size in zip(
            same, blocks.starts, blocks.ends, blocks.sizes, strict=True
        ):
            delta = b"" if rests else encode(old[start:end], new[start:end], int(size))
            out.append(delta)
            left -= len(delta)
            if left < 0:
                return None
        return out


class StoreDesk:
    """Rank 0's decisions of a place: one publisher at a time, and which version is next.

    Parameters
    ----------
    book
        Its slots: what is being stored, and what the next changes are since, is held there.
    about
        Returns what is published.
    every, keep
        An anchor is every so many versions; so many of them stay, with all versions behind.

    Raises
    ------
    CkptdError
        ``busy``: another publisher has the place. ``no-create-only``: the store cannot decide that.
    """

    def __init__(
        self,
        store: Store,
        epoch: str,
        world: int,
        book: VersionTable,
        about: Callable[[], PublishedAbout | None],
        every: int,
        keep: int,
    ) -> None:
        self._store = store
        self._world = world
        self._book = book
        self._about = about
        self._every = every
        self._anchors: deque[int] = deque(maxlen=keep)
        self._change = threading.Condition()
        self._order = StoreOrder(0)
        self._shares: dict[int, StoredShare] = {}
        self._failed = ""
        self._ranks: set[Hashable] = set()
        self._since = self._last = self._base = 0
        self._written = b""
        self._claim = Claim(epoch, f"{socket.gethostname()[:200]}:{os.getpid()}")
        self._next_beat = 0.0
        self._lost: Exception | None = None
        self.generation = 0

    # --- one publisher at a time ----------------------------------------------------------------

    def claim(self, wait_s: float) -> None:
        """Take the place; wait for a publisher that ends, or that may be dead."""
        store = self._store
        if not store.capabilities.create_only:
            raise RefusedError(
                "this store lacks atomic create-if-absent", kind="no-create-only", where=store.url
            )
        end, seen, since = time.monotonic() + wait_s, Claim("", ""), time.monotonic()
        taken = 0  # the newest generation: listings may be late, and claims deleted by hand
        while True:
            listed = [store.last(CLAIMS), store.last(VERSIONS)]
            numbers = [0 if i is None else numbers_of(i.key)[0] for i in listed]
            taken = max(taken, *numbers)
            try:
                key = claim_key(taken)
                found = unsealed(store.get(key), CLAIM, key) if taken else None
            except NotFoundError:
                found = None
                if numbers[0] == taken:  # its publisher has made a newer one meanwhile
                    if time.monotonic() > end + GONE_S:
                        raise
                    time.sleep(_TICK_S)
                    continue
            now = time.monotonic()
            if found is None or found.closed or (found == seen and now - since > GONE_S):
                taken = self._create_claim(taken)
                if taken == self.generation:
                    return
                continue
            if found != seen:
                lives = found.epoch == seen.epoch and found.beat > seen.beat
                if (lives and not found.ending) or now > end:
                    raise ConflictError(
                        "another publisher publishes to this place",
                        kind="busy",
                        where=store.url,
                        found=found.holder,
                        hint="end it, or give another place",
                    )
                seen, since = found, now
            time.sleep(_TICK_S)

    def _create_claim(self, above: int) -> int:
        """Take the next generation, and return its number; `generation` says whether it is ours."""
        try:
            self._store.put(claim_key(above + 1), sealed(self._claim), create_only=True)
        except ConflictError:
            return above + 1
        self.generation = above + 1
        return self.generation

    def _beat(self, **more: bool) -> None:
        """Give a sign of life when it is time to.

        Raises
        ------
        ConflictError
            ``superseded``: another publisher has taken the place.
        """
        if not more and time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + BEAT_S
        newest = self._store.last(CLAIMS)
        if newest is not None and numbers_of(newest.key)[0] > self.generation:
            raise self._superseded()
        self._claim = msgspec.structs.replace(self._claim, beat=self._claim.beat + 1, **more)
        self._store.put(claim_key(self.generation), sealed(self._claim))

    def _superseded(self) -> ConflictError:
        return ConflictError(
            "another publisher has taken this place, since this one gave no sign of life",
            kind="superseded",
            where=self._store.url,
            hint="create a new Publisher",
        )

    # --- ranks ----------------------------------------------------------------------------------

    def next(self, than: int, wait_s: float, asker: Hashable) -> StoreOrder:
        """Return which version above `than` a rank is to write; number 0: none in this time."""
        with self._change:
            self._ranks.add(asker)
            self._change.wait_for(lambda: self._order.number > than, wait_s)
            return self._order if self._order.number > than else StoreOrder(0)

    def done(self, rank: int, number: int, share: StoredShare | None) -> None:
        """Note that a rank has written its share, or could not."""
        with self._change:
            if number == self._order.number and share is not None:
                self._shares[rank] = share
            elif number == self._order.number:
                self._failed = f"rank {rank} could not write its share"
            self._change.notify_all()

    def gone(self, asker: Hashable) -> None:
        """Note that the connection of a rank is gone: what it writes is not known any more."""
        with self._change:
            if asker in self._ranks:
                self._ranks.discard(asker)
                self._failed = "a rank's server is gone"
                self._change.notify_all()

    # --- versions -------------------------------------------------------------------------------

    def run(self, leaving: Callable[[], bool], over: Callable[[], bool]) -> None:
        """Store versions, the newest whenever the one before is done, until the end.

        Parameters
        ----------
        leaving, over
            Whether the trainer is gone, and nothing new is going to come.
        """
        ended = threading.Event()
        keeper = threading.Thread(target=self._keep_up, args=(ended, leaving), daemon=True)
        keeper.start()
        try:
            while self._lost is None:
                found = self._book.newer(self._last, _TICK_S)
                if found is not None:
                    self._last = found[0]
                    self._store_version(*found, leaving)
                elif over():
                    break
        finally:
            ended.set()
            keeper.join()
            for number in (self._base, self._last):
                self._book.release((self, number))
        if self._lost is not None:
            raise self._lost

    def _keep_up(self, ended: threading.Event, leaving: Callable[[], bool]) -> None:
        """Give signs of life, and keep what is held, however long the store takes for the rest."""
        try:
            while not ended.is_set():
                for number in (self._base, self._last):
                    self._book.renew(number, (self, number))
                try:
                    self._beat(**({"ending": True} if leaving() and not self._claim.ending else {}))
                except ConflictError:
                    raise
                except CkptdError as error:
                    _log.warning("the place of a publisher is not reached: %s", error.message)
                ended.wait(_TICK_S)
            self._beat(closed=True)
        except Exception as error:  # noqa: BLE001 (`run` raises it)
            self._lost = error

    def _store_version(self, number: int, step: int, leaving: Callable[[], bool]) -> None:
        if not self._book.hold(number, (self, number)):
            return
        full = not self._base or self._since + 1 >= self._every
        with self._change:
            self._shares, self._failed = {}, ""
            self._order = StoreOrder(number, self._base, full, self.generation)
            self._change.notify_all()
        begun = time.monotonic()
        done = False
        while not done:
            with self._change:
                if self._lost is not None:
                    return
                if leaving() and time.monotonic() > begun + _LAST_S:
                    self._failed = "the trainer is gone, and not all of its servers answer"
                if len(self._ranks) < self._world and time.monotonic() > begun + _ABSENT_S:
                    self._failed = "not all ranks' servers ask what to write"
                done = self._change.wait_for(
                    lambda: bool(self._failed) or len(self._shares) == self._world, _TICK_S
                )
        try:
            if self._failed:
                raise CkptdError(self._failed)
            self._commit(number, step, full)
        except ConflictError:
            raise
        except CkptdError as error:
            _log.warning("version %d is not in the store: %s", number, error.message)
            self._book.release((self, number))

    def _commit(self, number: int, step: int, full: bool) -> None:
        about = self._about()
        if not self._written and about is not None:
            raw = sealed(about)
            self._store.put(data_key(self.generation, "about"), raw)
            self._written = digest(raw)
        if not self._written:
            raise CkptdError("what is published is not known yet")
        shares = tuple(self._shares[rank] for rank in range(self._world))
        epoch, base = self._claim.epoch, self._base
        raw = sealed(StoredVersion(epoch, number, step, base, time.time(), self._written, shares))
        try:
            self._store.put(version_key(self.generation, number), raw, create_only=True)
        except ConflictError:
            raise self._superseded() from None
        self._book.release((self, self._base))
        self._base, self._since = number, 0 if full else self._since + 1
        if full:
            self._anchors.append(number)
            try:
                self._trim()
            except CkptdError as error:
                _log.warning("old versions stay in the store for now: %s", error.message)

    def _trim(self) -> None:
        """Delete what is older than the oldest anchor that stays; manifests go first."""
        store, oldest = self._store, (self.generation, self._anchors[0])
        store.delete([i.key for i in store.list(VERSIONS) if numbers_of(i.key) < oldest])
        found = [_DATA_KEY.fullmatch(i.key) for i in store.list(DATA)]  # others may have some there
        store.delete([f[0] for f in found if f and (int(f[1]), float(f[2] or "inf")) < oldest])
        store.delete([i.key for i in store.list(CLAIMS) if numbers_of(i.key)[0] < oldest[0]])
