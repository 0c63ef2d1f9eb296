"""Who holds which chunk: grids, owners and the copy planner. Pure functions, no I/O, no torch."""

from __future__ import annotations

from ckptd.base.grids.block import flat_regions

__all__ = ["flat_regions"]
