"""The user's metadata: what a reader will get, and what is refused by its key."""

from __future__ import annotations

from typing import Any

import pytest

from ckptd.checkpoint.format.metadata import MAX_METADATA_BYTES, checked_metadata
from ckptd.errors import UsageError


def test_what_comes_back() -> None:
    given = {"loss": 0.5, "tags": ("a", "b"), "nested": {"é": [None, True]}, "none": float("nan")}
    wanted = {"loss": 0.5, "tags": ["a", "b"], "nested": {"é": [None, True]}, "none": None}
    assert checked_metadata(given) == wanted
    assert checked_metadata({}) == {}


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def within_itself() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


BAD = {
    "object": object(),
    "integer": 2**70,
    "surrogate": "\ud800",
    "deep": deep(65),
    "endless": within_itself(),
}


@pytest.mark.parametrize("key", BAD)
def test_a_value_that_is_no_json(key: str) -> None:
    with pytest.raises(UsageError) as caught:
        checked_metadata({"fine": 1, key: BAD[key]})
    assert caught.value.kind == "bad-metadata"
    assert caught.value.where == f"metadata[{key!r}]"


@pytest.mark.parametrize("key", [1, None, b"x", "\ud800"])
def test_a_key_that_is_no_text(key: Any) -> None:
    with pytest.raises(UsageError) as caught:
        checked_metadata({key: 1})
    assert caught.value.where == f"metadata[{key!r}]"


def test_the_largest_key_is_named() -> None:
    fits = {"a": "x" * (MAX_METADATA_BYTES - 100), "b": "y" * 50}
    assert checked_metadata(fits) == fits
    with pytest.raises(UsageError) as caught:
        checked_metadata({**fits, "c": "z" * 60})
    assert caught.value.where == "metadata['a']"
    assert str(MAX_METADATA_BYTES) in str(caught.value.wanted)
    assert checked_metadata({"deep": deep(64)}) == {"deep": deep(64)}
