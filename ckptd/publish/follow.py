"""Worker without a trainer's connection: reads versions from a store into mirrors of its ranks.

In it: how often it looks; sizes of requests and gaps; how many mirrors are kept; damaged objects.

For each rank of the trainer that a worker takes something of there is a *mirror*: that rank's slot
as far as the worker needs its blocks, in memory. Objects bring it to a version, each block is
proved by its digest, and the pull then reads the mirror as it reads a slot of its own host. A block
that does not come out as it should is taken whole, from the newest anchor. So neither what a worker
did to its tensors matters, nor where a pull broke off.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.base.digest import DIGEST_BYTES, digest
from ckptd.decoding import Decoder
from ckptd.errors import (
    CorruptError,
    NotFoundError,
    TransientStoreError,
    UsageError,
)
from ckptd.publish.blocks import BLOCK_BYTES
from ckptd.publish.deltas import apply
from ckptd.publish.link import HostVersion
from ckptd.publish.messages import (
    AskAbout,
    AskChanged,
    AskHold,
    AskTensors,
    ChangedBlocks,
    HoldAnswer,
    Newest,
    PublishedAbout,
    PublishedTensor,
    ServerEntry,
    StoredShare,
    TensorPlaces,
)
from ckptd.publish.pull import PullPlan, in_lanes
from ckptd.publish.stored import (
    ABOUT,
    RANK,
    VERSION,
    VERSIONS,
    BlockMap,
    StoredRank,
    StoredVersion,
    claim_key,
    data_key,
    numbers_of,
    open_place,
    unsealed,
    version_key,
)
from ckptd.store.base import Store
from ckptd.types import ByteRange, dtype_of

U8 = NDArray[np.uint8]
T = TypeVar("T")
_log = logging.getLogger("ckptd")

_LOOK_S = 1.0
"""Between two looks for a newer version, in seconds."""
_HEAD_BYTES = 1 << 20
"""Of an object, got with its index: most deltas are no longer."""
_PIECE_BYTES = 16 << 20
_GAP_BYTES = 1 << 18
"""Bytes that nobody needs, but that cost less than another request."""
_KEPT = 3
"""Versions of which a mirror keeps the digests."""


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    """Name what may be another way in a moment: a store that is away, a version that is deleted."""
    try:
        yield
    except TransientStoreError as error:
        error.kind = "link-lost"
        raise
    except NotFoundError as error:
        raise NotFoundError(
            "a version is deleted while it is read", kind="no-version", where=error.where
        ) from error


def _damaged(where: str, found: str | None = None) -> CorruptError:
    return CorruptError("a version in a store is damaged", kind="digest", where=where, found=found)


class Mirror:
    """The slot of one rank of the trainer, as far as a worker needs it; see `ckptd.publish.pull`.

    Attributes
    ----------
    number
        The version that all needed blocks are of; 0: not all are of one.
    received
        Bytes that came for it, in all.
    """

    local = True

    def __init__(self, place: StoredWeights, rank: int, described: StoredRank) -> None:
        self._place = place
        self._rank = rank
        self._tensors = {t.name: t for t in described.tensors}
        self._blocks = BlockMap(described.tensors)
        self._memory = mmap.mmap(-1, max(1, described.nbytes))
        self._data = np.frombuffer(self._memory, np.uint8, described.nbytes)
        if len(self._blocks) and int(self._blocks.ends.max()) > described.nbytes:
            raise CorruptError("a tensor is not inside its slot", where=f"rank {rank}")
        self._held = np.zeros(len(self._blocks), np.int64)
        self._needed = np.zeros(len(self._blocks), np.bool_)
        self._digests: dict[int, U8] = {}
        self._plan: PullPlan | None = None
        self._names: tuple[str, ...] = ()
        self.number = self.received = 0

    # --- as a reader of a slot ------------------------------------------------------------------

    def ask(self, question: msgspec.Struct, kind: type[T], wait_s: float | None = None) -> T:
        """Answer as the server of the rank does."""
        answer: Any = None
        if isinstance(question, AskTensors):
            absent = PublishedTensor("", "", 0, 0)
            answer = TensorPlaces(tuple(self._tensors.get(n, absent) for n in question.names))
            self._names = question.names
        elif isinstance(question, AskChanged):
            answer = self._changed(question.since, question.number)
        if not isinstance(answer, kind):
            raise UsageError("a store has no answer to that", found=type(question).__name__)
        return answer

    def _changed(self, since: int, number: int) -> ChangedBlocks:
        old, new = self._digests.get(since), self._digests.get(number)
        if old is None or new is None:
            return ChangedBlocks(False, BLOCK_BYTES, ())
        differ = (old != new).any(1)
        return ChangedBlocks(
            True,
            BLOCK_BYTES,
            tuple(np.packbits(differ[slice(*self._range(n))]).tobytes() for n in self._names),
        )

    def _range(self, name: str) -> tuple[int, int]:
        """Return the first block of a tensor, and the end of its blocks."""
        tensor, first = self._tensors[name], self._blocks.first[name]
        return first, first - -tensor.numel * dtype_of(tensor.dtype).itemsize // BLOCK_BYTES

    def map(self, number: int) -> MirroredVersion:
        """Return the memory, which is of that version."""
        return MirroredVersion(self, number, self._data)

    def reads(self, number: int, requests: object) -> Iterator[U8]:
        """Raise: what is local is mapped."""
        raise UsageError("the memory of a mirror is mapped")

    # --- objects --------------------------------------------------------------------------------

    def plan(self, plan: PullPlan) -> int:
        """Note which blocks a plan needs; return how many bytes these are."""
        if self._plan is not plan:
            self._plan = plan
            self._needed[:] = False
            for name, spans in plan.spans(self._rank):
                if name in self._tensors:
                    first, end = self._range(name)
                    size = dtype_of(self._tensors[name].dtype).itemsize
                    for lo, hi in spans:
                        last = min(end, first - -hi * size // BLOCK_BYTES)
                        self._needed[first + lo * size // BLOCK_BYTES : last] = True
        lengths = self._blocks.ends - self._blocks.starts
        return int(lengths[self._needed].sum())

    def bring_to(self, number: int) -> None:
        """Make all needed blocks those of a version.

        Raises
        ------
        CorruptError
            Objects of the version are damaged, or are those of something else.
        NotFoundError
            They are deleted.
        """
        self.number = 0
        wrong = np.flatnonzero(self._needed)
        for attempt in range(2 if len(wrong) else 0):
            try:
                for kind, version, blocks in self._steps(number):
                    self._get(kind, version, blocks)
                wrong = self._wrong(self._digests[number])
            except (CorruptError, NotFoundError):
                if attempt or not self._held.any():
                    raise
            self._held[wrong] = 0
            if not len(wrong):
                break
            if not attempt:
                _log.warning("blocks of rank %d are pulled whole: they were changed", self._rank)
        if len(wrong):
            raise _damaged(self._place.name_of(number), f"{len(wrong)} blocks of rank {self._rank}")
        self.number = number
        kept = sorted(self._digests)[-_KEPT:]
        self._digests = {n: d for n, d in self._digests.items() if n in kept}

    def _wrong(self, digests: U8) -> NDArray[np.intp]:
        needed = np.flatnonzero(self._needed)
        starts, ends = self._blocks.starts[needed].tolist(), self._blocks.ends[needed].tolist()
        raw = b"".join(digest(self._data[a:b].data) for a, b in zip(starts, ends, strict=True))
        found = np.frombuffer(raw, np.uint8).reshape(-1, DIGEST_BYTES)
        wrong: NDArray[np.bool_] = (found != digests[needed]).any(1)
        return needed[wrong]

    def _share(self, number: int) -> StoredShare:
        shares = self._place.version(number).shares
        if self._rank >= len(shares):
            raise _damaged(self._place.name_of(number), f"{len(shares)} ranks")
        return shares[self._rank]

    def _steps(self, number: int) -> Iterator[tuple[str, int, NDArray[np.bool_]]]:
        """Yield what is read, and for which blocks: from what each is of, or from an anchor."""
        chain, anchor = [], number
        while not (share := self._share(anchor)).full and share.delta:
            chain.append(anchor)
            anchor = self._place.version(anchor).base
        whole = self._share(anchor).full + sum(self._share(n).delta for n in chain)
        since: dict[int, list[int]] = {number: []}
        after, cost = [], 0
        try:
            at = number
            for held in sorted({*self._held[self._needed].tolist()} - {0}, reverse=True):
                while at > held and cost < whole and (delta := self._share(at).delta):
                    after.append(at)
                    cost += delta
                    at = self._place.version(at).base
                if at == held and cost < whole:
                    since[held] = [*after]
        except (CorruptError, NotFoundError):
            pass  # an anchor serves
        old = self._needed & ~np.isin(self._held, list(since))
        wanted: dict[int, NDArray[np.bool_]] = {}
        for held, numbers in [*since.items(), (-1, chain)]:
            blocks = old if held < 0 else self._needed & (self._held == held)
            for n in numbers:
                wanted[n] = wanted.get(n, np.zeros_like(old)) | blocks
        if old.any():
            yield "full", anchor, old
        for n in sorted(wanted):
            if wanted[n].any():
                yield "delta", n, wanted[n]

    def _get(self, kind: str, number: int, blocks: NDArray[np.bool_]) -> None:
        """Read an object, as far as some blocks need it."""
        share, count = self._share(number), len(self._blocks)
        size = share.full if kind == "full" else share.delta
        key = self._place.key_of(number, f"{self._rank:08d}-{kind}")
        lengths = self._blocks.ends - self._blocks.starts
        digests = count * DIGEST_BYTES
        index = digests if kind == "full" else digests + 4 * count
        if size < index:
            raise _damaged(key)
        first = min(size, index + _HEAD_BYTES)
        if kind == "full":  # whole blocks
            ends = index + np.cumsum(lengths)
            first = max([index, *ends[ends <= first].tolist()[-1:]])
        head = self._place.get(key, 0, first)
        self.received += len(head)
        if digest(head[:digests]) != share.digests:
            raise _damaged(key)
        self._digests[number] = np.frombuffer(head, np.uint8, digests).reshape(count, DIGEST_BYTES)
        if kind == "delta":
            lengths = np.frombuffer(head, "<u4", count, digests).astype(np.int64)
        ends = index + np.cumsum(lengths)
        if size != (int(ends[-1]) if count else index):
            raise _damaged(key)
        wanted = np.flatnonzero(blocks & (lengths > 0))
        starts = ends - lengths
        near = wanted[ends[wanted] <= len(head)]
        self._fill(number, kind, near, starts, ends, 0, memoryview(head))
        pieces = list(_pieces(wanted[len(near) :], starts, ends))

        def piece(found: NDArray[np.intp]) -> None:
            first, last = int(starts[found[0]]), int(ends[found[-1]])
            data = self._place.get(key, first, last)
            self._fill(number, kind, found, starts, ends, first, memoryview(data))

        made = [self._place.pool.submit(piece, p) for p in pieces]
        try:
            for one in made:
                one.result()
        finally:  # none of them fills a block later on, when others are in it
            for one in made:
                one.cancel()
            wait(made)
        self.received += sum(int(ends[p[-1]] - starts[p[0]]) for p in pieces)
        self._held[blocks] = number

    def _fill(
        self,
        number: int,
        kind: str,
        blocks: NDArray[np.intp],
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
        shift: int,
        data: memoryview,
    ) -> None:
        for block in blocks.tolist():
            raw = data[int(starts[block]) - shift : int(ends[block]) - shift]
            place = self._data[self._blocks.starts[block] : self._blocks.ends[block]]
            self._held[block] = 0
            if kind == "full":
                place[:] = np.frombuffer(raw, np.uint8)
                continue
            with contextlib.suppress(CorruptError):  # its digest shows it
                apply(place, raw, int(self._blocks.sizes[block]))
            self._held[block] = number


def _pieces(
    blocks: NDArray[np.intp], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> Iterator[NDArray[np.intp]]:
    """Yield blocks that are read by one request."""
    at = 0
    for here, (block, following) in enumerate(pairwise([*blocks.tolist(), -1]), 1):
        most = following < 0 or ends[following] - starts[blocks[at]] > _PIECE_BYTES
        if most or starts[following] - ends[block] > _GAP_BYTES:
            yield blocks[at:here]
            at = here


class MirroredVersion(HostVersion):
    """A mirror's memory while it is of one version; see `ckptd.publish.link.MappedVersion`."""

    def __init__(self, mirror: Mirror, number: int, data: U8) -> None:
        self._mirror = mirror
        self.number = number
        self.data = data

    @property
    def intact(self) -> bool:
        """Whether the version is in it."""
        return self._mirror.number == self.number


class StoredWeights:
    """A place in a store, to a worker what rank 0's server is.

    Attributes
    ----------
    entry
        Of the publisher whose version was found last; its address is its generation.
    pool
        Threads for requests.
    """

    local, lost = True, False

    def __init__(self, url: str) -> None:
        self._store: Store = open_place(url)
        self.entry = ServerEntry("", "", "", "")
        self.pool = ThreadPoolExecutor(self._store.capabilities.parallel, "ckptd-follow")
        self._versions: dict[int, StoredVersion] = {}
        self._mirrors: dict[int, Mirror] = {}
        self._lock = threading.Lock()

    def find(self) -> ServerEntry:
        """Return where the publisher is; see `ckptd.publish.meeting.MeetingPlace`."""
        return ServerEntry("", "", "", "")

    def at(self, entry: ServerEntry) -> StoredWeights:
        """Go to another publisher of the place, if an entry says one."""
        if entry.address and entry.epoch != self.entry.epoch:
            self.entry = entry
            self._versions, self._mirrors = {}, {}
        return self

    def get(self, key: str, start: int, end: int) -> bytes:
        """Return bytes of an object."""
        with _reached():
            return self._store.get(key, ByteRange(start, end))

    def key_of(self, number: int, name: str) -> str:
        """Return the name of an object of a version."""
        return data_key(int(self.entry.address), name, number)

    def name_of(self, number: int) -> str:
        """Return the name of a version, for people."""
        return f"{self._store.url}/{version_key(int(self.entry.address), number)}"

    def version(self, number: int) -> StoredVersion:
        """Return the manifest of a version of the publisher."""
        with self._lock, _reached():
            if number not in self._versions:
                key = version_key(int(self.entry.address or 0), number)
                found = unsealed(self._store.get(key), VERSION, key)
                at = found.epoch, found.number
                if at != (self.entry.epoch, number) or not 0 <= found.base < number:
                    raise CorruptError("a manifest is of another version", where=key)
                self._versions[number] = found
            return self._versions[number]

    def newest(self, than: int, wait_s: float, answer_s: float | None = None) -> Newest:
        """Return the newest version, if above `than` or of another publisher; wait so long."""
        end = time.monotonic() + wait_s
        while True:
            with _reached():
                info = self._store.last(VERSIONS)
                if info is not None:
                    generation, number = numbers_of(info.key)
                    if generation < int(self.entry.address or 0) and self._is_claimed():
                        info = None  # the listing is older than what was found before
                    elif str(generation) != self.entry.address:
                        found = unsealed(self._store.get(info.key), VERSION, info.key)
                        self.at(ServerEntry("", str(generation), "", found.epoch))
                        than = 0
            if info is not None and number > than:
                version = self.version(number)
                return Newest(number, version.step, max(0.0, time.time() - version.at))
            left = end - time.monotonic()
            if left <= 0:
                return Newest(0, -1)
            time.sleep(min(_LOOK_S, left))

    def _is_claimed(self) -> bool:
        """Whether the claim of the publisher is still there; else its place was emptied."""
        return self._store.exists(claim_key(int(self.entry.address)))

    def ask(self, question: msgspec.Struct, kind: type[T], wait_s: float | None = None) -> T:
        """Answer as rank 0's server does; a version needs no hold here."""
        answer: Any = HoldAnswer(True, math.inf)
        if isinstance(question, AskHold):
            self.version(question.number)
        elif isinstance(question, AskAbout):
            answer = self._about()
        if not isinstance(answer, kind):
            raise UsageError("a store has no answer to that", found=type(question).__name__)
        return answer

    def _about(self) -> PublishedAbout:
        wanted = self._versions[max(self._versions)].about
        return self._described("about", wanted, ABOUT)

    def _described(self, name: str, wanted: bytes, decoder: Decoder[T]) -> T:
        key = data_key(int(self.entry.address), name)
        with _reached():
            raw = self._store.get(key)
        if digest(raw) != wanted:
            raise _damaged(key)
        return unsealed(raw, decoder, key)

    def pull(
        self,
        plan: PullPlan,
        number: int,
        budget_bytes: int | None,
        step: Callable[[], object],
    ) -> tuple[Mapping[int, Mirror], int, int]:
        """Return mirrors of all ranks that a plan takes something of, brought to a version.

        With the bytes that came for that, and those of memory that the mirrors take.
        """
        version = self.version(number)

        def mirror(giver: int) -> Mirror:
            found = self._mirrors.get(giver)
            if found is None:
                described = version.shares[giver].described
                found = Mirror(self, giver, self._described(f"rank-{giver:08d}", described, RANK))
            return found

        lanes: Sequence[Callable[[], Mirror]] = [partial(mirror, g) for g in plan.givers]
        stop = threading.Event()
        self._mirrors = dict(zip(plan.givers, in_lanes(lanes, stop), strict=True))
        needed = sum(m.plan(plan) for m in self._mirrors.values())
        if budget_bytes is not None and needed > budget_bytes:
            raise UsageError(
                "what a worker keeps of a version in a store does not fit budget_bytes",
                wanted=f"budget_bytes of at least {needed}",
                found=f"{budget_bytes} bytes",
            )
        before = sum(m.received for m in self._mirrors.values())

        def bring(found: Mirror) -> None:
            found.bring_to(number)
            step()

        in_lanes([partial(bring, m) for m in self._mirrors.values()], stop)
        oldest = min(self._versions, default=0)
        if number - oldest > 64:
            self._versions = {n: v for n, v in self._versions.items() if n > number - 64}
        return self._mirrors, sum(m.received for m in self._mirrors.values()) - before, needed

    def close(self) -> None:
        """Do nothing: what is mirrored is of use with the next version. See `end`."""

    def end(self) -> None:
        """Release connections and memory. Idempotent."""
        self.pool.shutdown()
        self._mirrors = {}
        self._store.close()
