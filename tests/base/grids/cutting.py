"""Cuts that tests of grids need."""

from __future__ import annotations

from ckptd.base.grids.grid import Axis


def even_axis(extent: int, parts: int) -> Axis:
    """Cut `extent` the way torch's ``Shard`` does: ceil-sized cells, the last one short.

    Ranks that get nothing have no cell. An `extent` of zero gives one empty cell.

    Raises
    ------
    ValueError
        `extent` is negative or beyond `MAX_EXTENT`.
    """
    if extent == 0 or parts <= 1:
        return Axis(((extent, 1),))
    size = -(-extent // parts)
    full, rest = divmod(extent, size)
    runs = ((size, full), (rest, 1)) if rest else ((size, full),)
    return Axis(runs)
