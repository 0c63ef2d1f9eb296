"""Elements of a target that a checkpoint leaves out: of pieces that no file holds on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckptd.base.grids.block import Region, piece_regions
from ckptd.base.grids.grid import Grid
from ckptd.base.grids.owners import ABSENT, Owners
from ckptd.base.grids.plan import PieceCopy, plan
from ckptd.types import Box


@dataclass(frozen=True, slots=True)
class Uncovered:
    """Elements of a target that no file holds.

    Attributes
    ----------
    numel
        How many; zero when the target is covered.
    pieces
        How many absent pieces they belong to.
    boxes
        Where, in tensor coordinates: the first few boxes, in piece order.
    """

    numel: int = 0
    pieces: int = 0
    boxes: tuple[Box, ...] = ()

    def __bool__(self) -> bool:
        return self.numel > 0


def uncovered(
    grid: Grid, owners: Owners, targets: Sequence[Region], *, limit: int = 8
) -> Uncovered:
    """Return what the absent pieces of a tensor leave out of `targets`.

    Parameters
    ----------
    grid, owners
        The source tensor's pieces, and the ranks that hold them.
    targets
        The regions of the local buffer, as for `plan`.
    limit
        Most boxes to list: an error message needs the first few, not all.

    Raises
    ------
    ValueError
        The owner map does not speak of as many pieces as the grid has.
    MismatchError, UsageError
        As `plan`.
    """
    if owners.npieces != grid.npieces:
        raise ValueError(f"owners of {owners.npieces} pieces for a grid of {grid.npieces}")
    if not owners.has_absent:
        return Uncovered()
    copies = plan(grid, targets)
    files = owners.owners_of(np.array([c.piece for c in copies], dtype=np.int64))
    missing = [copies[i] for i in np.flatnonzero(files == ABSENT)]
    return Uncovered(
        sum(c.numel for c in missing), len(missing), _boxes(grid, missing, targets, limit)
    )


def _boxes(
    grid: Grid, missing: Sequence[PieceCopy], targets: Sequence[Region], limit: int
) -> tuple[Box, ...]:
    boxes: list[Box] = []
    for copy in missing:
        for region in piece_regions(grid.piece(copy.piece)):
            for target in targets:
                common = region.box.intersect(target.box)
                if common is not None:
                    boxes.append(common)
                    if len(boxes) == limit:
                        return tuple(boxes)
    return tuple(boxes)
