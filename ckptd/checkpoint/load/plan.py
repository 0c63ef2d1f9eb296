"""`ReadPlan`: which blocks of which files one rank reads, copies and conversions into buffers.

The digest blocks that the copies need are sets of integers. All blocks of all files of a checkpoint
lie on one line, file after file, so that a set is a sorted array of runs, and union, sharing and
waves are a few numpy calls, whatever the number of files. Only `PieceLocations` does I/O, for files
that older checkpoints wrote.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.base.digest import BLOCK_BYTES
from ckptd.base.grids.block import Block, Fill, Region
from ckptd.base.grids.grid import Grid, strides_of
from ckptd.base.grids.owners import ABSENT, distinct
from ckptd.base.grids.plan import plan
from ckptd.base.grids.runs import Runs, merge
from ckptd.base.runtime.copier import copy_values
from ckptd.base.runtime.memory import HostBuffers
from ckptd.checkpoint.format.container import FileMap
from ckptd.checkpoint.format.manifest import Manifest
from ckptd.checkpoint.load.files import PieceLocations
from ckptd.checkpoint.load.target import DeviceTarget, Target
from ckptd.errors import CkptdError, CorruptError, MismatchError, UsageError
from ckptd.store.base import Store
from ckptd.types import Box, DType

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]
N = TypeVar("N", int, I64)

_SPACER = 4  # positions between two files: runs of two files never touch, and never coalesce
_MAX_POSITION = 1 << 62


class BlockLine:
    """Positions of the blocks of all files.

    Parameters
    ----------
    data_bytes
        Length of each file's data section, in file order.

    Raises
    ------
    CorruptError
        The sizes add up to more than a line can hold.
    """

    def __init__(self, data_bytes: Sequence[int]) -> None:
        widths = [-(-n // BLOCK_BYTES) + _SPACER for n in data_bytes]
        if sum(widths) > _MAX_POSITION or any(n < 0 for n in data_bytes):
            raise CorruptError("impossible file sizes in the manifest")
        self._first = np.concatenate(([0], np.cumsum(np.array(widths, dtype=np.int64))))
        self._data_bytes = list(data_bytes)

    def first(self, file: int) -> int:
        """Position of the first block of `file`."""
        return int(self._first[file])

    def file_at(self, position: int) -> int:
        """Return the file that `position` belongs to."""
        return int(np.searchsorted(self._first, position, side="right")) - 1

    def files_of(self, runs: Runs) -> list[int]:
        """Return the files that a set touches, ascending."""
        files = np.searchsorted(self._first, runs[:, 0], side="right") - 1
        return [int(f) for f in distinct(files)]

    def byte_range(self, file: int, lo: int, hi: int) -> tuple[int, int]:
        """Return the bytes of the data section of `file` that positions ``[lo, hi)`` represent."""
        first = self.first(file)
        return (lo - first) * BLOCK_BYTES, min((hi - first) * BLOCK_BYTES, self._data_bytes[file])

    def byte_count(self, runs: Runs) -> int:
        """Bytes of a set: the last block of a file is short."""
        total = 0
        for lo, hi in runs.tolist():
            start, end = self.byte_range(self.file_at(lo), lo, hi)
            total += end - start
        return total

    def positions(self, file: N, start: N, end: N) -> tuple[N, N]:
        """Return the positions of the blocks that hold bytes ``[start, end)`` of `file`."""
        first: N = self._first[file]
        return first + start // BLOCK_BYTES, first + -(-end // BLOCK_BYTES)

    def windows(self, runs: Runs, blocks: int) -> Iterator[tuple[int, int, int]]:
        """Yield ``(file, lo, hi)`` pieces of a set, none longer than `blocks`, in order."""
        for lo, hi in runs.tolist():
            file = self.file_at(lo)
            for at in range(lo, hi, blocks):
                yield file, at, min(at + blocks, hi)


# --- blocks of the planner, in bytes of a file ---------------------------------------------------


def touched(
    block: Block, itemsize: int, start: int, hole: int = BLOCK_BYTES
) -> list[tuple[int, int]]:
    """Return byte ranges that hold every source byte of `block`, its piece beginning at `start`.

    Two ranges are apart by `hole` bytes or more. What lies between closer runs is read with them:
    of digest blocks one is needed for either side anyway.
    """
    span, loose = _runs(block, itemsize, hole)
    offsets = np.zeros(1, dtype=np.int64)
    for stride, n in reversed(loose):
        offsets = np.add.outer(offsets, stride * np.arange(n, dtype=np.int64)).ravel()
    base = start + block.source_start * itemsize
    return [(base + o, base + o + span) for o in np.sort(offsets).tolist()]


def _runs(block: Block, itemsize: int, hole: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the bytes of a run without a big hole; of dimensions of runs, strides and sizes."""
    span = itemsize
    loose: list[tuple[int, int]] = []
    for stride, n in sorted(zip(block.source_strides, block.shape, strict=True)):
        if stride * itemsize - span < hole and not loose:
            span += (n - 1) * stride * itemsize
        else:
            loose.append((stride * itemsize, n))
    return span, loose


def split(
    block: Block, itemsize: int, span_bytes: int, hole_bytes: int = BLOCK_BYTES
) -> Iterator[Block]:
    """Cut `block` into parts, each of whose sources spans at most `span_bytes` without a big hole.

    So every part lies in neighbouring digest blocks that are all needed, and fits a small buffer.
    """
    lo, hi = block.source_span
    hole = bool(_runs(block, itemsize, hole_bytes)[1])
    if not block.shape or ((hi - lo) * itemsize <= span_bytes and not hole):
        yield block
        return
    d = max(range(len(block.shape)), key=lambda i: block.source_strides[i])
    n, stride = block.shape[d], block.source_strides[d]
    inner = (hi - lo) - (n - 1) * stride
    step = 1 if hole else max(1, (span_bytes // itemsize - inner) // stride + 1)
    for at in range(0, n, step):
        part = _part(block, d, at, min(step, n - at))
        yield from split(part, itemsize, span_bytes, hole_bytes)


def _part(block: Block, d: int, at: int, n: int) -> Block:
    """Return indices ``[at, at + n)`` of dimension `d`, in lowest terms again."""
    kept = (d,) if n > 1 else ()
    dims = (*range(d), *kept, *range(d + 1, len(block.shape)))
    return Block(
        tuple(n if i == d else block.shape[i] for i in dims),
        block.source_start + at * block.source_strides[d],
        tuple(block.source_strides[i] for i in dims),
        block.target_start + at * block.target_strides[d],
        tuple(block.target_strides[i] for i in dims),
    )


_MOST_NAMED = 8


PieceBlocks = tuple[tuple[int, tuple[Block, ...]], ...]
"""Numbers of pieces of a grid, and the copies out of each, relative to its first element."""


class Change(Protocol):
    """A change of values while they are copied: a cast, a scale."""

    def put(self, target: NDArray[Any], source: NDArray[Any], block: Block, shift: int) -> None:
        """Write `source` into `target`.

        Parameters
        ----------
        target, source
            Views of one shape, of the tensors' types.
        block
            The copy: its source positions are relative to the source piece.
        shift
            Where the first element of the target's chunk is, as the block counts its target.
        """


class Conversion(NamedTuple):
    """A change of values, and the types on both sides; `shift` is that of `Change.put`."""

    change: Change
    source: DType
    target: DType
    shift: int = 0


class Want(msgspec.Struct, frozen=True, eq=False):
    """A live buffer to fill.

    Attributes
    ----------
    tensor
        Number of the tensor in the manifest.
    regions
        What the buffer holds, in tensor coordinates, and where; starts and strides in elements of
        the tensor's dtype.
    target
        The buffer: writable, one-dimensional and contiguous, of the size of its items or uint8; or
        one of a device. A strided live tensor is the contiguous buffer below it, and its strides
        are in `regions`.
    pieces
        The copies, where a layout was composed with the checkpoint's; there are no `regions` then.
        None where `read_plan` computes them from the regions.
    conversion
        What happens to the values on their way; None: bytes as they are.
    """

    tensor: int
    regions: tuple[Region, ...]
    target: NDArray[Any] | DeviceTarget
    pieces: PieceBlocks | None = None
    conversion: Conversion | None = None

    @property
    def end(self) -> int:
        """One past the last element of the buffer that is written."""
        if self.pieces is None:
            return max((r.span[1] for r in self.regions if r.numel), default=0)
        return max((b.target_span[1] for _, blocks in self.pieces for b in blocks), default=0)


class PlannedCopy(msgspec.Struct, frozen=True, eq=False):
    """One copy of a plan: `block` of the piece that begins at byte `start` of a data section.

    Attributes
    ----------
    file, start
        The file, and the first byte of the piece in its data section.
    itemsize
        Bytes of an element of the source.
    block
        Which elements of the piece, and which of the buffer.
    target
        Number of the buffer that is written.
    conversion
        None: bytes as they are.
    """

    file: int
    start: int
    itemsize: int
    block: Block
    target: int
    conversion: Conversion | None = None

    @property
    def span(self) -> tuple[int, int]:
        """Byte range of the data section that the copy touches, holes included."""
        lo, hi = self.block.source_span
        return self.start + lo * self.itemsize, self.start + hi * self.itemsize

    @property
    def byte_count(self) -> int:
        """Bytes copied."""
        return self.block.numel * self.itemsize

    @property
    def run_start(self) -> int:
        """Byte of the buffer from which one run of the source is copied as it is; -1 for others."""
        is_run = self.conversion is None and self.block.run_length == self.block.numel
        return self.block.target_start * self.itemsize if is_run else -1

    @property
    def target_itemsize(self) -> int:
        """Bytes of an element of the buffer."""
        return self.itemsize if self.conversion is None else self.conversion.target.itemsize


_ROW = np.dtype(
    [(n, np.int64) for n in ("file", "start", "target", "form", "lo", "hi", "bytes", "run")]
)


class Moves:
    """Copies, a row of numbers each, and objects for what many of them have in common.

    Attributes
    ----------
    rows
        Of each copy its file, the first byte of the piece in the data section, the number of the
        buffer, the number of its form, the byte range of the data section, and the bytes copied;
        and where in the buffer it writes the one run of bytes that it is: -1 for others.
    forms
        Copies like those of the rows, out of a piece that begins at byte 0 of file 0.
    """

    def __init__(self, rows: NDArray[np.void], forms: Sequence[PlannedCopy]) -> None:
        self.rows = rows
        self.forms = forms

    @staticmethod
    def of(forms: Sequence[PlannedCopy], form: I64, file: I64, start: I64, target: I64) -> Moves:
        """Return copies of these forms."""
        rows = np.empty(len(form), _ROW)
        rows["form"], rows["file"], rows["start"], rows["target"] = form, file, start, target
        if len(form):
            spans = [(*f.span, f.byte_count, f.run_start) for f in forms]
            lo, hi, rows["bytes"], rows["run"] = np.array(spans, dtype=np.int64)[form].T
            rows["lo"], rows["hi"] = lo + start, hi + start
        return Moves(rows, forms)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: slice | I64 | NDArray[np.bool_]) -> Moves:
        return Moves(self.rows[which], self.forms)

    def __iter__(self) -> Iterator[PlannedCopy]:
        for file, start, target, form, *_ in self.rows.tolist():
            f = self.forms[form]
            yield PlannedCopy(file, start, f.itemsize, f.block, target, f.conversion)

    def split(self, span_bytes: int, hole_bytes: int) -> Moves:
        """Return the moves, each cut as `split` does."""
        parts = [[*split(f.block, f.itemsize, span_bytes, hole_bytes)] for f in self.forms]
        counts = np.array([len(p) for p in parts], dtype=np.int64)
        if not (counts > 1).any():
            return self
        forms = [
            msgspec.structs.replace(f, block=b)
            for f, p in zip(self.forms, parts, strict=True)
            for b in p
        ]
        which, form = _spread(counts, self.rows["form"])
        rows = self.rows[which]
        return Moves.of(forms, form, rows["file"], rows["start"], rows["target"])

    def touched(self, hole: int = BLOCK_BYTES) -> tuple[I64, Runs]:
        """Return byte ranges that hold every source byte, as `touched`, and the row of each."""
        ranges = [touched(f.block, f.itemsize, 0, hole) for f in self.forms]
        counts = np.array([len(r) for r in ranges], dtype=np.int64)
        which, at = _spread(counts, self.rows["form"])
        flat = np.array([pair for r in ranges for pair in r], dtype=np.int64).reshape(-1, 2)
        return which, flat[at] + self.rows["start"][which, np.newaxis]


def _spread(counts: I64, kinds: I64) -> tuple[I64, I64]:
    """Return a row for each of the `counts` things of each kind: which of `kinds`, which thing."""
    times = counts[kinds]
    which = np.repeat(np.arange(len(kinds)), times)
    within = np.arange(len(which)) - np.repeat(np.cumsum(times) - times, times)
    return which, (np.cumsum(counts) - counts)[kinds][which] + within


def _moves(copies: Iterable[PlannedCopy]) -> Moves:
    forms = list(copies)
    places = np.array([(c.file, c.start, c.target) for c in forms], dtype=np.int64).reshape(-1, 3)
    bare = [msgspec.structs.replace(c, file=0, start=0, target=0) for c in forms]
    return Moves.of(bare, np.arange(len(forms)), *places.T)


def needed_blocks(line: BlockLine, copies: Moves | Iterable[PlannedCopy]) -> Runs:
    """Return the digest blocks that hold the source bytes of some copies."""
    moves = copies if isinstance(copies, Moves) else _moves(copies)
    which, ranges = moves.touched()
    return merge(np.stack(line.positions(moves.rows["file"][which], *ranges.T), axis=1))


def needed_bytes(copies: Moves | Iterable[PlannedCopy], hole: int) -> dict[int, Runs]:
    """Return the byte ranges of data sections that hold the source bytes of some copies, by file.

    Holes of less than `hole` bytes inside a piece are among them; what lies between two pieces is
    not. In a foreign file that may be anything, and each piece there costs a look at its head.
    """
    moves = copies if isinstance(copies, Moves) else _moves(copies)
    which, ranges = moves.touched(hole)
    files, starts = moves.rows["file"][which], moves.rows["start"][which]
    by_file: dict[int, Runs] = {}
    for file in distinct(files).tolist():
        mine = np.flatnonzero(files == file)
        mine = mine[np.argsort(starts[mine], kind="stable")]
        pieces = np.split(ranges[mine], np.flatnonzero(np.diff(starts[mine])) + 1)
        by_file[file] = merge(np.concatenate([merge(pairs, hole - 1) for pairs in pieces]))
    return by_file


_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


def words_of(itemsize: int) -> np.dtype[Any]:
    """Return a type of numpy for elements that are copied bit by bit."""
    return np.dtype(_WORDS[itemsize])


def strided(
    memory: NDArray[np.uint8],
    at: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: np.dtype[Any],
) -> NDArray[Any]:
    """Return a view of elements; numpy checks that it stays inside `memory`.

    Parameters
    ----------
    at
        Byte of `memory` with the first element.
    strides
        In elements.
    """
    return np.ndarray(shape, dtype, memory, at, tuple(s * dtype.itemsize for s in strides))


def put(
    copy: PlannedCopy, block: Block, memory: U8, origin: int, target: U8, *, packed: bool = False
) -> None:
    """Do a copy, or a part of it.

    Parameters
    ----------
    block
        The part.
    memory
        Holds the elements that `block` takes.
    origin
        Where the first element of the piece is in `memory`, or would be: in bytes.
    target
        The buffer that is written.
    packed
        Write the values end to end from the first byte of `target` on, and not to their places.
    """
    size, wide, conversion = copy.itemsize, copy.target_itemsize, copy.conversion
    source_kind, target_kind = words_of(size), words_of(wide)
    if conversion is not None:
        source_kind, target_kind = conversion.source.numpy, conversion.target.numpy
    taken = strided(
        memory, origin + block.source_start * size, block.shape, block.source_strides, source_kind
    )
    start, strides = block.target_start, block.target_strides
    if packed:
        start, strides = 0, strides_of(block.shape)
    view = strided(target, start * wide, block.shape, strides, target_kind)
    if conversion is None:
        copy_values(view, taken)
    else:
        conversion.change.put(view, taken, block, conversion.shift)


def put_fill(fill: Fill, dtype: DType, target: U8) -> None:
    """Write what no element of a source represents."""
    shape, strides = tuple(n for n, _ in fill.steps), tuple(s for _, s in fill.steps)
    strided(target, fill.start * dtype.itemsize, shape, strides, dtype.numpy)[...] = fill.value


class ReadPlan:
    """Plan of one rank's load, which `ckptd.checkpoint.load.read.execute` carries out.

    Attributes
    ----------
    manifest, places
        The checkpoint.
    moves
        The copies.
    targets
        The buffers, by their numbers in the copies.
    line
        Positions of all digest blocks of the checkpoint.
    """

    def __init__(
        self,
        manifest: Manifest,
        places: PieceLocations,
        moves: Moves,
        targets: Sequence[Target],
    ) -> None:
        self.manifest = manifest
        self.places = places
        self.moves = moves
        self.targets = targets
        self.line = BlockLine([f.data_bytes for f in manifest.files])

    @cached_property
    def bytes_needed(self) -> int:
        """Bytes that the copies take from the checkpoint."""
        return int(self.moves.rows["bytes"].sum())

    @cached_property
    def needed(self) -> Runs:
        """The digest blocks that hold them."""
        return needed_blocks(self.line, self.moves)

    @cached_property
    def addresses(self) -> I64:
        """Where each buffer begins, and how many bytes it has; nowhere for one of a device."""
        if isinstance(self.targets, HostBuffers):
            return self.targets.places
        found = [
            (t.__array_interface__["data"][0], t.nbytes) if isinstance(t, np.ndarray) else (0, 0)
            for t in self.targets
        ]
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    def of_files(self, files: Collection[int]) -> ReadPlan:
        """Return the plan of the copies out of some files alone."""
        moves = self.moves[np.isin(self.moves.rows["file"], list(files))]
        return ReadPlan(self.manifest, self.places, moves, self.targets)

    @property
    def files(self) -> list[int]:
        """Files that are read, ascending."""
        rows = self.moves.rows
        found: list[int] = distinct(rows["file"][rows["bytes"] > 0]).tolist()
        return found

    def parts(self, span_bytes: int, hole_bytes: int = BLOCK_BYTES) -> tuple[Moves, I64]:
        """Return the moves, cut as `split` does, in file order, and the first block of each."""
        moves = self.moves.split(span_bytes, hole_bytes)
        rows = moves.rows
        at, _ = self.line.positions(rows["file"], rows["lo"], rows["hi"])
        order = np.argsort(at, kind="stable")
        return moves[order], at[order]


def read_plan(
    manifest: Manifest,
    filemap: FileMap,
    wants: Iterable[Want],
    *,
    store: Store | None = None,
    allow_absent: bool = False,
    places: PieceLocations | None = None,
    buffers: Sequence[Target] | None = None,
) -> ReadPlan:
    """Plan the filling of `wants`. Work grows with the pieces touched; nothing is read.

    Parameters
    ----------
    manifest, filemap
        The checkpoint, checked already by `ckptd.checkpoint.format.invariants`.
    wants
        The buffers of this rank.
    store
        The checkpoint's root, for the headers of files that older checkpoints wrote. Needed only
        when the manifest refers to such files.
    allow_absent
        Leave targets of absent pieces as they are.
    places
        Of an earlier plan for the same checkpoint: what it learnt of files is not read again.
    buffers
        The targets of `wants`, if they are at hand as bytes.

    Raises
    ------
    MismatchError
        Names every wanted piece that the checkpoint does not hold; a region does not lie inside
        its tensor.
    UsageError
        A target is not a writable flat buffer of the right size.
    CorruptError
        The manifest or an older file's header contradicts itself.
    """
    places = places or PieceLocations(manifest, filemap, store)
    wants = list(wants)
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, want in enumerate(wants):
        group = filemap.group_of[want.tensor]
        key = group, id(want.regions), id(want.pieces), id(want.conversion)
        alike.setdefault(key, []).append(number)
    forms: list[PlannedCopy] = []
    found: list[tuple[int, I64, I64]] = []
    absent: list[tuple[int, int, int]] = []
    for numbers in alike.values():
        want = wants[numbers[0]]
        tensor, conversion = want.tensor, want.conversion
        grid, itemsize = filemap.grid_of(tensor), filemap.dtypes[tensor].itemsize
        name = filemap.tensors[tensor].name
        wide = conversion.target.itemsize if conversion else itemsize
        end = want.end * wide
        _check_targets([wants[n] for n in numbers], wide, end, filemap)
        tensors, targets = np.array([wants[n].tensor for n in numbers]), np.array(numbers)
        for piece, blocks in _copies(grid, want, name):
            file, starts = places.of_all(tensors, piece)
            if file == ABSENT:
                absent += [(number, wants[number].tensor, piece) for number in numbers]
                continue
            for block in blocks:
                found.append((file, starts, targets))
                forms.append(PlannedCopy(0, 0, itemsize, block, 0, conversion))
    there = [(t, filemap.grid_of(t).piece(p).box) for _, t, p in sorted(absent)]
    if there and not allow_absent:
        raise _absent_error(filemap, there)
    times = [len(starts) for _, starts, _ in found]
    none = np.empty(0, dtype=np.int64)
    moves = Moves.of(
        forms,
        np.repeat(np.arange(len(forms)), times),
        np.repeat(np.array([file for file, _, _ in found], dtype=np.int64), times),
        np.concatenate([none, *(starts for _, starts, _ in found)]),
        np.concatenate([none, *(targets for _, _, targets in found)]),
    )
    buffers = buffers or [
        t.view(np.uint8) if isinstance(t, np.ndarray) and t.dtype != np.uint8 else t
        for t in (w.target for w in wants)
    ]
    return ReadPlan(manifest, places, moves, buffers)


def _copies(grid: Grid, want: Want, name: str) -> Iterable[tuple[int, tuple[Block, ...]]]:
    """Return the copies out of each piece."""
    if want.pieces is not None:
        return want.pieces
    try:
        return [(c.piece, c.blocks) for c in plan(grid, want.regions)]
    except MismatchError as error:
        raise CkptdError.from_dict({**error.to_dict(), "where": f"tensor {name}"}) from None


def _check_targets(wants: Iterable[Want], itemsize: int, end: int, filemap: FileMap) -> None:
    for want in wants:
        target = want.target
        if isinstance(target, np.ndarray):
            good = target.ndim == 1 and target.flags.c_contiguous and target.flags.writeable
            if not good or target.dtype.itemsize not in (1, itemsize):
                raise UsageError(
                    "a read needs a writable flat buffer",
                    where=f"tensor {filemap.tensors[want.tensor].name}",
                    wanted=f"one contiguous dimension of uint8 or of {itemsize}-byte items",
                    found=f"shape {target.shape}, dtype {target.dtype}, strides {target.strides}",
                )
        if end > target.nbytes:
            raise UsageError(
                "a buffer is too small for its regions",
                where=f"tensor {filemap.tensors[want.tensor].name}",
                wanted=f"{end} bytes",
                found=f"{target.nbytes} bytes",
            )


def _absent_error(filemap: FileMap, absent: list[tuple[int, Box]]) -> MismatchError:
    named = [
        f"{filemap.tensors[t].name} {list(box.shape)} at {list(box.offset)}"
        for t, box in absent[:_MOST_NAMED]
    ]
    more = f" and {len(absent) - _MOST_NAMED} more" if len(absent) > _MOST_NAMED else ""
    return MismatchError(
        "the checkpoint lacks parts of tensors that the state needs",
        where="; ".join(named) + more,
        wanted="all parts in files of the checkpoint",
        found=f"{len(absent)} absent pieces",
        hint="load with strict=False to keep the live values there",
    )
