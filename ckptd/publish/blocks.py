"""Parts of published tensors: checked against the slot that they are asked of, and gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ckptd.errors import UsageError
from ckptd.live.memory import ArrayMemory
from ckptd.publish.messages import MOST_READ_BYTES, BlockRead, PublishedTensor
from ckptd.publish.tiles import quantize_tiles, tile_counts, tile_maxima
from ckptd.reshard.changes import Linear, largest
from ckptd.types import dtype_of

__all__ = ["SlotBytes", "gather_blocks", "read_bytes", "tensor_bytes"]

U8 = NDArray[np.uint8]


class SlotBytes(Protocol):
    """What parts are read out of: a slot, or as much of one as was read of it elsewhere."""

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""

    @property
    def data(self) -> memoryview:
        """The bytes."""


def tensor_bytes(slot: SlotBytes, tensor: PublishedTensor) -> U8:
    """Return a tensor's memory in a slot.

    Raises
    ------
    UsageError
        kind ``transport``: it is not inside the slot.
    """
    size = tensor.numel * dtype_of(tensor.dtype).itemsize
    if tensor.start + size > slot.nbytes:
        raise _outside(tensor, f"{slot.nbytes} bytes", tensor.start + size)
    return np.frombuffer(slot.data, np.uint8, size, tensor.start)


def read_bytes(tensors: Sequence[PublishedTensor], blocks: Sequence[BlockRead]) -> int:
    """Return how many bytes some parts are; every number of them is checked.

    Raises
    ------
    UsageError
        kind ``transport``: a part is not inside its tensor, or they are too many bytes.
    """
    total = looked_at = 0
    for block in blocks:
        if block.tensor >= len(tensors) or len(block.shape) != len(block.strides):
            raise _no_part(block)
        tensor = tensors[block.tensor]
        dtype = dtype_of(tensor.dtype)
        count, last = 1, block.start
        for n, step in zip(block.shape, block.strides, strict=True):
            if n < 0 or step < 0:
                raise _no_part(block)
            count *= n
            last += (n - 1) * step
        if count and last >= tensor.numel:
            raise _outside(tensor, f"elements below {tensor.numel}", last)
        raw = count * dtype.itemsize
        if block.tiles:
            looked_at += raw
            if looked_at > MOST_READ_BYTES:
                raise _too_much(looked_at)
            total += _tiled_bytes(block, count)
        else:
            total += count * (dtype_of(block.cast).itemsize if block.cast else dtype.itemsize)
        if max(total, raw) > MOST_READ_BYTES:
            raise _too_much(total)
    return total


def _tiled_bytes(block: BlockRead, count: int) -> int:
    """Return how many bytes a part is that is quantized, or that maxima are asked of."""
    if len(block.tiles) != len(block.shape) or not count:
        raise _no_part(block)
    tiles = tile_counts(block.shape, block.tiles)
    if not block.cast:
        return 4 * tiles
    cast = dtype_of(block.cast)
    largest(cast)
    if len(block.scales) != 4 * tiles:
        raise _no_part(block)
    return count * cast.itemsize


def _no_part(block: BlockRead) -> UsageError:
    return UsageError("no such part", kind="transport", found=str(block)[:200])


def _too_much(found: int) -> UsageError:
    return UsageError(
        "too much is asked for at once",
        kind="transport",
        wanted=f"at most {MOST_READ_BYTES} bytes",
        found=f"{found} bytes",
    )


def gather_blocks(
    slot: SlotBytes, tensors: Sequence[PublishedTensor], blocks: Sequence[BlockRead], out: U8
) -> None:
    """Copy parts, which `read_bytes` has checked, one after the other, each in its own type."""
    at = 0
    for block in blocks:
        tensor = tensors[block.tensor]
        memory = ArrayMemory(tensor_bytes(slot, tensor), dtype_of(tensor.dtype))
        numel = int(np.prod(block.shape, dtype=np.int64))
        if not block.cast and not block.tiles:
            part = out[at : at + numel * memory.dtype.itemsize]
            at += len(part)
            memory.take(block.start, block.shape, block.strides, part)
            continue
        plain = np.empty(numel * memory.dtype.itemsize, np.uint8)
        memory.take(block.start, block.shape, block.strides, plain)
        values = plain.view(memory.dtype.numpy)
        if not block.cast:
            maxima = tile_maxima(values.reshape(block.shape), block.tiles)
            out[at : at + maxima.nbytes] = maxima.reshape(-1).view(np.uint8)
            at += maxima.nbytes
            continue
        sent = dtype_of(block.cast)
        part = out[at : at + numel * sent.itemsize]
        at += len(part)
        if block.tiles:
            scales = np.frombuffer(block.scales, np.float32)
            made = np.empty(block.shape, sent.numpy)
            quantize_tiles(values.reshape(block.shape), block.tiles, scales, largest(sent), made)
            part[...] = made.reshape(-1).view(np.uint8)
        else:
            Linear(tensor.name).apply(part.view(sent.numpy), values)


def _outside(tensor: PublishedTensor, wanted: str, found: object) -> UsageError:
    return UsageError(
        "a part is not inside its tensor",
        kind="transport",
        where=tensor.name,
        wanted=wanted,
        found=found,
    )
