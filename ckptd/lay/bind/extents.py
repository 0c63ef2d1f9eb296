"""Numbers in names (layers, experts): which were found, which are missing, gaps.

In it: how many are shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice, product
from typing import TypeAlias

from ckptd.lay.bind.first import numbered
from ckptd.lay.bind.observed import Coordinates, Instance, Observed
from ckptd.lay.indexes import IndexCut
from ckptd.lay.resolve import ALL, NONE, Equation, Finding, Numbers, Resolved
from ckptd.lay.syntax import show_name
from ckptd.lay.syntax.tree import Assigned, How, NameIndex, Text

_MAX_PINNED = 4096
_MAX_SHOWN = 6

Signature: TypeAlias = tuple[str, tuple[tuple[str, How], ...], bool]
"""Of an index: axis, splits, and whether numbers count from 0 on each rank."""


def index_findings(observed: Observed, resolved: Resolved) -> Iterator[Finding]:
    """Yield what is wrong with the numbers that were found."""
    if observed.stored:
        yield from _stored(observed, resolved)
    else:
        yield from _local(observed, resolved)


def extents(observed: Observed, resolved: Resolved) -> dict[str, tuple[int, Instance]]:
    """Return how many numbers each axis in stored names has, and a rule that has the last.

    Numbers that rules fix (``X{0}``) count where some name has the axis as an index.
    """
    out: dict[str, tuple[int, Instance]] = {}
    indexed = {a for i in observed.instances.values() for a in _by_axis(i, ())}
    for instance in observed.instances.values():
        fixed = resolved.equations[instance.equation].pinned
        found = {a: {n} for a, n in fixed.items() if a in indexed} | _by_axis(instance, ())
        for axis, numbers in found.items():
            count = max(numbers) + 1
            if count > out.get(axis, (0, instance))[0]:
                out[axis] = (count, instance)
    return out


def local_numbers(
    observed: Observed, resolved: Resolved
) -> dict[Signature, dict[Coordinates, tuple[set[int], Instance]]]:
    """Return the numbers that all rules with alike indexes have, by coordinates."""
    out: dict[Signature, dict[Coordinates, tuple[set[int], Instance]]] = {}
    for instance in observed.instances.values():
        for index in _indexes(resolved.equations[instance.equation]):
            axes = {axis for axis, _ in index.splits}
            mine = out.setdefault((index.axis, index.splits, index.local), {})
            for at in instance.numbers:
                key = tuple((a, c) for a, c in at if a in axes)
                numbers, _ = mine.setdefault(key, (set(), instance))
                numbers |= _by_axis(instance, at).get(index.axis, set())
    return out


def pinned(
    equation: Equation,
    observed: Observed,
    key: tuple[int, tuple[str, ...]],
    all_of: Mapping[str, tuple[int, Instance]],
) -> list[Equation]:
    """Return a rule as one for each number, where it does not have all numbers of an axis.

    The first layers of a model may be dense and the others have experts: the rule for experts
    then holds some of the layers only. `all_of` is what `extents` returns.
    """
    if not observed.stored:
        return [equation]
    instance = observed.instances[key]
    some = {
        axis: sorted(numbers)
        for axis, numbers in _by_axis(instance, ()).items()
        if len(numbers) < equation.only.get(axis, ALL).count(all_of[axis][0])
    }
    if not some:
        return [equation]
    return [
        numbered(equation, dict(zip(some, numbers, strict=True)))
        for numbers in islice(product(*some.values()), _MAX_PINNED)
    ]


def _stored(observed: Observed, resolved: Resolved) -> Iterator[Finding]:
    all_of = extents(observed, resolved)
    together: dict[str, set[int]] = {}
    by_family: dict[tuple[str, str], set[int]] = {}
    for instance in observed.instances.values():
        equation = resolved.equations[instance.equation]
        fixed = {a: {n} for a, n in equation.pinned.items() if a in all_of}
        for axis, numbers in (*fixed.items(), *_by_axis(instance, ()).items()):
            together.setdefault(axis, set()).update(numbers)
            for family in equation.families.values():
                by_family.setdefault((family.name, axis), set()).update(numbers)
    for axis, (count, instance) in all_of.items():
        every = held_at_all(observed, resolved, axis)
        if sum(map(every.has, together[axis])) < every.count(count):
            equation = resolved.equations[instance.equation]
            wanted = filter(every.has, range(count))
            yield _gap(equation, axis, together[axis], wanted)
    for instance in observed.instances.values():
        equation = resolved.equations[instance.equation]
        by_axis = _by_axis(instance, ())
        found = instance.numbers.get((), set())
        if math.prod(len(n) for n in by_axis.values()) > len(found):
            yield _hole(equation, by_axis, found)
        some = [
            n for a, n in by_axis.items() if len(n) < equation.only.get(a, ALL).count(all_of[a][0])
        ]
        if math.prod(map(len, some)) > _MAX_PINNED:
            message = f"this rule has more than {_MAX_PINNED} combinations of some of the numbers"
            yield Finding("numbers", message, equation.at, equation.text, fit=True)
        for axis in by_axis:
            held = set.union(*(by_family[f.name, axis] for f in equation.families.values()))
            there = [n for n in together[axis] if _exists(equation, axis, n)]
            if not held.issuperset(there):
                yield _some(equation, axis, held, there)


def _local(observed: Observed, resolved: Resolved) -> Iterator[Finding]:
    together = local_numbers(observed, resolved)
    for (axis, splits, local), by_coordinates in together.items():
        for at, (numbers, instance) in by_coordinates.items():
            if len(at) < len(splits):
                # A name that does not say the virtual stage: numbers of several, with gaps.
                continue
            equation = resolved.equations[instance.equation]
            if not held_at_all(observed, resolved, axis, (axis, splits, local)).covers(ALL):
                # Each rule's numbers are looked at below.
                continue
            if not local and any(isinstance(how, Assigned) for _, how in splits):
                # Which numbers those are is assigned, and compared where the names are made.
                continue
            wanted = range(len(numbers)) if local else _span(numbers)
            if len(wanted) != len(numbers) or any(n not in numbers for n in wanted):
                yield _gap(equation, axis, numbers, wanted, at)
    for instance in observed.instances.values():
        equation = resolved.equations[instance.equation]
        for at in instance.numbers:
            found = _by_axis(instance, at)
            wanted_here = {
                i.axis: found.get(i.axis, set()) if wanted is None else wanted
                for i in _indexes(equation)
                for wanted in [_wanted(together, equation, i, at, observed.cuts)]
            }
            # Where one index has no number there is no tensor, whatever the others have.
            wrong = [a for a, w in wanted_here.items() if found.get(a, set()) != w]
            if wrong and all(wanted_here.values()):
                yield _gap(
                    equation, wrong[0], found.get(wrong[0], set()), wanted_here[wrong[0]], at
                )
                break


def _wanted(
    together: Mapping[Signature, Mapping[Coordinates, tuple[set[int], Instance]]],
    equation: Equation,
    index: NameIndex,
    at: Coordinates,
    cuts: Mapping[NameIndex, IndexCut],
) -> set[int] | None:
    """Return the numbers that a rule should have at some coordinates, by all rules together.

    None if it does not have all of them, and nothing says which layers those numbers are.
    """
    axes = {axis for axis, _ in index.splits}
    key = tuple((a, c) for a, c in at if a in axes)
    numbers = together[index.axis, index.splits, index.local][key][0]
    only = equation.only.get(index.axis)
    if only is None or not index.local:
        return numbers if only is None else {n for n in numbers if only.has(n)}
    cut = cuts.get(index)
    if cut is None or len(key) < len(cut.axes):
        return None
    return {n for n in numbers if only.has(cut.number(n, dict(at)))}


def held_at_all(
    observed: Observed, resolved: Resolved, axis: str, alike: Signature | None = None
) -> Numbers:
    """Return the numbers of an axis that some rule which was observed has.

    Of rules with any index of the axis, or only of those with alike ones.
    """
    out = NONE
    for instance in observed.instances.values():
        equation = resolved.equations[instance.equation]
        indexes = [i for i in _indexes(equation) if i.axis == axis]
        if any(alike in (None, (i.axis, i.splits, i.local)) for i in indexes):
            out |= equation.only.get(axis, ALL)
    return out


def _exists(equation: Equation, axis: str, number: int) -> bool:
    """Whether a space has one of a rule's tensors with a number."""
    families = [f for f in equation.families.values() if axis in f.axes]
    return any(f.only.get(axis, ALL).has(number) for f in families)


def _by_axis(instance: Instance, at: Coordinates) -> dict[str, set[int]]:
    """Return the numbers that were found, by axis."""
    out: dict[str, set[int]] = {}
    for numbers in instance.numbers.get(at, ()):
        for axis, number in numbers:
            out.setdefault(axis, set()).add(number)
    return out


def _indexes(equation: Equation) -> list[NameIndex]:
    """Return the indexes of a name that are axes of its families."""
    axes = {a for f in equation.families.values() for a in f.axes}
    return [p for p in equation.name.parts if isinstance(p, NameIndex) and p.axis in axes]


def _span(numbers: set[int]) -> range:
    return range(min(numbers), max(numbers) + 1) if numbers else range(0)


# --- messages -----------------------------------------------------------------------------------


def _gap(
    equation: Equation,
    axis: str,
    found: set[int],
    wanted: Iterable[int],
    at: Coordinates = (),
) -> Finding:
    # A single huge number makes a huge range: only its beginning is looked at.
    missing = list(islice((n for n in wanted if n not in found), _MAX_SHOWN))
    too_many = sorted(found - set(wanted)) if not missing else []
    where = " at " + " ".join(f"{a}={c}" for a, c in at) if at else ""
    shown = _shown(missing or too_many)
    verb = "is missing" if missing else "was not expected"
    message = f"{axis} {shown} {verb}{where}: numbers in names run from 0 without a gap"
    notes: tuple[str, ...] = ()
    if missing:
        name = show_name(
            replace(
                equation.name,
                parts=tuple(
                    Text(str(missing[0])) if isinstance(p, NameIndex) and p.axis == axis else p
                    for p in equation.name.parts
                ),
            ),
            quoted=False,
        )
        notes = (f"there is no tensor {name}{where}, but others of this rule exist",)
    return Finding("numbers", message, equation.at, equation.text, notes, fit=True)


def _hole(
    equation: Equation, by_axis: Mapping[str, set[int]], found: set[tuple[tuple[str, int], ...]]
) -> Finding:
    have = {frozenset(numbers) for numbers in found}
    combinations = product(*(sorted(n) for n in by_axis.values()))
    for numbers in combinations:
        at = tuple(zip(by_axis, numbers, strict=True))
        if frozenset(at) not in have:
            break
    shown = " ".join(f"{a}={n}" for a, n in at)
    return Finding(
        "numbers", f"the tensor of {shown} is missing", equation.at, equation.text, fit=True
    )


def _some(equation: Equation, axis: str, numbers: set[int], there: list[int]) -> Finding:
    missing = list(islice((n for n in sorted(there) if n not in numbers), _MAX_SHOWN))
    message = f"this rule has no tensor for {axis} {_shown(missing)}; other rules have {len(there)}"
    return Finding("numbers", message, equation.at, equation.text, severity="warning", fit=True)


def _shown(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[: _MAX_SHOWN - 1])) + " ..." * (len(numbers) >= _MAX_SHOWN)
