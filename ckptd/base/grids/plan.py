"""Copy planner of plain loads: which pieces go where in a buffer; cache of plans; proof of a plan.

In it: how much the cache keeps; the largest plan that is proved by counting.

The pieces of a grid that a target meets are found by interval search per dimension, and by a walk
along the flat cut inside a cell, so work and memory grow with the pieces touched and with nothing
else. Layers and optimizer moments repeat the same few shapes, so plans are kept as templates.

Two functions prove that a plan writes each element of its target exactly once. `prove` counts: the
pieces of a grid are disjoint by construction, so a plan's blocks read disjoint parts of each target
region, and when their volumes add up to the region's nothing is left out. What remains to be shown
is that no two regions share a place in the buffer. That costs work in the number of blocks and
regions, none in elements.

`check` takes nothing for granted: it marks every element of the buffer that a plan writes. It is
for tests and for people who want to see it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ckptd.base.grids.block import Block, Region, Templates, flat_regions, intersect
from ckptd.base.grids.grid import Axis, Grid, is_unshared, reach_of, strides_of
from ckptd.errors import MismatchError, UsageError
from ckptd.types import Box


class PieceCopy(msgspec.Struct, frozen=True):
    """The copies out of one source piece.

    Attributes
    ----------
    piece
        Number of the source piece; block sources are relative to its first element.
    blocks
        The copies; no two of them write the same target element.
    """

    piece: int
    blocks: tuple[Block, ...]

    @property
    def numel(self) -> int:
        """Number of elements copied."""
        return sum(b.numel for b in self.blocks)


def plan(grid: Grid, targets: Sequence[Region]) -> list[PieceCopy]:
    """Plan the filling of one local buffer from the pieces of `grid`.

    Parameters
    ----------
    grid
        How the source tensor is cut.
    targets
        The regions of the buffer; together they are everything it wants.

    Returns
    -------
    list[PieceCopy]
        In piece order; a piece that contributes nothing is not there.

    Raises
    ------
    MismatchError
        A target does not lie inside the tensor.
    UsageError
        A target's strides write one buffer element twice.
    """
    key = (grid, tuple(targets))
    found = _TEMPLATES.get(key)
    if found is None:
        found = tuple(plan_once(grid, targets))
        _TEMPLATES.put(key, found, weight=1 + sum(len(c.blocks) for c in found))
    return list(found)


_TEMPLATES: Templates[tuple[Grid, tuple[Region, ...]], tuple[PieceCopy, ...]] = Templates(200_000)
"""Recent plans, by what they were made from; the weight of one is its number of blocks."""


def plan_once(grid: Grid, targets: Sequence[Region]) -> list[PieceCopy]:
    """Plan like `plan`, past the templates: for plans that will not be asked for again."""
    found: dict[int, list[Block]] = {}
    for target in targets:
        check_target(grid, target)
        if target.numel:
            pairs = _in_flats(grid, target) if grid.flat else _in_cells(grid, target)
            for piece, block in pairs:
                found.setdefault(piece, []).append(block)
    return [PieceCopy(piece, tuple(found[piece])) for piece in sorted(found)]


def check_target(grid: Grid, target: Region) -> None:
    """Refuse a target that is not inside the tensor, or that overlaps itself in its buffer."""
    box, shape = target.box, grid.shape
    fits = len(box.shape) == len(shape) == len(box.offset) == len(target.strides)
    if not fits or any(
        o < 0 or n < 0 or o + n > s for o, n, s in zip(box.offset, box.shape, shape, strict=True)
    ):
        raise MismatchError(
            "the target does not lie inside the tensor",
            wanted=f"a box of shape {box.shape} at {box.offset}, strides {target.strides}",
            found=f"a tensor of shape {shape}",
        )
    if not box.numel:
        return
    if not is_unshared(box.shape, target.strides):
        raise UsageError(
            "the target's strides may give two elements one place in memory",
            found=f"shape {box.shape}, strides {target.strides}",
            hint="load into a tensor of its own (.contiguous(), not .expand())",
        )


def _touched(axis: Axis, lo: int, hi: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield ``(cell, first element, count, cell start, cell size)`` of cells in ``[lo, hi)``."""
    for cell in axis.cells_in(lo, hi):
        start, size = axis.cell(cell)
        at = max(lo, start)
        yield cell, at, min(hi, start + size) - at, start, size


_Partial = tuple[int, int, int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Cell number, cell elements, source start, target start, shape, source and target strides."""


def _in_cells(grid: Grid, target: Region) -> Iterator[tuple[int, Block]]:
    """Yield the block of each cell that `target` meets.

    Dimensions are added from the innermost out, so what inner dimensions share is computed once;
    each step keeps the block in lowest terms, as `intersect` does.
    """
    cell_strides = strides_of(grid.cell_shape)
    partials: list[_Partial] = [(0, 1, 0, target.start, (), (), ())]
    for d in range(len(grid.axes) - 1, -1, -1):
        lo, size, stride = target.box.offset[d], target.box.shape[d], target.strides[d]
        partials = [
            _extend(
                partial, cell * cell_strides[d], at - start, n, width, (at - lo) * stride, stride
            )
            for cell, at, n, start, width in _touched(grid.axes[d], lo, lo + size)
            for partial in partials
        ]
    for cell, _, source, place, shape, source_strides, target_strides in partials:
        yield cell, Block(shape, source, source_strides, place, target_strides)


def _extend(
    partial: _Partial, cell: int, skip: int, n: int, width: int, place: int, stride: int
) -> _Partial:
    """Add one dimension: `n` of a cell's `width` slices, after the first `skip`."""
    cells, numel, source, target, shape, sources, targets = partial
    cells += cell
    source += skip * numel
    target += place
    if n > 1:
        if shape and numel == sources[0] * shape[0] and stride == targets[0] * shape[0]:
            shape = (n * shape[0], *shape[1:])
        else:
            shape, sources, targets = (n, *shape), (numel, *sources), (stride, *targets)
    return cells, numel * width, source, target, shape, sources, targets


def _in_flats(grid: Grid, target: Region) -> Iterator[tuple[int, Block]]:
    """Yield the blocks of each flat range that `target` meets, cell by cell."""
    cells: list[tuple[int, Box]] = [(0, Box((), ()))]
    for axis, lo, size in zip(grid.axes, target.box.offset, target.box.shape, strict=True):
        touched = [(c, start, width) for c, _, _, start, width in _touched(axis, lo, lo + size)]
        cells = [
            (number * axis.ncells + c, Box((*box.offset, start), (*box.shape, width)))
            for number, box in cells
            for c, start, width in touched
        ]
    for number, box in cells:
        flat = grid.flat_axis(number)
        first = grid.first_piece(number)
        if flat is not None:
            for part, block in _in_flat_cell(box, flat, target):
                yield first + part, block


def _in_flat_cell(cell: Box, flat: Axis, target: Region) -> Iterator[tuple[int, Block]]:
    """Yield ``(part, block)`` for the parts of one cell: each part visited meets the target."""
    common = cell.intersect(target.box)
    if common is None:
        return
    offset = tuple(o - c for o, c in zip(common.offset, cell.offset, strict=True))
    inner = Box(offset, common.shape)
    at = _next_element(inner, cell.shape, 0)
    while at is not None:
        part = flat.cell_at(at)
        start, size = flat.cell(part)
        for region in flat_regions(cell, start, start + size):
            block = intersect(region, target)
            if block is not None:
                yield part, block
        at = _next_element(inner, cell.shape, start + size)


def _next_element(box: Box, shape: tuple[int, ...], at: int) -> int | None:
    """Return the first row-major element of `shape` that is in `box` and not before `at`.

    Skipping like this is what keeps the walk along a flat cut proportional to the parts that the
    target meets: a narrow column of a cell in tiny parts would else visit every part.
    """
    coordinates = []
    strides = strides_of(shape)
    for stride in strides:
        coordinate, at = divmod(at, stride)
        coordinates.append(coordinate)
    end = box.end
    if not shape:
        return 0 if at == 0 else None
    for d, coordinate in enumerate(coordinates):
        if coordinate < box.offset[d]:
            coordinates[d:] = box.offset[d:]
            break
        if coordinate >= end[d]:
            # Past the box along d: step on along the nearest outer dimension that has room.
            while d and coordinates[d - 1] + 1 >= end[d - 1]:
                d -= 1
            if not d:
                return None
            coordinates[d - 1] += 1
            coordinates[d:] = box.offset[d:]
            break
    return sum(c * s for c, s in zip(coordinates, strides, strict=True))


_MAX_MARKS = 2**28
_MAX_CELLS = 2**22


class Proof(msgspec.Struct, frozen=True):
    """The result of a proof, in numbers: every element of the target is written exactly once.

    Attributes
    ----------
    elements
        Elements of the target.
    pieces
        Source pieces read.
    blocks
        Strided copies.
    """

    elements: int
    pieces: int
    blocks: int


def prove(grid: Grid, targets: Sequence[Region]) -> Proof:
    """Prove by counting that the plan writes each element of `targets` exactly once.

    Raises
    ------
    UsageError
        Two target regions share a place in the buffer, or are laid out so that this cannot be told
        from their strides (; `check` can tell).
    MismatchError
        A target does not lie inside the tensor.
    """
    copies = plan(grid, targets)
    _prove_apart([t for t in targets if t.numel])
    wanted = sum(t.numel for t in targets)
    return _counted(copies, wanted)


def check(grid: Grid, targets: Sequence[Region]) -> Proof:
    """Execute the plan on a buffer of counters, and compare with what `targets` ask for.

    Raises
    ------
    UsageError
        An element is not written exactly once, one outside the targets is written, or the buffer
        is too large to be counted (2^28 elements).
    MismatchError
        A target does not lie inside the tensor.
    """
    copies = plan(grid, targets)
    size = max((t.span[1] for t in targets), default=0)
    if size > _MAX_MARKS:
        raise UsageError("the target is too large to be checked element by element", found=size)
    marks = np.zeros(size, dtype=np.uint8)
    for copy in copies:
        for block in copy.blocks:
            _mark(marks, block.target_start, block.shape, block.target_strides)
    wanted = np.zeros(size, dtype=np.uint8)
    for target in targets:
        if target.numel:
            _mark(wanted, target.start, target.box.shape, target.strides)
    wrong = np.flatnonzero((marks != wanted) | (wanted > 1))
    if len(wrong):
        at = int(wrong[0])
        raise UsageError(
            "a plan does not write each target element exactly once",
            where=f"element {at} of the buffer, and {len(wrong) - 1} more",
            wanted=f"{min(int(wanted[at]), 1)} writes",
            found=f"{int(marks[at])}",
        )
    return _counted(copies, sum(t.numel for t in targets))


def _counted(copies: Sequence[PieceCopy], wanted: int) -> Proof:
    written = sum(c.numel for c in copies)
    if written != wanted:
        raise UsageError(
            "a plan does not write each target element exactly once", wanted=wanted, found=written
        )
    return Proof(wanted, len(copies), sum(len(c.blocks) for c in copies))


def _mark(
    marks: NDArray[np.uint8], start: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    """Add one to each element of a strided block, without wrapping around."""
    last = start + reach_of(shape, strides) - 1
    if not 0 <= start <= last < len(marks):
        raise UsageError(
            "a plan writes outside of its target", wanted=f"below {len(marks)}", found=last
        )
    view = as_strided(marks[start:], shape, strides)
    np.add(view, view < 255, out=view, casting="unsafe")


def _prove_apart(targets: Sequence[Region]) -> None:
    """Refuse regions that share a place in the buffer, or that cannot be told apart."""
    spans = sorted(t.span for t in targets)
    if all(end <= start for (_, end), (start, _) in pairwise(spans)):
        return
    boxes = _buffer_boxes(targets)
    if boxes is None:
        raise UsageError(
            "cannot tell from their strides that the target regions do not overlap",
            hint="count the elements instead: ckptd.base.grids.plan.check",
        )
    if int(_depths(*boxes).max()) > 1:
        raise UsageError("two target regions share a place in the buffer")


def _buffer_boxes(targets: Sequence[Region]) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Return first and last corner of each region in the coordinates of one strided buffer.

    The coordinates of a place are its start in the mixed radix of the strides that all regions
    have in common. None where there is no such buffer: other strides, or a region that runs over
    the end of a row.
    """
    strides = targets[0].strides
    if any(t.strides != strides for t in targets):
        return None
    dims = sorted(range(len(strides)), key=lambda d: (-strides[d], d))
    starts = np.array([t.start for t in targets], dtype=np.int64)
    shapes = np.array([t.box.shape for t in targets], dtype=np.int64)
    lo = np.empty_like(shapes)
    for d in dims:
        if strides[d] == 0:
            return None
        lo[:, d], starts = np.divmod(starts, strides[d])
    hi = lo + shapes
    for outer, inner in pairwise(dims):
        row, rest = divmod(strides[outer], strides[inner])
        if rest or int(hi[:, inner].max()) > row:
            return None
    return (lo, hi) if not starts.any() else None


def _depths(lo: NDArray[np.int64], hi: NDArray[np.int64]) -> NDArray[np.int32]:
    """How many boxes cover each cell of the grid that all their sides make."""
    cuts = [np.union1d(lo[:, d], hi[:, d]) for d in range(lo.shape[1])]
    cells = math.prod(max(1, len(c) - 1) for c in cuts)
    if cells > _MAX_CELLS:
        raise UsageError(
            "too many target regions to tell that they do not overlap",
            hint="count the elements instead: ckptd.base.grids.plan.check",
        )
    depth = np.zeros([max(1, len(c) - 1) for c in cuts], dtype=np.int32)
    firsts = [np.searchsorted(c, lo[:, d]) for d, c in enumerate(cuts)]
    lasts = [np.searchsorted(c, hi[:, d]) for d, c in enumerate(cuts)]
    for i in range(len(lo)):
        depth[tuple(slice(f[i], e[i]) for f, e in zip(firsts, lasts, strict=True))] += 1
    return depth
