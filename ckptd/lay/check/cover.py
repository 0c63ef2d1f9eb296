"""Checks between rules: shadowed rules, cells held twice, families or cells that no rule holds.

In it: how many names such a finding shows; limits of pairs and cells.

A rule holds all of a family but for the axes that its reference fixes at a number, so what rules
hold is compared by those numbers, never cell by cell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np

from ckptd.base.grouping import by_key
from ckptd.errors import first_few
from ckptd.lay.resolve import ALL, Equation, Family, Finding, Lookup, Numbers, Resolved, covers
from ckptd.lay.syntax.tree import Alias, Name, NameIndex, On, Replicas, Text, join

_MAX_PAIRS = 1_000_000
_MAX_CELLS = 1_000_000


def between_findings(resolved: Resolved) -> Iterator[Finding]:
    """Yield rules that are never used, and rules that hold the same cells."""
    shadowed: set[int] = set()
    for later, earlier in _shadows(resolved):
        shadowed.add(later)
        equation = resolved.equations[later]
        by = f"{earlier.at.file}:{earlier.at.line}  {earlier.text}"
        message = "this rule is never used: an earlier one matches all of its names"
        yield Finding("shadowed", message, equation.at, equation.text, (f"matched by {by}",))
    yield from _duplicates(resolved, shadowed)


def _shadows(resolved: Resolved) -> Iterator[tuple[int, Equation]]:
    """Yield the number of each rule that is never used, and a rule that is used instead."""
    rules: list[Equation] = []
    before = Lookup()
    drops = iter(zip(resolved.drop_places, resolved.drops, strict=True))
    drop = next(drops, None)
    compared = 0
    last = None
    for k, later in enumerate(resolved.equations):
        while drop is not None and drop[0] <= k:
            before.add(len(rules), drop[1])
            rules.append(Equation(drop[1], {}, (), at=drop[1].at, text="a rule that says drop"))
            drop = next(drops, None)
        # A rule that represents several, by its globs or alternatives, does not shadow itself.
        twin = last is not None and (later.at, later.text) == (last.at, last.text)
        if not twin and compared < _MAX_PAIRS:
            candidates = before.find(later.name)
            compared += len(candidates)
            for earlier in map(rules.__getitem__, candidates):
                if _is_subset(later, earlier) and covers(earlier.name, later.name):
                    yield k, earlier
                    break
        before.add(len(rules), later.name)
        rules.append(later)
        last = later


def _is_subset(later: Equation, earlier: Equation) -> bool:
    """Whether the earlier rule is for all ranks and numbers that the later one is for."""
    if any(not n.covers(later.only.get(a, ALL)) for a, n in earlier.only.items()):
        return False
    mine = {(m.axis, m.coordinate) for m in later.modifiers if isinstance(m, On)}
    return {(m.axis, m.coordinate) for m in earlier.modifiers if isinstance(m, On)} <= mine


# --- the same cells twice -----------------------------------------------------------------------


def _duplicates(resolved: Resolved, shadowed: set[int]) -> Iterator[Finding]:
    holders: dict[str, list[int]] = {}
    for k, equation in enumerate(resolved.equations):
        if k not in shadowed and not _is_copy(equation):
            for held in dict.fromkeys(f.name for f in equation.families.values()):
                holders.setdefault(held, []).append(k)
    told: set[tuple[int, int]] = set()
    for name, numbers in holders.items():
        family = resolved.families[name]
        for first, second in _overlaps(resolved.equations, family, numbers):
            if (first, second) not in told:
                told.add((first, second))
                yield _duplicate(resolved, family, first, second)


def _is_copy(equation: Equation) -> bool:
    """Whether a rule says that others may hold the same."""
    return any(
        isinstance(m, Alias) or (isinstance(m, Replicas) and m.kind == "any")
        for m in equation.modifiers
    )


def _overlaps(
    equations: Sequence[Equation], family: Family, numbers: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield pairs of rules that hold the same cells: by the axes that they fix."""
    groups = by_key((tuple(a for a in family.axes if a in equations[k].pinned), k) for k in numbers)
    keys = list(groups)
    for axes, others in (*((a, a) for a in keys), *combinations(keys, 2)):
        common = [a for a in axes if a in others]
        by_pins: dict[tuple[int, ...], list[int]] = {}
        for k in groups[axes]:
            pins = tuple(equations[k].pinned[a] for a in common)
            before = by_pins.setdefault(pins, [])
            if axes == others:
                met = next((f for f in before if _meet(equations[f], equations[k])), None)
                if met is not None:
                    yield met, k
            before.append(k)
        if axes != others:
            for k in groups[others]:
                for found in by_pins.get(tuple(equations[k].pinned[a] for a in common), ()):
                    if _meet(equations[found], equations[k]) and not _taken(equations, found, k):
                        yield min(found, k), max(found, k)
                        break


def _meet(one: Equation, two: Equation) -> bool:
    """Whether two rules have numbers in common."""
    return all(_numbers(one, a) & _numbers(two, a) for a in {**one.only, **two.only})


def _numbers(equation: Equation, axis: str) -> Numbers:
    """Return the numbers of an axis that a rule has."""
    if axis in equation.pinned:
        number = equation.pinned[axis]
        return Numbers((False,) * number + (True,), (False,))
    return equation.only.get(axis, ALL)


def _taken(equations: Sequence[Equation], one: int, two: int) -> bool:
    """Whether names of the later rule that hold the same cells belong to the earlier one."""
    earlier, later = equations[min(one, two)], equations[max(one, two)]
    pins = {**later.pinned, **earlier.pinned}
    if any(isinstance(p, NameIndex) and p.axis in pins and p.local for p in later.name.parts):
        return False
    parts = (
        Text(str(pins[p.axis])) if isinstance(p, NameIndex) and p.axis in pins else p
        for p in later.name.parts
    )
    return covers(earlier.name, Name(join(parts)))


def _duplicate(resolved: Resolved, family: Family, first: int, second: int) -> Finding:
    one, two = resolved.equations[first], resolved.equations[second]
    return Finding(
        "duplicate",
        f"{family.name} is already held by an earlier rule",
        two.at,
        two.text,
        (
            f"earlier: {one.at.file}:{one.at.line}  {one.text}",
            f"if it is a second copy, write alias {family.name}; if any copy will do, add 'any'",
        ),
    )


# --- cells that no rule holds -------------------------------------------------------------------


def uncovered_findings(
    resolved: Resolved, sizes: Mapping[str, int] | None = None
) -> Iterator[Finding]:
    """Yield families that no rule holds, and with sizes those that rules hold in part."""
    holders: dict[str, list[Equation]] = {name: [] for name in resolved.families}
    for equation in resolved.equations:
        for family in equation.families.values():
            holders[family.name].append(equation)
    bare = [name for name, found in holders.items() if not found]
    if bare and sizes is None:
        message = f"no rule holds {first_few(bare, 6)}"
        yield Finding("uncovered", message, rule=f"layout {resolved.name}", severity="warning")
    for name, found in holders.items():
        if found and sizes is not None:
            missing = _missing(resolved.families[name], found, sizes)
            if missing:
                first = found[0]
                message = f"no rule holds {name} at {missing}"
                yield Finding("uncovered", message, first.at, first.text, fit=True)


def _where(points: list[int], numbers: Numbers) -> list[int]:
    """Return the places of those of some points that are among numbers."""
    return [k for k, n in enumerate(points) if numbers.has(n)]


def _missing(family: Family, holders: Sequence[Equation], sizes: Mapping[str, int]) -> str | None:
    """Return a cell that no rule holds, on the axes that rules fix; None if there is none."""
    axes = [a for a in family.axes if any(a in e.pinned or a in e.only for e in holders)]
    some = [{a for a in axes if a in e.pinned or a in e.only} for e in holders]
    if not all(some) or any(a not in sizes for a in axes):
        return None
    values = [
        list(range(sizes[a]))
        if any(a in e.only for e in holders)
        else sorted({e.pinned[a] for e in holders if a in e.pinned})
        for a in axes
    ]
    # Along each axis: the numbers that rules name, and one for all that none does.
    rest = [
        next((n for n in range(sizes[a]) if n not in set(v)), None)
        for a, v in zip(axes, values, strict=True)
    ]
    points = [v + ([] if r is None else [r]) for v, r in zip(values, rest, strict=True)]
    if math.prod(map(len, points)) > _MAX_CELLS:
        return None
    held = np.ones([len(p) for p in points], dtype=bool)
    there = [_where(p, family.only.get(a, ALL)) for a, p in zip(axes, points, strict=True)]
    held[np.ix_(*there)] = False
    for equation in holders:
        mine = [_where(p, _numbers(equation, a)) for a, p in zip(axes, points, strict=True)]
        held[np.ix_(*mine)] = True
    empty = np.argwhere(~held)
    if not len(empty):
        return None
    return " ".join(f"{a}={p[i]}" for a, p, i in zip(axes, points, empty[0], strict=True))
