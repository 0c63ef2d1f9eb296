"""Casts between layouts: a value comes out as it was, rounded, or not at all."""

from __future__ import annotations

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckptd.errors import UsageError
from ckptd.reshard.changes import Linear
from ckptd.types import DTYPES

FITS: list[tuple[Any, Any, list[float]]] = [
    ([127.9, -128.9], "int8", [127, -128]),
    ([-0.5], "uint8", [0]),
    ([-(2.0**63)], "int64", [-(2**63)]),
    ([], "int8", []),
    (np.array([2**31 - 1, -(2**31)]), "int32", [2**31 - 1, -(2**31)]),
    (np.array([True]), "int8", [1]),
    ([np.inf, 1.0], "float16", [np.inf, 1.0]),
]
OVERFLOWS: list[tuple[Any, str]] = [
    ([128.0], "int8"),
    ([-129.0], "int8"),
    ([np.nan], "int32"),
    ([-np.inf], "int32"),
    ([2.0**63], "int64"),
    (np.array([200], ml_dtypes.bfloat16), "int8"),
    (np.array([2**31]), "int32"),
    (np.array([-1]), "uint8"),
    (np.array([2**64 - 1], np.uint64), "int64"),
    ([1e6], "float16"),
]


@pytest.mark.parametrize(("values", "dtype", "wanted"), FITS)
def test_what_fits_is_rounded(values: Any, dtype: str, wanted: list[float]) -> None:
    out = np.zeros(len(values), dtype)
    Linear("a").apply(out, np.asarray(values))
    assert out.tolist() == wanted


@pytest.mark.parametrize(("values", "dtype"), OVERFLOWS)
def test_what_does_not_fit_is_an_error(values: Any, dtype: str) -> None:
    with pytest.raises(UsageError) as caught:
        Linear("a").apply(np.zeros(len(values), dtype), np.asarray(values))
    assert (caught.value.message, caught.value.where) == (
        "a value does not fit the type it is cast to",
        "a",
    )


def test_every_type_is_cast_to_every_other() -> None:
    plain = [d for d in DTYPES.values() if d.numpy.kind != "c"]
    for source, target in product(plain, repeat=2):
        values = np.array([1, 2, 1 if source.numpy.kind in "iub" else 0.5]).astype(source.numpy)
        out = np.zeros(3, target.numpy)
        Linear("a").apply(out, values)
        wanted = values.astype(np.float32).astype(target.numpy)
        assert out.tolist() == wanted.tolist(), (source.name, target.name)


def test_a_value_that_a_type_of_scales_lacks_is_an_error() -> None:
    out = np.zeros(1, ml_dtypes.float8_e8m0fnu)
    with pytest.raises(UsageError, match="does not fit"):
        Linear("a").apply(out, np.array([-1.0], ml_dtypes.float8_e4m3fn))
