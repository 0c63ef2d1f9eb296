"""Regions say where each element lies; an enumeration says the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.base.grids.block import Region, box_region, flat_regions, piece_regions
from ckptd.base.grids.grid import Piece
from ckptd.types import Box
from tests.base.grids import brute, strategies


def _places(regions: list[Region]) -> dict[int, brute.Coordinate]:
    out: dict[int, brute.Coordinate] = {}
    for r in regions:
        places = brute.region_places(r.box.offset, r.box.shape, r.start, r.strides)
        assert not places.keys() & out.keys()
        assert r.span == (min(places), max(places) + 1)
        out |= places
    return out


@given(st.data())
def test_a_flat_range_is_its_slice_of_the_cell(data: st.DataObject) -> None:
    shape = data.draw(strategies.shapes())
    cell = Box(tuple(data.draw(st.integers(0, 9)) for _ in shape), shape)
    lo = data.draw(st.integers(0, cell.numel))
    hi = data.draw(st.integers(lo, cell.numel))
    wanted = brute.elements(cell.offset, shape)[lo:hi]
    regions = flat_regions(cell, lo, hi)
    assert _places(regions) == dict(enumerate(wanted))
    assert [r.start for r in regions] == sorted(r.start for r in regions)
    assert len(regions) <= max(1, 2 * len(shape) - 1)
    assert piece_regions(Piece(0, cell, (lo, hi))) == regions


def test_aligned_ranges_are_one_box() -> None:
    cell = Box((0, 0, 0), (4, 3, 5))
    for lo, hi, shape in [
        (0, 60, (4, 3, 5)),
        (15, 45, (2, 3, 5)),
        (20, 30, (1, 2, 5)),
        (7, 9, (1, 1, 2)),
    ]:
        (region,) = flat_regions(cell, lo, hi)
        assert region.box.shape == shape


@given(st.data())
def test_a_whole_cell_is_one_region(data: st.DataObject) -> None:
    shape = data.draw(strategies.shapes())
    box = Box((2,) * len(shape), shape)
    regions = piece_regions(Piece(0, box, None))
    assert _places(regions) == dict(enumerate(brute.elements(box.offset, shape)))
    assert len(regions) == (1 if box.numel else 0)


def test_ranges_outside_the_cell_are_refused() -> None:
    for lo, hi in [(-1, 2), (3, 2), (0, 7)]:
        with pytest.raises(ValueError):
            flat_regions(Box((0, 0), (2, 3)), lo, hi)


def test_box_regions_check_their_strides() -> None:
    box = Box((0, 4), (2, 3))
    assert box_region(box) == Region(box, 0, (3, 1))
    assert box_region(box, (1, 2), 5).span == (5, 11)
    assert box_region(Box((0,), (0,)), start=3).span == (3, 3)
    for strides, start in [((1,), 0), ((-1, 1), 0), ((3, 1), -1)]:
        with pytest.raises(ValueError):
            box_region(box, strides, start)
