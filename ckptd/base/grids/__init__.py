"""Holders of chunks: grids, owners and the copy planner; pure functions, no torch."""

from __future__ import annotations

from ckptd.base.grids.block import flat_regions
from ckptd.base.grids.grid import Axis, Grid, strides_of

__all__ = ["Axis", "Grid", "flat_regions", "strides_of"]
