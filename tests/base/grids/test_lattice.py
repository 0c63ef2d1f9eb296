from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from ckptd.base.grids.lattice import first_from, reach, within


@st.composite
def lattices(draw: st.DrawFn) -> list[tuple[int, int]]:
    steps: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(0, 4))):
        stride = reach(steps) + 1 + draw(st.integers(0, 3))
        steps.insert(0, (draw(st.integers(1, 4)), stride))
    return steps


def positions(steps: list[tuple[int, int]]) -> list[int]:
    ids = product(*(range(n) for n, _ in steps))
    return [sum(i * s for i, (_, s) in zip(i, steps, strict=True)) for i in ids]


@given(lattices(), st.integers(-3, 300))
def test_first_from(steps: list[tuple[int, int]], at: int) -> None:
    assert first_from(steps, at) == min((p for p in positions(steps) if p >= at), default=None)


@given(lattices(), st.integers(-3, 300), st.integers(0, 300))
def test_within(steps: list[tuple[int, int]], lo: int, size: int) -> None:
    seen: list[int] = []
    found = list(within(steps, lo, lo + size))
    for position, ranges in found:
        inside = [
            sum((first + i) * s for i, (first, _), (_, s) in zip(ids, ranges, steps, strict=True))
            for ids in product(*(range(n) for _, n in ranges))
        ]
        assert inside[0] == position
        seen += inside
    assert seen == [p for p in positions(steps) if lo <= p < lo + size]
    assert len(found) <= max(1, 2 * len(steps) - 1)
