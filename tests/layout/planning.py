"""Plans from grid to grid, as from disk to disk."""

from __future__ import annotations

from ckptd.layout.block import piece_regions
from ckptd.layout.grid import Grid
from ckptd.layout.plan import PieceCopy, plan_once


def plan_pieces(source: Grid, target: Grid) -> list[list[PieceCopy]]:
    """Return what fills each piece of a grid out of the pieces of another one."""
    return [
        plan_once(source, piece_regions(target.piece(number))) for number in range(target.npieces)
    ]
