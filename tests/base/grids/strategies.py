"""Random tensors, cuts and targets for property tests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import strategies as st

from ckptd.base.grids.block import Region
from ckptd.base.grids.grid import Axis, Grid
from ckptd.types import Box
from tests.base.grids import brute


@dataclass(frozen=True)
class Cut:
    """A cut as plain lists, for `brute`, and the same as a `Grid`."""

    cuts: list[list[int]]
    flats: list[list[int]] | None

    @property
    def grid(self) -> Grid:
        flats = tuple(Axis.from_sizes(sizes) for sizes in self.flats or [])
        if len(flats) > 1 and all(f == flats[0] for f in flats):
            flats = flats[:1]
        return Grid(tuple(Axis.from_sizes(sizes) for sizes in self.cuts), flats)

    @property
    def pieces(self) -> list[list[brute.Coordinate]]:
        return brute.pieces(self.cuts, self.flats)


def shapes(max_dims: int = 4, max_size: int = 6) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes, 0-d and zero-sized ones included."""
    sizes = st.one_of(st.integers(1, max_size), st.integers(0, max_size))
    return st.lists(sizes, max_size=max_dims).map(tuple)


@st.composite
def axis_sizes(draw: st.DrawFn, extent: int, max_cuts: int = 4) -> list[int]:
    """Sizes of the cells of one dimension: none empty, but one for an empty dimension."""
    if extent == 0:
        return [0]
    inner = draw(st.sets(st.integers(1, extent), max_size=max_cuts)) - {extent}
    edges = [0, *sorted(inner), extent]
    return [b - a for a, b in pairwise(edges)]


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> Cut:
    """A cut of a tensor: cells only, one flat cut for all, or one for each cell."""
    dims = [draw(axis_sizes(n)) for n in shape]
    kind = draw(st.sampled_from(["cells", "same", "each"]))
    if kind == "cells":
        return Cut(dims, None)
    if kind == "same":
        dims = [
            [s[0]] * (n // s[0]) if n and n % s[0] == 0 else [n]
            for s, n in zip(dims, shape, strict=True)
        ]
    numels = [math.prod(s) for _, s in brute.cells(dims)]
    if kind == "same":
        return Cut(dims, [draw(axis_sizes(numels[0]))] * len(numels))
    return Cut(dims, [draw(axis_sizes(n)) for n in numels])


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A box inside a tensor, empty ones included."""
    offset = tuple(draw(st.integers(0, n)) for n in shape)
    return Box(
        offset, tuple(draw(st.integers(0, n - o)) for o, n in zip(offset, shape, strict=True))
    )


@st.composite
def strided(draw: st.DrawFn, box: Box) -> Region:
    """A place for `box` in a buffer: any order of dimensions, with gaps."""
    order = draw(st.permutations(range(len(box.shape))))
    strides = [0] * len(box.shape)
    reach = 1
    for d in order:
        strides[d] = reach + draw(st.integers(0, 2))
        reach = strides[d] * max(1, box.shape[d])
    return Region(box, draw(st.integers(0, 5)), tuple(strides))
