"""First match wins: cuts names that an earlier rule has out of later rules.

Where an earlier rule has some of the names of a later one (``a.0`` before ``a.{e}``), the later
one becomes a rule for each number that is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from ckptd.lay.matching import alike, stored_name
from ckptd.lay.resolve import ALL, Equation, Finding, Lookup, Resolved, covers
from ckptd.lay.syntax.tree import Name, NameIndex, On, Text, join

_MAX_RULES = 4096


def first_wins(layout: Resolved, sizes: Mapping[str, int]) -> tuple[Resolved, list[Finding]]:
    """Return a layout no two rules of which have a name in common.

    Names with local numbers are left as they are: which number is whose differs from rank to rank.

    Parameters
    ----------
    layout
        Without globs in the names of its rules.
    sizes
        Of its axes; rules with an index of unknown size are left as they are.
    """
    local = layout.mesh.local if layout.mesh else ()
    names = [stored_name(e.name, local) for e in layout.equations]
    drops = list(zip(layout.drop_places, layout.drops, strict=True))
    findings: list[Finding] = []
    equations: list[Equation] = []
    places = [0]
    before = Lookup()
    for k, equation in enumerate(layout.equations):
        earlier: list[Name] = []
        # A name without an index is one name, and cannot be had in part.
        if any(isinstance(p, NameIndex) for p in names[k].parts):
            earlier += [
                names[n]
                for n in before.find(names[k])
                if _on(layout.equations[n]) <= _on(equation) and _overlap(names[n], names[k])
            ]
            earlier += [d for place, d in drops if place <= k and _overlap(d, names[k])]
        before.add(k, names[k])
        found = [equation]
        if earlier:
            left = _left(equation, earlier, sizes)
            if left is None:
                message = "too many numbers to decide which of them an earlier rule covers"
                findings.append(Finding("numbers", message, equation.at, equation.text))
            else:
                found = left
        equations += found
        places.append(len(equations))
    if len(equations) == len(layout.equations) and not findings:
        return layout, []
    moved = tuple(places[p] for p in layout.drop_places)
    return replace(layout, equations=tuple(equations), drop_places=moved), findings


def numbered(equation: Equation, at: Mapping[str, int]) -> Equation:
    """Return a rule for single numbers of some of the indexes in its name."""
    only = {a: n for a, n in equation.only.items() if a not in at}
    name = _numbered(equation.name, at)
    return replace(equation, name=name, pinned={**equation.pinned, **at}, only=only)


def _overlap(earlier: Name, later: Name) -> bool:
    """Whether two names may have some names in common, but not all of the later one's."""
    return alike(earlier, later) and not covers(earlier, later)


def _left(
    equation: Equation, earlier: Sequence[Name], sizes: Mapping[str, int]
) -> list[Equation] | None:
    """Return a rule for each number that no earlier rule has; None if there are too many."""
    axes = {a for f in equation.families.values() for a in f.axes}
    indexes = [p for p in equation.name.parts if isinstance(p, NameIndex) and p.axis in axes]
    if any(i.local or i.axis not in sizes for i in indexes):
        return [equation]
    if math.prod(sizes[i.axis] for i in indexes) > _MAX_RULES:
        return None
    return list(_each(equation, [i.axis for i in indexes], earlier, sizes))


def _each(
    equation: Equation, axes: Sequence[str], earlier: Sequence[Name], sizes: Mapping[str, int]
) -> Iterator[Equation]:
    found = [
        numbered(equation, dict(zip(axes, numbers, strict=True)))
        for numbers in product(*(equation.only.get(a, ALL).below(sizes[a]) for a in axes))
    ]
    left = [e for e in found if not any(covers(n, e.name) for n in earlier)]
    # One rule stays one: the numbers that look alike may still all be its own.
    yield from (left if len(left) < len(found) else [equation])


def _numbered(name: Name, at: Mapping[str, int]) -> Name:
    parts = (
        Text(str(at[p.axis])) if isinstance(p, NameIndex) and p.axis in at else p
        for p in name.parts
    )
    return Name(join(parts), at=name.at)


def _on(equation: Equation) -> set[tuple[str, int | str]]:
    return {(m.axis, m.coordinate) for m in equation.modifiers if isinstance(m, On)}
