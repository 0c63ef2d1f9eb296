"""Whether two layouts speak of the same tensors; errors where spaces or axes differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptd.errors import MismatchError
from ckptd.lay.boxes import Line, Sequence, sequence
from ckptd.lay.resolve import Axes, Bound, ValueScope
from ckptd.lay.stored import StoredForm
from ckptd.lay.syntax.tree import Atom, Dim, Product


def agreed(source: Bound, target: Bound) -> tuple[StoredForm, StoredForm]:
    """Return the stored forms of two layouts over the same space.

    An atom that one of them refines (``let hd = (two half)``) is refined in the other as well.

    Raises
    ------
    MismatchError
        ``lay-fit``: they have different axes for a family, or different lengths for an axis.
    """
    refined = {**source.layout.refined, **target.layout.refined}
    sizes = {**source.sizes, **target.sizes}
    for axis in sorted(source.sizes.keys() & target.sizes.keys()):
        if source.sizes[axis] != target.sizes[axis]:
            raise MismatchError(
                f"axis {axis} has different lengths in two layouts",
                kind="lay-fit",
                where=f"{source.layout.name} -> {target.layout.name}",
                wanted=f"{axis} = {target.sizes[axis]}, as {target.layout.name} has it",
                found=source.sizes[axis],
            )
    _check_refined(refined, sizes)
    for name in source.layout.families.keys() & target.layout.families.keys():
        a = tuple(_leaves(source.layout.families[name].axes, refined))
        b = tuple(_leaves(target.layout.families[name].axes, refined))
        if a != b:
            raise MismatchError(
                "a logical tensor has different axes in two layouts",
                kind="lay-fit",
                where=name,
                wanted=" ".join(b),
                found=" ".join(a),
            )
    return StoredForm(source, sizes, refined), StoredForm(target, sizes, refined)


def _check_refined(refined: Mapping[str, Dim], sizes: Mapping[str, int]) -> None:
    """The parts of an atom make up its length, where both are known."""
    for name, dim in refined.items():
        known = name in sizes and all(a in sizes for a in _leaves((name,), refined))
        if known and sequence(dim, ValueScope(sizes, {}, refined)).length != sizes[name]:
            raise MismatchError(
                f"the lengths of {name}'s parts do not add up",
                kind="lay-fit",
                wanted=f"{name} = {sizes[name]}",
                found=sequence(dim, ValueScope(sizes, {}, refined)).length,
            )


def _leaves(axes: Axes, refined: Mapping[str, Dim]) -> Iterator[str]:
    """Yield axes with refined atoms replaced by their parts."""
    sizes = dict.fromkeys(_named(axes, refined), 1)
    for axis in axes:
        yield from _lines(sequence(Atom(axis), ValueScope(sizes, {}, refined)))


def _named(axes: Axes, refined: Mapping[str, Dim]) -> Iterator[str]:
    yield from axes
    for dim in refined.values():
        yield from _atoms(dim)


def _atoms(dim: Dim) -> Iterator[str]:
    if isinstance(dim, Atom):
        yield dim.name
    elif isinstance(dim, Product):
        for p in dim.parts:
            yield from _atoms(p)


def _lines(found: Sequence) -> Iterator[str]:
    """Yield the axes of a product, from left to right."""
    if isinstance(found, Line):
        yield found.axis
        return
    for p in getattr(found, "parts", ()):
        yield from _lines(p)
