from __future__ import annotations

import pytest

from ckptd.base.grids.block import Block, Fill
from ckptd.base.grids.grid import whole
from ckptd.base.grids.owners import single_owner
from ckptd.base.grids.plan import Proof
from ckptd.errors import UsageError
from ckptd.lay.copies import SourceCopies, TargetPlan
from ckptd.lay.proving import prove
from ckptd.lay.stored import StoredTensor

TENSOR = StoredTensor("w", 0, (), "", whole((10**9,)), single_owner(0), 0)


def plan(numel: int, *blocks: Block, fills: tuple[Fill, ...] = ()) -> TargetPlan:
    return TargetPlan(numel, (SourceCopies(TENSOR, ((0, blocks),), None),), fills)


def to(start: int, *steps: tuple[int, int]) -> Block:
    shape, strides = tuple(n for n, _ in steps), tuple(s for _, s in steps)
    return Block(shape, 0, strides, start, strides)


def test_halves_of_rows() -> None:
    found = plan(12, to(0, (3, 4), (2, 1)), to(2, (3, 4), (2, 1)))
    assert prove(found) == Proof(12, 1, 2)


def test_fills_count() -> None:
    assert prove(plan(10, to(0, (7, 1)), fills=(Fill(((3, 1),), 7, 0.0),))).elements == 10


def test_large_ones_are_counted_in_rows() -> None:
    row = 10**6
    even, odd = (to(at, (500, 2 * row), (row, 1)) for at in (0, row))
    assert prove(plan(1000 * row, even, odd)) == Proof(10**9, 1, 2)


def test_nothing() -> None:
    assert prove(TargetPlan(0, (), ())) == Proof(0, 0, 0)
    assert prove(plan(1, to(0))).elements == 1


@pytest.mark.parametrize(
    "wrong",
    [
        plan(12, to(0, (3, 4), (2, 1))),
        plan(12, to(0, (12, 1)), to(5)),
        plan(12, to(0, (3, 4), (2, 1)), to(1, (3, 4), (2, 1))),
        plan(12, to(0, (13, 1))),
        plan(4, to(0, (2, 1), (2, 1))),
        plan(4, to(-1, (4, 1))),
        TargetPlan(3, (), ()),
    ],
)
def test_wrong_plans(wrong: TargetPlan) -> None:
    with pytest.raises(UsageError, match="exactly once"):
        prove(wrong)


def test_too_large_to_tell() -> None:
    with pytest.raises(UsageError) as error:
        prove(plan(10**9, to(0, (10**9 - 1, 1)), to(10**9 - 1)))
    assert "a target is too large to be counted element by element" in error.value.message
