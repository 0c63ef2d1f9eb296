"""Data file (safetensors): padded header, limits, chunks in it; what a foreign file looks like.

``8-byte little-endian length | JSON header padded with spaces | data``. The data section begins
at a multiple of 4096 bytes, so that it can be written and read with direct I/O, and holds the
chunks packed without gaps in canonical order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.base.grids.block import Templates
from ckptd.base.grids.grid import Axis, Grid, Piece
from ckptd.base.grids.owners import ABSENT, Owners
from ckptd.checkpoint.format.codec import parse_json
from ckptd.checkpoint.format.manifest import Manifest, TensorEntry, in_one_piece
from ckptd.checkpoint.format.names import chunk_name, ranked_chunk_name
from ckptd.errors import CorruptError, UsageError
from ckptd.types import DTYPES, DType

ALIGNMENT = 4096
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library; a larger header would lock strangers out."""

_STORED_ITEMSIZE = {d.stored_code: d.itemsize for d in DTYPES.values() if d.safetensors}


class Chunk(msgspec.Struct, frozen=True):
    """One entry of a data file.

    Attributes
    ----------
    name
        Chunk name, see `ckptd.checkpoint.format.names.chunk_name`.
    code
        Safetensors dtype code, as stored.
    shape
        Shape as stored.
    start, end
        Byte range in the data section.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def encode_entries(
    chunks: Sequence[tuple[str, DType, tuple[int, ...]]], offset: int = 0
) -> tuple[bytes, int]:
    """Return what a header says of chunks that follow `offset`, and the end of the last one.

    Raises
    ------
    UsageError
        Two chunks have one name.
    """
    header: dict[str, object] = {}
    for name, dtype, shape in chunks:
        end = offset + math.prod(shape) * dtype.itemsize
        if name in header or name == "__metadata__":
            raise UsageError("two chunks have one name", where=name)
        header[name] = {
            "dtype": dtype.stored_code,
            "shape": dtype.stored_shape(shape),
            "data_offsets": (offset, end),
        }
        offset = end
    return msgspec.json.encode(header)[1:-1], offset


def build_header(
    chunks: Sequence[tuple[str, DType, tuple[int, ...]]],
    metadata: Mapping[str, str],
    before: tuple[bytes, int] = (b"", 0),
) -> tuple[bytes, int]:
    """Return the header (length prefix and padding included) and the size of the data section.

    Parameters
    ----------
    chunks
        ``(name, dtype, logical shape)`` in file order: item size descending.
    metadata
        Strings for safetensors' own ``__metadata__``.
    before
        What `encode_entries` returned for the chunks before these, which have other names.

    Raises
    ------
    UsageError
        Two chunks have one name, or the header would exceed safetensors' limit.
    """
    own, data_bytes = encode_entries(chunks, before[1])
    first = msgspec.json.encode({"__metadata__": dict(metadata)})[:-1]
    text = b",".join(filter(None, (first, before[0], own))) + b"}"
    padded = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8
    if padded > MAX_HEADER_BYTES:
        count = text.count(b'"data_offsets":')  # in a name its quotes have a backslash
        raise UsageError(
            "too many chunks for one file",
            wanted=f"a header of at most {MAX_HEADER_BYTES} bytes",
            found=f"{padded} bytes for {count} chunks",
        )
    return padded.to_bytes(8, "little") + text.ljust(padded, b" "), data_bytes


_STARTS = {
    b"version ": "this looks like a git-lfs pointer: git lfs pull fetches the file",
    b"\x1f\x8b": "this is compressed by gzip: gunzip it",
    b"\x28\xb5\x2f\xfd": "this is compressed by zstd: unzstd it",
    b"PK\x03\x04": "this is a zip, as torch.save writes: name it .pt",
    b"<": "this looks like a web page: was the download an error page?",
}
"""How files begin that often have the name of another format, and what to do."""


def foreign_start(prefix: bytes) -> str | None:
    """Return what a file seems to be that is not of the wanted format; None for anything else."""
    return next((hint for start, hint in _STARTS.items() if prefix.startswith(start)), None)


def header_bytes(prefix: bytes, where: str, file_bytes: int) -> int:
    """Return the full header length (prefix included) from the first 8 bytes of a file.

    Raises
    ------
    CorruptError
        The length is impossible for a file of `file_bytes` bytes.
    """
    length = int.from_bytes(prefix[:8], "little")
    if len(prefix) < 8 or length > MAX_HEADER_BYTES or 8 + length > file_bytes or length < 2:
        raise CorruptError(
            "not a safetensors file: impossible header length",
            where=where,
            wanted=f"at most {min(MAX_HEADER_BYTES, max(0, file_bytes - 8))}",
            found=str(length) if len(prefix) >= 8 else "a file shorter than 8 bytes",
            hint=foreign_start(prefix),
        )
    return 8 + length


def parse_header(
    raw: bytes, where: str, data_bytes: int
) -> tuple[dict[str, Chunk], dict[str, str]]:
    """Parse a whole header (prefix included) and check it against the data section's length.

    Returns
    -------
    chunks
        By name, in offset order.
    metadata
        The ``__metadata__`` strings.

    Raises
    ------
    CorruptError
        Duplicate names, unknown dtypes, negative sizes, gaps, overlaps, or a wrong total.
    """
    try:
        document = parse_json(raw[8:])
    except (ValueError, RecursionError) as error:
        raise _bad(where, f"header is not JSON: {str(error)[:200]}") from None
    if not isinstance(document, dict) or raw[8:9] != b"{":
        raise _bad(where, "header is not a JSON object")
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _bad(where, "__metadata__ is not a table of strings")
    chunks = sorted(
        (_chunk(name, entry, where) for name, entry in document.items()),
        key=lambda c: (c.start, c.end),
    )
    position = 0
    for chunk in chunks:
        if chunk.start != position:
            raise _bad(where, f"gap or overlap before chunk {chunk.name[:200]!r}")
        position = chunk.end
    if position != data_bytes:
        raise CorruptError(
            "data section has the wrong length",
            kind="truncated" if data_bytes < position else None,
            where=where,
            wanted=f"{position} bytes",
            found=f"{data_bytes} bytes",
        )
    return {c.name: c for c in chunks}, metadata


def _bad(where: str, what: str) -> CorruptError:
    return CorruptError(what, where=where)


def _natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _chunk(name: str, entry: object, where: str) -> Chunk:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _bad(where, f"bad entry for chunk {name[:200]!r}")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if (
        not isinstance(code, str)
        or code not in _STORED_ITEMSIZE
        or not isinstance(shape, list)
        or len(shape) > 64
        or not all(_natural(n) for n in shape)
        or not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(_natural(n) for n in offsets)
    ):
        raise _bad(where, f"bad dtype, shape or offsets of chunk {name[:200]!r}")
    start, end = offsets
    if end - start != math.prod(shape) * _STORED_ITEMSIZE[code]:
        raise _bad(where, f"shape and offsets of chunk {name[:200]!r} disagree")
    return Chunk(name, code, tuple(shape), start, end)


I64 = NDArray[np.int64]
_Group = tuple[int, int, int, int]
"""Grid, owners, base, item size: what tensors that weigh the same in every file have in common."""

_CACHE = 1 << 23
"""Numbers kept by each cache of a map: 64 MiB."""

_TABULATE_AFTER = 16  # files
_MOST_TABULATED = 1 << 23  # pieces
_FEW = 16


class ChunkRef(msgspec.Struct, frozen=True):
    """One chunk of one file.

    Attributes
    ----------
    tensor
        Number of the tensor in the manifest.
    piece
        The piece of its grid.
    start, end
        Byte range in the data section of the file.
    """

    tensor: int
    piece: Piece
    start: int
    end: int


def is_home(path: str, folder: str) -> bool:
    """Tell whether the data file at `path` lies in a manifest's own data `folder` (ends in "/").

    `FileMap` derives the offsets in home files only. A file of an older folder also holds chunks
    that this manifest does not refer to, so offsets there come from the file's own header, by
    chunk name (spec 4.4).
    """
    return path.startswith(folder)


def piece_numels(grid: Grid) -> I64:
    """Return the number of elements of every piece: as many values as there are pieces."""
    if not grid.flat:
        numels = np.ones(1, dtype=np.int64)
        for axis in grid.axes:
            numels = np.multiply.outer(numels, _sizes(axis)).ravel()
        return numels
    if len(grid.flat) == 1:
        return np.tile(_sizes(grid.flat[0]), grid.ncells)
    return np.concatenate([_sizes(axis) for axis in grid.flat])


def _sizes(axis: Axis) -> I64:
    runs = np.array(axis.runs, dtype=np.int64)
    return np.repeat(runs[:, 0], runs[:, 1])


class FileMap:
    """Maps pieces to byte ranges of home files, and back. Threads may share it.

    Parameters
    ----------
    tensors, grids, owners
        The tables of a manifest, checked already by `ckptd.checkpoint.format.invariants`.
    ranked
        Numbers of the tensors that hold per-rank objects: their chunks are named by rank.
    ranks
        Rank of each file; file number is rank when left out.
    """

    def __init__(
        self,
        tensors: Sequence[TensorEntry],
        grids: Sequence[Grid],
        owners: Sequence[Owners],
        ranked: frozenset[int] = frozenset(),
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.ranked = ranked
        self._ranks = ranks
        self.tensors = tensors
        self.grids = grids
        self.owners = owners
        self.dtypes: list[DType] = [DTYPES[t.dtype] for t in tensors]
        groups: dict[_Group, int] = {}
        self.group_of = [
            groups.setdefault((t.grid, t.owners, t.base, d.itemsize), len(groups))
            for t, d in zip(tensors, self.dtypes, strict=True)
        ]
        """Of each tensor a number that those have alike which are cut and stored alike."""
        self._groups = list(groups)
        self._group_of = np.array(self.group_of, dtype=np.int64)
        itemsizes = np.array([d.itemsize for d in self.dtypes], dtype=np.int64)
        self.order: I64 = np.argsort(-itemsizes, kind="stable")
        """Tensor numbers in canonical order."""
        self._starts: Templates[int, I64] = Templates(_CACHE)
        self._held: Templates[tuple[int, int], tuple[I64, I64]] = Templates(_CACHE)
        self._numels: Templates[int, I64] = Templates(_CACHE)
        self._runs: Templates[int, I64] = Templates(_CACHE)
        self._data_bytes: dict[int, I64] = {}
        self._asked = 0

    @staticmethod
    def of(manifest: Manifest, where: str) -> FileMap:
        """Build the map of a manifest; a broken table is a `CorruptError`."""
        per_rank = {o.tensor for o in manifest.objects if o.per_rank}
        ranked = frozenset([i for i, t in enumerate(manifest.tensors) if t.name in per_rank])
        try:
            return FileMap(
                manifest.tensors,
                [g.grid for g in manifest.grids],
                [Owners(r) for r in manifest.owners],
                ranked,
                [f.rank for f in manifest.files],
            )
        except (ValueError, OverflowError) as error:
            raise CorruptError(
                "manifest breaks a rule", where=where, found=str(error)[:300]
            ) from None

    def grid_of(self, tensor: int) -> Grid:
        """Grid of tensor number `tensor`."""
        return self.grids[self.tensors[tensor].grid]

    def owner(self, tensor: int, piece: int) -> int:
        """Number of the file that holds a piece, or `ABSENT`."""
        t = self.tensors[tensor]
        return self.owners[t.owners].owner(piece, t.base)

    def numels(self, grid: int) -> I64:
        """Return `piece_numels` of grid number `grid`; do not write to it."""
        found = self._numels.get(grid)
        if found is None:
            found = piece_numels(self.grids[grid])
            self._numels.put(grid, found, weight=len(found))
        return found

    def starts(self, file: int) -> I64:
        """Offset of each tensor's first byte in `file`, by tensor number; one more entry: the end.

        Do not write to it.
        """
        found = self._starts.get(file)
        if found is None:
            ordered = self._weights(file)[self._group_of[self.order]]
            ends = np.cumsum(ordered)
            found = np.empty(len(self.tensors) + 1, dtype=np.int64)
            found[self.order] = ends - ordered
            found[-1] = ends[-1] if len(ends) else 0
            self._starts.put(file, found, weight=len(found))
        return found

    def _weights(self, file: int) -> I64:
        """Bytes of one tensor of each group in `file`.

        A reader of few files asks group by group. One that changes the layout touches thousands
        of files, and there are as many groups as replicated scalars: for it the groups of every
        file are tabulated once.
        """
        weights = np.zeros(len(self._groups) or 1, dtype=np.int64)
        table = self._tabulated()
        if table is None:
            for i, (_, _, _, itemsize) in enumerate(self._groups):
                weights[i] = itemsize * int(self._pieces(i, file)[1][-1])
            return weights
        files, groups, sizes = table
        lo, hi = np.searchsorted(files, (file, file + 1))
        np.add.at(weights, groups[lo:hi], sizes[lo:hi])
        return weights

    def _tabulated(self) -> tuple[I64, I64, I64] | None:
        """Return the table once several files were asked for; None before, or if there is none."""
        self._asked += 1
        return self._table if self._asked > _TABULATE_AFTER else None

    @cached_property
    def _table(self) -> tuple[I64, I64, I64] | None:
        """``(file, group, bytes)`` of every piece of every group, by file; None when too large."""
        if sum(self.owners[o].npieces for _, o, _, _ in self._groups) > _MOST_TABULATED:
            return None
        files, groups, sizes = [], [], []
        for i, (grid, owners, base, itemsize) in enumerate(self._groups):
            owned = self.owners[owners].array()
            held = np.flatnonzero(owned != ABSENT)
            files.append(owned[held] + base)
            groups.append(np.full(len(held), i, dtype=np.int64))
            sizes.append(self.numels(grid)[held] * itemsize)
        if not files:
            return None
        everywhere = np.concatenate(files)
        order = np.argsort(everywhere, kind="stable")
        return everywhere[order], np.concatenate(groups)[order], np.concatenate(sizes)[order]

    def _pieces(self, group: int, file: int) -> tuple[I64, I64]:
        """Pieces of a group that `file` holds, and the elements before each; one more: all."""
        found = self._held.get((group, file))
        if found is None:
            grid, owners, base, _ = self._groups[group]
            pieces = self._pieces_of(owners, file - base)
            if len(pieces) <= _FEW:
                numels = np.array([self.grids[grid].piece(int(p)).numel for p in pieces], np.int64)
            else:
                numels = self.numels(grid)[pieces]
            found = pieces, np.concatenate(([0], np.cumsum(numels))).astype(np.int64)
            self._held.put((group, file), found, weight=1 + len(pieces))
        return found

    def _pieces_of(self, owners: int, file: int) -> I64:
        """Do what `Owners.pieces_of` does, without a step of Python for each run or piece."""
        runs = self.owners[owners].runs
        if file < 0:  # `base` above the file: or an absent piece would pass for one of file -1
            return np.empty(0, dtype=np.int64)
        if len(runs) == 1 and runs[0][1] == 0:
            return np.arange(runs[0][2] if runs[0][0] == file else 0, dtype=np.int64)
        if len(runs) <= _FEW and all(step for _, step, _ in runs):
            return np.fromiter(self.owners[owners].pieces_of(file), dtype=np.int64)
        table = self._runs.get(owners)
        if table is None:
            columns = np.array(runs, dtype=np.int64).reshape(-1, 3).T
            table = np.concatenate((columns, [np.cumsum(columns[2]) - columns[2]]))
            self._runs.put(owners, table, weight=table.size)
        first, step, count, start = table
        same = (step == 0) & (first == file)
        away = file - first
        at = np.where(step == 0, -1, away // np.where(step == 0, 1, step))
        one = (at >= 0) & (at < count) & (at * step == away)
        hits = np.flatnonzero(same | one)
        parts = [
            np.arange(start[i], start[i] + count[i]) if same[i] else start[i : i + 1] + at[i]
            for i in hits
        ]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def data_bytes(self, file: int) -> int:
        """Length of the data section of `file`, as the manifest's tables imply it."""
        return int(self.starts(file)[-1])

    def all_data_bytes(self, nfiles: int) -> I64:
        """Return `data_bytes` of each of the `nfiles` files, in work that grows with the pieces.

        Not to be written to: the next call returns the same array.
        """
        if (total := self._data_bytes.get(nfiles)) is not None:
            return total
        total = np.zeros(nfiles, dtype=np.int64)
        known, files = -1, np.empty(0, dtype=np.int64)
        for i in sorted(range(len(self._groups)), key=lambda i: self._groups[i][1::-1]):
            grid, owners, base, itemsize = self._groups[i]
            if owners != known:
                known, files = owners, self.owners[owners].array()
            held = files != ABSENT
            weight = int(self._tensors_of[i]) * itemsize
            np.add.at(total, files[held] + base, self.numels(grid)[held] * weight)
        total.flags.writeable = False
        return self._data_bytes.setdefault(nfiles, total)

    def nchunks(self, file: int) -> int:
        """Number of chunks of `file`."""
        table = self._tabulated()
        if table is not None:
            lo, hi = np.searchsorted(table[0], (file, file + 1))
            return int(self._tensors_of[table[1][lo:hi]].sum())
        return sum(
            int(n) * len(self._pieces(i, file)[0])
            for i, n in zip(range(len(self._groups)), self._tensors_of, strict=False)
        )

    @cached_property
    def _tensors_of(self) -> I64:
        """Number of tensors of each group."""
        return np.bincount(self._group_of, minlength=len(self._groups))

    def locate(self, tensor: int, piece: int) -> tuple[int, int, int]:
        """Return ``(file, start, end)`` of a piece; the file is `ABSENT` when no rank holds it."""
        file = self.owner(tensor, piece)
        if file == ABSENT:
            return ABSENT, 0, 0
        pieces, before = self._pieces(int(self._group_of[tensor]), file)
        at = int(pieces.searchsorted(piece))
        start, itemsize = int(self.starts(file)[tensor]), self.dtypes[tensor].itemsize
        return file, start + int(before[at]) * itemsize, start + int(before[at + 1]) * itemsize

    def chunks(self, file: int) -> list[ChunkRef]:
        """Return every chunk of `file`, in file order."""
        tensors, numbers = self.chunk_numbers(file)
        keys = [*zip(self._group_of[tensors].tolist(), numbers.tolist(), strict=True)]
        found: dict[tuple[int, int], tuple[Piece, int]] = {}
        for group, number in dict.fromkeys(keys):
            grid, _, _, itemsize = self._groups[group]
            piece = self.grids[grid].piece(number)
            found[group, number] = piece, piece.numel * itemsize
        pieces, sizes = zip(*map(found.__getitem__, keys), strict=True) if keys else ((), ())
        ends = np.cumsum(np.array(sizes, dtype=np.int64)).tolist()
        return list(map(ChunkRef, tensors.tolist(), pieces, [0, *ends], ends))

    def chunk_numbers(self, file: int) -> tuple[I64, I64]:
        """Return tensor and piece of every chunk of `file`, in file order."""
        here: I64 = np.arange(len(self._groups))
        if self._table is not None:  # most groups are one scalar each, or tensors of one file
            lo, hi = np.searchsorted(self._table[0], (file, file + 1))
            here = np.flatnonzero(np.bincount(self._table[1][lo:hi]))  # `unique` imports numpy.ma
        held = [self._pieces(group, file)[0] for group in here.tolist()]
        if not held:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        sizes = np.zeros(len(self._groups), dtype=np.int64)
        sizes[here] = [len(pieces) for pieces in held]
        groups = self._group_of[self.order]
        counts = sizes[groups]
        # Of each chunk: where its group's pieces begin in the pool, and which of them it is.
        begin = np.repeat((np.cumsum(sizes) - sizes)[groups], counts)
        which = np.arange(len(begin)) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(self.order, counts), np.concatenate(held)[begin + which]

    def header_entries(self, file: int) -> list[tuple[str, DType, tuple[int, ...]]]:
        """Return what `ckptd.checkpoint.format.container.build_header` needs for `file`."""
        return [
            (self.chunk_name(file, c), self.dtypes[c.tensor], c.piece.shape)
            for c in self.chunks(file)
        ]

    def check_header(self, file: int) -> None:
        """Raise what `build_header` would; nothing is built where all has a place for sure."""
        # A whole tensor has its own name, escaped, and besides it little but its shape.
        most = ALIGNMENT + 3 * len(msgspec.json.encode(self.tensors)) + 128 * len(self.tensors)
        if most > MAX_HEADER_BYTES or not in_one_piece(owners.runs for owners in self.owners):
            build_header(self.header_entries(file), {})

    def chunk_name(self, file: int, chunk: ChunkRef) -> str:
        """Return the name of a chunk in the header of its file."""
        tensor = self.tensors[chunk.tensor]
        if chunk.tensor in self.ranked:
            return ranked_chunk_name(tensor.name, self._ranks[file] if self._ranks else file)
        return chunk_name(tensor.name, chunk.piece, tensor.shape)

    @cached_property
    def total_chunks(self) -> int:
        """Number of chunks in all files, in work that grows with the tables and not with pieces."""
        present = [sum(n for first, _, n in o.runs if first != ABSENT) for o in self.owners]
        return sum(
            n * present[owners]
            for n, (_, owners, _, _) in zip(self._tensors_of.tolist(), self._groups, strict=False)
        )

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all logical tensors, absent pieces included."""
        return sum(
            math.prod(t.shape) * d.itemsize for t, d in zip(self.tensors, self.dtypes, strict=True)
        )
