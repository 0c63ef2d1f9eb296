"""Blocks: intersections element by element."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.base.grids.block import Block, box_region, intersect
from ckptd.types import Box
from tests.base.grids import brute, strategies


@given(st.data())
def test_an_intersection_is_the_common_elements(data: st.DataObject) -> None:
    shape = data.draw(strategies.shapes())
    a = data.draw(strategies.strided(data.draw(strategies.boxes(shape))))
    b = data.draw(strategies.strided(data.draw(strategies.boxes(shape))))
    block = intersect(a, b)
    here = brute.region_places(a.box.offset, a.box.shape, a.start, a.strides)
    there = brute.region_places(b.box.offset, b.box.shape, b.start, b.strides)
    place_of = {coordinate: place for place, coordinate in there.items()}
    wanted = {(p, place_of[c]) for p, c in here.items() if c in place_of}
    if block is None:
        assert not wanted
        return
    got = brute.block_places(block)
    assert len(got) == block.numel == len(wanted)
    assert set(got) == wanted
    assert block.source_span == (min(s for s, _ in got), max(s for s, _ in got) + 1)
    assert block.target_span == (min(t for _, t in got), max(t for _, t in got) + 1)
    assert block.numel % block.run_length == 0


def test_only_what_both_sides_have_in_a_row_is_a_run() -> None:
    box = Box((0, 0), (4, 6))
    transposed = intersect(box_region(box), box_region(box, (1, 4)))
    columns = intersect(box_region(Box((0, 0), (3, 10))), box_region(Box((0, 4), (3, 2))))
    assert transposed is not None
    assert columns is not None
    assert (transposed.run_length, columns.run_length) == (1, 2)


def test_one_element() -> None:
    block = intersect(box_region(Box((), ())), box_region(Box((), ()), start=3))
    assert block == Block((), 0, (), 3, ())
    assert (block.numel, block.run_length) == (1, 1)


def test_different_dimensions_are_refused() -> None:
    with pytest.raises(ValueError):
        intersect(box_region(Box((0,), (1,))), box_region(Box((), ())))
