"""`Pack`: data files compressed as byte planes under zstd: format, threads, when it is worth it.

In it: size of a frame; levels; the most threads; frames kept; after which stall it fails.

The packed form of ``KEY`` is the object ``KEY.zp``. Readers look for it only when there is no
``KEY``, so that plain roots pay nothing and packed ones need not be announced.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from ckptd.base.runtime.pool import cores
from ckptd.errors import ConflictError, CorruptError, NotFoundError, TransientStoreError, UsageError
from ckptd.store import base
from ckptd.types import ByteRange

FRAME_BYTES = 1 << 20
"""Logical bytes of a frame: what one digest covers, so that a block is checked from one frame."""
RAW, ZSTD = 0, 1
WIDTHS = (1, 2, 4, 8)
_WORTH = 0.95  # of the bytes, at most; else the frame is stored as it is
_ALIKE = 1.01
_SLICES, _SLICE_BYTES = 8, 4096
_local = threading.local()  # contexts of zstd serve one thread each

# A plane of exponents is skewed and has no repeats: looking for short ones costs time, and those
# that are found by chance take more room than the entropy coder needs. So level 1 looks for long
# ones only, in a small table: about twice as fast on planes as zstd's own level 1, and no larger.
_FOR_PLANES = zstandard.ZstdCompressionParameters(
    window_log=20, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=8
)

_U8 = NDArray[np.uint8]


class PackFrame(msgspec.Struct, frozen=True):
    """A frame as it is stored.

    Attributes
    ----------
    data
        The stored bytes.
    codec
        `RAW` or `ZSTD`.
    width
        Number of byte planes, of `WIDTHS`; 1 for a raw frame.
    check
        XXH3-64 of `data`.
    """

    data: bytes | memoryview
    codec: int
    width: int
    check: int


def encode_frame(view: memoryview, level: int) -> PackFrame:
    """Pack at most `FRAME_BYTES` bytes; stored as they are where packing saves less than 5 %."""
    raw = np.frombuffer(view, np.uint8)
    width = _best_width(raw, level)
    if width:
        data = _compressor(level).compress(_planes(raw, width).data)
        if len(data) <= _WORTH * len(raw):
            return PackFrame(data, ZSTD, width, xxhash.xxh3_64_intdigest(data))
    return PackFrame(view, RAW, 1, xxhash.xxh3_64_intdigest(view))


def decode_frame(frame: PackFrame, out: memoryview, where: str) -> None:
    """Fill `out`, which is as long as the frame's logical bytes.

    Raises
    ------
    CorruptError
        The bytes are not what was stored, or do not give `out`.
    """
    if xxhash.xxh3_64_intdigest(frame.data) != frame.check:
        raise CorruptError("a frame is not what was stored", where=where)
    if frame.codec == RAW:
        if len(frame.data) != len(out):
            raise _wrong_length(where, len(out), len(frame.data))
        out[:] = frame.data
        return
    _from_planes(np.frombuffer(_expand(frame.data, len(out), where), np.uint8), frame.width, out)


def _expand(data: bytes | memoryview, size: int, where: str) -> bytes:
    try:
        # Claimed by the data themselves: to be compared before that much is allocated.
        claimed = zstandard.get_frame_parameters(data).content_size
        if claimed != size:
            raise _wrong_length(where, size, claimed)
        found = _decompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptError("a frame does not decompress", where=where, found=error) from None
    if len(found) != size:
        raise _wrong_length(where, size, len(found))
    return found


def _wrong_length(where: str, wanted: int, found: int) -> CorruptError:
    return CorruptError(
        "a frame has the wrong length",
        where=where,
        wanted=f"{wanted} bytes",
        found=f"{found} bytes",
    )


def _best_width(raw: _U8, level: int) -> int:
    """Return the number of planes that packs a sample best; 0 where none packs it."""
    sample = _sample(raw)
    if not len(sample):
        return 0
    sizes = [_plane_sizes(sample, width, level) for width in WIDTHS]
    least = min(sizes)
    if least > _WORTH * len(sample) + 64:
        return 0
    # The fewest planes of those that do about as well: they are the quickest.
    return next(w for w, size in zip(WIDTHS, sizes, strict=True) if size <= _ALIKE * least)


def _plane_sizes(sample: _U8, width: int, level: int) -> int:
    """Return the bytes of all planes, packed one by one: in a frame each fills its own blocks."""
    step = -(-len(sample) // width)
    data, packer = _planes(sample, width).data, _compressor(level)
    return sum(len(packer.compress(data[i : i + step])) for i in range(0, len(sample), step))


def _sample(raw: _U8) -> _U8:
    """Return pieces from all over the frame; each begins at a multiple of every width."""
    if len(raw) <= _SLICES * _SLICE_BYTES:
        return raw
    step = (len(raw) - _SLICE_BYTES) // (_SLICES - 1) // 8 * 8
    return np.concatenate([raw[i * step : i * step + _SLICE_BYTES] for i in range(_SLICES)])


def _planes(raw: _U8, width: int) -> _U8:
    """Return the bytes plane by plane; what is left of a last number follows as it is."""
    count = len(raw) // width
    if width == 1 or not count:
        return raw
    out = np.empty(len(raw), np.uint8)
    planes = out[: count * width].reshape(width, count)
    # Shifts and narrowing are vector instructions; copies with a stride are not.
    words = raw[: count * width].view(f"<u{width}")
    for i in range(width):
        np.copyto(planes[i], words >> words.dtype.type(8 * i), casting="unsafe")
    out[count * width :] = raw[count * width :]
    return out


def _from_planes(data: _U8, width: int, out: memoryview) -> None:
    target = np.frombuffer(out, np.uint8)
    count = len(data) // width
    if width == 1 or not count:
        target[:] = data
        return
    planes = data[: count * width].reshape(width, count)
    words = np.empty(count, f"<u{width}")
    words[:] = planes[width - 1]
    for i in range(width - 2, -1, -1):
        np.left_shift(words, words.dtype.type(8), out=words)
        np.bitwise_or(words, planes[i], out=words)
    target[: count * width] = words.view(np.uint8)
    target[count * width :] = data[count * width :]


def _compressor(level: int) -> zstandard.ZstdCompressor:
    kept: dict[int, zstandard.ZstdCompressor] = _local.__dict__.setdefault("packers", {})
    if level not in kept:
        kept[level] = (
            zstandard.ZstdCompressor(compression_params=_FOR_PLANES)
            if level == 1
            else zstandard.ZstdCompressor(level=level)
        )
    return kept[level]


def _decompressor() -> zstandard.ZstdDecompressor:
    found: zstandard.ZstdDecompressor | None = getattr(_local, "expander", None)
    if found is None:
        found = _local.expander = zstandard.ZstdDecompressor(max_window_size=FRAME_BYTES)
    return found


_VERSION = 1
_MAGIC = b"CKPTPAK1"
_END_MAGIC = b"CKPTPAKE"
HEADER = struct.pack("<8sII", _MAGIC, _VERSION, FRAME_BYTES)
_TRAILER = struct.Struct("<IIQQQ16s8s")
_SUMMED = _TRAILER.size - 24  # what of the trailer the digest covers
_ROW = np.dtype(
    [("stored", "<u4"), ("codec", "u1"), ("width", "u1"), ("zero", "<u2"), ("check", "<u8")]
)
_TAIL_BYTES = 64 << 10  # read at once: trailer and table of 4 GiB
_LEAD_MOST = 100_000_000  # bytes of the longest header that readers of safetensors accept


def lead_of(first: bytes, size: int) -> int:
    """Return where the frames of the data begin: behind the header that `first` announces.

    Parameters
    ----------
    first
        The first eight bytes of the object, which in safetensors are the length of its header.
    size
        Bytes of the object.
    """
    lead = 8 + int.from_bytes(first[:8], "little")
    return lead if len(first) >= 8 and lead <= min(size, _LEAD_MOST) else 0


def frame_end(at: int, lead: int, size: int) -> int:
    """Return where the frame that begins at `at` ends."""
    return min(at + FRAME_BYTES, lead if at < lead else size, size)


def bound(size: int) -> int:
    """Return the bytes that packing `size` bytes takes at most."""
    return len(HEADER) + size + (size // FRAME_BYTES + 2) * _ROW.itemsize + _TRAILER.size


def table_bytes(size: int, lead: int, frames: Sequence[tuple[int, int, int, int]]) -> bytes:
    """Return table and trailer for frames of (stored length, codec, width, check)."""
    rows = np.array([(s, c, w, 0, k) for s, c, w, k in frames], dtype=_ROW).tobytes()
    head = _TRAILER.pack(_VERSION, FRAME_BYTES, size, lead, len(frames), bytes(16), _END_MAGIC)
    summed = xxhash.xxh3_128_digest(rows + head[:_SUMMED])
    return rows + head[:_SUMMED] + summed + _END_MAGIC


class PackTable(msgspec.Struct, frozen=True):
    """Where the frames of one packed object are.

    Attributes
    ----------
    size
        Logical bytes.
    lead
        Where the data begin that digests cover: frames are counted from there.
    offsets
        Of the stored frames in the object; one more than there are frames.
    rows
        Codec, width and check of each frame.
    digest
        Of table and trailer: names this very object.
    stored, modified
        Bytes of the packed object, and when it was written.
    """

    size: int
    lead: int
    offsets: NDArray[np.int64]
    rows: NDArray[np.void]
    digest: bytes
    stored: int
    modified: float

    def index(self, at: int) -> int:
        """Return the number of the frame that holds logical byte `at`."""
        if at < self.lead:
            return at // FRAME_BYTES
        return -(-self.lead // FRAME_BYTES) + (at - self.lead) // FRAME_BYTES

    def span(self, index: int) -> tuple[int, int]:
        """Return the logical bytes of frame `index`: first, and one behind the last."""
        before = -(-self.lead // FRAME_BYTES)
        start = index * FRAME_BYTES
        if index >= before:
            start = self.lead + (index - before) * FRAME_BYTES
        return start, frame_end(start, self.lead, self.size)

    def frame(self, index: int, data: memoryview) -> PackFrame:
        """Return frame `index`, whose stored bytes are `data`."""
        row = self.rows[index]
        return PackFrame(data, int(row["codec"]), int(row["width"]), int(row["check"]))


def load_table(
    where: str, stored: int, modified: float, read: Callable[[int, int], bytes]
) -> PackTable:
    """Read and check the table of a packed object of `stored` bytes.

    Parameters
    ----------
    read
        Gives the bytes from its first argument up to its second.

    Raises
    ------
    CorruptError
        No whole packed object, or its table breaks a rule; kind ``version``.
    """
    start = max(0, stored - _TAIL_BYTES)
    tail = read(start, stored)
    if len(tail) < len(HEADER) + _TRAILER.size and start == 0:
        raise _bad("too short", where, stored)
    version, unit, size, lead, count, digest, magic = _TRAILER.unpack(tail[-_TRAILER.size :])
    if magic != _END_MAGIC:
        raise _bad("unfinished, or not a packed object", where, magic)
    if version != _VERSION or unit != FRAME_BYTES:
        raise CorruptError(
            "packed by a newer ckptd", kind="version", where=where, wanted=_VERSION, found=version
        )
    room = stored - len(HEADER) - _TRAILER.size
    if lead > size or count != _frame_count(size, lead) or count * _ROW.itemsize > room:
        raise _bad("impossible sizes", where, f"{size} bytes, {lead} first, {count} frames")
    begin = stored - _TRAILER.size - count * _ROW.itemsize
    raw = tail[begin - start :] if begin >= start else read(begin, start) + tail
    if xxhash.xxh3_128_digest(raw[:-24]) != digest:
        raise _bad("the table is not what was written", where, digest.hex())
    rows = np.frombuffer(raw, _ROW, count)
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(rows["stored"], out=offsets[1:])
    offsets += len(HEADER)
    table = PackTable(size, lead, offsets, rows, digest, stored, modified)
    _check_rows(table, begin, where)
    return table


def _frame_count(size: int, lead: int) -> int:
    return -(-lead // FRAME_BYTES) + -(-(size - lead) // FRAME_BYTES)


def _check_rows(table: PackTable, end: int, where: str) -> None:
    """Check every frame's lengths, so that reading one allocates no more than a frame."""
    rows, count = table.rows, len(table.rows)
    before = -(-table.lead // FRAME_BYTES)
    logical = np.full(count, FRAME_BYTES, np.int64)
    for last in {before - 1, count - 1} & set(range(count)):
        start, stop = table.span(last)
        logical[last] = stop - start
    raw, packed = rows["codec"] == RAW, rows["codec"] == ZSTD
    fits = np.where(raw, rows["stored"] == logical, rows["stored"] < logical)
    known = (raw | packed) & np.isin(rows["width"], WIDTHS) & (rows["zero"] == 0)
    if not (fits & known & (rows["stored"] > 0)).all() or table.offsets[-1] != end:
        raise _bad("the frames do not fill the object", where, f"{count} frames")


def _bad(what: str, where: str, found: object) -> CorruptError:
    return CorruptError(f"a packed object: {what}", where=where, found=found)


_T = TypeVar("_T")

_MOST_FRAMES = 1 << 21  # of all tables that are kept: 24 bytes each
_GROUP_BYTES = 32 << 20  # stored bytes of one read
_RECENT = 16  # frames that were read in part and are kept, whole


class PackReader:
    """Reads packed objects of `inner` by their physical names; thread-safe.

    Parameters
    ----------
    pool
        Gives the threads that unpack.
    """

    def __init__(self, inner: base.Store, pool: Callable[[], ThreadPoolExecutor]) -> None:
        self._inner = inner
        self._pool = pool
        self._lock = threading.Lock()
        self._tables: OrderedDict[str, PackTable] = OrderedDict()
        self._frames = 0
        # Many small tensors lie in one frame, and are read one by one.
        self._recent: OrderedDict[tuple[bytes, int], memoryview] = OrderedDict()

    # -- tables ----------------------------------------------------------------------------------

    def knows(self, name: str) -> bool:
        """Tell whether the table of `name` was read before."""
        return name in self._tables

    def forget(self, name: str) -> None:
        """Drop what is known of `name`."""
        with self._lock:
            table = self._tables.pop(name, None)
            if table is not None:
                self._frames -= len(table.rows)

    def table(self, name: str, info: base.ObjectInfo | None = None) -> PackTable:
        """Return the table of `name`; `info`, where known, saves asking for the size.

        Raises
        ------
        NotFoundError, CorruptError
        """
        with self._lock:
            kept = self._tables.get(name)
            if kept is not None:
                self._tables.move_to_end(name)
        if kept is not None and (
            info is None or (info.size, info.modified) == (kept.stored, kept.modified)
        ):
            return kept
        return self._load(name, info or self._inner.stat(name))

    def _load(self, name: str, info: base.ObjectInfo) -> PackTable:
        table = load_table(
            f"{self._inner.url}/{name}",
            info.size,
            info.modified,
            lambda start, end: self._inner.get(name, ByteRange(start, end)),
        )
        self.forget(name)
        with self._lock:
            self._tables[name] = table
            self._frames += len(table.rows)
            while self._frames > _MOST_FRAMES and len(self._tables) > 1:
                self._frames -= len(self._tables.popitem(last=False)[1].rows)
        return table

    # -- bytes -----------------------------------------------------------------------------------

    def read(self, name: str, offset: int, view: memoryview) -> None:
        """Fill `view` from logical byte `offset`.

        Raises
        ------
        NotFoundError, CorruptError
        """
        self._with_table(name, lambda table: self._fill(name, table, offset, view))

    def get(self, name: str, byte_range: ByteRange | None) -> bytes:
        """Return all logical bytes, or exactly `byte_range`; errors as `read`."""

        def act(table: PackTable) -> bytes:
            start, end = (byte_range.start, byte_range.end) if byte_range else (0, table.size)
            base.check_end(f"{self._inner.url}/{name}", end, table.size)  # before it is allocated
            data = bytearray(end - start)
            self._fill(name, table, start, memoryview(data))
            return bytes(data)

        return self._with_table(name, act)

    def _with_table(self, name: str, act: Callable[[PackTable], _T]) -> _T:
        """Do `act`; again where the table was an old one, of an object that was replaced since."""
        known = self.knows(name)
        table = self.table(name)
        try:
            return act(table)
        except CorruptError:
            again = self._load(name, self._inner.stat(name)) if known else table
            if again.digest == table.digest:
                raise
            return act(again)

    def _fill(self, name: str, table: PackTable, offset: int, view: memoryview) -> None:
        where = f"{self._inner.url}/{name}"
        base.check_end(where, offset + len(view), table.size)
        if not len(view):
            return
        first, last = table.index(offset), table.index(offset + len(view) - 1)
        if first == last:
            self._fill_one(name, table, first, offset, view)
            return
        flying: deque[list[Future[None]]] = deque()
        try:
            for start, stop in _groups(table, first, last + 1):
                lo, hi = int(table.offsets[start]), int(table.offsets[stop])
                data = memoryview(self._inner.get(name, ByteRange(lo, hi)))
                calls = [
                    _Call(
                        table, i, data[int(table.offsets[i]) - lo : int(table.offsets[i + 1]) - lo]
                    )
                    for i in range(start, stop)
                ]
                flying.append([])
                for call in calls:
                    flying[-1].append(self._start(call, offset, view, where))
                if len(flying) > 1:
                    _finish(flying[0], where)
                    flying.popleft()
            while flying:
                _finish(flying[0], where)
                flying.popleft()
        finally:
            # Until they are over, threads write into the caller's memory.
            wait([f for group in flying for f in group if not f.cancel()], STALL_S)

    def _fill_one(
        self, name: str, table: PackTable, index: int, offset: int, view: memoryview
    ) -> None:
        """Fill `view` from a single frame: no threads, and the frame is kept for the next call."""
        start, stop = table.span(index)
        with self._lock:
            frame = self._recent.get((table.digest, index))
        if frame is None:
            stored = ByteRange(int(table.offsets[index]), int(table.offsets[index + 1]))
            call = _Call(table, index, memoryview(self._inner.get(name, stored)))
            where = f"{self._inner.url}/{name}"
            if len(view) == stop - start:
                call.run(offset, view, where)
                return
            frame = memoryview(bytearray(stop - start))
            call.run(start, frame, where)
            with self._lock:
                self._recent[table.digest, index] = frame
                while len(self._recent) > _RECENT:
                    self._recent.popitem(last=False)
        view[:] = frame[offset - start : offset - start + len(view)]

    def _start(self, call: _Call, offset: int, view: memoryview, where: str) -> Future[None]:
        try:
            return self._pool().submit(call.run, offset, view, where)
        except RuntimeError:
            raise UsageError("the store is closed", kind="closed", where=where) from None


class _Call:
    """One frame to unpack."""

    def __init__(self, table: PackTable, index: int, data: memoryview) -> None:
        self._table = table
        self._index = index
        self._data = data

    def run(self, offset: int, view: memoryview, where: str) -> None:
        """Write what of the frame belongs into `view`, which begins at logical byte `offset`."""
        start, stop = self._table.span(self._index)
        lo, hi = max(start, offset), min(stop, offset + len(view))
        place = view[lo - offset : hi - offset]
        frame = self._table.frame(self._index, self._data)
        where = f"frame {self._index} of {where}"
        if (lo, hi) == (start, stop):
            decode_frame(frame, place, where)
            return
        whole = memoryview(bytearray(stop - start))
        decode_frame(frame, whole, where)
        place[:] = whole[lo - start : hi - start]


def _groups(table: PackTable, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut frames into runs that are read at once."""
    while first < end:
        stop = first + 1
        while stop < end and table.offsets[stop + 1] - table.offsets[first] <= _GROUP_BYTES:
            stop += 1
        yield first, stop
        first = stop


def _finish(group: list[Future[None]], where: str) -> None:
    """Wait for all of `group`, and raise what the first met."""
    for future in group:
        result_of(future, where)


STALL_S = 600.0
"""One frame takes milliseconds; a thread that has no turn for so long has none at all."""


def result_of(future: Future[_T], where: str) -> _T:
    """Return what a thread found, raise what it met, or tell that there are no threads any more."""
    try:
        return future.result(STALL_S)
    except CancelledError:
        raise UsageError("the store is closed", kind="closed", where=where) from None
    except TimeoutError:
        raise TransientStoreError(
            f"no progress for {STALL_S:g} s", kind="stalled", where=where
        ) from None


class PackWriter(base.SizedWriter):
    """Packs what it gets into `inner`; see `Writer`.

    Holds at most two frames a thread. A frame that lies in one buffer of the caller's is not
    copied.

    Parameters
    ----------
    key
        The logical name, for errors.
    size
        Logical bytes.
    inner
        A writer of at least `ckptd.store.pack.bound` bytes.
    committed
        Called when the packed object stands.
    """

    def __init__(
        self,
        key: str,
        size: int,
        inner: base.Writer,
        *,
        level: int,
        pool: ThreadPoolExecutor,
        threads: int,
        committed: Callable[[], None],
    ) -> None:
        super().__init__(key, size)
        self._inner = inner
        self._level = level
        self._pool = pool
        self._most = 2 * threads
        self._committed = committed
        self._views: deque[memoryview] = deque()
        self._held = 0
        self._at = 0  # where the next frame begins
        self._lead = -1  # until the first eight bytes are there
        self._flying: deque[Future[PackFrame]] = deque()
        self._rows: list[tuple[int, int, int, int]] = []
        try:
            inner.write(memoryview(HEADER))
        except BaseException:
            self.abort()
            raise

    def _append(self, view: memoryview) -> None:
        if len(view):
            self._views.append(view)
            self._held += len(view)
            self._cut_frames(last=False)

    def _cut_frames(self, *, last: bool) -> None:
        if self._lead < 0:
            if self._held < 8 and not last:
                return
            first = self._take(min(8, self._held))
            self._lead = lead_of(bytes(first), self.size)
            self._give_back(first)
        while self._held:
            wanted = frame_end(self._at, self._lead, self.size) - self._at
            if self._held < wanted:
                return
            self._send(self._take(wanted))
            self._at += wanted

    def _take(self, count: int) -> memoryview:
        """Return the next `count` bytes; a copy only where they lie in several buffers."""
        self._held -= count
        pieces = []
        while count:
            view = self._views.popleft()
            pieces.append(view[:count])
            if len(view) > count:
                self._views.appendleft(view[count:])
            count -= len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    def _give_back(self, view: memoryview) -> None:
        if len(view):
            self._views.appendleft(view)
            self._held += len(view)

    def _send(self, view: memoryview) -> None:
        while len(self._flying) >= self._most:
            self._land()
        try:
            self._flying.append(self._pool.submit(encode_frame, view, self._level))
        except RuntimeError:
            raise UsageError("the store is closed", kind="closed", where=self.key) from None

    def _land(self) -> None:
        """Write the oldest frame, as soon as it is packed."""
        frame = result_of(self._flying[0], self.key)
        self._flying.popleft()
        self._inner.write(memoryview(frame.data))
        self._rows.append((len(frame.data), frame.codec, frame.width, frame.check))

    def _finish(self) -> None:
        self._cut_frames(last=True)
        while self._flying:
            self._land()
        self._inner.write(memoryview(table_bytes(self.size, self._lead, self._rows)))
        self._inner.cut()
        self._inner.commit()
        self._committed()

    def _drop(self) -> None:
        # A thread that still reads the caller's memory must end before that may change.
        wait([f for f in self._flying if not f.cancel()], STALL_S)
        self._flying.clear()
        self._views.clear()
        self._inner.abort()


PACKED = ".zp"
"""End of a packed object's name, after the logical name."""
_MOST_THREADS = 8
_LEVELS = range(1, 23)


class Pack(base.Wrapper):
    """Packs what `writer` writes under names that end in ``spec.suffix``, and reads both forms.

    Names, sizes and ranges are logical everywhere. `put` stores plain objects, and a plain object
    hides a packed one. A store that packs promises no local files, and what is packed has no
    `local_path`. That another process replaced a packed object that was read here is noticed by
    its digests.
    """

    spec: base.PackSpec

    def __init__(self, inner: base.Store, spec: base.PackSpec | None = None) -> None:
        super().__init__(inner, spec or base.PackSpec())
        level = self.spec.level
        if level is not None and (isinstance(level, bool) or level not in _LEVELS):
            raise UsageError("invalid level of zstd", wanted="1 to 22, or None", found=level)
        if level is not None:
            self.capabilities = replace(self.capabilities, local_files=False)
        self._threads = min(_MOST_THREADS, cores())
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False
        self._reader = PackReader(inner, self._executor)

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._closed:
                raise RuntimeError("closed")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, "ckptd-pack")
            return self._pool

    # -- names -----------------------------------------------------------------------------------

    def _packed(self, key: str) -> str | None:
        """Return the name of the packed form of `key`; None where it has none."""
        name = base.check_key(key) + PACKED
        if not key.endswith(self.spec.suffix) or len(name) > base.MAX_KEY_BYTES:
            return None
        return name if base.is_segment(name.rpartition("/")[2]) else None

    def _logical(self, name: str) -> str | None:
        """Return the key whose packed form `name` is; None where it is none."""
        key = name.removesuffix(PACKED)
        packed = (
            key != name and key.endswith(self.spec.suffix) and base.is_segment(key.split("/")[-1])
        )
        return key if packed else None

    def _check_free(self, key: str) -> None:
        if self._logical(base.check_key(key)) is not None:
            raise UsageError(
                "this name is reserved for packed objects",
                kind="bad-key",
                where=key,
                wanted=f"a name that does not end in {self.spec.suffix}{PACKED}",
            )

    # -- reading ---------------------------------------------------------------------------------

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """Return the whole object, or exactly `byte_range` of it."""
        name = self._packed(key)
        if name is None:
            return self.inner.get(key, byte_range)
        if self._reader.knows(name):
            try:
                return self._reader.get(name, byte_range)
            except NotFoundError:
                self._reader.forget(name)
        try:
            return self.inner.get(key, byte_range)
        except NotFoundError as error:
            try:
                return self._reader.get(name, byte_range)
            except NotFoundError:
                raise error from None

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`; of a packed object the frames that it touches are read."""
        name = self._packed(key)
        if name is None:
            return self.inner.read_into(key, offset, buffer)
        view = base.as_bytes_view(buffer)
        if self._reader.knows(name):
            try:
                return self._reader.read(name, offset, view)
            except NotFoundError:
                self._reader.forget(name)
        try:
            self.inner.read_into(key, offset, buffer)
        except NotFoundError as error:
            try:
                self._reader.read(name, offset, view)
            except NotFoundError:
                raise error from None

    def stat(self, key: str) -> base.ObjectInfo:
        """Return logical size and time of one object."""
        name = self._packed(key)
        try:
            return self.inner.stat(key)
        except NotFoundError as error:
            if name is None:
                raise
            try:
                table = self._reader.table(name, self.inner.stat(name))
            except NotFoundError:
                raise error from None
            return base.ObjectInfo(key, table.size, table.modified)

    def exists(self, key: str) -> bool:
        """Tell whether the object exists in either form."""
        name = self._packed(key)
        return self.inner.exists(key) or (name is not None and self.inner.exists(name))

    def local_path(self, key: str) -> Path | None:
        """Return the file behind `key`; None where it is packed, or where this store packs."""
        path, name = self.inner.local_path(key), self._packed(key)
        if not self.capabilities.local_files:
            return None
        if path is None or name is None or path.exists() or not self.inner.exists(name):
            return path
        return None

    def open_file(self, key: str) -> base.OpenFile | None:
        """Return the object as a descriptor; None where it is packed, or where this store packs."""
        name = self._packed(key)
        if not self.capabilities.local_files:
            return None
        try:
            return self.inner.open_file(key)
        except NotFoundError:
            if name is not None and self.inner.exists(name):
                return None
            raise

    # -- listing ---------------------------------------------------------------------------------

    def list(self, prefix: str = "") -> Iterator[base.ObjectInfo]:
        """Yield every object below `prefix`, in key order, with logical names and sizes.

        The size of a packed object that is not whole, a leftover, is that of its bytes.
        """
        plain: dict[str, base.ObjectInfo] = {}
        packed: dict[str, base.ObjectInfo] = {}
        for info in self.inner.list(prefix):
            key = self._logical(info.key)
            if key is None:
                plain[info.key] = info
            else:
                packed[key] = info
        hidden = plain.keys() & packed.keys()
        found = {**plain, **self._sized({k: i for k, i in packed.items() if k not in hidden})}
        yield from (found[key] for key in sorted(found))

    def _sized(self, packed: dict[str, base.ObjectInfo]) -> dict[str, base.ObjectInfo]:
        if not packed:
            return {}
        # Threads of its own: those that pack must not wait for a store.
        threads = min(len(packed), self.inner.capabilities.parallel)
        with ThreadPoolExecutor(threads, "ckptd-pack-list") as pool:
            sizes = pool.map(self._size, packed.values())
            return {
                key: base.ObjectInfo(key, size, info.modified)
                for (key, info), size in zip(packed.items(), sizes, strict=True)
                if size is not None
            }

    def _size(self, info: base.ObjectInfo) -> int | None:
        try:
            return self._reader.table(info.key, info).size
        except NotFoundError:
            return None  # deleted since the listing
        except CorruptError:
            return info.size

    def children(self, prefix: str = "") -> base.Names:
        """Return logical names directly below `prefix`, sorted; folders end in "/"."""
        return sorted({self._logical(n) or n for n in self.inner.children(prefix)})

    # -- writing ---------------------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Write a small object whole, plain."""
        self._check_free(key)
        name = self._packed(key)
        if name is not None:
            self._reader.forget(name)
            if create_only and self.inner.exists(name):
                raise ConflictError(
                    "the object exists already", kind="exists", where=f"{self.url}/{key}"
                )
        self.inner.put(key, data, create_only=create_only)

    def put_together(self, objects: Mapping[str, bytes]) -> None:
        """Write small new objects of one folder, packed where the spec has a level."""
        if self.spec.level is not None:
            super().put_together(objects)
            return
        for key in objects:
            self._check_free(key)
            self._reader.forget(self._packed(key) or "")
        self.inner.put_together(objects)

    def writer(self, key: str, size: int) -> base.Writer:
        """Begin a large object, packed where the spec has a level."""
        self._check_free(key)
        name = self._packed(key)
        if name is not None:
            self._reader.forget(name)
        if name is None or self.spec.level is None:
            return self.inner.writer(key, size)
        try:
            pool = self._executor()
        except RuntimeError:
            raise UsageError("the store is closed", kind="closed", where=key) from None
        return PackWriter(
            key,
            size,
            self.inner.writer(name, bound(max(0, size))),
            level=self.spec.level,
            pool=pool,
            threads=self._threads,
            committed=lambda: self._replaced(key, name),
        )

    def _replaced(self, key: str, name: str) -> None:
        """Delete the unpacked object of this key, which the new packed one replaces."""
        self._reader.forget(name)
        self.inner.delete([key])

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects in whichever form they are."""
        names = [*keys]
        packed = {name for key in names if (name := self._packed(key)) is not None}
        for name in packed:
            self._reader.forget(name)
        if self.inner.capabilities.consistent_list:
            packed = self._present(packed)
        self.inner.delete([*names, *sorted(packed)])

    def _present(self, names: set[str]) -> set[str]:
        """Return those of `names` that exist: one listing a folder, not a request a name."""
        folders = {name[: name.rfind("/") + 1] for name in names}
        return names & {f + child for f in folders for child in self.inner.children(f)}

    def close(self) -> None:
        """End the threads, and close the inner store. Idempotent."""
        with self._lock:
            pool, self._pool = self._pool, None
            self._closed = True
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        self.inner.close()
