"""Worker's tensors held quantized: scales from maxima of all ranks; forms that are refused.

In it: hints for what cannot be filled.

The blocks that have a scale each are those of the tensor as this rank holds it, counted from its
own first element: so the kernels that use it look them up. A block's scale follows from its largest
magnitude, wherever its elements come from; so first the magnitudes are asked of all that have a
share, and with the scales that follow from them the values.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckptd.base.grids.block import Block
from ckptd.base.grids.grid import strides_of
from ckptd.errors import MismatchError, UsageError
from ckptd.lay.local import BoundTensor
from ckptd.lay.scales import local_scales, quantized_as
from ckptd.lay.stored import StoredForm
from ckptd.lay.syntax.tree import Affine, Quantized
from ckptd.lay.values import Values
from ckptd.publish.messages import TileSteps
from ckptd.publish.tiles import along_axes, quantize_tiles, tile_cuts, tile_maxima, tiles_of
from ckptd.reshard.changes import POWERS, largest, quantized, scale_shape, scales_of, unfit_value
from ckptd.reshard.live.memory import TensorMemory
from ckptd.types import DType

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


class ScaleMemory(NamedTuple):
    """Where the scales of a tensor of this rank are, under which name, and their shape there."""

    name: str
    memory: TensorMemory
    shape: tuple[int, ...]


def quantized_tensors(
    form: StoredForm, tensors: Iterable[BoundTensor]
) -> Iterator[tuple[BoundTensor, Quantized, str]]:
    """Yield a rank's parameters that are quantized, what their rules say, and names of scales.

    Raises
    ------
    MismatchError
        ``lay-fit``: the blocks have another number of dimensions than the tensor, or it lies in a
        flat buffer.
    """
    for tensor in tensors:
        for piece in () if tensor.state else tensor.pieces:
            found = quantized_as(form, piece.rule)
            if found is None:
                continue
            whole = (piece.lo, piece.hi, piece.at) == (0, tensor.numel, 0)
            if found.overall is not None:
                raise MismatchError(
                    "scales with a second-level scale cannot be filled from a job",
                    kind="lay-fit",
                    where=tensor.name,
                    wanted="scales without overall=NAME",
                    hint="ckptd reshard writes them",
                )
            if not whole or len(found.block) != len(tensor.shape) or min(found.block) < 1:
                raise MismatchError(
                    "the blocks of a quantized tensor do not fit its dimensions",
                    kind="lay-fit",
                    where=tensor.name,
                    wanted=f"{len(tensor.shape)} sizes of one or more, of a tensor that is not "
                    "part of a flat buffer",
                    found=found.block,
                )
            yield tensor, found, local_scales(form, piece.rule, piece.indexes)


class QuantizedTensor:
    """A tensor of this rank on its way in: its scales, and the parts that it is made of.

    Parameters
    ----------
    tensor
        The tensor.
    said
        What its rule says.
    dtype
        To which it is quantized.
    scales
        Where its scales go.

    Raises
    ------
    MismatchError
        ``lay-fit``: values are not quantized to this type, or the scales have another shape or
        type than the blocks need.
    """

    def __init__(
        self, tensor: BoundTensor, said: Quantized, dtype: DType, scales: ScaleMemory
    ) -> None:
        self.dtype = dtype
        self._name = tensor.name
        self._shape = tensor.shape
        self._sizes = sizes = said.block
        self._limit = largest(dtype, tensor.name)
        self._memory = scales.memory
        grid = scale_shape(tensor.shape, sizes)
        plain, found = (tuple(n for n in s if n != 1) for s in (grid, scales.shape))
        type_name = scales.memory.dtype.name
        kinds = (said.kind,) if said.kind else ("float32", POWERS[0])
        if plain != found or type_name not in kinds or type_name not in ("float32", POWERS[0]):
            raise MismatchError(
                "a tensor of scales does not fit the blocks",
                kind="lay-fit",
                where=scales.name,
                wanted=f"{grid} in {' or '.join(kinds)}",
                found=f"{scales.shape} in {type_name}",
            )
        self._lock = threading.Lock()
        self._maxima = np.zeros(grid, np.float32)
        self._scales = self._maxima

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales while they are computed."""
        return self._maxima.nbytes

    def check(self, values: Values | None, of: int) -> None:
        """Raise `UsageError` (``lay-use``) for what is not done besides quantizing."""
        mine = values is not None and quantized(values.source) is None
        sides = () if values is None else (*values.source, *values.target)
        if not mine or of > 1 or any(isinstance(m, Affine) for m in sides):
            raise UsageError(
                "only plain values can be quantized, not quantized, combined or shifted ones",
                kind="lay-use",
                where=self._name,
            )

    def cuts(self, block: Block) -> list[Block]:
        """Return a copy in parts that run along the axes of the tensor."""
        return list(along_axes(block, self._shape))

    def tiles(self, cut: Block) -> tuple[TileSteps, ...]:
        """Return how a part of a copy runs through the blocks."""
        return tiles_of(cut, self._shape, self._sizes)[0]

    def _where(self, cut: Block) -> tuple[Any, ...]:
        """Return which blocks a part of a copy has a share in, as an index of the scales."""
        steps, axes = tiles_of(cut, self._shape, self._sizes)
        rest, out = cut.target_start, []
        for c, (row, size) in enumerate(zip(strides_of(self._shape), self._sizes, strict=True)):
            at, rest = divmod(rest, row)
            if c not in axes:
                out.append(np.array(at // size))
                continue
            d = axes.index(c)
            along = [1] * len(axes)
            numbers = tile_cuts(cut.shape[d], steps[d])[1]
            along[d] = len(numbers)
            out.append(numbers.reshape(along))
        return tuple(out)

    def begin(self) -> None:
        """Forget the version before."""
        self._maxima[...] = 0

    def measure(self, cut: Block, values: NDArray[Any]) -> None:
        """Note the magnitudes of a part of a copy."""
        self.note(cut, tile_maxima(values.reshape(cut.shape), self.tiles(cut)))

    def note(self, cut: Block, maxima: F32) -> None:
        """Note the largest magnitudes of a part's shares in the blocks.

        Raises
        ------
        UsageError
            A value is not finite, so its block has no scale.
        """
        if not np.isfinite(maxima).all():
            raise unfit_value(self._name)
        at = self._where(cut)
        with self._lock:  # several ranks may have shares in one block
            found = self._maxima[at]
            self._maxima[at] = np.maximum(found, maxima.reshape(found.shape))

    def settle(self) -> None:
        """Compute the scales: all shares are noted."""
        self._scales = scales_of(self._maxima, self._limit, self._memory.dtype.name)

    def scales(self, cut: Block) -> bytes:
        """Return the scales of a part of a copy, as it is asked for."""
        return np.ascontiguousarray(self._scales[self._where(cut)]).tobytes()

    def made(self, cut: Block, values: NDArray[Any]) -> U8:
        """Return a part of a copy quantized."""
        out = np.empty(cut.shape, self.dtype.numpy)
        scales = self._scales[self._where(cut)]
        quantize_tiles(values.reshape(cut.shape), self.tiles(cut), scales, self._limit, out)
        return out.reshape(-1).view(np.uint8)

    def put_scales(self) -> None:
        """Write the scales."""
        flat = self._scales.reshape(-1).astype(self._memory.dtype.numpy)
        self._memory.put(0, (len(flat),), (1,), flat.view(np.uint8))
