"""Comparisons while a reshard runs: witness values in target files, tied copies with originals.

In it: errors and hints for copies that differ from their original.

Samples are compared while the values are in the staging memory. `ckptd.reshard.elements`, which
knows nothing of boxes and blocks, finds the place of each value of the source's witness.

A foreign folder, and the files of ranks, may hold a tied weight under each of its names.
Only one of them is carried over, so the others must be equal to it: a copy with other values is a
tensor of its own, which would be lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ckptd.base.grids.block import piece_regions
from ckptd.base.grids.grid import Grid
from ckptd.checkpoint.format.container import ChunkRef
from ckptd.checkpoint.format.witness import VALUE_BYTES, Witness, WitnessPlan, gather, select
from ckptd.errors import CorruptError, first_few
from ckptd.lay.scales import HALF_BYTE, quantized_as
from ckptd.lay.stored import TensorKey
from ckptd.lay.values import Values
from ckptd.reshard.changes import Linear, change_of, quantized
from ckptd.reshard.compose import Composed, Duplicate, TensorLink
from ckptd.reshard.elements import follow
from ckptd.reshard.plan import ChunkFeed, Feed, Target, recut
from ckptd.reshard.reading import ValueReader
from ckptd.reshard.source import SourceTensors, StockTensor, unequal_copy
from ckptd.types import DType

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """Values that must be found in one target tensor.

    Attributes
    ----------
    positions
        Row-major positions in the tensor, rising.
    values
        ``(n, 8)`` bytes, as a witness holds them, in the tensor's type.
    sources
        Number of the source tensor that each comes from.
    """

    positions: I64
    values: U8
    sources: I64


class ExpectedValues(Protocol):
    """Values of the source's witness, by target tensor."""

    def get(self, tensor: int, /) -> Expected | None:
        """Return the values of a tensor; None when there are none."""


@dataclass(slots=True, eq=False)
class _Places:
    """Elements of a file to look at, rising: byte offset, item size, and what for."""

    at: I64
    itemsizes: I64
    what: I64


@dataclass(eq=False)
class FileSamples:
    """Looks at one target file as it grows; used by one thread.

    Parameters
    ----------
    target
        The target.
    chunks
        The chunks of the file.
    expected
        What the source's witness wants, by target tensor.
    names
        Of the source's tensors, for errors.
    """

    target: Target
    chunks: Sequence[ChunkRef]
    expected: ExpectedValues
    names: Sequence[str]
    checked: int = 0
    _slots: list[I64] = field(default_factory=list)
    _values: list[U8] = field(default_factory=list)

    def __post_init__(self) -> None:
        own: list[tuple[I64, int, I64]] = []
        wanted: list[tuple[I64, int, I64]] = []
        self._wanted_values: list[U8] = []
        self._wanted_sources: list[I64] = []
        count = 0
        for chunk in self.chunks:
            size = self.target.filemap.dtypes[chunk.tensor].itemsize
            regions = piece_regions(chunk.piece)
            slots, elements = self.target.witness.select(chunk.tensor, regions)
            own.append((chunk.start + elements * size, size, slots))
            expected = self.expected.get(chunk.tensor)
            if expected is None:
                continue
            shape = self.target.tensors[chunk.tensor].shape
            for region in regions:
                which, elements = select(expected.positions, shape, region, 0)
                number = np.arange(count, count + len(which), dtype=np.int64)
                wanted.append((chunk.start + elements * size, size, number))
                self._wanted_values.append(expected.values[which])
                self._wanted_sources.append(expected.sources[which])
                count += len(which)
        self._own = _places(own)
        self._wanted = _places(wanted)

    def look(self, lo: int, data: U8) -> None:
        """Look at bytes from `lo` on of the data section.

        Raises
        ------
        CorruptError
            A value is not where the source's witness wants it.
        """
        what, values = _gathered(self._own, lo, data)
        self._slots.append(what)
        self._values.append(values)
        what, values = _gathered(self._wanted, lo, data)
        if len(what):
            wanted = self._all_values[what]
            wrong = (wanted != values).any(axis=1)
            if wrong.any():
                raise self._moved(what[wrong], len(what))
            self.checked += len(what)

    @property
    def _all_values(self) -> U8:
        if len(self._wanted_values) > 1:
            self._wanted_values = [np.concatenate(self._wanted_values)]
        return self._wanted_values[0]

    def taken(self) -> tuple[bytes, bytes]:
        """Return slots and values of the target's witness, as a part holds them."""
        if not self._slots:
            return b"", b""
        slots = np.concatenate(self._slots).astype("<u4")
        return slots.tobytes(), np.concatenate(self._values).tobytes()

    def _moved(self, wrong: I64, checked: int) -> CorruptError:
        sources = np.concatenate(self._wanted_sources)[wrong]
        names = [self.names[s] for s in dict.fromkeys(sources.tolist())]
        return CorruptError(
            "values are not at the positions where they were saved",
            where=first_few(names, 4),
            wanted="the source's witness",
            found=f"{len(wrong)} of {checked} values differ in this part of a file",
            hint="one of the two layouts does not describe its checkpoint; nothing was committed",
        )


def _places(found: Sequence[tuple[I64, int, I64]]) -> _Places:
    empty = np.empty(0, dtype=np.int64)
    at = np.concatenate([empty, *(f[0] for f in found)])
    sizes = np.concatenate([empty, *(np.full(len(f[0]), f[1], dtype=np.int64) for f in found)])
    what = np.concatenate([empty, *(f[2] for f in found)])
    order = np.argsort(at, kind="stable")
    return _Places(at[order], sizes[order], what[order])


def _gathered(places: _Places, lo: int, data: U8) -> tuple[I64, U8]:
    """Return what lies in a stretch, and its values."""
    i, j = np.searchsorted(places.at, (lo, lo + len(data))).tolist()
    at, sizes = places.at[i:j] - lo, places.itemsizes[i:j]
    values = np.zeros((j - i, 8), dtype=np.uint8)
    for size in np.unique(sizes).tolist():
        mine = sizes == size
        values[mine] = gather(data, size, at[mine] // size)
    return places.what[i:j], values


_Row = tuple[I64, U8, I64]


def expect(composed: Composed) -> dict[int, Expected]:
    """Return what must be found, by number of the link (which is that of the target tensor)."""
    if composed.stock.witness is None:
        return {}
    plan, witness = composed.stock.witness
    by_key = {link.key: n for n, link in enumerate(composed.links)}
    rows: dict[int, list[_Row]] = {}
    seen: set[TensorKey] = set()
    for link in composed.links:
        for key, tensor in link.sources.items():
            if key not in seen:
                seen.add(key)
                for number, row in _tensor(composed, plan, witness, key, tensor.number, by_key):
                    rows.setdefault(number, []).append(row)
    return {number: _sorted(found) for number, found in rows.items()}


def _tensor(
    composed: Composed,
    plan: WitnessPlan,
    witness: Witness,
    key: TensorKey,
    source: int,
    by_key: Mapping[TensorKey, int],
) -> Iterator[tuple[int, _Row]]:
    """Yield where the values of one source tensor must turn up."""
    first, last = int(plan.starts[source]), int(plan.starts[source + 1])
    present = np.flatnonzero(witness.present[first:last])
    positions = plan.positions(source)[present]
    values = witness.values[first:last][present]
    form = composed.composition.source
    rule = form.rules[key[0]]
    composition = composed.composition
    scope, givers = composition.target.scope, composition.givers
    said = None if key[2] else quantized_as(form, key[0])
    if said is not None and said.dtype == HALF_BYTE:  # a byte has two elements
        positions = np.concatenate([2 * positions, 2 * positions + 1])
        values = np.concatenate([values, values])
    for hit in follow(rule, key[1], positions, form.scope, givers, scope):
        number = by_key.get((hit.rule.number, hit.indexes, key[2]))
        if number is None:
            continue
        change = composition.values(rule, hit.rule, key[2])
        if change is not None and quantized(change.target) is not None:
            continue  # rounded to steps that the witness does not know
        here = hit.which
        link = composed.links[number]
        wanted = _wanted(composed, key, link, change, values[here], positions[here])
        yield number, (hit.positions, wanted, np.full(len(here), source, dtype=np.int64))


def _wanted(
    composed: Composed,
    key: TensorKey,
    link: TensorLink,
    change: Values | None,
    values: U8,
    positions: I64,
) -> U8:
    """Return witness values of a source tensor as they are in the target."""
    stocked = link.sources[key]
    plain = stocked.plain
    if plain is None and (change is None or quantized(change.source) is None):
        operation = change_of(stocked.dtype, link.dtype, change, stocked.name)
        return changed(values, stocked.dtype, link.dtype, operation)
    piece = stocked.grid.piece(0)
    scaled = plain.change(piece) if plain else composed.dequantized(key, stocked, piece)
    raw = np.ascontiguousarray(values[:, : stocked.dtype.itemsize]).reshape(-1)
    new = scaled.at(raw.view(stocked.dtype.numpy), positions, link.dtype.numpy)
    return _rows(new, link.dtype)


def _rows(values: NDArray[Any], dtype: DType) -> U8:
    out = np.zeros((len(values), VALUE_BYTES), dtype=np.uint8)
    out[:, : dtype.itemsize] = values.view(np.uint8).reshape(-1, dtype.itemsize)
    return out


def changed(values: U8, source: DType, target: DType, change: Linear | None) -> U8:
    """Return witness values as they are in the target's type."""
    if change is None:
        return values
    raw = np.ascontiguousarray(values[:, : source.itemsize]).reshape(-1).view(source.numpy)
    new = np.empty(len(raw), dtype=target.numpy)
    change.apply(new, raw)
    return _rows(new, target)


def _sorted(rows: list[_Row]) -> Expected:
    positions = np.concatenate([r[0] for r in rows])
    order = np.argsort(positions, kind="stable")
    return Expected(
        positions[order],
        np.concatenate([r[1] for r in rows])[order],
        np.concatenate([r[2] for r in rows])[order],
    )


def _own(stock: SourceTensors, tensor: StockTensor, grid: Grid) -> Feed:
    """Return the feed of a copy itself, cut as it is made of the original."""
    whole = recut(tensor.number, tensor.grid, grid)
    locate = stock.locate
    if locate is None:
        return whole

    def feed(piece: int) -> ChunkFeed:
        takes = whole(piece).takes
        found = (locate(tensor.name, t.piece, t.blocks, tensor.dtype) for t in takes)
        return ChunkFeed(tuple(chain.from_iterable(found)))

    return feed


def check_duplicates(stock: SourceTensors, found: Sequence[Duplicate]) -> None:
    """Compare copies with what they copy, in bounded memory.

    Raises
    ------
    CorruptError
        kind ``replicas-differ``: names the copy and the original.
    """
    for one in found:
        _check(stock, one)


def _check(stock: SourceTensors, one: Duplicate) -> None:
    entry = one.tensor
    dtype = entry.dtype
    own, made = (
        ValueReader(stock.source, [(dtype.name, one.grid, feed)])
        for feed in (_own(stock, entry, one.grid), one.feed)
    )
    for part in own.parts():
        held: U8 = np.zeros(part.hi - part.lo, dtype=np.uint8)
        own.read(part, held)
        wanted = held.copy()
        made.read(part, wanted)
        if not np.array_equal(held, wanted):
            byte = part.lo + int(np.flatnonzero(held != wanted)[0])
            found = f"another value at element {byte // dtype.itemsize}"
            raise unequal_copy(entry.name, one.original, found)
