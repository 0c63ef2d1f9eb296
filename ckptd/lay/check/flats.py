"""Checks of flat buffers: alignment, division over ranks, order of modules, names of buffers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ckptd.errors import CkptdError, UsageError
from ckptd.lay.indexes import BUFFER
from ckptd.lay.resolve import Bound, Finding, Resolved, has_globs
from ckptd.lay.stored import StoredForm
from ckptd.lay.syntax import show
from ckptd.lay.syntax.tree import Name, NameIndex, NamePart, Text

_MAX_RANKS = 32


def order_findings(resolved: Resolved) -> Iterator[Finding]:
    """Yield the rules with a number in their names that part the rules of a module.

    Flats pack module by module: rules that follow each other and begin alike up to an index are
    one module a number. With a number in place of the index a rule is none of them, so that what
    stands before it is packed for all numbers before anything that stands behind it.
    """
    if all(flat.group.kind == "each" for flat in resolved.flats):
        return
    equations = resolved.equations
    last: dict[object, int] = {}
    for number, equation in enumerate(equations):
        last.update(dict.fromkeys(_beginnings(equation.name), number))
    for before, apart in pairwise(range(len(equations))):
        for beginning in _beginnings(equations[before].name):
            if last[beginning] > apart and _has_number(equations[apart].name, beginning[0]):
                axis = beginning[1].axis
                yield Finding(
                    "order",
                    f"a number in place of {{{axis}}} splits the rules of a module: flats pack the"
                    " rules before this one for all numbers, then this one, then the rest",
                    equations[apart].at,
                    equations[apart].text,
                    (f"write {{{axis}}} in the name, and for {axis}=NUMBER behind the rule",),
                    severity="warning",
                )
                break


def _beginnings(name: Name) -> list[tuple[tuple[NamePart, ...], NameIndex]]:
    """Return a name up to each of its indexes, and the index."""
    return [(name.parts[:i], p) for i, p in enumerate(name.parts) if isinstance(p, NameIndex)]


def _has_number(name: Name, beginning: tuple[NamePart, ...]) -> bool:
    """Whether a name has a number where others that begin alike have an index."""
    *same, text = beginning or (Text(""),)
    at = len(same)
    if len(name.parts) <= at or name.parts[:at] != tuple(same):
        return False
    part = name.parts[at]
    if not isinstance(part, Text) or not isinstance(text, Text):
        return False
    rest = part.text.removeprefix(text.text)
    return part.text.startswith(text.text) and rest.partition(".")[0].isdigit()


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
