"""Parts of published tensors on the server: checked, gathered, cast, digests of blocks.

In it: size of a block; deltas applied on arrival.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ckptd.base.digest import digest
from ckptd.errors import CorruptError, UsageError
from ckptd.publish.deltas import WHOLE, apply
from ckptd.publish.messages import MOST_READ_BYTES, BlockRead, PublishedTensor
from ckptd.publish.tiles import quantize_tiles, tile_counts, tile_maxima
from ckptd.reshard.changes import Linear, largest
from ckptd.reshard.live.memory import ArrayMemory
from ckptd.types import dtype_of

U8 = NDArray[np.uint8]


BLOCK_BYTES = 1 << 18
"""Bytes that share one digest: the grain in which changes are known."""


class SlotBytes(Protocol):
    """Bytes that parts are read out of: a slot, or the portion of one that was read elsewhere."""

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""

    @property
    def data(self) -> memoryview:
        """The bytes."""


class KnownChanges(Protocol):
    """The changes since a version that a worker holds; see `ckptd.publish.chains`."""

    def of(
        self, tensor: PublishedTensor, block: BlockRead, cut: tuple[int, int] | None
    ) -> bytes | None:
        """Return the delta of a part, or of some bytes of it; None: its values are sent."""


def tensor_bytes(slot: SlotBytes, tensor: PublishedTensor) -> U8:
    """Return a tensor's memory in a slot.

    Raises
    ------
    UsageError
        It is not inside the slot.
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
        A part is not inside its tensor, or they are too many bytes.
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
    return UsageError("unknown part of a tensor", found=str(block)[:200])


def _too_much(found: int) -> UsageError:
    return UsageError(
        "too many bytes requested at once",
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
        numel = math.prod(block.shape)
        if not numel:
            continue
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


class BlockDigests:
    """Digests of a version's tensors, block by block.

    Each is computed once, by what needs it first: sending a part, or the pass over the whole
    version. Threads may compute the same one at the same time.
    """

    def __init__(self, tensors: Iterable[PublishedTensor]) -> None:
        self._found: dict[str, list[bytes]] = {
            t.name: [b""] * -(-t.numel * dtype_of(t.dtype).itemsize // BLOCK_BYTES) for t in tensors
        }

    def of(self, name: str, data: U8, cut: tuple[int, int]) -> bytes:
        """Return the digest of some bytes of a tensor; `data` is all of it."""
        start, end = cut
        found, number = self._found[name], start // BLOCK_BYTES
        if start % BLOCK_BYTES or end != min(start + BLOCK_BYTES, len(data)):
            return digest(data[start:end].data)  # no whole block
        known = found[number]
        if not known:
            known = found[number] = digest(data[start:end].data)
        return known

    def complete(
        self,
        slot: SlotBytes,
        tensors: Mapping[str, PublishedTensor],
        beside: Callable[[str, int, U8], bytes] = lambda name, number, block: b"",
    ) -> dict[str, list[bytes]]:
        """Compute what nothing has needed yet, and return all; last first, as readers begin.

        `beside` is called with each block of each tensor, and returns its digest if it has made it.
        """
        for name, found in reversed(self._found.items()):
            data = tensor_bytes(slot, tensors[name])
            for number in reversed(range(len(found))):
                at = number * BLOCK_BYTES
                block = data[at : at + BLOCK_BYTES]
                made = beside(name, number, block)
                found[number] = found[number] or made or digest(block.data)
        return self._found


def run_of(tensor: PublishedTensor, block: BlockRead) -> tuple[int, int] | None:
    """Return first byte and end of a part that is sent as it lies; None: it has to be gathered."""
    if block.cast or block.tiles:
        return None
    count = 1
    for n, step in zip(reversed(block.shape), reversed(block.strides), strict=True):
        if n != 1 and step != count:
            return None
        count *= n
    size = dtype_of(tensor.dtype).itemsize
    return block.start * size, (block.start + count) * size


def _cuts(run: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield a run of bytes cut where the blocks of its tensor begin."""
    start, end = run
    while start < end:
        cut = min(end, start - start % BLOCK_BYTES + BLOCK_BYTES)
        yield start, cut
        start = cut


def outgoing(
    slot: SlotBytes,
    tensors: Sequence[PublishedTensor],
    blocks: Sequence[BlockRead],
    digests: BlockDigests,
    scratch: Callable[[int], U8],
    changes: KnownChanges | None = None,
) -> tuple[list[memoryview], bytes, tuple[int, ...]]:
    """Return parts, which `read_bytes` has checked, as they are sent, and the digest of them all.

    What lies together is sent out of the slot; the rest is gathered.

    Parameters
    ----------
    digests
        Of this version.
    scratch
        Returns memory of so many bytes, for what is gathered.
    changes
        Since the version that the parts say.

    Returns
    -------
    list, bytes, tuple
        The second is the digest of the digests of runs, cut at blocks, and of what is gathered.
        The third has the sizes of deltas, one for each of these; none where no delta is known.
    """
    runs = [run_of(tensors[b.tensor], b) for b in blocks]
    gathered = [b for b, run in zip(blocks, runs, strict=True) if run is None]
    sizes = [read_bytes(tensors, [b]) for b in gathered]
    room = scratch(sum(sizes)) if gathered else np.empty(0, np.uint8)
    gather_blocks(slot, tensors, gathered, room)
    ends = iter(np.cumsum(sizes).tolist())
    at = 0
    parts: list[memoryview] = []
    found: list[bytes] = []
    sent: list[tuple[bytes, memoryview]] = []
    known = False
    for block, run in zip(blocks, runs, strict=True):
        tensor = tensors[block.tensor]
        pieces: list[tuple[tuple[int, int] | None, memoryview]] = []
        if run is None:
            end = next(ends)
            part, at = room[at:end], end
            found.append(digest(part.data))
            pieces.append((None, part.data))
        else:
            data = tensor_bytes(slot, tensor)
            part = data[slice(*run)]
            found += [digests.of(tensor.name, data, cut) for cut in _cuts(run)]
            pieces += [(cut, data[slice(*cut)].data) for cut in _cuts(run)]
        parts.append(part.data)
        for cut, piece in pieces if changes is not None else ():
            has = block.since and not block.tiles and len(piece)
            delta = changes.of(tensor, block, cut) if changes is not None and has else None
            known |= delta is not None
            sent.append((WHOLE, piece) if delta is None else (delta, memoryview(b"")))
    if not known:
        return parts, digest(b"".join(found)), ()
    counts = tuple(len(head) + len(rest) for head, rest in sent)
    joined = [memoryview(part) for pair in sent for part in pair if len(part)]
    return joined, digest(b"".join(found)), counts


def incoming(
    tensors: Sequence[PublishedTensor],
    blocks: Sequence[BlockRead],
    data: memoryview,
    sizes: Sequence[int],
    into: U8,
) -> None:
    """Make the values that a worker holds of parts those of the version, by deltas of `outgoing`.

    Raises
    ------
    CorruptError
        They are no deltas of these parts.
    """
    places: list[tuple[int, int]] = []
    at = 0
    for block in blocks:
        tensor = tensors[block.tensor]
        run = run_of(tensor, block)
        size = dtype_of(block.cast or tensor.dtype).itemsize
        lengths = [read_bytes(tensors, [block])] if run is None else [b - a for a, b in _cuts(run)]
        places += [(length, size) for length in lengths]
    if len(places) != len(sizes) or sum(sizes) != len(data):
        raise CorruptError("malformed delta of a block", wanted=f"{len(places)} deltas")
    for end, length, (nbytes, size) in zip(accumulate(sizes), sizes, places, strict=True):
        apply(into[at : at + nbytes], data[end - length : end], size)
        at += nbytes


def incoming_digest(
    tensors: Sequence[PublishedTensor], blocks: Sequence[BlockRead], data: U8
) -> bytes:
    """Return the digest of parts that have arrived, one after the other; see `outgoing`."""
    at = 0
    found: list[bytes] = []
    for block in blocks:
        tensor = tensors[block.tensor]
        run = run_of(tensor, block)
        if run is None:
            end = at + read_bytes(tensors, [block])
            found.append(digest(data[at:end].data))
        else:
            end = at + run[1] - run[0]
            shift = at - run[0]
            found += [digest(data[lo + shift : hi + shift].data) for lo, hi in _cuts(run)]
        at = end
    return digest(b"".join(found))


def _outside(tensor: PublishedTensor, wanted: str, found: object) -> UsageError:
    return UsageError(
        "a part is not inside its tensor", where=tensor.name, wanted=wanted, found=found
    )
