"""Changes of values between two rules, on arrays: casts, scales, quantization, packed fp4.

In it: names and limits of types; block scales; which casts lose; overflow.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckptd.base.grids.block import Block, flat_regions
from ckptd.base.grids.grid import coordinates_of, strides_of
from ckptd.errors import CorruptError, MismatchError, UsageError
from ckptd.lay.promise import PROMISES, Promise, promise
from ckptd.lay.resolve import Equation
from ckptd.lay.scales import HALF_BYTE
from ckptd.lay.syntax.tree import Affine, Cast, Modifier, Quantized
from ckptd.lay.values import Values
from ckptd.types import Box, DType, dtype_of

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]


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
        """Write the values; one that overflows is an error, and no other number.

        Raises
        ------
        UsageError
            A value does not fit the type that it is cast to, or is not finite and so has no scale.
        """
        plain = (self.scale, self.shift) == (1.0, 0.0)
        values = source if plain else source.astype(np.float64) * self.scale + self.shift
        if not np.can_cast(values.dtype, target.dtype, "unsafe"):
            values = values.astype(np.float32)  # which holds every value of both
        with np.errstate(over="ignore", invalid="ignore"):
            target[...] = values.astype(target.dtype)
        if _overflows(target, values):
            raise unfit_value(self.tensor, f"values of {target.dtype}")


def unfit_value(tensor: str, wanted: str = "finite values, which have a scale") -> UsageError:
    """Return the error for a value that the type of a target does not have."""
    return UsageError("a value does not fit the type it is cast to", where=tensor, wanted=wanted)


def _overflows(target: NDArray[Any], values: NDArray[Any]) -> bool:
    """Whether some of the values, which were cast to `target`, are no numbers of its type."""
    if target.dtype.kind in "iu" and values.size:
        # Towards zero, as a cast does; the limits are exact in double precision.
        found = values if values.dtype.kind in "iub" else np.trunc(values.astype(np.float64))
        info = np.iinfo(target.dtype)
        if found.dtype.kind == "f":
            return not bool(np.all((found >= float(info.min)) & (found < float(info.max + 1))))
        return int(found.min()) < info.min or int(found.max()) > info.max
    return _is_float(target.dtype) and bool(np.any(_infinite(target) & ~_infinite(values)))


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype.kind == "V"


def _infinite(values: NDArray[Any]) -> NDArray[np.bool_]:
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
                is_half = kind is Quantized and modifier.dtype == HALF_BYTE
                return _named("uint8" if is_half else modifier.dtype, where)
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
            "unknown dtype of a cast", kind="lay-rule", where=where, found=dtype
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
            "complex numbers cannot be cast", kind="lay-fit", where=where, found=source.name
        )
    return Linear(where, scale, shift)


def _affine(modifiers: tuple[Modifier, ...]) -> tuple[float, float]:
    for m in modifiers:
        if isinstance(m, Affine):
            if m.scale == 0:
                raise UsageError("affine with scale 0 cannot be undone", kind="lay-rule")
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


def scale_shape(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor."""
    return tuple(-(-n // b) for n, b in zip(shape, block, strict=True))


def largest(dtype: DType, where: str | None = None) -> float:
    """Return the largest finite value of a type that values are quantized to.

    Parameters
    ----------
    dtype
        The type.
    where
        The tensor, for the error.

    Raises
    ------
    MismatchError
        ``lay-fit``: not a floating-point type of at most two bytes, nor int8.
    """
    if dtype.name == "int8":
        return 127.0
    if dtype.name.startswith("float8") and dtype.name != "float8_e8m0fnu":
        import ml_dtypes

        return float(ml_dtypes.finfo(dtype.numpy).max)  # type: ignore[no-untyped-call]
    raise MismatchError(
        "unsupported dtype for quantized values",
        kind="lay-fit",
        where=where,
        wanted="float8_e4m3fn, float8_e5m2, ..., int8",
        found=dtype.name,
    )


def scales_of(maxima: F32, limit: float, kind: str = "") -> F32:
    """Return the scales of blocks from their largest magnitudes.

    A block of zeros, or of what is next to zero, has scale 1.

    Parameters
    ----------
    maxima
        Of the blocks.
    limit
        See `largest`.
    kind
        Their type. Powers of two are the next ones up, so that no value is cut off.
    """
    scales = maxima / np.float32(limit)
    scales[scales == 0] = 1
    if kind in POWERS:
        mantissa, exponent = np.frexp(scales)
        exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
        scales = np.ldexp(np.float32(1), np.maximum(exponent, -127)).astype(np.float32)
    return scales


class BlockScales(NamedTuple):
    """Scales of a quantized tensor.

    Attributes
    ----------
    factors
        What each block is multiplied with.
    stored
        As the tensor of scales has them.
    overall
        The number that multiplies all of those; 1 where there is none.
    """

    factors: F32
    stored: NDArray[Any]
    overall: np.float32 = np.float32(1)


def block_scales(maxima: F32, modifier: Quantized, where: str) -> BlockScales:
    """Return the scales of blocks, in the types that a rule says.

    Parameters
    ----------
    maxima
        The largest magnitudes of the blocks.
    """
    kind, limit = scale_type(modifier), limit_of(modifier, where)
    if modifier.overall is None:
        factors = scales_of(maxima, limit, modifier.kind)
        stored = factors.astype(kind)
        return BlockScales(factors, stored.view(np.uint8) if modifier.kind == "uint8" else stored)
    top = largest(dtype_of(modifier.kind))
    overall = scales_of(maxima.max(initial=0, keepdims=True).reshape(1), limit * top)[0]
    scales = np.clip(maxima / np.float32(limit) / overall, _LEAST, top)
    stored = np.where(maxima == 0, np.float32(1), scales).astype(kind)
    return BlockScales(stored.astype(np.float32) * overall, stored, overall)


def scale_type(modifier: Quantized) -> np.dtype[Any]:
    """Return the type of a rule's scales as numbers: bytes are exponents of two."""
    kind = modifier.kind or "float32"
    return dtype_of("float8_e8m0fnu" if kind == "uint8" else kind).numpy


def limit_of(modifier: Quantized, where: str) -> float:
    """Return the largest value of the type that a rule quantizes to; see `largest`."""
    return 6.0 if modifier.dtype == HALF_BYTE else largest(_named(modifier.dtype, where), where)


POWERS = ("float8_e8m0fnu", "uint8")
"""Types of scales that are powers of two."""
_LEAST = np.float32(2**-9)
"""The smallest scale of type float8_e4m3fn."""


def scale_down(values: F32, factors: F32, limit: float, target: NDArray[Any]) -> None:
    """Quantize values with the scale of each; `values` is written over.

    Parameters
    ----------
    values, factors
        The values, and their scales, which may be broadcast.
    limit
        See `largest`.
    target
        What is written, in its own type.
    """
    values /= factors
    np.clip(values, -limit, limit, out=values)
    if target.dtype.kind == "i":
        np.rint(values, out=values)
    target[...] = values.astype(target.dtype)


_PACKING = threading.Lock()
"""Threads write both halves of a byte."""


def _float4() -> np.dtype[Any]:
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(ml_dtypes.float4_e2m1fn)
    return dtype


def _unpacked(pairs: NDArray[np.uint8], half: int | I64) -> F32:
    """Return one of the two values in each byte."""
    values = ((pairs >> (4 * half)) & 0x0F).astype(np.uint8)
    return values.view(_float4()).astype(np.float32)


def halves(block: Block) -> Iterator[tuple[int, Block]]:
    """Yield a copy, whose source has two elements in a byte, as copies of bytes.

    With each: which half of its bytes it is of.
    """
    for d, (n, step) in enumerate(zip(block.shape, block.source_strides, strict=True)):
        if n > 1 and step % 2:
            for first in range(2):
                shape, source, target = (
                    list(x) for x in (block.shape, block.source_strides, block.target_strides)
                )
                shape[d], source[d], target[d] = (n - first + 1) // 2, 2 * step, 2 * target[d]
                yield from halves(
                    Block(
                        tuple(shape),
                        block.source_start + first * step,
                        tuple(source),
                        block.target_start + first * block.target_strides[d],
                        tuple(target),
                    )
                )
            return
    start, strides = block.source_start, tuple(s // 2 for s in block.source_strides)
    yield (
        start % 2,
        Block(block.shape, start // 2, strides, block.target_start, block.target_strides),
    )


@dataclass(frozen=True, eq=False)
class Scaled:
    """Multiplies or divides by the scale of each element's block.

    Attributes
    ----------
    tensor
        For errors.
    scales
        Gives the scales, when they are needed first.
    block
        Extents of a block.
    shape
        Of the quantized tensor.
    box
        The piece of it that blocks of a copy speak of.
    flat
        Elements of the box, if the piece is a range of it.
    side
        Which side of a copy is quantized: a source is multiplied, a target divided.
    limit
        Largest value of the target's type, where it is quantized.
    half
        Where quantized values are two in a byte: which one of them. Blocks count bytes then, and
        the piece is one of elements.
    zeros
        Has what is taken from stored numbers first, in place of scales.
    """

    tensor: str
    scales: Callable[[], F32]
    block: tuple[int, ...]
    shape: tuple[int, ...]
    box: Box
    flat: tuple[int, int] | None
    side: Literal["source", "target"]
    limit: float = 0.0
    half: int | None = None
    zeros: Scaled | None = None

    @cached_property
    def _scales(self) -> F32:
        found = np.asarray(self.scales(), dtype=np.float32)
        wanted = scale_shape(self.shape, self.block)
        if [n for n in found.shape if n != 1] == [n for n in wanted if n != 1]:
            found = found.reshape(wanted)
        else:
            raise MismatchError(
                "a tensor of scales has another shape than the blocks need",
                kind="lay-fit",
                where=self.tensor,
                wanted=wanted,
                found=found.shape,
            )
        return found

    def above(self, zeros: Scaled) -> Scaled:
        """Return the same with zero points."""
        return replace(self, zeros=zeros)

    def put(self, target: NDArray[Any], source: NDArray[Any], block: Block, shift: int) -> None:
        """Write the values; `shift` is where the piece's first element is in the target buffer."""
        if self.side == "source":
            start, strides = block.source_start, block.source_strides
        else:
            start, strides = block.target_start - shift, block.target_strides
        if self.half is not None:
            start, strides = 2 * start + self.half, tuple(2 * s for s in strides)
        if self.zeros is not None:
            source = source.astype(np.float32)
            source -= self.zeros._factors(start, block.shape, strides)  # exact: small integers
        self._apply(target, source, self._factors(start, block.shape, strides), self.half)

    def at(self, values: NDArray[Any], positions: I64, target: np.dtype[Any]) -> NDArray[Any]:
        """Return changed values of elements at row-major positions of the whole tensor."""
        out = np.empty(len(values), dtype=target)
        half = None if self.half is None else positions % 2
        where = np.unravel_index(positions, self.shape)
        if self.zeros is not None:
            values = values.astype(np.float32) - self.zeros._gathered(where)
        self._apply(out, values, self._gathered(where), half)
        return out

    def _apply(
        self, target: NDArray[Any], source: NDArray[Any], factors: F32, half: int | I64 | None
    ) -> None:
        if self.side == "source":
            values = source.astype(np.float32) if half is None else _unpacked(source, half)
            target[...] = (values * factors).astype(target.dtype)
            return
        values = source.astype(np.float32)
        if half is None:
            scale_down(values, factors, self.limit, target)
            return
        new = np.empty(values.shape, _float4())
        scale_down(values, factors, self.limit, new)
        with _PACKING:
            target[...] = (target & (0xF0, 0x0F)[half]) | (new.view(np.uint8) << 4 * half)

    def _factors(self, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> F32:
        """Return the scale of each element of a strided block of the piece."""
        if self.flat is not None:
            start += self.flat[0]
        columns = self.box.shape[-1] if self.box.shape else 1
        last = shape[-1] if shape else 1
        if shape and strides[-1] == 1 and start % columns == 0 and last % columns == 0 and columns:
            # Whole rows, one after the other: told apart, their coordinates need no division.
            shape, strides = (*shape[:-1], last // columns, columns), (*strides[:-1], columns, 1)
            return self._factors_of(start, shape, strides).reshape(*shape[:-2], last)
        return self._factors_of(start, shape, strides)

    def _factors_of(self, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> F32:
        whole = strides_of(self.box.shape)
        first = coordinates_of(start, whole)
        steps = [coordinates_of(s, whole) for s in strides]
        ends = [
            f + sum((n - 1) * step[d] for n, step in zip(shape, steps, strict=True))
            for d, f in enumerate(first)
        ]
        if all(e < n for e, n in zip(ends, self.box.shape, strict=True)):
            axes = []
            for d, f in enumerate(first):
                at: I64 = np.full((1,) * len(shape), f, dtype=np.int64)
                for k, (n, step) in enumerate(zip(shape, steps, strict=True)):
                    if step[d]:
                        along = [1] * len(shape)
                        along[k] = n
                        at = at + (np.arange(n, dtype=np.int64) * step[d]).reshape(along)
                axes.append(at)
        else:
            positions = np.full(shape, start, dtype=np.int64)
            for k, (n, s) in enumerate(zip(shape, strides, strict=True)):
                along = [1] * len(shape)
                along[k] = n
                positions += (np.arange(n, dtype=np.int64) * s).reshape(along)
            axes = list(np.unravel_index(positions, self.box.shape))
        moved = [a + o for a, o in zip(axes, self.box.offset, strict=True)]
        return np.broadcast_to(self._gathered(moved), shape)

    def _gathered(self, coordinates: Any) -> F32:
        at = tuple(c // b for c, b in zip(coordinates, self.block, strict=True))
        return self._scales[at] if at else self._scales


def block_maxima(
    scales: F32,
    values: NDArray[Any],
    start: int,
    box: Box,
    block: tuple[int, ...],
) -> None:
    """Raise `scales` to the largest magnitude of each block.

    Parameters
    ----------
    scales
        Of the whole tensor.
    values
        Row-major elements of a box of it, from number `start` on.
    """
    flat = np.abs(values.astype(np.float32))
    for region in flat_regions(box, start, start + len(flat)):
        part = flat[region.start : region.start + math.prod(region.box.shape)]
        part = part.reshape(region.box.shape)
        for d, (o, b) in enumerate(zip(region.box.offset, block, strict=True)):
            cuts = [0, *range(b - o % b, region.box.shape[d], b)]
            part = np.maximum.reduceat(part, cuts, axis=d)
        at = tuple(
            slice(o // b, o // b + n)
            for o, b, n in zip(region.box.offset, block, part.shape, strict=True)
        )
        scales[at] = np.maximum(scales[at], part)
