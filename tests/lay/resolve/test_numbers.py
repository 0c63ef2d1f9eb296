"""Sets of numbers agree with Python's sets, as far as one looks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.errors import UsageError
from ckptd.lay.resolve import ALL, Numbers
from ckptd.lay.resolve.conditions import numbers_of
from ckptd.lay.resolve.lets import Lets
from ckptd.lay.syntax import parse
from ckptd.lay.syntax.tree import For, Range, Space

FAR = 200
NOTHING = Lets()

RANGES = st.one_of(
    st.builds(lambda a, n, s: Range(a, a + n, s), *[st.integers(0, 12)] * 2, st.integers(1, 4)),
    st.builds(lambda a, s: Range(a, None, s), st.integers(0, 12), st.integers(1, 4)),
)
CONDITIONS = st.lists(RANGES, min_size=1, max_size=3).map(lambda r: For("l", tuple(r)))


def meant(condition: For) -> set[int]:
    """Return the numbers of a condition below some number, one by one."""
    out: set[int] = set()
    for r in condition.ranges:
        assert isinstance(r.first, int)
        assert isinstance(r.last, int | None)
        out |= set(range(r.first, FAR if r.last is None else r.last + 1, r.step))
    return out


def found(numbers: Numbers) -> set[int]:
    return set(numbers.below(FAR))


@given(CONDITIONS, CONDITIONS)
def test_sets(one: For, two: For) -> None:
    a, b = (numbers_of([c], NOTHING)["l"] for c in (one, two))
    assert found(a) == meant(one)
    assert found(a & b) == meant(one) & meant(two) == found(numbers_of([one, two], NOTHING)["l"])
    assert found(a | b) == meant(one) | meant(two)
    assert found(a - b) == meant(one) - meant(two)
    assert a.covers(b) == (meant(one) >= meant(two))
    assert bool(a & b) == bool(meant(one) & meant(two))
    assert ALL.covers(a)
    assert [a.count(n) for n in range(FAR)] == [len(a.below(n)) for n in range(FAR)]
    assert a.mask(np.arange(FAR)).nonzero()[0].tolist() == sorted(meant(one))


def test_absurd_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match="too high"):
        numbers_of([For("l", (Range(10**9, None),))], NOTHING)
    steps = [For("l", (Range(0, None, n),)) for n in (251, 257, 263)]
    with pytest.raises(UsageError, match="repeat too late"):
        numbers_of(steps, NOTHING)


@pytest.mark.parametrize(
    ("numbers", "dense", "wanted"),
    [
        ("(dense)..", 3, [3, 4, 5]),
        ("0..(dense - 1)", 3, [0, 1, 2]),
        ("0..(dense - 1)", 0, []),
        ("0..((dense - 1) // 2)", 0, []),
        ("0..((dense - 1) // 2)", 5, [0, 1, 2]),
        ("(dense)..", 0, [0, 1, 2, 3, 4, 5]),
        ("[0 (dense + 1)..(2*dense)]", 2, [0, 3, 4]),
        ("(dense)../2", 1, [1, 3, 5]),
    ],
)
def test_ends_may_be_sizes(numbers: str, dense: int, wanted: list[int]) -> None:
    assert with_dense(numbers, dense).below(6) == wanted


@pytest.mark.parametrize(
    ("numbers", "dense", "why"),
    [
        ("5..(dense - 9)", 7, "a value is negative"),
        ("0..(dense - 2)", 0, "a value is negative"),
        ("0..((dense - 2) // 2)", 0, "a value is negative"),
        ("(dense - 1)", 0, "below zero"),
        ("(dense - 1)..3", 0, "below zero"),
    ],
)
def test_ends_below_zero_are_refused(numbers: str, dense: int, why: str) -> None:
    """Only a last number may be -1: then there are none."""
    with pytest.raises(UsageError, match=why):
        with_dense(numbers, dense)


@pytest.mark.parametrize(("last", "wrong"), [(-1, None), (-8, "-8")])
def test_ends_below_zero_of_built_ranges_are_refused(last: int, wrong: str | None) -> None:
    condition = For("l", (Range(5, last),))
    if wrong is None:
        assert not numbers_of([condition], NOTHING)["l"]
        return
    with pytest.raises(UsageError, match="below zero") as caught:
        numbers_of([condition], NOTHING)
    assert caught.value.found == wrong


def with_dense(numbers: str, dense: int) -> Numbers:
    file = parse(f"space s {{\n  L{{l}}[h] for l={numbers}\n  let dense = {dense}\n}}\n")
    space = file.items[0]
    assert isinstance(space, Space)
    return numbers_of(space.families[0].only, Lets.of(space.lets))["l"]


def test_a_size_that_nothing_says_is_no_end() -> None:
    file = parse("space s {\n  L{l}[h] for l=(dense)..\n}\n")
    space = file.items[0]
    assert isinstance(space, Space)
    with pytest.raises(UsageError, match="dense"):
        numbers_of(space.families[0].only, NOTHING)
