"""Robust statistics over cohorts: medians, deviations, hashes of rows."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

MAD_TO_SIGMA = 1.4826
"""A normal distribution's standard deviation, in median absolute deviations."""


def grouped_median(values: Array, codes: Array, count: int) -> Array:
    """Return the median of `values` in each of `count` cohorts.

    Parameters
    ----------
    values
        Float, any length; NaN is left out.
    codes
        Cohort of each value, from 0 to `count` - 1.
    count
        Cohorts.

    Returns
    -------
    numpy.ndarray
        One median a cohort; NaN for a cohort without values.
    """
    kept = ~np.isnan(values)
    values, codes = values[kept], codes[kept]
    order = np.lexsort((values, codes))
    values = values[order]
    sizes = np.bincount(codes, minlength=count)
    starts = np.cumsum(sizes) - sizes
    out = np.full(count, np.nan)
    some = sizes > 0
    low = starts[some] + (sizes[some] - 1) // 2
    high = starts[some] + sizes[some] // 2
    out[some] = (values[low] + values[high]) / 2
    return out


def sigma(values: Array) -> float:
    """Return a standard deviation that outliers do not move; 0.0 for no values."""
    values = values[~np.isnan(values)]
    if not len(values):
        return 0.0
    return float(np.median(np.abs(values - np.median(values))) * MAD_TO_SIGMA)


def mix(*columns: Array) -> Array:
    """Return one 64-bit hash of each row of the columns; equal rows have equal hashes."""
    out = np.zeros(len(columns[0]), np.uint64)
    with np.errstate(over="ignore"):
        for column in columns:
            out ^= column.astype(np.uint64)
            # splitmix64: every bit of what is hashed reaches every bit of the hash.
            out += np.uint64(0x9E3779B97F4A7C15)
            out = (out ^ (out >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            out = (out ^ (out >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            out ^= out >> np.uint64(31)
    return out
