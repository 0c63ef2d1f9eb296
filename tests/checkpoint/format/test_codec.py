from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.checkpoint.format.codec import MAX_DEPTH, decode, encode, parse_json, register
from ckptd.errors import CorruptError, UsageError
from tests.checkpoint.format.strategies import Colour, Point, values


def equal(a: Any, b: Any) -> bool:
    """Equality of values and types, NaN equal to itself, arrays by their bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        # The byte order is the machine's afterwards; the values are the same.
        same = a.dtype.newbyteorder("=") == b.dtype.newbyteorder("=") and a.shape == b.shape
        return bool(same and a.astype(b.dtype).tobytes() == b.tobytes())
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    if isinstance(a, complex):
        return equal(a.real, b.real) and equal(a.imag, b.imag)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return equal(list(a), list(b)) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, Point):
        return all(equal(getattr(a, n), getattr(b, n)) for n in ("x", "y", "late"))
    return bool(a == b)


@given(values)
def test_round_trip(value: Any) -> None:
    raw = encode(value)
    text = msgspec.json.encode(raw)
    assert equal(decode(json.loads(text)), value)
    assert msgspec.json.encode(encode(value)) == text


@pytest.mark.parametrize(
    "value",
    [
        *(math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308, 0.1),
        *(2**63, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 10**400, -(10**400)),
        *(complex(math.nan, -math.inf), "\ud800x", "\U0001f600", {"\udfff": 1}, {"$": 1}, {1: 2}),
        *((), [], {}, set(), frozenset(), b"", np.zeros((0, 3)), np.float32(1.5)),
    ],
    ids=lambda v: repr(v)[:30],
)
def test_values_at_the_edge(value: Any) -> None:
    text = msgspec.json.encode(encode(value))
    assert equal(decode(parse_json(b'{"v":' + text + b"}")["v"]), value)


def test_plain_values_are_plain_json() -> None:
    value = {"lr": 0.1, "betas": [0.9, 0.95], "name": "adam", "on": True, "step": 7, "none": None}
    assert encode(value) == value


def test_bytes_are_little_endian_whatever_the_machine_s_array() -> None:
    value = np.array([1.0, 2.0], dtype=">f4")
    back = decode(encode(value))
    assert back.tolist() == [1.0, 2.0]
    assert back.dtype == np.float32


def test_small_types_of_ml_dtypes() -> None:
    import ml_dtypes

    value = np.array([1.5, -2.0], dtype=ml_dtypes.bfloat16)
    back = decode(encode(value))
    assert back.dtype == ml_dtypes.bfloat16
    assert back.tolist() == [1.5, -2.0]


def test_an_array_can_be_written_to_after_loading() -> None:
    decode(encode(np.zeros(3)))[0] = 1.0


class Mine(dict[str, int]):
    pass


def test_dicts_come_back_as_what_they_are_or_are_refused() -> None:
    # They became plain ones.
    for value in (OrderedDict(b=1, a=2), Counter("aab"), defaultdict(list, a=[1])):
        found = decode(encode(value))
        assert (type(found), found) == (type(value), value)
    with pytest.raises(UsageError):
        encode(Mine(a=1))


def test_what_comes_again_is_one_object() -> None:
    inner: list[Any] = [1]
    value = {"b": inner, "a": (inner, {2: inner})}
    assert encode(value) == encode({"b": [1], "a": ([1], {2: [1]})})
    found = decode(encode(value, shared=True))
    assert found == value
    assert found["b"] is found["a"][0] is found["a"][1][2]
    alone: Any = {"b": [1], "a": 1, "c": (), "d": ()}
    assert encode(alone, shared=True) == encode(alone)


class Unknown:
    pass


@pytest.mark.parametrize(
    "value",
    [Unknown(), {"a": [Unknown()]}, object(), np.array([object()]), np.array(["a"])],
)
def test_unknown_types_are_refused_with_a_hint(value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        encode(value, "state.thing")
    assert caught.value.kind == "unsavable"
    assert "register" in (caught.value.hint or "")
    assert (caught.value.where or "").startswith("state.thing")


def test_nesting_ends() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = [value]
    assert decode(encode(value)) == value
    with pytest.raises(UsageError) as caught:
        encode([value])
    assert caught.value.kind == "unsavable"
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError):
        encode(loop)


def test_registered_types_come_back() -> None:
    value = Point(Colour.RED, (1, {"a": b"x"}))
    object.__setattr__(value, "late", [3])
    back = decode(json.loads(msgspec.json.encode(encode(value))))
    assert back == value
    assert back.late == [3]


def test_a_type_that_is_not_registered_here() -> None:
    raw = {"$": "type", "name": "other.module.Config" + "x" * 10**6, "v": {}}
    with pytest.raises(UsageError) as caught:
        decode(raw, "config")
    assert len(str(caught.value)) < 1000
    assert "the checkpoint holds a value of a type" in caught.value.message
    assert "other.module.Config" in str(caught.value)


def test_a_name_is_taken_once() -> None:
    class A(enum.Enum):
        X = 1

    class B(enum.Enum):
        X = 1

    register(A, name="tests.taken")
    register(A, name="tests.taken")
    with pytest.raises(UsageError) as caught:
        register(B, name="tests.taken")
    assert "name is registered for another type" in caught.value.message


def test_types_that_need_functions_say_so() -> None:
    with pytest.raises(UsageError) as caught:
        register(Unknown)
    assert caught.value.kind == "unsavable"


def test_registered_functions_are_used() -> None:
    @dataclasses.dataclass
    class Degrees:
        value: float

    register(
        Degrees,
        name="tests.degrees",
        encode=lambda d: math.radians(d.value),
        decode=lambda r: Degrees(math.degrees(r)),
    )
    assert encode(Degrees(180.0)) == {"$": "type", "name": "tests.degrees", "v": math.pi}
    assert decode(encode(Degrees(180.0))) == Degrees(180.0)


@pytest.mark.parametrize(
    "raw",
    [
        {"$": "nothing", "v": 1},
        {"$": None, "v": 1},
        {"$": [], "v": 1},
        {"$": "tuple"},
        {"$": "tuple", "v": 1},
        {"$": "set", "v": [[1]]},
        {"$": "dict", "v": [[1]]},
        {"$": "dict", "v": [[1, 2], [1, 3]]},
        {"$": "dict", "v": [[[1], 2]]},
        {"$": "bytes", "v": "***"},
        {"$": "bytes", "v": "é"},
        {"$": "bytes", "v": 3},
        {"$": "str", "v": "/w=="},
        {"$": "float", "v": "1"},
        {"$": "int", "v": "x"},
        {"$": "int", "v": None},
        {"$": "complex", "v": ["1"]},
        {"$": "array", "v": "", "dtype": "float32"},
        {"$": "array", "v": "", "dtype": "float33", "shape": [0]},
        {"$": "array", "v": "AAAA", "dtype": "float32", "shape": [1]},
        {"$": "array", "v": "", "dtype": "float32", "shape": [-1, 0]},
        {"$": "array", "v": "", "dtype": "float32", "shape": [0, 2**70]},
        {"$": "array", "v": "", "dtype": "float32", "shape": [0, 2**62, 2**62]},
        {"$": "array", "v": "", "dtype": "float32", "shape": [0] * 33},
        {"$": "array", "v": "", "dtype": "float32", "shape": [0.0]},
        {"$": "array", "v": "", "dtype": [], "shape": [0]},
        {"$": "again", "v": 0},
        {"$": "again", "v": []},
        {"$": "shared", "id": 0, "v": [{"$": "again", "v": 0}]},
        {"$": "shared", "id": [], "v": 1},
        [{"$": "shared", "id": 0, "v": [1]}, {"$": "shared", "id": 0, "v": [2]}],
        {"$": "shared", "v": 1},
        {"$": "type", "v": {}},
        {"$": "type", "name": "tests.checkpoint.format.strategies.Point", "v": {"x": 1, "z": 2}},
        {"$": "type", "name": "tests.checkpoint.format.strategies.Point", "v": 3},
        {"$": "type", "name": "tests.checkpoint.format.strategies.Colour", "v": "GREEN"},
        {"$": "type", "name": "tests.checkpoint.format.strategies.Colour", "v": []},
    ],
)
def test_broken_objects(raw: Any) -> None:
    with pytest.raises(CorruptError) as caught:
        decode(raw, "optim.lr")
    assert caught.value.message in ("object does not decode", "unknown dtype")
    assert caught.value.where in {"optim.lr", None}


def test_deep_nesting_in_a_file_is_refused() -> None:
    raw: Any = 1
    for _ in range(500):
        raw = {"$": "tuple", "v": [raw]}
    with pytest.raises(CorruptError) as caught:
        decode(raw)
    assert caught.value.message in ("object does not decode", "object nested too deeply")


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["$", "v", "name", "dtype", "shape", "a"]), inner, max_size=4
        ),
        st.builds(
            lambda tag, v, more: {"$": tag, "v": v, **more},
            st.sampled_from(
                [
                    "tuple",
                    "set",
                    "frozenset",
                    "dict",
                    "bytes",
                    "str",
                    "float",
                    "int",
                    "complex",
                    "array",
                    "scalar",
                    "type",
                ]
            ),
            inner,
            st.dictionaries(st.sampled_from(["name", "dtype", "shape"]), inner, max_size=3),
        ),
    ),
    max_leaves=10,
)


@given(json_values)
def test_any_json_decodes_or_is_refused(raw: Any) -> None:
    try:
        value = decode(raw)
    except (CorruptError, UsageError):
        return
    encode(value)


class _Counted(int):
    """An integer that counts how often it is compared: the work of a set."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        type(self).compared += 1
        return int(self) == other

    def __hash__(self) -> int:
        return int.__hash__(self)


@pytest.mark.parametrize("tag", ["set", "frozenset", "dict"])
def test_values_chosen_to_have_one_hash(tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers a multiple of 2**61 - 1 apart: a set of n of them takes n * n comparisons."""
    numbers = [{"$": "int", "v": hex((i + 1) * (2**61 - 1))} for i in range(20_000)]
    raw = {"$": tag, "v": [[n, 0] for n in numbers] if tag == "dict" else numbers}
    monkeypatch.setattr(
        "ckptd.checkpoint.format.codec.int", lambda v, _: _Counted(v, 16), raising=False
    )
    _Counted.compared = 0
    with pytest.raises(CorruptError) as caught:
        decode(raw, "x")
    assert caught.value.message in ("object does not decode", "object nested too deeply")
    assert _Counted.compared < 20_000
    few = {"$": tag, "v": raw["v"][:20]}
    assert len(decode(few, "x")) == 20
