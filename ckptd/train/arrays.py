"""numpy arrays as tensor leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ckptd.errors import UsageError
from ckptd.train.dtypes import torch_dtype
from ckptd.train.leaves import Place
from ckptd.train.sink import Sink
from ckptd.types import DTYPES

__all__ = ["add_array"]

Array = np.ndarray[Any, Any]


def add_array(sink: Sink, place: Place, array: Array, put: Callable[[Any], None]) -> None:
    """Add `array`, in its own memory where torch can write to it; else `put` replaces it.

    Raises
    ------
    UsageError
        kind ``unsavable``: an array of objects, strings, dates or records.
    """
    shared, tensor = _as_tensor(array, place)
    leaf = sink.add_tensor(place, tensor, "ndarray")
    if not shared:
        leaf.assign = lambda new: put(_as_array(new, array.dtype))


def _as_tensor(array: Array, place: Place) -> tuple[bool, torch.Tensor]:
    name = array.dtype.name
    if name not in DTYPES:
        raise UsageError(
            f"a numpy array of this dtype cannot be saved: {place.path}",
            kind="unsavable",
            where=place.name,
            wanted="numbers or bools",
            found=str(array.dtype),
        )
    strides_fit = all(s >= 0 and s % array.itemsize == 0 for s in array.strides)
    shared = array.flags.writeable and array.dtype.isnative and strides_fit
    if not shared:
        array = array.astype(array.dtype.newbyteorder("="), copy=True, order="C")
    # torch knows neither ml_dtypes nor their codes: it sees integers of the same width.
    plain = array if array.dtype.kind != "V" else array.view(f"u{array.itemsize}")
    tensor = torch.from_numpy(plain)
    return shared, tensor.view(torch_dtype(name)) if plain is not array else tensor


def _as_array(tensor: torch.Tensor, dtype: np.dtype[Any]) -> Array:
    """Return a new array with the content of `tensor`."""
    plain = tensor.view(torch.uint8) if dtype.kind == "V" and dtype.itemsize == 1 else tensor
    if dtype.kind == "V" and dtype.itemsize == 2:
        plain = tensor.view(torch.uint16)
    return plain.numpy().copy().view(dtype.newbyteorder("=")).astype(dtype, copy=False)
