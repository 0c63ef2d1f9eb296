"""Sets of digest blocks, and the cutting of copies to them; blocks are 16 bytes here."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.base.grids.block import Block, box_region, intersect
from ckptd.base.grids.runs import (
    Runs,
    clip,
    coalesce,
    count,
    cut_runs,
    decode_runs,
    encode_runs,
    merge,
    no_runs,
    sweep,
)
from ckptd.checkpoint.load import plan as blocks
from ckptd.checkpoint.load.plan import BlockLine, split, touched
from ckptd.errors import CorruptError
from ckptd.types import Box
from tests.checkpoint.load.builder import random_box, random_region

SIZE = 16

positions = st.frozensets(st.integers(0, 40), max_size=30)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", SIZE)


def runs_of(members: frozenset[int]) -> Runs:
    return merge(np.array([(m, m + 1) for m in sorted(members)], np.int64).reshape(-1, 2))


def members_of(runs: Runs) -> set[int]:
    return {m for lo, hi in runs.tolist() for m in range(lo, hi)}


def random_block(rng: random.Random) -> Block | None:
    """Return the block common to a piece, which is packed, and a target, which need not be."""
    shape = tuple(rng.choice([1, 2, 3, 9, 30]) for _ in range(rng.randrange(4)))
    piece = box_region(random_box(rng, shape))
    target, _ = random_region(rng, random_box(rng, shape), 0)
    return intersect(piece, target)


def elements(block: Block) -> set[tuple[int, int]]:
    """All (source, target) pairs."""
    return {
        (
            block.source_start + sum(i * s for i, s in zip(at, block.source_strides, strict=True)),
            block.target_start + sum(i * s for i, s in zip(at, block.target_strides, strict=True)),
        )
        for at in itertools.product(*map(range, block.shape))
    }


def blocks_of(ranges: list[tuple[int, int]]) -> set[int]:
    return {b for lo, hi in ranges for b in range(lo // SIZE, -(-hi // SIZE))}


@given(st.integers(0, 1 << 48), st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 9))
def test_touched_is_what_the_elements_touch(seed: int, itemsize: int, start: int) -> None:
    block = random_block(random.Random(seed))
    if block is None:
        return
    start *= itemsize
    bytes_of = [(start + s * itemsize, start + (s + 1) * itemsize) for s, _ in elements(block)]
    assert blocks_of(touched(block, itemsize, start)) == blocks_of(bytes_of)


@given(
    st.integers(0, 1 << 48), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([16, 48, 100, 999])
)
def test_split_keeps_every_element_and_needs_all_it_spans(
    seed: int, itemsize: int, span: int
) -> None:
    block = random_block(random.Random(seed))
    if block is None:
        return
    needed = blocks_of([(s * itemsize, (s + 1) * itemsize) for s, _ in elements(block)])
    parts = list(split(block, itemsize, span, SIZE))
    joined = [e for part in parts for e in elements(part)]
    assert len(joined) == block.numel
    assert set(joined) == elements(block)
    for part in parts:
        lo, hi = part.source_span
        assert (hi - lo) * itemsize <= span
        assert blocks_of([(lo * itemsize, hi * itemsize)]) <= needed
        assert all(n > 1 for n in part.shape)


@given(positions)
def test_runs_and_back(members: frozenset[int]) -> None:
    runs = runs_of(members)
    assert members_of(runs) == members
    assert count(runs) == len(members)
    assert (decode_runs(encode_runs(runs)) == runs).all()
    assert (runs[1:, 0] > runs[:-1, 1]).all()


@given(positions, positions, st.integers(0, 3))
def test_coalesce_fills_small_holes_that_nobody_needs(
    mine: frozenset[int], others: frozenset[int], gap: int
) -> None:
    needed = members_of(runs_of(mine | others))
    found = coalesce(runs_of(mine), gap, runs_of(mine | others))
    extra = members_of(found) - mine
    assert mine <= members_of(found)
    assert not extra & needed
    holes = zip(runs_of(mine)[:-1, 1].tolist(), runs_of(mine)[1:, 0].tolist(), strict=True)
    expected = {
        m
        for lo, hi in holes
        if hi - lo <= gap and not needed & set(range(lo, hi))
        for m in range(lo, hi)
    }
    assert extra == expected


@given(positions, st.integers(0, 41), st.integers(0, 41))
def test_clip(members: frozenset[int], lo: int, hi: int) -> None:
    assert members_of(clip(runs_of(members), lo, hi)) == {m for m in members if lo <= m < hi}


@given(positions, st.integers(1, 12))
def test_cuts_are_of_one_size(members: frozenset[int], size: int) -> None:
    runs = runs_of(members)
    cuts = cut_runs(runs, size)
    parts = [clip(runs, a, b) for a, b in itertools.pairwise(cuts)]
    assert set().union(*map(members_of, parts)) == members
    assert all(count(p) == size for p in parts[:-1])
    assert all(count(p) <= size for p in parts)


@given(st.lists(positions, min_size=1, max_size=4))
def test_sweep_tells_who_needs_what(sets: list[frozenset[int]]) -> None:
    segments, held = sweep([runs_of(s) for s in sets])
    for (lo, hi), row in zip(segments.tolist(), held.tolist(), strict=True):
        for position in range(lo, hi):
            assert row == [position in s for s in sets]
    assert count(segments) == len(frozenset().union(*sets))


def test_nothing() -> None:
    assert count(no_runs()) == 0
    assert cut_runs(no_runs(), 5) == [0, 0]
    assert len(sweep([])[0]) == 0


def test_a_line_of_files() -> None:
    line = BlockLine([SIZE * 3 - 1, 0, 5])
    lo, hi = line.positions(2, 0, 5)
    assert (line.file_at(lo), hi - lo) == (2, 1)
    assert line.byte_range(2, lo, hi) == (0, 5)
    assert line.positions(0, 17, 33) == (1, 3)
    runs = merge(np.array([(0, 3), (lo, hi)], np.int64))
    assert line.byte_count(runs) == SIZE * 3 - 1 + 5
    assert line.files_of(runs) == [0, 2]
    assert list(line.windows(runs, 2)) == [(0, 0, 2), (0, 2, 3), (2, lo, hi)]
    assert len(coalesce(runs, 1, runs)) == 2


@pytest.mark.parametrize("sizes", [[1 << 70], [-1], [1 << 66] * 3])
def test_impossible_sizes(sizes: list[int]) -> None:
    with pytest.raises(CorruptError) as caught:
        BlockLine(sizes)
    assert "impossible file sizes in the manifest" in caught.value.message


def test_random_box_region_is_inside() -> None:
    rng = random.Random(1)
    for _ in range(50):
        region, end = random_region(rng, Box((0, 0), (3, 4)), 5)
        assert region.span[0] == 5
        assert region.span[1] <= end
