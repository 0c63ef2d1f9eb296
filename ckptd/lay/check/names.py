"""Check of observed names: ranks that lack a tensor which others have."""

from __future__ import annotations

from collections.abc import Iterator

from ckptd.errors import first_few
from ckptd.lay.bind import Observed
from ckptd.lay.matching import holds
from ckptd.lay.resolve import Finding, MeshShape, Resolved
from ckptd.lay.syntax.tree import NameIndex


def missing_findings(observed: Observed, resolved: Resolved) -> Iterator[Finding]:
    """Yield the rules of which some ranks lack the tensor, and others have it.

    Tensors with numbers in their names are compared by their numbers when they are bound.
    """
    mesh = resolved.mesh or MeshShape(1, {}, {})
    for instance in observed.instances.values():
        equation = resolved.equations[instance.equation]
        if any(isinstance(p, NameIndex) for p in equation.name.parts):
            continue
        lacking = [
            rank
            for rank in observed.ranks
            if rank not in instance.ranks and holds(equation, mesh.coordinates(rank), mesh.extents)
        ]
        if lacking:
            word = "ranks" if len(lacking) > 1 else "rank"
            message = f"{instance.first} is missing on {word} {first_few(lacking, 6)}"
            note = "if only some ranks have it, say which: on <axis>=<coordinate>"
            yield Finding("missing", message, equation.at, equation.text, (note,), fit=True)
