"""Comparing two arrays: how many elements differ, by how much; NaN-aware, for every dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptd.types import DType

__all__ = ["Difference", "compare"]

Array = NDArray[Any]
STEP = 1 << 18
"""Elements compared at a time: temporaries are a few MiB."""

_OPAQUE = frozenset({"float4_e2m1fn_x2"})


@dataclass(slots=True)
class Difference:
    """How two tensors differ, added up over parts.

    Attributes
    ----------
    elements
        Elements compared.
    differing
        Elements with different values; two NaNs are one value, and so are the two zeros.
    differing_bits
        Elements with different bits; counted only between equal dtypes.
    nan_only_left, nan_only_right
        Elements that are NaN on one side only. They count as differing, not in the maxima.
    max_abs
        Largest ``|left - right|``; infinite where one side is.
    max_rel
        Largest ``|left - right| / max(|left|, |right|)``: at most 2.
    """

    elements: int = 0
    differing: int = 0
    differing_bits: int = 0
    nan_only_left: int = 0
    nan_only_right: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0


def compare(a: Array, b: Array, left: DType, right: DType, into: Difference) -> None:
    """Compare two arrays of one shape and add the outcome to `into`.

    Parameters
    ----------
    a, b
        Values; contiguous.
    left, right
        Their logical dtypes.
    """
    x, y = a.reshape(-1), b.reshape(-1)
    for at in range(0, len(x), STEP):
        _compare(x[at : at + STEP], y[at : at + STEP], left, right, into)


def _compare(a: Array, b: Array, left: DType, right: DType, into: Difference) -> None:
    into.elements += len(a)
    if left == right:
        unequal = _bits_differ(a, b, left.itemsize)
        wrong = int(np.count_nonzero(unequal))
        if not wrong:
            return
        into.differing_bits += wrong
        # The rest need not be looked at: equal bits are equal values.
        a, b = a[unequal], b[unequal]
    if left.name in _OPAQUE or right.name in _OPAQUE:
        into.differing += len(a)
        return
    if _is_integer(left) and _is_integer(right):
        _integers(a, b, into)
        return
    _floats(_wide(a, left), _wide(b, right), into)


def _bits_differ(a: Array, b: Array, itemsize: int) -> NDArray[np.bool_]:
    if itemsize == 16:
        x, y = a.view(np.uint64).reshape(-1, 2), b.view(np.uint64).reshape(-1, 2)
        pairs: NDArray[np.bool_] = (x != y).any(axis=1)
        return pairs
    word = np.dtype(f"u{itemsize}")
    words: NDArray[np.bool_] = a.view(word) != b.view(word)
    return words


def _is_integer(dtype: DType) -> bool:
    return dtype.numpy.kind in "iu" and dtype.name == dtype.numpy_name


def _wide(a: Array, dtype: DType) -> Array:
    """Return values as float64 or complex128, exactly."""
    if dtype.name == "complex32":
        parts = a.view(np.float16).astype(np.float64)
        return parts.view(np.complex128)
    return a.astype(np.complex128 if a.dtype.kind == "c" else np.float64)


def _integers(a: Array, b: Array, into: Difference) -> None:
    """Integers exactly: float64 would take large neighbours for equal."""
    unequal = a != b
    a, b = a[unequal], b[unequal]
    into.differing += len(a)
    if len(a):
        high, low = np.maximum(a, b), np.minimum(a, b)
        if high.dtype.kind == "f":  # numpy's common type of int64 and uint64
            gap = high - low
        else:
            gap = (high.astype(np.uint64) - low.astype(np.uint64)).astype(np.float64)
        _maxima(gap, np.maximum(np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64))), into)


def _floats(x: Array, y: Array, into: Difference) -> None:
    nan_x, nan_y = np.isnan(x), np.isnan(y)
    into.nan_only_left += int(np.count_nonzero(nan_x & ~nan_y))
    into.nan_only_right += int(np.count_nonzero(nan_y & ~nan_x))
    unequal = (x != y) & ~(nan_x & nan_y)
    into.differing += int(np.count_nonzero(unequal))
    unequal &= ~(nan_x | nan_y)
    x, y = x[unequal], y[unequal]
    if len(x):
        with np.errstate(all="ignore"):
            _maxima(np.abs(x - y), np.maximum(np.abs(x), np.abs(y)), into)


def _maxima(gap: Array, scale: Array, into: Difference) -> None:
    into.max_abs = max(into.max_abs, float(gap.max()))
    with np.errstate(all="ignore"):
        ratio = np.where(np.isinf(gap), np.inf, gap / scale)
    # Twice the largest finite number is infinite as a difference and 2 as a ratio.
    ratio = np.where(np.isinf(gap) & np.isfinite(scale), 2.0, ratio)
    into.max_rel = max(into.max_rel, float(ratio.max()))
