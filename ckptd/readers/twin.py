"""`ForeignRoot`: a foreign checkpoint as a read-only root: manifest, data files, strided reads.

In it: how large a non-contiguous tensor may be that is gathered; names turned into keys.

From a reader's table it makes a manifest and the records around it, and one data file for each
file that it finds. Offsets in a data file follow from the manifest, as always; this store turns
them into bytes of the foreign file when they are read. So nothing above it learns a format.

There are no digests: the manifest requires ``undigested``, sizes are checked, bytes are not.
"""

from __future__ import annotations

import bisect
import math
import re
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ckptd.base.digest import digest_hex
from ckptd.base.grids.grid import Axis, Grid
from ckptd.base.grids.owners import Owners
from ckptd.base.grouping import by_key
from ckptd.checkpoint.format.container import FileMap, build_header
from ckptd.checkpoint.format.manifest import (
    FOREIGN,
    UNDIGESTED,
    FileEntry,
    GridEntry,
    Manifest,
    ObjectEntry,
    TensorEntry,
    encode_manifest,
)
from ckptd.checkpoint.format.names import (
    ROOT_MARKER,
    CommitName,
    check_name,
    commit_key,
    data_folder,
    generation_key,
)
from ckptd.checkpoint.format.records import Commit, Generation, RootMarker, encode_record
from ckptd.checkpoint.format.words import shown_tensors, unread_tensors
from ckptd.checkpoint.load.foreign import ForeignStore
from ckptd.errors import CorruptError, MismatchError, NotFoundError, UsageError
from ckptd.readers.base import Foreign, ForeignPiece, SeenFiles, time_text
from ckptd.readers.zips import Extent
from ckptd.store.base import (
    ObjectInfo,
    OpenFile,
    Store,
    as_bytes_view,
    check_end,
    check_key,
    check_prefix,
)
from ckptd.types import Box, ByteRange, dtype_of

_MAX_SPAN = 1 << 30
_MAX_SWELL = 64
_FREE_SWELL = 16 << 20
_MOST_NAMED = 256
_PLAIN = re.compile(r"[^A-Za-z0-9._=+@,-]")

Cut = tuple[tuple[int, ...], int]
"""Offset of a piece's box, and the first element of its flat range: its name in its tensor."""


class _Tensor:
    """The pieces of one tensor."""

    def __init__(self, first: ForeignPiece) -> None:
        self.name = first.name
        self.dtype = first.dtype
        self.shape = first.shape
        self.pieces: dict[Cut, ForeignPiece] = {}

    def add(self, piece: ForeignPiece) -> None:
        """Take in a piece; of replicas the first one counts."""
        if (piece.dtype, piece.shape) != (self.dtype, self.shape):
            raise MismatchError(
                "files disagree about a tensor",
                where=f"{piece.file}: {self.name}",
                wanted=f"{self.dtype} {self.shape}",
                found=f"{piece.dtype} {piece.shape}",
            )
        inside = all(
            min(o, n) >= 0 and o + n <= whole
            for o, n, whole in zip(piece.box.offset, piece.box.shape, self.shape, strict=True)
        )
        if not inside or (
            piece.flat and not 0 <= piece.flat[0] <= piece.flat[1] <= piece.box.numel
        ):
            raise self._bad("a part of a tensor lies outside of it", piece.box)
        if not piece.numel and (self.pieces or math.prod(self.shape)):
            return
        cut = piece.box.offset, piece.flat[0] if piece.flat else 0
        known = self.pieces.setdefault(cut, piece)
        if (known.box, known.flat) != (piece.box, piece.flat):
            raise self._bad("parts of a tensor overlap", f"{known.box} and {piece.box}")

    def _bad(self, what: str, found: object, wanted: object = None) -> MismatchError:
        return MismatchError(
            what,
            where=f"{self.name} {self.shape}",
            wanted=wanted,
            found=str(found)[:200],
            hint="check that the files of all ranks are there, from one step only",
        )

    @cached_property
    def grid(self) -> Grid:
        """The grid whose pieces the parts are; `MismatchError` where they are none."""
        boxes = by_key((piece.box.offset, piece) for piece in self.pieces.values())
        if not boxes:
            raise self._bad("no file holds a tensor", "nothing")
        if 0 in self.shape:
            return Grid(tuple(Axis(((n, 1),)) for n in self.shape), ())
        axes = tuple(self._axis(d, list(boxes)) for d in range(len(self.shape)))
        if math.prod(a.ncells for a in axes) != len(boxes):
            raise self._bad(
                "the parts of a tensor do not form a grid, or leave holes",
                f"{len(boxes)} parts",
                f"{' x '.join(str(a.ncells) for a in axes)} parts",
            )
        grid = Grid(axes, ())
        flats = []
        for cell in range(grid.ncells):
            box = grid.cell_box(cell)
            found = boxes.get(box.offset, [])
            if not found or any(p.box != box for p in found):
                raise self._bad(
                    "the parts of a tensor do not form a grid",
                    [p.box for p in found[:1]] or "none",
                    box,
                )
            flats.append(self._flat(box, sorted(p.flat or (0, box.numel) for p in found)))
        if all(axis.ncells == 1 for axis in flats):
            return grid
        return Grid(axes, (flats[0],) if len(set(flats)) == 1 else tuple(flats))

    def _axis(self, d: int, offsets: Sequence[tuple[int, ...]]) -> Axis:
        edges = sorted({o[d] for o in offsets} | {self.shape[d]})
        if edges[0]:
            raise self._bad("a tensor begins with a hole", f"dim {d} begins at {edges[0]}")
        return Axis.from_sizes(b - a for a, b in pairwise(edges))

    def _flat(self, box: Box, ranges: list[tuple[int, int]]) -> Axis:
        ends = [0, *(end for _, end in ranges)]
        if [start for start, _ in ranges] != ends[:-1] or ends[-1] != box.numel:
            raise self._bad("flat parts of a tensor overlap, or leave holes", ranges[:4], box)
        return Axis.from_sizes(end - start for start, end in ranges)


@dataclass(slots=True)
class _Segment:
    """Bytes ``[start, end)`` of a data file's data section, which a piece is."""

    start: int
    end: int
    piece: ForeignPiece
    extent: Extent | None = None


class _DataFile:
    """A data file, whose bytes are a foreign file's."""

    def __init__(self, info: ObjectInfo, header: bytes, data_bytes: int) -> None:
        self.key = info.key
        self.size = info.size
        self.modified = info.modified
        self.header = header
        self.data_bytes = data_bytes
        self.segments: list[_Segment] = []
        self.starts: list[int] = []

    @property
    def total(self) -> int:
        """Length of the data file."""
        return len(self.header) + self.data_bytes


class ForeignRoot(ForeignStore):
    """A foreign checkpoint, seen as a root with one checkpoint.

    Parameters
    ----------
    inner
        Where the foreign files are; closed with this store.
    foreign
        What a reader found there.
    format
        The reader's name.
    step
        Of the checkpoint, where the reader knows none.
    seen
        The files that the reader has looked at; others are looked at now.

    Attributes
    ----------
    inner, format, seen
        As given.
    name
        Of its one checkpoint.

    Raises
    ------
    CorruptError
        kind ``truncated`` among others.
    MismatchError
        The parts of a tensor overlap, leave holes, or are no grid.
    RefusedError
        kind ``unreadable-format``: all of its tensors are of kinds that are not read.
    """

    def __init__(
        self,
        inner: Store,
        foreign: Foreign,
        format: str,
        step: int = 0,
        seen: SeenFiles | None = None,
    ) -> None:
        self.inner = inner
        self.seen = SeenFiles(inner) if seen is None else seen
        self.format = format
        self.url = inner.url
        self.options = dict(inner.options)
        self.capabilities = replace(inner.capabilities, consistent_list=True, shared=False)
        self._lock = threading.Lock()
        self._gathered: tuple[ForeignPiece, bytes] | None = None
        self._records: dict[str, bytes] = {}
        self._data: dict[str, _DataFile] = {}
        self._modified = 0.0
        tensors: dict[str, _Tensor] = {}
        for piece in foreign.pieces:
            if piece.name not in tensors:
                tensors[piece.name] = _Tensor(piece)
            tensors[piece.name].add(piece)
        for t in tensors.values():
            check_name(t.name, next(iter(t.pieces.values())).file)
        for name in foreign.objects:
            check_name(name, self.url)
        for name in foreign.unread_tensors:
            check_name(name, self.url)
        if not tensors and foreign.unread_tensors:
            raise unread_tensors(foreign.unread_tensors, self.url)
        if not tensors:
            raise NotFoundError("the files of the checkpoint hold no tensor", where=self.url)
        step = foreign.step if foreign.step is not None else step
        named = [_text(n[:200]) for n in foreign.left_out[:_MOST_NAMED]]
        self.left_out = len(foreign.left_out), named
        self.unread = shown_tensors(foreign.unread_tensors)
        self._make(tensors, foreign, step)

    def foreign_path(self, key: str) -> Path | None:
        """Return the local file that a data file represents; None where there is none."""
        return self.inner.local_path(self._data[key].key) if key in self._data else None

    def foreign_file(self, key: str) -> tuple[str, int]:
        """Return key and size of the file that a data file represents."""
        file = self._file(key)
        return file.key, file.size

    def foreign_range(self, key: str, start: int) -> tuple[int, int]:
        """Return which bytes of its file a piece spans that begins at `start` of a data file."""
        file = self._file(key)
        segment = file.segments[bisect.bisect_right(file.starts, start) - 1]
        extent = self._extent(file, segment)
        size = _span(segment.piece, extent) * dtype_of(segment.piece.dtype, key).itemsize
        return extent.start, extent.start + size

    # -- the records ---------------------------------------------------------------------------

    def _make(self, tensors: Mapping[str, _Tensor], foreign: Foreign, step: int) -> None:
        keys = sorted({p.file for t in tensors.values() for p in t.pieces.values()}, key=_natural)
        numbers = {key: i for i, key in enumerate(keys)}
        infos = [self.seen.look(key) for key in keys]
        self._modified = max(i.modified for i in infos)
        # Files that hold no tensor as well: they say where those lie. No tags: hosts differ there.
        others = [self.seen.look(key) for key in sorted(self.seen.read - set(keys))]
        seen = "\n".join(f"{i.key} {i.size} {i.modified}" for i in [*infos, *others])
        attempt = f"f{digest_hex(_text(f'{self.url} {seen}').encode())[:24]}"
        name = CommitName(step, 1)
        folder = data_folder(name, attempt)
        known: dict[Hashable, tuple[Grid, list[Cut]]] = {}
        grids: dict[Grid, int] = {}
        owners: dict[Owners, int] = {}
        by_files: dict[tuple[int, ...], int] = {}
        entries, held = [], []
        for t in tensors.values():
            alike = t.shape, tuple((p.box, p.flat) for p in t.pieces.values())
            if alike not in known:
                known[alike] = t.grid, [_cut(t.grid, i) for i in range(t.grid.npieces)]
            grid, cuts = known[alike]
            order = [t.pieces[cut] for cut in cuts]
            held.append(order)
            files = tuple(numbers[p.file] for p in order)
            if files not in by_files:
                by_files[files] = owners.setdefault(Owners.from_array(files), len(owners))
            number = grids.setdefault(grid, len(grids)), by_files[files]
            entries.append(TensorEntry(t.name, t.dtype, t.shape, *number))
        filemap = FileMap(entries, list(grids), list(owners))
        paths = _paths(folder, keys)
        stored = []
        for i, info in enumerate(infos):
            header, data_bytes = build_header(filemap.header_entries(i), {})
            if data_bytes > info.size * _MAX_SWELL + _FREE_SWELL:
                raise CorruptError(
                    "tensors are larger than their file",
                    kind="truncated",
                    where=info.key,
                    wanted=f"{data_bytes} bytes",
                    found=f"{info.size} bytes",
                )
            stored.append(FileEntry(paths[i], i, len(header), data_bytes))
            self._data[paths[i]] = _DataFile(info, header, data_bytes)
        self._place(filemap, held, paths)
        manifest = Manifest(
            step,
            1,
            attempt,
            len(stored),
            tuple(stored),
            tuple(map(GridEntry.of, grids)),
            tuple(o.runs for o in owners),
            tuple(entries),
            objects=tuple(ObjectEntry(k, v) for k, v in foreign.objects.items()),
            metadata={FOREIGN: self._about(foreign)},
            lay=foreign.lay,
            requires=(UNDIGESTED,),
        )
        self.name = name
        self._write(manifest, name, folder)

    def _about(self, foreign: Foreign) -> dict[str, Any]:
        return {
            "format": self.format,
            "left_out": self.left_out[1],
            "unread_tensors": {n: _text(kind) for n, kind in foreign.unread_tensors.items()},
            "unread": [_text(n) for n in foreign.unread[:_MOST_NAMED]],
            "sizes": dict(foreign.sizes),
            "has_sections": foreign.has_sections,
        }

    def _place(
        self, filemap: FileMap, held: Sequence[Sequence[ForeignPiece]], paths: Sequence[str]
    ) -> None:
        """Say which bytes of each data file are which piece."""
        by_file = {self._data[p].key: self._data[p] for p in paths}
        for number in filemap.order.tolist():
            size = filemap.dtypes[number].itemsize
            for piece in held[number]:
                file = by_file[piece.file]
                start = file.segments[-1].end if file.segments else 0
                segment = _Segment(start, start + piece.numel * size, piece)
                file.segments.append(segment)
                file.starts.append(start)
                if isinstance(piece.at, Extent):
                    self._extent(file, segment)

    def _write(self, manifest: Manifest, name: CommitName, folder: str) -> None:
        created = time_text(self._modified)
        root_id = digest_hex(_text(self.url).encode())
        file, raw = encode_manifest(manifest)
        commit = Commit(
            name.step,
            1,
            manifest.attempt,
            folder,
            (folder,),
            file,
            digest_hex(raw),
            len(raw),
            manifest.attempt,
            created,
            manifest.world_size,
            sum(f.data_bytes for f in manifest.files),
            root=root_id,
            claim=manifest.attempt,
        )
        generation = Generation(
            1, manifest.attempt, None, created, manifest.world_size, self.format, root_id
        )
        self._records = {
            ROOT_MARKER: encode_record(RootMarker(root_id, created)),
            generation_key(1): encode_record(generation),
            commit_key(name): encode_record(commit),
            folder + file: raw,
        }

    # -- reading -------------------------------------------------------------------------------

    def stat(self, key: str) -> ObjectInfo:
        """Return size and time; for a data file, look whether the foreign file is as it was."""
        check_key(key)
        if key in self._records:
            return ObjectInfo(key, len(self._records[key]), self._modified)
        file = self._file(key)
        self.seen.check(file.key)
        return ObjectInfo(key, file.total, file.modified)

    def check_unchanged(self) -> None:
        """Look whether each foreign file of which bytes were taken is as it was."""
        self.seen.check_read()

    def _file(self, key: str) -> _DataFile:
        if key not in self._data:
            raise NotFoundError("no such object", where=f"{self.url}/{key}")
        return self._data[key]

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield records and data files."""
        check_prefix(prefix)
        sizes = {k: len(v) for k, v in self._records.items()}
        sizes |= {k: f.total for k, f in self._data.items()}
        for key in sorted(sizes):
            if key.startswith(prefix):
                yield ObjectInfo(key, sizes[key], self._modified)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """Return an object, or a range of it."""
        check_key(key)
        record = self._records.get(key)
        size = len(record) if record is not None else self._file(key).total
        start, end = (byte_range.start, byte_range.end) if byte_range else (0, size)
        check_end(f"{self.url}/{key}", end, size)
        if record is not None:
            return record[start:end]
        buffer = bytearray(end - start)
        self.read_into(key, start, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from the header that is made, and from the foreign file."""
        view = as_bytes_view(buffer)
        if key in self._records:
            view[:] = self.get(key, ByteRange(offset, offset + len(view)))
            return
        file = self._file(check_key(key))
        check_end(f"{self.url}/{key}", offset + len(view), file.total)
        head = file.header[offset : offset + len(view)]
        view[: len(head)] = head
        at, end = offset + len(head) - len(file.header), offset + len(view) - len(file.header)
        view = view[len(head) :]
        base = at
        for start, stop, source in self._runs(file, at, end):
            part = view[start - base : stop - base]
            if isinstance(source, int):
                self.inner.read_into(file.key, source, part)
            else:
                part[:] = source

    def _runs(self, file: _DataFile, at: int, end: int) -> Iterator[tuple[int, int, int | bytes]]:
        """Yield ``(start, end, byte of the foreign file, or the bytes)`` of a data section."""
        pending: tuple[int, int, int] | None = None
        number = bisect.bisect_right(file.starts, at) - 1
        while at < end:
            segment = file.segments[number]
            number += 1
            stop = min(end, segment.end)
            if stop <= at:
                continue
            extent = self._extent(file, segment)
            if extent.strides is not None:
                lo, hi = at - segment.start, stop - segment.start
                if pending is not None:
                    yield pending
                    pending = None
                yield at, stop, self._gather(segment.piece, extent)[lo:hi]
            else:
                source = extent.start + at - segment.start
                if pending is not None and pending[2] + pending[1] - pending[0] == source:
                    pending = pending[0], stop, pending[2]
                else:
                    if pending is not None:
                        yield pending
                    pending = at, stop, source
            at = stop
        if pending is not None:
            yield pending

    def _extent(self, file: _DataFile, segment: _Segment) -> Extent:
        """Return where a piece lies, once known; checks that the file reaches so far."""
        if segment.extent is not None:
            return segment.extent
        piece = segment.piece
        found = piece.at if isinstance(piece.at, Extent) else piece.at()
        end = found.start + _span(piece, found) * dtype_of(piece.dtype, piece.file).itemsize
        if found.start < 0 or end > file.size:
            raise CorruptError(
                "a tensor reaches beyond the end of its file",
                kind="truncated",
                where=f"{piece.file}: {piece.name}",
                wanted=f"{end} bytes",
                found=f"{file.size} bytes",
            )
        segment.extent = found
        return found

    def _gather(self, piece: ForeignPiece, extent: Extent) -> bytes:
        """Return the elements of a strided piece in row-major order; the last one is kept."""
        strides = extent.strides or ()
        item = dtype_of(piece.dtype).itemsize
        with self._lock:
            if self._gathered is not None and self._gathered[0] is piece:
                return self._gathered[1]
            count = _span(piece, extent)
            if max(count, piece.numel) * item > _MAX_SPAN:
                raise UsageError(
                    "a non-contiguous tensor is too large to gather",
                    where=f"{piece.file}: {piece.name}",
                    wanted=f"at most {_MAX_SPAN} bytes",
                    found=f"{count * item} bytes, strides {strides}",
                    hint="save it with .contiguous()",
                )
            raw = self.inner.get(piece.file, ByteRange(extent.start, extent.start + count * item))
            steps = tuple(s * item for s in strides)
            view = np.ndarray(piece.box.shape, np.dtype(f"V{item}"), raw, 0, steps)
            self._gathered = piece, view.tobytes()
            return self._gathered[1]

    def open_file(self, key: str) -> OpenFile | None:
        """Return the foreign file itself where its bytes are those of the data section."""
        file = self._file(check_key(key))
        if any(not isinstance(s.piece.at, Extent) for s in file.segments):
            return None
        runs = list(self._runs(file, 0, file.data_bytes))
        if len(runs) != 1 or not isinstance(runs[0][2], int):
            return None
        opened = self.inner.open_file(file.key)
        if opened is None:
            return None
        return OpenFile(opened.fd, opened.shift + runs[0][2] - len(file.header))

    def close(self) -> None:
        """Close the store below."""
        self.inner.close()


def _text(name: str) -> str:
    """Return a name as far as it is text: halves of surrogate pairs have no encoding."""
    return name.encode("utf-8", "backslashreplace").decode()


def _natural(key: str) -> list[tuple[bool, int, str]]:
    """Sort numbers in names as numbers: files of ranks then come in the order of ranks."""
    return [(p.isdecimal(), int(p) if p.isdecimal() else 0, p) for p in re.split(r"([0-9]+)", key)]


def _span(piece: ForeignPiece, extent: Extent) -> int:
    """Return how many elements of a file a piece spans."""
    if extent.strides is None or not piece.numel:
        return piece.numel
    sides = zip(piece.box.shape, extent.strides, strict=True)
    return 1 + sum((n - 1) * s for n, s in sides)


def _cut(grid: Grid, number: int) -> Cut:
    piece = grid.piece(number)
    return piece.box.offset, piece.flat[0] if piece.flat else 0


def _paths(folder: str, keys: Sequence[str]) -> list[str]:
    """Return the key of each data file: the foreign name, as far as a key may look so."""
    out: dict[str, None] = {}
    for number, key in enumerate(keys):
        name = _PLAIN.sub("%", key.replace("/", "%"))[-160:]
        path = f"{folder}{name}.safetensors"
        out[path if path not in out else f"{folder}{name}+{number}.safetensors"] = None
    return list(out)
