"""Types that checkpoints have and the core of Zarr has not: bfloat16, and floats of 8 bits.

They are called as in the registry of Zarr's extensions; ``float8_e4m3fn``, which is not there, as
in ml_dtypes and TensorStore. (``float8_e4m3`` of the registry is another type: it has infinities.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import ml_dtypes
import numpy as np
import zarr.dtype
import zarr.errors
from zarr.core.dtype.common import HasItemSize
from zarr.dtype import ZDType, data_type_registry

EXTENSIONS = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)

# What a type raises for what is another type. zarr moved it from one module to the other.
_Invalid: type[ValueError] = (
    getattr(zarr.errors, "DataTypeValidationError", None) or zarr.dtype.DataTypeValidationError
)


def register_types() -> None:
    """Make the types known to zarr, in this process; those that another package made known stay."""
    if not any(name in data_type_registry.contents for name in EXTENSIONS):
        data_type_registry.register(EXTENSIONS[0], MlType)


@dataclass(frozen=True, kw_only=True, slots=True)
class MlType(ZDType[Any, Any], HasItemSize):
    """A type of ml_dtypes.

    Attributes
    ----------
    name
        One of `EXTENSIONS`.
    """

    # One class for all of them: which one it is, an object knows.
    _zarr_v3_name = EXTENSIONS[0]
    dtype_cls = np.dtype

    name: str = EXTENSIONS[0]

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[Any]) -> Self:
        """Return the type that a type of numpy is; raises what zarr expects of another type."""
        if dtype.name in EXTENSIONS:
            return cls(name=dtype.name)
        raise _Invalid(f"{dtype} is not one of {EXTENSIONS}")

    def to_native_dtype(self) -> np.dtype[Any]:
        """Return the type of ml_dtypes."""
        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, self.name))
        return found

    @classmethod
    def _from_json_v2(cls, data: object) -> Self:
        raise _Invalid(f"{data!r} is not a type of ml_dtypes in Zarr format 2")

    @classmethod
    def _from_json_v3(cls, data: object) -> Self:
        name = data.get("name") if isinstance(data, dict) and len(data) == 1 else data
        if isinstance(name, str) and name in EXTENSIONS:
            return cls(name=name)
        raise _Invalid(f"{data!r} is not one of {EXTENSIONS}")

    def to_json(self, zarr_format: int) -> Any:
        """Return the name: format 2 of Zarr has no name for it."""
        if zarr_format == 3:
            return self.name
        raise _Invalid(f"format {zarr_format} of Zarr has no {self.name}")

    def _check_scalar(self, data: object) -> bool:
        kind = self.to_native_dtype().type
        return isinstance(data, (kind, bool, int, float, np.number))

    def cast_scalar(self, data: object) -> Any:
        """Return a number as an element of this type; `TypeError` for what is no number."""
        if self._check_scalar(data):
            return self.to_native_dtype().type(data)
        raise TypeError(f"{data!r} is not a number, as {self.name} wants")

    def default_scalar(self) -> Any:
        """Return the element whose bits are zero."""
        return self._of_bits(0)

    def from_json_scalar(self, data: Any, *, zarr_format: int) -> Any:
        """Return the value of a number, of ``NaN`` and ``Infinity``, or of bits in hexadecimal."""
        if isinstance(data, str) and data.startswith("0x"):
            return self._of_bits(int(data, 16))
        return self.to_native_dtype().type(float(data))

    def to_json_scalar(self, data: object, *, zarr_format: int) -> str:
        """Return the bits of a value in hexadecimal: every value has them, each NaN included."""
        value = np.array([self.cast_scalar(data)], self.to_native_dtype())
        return f"0x{int(value.view(f'u{self.item_size}')[0]):0{2 * self.item_size}x}"

    def _of_bits(self, bits: int) -> Any:
        return np.array([bits], f"u{self.item_size}").view(self.to_native_dtype())[0]

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return self.to_native_dtype().itemsize
