"""Proofs that a plan writes each element of its target exactly once.

`prove` counts: the pieces of a grid are disjoint by construction, so a plan's blocks read disjoint
parts of each target region, and when their volumes add up to the region's nothing is left out. What
remains to be shown is that no two regions share a place in the buffer. That costs work in the
number of blocks and regions, none in elements.

`check` takes nothing for granted: it marks every element of the buffer that a plan writes. It is
for tests and for people who want to see it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ckptd.errors import UsageError
from ckptd.layout.grid import Grid
from ckptd.layout.plan import PieceCopy, plan
from ckptd.layout.region import Region

__all__ = ["Proof", "check", "prove"]

_MAX_MARKS = 2**28
_MAX_CELLS = 2**22


@dataclass(frozen=True, slots=True)
class Proof:
    """What was shown, in numbers: every element of the target is written exactly once.

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
        Two target regions share a place in the buffer, or are laid out so that this cannot be
        told from their strides (kind ``unproved``; `check` can tell).
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
    last = start + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
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
            kind="unproved",
            hint="count the elements instead: ckptd.layout.proof.check",
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
            kind="unproved",
            hint="count the elements instead: ckptd.layout.proof.check",
        )
    depth = np.zeros([max(1, len(c) - 1) for c in cuts], dtype=np.int32)
    firsts = [np.searchsorted(c, lo[:, d]) for d, c in enumerate(cuts)]
    lasts = [np.searchsorted(c, hi[:, d]) for d, c in enumerate(cuts)]
    for i in range(len(lo)):
        depth[tuple(slice(f[i], e[i]) for f, e in zip(firsts, lasts, strict=True))] += 1
    return depth
