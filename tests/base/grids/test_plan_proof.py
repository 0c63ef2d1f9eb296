"""Proofs hold for right plans, and fail for wrong ones and for targets that overlap."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ckptd.base.grids import plan as proof
from ckptd.base.grids.block import Region, box_region, flat_regions
from ckptd.base.grids.grid import Grid, whole
from ckptd.base.grids.plan import Block, PieceCopy, Proof, check, plan, prove
from ckptd.base.grids.sharding import local_regions
from ckptd.errors import UsageError
from ckptd.types import Box
from tests.base.grids import brute, strategies
from tests.base.grids.cutting import even_axis


@given(st.data())
def test_every_target_is_proved_and_checked(data: st.DataObject) -> None:
    shape = data.draw(strategies.shapes())
    source = data.draw(strategies.cuts(shape))
    box = data.draw(strategies.boxes(shape))
    whole_flat = flat_regions(box, 0, box.numel // 2) + [
        replace(r, start=r.start + box.numel // 2)
        for r in flat_regions(box, box.numel // 2, box.numel)
    ]
    for targets in ([data.draw(strategies.strided(box))], whole_flat):
        found = prove(source.grid, targets)
        assert found == check(source.grid, targets)
        assert found.elements == box.numel


def test_segments_of_one_strided_tensor_are_proved() -> None:
    """Column segments interleave in memory; their corners tell them apart all the same."""
    placements = (("strided", 1, 3), ("strided", 0, 2))
    targets = local_regions((8, 12), (2, 2), placements, (1, 0))
    assert len(targets) == 6
    spans = sorted(t.span for t in targets)
    assert any(a[1] > b[0] for a, b in itertools.pairwise(spans))
    grid = Grid((even_axis(8, 3), even_axis(12, 5)))
    assert prove(grid, targets) == check(grid, targets)


@given(st.data())
def test_two_boxes_in_one_buffer_overlap_or_do_not(data: st.DataObject) -> None:
    """`prove` never accepts an overlap; what it cannot tell it says so."""
    shape = data.draw(strategies.shapes(max_dims=3, max_size=4))
    first = data.draw(strategies.strided(data.draw(strategies.boxes(shape))))
    second = Region(data.draw(strategies.boxes(shape)), data.draw(st.integers(0, 9)), first.strides)
    targets = [first, second]
    places = [
        set(brute.region_places(t.box.offset, t.box.shape, t.start, t.strides)) for t in targets
    ]
    try:
        prove(whole(shape), targets)
    except UsageError as error:
        if "share a place" in error.message:
            assert places[0] & places[1]
    else:
        assert not places[0] & places[1]
    if places[0] & places[1]:
        with pytest.raises(UsageError):
            check(whole(shape), targets)


def test_a_region_that_runs_over_the_end_of_a_row_is_not_taken_for_disjoint() -> None:
    long = Region(Box((0, 0), (1, 6)), 0, (4, 1))
    next_row = Region(Box((1, 0), (1, 2)), 4, (4, 1))
    for refuse in (prove, check):
        with pytest.raises(UsageError):
            refuse(whole((2, 6)), [long, next_row])


def test_other_strides_that_interleave_are_said_to_be_unproved() -> None:
    even = Region(Box((0,), (4,)), 0, (2,))
    odd = Region(Box((4,), (2,)), 1, (4,))
    with pytest.raises(UsageError) as caught:
        prove(whole((6,)), [even, odd])
    assert "cannot tell from their strides that the target regions" in caught.value.message
    assert check(whole((6,)), [even, odd]) == Proof(6, 1, 2)


def _wrong_plans() -> dict[str, list[PieceCopy]]:
    def copy(piece: int, *blocks: Block) -> PieceCopy:
        return PieceCopy(piece, blocks)

    right = plan(Grid((even_axis(6, 2),)), [box_region(Box((0,), (6,)))])
    return {
        "a piece is missing": right[:1],
        "a piece is copied twice": [*right, right[0]],
        "shifted by one": [right[0], copy(1, Block((3,), 0, (1,), 2, (1,)))],
        "past the end": [right[0], copy(1, Block((3,), 0, (1,), 4, (1,)))],
        "before the start": [copy(0, Block((3,), 0, (1,), -1, (1,))), right[1]],
        "onto one place": [right[0], copy(1, Block((3,), 0, (1,), 3, (0,)))],
    }


@pytest.mark.parametrize("mistake", list(_wrong_plans()))
def test_a_wrong_plan_does_not_pass(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "plan", lambda grid, targets: _wrong_plans()[mistake])
    with pytest.raises(UsageError):
        check(Grid((even_axis(6, 2),)), [box_region(Box((0,), (6,)))])


def test_a_plan_of_the_wrong_volume_is_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    for mistake in ("a piece is missing", "a piece is copied twice"):
        monkeypatch.setattr(proof, "plan", lambda grid, targets, m=mistake: _wrong_plans()[m])
        with pytest.raises(UsageError, match="exactly once"):
            prove(Grid((even_axis(6, 2),)), [box_region(Box((0,), (6,)))])


def test_a_giant_is_proved_but_not_counted() -> None:
    grid = Grid((even_axis(2**40, 2**10),))
    target = [box_region(Box((5,), (2**40 - 9,)))]
    assert prove(grid, target) == Proof(2**40 - 9, 2**10, 2**10)
    with pytest.raises(UsageError, match="too large"):
        check(grid, target)


def test_no_target_is_nothing_to_prove() -> None:
    assert prove(whole((3,)), []) == check(whole((3,)), []) == Proof(0, 0, 0)
