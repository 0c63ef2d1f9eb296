"""Absent pieces are found and named; nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.base.grids.block import box_region
from ckptd.base.grids.coverage import Uncovered, uncovered
from ckptd.base.grids.grid import Axis, Grid
from ckptd.base.grids.owners import ABSENT, Owners
from ckptd.errors import MismatchError
from ckptd.types import Box
from tests.base.grids import brute, strategies
from tests.base.grids.cutting import even_axis


@given(st.data())
def test_what_is_missing_is_what_absent_pieces_hold(data: st.DataObject) -> None:
    shape = data.draw(strategies.shapes())
    source = data.draw(strategies.cuts(shape))
    files = [data.draw(st.sampled_from([ABSENT, 0, 1])) for _ in source.pieces]
    box = data.draw(strategies.boxes(shape))
    target = data.draw(strategies.strided(box))
    found = uncovered(source.grid, Owners.from_array(files), [target], limit=10**6)

    wanted = set(brute.elements(box.offset, box.shape))
    lost = [set(p) & wanted for p, f in zip(source.pieces, files, strict=True) if f == ABSENT]
    assert found.numel == sum(len(p) for p in lost)
    assert found.pieces == sum(1 for p in lost if p)
    assert bool(found) == any(lost)
    listed = [e for b in found.boxes for e in brute.elements(b.offset, b.shape)]
    assert sorted(listed) == sorted(e for p in lost for e in p)


def test_the_list_is_bounded() -> None:
    """A tensor that is absent altogether is counted in full, and named by a few boxes."""
    grid = Grid((even_axis(1000, 1000),))
    found = uncovered(grid, Owners(((ABSENT, 0, 1000),)), [box_region(Box((0,), (1000,)))])
    assert (found.numel, found.pieces, len(found.boxes)) == (1000, 1000, 8)
    assert found.boxes[7] == Box((7,), (1,))


def test_nothing_absent_is_not_even_planned() -> None:
    grid = Grid((Axis(((1, 2**60),)),))
    owners = Owners(((0, 0, 2**60),))
    assert uncovered(grid, owners, [box_region(Box((0,), (2**60,)))]) == Uncovered()


def test_maps_of_other_grids_and_targets_outside_are_refused() -> None:
    grid = Grid((even_axis(4, 2),))
    with pytest.raises(ValueError):
        uncovered(grid, Owners(((0, 1, 3),)), [])
    with pytest.raises(MismatchError):
        uncovered(grid, Owners(((ABSENT, 0, 2),)), [box_region(Box((2,), (3,)))])
