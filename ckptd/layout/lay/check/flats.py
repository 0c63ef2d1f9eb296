"""Check of flats: buffers can be made and divide over the ranks that share them."""

from __future__ import annotations

from collections.abc import Iterator

from ckptd.errors import CkptdError, UsageError
from ckptd.layout.lay.indexes import BUFFER
from ckptd.layout.lay.resolve import Bound, Finding, has_globs
from ckptd.layout.lay.stored import StoredForm
from ckptd.layout.lay.syntax import show

__all__ = ["flat_findings"]

_MAX_RANKS = 32


def flat_findings(bound: Bound) -> Iterator[Finding]:
    """Yield the flats whose alignment or split does not fit the tensors that they pack.

    Ranks are looked at until a flat is wrong, at most some of them, from all over the mesh:
    buffers differ by pipeline stage and where a split is uneven. What is not known is not checked.
    """
    equations = bound.layout.equations
    axes = {a for e in equations for f in e.families.values() for a in f.axes}
    known = axes <= set(bound.sizes) and not any(has_globs(e.name) for e in equations)
    if not bound.layout.flats or not known:
        return
    form = StoredForm(bound)
    world = form.mesh.world
    count = min(world, _MAX_RANKS)
    told: set[int] = set()
    for rank in (i * (world - 1) // max(1, count - 1) for i in range(count)):
        for number, error in _wrong(form, rank):
            if number not in told:
                told.add(number)
                flat = bound.layout.flats[number]
                notes = tuple(f"{k}: {v}" for k, v in _said(error).items() if v is not None)
                yield Finding("flat", error.message, flat.at, show(flat), notes, fit=True)


def _wrong(form: StoredForm, rank: int) -> Iterator[tuple[int, CkptdError]]:
    """Yield the flats that fail on a rank."""
    for number in range(len(form.bound.layout.flats)):
        try:
            for state in form.states:
                form.packing.on_one(number, state, rank)
                _check_names(form, number, state, rank)
        except CkptdError as error:
            yield number, error


def _check_names(form: StoredForm, flat: int, state: str, rank: int) -> None:
    """Raise `UsageError` where two buffers of a rank have one name, whichever flats they are of."""
    names: dict[str, int] = {}
    for other in form.packing.packed_flats(state, rank):
        if other > flat:
            break
        first = form.packing.first_buffer(other, state, rank)
        for row, group in enumerate(form.packing.buffers(other, state, rank).groups):
            name = form.buffer_name(other, first + row, state, group)
            if names.setdefault(name, first + row) != first + row and other == flat:
                raise UsageError(
                    "two buffers of a rank have one name",
                    found=name,
                    hint=f"{{{BUFFER}}} in the name is the number of a buffer on the rank",
                )


def _said(error: CkptdError) -> dict[str, object]:
    return {"wanted": error.wanted, "found": error.found, "hint": error.hint}
