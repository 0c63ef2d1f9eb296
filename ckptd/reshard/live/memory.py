"""Memory that tensors are taken from or put into in a move between live ranks."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ckptd.base.runtime.copier import copy_values
from ckptd.checkpoint.load.plan import strided, words_of
from ckptd.errors import UsageError
from ckptd.types import DType

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]


class TensorMemory(Protocol):
    """A contiguous tensor of a rank. Positions are in elements, values are the bytes as they are.

    One thread takes from it, or one puts into it.
    """

    dtype: DType
    numel: int

    def take(self, start: int, shape: tuple[int, ...], strides: tuple[int, ...], out: U8) -> None:
        """Copy a strided part into `out`, row-major."""

    def take_at(self, at: I64, out: U8) -> None:
        """Copy single elements into `out`."""

    def put(self, start: int, shape: tuple[int, ...], strides: tuple[int, ...], data: U8) -> None:
        """Copy row-major values into a strided part."""

    def put_at(self, at: I64, data: U8) -> None:
        """Copy values to single elements."""

    def region(self) -> tuple[object, int, int]:
        """Return the device and the first and last address: to find memory that is shared."""


class ArrayMemory:
    """Memory of this process.

    Parameters
    ----------
    data
        Writable bytes, one-dimensional and contiguous.
    dtype
        What they are.
    """

    def __init__(self, data: U8, dtype: DType) -> None:
        self.dtype = dtype
        self.numel = len(data) // dtype.itemsize
        self._data = data
        self._words = _words(data, dtype.itemsize)

    def take(self, start: int, shape: tuple[int, ...], strides: tuple[int, ...], out: U8) -> None:
        """See `TensorMemory`."""
        view = self.view(start, shape, strides)
        np.copyto(_words(out, self.dtype.itemsize).reshape(shape), view)

    def take_at(self, at: I64, out: U8) -> None:
        """See `TensorMemory`."""
        _words(out, self.dtype.itemsize)[:] = self._words[at]

    def put(self, start: int, shape: tuple[int, ...], strides: tuple[int, ...], data: U8) -> None:
        """See `TensorMemory`."""
        view = self.view(start, shape, strides)
        copy_values(view, _words(data, self.dtype.itemsize).reshape(shape))

    def put_at(self, at: I64, data: U8) -> None:
        """See `TensorMemory`."""
        self._words[at] = _words(data, self.dtype.itemsize)

    def region(self) -> tuple[object, int, int]:
        """See `TensorMemory`."""
        start = int(self._data.__array_interface__["data"][0])
        return "cpu", start, start + self._data.nbytes

    def view(self, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> NDArray[Any]:
        """Return a strided part where it lies, as words of its elements' size."""
        size = self.dtype.itemsize
        return strided(self._data, start * size, shape, strides, words_of(size))


class LentMemory:
    """A tensor's place in a plan that is kept: the tensor itself is there only while it is lent.

    So a plan keeps no memory that a program has freed, and goes on with other memory of that size.
    """

    _lent: TensorMemory | None = None

    def __init__(self, like: TensorMemory) -> None:
        self.dtype = like.dtype
        self.numel = like.numel

    def lend(self, memory: TensorMemory | None) -> None:
        """Point it at memory of the same type and length; None: at none."""
        self._lent = memory

    @property
    def memory(self) -> TensorMemory:
        """The lent memory; raises `UsageError` while there is none."""
        if self._lent is None:
            raise UsageError("a tensor's memory is not available to its plan now", kind="closed")
        return self._lent

    def take(self, start: int, shape: tuple[int, ...], strides: tuple[int, ...], out: U8) -> None:
        """See `TensorMemory`."""
        self.memory.take(start, shape, strides, out)

    def take_at(self, at: I64, out: U8) -> None:
        """See `TensorMemory`."""
        self.memory.take_at(at, out)

    def put(self, start: int, shape: tuple[int, ...], strides: tuple[int, ...], data: U8) -> None:
        """See `TensorMemory`."""
        self.memory.put(start, shape, strides, data)

    def put_at(self, at: I64, data: U8) -> None:
        """See `TensorMemory`."""
        self.memory.put_at(at, data)

    def region(self) -> tuple[object, int, int]:
        """See `TensorMemory`."""
        return self.memory.region()


def _words(data: U8, itemsize: int) -> NDArray[Any]:
    """Return bytes as words of one size, whatever they mean."""
    return data.view(words_of(itemsize))
