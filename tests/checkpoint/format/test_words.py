"""Values and ranks in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.checkpoint.format import codec
from ckptd.checkpoint.format.manifest import ObjectEntry
from ckptd.checkpoint.format.words import object_text, ranks_text, value_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (3, "3"),
        (0.1 + 0.2, "0.3"),
        (float("nan"), "nan"),
        ("text", "'text'"),
        ("x" * 50, "'" + "x" * 21 + "...'"),
        ([1, 2], "[1, 2]"),
        ((1,), "(1,)"),
        ((1, "a"), "(1, 'a')"),
        ({1, 2}, "{1, 2}"),
        ({"a": 1, "b": [2]}, "{a: 1, b: [2]}"),
        ({1: "x"}, "{1: 'x'}"),
        (b"12345", "5 bytes"),
        (np.zeros((2, 3), np.float32), "float32[2, 3]"),
        (np.float32(1), "one float32"),
        (1 << 70, "0x400000000000000000"),
        (1 + 2j, "1.0+2.0j"),
        (list(range(20)), "[0, 1, 2, 3, 4, 5, 6, 7, ... 20 in all]"),
        ([[[[1]]]], "[[[[1 items]]]]"),
        ([], "[]"),
    ],
    ids=repr,
)
def test_values(value: Any, text: str) -> None:
    assert value_text(codec.encode(value)) == text


def test_types_that_nobody_registered() -> None:
    assert value_text({"$": "type", "name": "a.B", "v": {"x": 1}}) == "a.B({x: 1})"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["$", "v", "name", "dtype", "shape", "k"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)
TAGS = st.sampled_from(
    ["tuple", "set", "dict", "bytes", "array", "scalar", "type", "int", "complex", "float", "str"]
)


@given(JSON, TAGS)
def test_whatever_a_file_says_becomes_words(raw: Any, tag: str) -> None:
    assert isinstance(value_text(raw), str)
    assert isinstance(value_text({"$": tag, "v": raw}), str)
    assert isinstance(object_text(ObjectEntry("x", [raw], kind="groups"), 0, ""), str)


def test_nesting_without_end() -> None:
    raw: Any = 1
    for _ in range(5000):
        raw = {"$": "type", "name": "T", "v": [raw]}
    assert len(value_text(raw)) < 100


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1], "0-1"),
        ([0, 2], "0, 2"),
        ([0, 2, 4, 6], "0-6 step 2"),
        ([0, 1, 2, 5, 7, 8], "0-2, 5, 7-8"),
        ([0, 2, 3, 5, 7, 9, 20], "0, 2-3, 5, 7 and more (7 in all)"),
    ],
)
def test_ranks(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text
