"""Rectilinear grids: how one tensor is cut into chunks.

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
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ckptd.types import Box

__all__ = ["Axis", "Grid", "Piece", "even_axis", "strides_of", "whole"]


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of `shape`, in elements."""
    out = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        out[i] = out[i + 1] * shape[i + 1]
    return tuple(out)


@dataclass(frozen=True)
class Axis:
    """One cut dimension: runs of ``(cell size, number of such cells)``, in order.

    Cells are never empty, so that the number of pieces is bounded by the number of elements; the
    one exception is a dimension of length zero, which has exactly one cell.

    Raises
    ------
    ValueError
        A size or count is below one, or there is no cell.
    """

    runs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if self.runs == ((0, 1),):
            return
        if not self.runs or any(size < 1 or count < 1 for size, count in self.runs):
            raise ValueError(f"not a list of (size >= 1, count >= 1) pairs: {self.runs[:8]}")

    @staticmethod
    def from_sizes(sizes: Iterable[int]) -> Axis:
        """Return the axis whose cells have these sizes; empty cells are left out."""
        runs: list[tuple[int, int]] = []
        for size in sizes:
            if not size:
                continue
            if runs and runs[-1][0] == size:
                runs[-1] = (size, runs[-1][1] + 1)
            else:
                runs.append((int(size), 1))
        return Axis(tuple(runs) or ((0, 1),))

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
        """Return ``(start, size)`` of cell `index`, in elements."""
        if len(self.runs) == 1:
            size = self.runs[0][0]
            return index * size, size
        cells, elements = self._starts
        run = int(np.searchsorted(cells, index, side="right")) - 1
        size = self.runs[run][0]
        return int(elements[run]) + (index - int(cells[run])) * size, size

    def cells_in(self, lo: int, hi: int) -> range:
        """Return the cells that meet elements ``[lo, hi)``; empty when ``hi <= lo``."""
        if hi <= lo:
            return range(0)
        return range(self.cell_at(lo), self.cell_at(hi - 1) + 1)

    def cell_at(self, element: int) -> int:
        """Return the cell that holds `element` (cells of size zero hold none)."""
        if len(self.runs) == 1:
            return element // self.runs[0][0]
        cells, elements = self._starts
        run = int(np.searchsorted(elements, element, side="right")) - 1
        return int(cells[run]) + (element - int(elements[run])) // self.runs[run][0]

    def sizes(self) -> Iterator[int]:
        """Yield the size of every cell: as many values as there are cells."""
        for size, count in self.runs:
            for _ in range(count):
                yield size


def even_axis(extent: int, parts: int) -> Axis:
    """Cut `extent` the way torch's ``Shard`` does: ceil-sized cells, the last one short.

    Ranks that get nothing have no cell. An `extent` of zero gives one empty cell.
    """
    if extent == 0 or parts <= 1:
        return Axis(((extent, 1),))
    size = -(-extent // parts)
    full, rest = divmod(extent, size)
    runs = ((size, full), (rest, 1)) if rest else ((size, full),)
    return Axis(runs)


@dataclass(frozen=True, slots=True)
class Piece:
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


@dataclass(frozen=True)
class Grid:
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
        The flat cuts do not fit the cells.
    """

    axes: tuple[Axis, ...]
    flat: tuple[Axis, ...] = ()

    def __post_init__(self) -> None:
        if not self.flat:
            return
        if len(self.flat) not in (1, self.ncells):
            raise ValueError(f"{len(self.flat)} flat cuts for {self.ncells} cells")
        if len(self.flat) == 1:
            shapes = {tuple(s) for s in self._distinct_shapes()}
            numels = {math.prod(s) for s in shapes}
            if numels != {self.flat[0].extent}:
                raise ValueError(f"one flat cut of {self.flat[0].extent} for cells of {numels}")
        else:
            for i, axis in enumerate(self.flat):
                if axis.extent != self.cell_box(i).numel:
                    raise ValueError(
                        f"flat cut of {axis.extent} for cell {i} of {self.cell_box(i).numel}"
                    )

    def _distinct_shapes(self) -> Iterator[tuple[int, ...]]:
        from itertools import product

        return product(*({size for size, _ in a.runs} for a in self.axes))

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
