"""Bucket tables: where a framework says its tensors lie, checked against what a layout says."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from ckptd.errors import MismatchError
from ckptd.lay.flats import shares
from ckptd.lay.resolve import Bound
from ckptd.lay.stored import StoredForm

__all__ = ["Row", "bucket_table", "check_table"]


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


def check_table(bound: Bound, recorded: Sequence[Row], *, rank: int, state: str) -> None:
    """Compare a recorded bucket table with what the layout says.

    Frameworks change their formulas between versions; a table that was recorded from the live
    buffers is the truth, and a layout that says otherwise would move elements to wrong places.

    Parameters
    ----------
    bound
        The layout.
    recorded
        The table, in any order.
    rank, state
        Whose it is.

    Raises
    ------
    MismatchError
        ``lay-fit``: they differ; the first row that does is shown as either has it.
    """
    wanted = bucket_table(StoredForm(bound), rank, state)
    pairs = zip_longest(sorted(recorded, key=_place), sorted(wanted, key=_place))
    wrong = [(a, b) for a, b in pairs if a != b]
    if wrong:
        found, formula = wrong[0]
        raise MismatchError(
            "a recorded bucket table is not what the flats of the layout make",
            kind="lay-fit",
            where=f"rank {rank}, {state or 'params'}, {len(wrong)} rows",
            wanted=_shown(found, "as recorded"),
            found=_shown(formula, "by the layout"),
            hint="compare bucket size, order, start and end of the flat with the framework's",
        )


def _place(row: Row) -> tuple[int, int, int]:
    return row.buffer, row.start, row.end


def _shown(row: Row | None, whose: str) -> str:
    if row is None:
        return f"nothing, {whose}"
    return f"{row.name} at {row.start} to {row.end} of buffer {row.buffer}, {whose}"
