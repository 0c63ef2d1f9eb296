"""`Grid`: how one tensor is cut into chunks: cells, flat ranges, pieces; strides.

A grid is one list of cell sizes per dimension; its cells are numbered row-major. A cell may be
cut further by *flat ranges* of its own row-major elements, which is what a bucketed optimizer
does to a tensor-parallel shard. What is left after both cuts is a *piece*: pieces are numbered
cell by cell, then flat range by flat range, and each piece is one chunk of the checkpoint.

Sizes are run-length coded, so that 16,384 equal shards cost one pair of numbers, and every
query is interval work per dimension: nothing here is proportional to the number of cells unless
the caller asks for all of them. The same object is a Zarr v3 rectilinear chunk grid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import repeat

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.types import Box

MAX_EXTENT = 2**63 - 1
"""Largest number of elements or cells of a tensor: what int64 can count."""


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of `shape`, in elements."""
    out = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        out[i] = out[i + 1] * shape[i + 1]
    return tuple(out)


def is_packed(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether elements at these strides lie end to end, row-major."""
    return all(n == 1 or a == b for n, a, b in zip(shape, strides, strides_of(shape), strict=True))


def reach_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return how far elements at these strides reach, from the first to behind the last."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def is_unshared(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether each element at these strides has a place of its own; False where unsure."""
    reach = 1
    for stride, n in sorted(zip(strides, shape, strict=True)):
        if n > 1 and stride < reach:
            return False
        reach += (n - 1) * stride
    return True


def coordinates_of(offset: int, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the coordinates of a row-major position; the first may lie beyond its extent."""
    out = []
    for stride in strides:
        coordinate, offset = divmod(offset, max(1, stride))
        out.append(coordinate)
    return tuple(out)


def _merged(runs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join neighbouring runs of one size."""
    out: list[tuple[int, int]] = []
    for size, count in runs:
        if out and out[-1][0] == size:
            out[-1] = (size, out[-1][1] + count)
        else:
            out.append((size, count))
    return tuple(out)


class Axis(msgspec.Struct, frozen=True, dict=True):
    """One cut dimension: runs of ``(cell size, number of such cells)``, in order.

    Cells are never empty, so that the number of pieces is bounded by the number of elements; the
    one exception is a dimension of length zero, which has exactly one cell.

    Neighbouring runs of one size become one run, so that equal cuts are equal axes.

    Raises
    ------
    ValueError
        A size or count is below one or no int, there is no cell, or the dimension is longer than
        `MAX_EXTENT`.
    """

    runs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if self.runs == ((0, 1),):
            return
        extent = last = 0
        merge = False
        for size, count in self.runs:
            if type(size) is not int or type(count) is not int or size < 1 or count < 1:
                raise ValueError(f"not a list of (size >= 1, count >= 1) ints: {self.runs[:8]}")
            merge = merge or size == last
            last = size
            extent += size * count
        # Beyond this, positions would wrap in int64 arithmetic and point at other bytes.
        if not 1 <= extent <= MAX_EXTENT:
            raise ValueError(f"a dimension of {extent} elements")
        if merge:
            msgspec.structs.force_setattr(self, "runs", _merged(self.runs))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.runs)

    @staticmethod
    def from_sizes(sizes: Iterable[int]) -> Axis:
        """Return the axis whose cells have these sizes; empty cells are left out."""
        return Axis(_merged((int(size), 1) for size in sizes if size) or ((0, 1),))

    @cached_property
    def extent(self) -> int:
        """Length of the dimension, in elements."""
        return sum(size * count for size, count in self.runs)

    @cached_property
    def ncells(self) -> int:
        """Number of cells."""
        return sum(count for _, count in self.runs)

    @cached_property
    def _starts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First cell and first element of each run."""
        sizes = np.array([r[0] for r in self.runs], dtype=np.int64)
        counts = np.array([r[1] for r in self.runs], dtype=np.int64)
        cells = np.concatenate(([0], np.cumsum(counts)[:-1]))
        elements = np.concatenate(([0], np.cumsum(sizes * counts)[:-1]))
        return cells, elements

    def cell(self, index: int) -> tuple[int, int]:
        """Return ``(start, size)`` of cell `index`, in elements.

        Raises
        ------
        IndexError
            There is no such cell.
        """
        if not 0 <= index < self.ncells:
            raise IndexError(f"cell {index} of {self.ncells}")
        if len(self.runs) == 1:
            size = self.runs[0][0]
            return index * size, size
        cells, elements = self._starts
        run = int(np.searchsorted(cells, index, side="right")) - 1
        size = self.runs[run][0]
        return int(elements[run]) + (index - int(cells[run])) * size, size

    def cells_in(self, lo: int, hi: int) -> range:
        """Return the cells that meet elements ``[lo, hi)``; empty when ``hi <= lo``.

        Raises
        ------
        IndexError
            The elements do not lie in the dimension.
        """
        if hi <= lo:
            return range(0)
        return range(self.cell_at(lo), self.cell_at(hi - 1) + 1)

    def cell_at(self, element: int) -> int:
        """Return the cell that holds `element` (a cell of size zero holds none).

        Raises
        ------
        IndexError
            There is no such element.
        """
        if not 0 <= element < self.extent:
            raise IndexError(f"element {element} of {self.extent}")
        if len(self.runs) == 1:
            return element // self.runs[0][0]
        cells, elements = self._starts
        run = int(np.searchsorted(elements, element, side="right")) - 1
        return int(cells[run]) + (element - int(elements[run])) // self.runs[run][0]

    def sizes(self) -> Iterator[int]:
        """Yield the size of every cell: as many values as there are cells."""
        for size, count in self.runs:
            yield from repeat(size, count)


class Piece(msgspec.Struct, frozen=True):
    """One chunk: a cell, or a flat range inside a cell.

    Attributes
    ----------
    index
        Position in piece order.
    box
        The cell, in tensor coordinates.
    flat
        ``(start, end)`` in row-major elements of the cell, or None for the whole cell.
    """

    index: int
    box: Box
    flat: tuple[int, int] | None

    @property
    def numel(self) -> int:
        """Number of elements of the chunk."""
        return self.box.numel if self.flat is None else self.flat[1] - self.flat[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the chunk: the cell's, or one-dimensional for a flat range."""
        return self.box.shape if self.flat is None else (self.numel,)


class Grid(msgspec.Struct, frozen=True, dict=True):
    """A tensor's cut into pieces.

    Attributes
    ----------
    axes
        One `Axis` per dimension; empty for a 0-d tensor, which has one cell.
    flat
        Empty: pieces are cells. One axis: every cell is cut by it. Else one axis per cell, in
        cell order. The extent of a flat axis is the number of elements of its cell.

    Raises
    ------
    ValueError
        The flat cuts do not fit the cells, or there are more than `MAX_EXTENT` elements or cells.
    """

    axes: tuple[Axis, ...]
    flat: tuple[Axis, ...] = ()

    def __post_init__(self) -> None:
        # No cell and no flat range is empty, so these two bound the number of pieces as well.
        numel = math.prod(a.extent for a in self.axes)
        if numel > MAX_EXTENT or self.ncells > MAX_EXTENT:
            raise ValueError(f"a tensor of {numel} elements in {self.ncells} cells")
        if not self.flat:
            return
        if len(self.flat) == 1:
            self._check_shared_flat(self.flat[0], numel)
        elif len(self.flat) == self.ncells:
            self._check_flats()
        else:
            raise ValueError(f"{len(self.flat)} flat cuts for {self.ncells} cells")

    def _check_shared_flat(self, flat: Axis, numel: int) -> None:
        """One flat cut for all cells: they must all have its number of elements.

        Cells differ in volume as soon as one dimension has cells of two sizes, so it is enough to
        look at the runs; their combinations may be too many to enumerate.
        """
        if numel and any(len({size for size, _ in a.runs}) > 1 for a in self.axes):
            raise ValueError("one flat cut for cells of different sizes")
        cell = math.prod(a.runs[0][0] for a in self.axes) if numel else 0
        if flat.extent != cell:
            raise ValueError(f"one flat cut of {flat.extent} for cells of {cell}")

    def _check_flats(self) -> None:
        """One flat cut a cell: each must have its cell's number of elements."""
        numels = np.ones(1, dtype=np.int64)
        for axis in self.axes:
            sizes = np.repeat(*np.array(axis.runs, dtype=np.int64).T)
            numels = np.multiply.outer(numels, sizes).ravel()
        extents = np.array([a.extent for a in self.flat], dtype=np.int64)
        wrong = np.flatnonzero(extents != numels)
        if len(wrong):
            i = int(wrong[0])
            raise ValueError(f"flat cut of {extents[i]} for cell {i} of {numels[i]}")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.axes, self.flat))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return tuple(a.extent for a in self.axes)

    @cached_property
    def cell_shape(self) -> tuple[int, ...]:
        """Number of cells per dimension."""
        return tuple(a.ncells for a in self.axes)

    @cached_property
    def ncells(self) -> int:
        """Number of cells."""
        return math.prod(self.cell_shape)

    @cached_property
    def npieces(self) -> int:
        """Number of pieces."""
        if not self.flat:
            return self.ncells
        if len(self.flat) == 1:
            return self.ncells * self.flat[0].ncells
        return int(self._first_pieces[-1])

    @cached_property
    def _first_pieces(self) -> NDArray[np.int64]:
        counts = np.array([a.ncells for a in self.flat], dtype=np.int64)
        return np.concatenate(([0], np.cumsum(counts)))

    @cached_property
    def _cell_strides(self) -> tuple[int, ...]:
        return strides_of(self.cell_shape)

    def cell_index(self, coordinates: tuple[int, ...]) -> int:
        """Row-major number of the cell at `coordinates`."""
        return sum(c * s for c, s in zip(coordinates, self._cell_strides, strict=True))

    def cell_box(self, cell: int) -> Box:
        """Return the box of cell number `cell`, in tensor coordinates."""
        offset, shape = [], []
        for axis, stride in zip(self.axes, self._cell_strides, strict=True):
            coordinate, cell = divmod(cell, stride)
            start, size = axis.cell(coordinate)
            offset.append(start)
            shape.append(size)
        return Box(tuple(offset), tuple(shape))

    def flat_axis(self, cell: int) -> Axis | None:
        """Return the flat cut of cell number `cell`, if it has one."""
        if not self.flat:
            return None
        return self.flat[0] if len(self.flat) == 1 else self.flat[cell]

    def first_piece(self, cell: int) -> int:
        """Return the number of the first piece of cell number `cell`."""
        if not self.flat:
            return cell
        if len(self.flat) == 1:
            return cell * self.flat[0].ncells
        return int(self._first_pieces[cell])

    def piece(self, index: int) -> Piece:
        """Return piece number `index`.

        Raises
        ------
        IndexError
            There is no such piece.
        """
        if not 0 <= index < self.npieces:
            raise IndexError(f"piece {index} of {self.npieces}")
        if not self.flat:
            return Piece(index, self.cell_box(index), None)
        if len(self.flat) == 1:
            cell, part = divmod(index, self.flat[0].ncells)
            axis = self.flat[0]
        else:
            cell = int(np.searchsorted(self._first_pieces, index, side="right")) - 1
            part = index - int(self._first_pieces[cell])
            axis = self.flat[cell]
        start, size = axis.cell(part)
        return Piece(index, self.cell_box(cell), (start, start + size))


def whole(shape: tuple[int, ...]) -> Grid:
    """Return the grid of one cell."""
    return Grid(tuple(Axis(((n, 1),)) for n in shape))
