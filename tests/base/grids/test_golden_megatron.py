"""The golden fixture: Megatron, TP2 x DP3, distributed optimizer, a row-parallel weight.

The weight is 4 x 12. Each tensor rank holds six columns of it, 24 elements, and lays them into a
flat bucket with its other parameters; each of three data ranks owns a third of the bucket, moments
included. The two buckets are packed differently, so the cuts of the two cells differ:

========  ==========================  ===========  ======================
tp rank   in front of the weight      bucket       its data ranks hold
========  ==========================  ===========  ======================
0         a norm of 5                 36 (padded)  7, 12 and 5 elements
1         nothing                     30 (padded)  10, 10 and 4 elements
========  ==========================  ===========  ======================

None of these ranges is a box, and no two of them line up.
"""

from __future__ import annotations

import itertools

import pytest

from ckptd.base.grids.block import Block, Region, box_region, flat_regions
from ckptd.base.grids.grid import Axis, Grid, whole
from ckptd.base.grids.owners import Owners
from ckptd.base.grids.plan import check, plan, prove
from ckptd.base.grids.sharding import local_regions
from ckptd.types import Box
from tests.base.grids import brute
from tests.base.grids.cutting import even_axis
from tests.base.grids.planning import plan_pieces

SHAPE = (4, 12)
FLATS = [[7, 12, 5], [10, 10, 4]]
PIECES = brute.pieces([[4], [6, 6]], FLATS)


def bucket_ranges(front: int, numel: int, bucket: int, ranks: int) -> list[int]:
    """Elements of a parameter in each rank's equal share of its bucket."""
    share = bucket // ranks
    edges = [min(max(share * r - front, 0), numel) for r in range(ranks + 1)]
    return [b - a for a, b in itertools.pairwise(edges)]


@pytest.fixture
def grid() -> Grid:
    assert bucket_ranges(5, 24, 36, 3) == FLATS[0]
    assert bucket_ranges(0, 24, 30, 3) == FLATS[1]
    flats = tuple(Axis.from_sizes(sizes) for sizes in FLATS)
    return Grid((even_axis(4, 1), even_axis(12, 2)), flats)


def _one(n: int, source: int, target: int) -> Block:
    """A run of `n` elements."""
    return Block((n,), source, (1,), target, (1,)) if n > 1 else Block((), source, (), target, ())


def test_pieces_and_owners(grid: Grid) -> None:
    assert grid.npieces == 6
    assert [grid.piece(i).flat for i in range(6)] == [
        (0, 7),
        (7, 19),
        (19, 24),
        (0, 10),
        (10, 20),
        (20, 24),
    ]
    # Rank = dp * 2 + tp; pieces are numbered tensor rank by tensor rank.
    assert Owners.from_array([0, 2, 4, 1, 3, 5]).runs == ((0, 2, 3), (1, 2, 3))


def test_the_plan_of_the_first_rows_is_this_one(grid: Grid) -> None:
    """Rows 0 and 1, as the first of two FSDP ranks wants them: worked out by hand."""
    copies = plan(grid, local_regions(SHAPE, (2,), (("shard", 0),), (0,)))
    assert {c.piece: c.blocks for c in copies} == {
        0: (_one(6, 0, 0), _one(1, 6, 12)),  # row 0, columns 0 to 5; row 1, column 0
        1: (_one(5, 0, 13),),  # row 1, columns 1 to 5
        3: (_one(6, 0, 6), _one(4, 6, 18)),  # row 0, columns 6 to 11; row 1, columns 6 to 9
        4: (_one(2, 0, 22),),  # row 1, columns 10 and 11
    }


TARGETS: dict[str, list[list[Region]]] = {
    "whole": [[box_region(Box((0, 0), SHAPE))]],
    "TP4": [local_regions(SHAPE, (4,), (("shard", 1),), (i,)) for i in range(4)],
    "FSDP3, uneven": [local_regions(SHAPE, (3,), (("shard", 0),), (i,)) for i in range(3)],
    "FSDP2 x TP3": [
        local_regions(SHAPE, (2, 3), (("shard", 0), ("shard", 1)), (i, j))
        for i in range(2)
        for j in range(3)
    ],
    "ZeRO5": [flat_regions(Box((0, 0), SHAPE), 10 * i, min(48, 10 * i + 10)) for i in range(5)],
    "Megatron TP2 x DP2": [
        flat_regions(Box((0, 6 * t), (4, 6)), lo, hi)
        for t in range(2)
        for lo, hi in ((0, 15), (15, 24))
    ],
}


@pytest.mark.parametrize("layout", list(TARGETS))
def test_it_loads_into_every_layout(grid: Grid, layout: str) -> None:
    for targets in TARGETS[layout]:
        wanted: dict[int, brute.Coordinate] = {}
        for r in targets:
            wanted |= brute.region_places(r.box.offset, r.box.shape, r.start, r.strides)
        assert brute.execute(plan(grid, targets), PIECES) == wanted
        assert prove(grid, targets) == check(grid, targets)


def test_every_layout_loads_into_it(grid: Grid) -> None:
    for source, pieces in (
        (whole(SHAPE), brute.pieces([[4], [12]], None)),
        (Grid((even_axis(4, 3), even_axis(12, 5))), brute.pieces([[2, 2], [3, 3, 3, 3]], None)),
        (
            Grid((even_axis(4, 1), even_axis(12, 1)), (Axis(((10, 4), (8, 1))),)),
            brute.pieces([[4], [12]], [[10, 10, 10, 10, 8]]),
        ),
    ):
        for copies, wanted in zip(plan_pieces(source, grid), PIECES, strict=True):
            assert brute.execute(copies, pieces) == dict(enumerate(wanted))


def test_blocks_grow_with_pieces_and_not_with_their_square() -> None:
    """Twice the data ranks, about twice the blocks: 3 a piece at most, for two dimensions."""
    for ranks in (3, 6, 12, 24, 48):
        rows, columns = 96, 64
        cut = Axis.from_sizes(bucket_ranges(5, rows * columns, rows * columns + 91, ranks))
        source = Grid((even_axis(rows, 1), even_axis(columns * 2, 2)), (cut,))
        target = Grid((even_axis(rows, 2), even_axis(columns * 2, 1)))
        blocks = sum(len(c.blocks) for copies in plan_pieces(source, target) for c in copies)
        assert source.npieces <= blocks <= 3 * (source.npieces + 2 * 2)
