"""From a program to equations: names, lets, uses and defaults are looked up."""

from __future__ import annotations

from ckptd.lay.resolve.cut import (
    MAX_DEPTH,
    Ints,
    ValueScope,
    assigned_runs,
    evaluate,
    part,
    parts,
    scope_of,
)
from ckptd.lay.resolve.drafts import has_globs
from ckptd.lay.resolve.equation import Axes, Bound, Equation, Family, MeshShape, Resolved, Tags
from ckptd.lay.resolve.finding import Finding, raise_first, render
from ckptd.lay.resolve.layouts import resolve, resolve_all
from ckptd.lay.resolve.mesh import independent
from ckptd.lay.resolve.numbers import ALL, NONE, Numbers
from ckptd.lay.resolve.path import Path, paths
from ckptd.lay.resolve.pattern import Lookup, covers, filled, found_regex
from ckptd.lay.resolve.pipe import stage_parts
from ckptd.lay.resolve.recipe import is_recipe

__all__ = [
    "ALL",
    "MAX_DEPTH",
    "NONE",
    "Axes",
    "Bound",
    "Equation",
    "Family",
    "Finding",
    "Ints",
    "Lookup",
    "MeshShape",
    "Numbers",
    "Path",
    "Resolved",
    "Tags",
    "ValueScope",
    "assigned_runs",
    "covers",
    "evaluate",
    "filled",
    "found_regex",
    "has_globs",
    "independent",
    "is_recipe",
    "part",
    "parts",
    "paths",
    "raise_first",
    "render",
    "resolve",
    "resolve_all",
    "scope_of",
    "stage_parts",
]
