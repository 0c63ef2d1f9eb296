"""Bucket tables: where tensors lie in a framework's buffers, by what a layout says."""

from __future__ import annotations

from typing import NamedTuple

from ckptd.lay.flats import shares
from ckptd.lay.stored import StoredForm


class Row(NamedTuple):
    """One tensor in a buffer.

    Attributes
    ----------
    buffer
        Number of the buffer on the rank.
    name
        The tensor's name on the rank.
    start, end
        Its elements in the whole buffer, over all ranks of the axis; of ``flat parts``, which
        has no whole buffer, the rank's own.
    """

    buffer: int
    name: str
    start: int
    end: int


def bucket_table(form: StoredForm, rank: int, state: str) -> tuple[Row, ...]:
    """Return where a rank's flats put the tensors of a state, in the order of the buffers.

    Parameters
    ----------
    form
        The layout.
    rank
        Number of the rank; those that differ along a flat's axis have the same table.
    state
        Short name of the state, or empty.
    """
    out: list[Row] = []
    for flat in form.packing.packed_flats(state, rank):
        first = form.packing.first_buffer(flat, state, rank)
        found = form.packing.buffers(flat, state, rank)
        mine = form.packing.on_one(flat, state, rank)
        at = form.mesh.coordinates(rank)[form.bound.layout.flats[flat].split[0]]
        apart = form.bound.layout.flats[flat].group.kind == "parts"
        packed = zip(found.tensors, found.packed.slots, found.rows, mine.ahead, strict=True)
        for (rule, indexes), slot, row, ahead in packed:
            name = form.rules[rule].local_name(indexes)
            start, end = slot.offset, slot.offset + slot.numel
            if apart:
                starts = shares(slot.numel, slot.offset, form.packing.starts(flat, slot.length))
                start, end = ahead, ahead + int(starts[at + 1] - starts[at])
            out.append(Row(first + row, name, start, end))
    return tuple(out)
