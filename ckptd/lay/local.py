"""Tensors and buffers of one rank: names, shapes, types, and pieces in buffers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ckptd.lay.stored import StoredForm


@dataclass(frozen=True, slots=True)
class LocalPiece:
    """Row-major elements ``[lo, hi)`` of a rank-local tensor, and where they lie in a buffer.

    Attributes
    ----------
    rule, indexes
        The tensor: number of its equation, global numbers in its name.
    lo, hi
        In row-major elements of the tensor as it would be without flats.
    at
        Position of element `lo` in the buffer.
    """

    rule: int
    indexes: tuple[int, ...]
    lo: int
    hi: int
    at: int


@dataclass(frozen=True, slots=True)
class BoundTensor:
    """A tensor or a flat buffer that a rank holds.

    Attributes
    ----------
    name
        Its name on the rank: local numbers after ``#``, for buffers ``flat.<number>.<state>``,
        or what their flat says.
    shape
        Its shape on the rank.
    state
        Short name of the state, or empty.
    pieces
        What it holds, in rising order; what lies between is filled.
    """

    name: str
    shape: tuple[int, ...]
    state: str
    pieces: tuple[LocalPiece, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def local_tensors(form: StoredForm, rank: int) -> Iterator[BoundTensor]:
    """Yield everything that a rank holds, state by state.

    Parameters
    ----------
    form
        The layout.
    rank
        Number of the rank.

    Raises
    ------
    UsageError, MismatchError
        A rule cannot be evaluated; the message says why.
    """
    for state in form.states:
        for rule, indexes in form.packing.on_rank(rank):
            flat = form.packing.flat_of(rule, indexes, state)
            if flat is None:
                yield _plain(form, rule, indexes, state, rank)
            elif form.bound.layout.flats[flat].group.kind == "each":
                yield _share(form, flat, rule, indexes, state, rank)
        yield from _buffers(form, form.packing.packed_flats(state, rank), state, rank)


def _plain(
    form: StoredForm, rule: int, indexes: tuple[int, ...], state: str, rank: int
) -> BoundTensor:
    found = form.rules[rule]
    shape = found.local_shape(found.who(form.mesh.coordinates(rank)))
    name = form.name(found.local_name(indexes), state)
    return BoundTensor(name, shape, state, (LocalPiece(rule, indexes, 0, math.prod(shape), 0),))


def _share(
    form: StoredForm, flat: int, rule: int, indexes: tuple[int, ...], state: str, rank: int
) -> BoundTensor:
    """A tensor that is flat for itself keeps its name."""
    lo, hi = _part(form, flat, form.packing.slot(flat, rule, indexes, state, rank).length, rank)
    numel = form.packing.numel((rule, indexes), form.mesh.coordinates(rank))
    piece = LocalPiece(rule, indexes, min(lo, numel), min(hi, numel), 0)
    name = form.name(form.rules[rule].local_name(indexes), state)
    return BoundTensor(name, (hi - lo,), state, (piece,) if piece.hi > piece.lo else ())


def _buffers(form: StoredForm, flats: list[int], state: str, rank: int) -> Iterator[BoundTensor]:
    """Yield a rank's part of its buffers, numbered over all flats."""
    first = 0
    for flat in flats:
        buffer = form.packing.buffers(flat, state, rank)
        mine = form.packing.on_one(flat, state, rank)
        pieces: list[list[LocalPiece]] = [[] for _ in mine.lengths]
        packed = zip(buffer.tensors, buffer.packed.slots, buffer.rows, mine.ahead, strict=True)
        for (rule, indexes), slot, row, ahead in packed:
            start, stop = _part(form, flat, slot.length, rank)
            lo = max(0, start - slot.offset)
            hi = min(slot.numel, stop - slot.offset)
            if lo < hi:
                at = ahead + slot.offset + lo - start
                pieces[row].append(LocalPiece(rule, indexes, lo, hi, at))
        for row, (length, found) in enumerate(zip(mine.lengths, pieces, strict=True)):
            name = form.buffer_name(flat, first + row, state, buffer.groups[row])
            yield BoundTensor(name, (length,), state, tuple(found))
        first += len(mine.lengths)


def _part(form: StoredForm, flat: int, length: int, rank: int) -> tuple[int, int]:
    """Return the part of a buffer that a rank holds."""
    axis = form.bound.layout.flats[flat].split[0]
    starts = form.packing.starts(flat, length)
    at = form.mesh.coordinates(rank)[axis]
    return int(starts[at]), int(starts[at + 1])
