"""Rules whose tensors lie in flat buffers alone: observed lengths of buffers compared.

In it: how many lengths a finding shows.

They are kept with the sizes that other tensors or the program say, and the lengths of the buffers
are compared with what the rules make.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckptd.errors import CkptdError
from ckptd.lay.bind.observed import Observed, axes_of
from ckptd.lay.matching import alike, holds
from ckptd.lay.resolve import Bound, Equation, Finding, MeshShape, Resolved, independent
from ckptd.lay.stored import StoredForm
from ckptd.lay.syntax.tree import Flat, On

_MAX_SHOWN = 4


def is_packed(equation: Equation, resolved: Resolved, observed: Observed) -> bool:
    """Whether parameters of a rule lie in a buffer with others, on a rank that was observed."""
    mesh = resolved.mesh or MeshShape(1, {}, {})
    flats = [f for f in resolved.flats if {"params", "*"} & set(f.states)]
    here = (holds(equation, mesh.coordinates(r), mesh.extents) for r in observed.ranks)
    return any(here) and next((_shares(f) for f in flats if _takes(f, equation, mesh)), False)


def _shares(flat: Flat) -> bool:
    """Whether a flat's buffers have names of their own."""
    return flat.group.kind != "each"


def _takes(flat: Flat, equation: Equation, mesh: MeshShape) -> bool:
    on = {m.axis for m in equation.modifiers if isinstance(m, On)}
    axes = [a for a in axes_of(equation) | on if mesh.strides.get(a)]
    name = flat.group.name
    return all(independent(mesh, (a, flat.split[0])) for a in axes) and (
        name is None or alike(name, equation.name)
    )


def buffer_findings(
    bound: Bound, observed: Observed, kept: Sequence[Equation]
) -> Iterator[Finding]:
    """Yield where the lengths of buffers are not those that the rules make.

    Parameters
    ----------
    bound
        The layout and its sizes, all of them.
    observed
        What was observed.
    kept
        Rules of which nothing was observed.
    """
    form = StoredForm(bound)
    notes = tuple(f"only its buffers were observed: {e.text}" for e in kept[:_MAX_SHOWN])
    for rank, found in observed.buffers.items():
        try:
            wanted = _lengths(form, rank)
        except CkptdError:
            # Another check reports faults of the rules themselves.
            return
        names = [n for n in {**wanted, **found} if wanted.get(n) != found.get(n)]
        for name in names[:1]:
            if name not in found:
                message = f"rank {rank} has no buffer {name}; the rules make one of {wanted[name]}"
            elif name not in wanted:
                message = f"rank {rank} has a buffer {name}, and the rules make none of this name"
            else:
                message = (
                    f"{name} of rank {rank} has {found[name]} elements, and the rules make "
                    f"{wanted[name]}"
                )
            yield Finding(
                "buffer", message, rule=f"layout {bound.layout.name}", notes=notes, fit=True
            )
            return


def _lengths(form: StoredForm, rank: int) -> Mapping[str, int]:
    """Return the length of each buffer of a rank."""
    out: dict[str, int] = {}
    for state in form.states:
        number = 0
        for flat in form.packing.packed_flats(state, rank):
            groups = form.packing.buffers(flat, state, rank).groups
            lengths = form.packing.on_one(flat, state, rank).lengths
            for length, group in zip(lengths, groups, strict=True):
                out[form.buffer_name(flat, number, state, group)] = length
                number += 1
    return out
