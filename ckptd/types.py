"""Element types (`DType`, codes, sizes), `Box`, `ByteRange`.

Importing this module must stay cheap, because the command line does: numpy comes on first use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from ckptd.errors import CorruptError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["DTYPES", "Box", "ByteRange", "DType", "dtype_of"]


class DType(msgspec.Struct, frozen=True, dict=True):
    """A logical element type.

    Attributes
    ----------
    name
        The name in manifests: torch's own name without ``torch.``.
    itemsize
        Bytes of one element.
    safetensors
        The code in a safetensors header. Types that safetensors lacks are stored as ``U8`` with
        one more, innermost dimension of `itemsize` (format spec, section 4.2).
    numpy_name
        Name of the numpy or ml_dtypes type with the same bits.
    """

    name: str
    itemsize: int
    safetensors: str | None
    numpy_name: str

    @cached_property
    def numpy(self) -> np.dtype[Any]:
        """The numpy type; imports ml_dtypes only for types that numpy lacks."""
        import numpy as np

        there: Any = np if hasattr(np, self.numpy_name) else import_module("ml_dtypes")
        found: np.dtype[Any] = np.dtype(getattr(there, self.numpy_name))
        return found

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that a safetensors header states for a chunk of logical `shape`."""
        return shape if self.safetensors else (*shape, self.itemsize)

    @property
    def stored_code(self) -> str:
        """The dtype code that a safetensors header states."""
        return self.safetensors or "U8"


def _table() -> dict[str, DType]:
    rows = [
        ("bool", 1, "BOOL", "bool_"),
        ("uint8", 1, "U8", "uint8"),
        ("int8", 1, "I8", "int8"),
        ("uint16", 2, "U16", "uint16"),
        ("int16", 2, "I16", "int16"),
        ("uint32", 4, "U32", "uint32"),
        ("int32", 4, "I32", "int32"),
        ("uint64", 8, "U64", "uint64"),
        ("int64", 8, "I64", "int64"),
        ("float16", 2, "F16", "float16"),
        ("bfloat16", 2, "BF16", "bfloat16"),
        ("float32", 4, "F32", "float32"),
        ("float64", 8, "F64", "float64"),
        ("float8_e4m3fn", 1, "F8_E4M3", "float8_e4m3fn"),
        ("float8_e5m2", 1, "F8_E5M2", "float8_e5m2"),
        ("float8_e4m3fnuz", 1, "F8_E4M3FNUZ", "float8_e4m3fnuz"),
        ("float8_e5m2fnuz", 1, "F8_E5M2FNUZ", "float8_e5m2fnuz"),
        ("float8_e8m0fnu", 1, "F8_E8M0", "float8_e8m0fnu"),
        ("complex64", 8, "C64", "complex64"),
        # safetensors has no portable code for these: stored as bytes with a logical type.
        ("float4_e2m1fn_x2", 1, None, "uint8"),
        ("complex32", 4, None, "uint32"),
        ("complex128", 16, None, "complex128"),
    ]
    return {name: DType(name, size, code, numpy) for name, size, code, numpy in rows}


DTYPES: dict[str, DType] = _table()
"""All dtypes of format version 1, by name."""


def dtype_of(name: str, where: str | None = None) -> DType:
    """Return the dtype called `name`; an unknown name is a `CorruptError` at `where`."""
    try:
        return DTYPES[name]
    except (KeyError, TypeError):
        raise CorruptError(
            "unknown dtype", where=where, wanted=f"one of {', '.join(DTYPES)}", found=repr(name)
        ) from None


class Box(msgspec.Struct, frozen=True):
    """An axis-aligned box of a tensor: `offset` and `shape` per dimension, in elements."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        """Return the box of a whole tensor."""
        return Box((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last index, per dimension."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the common box, or None when it is empty."""
        offset = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        end = tuple(min(a, b) for a, b in zip(self.end, other.end, strict=True))
        if any(e <= o for o, e in zip(offset, end, strict=True)):
            return None
        return Box(offset, tuple(e - o for o, e in zip(offset, end, strict=True)))

    def cut(self, itemsize: int, limit: int) -> Iterator[Box]:
        """Cut the box into boxes of at most `limit` bytes, in row-major order.

        Parameters
        ----------
        itemsize
            Bytes of an element; one that is larger than `limit` is a box of its own.
        """
        nbytes = self.numel * itemsize
        if nbytes <= limit or not self.shape:
            yield self
            return
        (first, *rest), (count, *inner) = self.offset, self.shape
        row = nbytes // count
        if row <= limit:
            rows = limit // row
            for at in range(0, count, rows):
                yield Box((first + at, *rest), (min(rows, count - at), *inner))
            return
        for i in range(count):
            for box in Box(tuple(rest), tuple(inner)).cut(itemsize, limit):
                yield Box((first + i, *box.offset), (1, *box.shape))


class ByteRange(msgspec.Struct, frozen=True):
    """Bytes ``[start, end)`` of an object."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"byte range [{self.start}, {self.end}) is not ordered")

    @property
    def length(self) -> int:
        """Number of bytes."""
        return self.end - self.start
