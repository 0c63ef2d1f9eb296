"""Grids answer as an enumeration of their cells does, and refuse what cannot be."""

from __future__ import annotations

import math
import pickle
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.base.grids.grid import MAX_EXTENT, Axis, Grid, strides_of, whole
from ckptd.types import Box
from tests.base.grids import brute, strategies
from tests.base.grids.cutting import even_axis


@given(st.data())
def test_pieces_are_those_of_the_enumeration(data: st.DataObject) -> None:
    cut = data.draw(strategies.shapes().flatmap(strategies.cuts))
    grid = cut.grid
    assert grid.npieces == len(cut.pieces)
    assert grid.ncells == len(brute.cells(cut.cuts))
    for index, wanted in enumerate(cut.pieces):
        piece = grid.piece(index)
        held = brute.elements(piece.box.offset, piece.box.shape)
        lo, hi = piece.flat or (0, len(held))
        assert (piece.index, held[lo:hi]) == (index, wanted)
        assert (piece.numel, math.prod(piece.shape)) == (len(wanted), len(wanted))
    for index in (-1, grid.npieces):
        with pytest.raises(IndexError):
            grid.piece(index)


@given(st.data())
def test_cells_are_numbered_row_major(data: st.DataObject) -> None:
    cut = data.draw(strategies.shapes().flatmap(strategies.cuts))
    grid = cut.grid
    coordinates = brute.elements((0,) * len(grid.axes), grid.cell_shape)
    first = 0
    for number, (offset, shape) in enumerate(brute.cells(cut.cuts)):
        assert grid.cell_box(number) == Box(offset, shape)
        assert grid.cell_index(coordinates[number]) == number
        assert grid.first_piece(number) == first
        flat = grid.flat_axis(number)
        assert (flat is None) == (cut.flats is None)
        assert cut.flats is None or flat == Axis.from_sizes(cut.flats[number])
        first += 1 if flat is None else flat.ncells


@given(st.lists(st.integers(0, 5), max_size=8), st.data())
def test_an_axis_finds_its_cells(sizes: list[int], data: st.DataObject) -> None:
    axis = Axis.from_sizes(sizes)
    kept = [n for n in sizes if n] or [0]
    assert list(axis.sizes()) == kept
    assert (axis.ncells, axis.extent) == (len(kept), sum(kept))
    held = [i for i, n in enumerate(kept) for _ in range(n)]
    assert [axis.cell_at(e) for e in range(axis.extent)] == held
    assert [axis.cell(i) for i in range(axis.ncells)] == [
        (sum(kept[:i]), n) for i, n in enumerate(kept)
    ]
    lo = data.draw(st.integers(0, axis.extent))
    hi = data.draw(st.integers(0, axis.extent))
    assert list(axis.cells_in(lo, hi)) == sorted(set(held[lo:hi]))
    for outside in (-1, axis.extent):
        with pytest.raises(IndexError):
            axis.cell_at(outside)
    for outside in (-1, axis.ncells):
        with pytest.raises(IndexError):
            axis.cell(outside)


def test_equal_cuts_are_equal_and_hash_alike() -> None:
    one = Grid((Axis(((4, 1), (4, 2), (3, 1))),), ())
    other = Grid((Axis.from_sizes([4, 4, 4, 3]),), ())
    assert one == other
    assert hash(one) == hash(other)
    assert one.axes[0].runs == ((4, 3), (3, 1))
    copy = pickle.loads(pickle.dumps(one))
    assert (copy, hash(copy)) == (one, hash(one))


@pytest.mark.parametrize(
    ("extent", "parts", "runs"),
    [
        (10, 4, ((3, 3), (1, 1))),
        (12, 4, ((3, 4),)),
        (5, 4, ((2, 2), (1, 1))),  # the fourth rank is empty
        (2, 4, ((1, 2),)),
        (0, 4, ((0, 1),)),
        (7, 1, ((7, 1),)),
        (7, 0, ((7, 1),)),
    ],
)
def test_even_axis_is_torch_chunk(
    extent: int, parts: int, runs: tuple[tuple[int, int], ...]
) -> None:
    assert even_axis(extent, parts).runs == runs


@pytest.mark.parametrize(
    "runs",
    [
        (),
        ((0, 2),),
        ((0, 1), (1, 1)),
        ((1, 0),),
        ((-1, 1),),
        ((1, -1),),
        ((2**62, 2),),
        ((1, 2**63),),
        ((2**62, 1), (2**62, 1)),
        ((True, 1),),
        ((1.0, 1),),
    ],
)
def test_an_axis_that_cannot_be_is_refused(runs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError):
        Axis(runs)


def test_grids_that_cannot_be_are_refused() -> None:
    big = Axis(((1, 2**32),))
    empty = Axis(((0, 1),))
    four = even_axis(4, 1)
    bad: list[tuple[tuple[Axis, ...], tuple[Axis, ...]]] = [
        ((big, big), ()),  # 2^64 elements
        ((empty, big, big), ()),  # no element, 2^64 cells
        ((four,), (even_axis(5, 2),)),
        ((even_axis(4, 2),), (even_axis(4, 2),)),  # the cells have two elements each
        ((even_axis(5, 2),), (even_axis(3, 1),)),  # cells of three and two elements
        ((even_axis(5, 2),), (even_axis(3, 1), even_axis(3, 1))),
        ((even_axis(6, 2),), (even_axis(3, 1),) * 3),
        ((empty, four), (four,)),
        ((), (four,)),
    ]
    for axes, flat in bad:
        with pytest.raises(ValueError):
            Grid(axes, flat)


def test_flat_cuts_of_nothing_are_fine() -> None:
    empty = Axis(((0, 1),))
    grid = Grid((empty, even_axis(4, 2)), (empty,))
    assert (grid.npieces, grid.piece(1).numel) == (2, 0)
    assert Grid((), (even_axis(1, 1),)).npieces == 1


def test_huge_counts_cost_nothing() -> None:
    """What a hostile manifest can write in twenty bytes must not cost more than that."""
    tracemalloc.start()
    grid = Grid((Axis(((2, 2**60), (3, 5))),), ())
    cells = Grid((Axis(((4, 2**28),)), Axis(((4, 2**28),))), (Axis(((1, 16),)),))
    mixed = Grid(tuple(Axis(tuple((s, 1) for s in range(1, 9))) for _ in range(12)), ())
    assert mixed.ncells == 8**12
    with pytest.raises(ValueError, match="different sizes"):
        Grid(mixed.axes, (even_axis(5, 1),))
    assert grid.piece(2**60 + 4).box == Box((2**61 + 12,), (3,))
    assert grid.axes[0].cells_in(2**61 - 1, 2**61 + 1) == range(2**60 - 1, 2**60 + 1)
    assert cells.npieces == 2**60
    assert cells.piece(2**60 - 1).flat == (15, 16)
    assert Axis(((1, MAX_EXTENT),)).cell(MAX_EXTENT - 1) == (MAX_EXTENT - 1, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


def test_strides_and_whole() -> None:
    assert strides_of((2, 3, 4)) == (12, 4, 1)
    assert strides_of(()) == ()
    assert whole((2, 0)).shape == (2, 0)
    assert whole(()).piece(0).shape == ()
