"""Blocks: intersections element by element, and the byte runs of their source."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.layout.block import Block, box_region, intersect
from ckptd.types import Box
from tests.layout import brute, strategies


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


@given(st.data(), st.sampled_from([1, 2, 16]))
def test_source_runs_are_the_bytes_that_are_read(data: st.DataObject, itemsize: int) -> None:
    """From a row-major piece: rising, maximal, and exactly the bytes of the elements."""
    shape = data.draw(strategies.shapes())
    box = data.draw(strategies.boxes(shape))
    target = data.draw(strategies.strided(box))
    block = intersect(box_region(Box((0,) * len(shape), shape)), target)
    if block is None:
        return
    runs = list(block.source_runs(itemsize))
    assert len(runs) == block.source_run_count
    read = [at for offset, length in runs for at in range(offset, offset + length)]
    sources = sorted(s for s, _ in brute.block_places(block))
    assert read == [s * itemsize + i for s in sources for i in range(itemsize)]
    for (offset, length), (following, _) in pairwise(runs):
        assert offset + length < following


def test_a_transposed_target_still_reads_whole_rows() -> None:
    """Source runs are the source's own: the target's order must not shred a read."""
    box = Box((0, 0), (4, 6))
    block = intersect(box_region(box), box_region(box, (1, 4)))
    assert block is not None
    assert block.run_length == 1
    assert list(block.source_runs(4)) == [(0, 96)]


def test_a_transposed_source_is_read_front_to_back() -> None:
    assert list(Block((2, 3), 0, (1, 2), 0, (3, 1)).source_runs(4)) == [(0, 24)]
    assert list(Block((2, 3), 0, (2, 5), 0, (3, 1)).source_runs(1)) == [
        (at, 1) for at in (0, 2, 5, 7, 10, 12)
    ]


def test_a_narrow_column_is_one_run_a_row() -> None:
    block = intersect(box_region(Box((0, 0), (3, 10))), box_region(Box((0, 4), (3, 2))))
    assert block is not None
    assert (block.run_length, list(block.source_runs(2))) == (2, [(8, 4), (28, 4), (48, 4)])


def test_one_element() -> None:
    block = intersect(box_region(Box((), ())), box_region(Box((), ()), start=3))
    assert block == Block((), 0, (), 3, ())
    assert (block.numel, block.run_length, list(block.source_runs(8))) == (1, 1, [(0, 8)])


def test_different_dimensions_are_refused() -> None:
    with pytest.raises(ValueError):
        intersect(box_region(Box((0,), (1,))), box_region(Box((), ())))
