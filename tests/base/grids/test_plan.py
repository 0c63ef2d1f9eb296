"""The planner against an interpreter that enumerates every element."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.base.grids import plan as planner
from ckptd.base.grids.block import Region, box_region, flat_regions
from ckptd.base.grids.grid import Axis, Grid, whole
from ckptd.base.grids.plan import plan, plan_once
from ckptd.errors import MismatchError, UsageError
from ckptd.types import Box
from tests.base.grids import brute, strategies
from tests.base.grids.cutting import even_axis
from tests.base.grids.planning import plan_pieces


@given(st.data())
def test_grid_to_grid_moves_every_element_once(data: st.DataObject) -> None:
    """N-d to N-d, N-d to flat, flat to N-d and flat to flat, 0-d and zero-sized ones too."""
    shape = data.draw(strategies.shapes())
    source = data.draw(strategies.cuts(shape))
    target = data.draw(strategies.cuts(shape))
    pieces = source.pieces
    for copies, wanted in zip(plan_pieces(source.grid, target.grid), target.pieces, strict=True):
        assert brute.execute(copies, pieces) == dict(enumerate(wanted))
        touched = {i for i, held in enumerate(pieces) if set(held) & set(wanted)}
        assert [c.piece for c in copies] == sorted(touched)


@given(st.data())
def test_a_strided_target_gets_its_box(data: st.DataObject) -> None:
    shape = data.draw(strategies.shapes())
    source = data.draw(strategies.cuts(shape))
    target = data.draw(strategies.strided(data.draw(strategies.boxes(shape))))
    copies = plan(source.grid, [target])
    got = brute.execute(copies, source.pieces)
    box = target.box
    assert got == brute.region_places(box.offset, box.shape, target.start, target.strides)


@given(st.data())
def test_several_regions_of_one_buffer(data: st.DataObject) -> None:
    """A buffer of two disjoint boxes, one behind the other."""
    shape = data.draw(strategies.shapes(max_dims=3).filter(lambda s: len(s) > 0 and s[0] > 1))
    source = data.draw(strategies.cuts(shape))
    at = data.draw(st.integers(1, shape[0] - 1))
    zeros = (0,) * (len(shape) - 1)
    upper = box_region(Box((0, *zeros), (at, *shape[1:])))
    lower = box_region(Box((at, *zeros), (shape[0] - at, *shape[1:])), start=upper.numel + 3)
    got = brute.execute(plan(source.grid, [lower, upper]), source.pieces)
    wanted: dict[int, brute.Coordinate] = {}
    for region in (upper, lower):
        box = region.box
        wanted |= brute.region_places(box.offset, box.shape, region.start, region.strides)
    assert got == wanted


@given(st.data())
def test_blocks_are_in_lowest_terms(data: st.DataObject) -> None:
    shape = data.draw(strategies.shapes())
    source, target = data.draw(strategies.cuts(shape)), data.draw(strategies.cuts(shape))
    for copies in plan_pieces(source.grid, target.grid):
        for block in (b for c in copies for b in c.blocks):
            assert all(n > 1 for n in block.shape)
            sides = (block.source_strides, block.target_strides)
            for d in range(len(block.shape) - 1):
                assert any(s[d] != s[d + 1] * block.shape[d + 1] for s in sides)


def test_whole_to_whole_is_one_run() -> None:
    (copy,) = plan(whole((4, 5, 6)), [box_region(Box((0, 0, 0), (4, 5, 6)))])
    (block,) = copy.blocks
    assert (block.shape, block.source_strides, block.run_length) == ((120,), (1,), 120)


def test_rows_to_columns_touches_each_piece_once() -> None:
    """Blocks grow with pieces: n rows by n columns are n blocks a column, not n squared."""
    counts = []
    for n in (8, 16, 32):
        rows = Grid((even_axis(64, n), even_axis(64, 1)))
        columns = Grid((even_axis(64, 1), even_axis(64, n)))
        total = [sum(len(c.blocks) for c in copies) for copies in plan_pieces(rows, columns)]
        assert total == [n] * n
        counts.append(sum(total))
    assert counts == [64, 256, 1024]  # n target pieces that each touch n source pieces


def test_memory_grows_with_the_pieces() -> None:
    """Four times the pieces, about four times the memory; pairs of boxes would be sixteen."""
    peaks = []
    for n in (1000, 4000):
        grid = Grid((Axis(((3, n),)), even_axis(64, 1)))
        tracemalloc.start()
        copies = plan_once(grid, [box_region(Box((1, 0), (3 * n - 2, 64)))])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(copies) == sum(len(c.blocks) for c in copies) == n
    assert peaks[1] < 8 * peaks[0]
    assert peaks[1] < 4000 * 1500


def test_a_rank_plans_its_own_pieces_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among 2^40 pieces a small target looks at no more than the ones that it meets."""
    looked = _count_cells(monkeypatch)
    grid = Grid((Axis(((3, 2**40),)), Axis(((7, 4),))))
    target = box_region(Box((3 * 2**39 + 1, 5), (6, 10)))
    copies = plan_once(grid, [target])
    assert len(copies) == 3 * 3
    assert sum(c.numel for c in copies) == 60
    assert len(looked) == 3 + 3


def test_a_column_of_a_cell_in_tiny_parts_visits_only_the_parts_it_meets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    visited: list[tuple[int, int]] = []

    def counted(cell: Box, lo: int, hi: int) -> list[Region]:
        visited.append((lo, hi))
        return flat_regions(cell, lo, hi)

    monkeypatch.setattr(planner, "flat_regions", counted)
    # A cell of 100 rows of 1000: one part for the first 99 rows, then parts of one element.
    grid = Grid((even_axis(100, 1), even_axis(1000, 1)), (Axis(((99_000, 1), (1, 1000))),))
    copies = plan_once(grid, [box_region(Box((0, 500), (100, 2)))])
    assert [c.piece for c in copies] == [0, 501, 502]
    assert len(visited) == 3


@given(st.data())
def test_the_walk_along_a_flat_cut_lands_in_the_box(data: st.DataObject) -> None:
    shape = data.draw(strategies.shapes().filter(lambda s: 0 not in s))
    box = data.draw(strategies.boxes(shape).filter(lambda b: b.numel > 0))
    inside = set(brute.elements(box.offset, box.shape))
    cell = brute.elements((0,) * len(shape), shape)
    for at in range(len(cell) + 1):
        wanted = next((i for i in range(at, len(cell)) if cell[i] in inside), None)
        assert planner._next_element(box, shape, at) == wanted


def _count_cells(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    looked: list[int] = []
    real = Axis.cell

    def counted(self: Axis, index: int) -> tuple[int, int]:
        looked.append(index)
        return real(self, index)

    monkeypatch.setattr(Axis, "cell", counted)
    return looked


def test_flat_ranges_give_at_most_two_ragged_ends_per_dimension() -> None:
    """A flat range of a d-dimensional cell is at most 2d - 1 boxes, and some range needs them."""
    for d in range(1, 5):
        cell = Box((0,) * d, (4,) * d)
        most = max(
            len(flat_regions(cell, lo, hi))
            for lo in range(0, cell.numel, max(1, cell.numel // 41))
            for hi in range(lo, cell.numel + 1, max(1, cell.numel // 43))
        )
        assert most <= 2 * d - 1
        assert len(flat_regions(cell, 1, cell.numel - 1)) == 2 * d - 1


def test_a_target_outside_the_tensor_is_refused() -> None:
    for box in (Box((0,), (4, 4)), Box((0, 1), (4, 4)), Box((-1, 0), (1, 1)), Box((), ())):
        with pytest.raises(MismatchError, match="does not lie inside"):
            plan(whole((4, 4)), [Region(box, 0, (4, 1)[: len(box.shape)])])


def test_an_expanded_target_is_refused() -> None:
    """torch's ``expand`` has a stride of zero: its elements would overwrite each other."""
    box = Box((0, 0), (4, 4))
    for strides in ((0, 1), (1, 1), (3, 1)):
        with pytest.raises(UsageError, match="one place in memory"):
            plan(whole((4, 4)), [Region(box, 0, strides)])


def test_plans_are_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    """An equal grid and equal targets are planned once, and a caller cannot spoil the template."""
    planner._TEMPLATES.clear()
    calls: list[Grid] = []

    def counted(grid: Grid, targets: Sequence[Region]) -> list[planner.PieceCopy]:
        calls.append(grid)
        return plan_once(grid, targets)

    monkeypatch.setattr(planner, "plan_once", counted)

    def once() -> list[planner.PieceCopy]:
        grid = Grid((even_axis(64, 8), even_axis(64, 1)))
        return plan(grid, [box_region(Box((0, 8), (64, 8)))])

    first = once()
    first.clear()
    assert len(once()) == 8
    assert len(calls) == 1


def test_a_plan_agrees_with_numpy_on_real_bytes() -> None:
    """Blocks as numpy sees them: the copies an executor makes."""
    x = np.arange(7 * 11 * 5, dtype=np.int32).reshape(7, 11, 5)
    grid = Grid((even_axis(7, 3), even_axis(11, 2), even_axis(5, 1)))
    target = np.full((3, 11, 4), -1, dtype=np.int32)
    for copy in plan(grid, [box_region(Box((2, 0, 1), (3, 11, 4)))]):
        piece = grid.piece(copy.piece)
        where = tuple(slice(o, e) for o, e in zip(piece.box.offset, piece.box.end, strict=True))
        source = np.ascontiguousarray(x[where])
        for b in copy.blocks:
            views = [
                np.lib.stride_tricks.as_strided(
                    buffer.reshape(-1)[start:], b.shape, tuple(4 * s for s in strides)
                )
                for buffer, start, strides in (
                    (source, b.source_start, b.source_strides),
                    (target, b.target_start, b.target_strides),
                )
            ]
            views[1][...] = views[0]
    assert np.array_equal(target, x[2:5, :, 1:5])
