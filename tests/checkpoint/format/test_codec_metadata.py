"""The user's metadata: what a reader will get, and what is refused by its key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ckptd.checkpoint.format.codec import MAX_METADATA_BYTES, checked_metadata
from ckptd.errors import UsageError


def test_what_comes_back() -> None:
    given = {"loss": 0.5, "tags": ("a", "b"), "nested": {"é": [None, True]}, "none": float("nan")}
    wanted = {"loss": 0.5, "tags": ["a", "b"], "nested": {"é": [None, True]}, "none": None}
    assert checked_metadata(given) == wanted
    assert checked_metadata({}) == {}


NUMBERS = [
    (torch.tensor(2.5, requires_grad=True), 2.5),
    (torch.ones(1, 1, dtype=torch.int64), 1),
    (torch.tensor(True), True),
    (torch.tensor(2.5, dtype=torch.bfloat16), 2.5),
    (torch.tensor(float("nan")), None),
    (np.float32(2.5), 2.5),
    (np.float64(2.5), 2.5),
    (np.uint8(3), 3),
    (np.bool_(False), False),
    (np.array([7]), 7),
]


@pytest.mark.parametrize(("given", "wanted"), NUMBERS)
def test_numbers_of_other_types(given: Any, wanted: Any) -> None:
    found = checked_metadata({"a": given, "b": [{"c": (given,)}]})
    assert repr(found) == repr({"a": wanted, "b": [{"c": [wanted]}]})
    checked_metadata({"a": given}, numbers=False)


class Busy:
    """A number on a device that has not made it yet."""

    device = torch.device("cuda")
    dtype = torch.float32

    def numel(self) -> int:
        return 1

    def is_complex(self) -> bool:
        return False

    def item(self) -> float:
        raise AssertionError("waited for")


class Spread(Busy):
    """Like a DTensor, to whose number all ranks contribute."""

    def full_tensor(self) -> None:
        raise AssertionError("the others were waited for")


def test_a_device_is_not_waited_for_to_look_at_what_there_is() -> None:
    assert checked_metadata({"loss": Busy()}, numbers=False) == {"loss": 0}


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(2),
        torch.zeros(0),
        torch.zeros((), dtype=torch.complex64),
        torch.zeros((), device="meta"),
        np.zeros(3),
        Spread(),
        np.complex64(1),
    ],
)
def test_what_is_not_one_number(value: Any, numbers: bool) -> None:
    with pytest.raises(UsageError) as caught:
        checked_metadata({"loss": value}, numbers=numbers)
    assert caught.value.where == "metadata['loss']"


def test_what_is_no_dict() -> None:
    wrong: Any = [("loss", 1.0)]
    with pytest.raises(UsageError) as caught:
        checked_metadata(wrong)
    assert (caught.value.message, caught.value.where) == ("metadata must be a dict", "metadata")


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
    assert caught.value.message == "a value of the metadata is not JSON"
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
