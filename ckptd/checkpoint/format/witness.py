"""Witness: sampled values of tensors, which positions, how many; compare.

Digests catch flipped bits. The witness catches a wrong layout of the right shape (swapped QKV
order, experts off by one): its values are taken at logical positions that depend on the tensor's
name alone, so every holder of the tensor, in whatever layout, must find the same values there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from ckptd.base.grids.block import Region, box_region
from ckptd.base.grids.grid import is_packed, reach_of, strides_of
from ckptd.checkpoint.format.container import build_header, header_bytes, parse_header
from ckptd.checkpoint.format.manifest import Manifest, ObjectEntry, TensorEntry
from ckptd.errors import CorruptError, UsageError
from ckptd.types import DTYPES, Box, dtype_of

SAMPLE = "sample-1"
DATA = "data-1"
"""The values of `SAMPLE`, not stored: every tensor lies in one piece in the one file."""
KINDS = frozenset({SAMPLE, DATA})

MAX_VALUES = 1_000_000
MAX_VALUES_PER_TENSOR = 1024
VALUE_BYTES = 8

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.uint64}


def splitmix64(x: U64) -> U64:
    """Return the output of the SplitMix64 generator for each state in `x`.

    Steele, Lea, Flood: Fast splittable pseudorandom number generators (OOPSLA 2014), with
    Stafford's "Mix13" constants, as in Vigna's public-domain ``splitmix64.c``. A bijection.
    """
    z = x + _GAMMA
    z ^= z >> np.uint64(30)
    z *= _M1
    z ^= z >> np.uint64(27)
    z *= _M2
    z ^= z >> np.uint64(31)
    return z


class WitnessPlan:
    """Which logical positions of which tensors the witness holds.

    Parameters
    ----------
    entries
        ``(name, shape, itemsize, include)`` of each tensor, in manifest order. Tensors that are
        not included have no values.
    """

    def __init__(self, entries: Sequence[tuple[str, tuple[int, ...], int, bool]]) -> None:
        self.names = [e[0] for e in entries]
        self.shapes = [e[1] for e in entries]
        self.itemsizes = [e[2] for e in entries]
        numels = [math.prod(shape) if include else 0 for _, shape, _, include in entries]
        taking_part = [e[3] for e in entries].count(True)
        quota = max(1, min(MAX_VALUES_PER_TENSOR, MAX_VALUES // max(1, taking_part)))
        self.numels: I64 = np.array(numels, dtype=np.int64)
        self.counts: I64 = np.minimum(self.numels, quota)
        """Number of values of each tensor."""
        self.starts: I64 = np.concatenate(([0], np.cumsum(self.counts))).astype(np.int64)
        """First slot of each tensor's values; one more entry: `total`."""
        self.total = int(self.starts[-1])
        self._sorted: dict[int, tuple[Sequence[Any], dict[Any, list[int]]]] = {}

    @staticmethod
    def of(manifest: Manifest) -> WitnessPlan:
        """Return the plan of a checkpoint."""
        return WitnessPlan.over(manifest.tensors, manifest.objects)

    @staticmethod
    def over(tensors: Iterable[TensorEntry], objects: Iterable[ObjectEntry] = ()) -> WitnessPlan:
        """Return the plan over tables: tensors that hold encoded objects are left out."""
        left_out = {o.tensor for o in objects if o.tensor}
        return WitnessPlan(
            [(t.name, t.shape, DTYPES[t.dtype].itemsize, t.name not in left_out) for t in tensors]
        )

    @cached_property
    def wholes(self) -> tuple[tuple[int, tuple[Region, ...]], ...]:
        """The tensors that have values, each whole, for `select_all`."""
        whole = {shape: (box_region(Box.whole(shape)),) for shape in {*self.shapes}}
        return tuple([(n, whole[self.shapes[n]]) for n in np.flatnonzero(self.counts).tolist()])

    @cached_property
    def _positions(self) -> I64:
        """Row-major positions of all values, rising within each tensor."""
        out = np.empty(self.total, dtype=np.int64)
        order = np.argsort(self.numels, kind="stable")
        for tensors in np.split(order, np.flatnonzero(np.diff(self.numels[order])) + 1):
            if len(tensors):
                out[self._slots(tensors)] = self._drawn(tensors)
        return out

    @cached_property
    def _seeds(self) -> U64:
        return np.array([xxhash.xxh3_64_intdigest(n.encode()) for n in self.names], np.uint64)

    def _slots(self, tensors: I64) -> I64:
        """Return the slots of tensors of one size: a row each."""
        return self.starts[tensors][:, np.newaxis] + np.arange(self.counts[tensors[0]])

    def _drawn(self, tensors: I64) -> I64:
        """Return the positions of tensors of one size, rising: a row each."""
        numel, ramp = int(self.numels[tensors[0]]), np.arange(self.counts[tensors[0]])
        if numel == len(ramp):
            return np.tile(ramp, (len(tensors), 1))
        seeds = self._seeds[tensors][:, np.newaxis] + ramp.astype(np.uint64)
        return np.sort((splitmix64(seeds) % np.uint64(numel)).astype(np.int64), axis=1)

    def positions(self, tensor: int) -> I64:
        """Return the row-major positions of tensor number `tensor`, rising; do not write to it."""
        return self._positions[self.starts[tensor] : self.starts[tensor + 1]]

    def select(self, tensor: int, regions: Iterable[Region]) -> tuple[I64, I64]:
        """Find the values that lie in a buffer.

        Parameters
        ----------
        tensor
            Number of the tensor.
        regions
            What the buffer holds of it.

        Returns
        -------
        slots
            Their places among all values of the witness (rows of `Witness.values`).
        elements
            Where each lies in the buffer, in elements.
        """
        positions = self.positions(tensor)
        shape, first = self.shapes[tensor], int(self.starts[tensor])
        found = [select(positions, shape, region, first) for region in regions]
        if len(found) == 1:
            return found[0]
        empty = np.empty(0, dtype=np.int64)
        slots, elements = zip(*found, strict=True) if found else ((empty,), (empty,))
        return np.concatenate(slots), np.concatenate(elements)

    def select_all(
        self, buffers: Sequence[tuple[int, tuple[Region, ...]]]
    ) -> Iterator[tuple[I64, I64, I64]]:
        """Yield what `select` finds for many buffers: slots, elements, and the buffer of each.

        What is the same object among the regions is computed once. So much comes at a time that it
        stays in the cache: fresh memory costs more than all the rest. Buffers in a tuple are sorted
        once.
        """
        known = self._sorted.get(id(buffers))
        if known is None:
            alike: dict[tuple[int, tuple[int, ...], int], list[int]] = {}
            numels = self.numels.tolist()
            for number, (tensor, regions) in enumerate(buffers):
                key = id(regions), self.shapes[tensor], numels[tensor]
                alike.setdefault(key, []).append(number)
            known = buffers, alike
            if isinstance(buffers, tuple):
                # Kept, so that its id is its own.
                self._sorted = dict([*self._sorted.items()][-1:]) | {id(buffers): known}
        found: list[tuple[I64, I64, I64]] = []
        held = 0
        for (_, shape, _), numbers in known[1].items():
            regions = buffers[numbers[0]][1]
            step = max(1, _BATCH // max(1, int(self.counts[buffers[numbers[0]][0]])))
            for some in (numbers[i : i + step] for i in range(0, len(numbers), step)):
                tensors = np.array([buffers[n][0] for n in some])
                slots, positions = self._slots(tensors).ravel(), self._drawn(tensors).ravel()
                which = np.repeat(np.array(some), len(slots) // len(some))
                for region in regions:
                    inside, elements = _place(positions, shape, region)
                    found.append((slots[inside], elements, which[inside]))
                held += len(slots)
                if held >= _BATCH:
                    yield _joined(found)
                    found, held = [], 0
        if found:
            yield _joined(found)


_BATCH = 1 << 15


def _joined(found: Iterable[tuple[I64, I64, I64]]) -> tuple[I64, I64, I64]:
    slots, elements, which = (np.concatenate(column) for column in zip(*found, strict=True))
    return slots, elements, which


def select(positions: I64, shape: tuple[int, ...], region: Region, slot: int) -> tuple[I64, I64]:
    """`WitnessPlan.select` for one region and any rising positions of a tensor.

    `slot` is the number of the first position.
    """
    box, strides = region.box, strides_of(shape)
    lo = sum(o * s for o, s in zip(box.offset, strides, strict=True))
    i, j = map(int, positions.searchsorted((lo, lo + reach_of(box.shape, strides))))
    slots = np.arange(slot + i, slot + j, dtype=np.int64)
    inside, elements = _place(positions[i:j], shape, region)
    return slots[inside], elements


def _place(positions: I64, shape: tuple[int, ...], region: Region) -> tuple[NDArray[np.bool_], I64]:
    """Return which of some positions of a tensor lie in a region, and at which elements."""
    box, strides = region.box, strides_of(shape)
    lo = sum(o * s for o, s in zip(box.offset, strides, strict=True))
    reach = reach_of(box.shape, strides)
    inside = (positions >= lo) & (positions < lo + (reach if box.numel else 0))
    rest = positions[inside]
    if reach == box.numel and is_packed(box.shape, region.strides):
        return inside, rest - lo + region.start
    none = np.zeros(len(rest), dtype=np.int64)
    elements = np.full(len(rest), region.start, dtype=np.int64)
    kept = np.ones(len(rest), dtype=np.bool_)
    for o, n, extent, stride, step in zip(
        box.offset, box.shape, shape, strides, region.strides, strict=True
    ):
        coordinate, rest = np.divmod(rest, stride) if stride > 1 else (rest, none)
        if n != extent:
            coordinate = coordinate - o
            kept &= (coordinate >= 0) & (coordinate < n)
        elements += coordinate * step
    inside[inside] = kept
    return inside, elements[kept]


def gather(buffer: U8, itemsize: int, elements: I64) -> U8:
    """Return the values of `elements` of a buffer.

    Parameters
    ----------
    buffer
        Raw little-endian bytes, 1-d.
    itemsize
        Bytes of one element.
    elements
        Element numbers, as `WitnessPlan.select` gives them.

    Returns
    -------
    values
        ``(n, 8)`` bytes: each element padded with zeros; the two halves of a 16-byte element are
        XORed.

    Raises
    ------
    UsageError
        An element lies outside the buffer.
    """
    if itemsize not in _WORDS:
        raise UsageError("invalid item size", found=itemsize)
    words = buffer[: len(buffer) // itemsize * itemsize].view(_WORDS[itemsize])
    words = words.reshape(-1, 2) if itemsize == 16 else words
    check_elements(elements, len(words))
    taken = words.take(elements, axis=0)
    if itemsize == 16:
        taken = taken[:, 0] ^ taken[:, 1]
    out = np.zeros((len(elements), VALUE_BYTES), dtype=np.uint8)
    width = min(itemsize, VALUE_BYTES)
    out.view(_WORDS[width])[:, 0] = taken
    return out


def check_elements(elements: I64, count: int) -> None:
    """Raise where an element does not lie in a buffer of `count` elements.

    Raises
    ------
    UsageError
        A region handed to the witness does not lie in its buffer.
    """
    # As unsigned numbers those below 0 are the largest.
    if len(elements) and int(elements.view(np.uint64).max()) >= count:
        raise UsageError(
            "a region does not lie in its buffer",
            wanted=f"elements below {count}",
            found=f"{elements.min()} to {elements.max()}",
        )


class Witness(msgspec.Struct, frozen=True, dict=True):
    """The values of a checkpoint, kind ``sample-1``.

    Attributes
    ----------
    values
        ``(total, 8)`` bytes, one row a slot of the plan.
    present
        ``(total,)`` ones and zeros; zero where the position lies in an absent piece.
    """

    values: U8
    present: U8

    @staticmethod
    def empty(plan: WitnessPlan) -> Witness:
        """Return a witness in which nothing is present yet."""
        total = plan.total
        return Witness(np.zeros((total, VALUE_BYTES), np.uint8), np.zeros(total, np.uint8))

    def put(self, slots: I64, values: U8) -> None:
        """Fill in values."""
        self.values.view(np.uint64)[slots] = np.ascontiguousarray(values).view(np.uint64)
        self.present[slots] = 1

    def encode(self) -> bytes:
        """Return the witness file: safetensors with the tensors ``values`` and ``present``."""
        u8, parts = dtype_of("uint8"), {"values": self.values, "present": self.present}
        entries = [(name, u8, part.shape) for name, part in parts.items()]
        header, _ = build_header(entries, {"kind": SAMPLE})
        return b"".join((header, *(np.ascontiguousarray(p).data for p in parts.values())))

    @staticmethod
    def decode(raw: bytes, where: str, plan: WitnessPlan) -> Witness:
        """Parse a witness file.

        Raises
        ------
        CorruptError
            Not a safetensors file. Not the tensors, shapes or values that the plan asks for.
        """
        shapes = {"values": ("U8", (plan.total, VALUE_BYTES)), "present": ("U8", (plan.total,))}
        head = header_bytes(raw[:8], where, len(raw))
        chunks, metadata = parse_header(raw[:head], where, len(raw) - head)
        parts = {c.name: (c.code, c.shape) for c in chunks.values()}
        if metadata != {"kind": SAMPLE} or parts != shapes:
            raise CorruptError(
                "not the witness of this manifest",
                where=where,
                wanted=json.dumps({"kind": SAMPLE, **shapes})[:300],
                found=json.dumps({**metadata, **parts})[:300],
            )
        values, present = (
            np.frombuffer(raw, np.uint8, c.end - c.start, head + c.start)
            for c in (chunks["values"], chunks["present"])
        )
        values = values.reshape(-1, VALUE_BYTES)
        if present.size and (int(present.max()) > 1 or values[present == 0].any()):
            raise CorruptError(
                "presence marks are not 0 and 1, or an absent value is not zero", where=where
            )
        # Without copies: fresh memory costs more than all the rest of a load's look at it.
        return Witness(values, present)


class Difference(msgspec.Struct, frozen=True):
    """A tensor whose values are not the witness's: `wrong` of `checked` values differ."""

    tensor: str
    wrong: int
    checked: int


def compare(plan: WitnessPlan, wanted: Witness, found: Witness) -> list[Difference]:
    """Name the tensors that differ, in manifest order; only values present in both count."""
    both = (wanted.present & found.present).astype(np.bool_)
    wrong = both & (wanted.values != found.values).any(axis=1)
    checked, bad = _per_tensor(plan, both), _per_tensor(plan, wrong)
    return [Difference(plan.names[i], int(bad[i]), int(checked[i])) for i in np.flatnonzero(bad)]


def blind(plan: WitnessPlan, witness: Witness) -> list[str]:
    """Name the tensors whose values are all equal: a wrong layout cannot be seen there.

    Tensors of one element have no layout, and such without a value have no witness; neither is
    named.
    """
    present = witness.present.astype(np.bool_)
    words = witness.values.view(np.uint64).reshape(-1)
    tensor = np.repeat(np.arange(len(plan.names)), plan.counts)[present]
    words = words[present]
    count = _per_tensor(plan, present)
    same = np.ones(len(words), dtype=np.bool_)
    same[1:] = (words[1:] == words[:-1]) | (tensor[1:] != tensor[:-1])
    varied = np.bincount(tensor[~same], minlength=len(plan.names))
    named = (count > 0) & (varied == 0) & (plan.numels > 1)
    return [plan.names[i] for i in np.flatnonzero(named)]


def _per_tensor(plan: WitnessPlan, marks: NDArray[np.bool_]) -> I64:
    """Count the marked slots of each tensor."""
    sums = np.concatenate(([0], np.cumsum(marks, dtype=np.int64)))
    return sums[plan.starts[1:]] - sums[plan.starts[:-1]]
