"""The witness of kind ``full-1``: a position-keyed sum over every element (spec section 8.4).

Each 64-bit word adds ``splitmix64(word XOR splitmix64(seed + position))`` modulo 2^64. Addition
makes it independent of order and of layout: each holder of a part of the tensor adds up its part.
The position is hashed on its own first and the word after it, so that two elements that change
places change the sum whatever their bits are. A product of a position key and the word would not
do: doubles that differ in their sign bit only would cancel modulo 2^64.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ckptd.base.grids.block import Region
from ckptd.base.grids.grid import strides_of
from ckptd.checkpoint.format.witness import (
    FULL,
    Difference,
    WitnessPlan,
    read_parts,
    seed_of,
    splitmix64,
    words_of,
    write_parts,
)
from ckptd.errors import CorruptError, UsageError
from ckptd.types import Box

SLAB = 1 << 16
"""Elements worked on at a time: fits the cache, and bounds memory."""

U64 = NDArray[np.uint64]


def partial_sum(
    name: str,
    shape: tuple[int, ...],
    itemsize: int,
    regions: Iterable[Region],
    buffer: NDArray[np.uint8],
) -> tuple[int, int]:
    """Sum over the elements of a tensor that lie in a buffer.

    Parameters
    ----------
    name, shape
        Of the whole tensor.
    itemsize
        Bytes of one element.
    regions
        What the buffer holds, each element once.
    buffer
        Raw little-endian bytes, 1-d.

    Returns
    -------
    total
        In [0, 2^64); sums of disjoint parts add up modulo 2^64.
    count
        Number of elements.

    Raises
    ------
    UsageError
        A region does not lie in the buffer.
    """
    words = words_of(buffer, itemsize)
    seed, strides = seed_of(name), strides_of(shape)
    total = count = 0
    for region in regions:
        lo, hi = region.span
        if lo < 0 or hi > len(words):
            raise UsageError(
                "a region does not lie in its buffer",
                wanted=f"elements below {len(words)}",
                found=f"{lo} to {hi}",
            )
        if not region.numel:
            continue
        held = _view(words, region)
        first = sum(o * s for o, s in zip(region.box.offset, strides, strict=True))
        for box in Box.whole(region.box.shape).cut(1, SLAB):
            slab = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            positions = _positions(first, slab, strides)
            total += _slab_sum(seed, positions, held[slab].reshape(len(positions), -1))
        count += region.numel
    return total % (1 << 64), count


def _view(words: NDArray[np.unsignedinteger], region: Region) -> NDArray[np.unsignedinteger]:
    """The region's elements in its own shape, no copy; its span was checked before."""
    width = words.strides[0]
    steps = tuple(s * width for s in region.strides)
    pair, pair_step = words.shape[1:], words.strides[1:]
    return as_strided(
        words[region.start :], (*region.box.shape, *pair), (*steps, *pair_step), writeable=False
    )


def _positions(first: int, slab: tuple[slice, ...], strides: tuple[int, ...]) -> U64:
    """Row-major positions in the tensor of the elements of a slab, 1-d."""
    out = np.array([first], dtype=np.uint64)
    for part, stride in zip(slab, strides, strict=True):
        steps = np.arange(part.start, part.stop, dtype=np.uint64) * np.uint64(stride)
        out = np.add.outer(out, steps).ravel()
    return out


def _slab_sum(seed: int, positions: U64, words: NDArray[np.unsignedinteger]) -> int:
    """Sum of one slab; a 16-byte element is two words, at twice its position and one more."""
    total, width = 0, words.shape[1]
    for k in range(width):
        keys = splitmix64(positions * np.uint64(width) + np.uint64((seed + k) % (1 << 64)))
        keys ^= words[:, k].astype(np.uint64)
        total += int(np.add.reduce(splitmix64(keys)))
    return total


class FullWitness(msgspec.Struct, frozen=True, dict=True):
    """The sums of a checkpoint, kind ``full-1``.

    Attributes
    ----------
    sums
        One for each tensor of the manifest, modulo 2^64.
    counts
        Number of elements in each sum: less than the tensor's where pieces are absent, zero for
        tensors that are left out.
    """

    sums: U64
    counts: U64

    @staticmethod
    def empty(plan: WitnessPlan) -> FullWitness:
        """Return sums of nothing."""
        n = len(plan.names)
        return FullWitness(np.zeros(n, np.uint64), np.zeros(n, np.uint64))

    def add(self, tensor: int, total: int, count: int) -> None:
        """Add a partial sum of tensor number `tensor`."""
        self.sums[tensor : tensor + 1] += np.uint64(total)
        self.counts[tensor] += np.uint64(count)

    def encode(self) -> bytes:
        """Return the witness file: safetensors with the tensors ``sums`` and ``counts``."""
        return write_parts(FULL, {"sums": self.sums, "counts": self.counts})

    @staticmethod
    def decode(raw: bytes, where: str, plan: WitnessPlan) -> FullWitness:
        """Parse a witness file.

        Raises
        ------
        CorruptError
            Not what the plan asks for.
        """
        shape = (len(plan.names),)
        parts = read_parts(raw, where, FULL, {"sums": ("U64", shape), "counts": ("U64", shape)})
        if (parts["counts"] > plan.numels.astype(np.uint64)).any():
            raise CorruptError("a sum over more elements than its tensor has", where=where)
        return FullWitness(parts["sums"].copy(), parts["counts"].copy())


def compare_full(plan: WitnessPlan, wanted: FullWitness, found: FullWitness) -> list[Difference]:
    """Name the tensors whose sums differ; `checked` is the number of elements.

    Tensors that the witness knows nothing of are passed over. Which elements are wrong a sum
    cannot tell, so `wrong` is 1.
    """
    bad = (wanted.counts > 0) & ((wanted.sums != found.sums) | (wanted.counts != found.counts))
    return [Difference(plan.names[int(i)], 1, int(wanted.counts[i])) for i in np.flatnonzero(bad)]
