"""Quantized weights of torchao (int8, int4, fp8 subclasses), read as plain tensors.

In it: ``--dequantize``; the classes and parts that are known.

What they mean is ``(qdata - zero_point) * scale``, rounded once to the type of the wrapper. Others,
such as tables of four bits (NF4), are not read so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptd.base.grids.grid import Axis, Grid, Piece, whole
from ckptd.checkpoint.format.manifest import SUBCLASS
from ckptd.checkpoint.load.source import CheckpointReader
from ckptd.reshard.changes import Scaled, scale_shape
from ckptd.types import DTYPES, DType

DEQUANTIZE = "; or --dequantize, for torchao's int8, int4 and fp8 weights in blocks"
"""Of errors."""

_CLASSES = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor")
_PARTS = (["qdata", "scale"], ["qdata", "scale", "zero_point"])
_ELEMENTS = 1 << 20


@dataclass(frozen=True, eq=False)
class PlainTensor:
    """A plain tensor that the parts of a wrapped one represent.

    Attributes
    ----------
    reader
        Its checkpoint.
    name, dtype, shape, block
        Of the tensor, and of a block that has one scale.
    parts
        Names of the stored tensors: of its numbers, scales and, where it has some, zero points.
    grid
        How the stored numbers are cut, as elements of this tensor.
    """

    reader: CheckpointReader
    name: str
    dtype: DType
    shape: tuple[int, ...]
    block: tuple[int, ...]
    parts: tuple[str, ...]
    grid: Grid

    def change(self, piece: Piece) -> Scaled:
        """Return the change from a piece of the stored numbers to values."""
        scales, *zeros = (
            Scaled(
                self.name,
                partial(self._factors, part),
                self.block,
                self.shape,
                piece.box,
                piece.flat,
                "source",
            )
            for part in self.parts[1:]
        )
        return scales.above(zeros[0]) if zeros else scales

    def values(self, numbers: NDArray[Any], first: int) -> NDArray[Any]:
        """Return the values of stored numbers, row-major, from number `first` on."""
        flat, change = numbers.reshape(-1), self.change(whole(self.shape).piece(0))
        out = np.empty(len(flat), self.dtype.numpy)
        for lo in range(0, len(flat), _ELEMENTS):
            part = flat[lo : lo + _ELEMENTS]
            positions = np.arange(first + lo, first + lo + len(part), dtype=np.int64)
            out[lo : lo + len(part)] = change.at(part, positions, out.dtype)
        return out

    def _factors(self, part: str) -> NDArray[np.float32]:
        if part not in self._known:
            found = self.reader.tensors([part])[part].astype(np.float32)
            self._known[part] = found.reshape(scale_shape(self.shape, self.block))
        return self._known[part]

    @cached_property
    def _known(self) -> dict[str, NDArray[np.float32]]:
        return {}


def plain_tensors(reader: CheckpointReader) -> dict[str, PlainTensor]:
    """Return the wrapped tensors of a checkpoint that are read as plain ones, by name."""
    found = (_plain(reader, o.name, o.value) for o in reader.entries if o.kind == SUBCLASS)
    return {t.name: t for t in found if t is not None}


def _plain(reader: CheckpointReader, name: str, record: Any) -> PlainTensor | None:
    match record:
        case {
            "class": str(owner),
            "context": ["dict", {"block_size": ["list" | "tuple", *block]}],
            "dtype": str(dtype),
            "shape": list(shape),
            "parts": list(parts),
            "cut": list(cut),
        } if owner.startswith("torchao.") and owner.rpartition(":")[2] in _CLASSES:
            pass
        case _:
            return None
    names = tuple(f"{name}.{p}" for p in parts)
    sizes = [*block, *shape]
    if parts not in _PARTS or dtype not in DTYPES or len(block) != len(shape) or not shape:
        return None
    if any(n not in reader.infos for n in names) or any(type(n) is not int for n in sizes):
        return None
    grid = reader.grid(names[0])
    if cut:
        # One dimension more counts the pieces; those of rows lie one after the other.
        if [c[1] for c in cut] != ["S(0)"] or grid.flat or len(grid.axes) != len(shape) + 1:
            return None
        if grid.axes[1].ncells > 1:
            return None
        rows = Axis(tuple((n * shape[0], count) for n, count in grid.axes[0].runs))
        grid = Grid((rows, *grid.axes[2:]))
    if min(sizes) < 1 or any(n % b for n, b in zip(shape, block, strict=True)):
        return None
    held = [grid.shape, *[scale_shape(grid.shape, tuple(block))] * (len(names) - 1)]
    sizes_of = [int(np.prod(reader.info(n).shape)) for n in names]
    if sizes_of != [int(np.prod(s)) for s in held] or grid.shape[1:] != tuple(shape[1:]):
        return None
    return PlainTensor(reader, name, DTYPES[dtype], grid.shape, tuple(block), names, grid)
