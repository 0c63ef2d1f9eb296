from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.errors import MismatchError, UsageError
from ckptd.lay.resolve import ValueScope, assigned_runs, evaluate, part, parts
from ckptd.lay.syntax.tree import EVEN, Arithmetic, Assigned, Even, How, Number, Size, Widths
from tests.lay.meaning import part_of

SCOPE = ValueScope({"f": 12, "tp": 99}, {"tp": 4})


def cut(n: int, how: How, extent: int) -> list[int]:
    ends = [part(n, how, extent, c, SCOPE) for c in range(extent)]
    assert ends[0][0] == 0
    assert ends[-1][1] == n
    assert all(a[1] == b[0] for a, b in pairwise(ends))
    return [b - a for a, b in ends]


def test_ten_over_four() -> None:
    assert cut(10, Even("ceil"), 4) == [3, 3, 3, 1]
    assert cut(10, Even("bal"), 4) == [3, 3, 2, 2]
    assert cut(10, Widths((1, 2, 3, 4)), 4) == [1, 2, 3, 4]
    assert cut(12, EVEN, 4) == [3, 3, 3, 3]


def test_grain() -> None:
    assert cut(10, Even("even", Number(3)), 4) == [3, 3, 3, 1]
    assert cut(10, Even("ceil", Number(4)), 2) == [8, 2]
    assert cut(10, Even("bal", Number(4)), 2) == [8, 2]
    assert cut(3, Even("ceil", Number(128)), 2) == [3, 0]


def test_empty() -> None:
    assert cut(0, EVEN, 4) == [0, 0, 0, 0]
    assert cut(2, Even("ceil"), 4) == [1, 1, 0, 0]


def test_indivisible() -> None:
    with pytest.raises(MismatchError, match="does not divide") as error:
        part(10, EVEN, 4, 0, SCOPE)
    assert error.value.kind == "lay-fit"
    with pytest.raises(MismatchError):
        parts(np.array([8, 10]), EVEN, 4, np.array([0, 0]), SCOPE)


@pytest.mark.parametrize("widths", [(5, 5), (5, 5, 5), (20, -5, -5)])
def test_widths_that_do_not_fit(widths: tuple[int, ...]) -> None:
    with pytest.raises(MismatchError, match="recorded widths"):
        part(10, Widths(widths), 3, 0, SCOPE)
    with pytest.raises(MismatchError, match="recorded widths"):
        parts(np.array([10]), Widths(widths), 3, np.array([0]), SCOPE)


@pytest.mark.parametrize("coordinates", [(0, 1, 2), (0, 1, 2, 0, 1), (0, 1, 3, 0)])
def test_coordinates_that_do_not_fit(coordinates: tuple[int, ...]) -> None:
    with pytest.raises(MismatchError, match="assigns") as error:
        assigned_runs(4, Assigned(coordinates), 3)
    assert error.value.kind == "lay-fit"


@given(
    st.integers(0, 60),
    st.integers(1, 7),
    st.sampled_from(["even", "ceil", "bal"]),
    st.integers(1, 9),
)
def test_same_as_dealing_out(n: int, extent: int, rule: str, grain: int) -> None:
    if rule == "even" and -(-n // grain) % extent:
        rule = "ceil"
    how = Even(rule, Number(grain))  # type: ignore[arg-type]
    numbers = np.arange(extent)
    starts, stops = parts(np.full(extent, n), how, extent, numbers, SCOPE)
    for c in range(extent):
        wanted = part_of(n, how, extent, c, SCOPE)
        start, stop = part(n, how, extent, c, SCOPE)
        assert (start, stop) == (starts[c], stops[c])
        assert list(range(start, stop)) == list(wanted)


def test_values() -> None:
    def op(kind: str, a: int, b: int) -> int:
        return evaluate(Arithmetic(kind, Number(a), Number(b)), SCOPE)  # type: ignore[arg-type]

    assert [op(k, 12, 8) for k in ("*", "+", "-", "//", "lcm", "min", "max")] == [
        96,
        20,
        4,
        1,
        24,
        8,
        12,
    ]
    # A mesh axis and a size of one name: programs write extents far more often.
    assert evaluate(Size("tp"), SCOPE) == 4
    assert evaluate(Arithmetic("*", Number(128), Size("f")), SCOPE) == 1536


@pytest.mark.parametrize(
    "value",
    [
        Arithmetic("//", Number(1), Number(0)),
        Arithmetic("-", Number(1), Number(2)),
        Arithmetic("*", Number(2**40), Number(2**40)),
        Number(10**400),
        Size("nobody"),
    ],
)
def test_values_that_do_not_compute(value: Number) -> None:
    with pytest.raises(UsageError) as error:
        evaluate(value, SCOPE)
    assert error.value.kind == "lay-rule"


def test_deep_value() -> None:
    value: Number | Arithmetic = Number(1)
    for _ in range(500):
        value = Arithmetic("+", value, Number(1))
    with pytest.raises(UsageError, match="too deeply"):
        evaluate(value, SCOPE)


def test_zero_grain() -> None:
    with pytest.raises(UsageError, match="grain"):
        part(4, Even("ceil", Number(0)), 2, 0, SCOPE)
