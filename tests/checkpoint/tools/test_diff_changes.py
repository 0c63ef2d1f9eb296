"""Where encoded objects differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckptd.checkpoint.format import codec
from ckptd.checkpoint.load.source import PerRankValues
from ckptd.checkpoint.tools.diff import ValueChange, changes


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        (1, 1, []),
        (1, 2, [("", "1", "2")]),
        (1, 1.0, [("", "1", "1")]),
        (0, False, [("", "0", "False")]),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, [(".b", "2", "3")]),
        ({"a": 1}, {"b": 1}, [(".a", "1", None), (".b", None, "1")]),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 5}]}, [(".a[1].b", "2", "5")]),
        ([1, 2], [1], [("", "[1, 2]", "[1]")]),
        ((1, 2), (1, 3), [("[1]", "2", "3")]),
        ((1,), [1], [("", "(1,)", "[1]")]),
        ({1: "x"}, {1: "y"}, [("[0][1]", "'x'", "'y'")]),
        (b"123", b"124", [("", "3 bytes", "3 bytes")]),
        (np.zeros(2), np.ones(2), [("", "float64[2]", "float64[2]")]),
        ({"$": 1}, {"$": 2}, [("[0][1]", "1", "2")]),
        (None, {"a": 1}, [("", "None", "{a: 1}")]),
    ],
)
def test_changes(a: Any, b: Any, wanted: list[tuple[str, str, str]]) -> None:
    found = changes(codec.encode(a), codec.encode(b), 10)
    assert [(c.path, c.left, c.right) for c in found] == wanted


def test_values_of_ranks() -> None:
    a, b = PerRankValues({0: {"s": 1}, 1: 5}), PerRankValues({0: {"s": 2}, 2: 5})
    assert changes(a, b, 10) == (
        ValueChange("rank 0.s", "1", "2"),
        ValueChange("rank 1", "5", None),
        ValueChange("rank 2", None, "5"),
    )
    assert changes(a, 7, 10) == (ValueChange("", "2 ranks", "7"),)
    assert changes(a, a, 10) == ()


def test_not_more_than_wanted_and_no_deeper_than_it_goes() -> None:
    assert len(changes(list(range(9)), list(range(1, 10)), 3)) == 3
    a: Any = 1
    b: Any = 2
    for _ in range(200):
        a, b = [a], [b]
    (found,) = changes(a, b, 3)
    assert found.left == found.right
