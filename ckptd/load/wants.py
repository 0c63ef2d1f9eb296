"""The read plan: what one rank wants from a checkpoint, as moves from files into live buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptd.errors import MismatchError, UsageError
from ckptd.format.filemap import FileMap
from ckptd.format.manifest import Manifest
from ckptd.layout.block import Block
from ckptd.layout.grid import Grid
from ckptd.layout.owners import ABSENT
from ckptd.layout.plan import plan
from ckptd.layout.region import Region
from ckptd.load.blocks import BlockLine, Runs, merge, split, touched
from ckptd.load.places import Places
from ckptd.store.base import Store
from ckptd.types import Box

__all__ = ["Move", "PlannedWant", "ReadPlan", "Want", "read_plan"]

_MOST_NAMED = 8


@dataclass(frozen=True, slots=True, eq=False)
class Want:
    """A live buffer to fill.

    Attributes
    ----------
    tensor
        Number of the tensor in the manifest.
    regions
        What the buffer holds, in tensor coordinates, and where; starts and strides in elements of
        the tensor's dtype.
    target
        The buffer: writable, one-dimensional and contiguous, of the tensor's item size or uint8.
        A strided live tensor is the contiguous buffer below it, and its strides are in `regions`.
    """

    tensor: int
    regions: tuple[Region, ...]
    target: NDArray[Any]

    @property
    def end(self) -> int:
        """One past the last element of the buffer that is written."""
        return max((r.span[1] for r in self.regions if r.numel), default=0)


@dataclass(frozen=True, slots=True, eq=False)
class PlannedWant:
    """What a live buffer wants from one tensor, planned already: a layout was composed with it.

    Attributes
    ----------
    tensor
        Number of the tensor in the manifest.
    pieces
        Numbers of pieces of its grid, and the copies out of each: sources from the first element
        of the piece on, targets in the buffer.
    target
        The buffer, as in `Want`.
    """

    tensor: int
    pieces: tuple[tuple[int, tuple[Block, ...]], ...]
    target: NDArray[Any]

    @property
    def end(self) -> int:
        """One past the last element of the buffer that is written."""
        return max((b.target_span[1] for _, blocks in self.pieces for b in blocks), default=0)


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """One planned copy: `block` of the piece that begins at byte `start` of `file`'s data section.

    Attributes
    ----------
    tensor
        Number of the tensor, for errors.
    target
        The live buffer as bytes.
    """

    file: int
    start: int
    itemsize: int
    block: Block
    tensor: int
    target: NDArray[np.uint8]

    @property
    def span(self) -> tuple[int, int]:
        """Byte range of the data section that the copy touches, holes included."""
        lo, hi = self.block.source_span
        return self.start + lo * self.itemsize, self.start + hi * self.itemsize

    @property
    def byte_count(self) -> int:
        """Bytes copied."""
        return self.block.numel * self.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Moves of a bounded span, by the line position of their first block."""

    moves: list[Move]
    at: NDArray[np.int64]


class ReadPlan:
    """What `ckptd.load.read.execute` does for one rank.

    Attributes
    ----------
    manifest, places
        The checkpoint.
    moves
        The copies.
    absent
        Wanted pieces that no file holds: ``(tensor number, box)``.
    line
        Positions of all digest blocks of the checkpoint.
    """

    def __init__(
        self,
        manifest: Manifest,
        places: Places,
        moves: Sequence[Move],
        absent: Sequence[tuple[int, Box]] = (),
    ) -> None:
        self.manifest = manifest
        self.places = places
        self.moves = moves
        self.absent = tuple(absent)
        self.line = BlockLine([f.data_bytes for f in manifest.files])

    @cached_property
    def bytes_needed(self) -> int:
        """Bytes that the copies take from the checkpoint."""
        return sum(m.byte_count for m in self.moves)

    @cached_property
    def needed(self) -> Runs:
        """The digest blocks that hold them."""
        runs = [
            self.line.positions(m.file, lo, hi)
            for m in self.moves
            for lo, hi in touched(m.block, m.itemsize, m.start)
        ]
        return merge(np.array(runs, dtype=np.int64).reshape(-1, 2))

    def of_files(self, files: Collection[int]) -> ReadPlan:
        """Return the plan of the copies out of some files alone."""
        moves = [m for m in self.moves if m.file in files]
        return ReadPlan(self.manifest, self.places, moves, self.absent)

    @property
    def files(self) -> list[int]:
        """Files that are read, ascending."""
        return self.line.files_of(self.needed)

    def parts(self, span_bytes: int) -> _Parts:
        """Return the moves, cut to `span_bytes`, in file order."""
        moves = [
            Move(m.file, m.start, m.itemsize, block, m.tensor, m.target)
            for m in self.moves
            for block in split(m.block, m.itemsize, span_bytes)
        ]
        at = np.array([self.line.positions(m.file, *m.span)[0] for m in moves], dtype=np.int64)
        order = np.argsort(at, kind="stable")
        return _Parts([moves[i] for i in order], at[order])


def read_plan(
    manifest: Manifest,
    filemap: FileMap,
    wants: Iterable[Want | PlannedWant],
    *,
    store: Store | None = None,
    allow_absent: bool = False,
    places: Places | None = None,
) -> ReadPlan:
    """Plan the filling of `wants`. Work grows with the pieces touched; nothing is read.

    Parameters
    ----------
    manifest, filemap
        The checkpoint, checked already by `ckptd.format.invariants`.
    wants
        The buffers of this rank.
    store
        The checkpoint's root, for the headers of files that older checkpoints wrote. Needed only
        when the manifest refers to such files.
    allow_absent
        Leave targets of absent pieces as they are, and list those in the plan.
    places
        Of an earlier plan for the same checkpoint: what it learnt of files is not read again.

    Raises
    ------
    MismatchError
        kind ``absent``: names every wanted piece that the checkpoint does not hold; a region does
        not lie inside its tensor.
    UsageError
        A target is not a writable flat buffer of the right size.
    CorruptError
        The manifest or an older file's header contradicts itself.
    """
    places = places or Places(manifest, filemap, store)
    moves: list[Move] = []
    absent: list[tuple[int, Box]] = []
    for want in wants:
        _plan_one(places, want, moves, absent)
    if absent and not allow_absent:
        raise _absent_error(filemap, absent)
    return ReadPlan(manifest, places, moves, absent)


def _plan_one(
    places: Places,
    want: Want | PlannedWant,
    moves: list[Move],
    absent: list[tuple[int, Box]],
) -> None:
    filemap, tensor = places.filemap, want.tensor
    grid, itemsize = filemap.grid_of(tensor), filemap.dtypes[tensor].itemsize
    name = filemap.tensors[tensor].name
    target = _as_bytes(want, itemsize, name)
    for piece, blocks in _copies(grid, want, name):
        file, start = places.of(tensor, piece)
        if file == ABSENT:
            absent.append((tensor, grid.piece(piece).box))
            continue
        moves += [Move(file, start, itemsize, block, tensor, target) for block in blocks]


def _copies(
    grid: Grid, want: Want | PlannedWant, name: str
) -> Iterable[tuple[int, tuple[Block, ...]]]:
    """Return the copies out of each piece."""
    if isinstance(want, PlannedWant):
        return want.pieces
    try:
        return [(c.piece, c.blocks) for c in plan(grid, want.regions)]
    except MismatchError as error:
        raise MismatchError(
            error.message, where=f"tensor {name}", wanted=error.wanted, found=error.found
        ) from None


def _as_bytes(want: Want | PlannedWant, itemsize: int, name: str) -> NDArray[np.uint8]:
    array = want.target
    good = array.ndim == 1 and array.flags.c_contiguous and array.flags.writeable
    if not good or array.dtype.itemsize not in (1, itemsize):
        raise UsageError(
            "a read needs a writable flat buffer",
            where=f"tensor {name}",
            wanted=f"one contiguous dimension of uint8 or of {itemsize}-byte items",
            found=f"shape {array.shape}, dtype {array.dtype}, strides {array.strides}",
        )
    end = want.end
    if end * itemsize > array.nbytes:
        raise UsageError(
            "a buffer is too small for its regions",
            where=f"tensor {name}",
            wanted=f"{end * itemsize} bytes",
            found=f"{array.nbytes} bytes",
        )
    return array.view(np.uint8)


def _absent_error(filemap: FileMap, absent: list[tuple[int, Box]]) -> MismatchError:
    named = [
        f"{filemap.tensors[t].name} {list(box.shape)} at {list(box.offset)}"
        for t, box in absent[:_MOST_NAMED]
    ]
    more = f" and {len(absent) - _MOST_NAMED} more" if len(absent) > _MOST_NAMED else ""
    return MismatchError(
        "the checkpoint leaves out what the state wants",
        kind="absent",
        where="; ".join(named) + more,
        wanted="pieces that some file holds",
        found=f"{len(absent)} absent pieces",
        hint="load with strict=False to keep the live values there",
    )
