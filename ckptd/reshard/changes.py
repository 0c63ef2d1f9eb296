"""What happens to values between two rules, on numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptd.errors import CorruptError, MismatchError, UsageError
from ckptd.layout.block import Block
from ckptd.layout.lay.promise import PROMISES, Promise, promise
from ckptd.layout.lay.resolve import Equation
from ckptd.layout.lay.syntax import Affine, Cast, Modifier, Quantized
from ckptd.layout.lay.values import Values
from ckptd.types import DType, dtype_of

__all__ = ["Linear", "change_of", "changed_dtype", "quantized", "step_promise"]


@dataclass(frozen=True, slots=True)
class Linear:
    """``target = scale * source + shift``, in double precision, then in the target's type.

    With scale 1 and shift 0 it is a cast.

    Attributes
    ----------
    tensor
        The target, for errors.
    """

    tensor: str
    scale: float = 1.0
    shift: float = 0.0

    def put(self, target: NDArray[Any], source: NDArray[Any], block: Block, shift: int) -> None:
        """Write the values, wherever they are; as `apply`."""
        self.apply(target, source)

    def apply(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        """Write the values; one that overflows to infinity is an error.

        Raises
        ------
        UsageError
            kind ``overflow``.
        """
        values = source
        if (self.scale, self.shift) != (1.0, 0.0):
            values = source.astype(np.float64) * self.scale + self.shift
        with np.errstate(over="ignore", invalid="ignore"):
            target[...] = values.astype(target.dtype)
        if _is_float(target.dtype) and bool(np.any(_infinite(target) & ~_infinite(values))):
            raise UsageError(
                "a value does not fit the type it is cast to",
                kind="overflow",
                where=self.tensor,
                wanted=f"values of {target.dtype}",
            )


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype.kind == "V"


def _infinite(values: NDArray[Any]) -> NDArray[np.bool_]:
    if not _is_float(values.dtype):
        return np.zeros(values.shape, dtype=np.bool_)
    finite: NDArray[np.bool_] = np.isfinite(values)
    return ~finite


def changed_dtype(source: DType, values: Values | None, where: str) -> DType:
    """Return the type of the target's values.

    What its rule quantizes or casts to; else the source's, or float32 if the source is quantized.
    """
    if values is None:
        return source
    for kind in (Quantized, Cast):
        for modifier in values.target:
            if isinstance(modifier, kind):
                return _named(modifier.dtype, where)
    if quantized(values.source) is not None:
        return dtype_of("float32")
    return source


def quantized(modifiers: tuple[Modifier, ...]) -> Quantized | None:
    """Return what modifiers say about quantization."""
    return next((m for m in modifiers if isinstance(m, Quantized)), None)


def _named(dtype: str, where: str) -> DType:
    try:
        return dtype_of(_LONG.get(dtype, dtype), where)
    except CorruptError:
        raise UsageError(
            "a cast to a type that does not exist", kind="lay-value", where=where, found=dtype
        ) from None


_LONG = {
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "f32": "float32",
    "fp32": "float32",
    "f64": "float64",
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}


def change_of(source: DType, target: DType, values: Values | None, where: str) -> Linear | None:
    """Return the operation that takes stored source values to stored target values.

    Raises
    ------
    MismatchError
        ``lay-fit``: a cast between numbers of another kind.
    """
    scale, shift = 1.0, 0.0
    if values is not None:
        a, b = _affine(values.source)
        c, d = _affine(values.target)
        if (a, b) != (c, d):
            # source = a x + b, target = c x + d.
            scale, shift = c / a, d - c * b / a
    if source == target and (scale, shift) == (1.0, 0.0):
        return None
    if source.name.startswith("complex") or target.name.startswith("complex"):
        raise MismatchError(
            "complex numbers are not cast", kind="lay-fit", where=where, found=source.name
        )
    return Linear(where, scale, shift)


def _affine(modifiers: tuple[Modifier, ...]) -> tuple[float, float]:
    for m in modifiers:
        if isinstance(m, Affine):
            if m.scale == 0:
                raise UsageError("affine with scale 0 cannot be undone", kind="lay-value")
            return m.scale, m.shift
    return 1.0, 0.0


def step_promise(
    source: Equation, target: Equation, dtype: DType, to: DType, change: Linear | None
) -> Promise:
    """Return what is promised of values that go from one rule to the other."""
    found = [promise(_without(target, Cast, Affine)), promise(_without(source, Cast, Affine))]
    if change is not None:
        if (change.scale, change.shift) != (1.0, 0.0):
            found.append("lossy")
        found.append(promise(Equation(target.name, {}, (), (Cast(to.name),)), dtype.name))
    return max(found, key=PROMISES.index)


def _without(equation: Equation, *kinds: type[Modifier]) -> Equation:
    modifiers = tuple(m for m in equation.modifiers if not isinstance(m, kinds))
    return Equation(equation.name, equation.families, equation.dims, modifiers)
