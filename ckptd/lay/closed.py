"""The sizes that were found for a layout, written as ``let`` statements."""

from __future__ import annotations

from collections.abc import Iterator

from ckptd.lay.resolve import Bound
from ckptd.lay.syntax.tree import Let, Number


def found_sizes(bound: Bound) -> tuple[Let, ...]:
    """Return a ``let`` for every size that the program does not state itself.

    With them a program needs no shapes to be understood: padding hides a size from the solver, and
    the checkpoint that a padded layout wrote is read by its program alone. Numbers in names are
    left out: names always say them.

    Parameters
    ----------
    bound
        The layout and its sizes.
    """
    layout = bound.layout
    stated = {*layout.sizes, *layout.relations, *(layout.mesh.extents if layout.mesh else ())}
    found = [n for n in _axes(bound) if n in bound.sizes and n not in stated]
    return tuple(Let(name, Number(bound.sizes[name])) for name in found)


def _axes(bound: Bound) -> Iterator[str]:
    """Yield axes in the order of the space, then whatever else has a size."""
    families = bound.layout.families.values()
    atoms = dict.fromkeys(a for f in families for a in f.axes[f.indexes :])
    indexes = {a for f in families for a in f.axes[: f.indexes]}
    yield from atoms
    yield from sorted(n for n in bound.sizes if n not in atoms and n not in indexes)
