"""A layout and what was observed: sizes, extents, and rules that would fit."""

from __future__ import annotations

from ckptd.lay.bind.axes import sorted_ranks
from ckptd.lay.bind.fit import fit_findings, with_fits
from ckptd.lay.bind.globs import FilledGlobs, filled_globs, with_globs
from ckptd.lay.bind.layouts import bind_all, bind_ranks, bind_sizes, bind_stored
from ckptd.lay.bind.observed import Observed, from_stored, unmatched

__all__ = [
    "FilledGlobs",
    "Observed",
    "bind_all",
    "bind_ranks",
    "bind_sizes",
    "bind_stored",
    "filled_globs",
    "fit_findings",
    "from_stored",
    "sorted_ranks",
    "unmatched",
    "with_fits",
    "with_globs",
]
