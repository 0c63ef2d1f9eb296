"""Pickles of plain data are read, and nothing in them is run."""

from __future__ import annotations

import contextlib
import os
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.errors import CorruptError
from ckptd_nccl.plainpickle import loads

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(PLAIN, st.sampled_from([2, 4]))
def test_plain_data_is_read(value: Any, protocol: int) -> None:
    assert loads(pickle.dumps(value, protocol), "x") == value


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x02",
        b"\x80\x02.",
        pickle.dumps(_Runs(), 2),
        pickle.dumps(print, 4),
        pickle.dumps({1, 2}, 4),
        b"\x80\x02]r\xff\xff\xff\xff",  # an enormous place in its memory
        b"\x80\x02h\x07.",  # a place that holds nothing
        b"\x80\x02(K\x01u.",  # items of no dict
        b"\x80\x02}(K\x01u.",  # a key without a value
        b"\x80\x02}]K\x01s.",  # a key that cannot be one
        b"\x80\x02X\xff\xff\xff\x7fabc.",  # a text longer than the file
        b"\x80\x02}" + b"K\x01q\x00" + b"h\x00\x86q\x00" * 99 + b"K\x01s.",  # 2**99 in a key
    ],
)
def test_anything_else_is_refused(data: bytes, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CorruptError) as caught:
        loads(data, "x")
    assert "not a flight recorder dump" in caught.value.message
    assert not list(tmp_path.iterdir())


def test_values_that_are_referred_to_again_are_counted_again() -> None:
    """Each list holds the one before ten times: 10**9 values in a few hundred bytes."""
    value: Any = [1]
    for _ in range(9):
        value = [value] * 10
    for held in (value, {"entries": value}):
        data = pickle.dumps(held, 2)
        assert len(data) < 1000
        with pytest.raises(CorruptError) as caught:
            loads(data, "x")
        assert "values" in str(caught.value.found)
    text = "x" * 100_000
    with pytest.raises(CorruptError):
        loads(pickle.dumps([text] * 10_000, 2), "x")
    shared = {"name": "forward", "line": 3}
    stacks = [{"frames": [shared] * 20} for _ in range(500)]
    assert loads(pickle.dumps(stacks, 2), "x") == stacks


def test_a_value_that_holds_itself() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(CorruptError):
        loads(pickle.dumps(value, 2), "x")


def test_keys_of_one_hash_are_refused() -> None:
    """Integers a multiple of 2**61 - 1 apart: a dict of n of them takes n * n steps."""
    with pytest.raises(CorruptError):
        loads(pickle.dumps({i * (2**61 - 1): 0 for i in range(3)}, 2), "x")


def test_half_a_surrogate_pair_is_a_question_mark() -> None:
    assert loads(pickle.dumps(["a\ud800b"], 2), "x") == ["a?b"]


@given(st.binary(max_size=200))
def test_fuzz(data: bytes) -> None:
    """Nothing but the one error comes out of it."""
    with contextlib.suppress(CorruptError):
        loads(b"\x80\x02" + data, "x")
