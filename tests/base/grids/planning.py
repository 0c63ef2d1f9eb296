"""Plans from grid to grid, as from disk to disk."""

from __future__ import annotations

from ckptd.base.grids.block import piece_regions
from ckptd.base.grids.grid import Grid
from ckptd.base.grids.plan import PieceCopy, plan_once


def plan_pieces(source: Grid, target: Grid) -> list[list[PieceCopy]]:
    """Return what fills each piece of a grid out of the pieces of another one."""
    return [
        plan_once(source, piece_regions(target.piece(number))) for number in range(target.npieces)
    ]
