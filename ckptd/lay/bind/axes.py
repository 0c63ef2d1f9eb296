"""Sizes of axes from observed shapes: the equations, what is missing or contradicts.

In it: findings for sizes that do not follow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction

from ckptd.errors import CkptdError
from ckptd.lay.bind.extents import extents, held_at_all, local_numbers
from ckptd.lay.bind.lengths import Lengths, Polynomial, summable
from ckptd.lay.bind.observed import Coordinates, Instance, Observed, from_ranks
from ckptd.lay.bind.sizes import Constraint, Origin, Solution, solve
from ckptd.lay.held import split_axes
from ckptd.lay.indexes import IndexCut, index_cut
from ckptd.lay.resolve import ALL, Equation, Finding, MeshShape, Resolved, ValueScope, stage_parts
from ckptd.lay.syntax import tree


def solved(resolved: Resolved, observed: Observed | None, sizes: Mapping[str, int]) -> Solution:
    """Find the sizes of a layout's axes.

    Parameters
    ----------
    resolved
        The layout.
    observed
        What was observed, or None.
    sizes
        Sizes that the caller states. Those of the program go before them.
    """
    mesh = resolved.mesh or MeshShape(1, {}, {})
    lengths = Lengths(mesh.extents)
    declared, twice = _declared(resolved, sizes)
    constraints = list(_refined(resolved, lengths, declared))
    constraints += _piped(resolved, mesh)
    if observed is not None:
        constraints += _indexes(observed, resolved, lengths)
        for instance in observed.instances.values():
            constraints += _dims(instance, resolved, lengths)
    solution = solve(constraints, lengths, declared, resolved.relations)
    solution.findings[:0] = twice
    for name, number in _fixed(resolved).items():
        solution.sizes.setdefault(name, number + 1)
    return solution


def _rank_cuts(
    resolved: Resolved, observed: Observed, sizes: Mapping[str, int]
) -> Mapping[tree.NameIndex, IndexCut]:
    """Return how the indexes of rules that have some numbers only are dealt to ranks.

    What a local number represents follows from how many there are on all stages before. Those
    that do not follow from names and stage strings are left out.
    """
    wanted = [
        p
        for equation in resolved.equations
        for p in equation.name.parts
        if isinstance(p, tree.NameIndex) and p.local and p.axis in equation.only
    ]
    if not wanted:
        return {}
    mesh = resolved.mesh or MeshShape(1, {}, {})
    lengths = Lengths(mesh.extents)
    declared, _ = _declared(resolved, sizes)
    constraints = [*_piped(resolved, mesh), *_indexes(observed, resolved, lengths)]
    found = solve(constraints, lengths, declared, resolved.relations).sizes
    out = {}
    for index in wanted:
        if index.axis in found:
            with suppress(CkptdError):
                out[index] = index_cut(resolved, index, ValueScope(found, mesh.extents))
    return out


def needed(layout: Resolved, solution: Solution) -> Iterator[Finding]:
    """Yield a finding for each size that the rules of a layout need and that does not follow."""
    users: dict[str, list[Equation]] = {}
    for equation in layout.equations:
        names = {a for f in equation.families.values() for a in f.axes}
        for dim in equation.dims:
            names |= _spoken_of(dim)
        for name in names - set(layout.mesh.extents if layout.mesh else ()):
            users.setdefault(name, []).append(equation)
    missing = sorted(n for n in users if n not in solution.sizes)
    while missing:
        first = users[missing[0]][0]
        group = _in_order(_together(missing, solution), first)
        missing = [n for n in missing if n not in group]
        yield _unsolved(group, [e for n in group for e in users[n]], solution)


def sorted_ranks(
    resolved: Resolved,
    ranks: Mapping[int, Mapping[str, tuple[int, ...]]],
    sizes: Mapping[str, int] | None = None,
) -> Observed:
    """Sort the tensors of some ranks by rules, with local numbers told from each other.

    Which layer a local number is follows from the numbers of all ranks, so names are sorted once
    without knowing it.
    """
    observed = from_ranks(resolved, ranks)
    cuts = _rank_cuts(resolved, observed, sizes or {})
    return from_ranks(resolved, ranks, cuts) if cuts else observed


def _declared(resolved: Resolved, sizes: Mapping[str, int]) -> tuple[dict[str, int], list[Finding]]:
    findings = []
    for name in sorted(set(sizes) & set(resolved.sizes)):
        if sizes[name] != resolved.sizes[name]:
            message = f"the program says {name} = {resolved.sizes[name]}, but a config.json, or the"
            message += f" layout that it is compared with, says {sizes[name]}"
            findings.append(Finding("sizes", message, fit=True))
    return {**sizes, **resolved.sizes}, findings


def _fixed(resolved: Resolved) -> dict[str, int]:
    """Return the last number of each axis that all rules fix at numbers: nothing else says more."""
    out: dict[str, int] = {}
    free: set[str] = set()
    for equation in resolved.equations:
        for family in equation.families.values():
            for axis in family.axes:
                if axis in equation.pinned:
                    out[axis] = max(out.get(axis, 0), equation.pinned[axis])
                else:
                    free.add(axis)
    return {axis: number for axis, number in out.items() if axis not in free}


def _refined(
    resolved: Resolved, lengths: Lengths, declared: Mapping[str, int]
) -> Iterator[Constraint]:
    """Yield the constraints of refined atoms of which the whole size is stated."""
    for name, dim in resolved.refined.items():
        polynomial: Polynomial = dict(lengths.stored(dim))
        if name in declared or name in resolved.relations:
            polynomial[(name,)] = Fraction(-1)
            yield Constraint(polynomial, 0, Origin(what=f"let {name}"))


def _piped(resolved: Resolved, mesh: MeshShape) -> Iterator[Constraint]:
    """Yield the number of layers that each pipeline has."""
    for pipe in resolved.pipes:
        try:
            total = sum(stage.size for stage in stage_parts(pipe, mesh))
        except CkptdError:
            continue
        origin = Origin(pipe.at, f'pipe "{pipe.stages}"', f"{total} layers")
        yield Constraint({(pipe.axis,): Fraction(1)}, total, origin)


# --- observations -------------------------------------------------------------------------------


def _indexes(observed: Observed, resolved: Resolved, lengths: Lengths) -> Iterator[Constraint]:
    """Yield how many numbers of each index there are."""
    if observed.stored:
        for axis, (count, instance) in extents(observed, resolved).items():
            if not held_at_all(observed, resolved, axis).has(count):
                # There may be one more that no rule has.
                continue
            origin = _origin(resolved, instance, f"numbers in names ({axis})")
            yield Constraint({(axis,): Fraction(1)}, count, origin)
        return
    piped = {(p.axis, p.splits) for p in resolved.pipes}
    for (axis, splits, local), by_coordinates in local_numbers(observed, resolved).items():
        alike = (axis, splits, local)
        some = not held_at_all(observed, resolved, axis, alike).covers(ALL)
        if some or (axis, tuple(a for a, _ in splits)) in piped:
            continue
        dim: tree.Dim = tree.Atom(axis)
        for mesh_axis, how in splits:
            dim = tree.Split(dim, mesh_axis, how)
        instance = next(iter(by_coordinates.values()))[1]
        origin = _origin(resolved, instance, f"numbers in names ({axis})")
        if any(len(at) < len(splits) for at in by_coordinates):
            # Names that do not say the virtual stage: numbers of several. All ranks together
            # have all of them.
            named = [a for a, _ in splits if any(a == b for at in by_coordinates for b, _ in at)]
            if len(by_coordinates) == math.prod(lengths.extents[a] for a in named):
                every = set[int]().union(*(numbers for numbers, _ in by_coordinates.values()))
                yield Constraint({(axis,): Fraction(1)}, len(every), origin)
            continue
        counts = {at: len(numbers) for at, (numbers, _) in by_coordinates.items()}
        yield from _lengths(dim, counts, lengths, origin)


def _dims(instance: Instance, resolved: Resolved, lengths: Lengths) -> Iterator[Constraint]:
    """Yield the lengths of the dimensions of one rule."""
    equation = resolved.equations[instance.equation]
    for k, dim in enumerate(equation.dims):
        axes = split_axes(dim)
        counts: dict[Coordinates, int] = {}
        first = None
        for at, shapes in instance.shapes.items():
            seen = next(iter(shapes.values()))
            if len(seen.shape) == len(equation.dims):
                first = first or seen
                counts.setdefault(tuple((a, c) for a, c in at if a in axes), seen.shape[k])
        origin = Origin(equation.at, equation.text, f"dimension {k} of {first}")
        if not counts:
            continue
        if () in counts:
            yield Constraint(lengths.stored(dim), counts[()], origin)
        else:
            yield from _lengths(dim, counts, lengths, origin)


def _lengths(
    dim: tree.Dim, counts: Mapping[Coordinates, int], lengths: Lengths, origin: Origin
) -> Iterator[Constraint]:
    """Yield the lengths of a dimension at some coordinates, and their sum if all are known."""
    axes = frozenset(split_axes(dim))
    everywhere = math.prod(lengths.extents.get(a, 1) for a in axes)
    if len(counts) == everywhere and summable(dim):
        total = Origin(
            origin.at, origin.rule, f"{origin.what}, over all {' and '.join(sorted(axes))},"
        )
        yield Constraint(lengths.summed(dim, axes), sum(counts.values()), total)
    for at, count in counts.items():
        yield Constraint(lengths.local(dim, dict(at)), count, origin)


def _origin(resolved: Resolved, instance: Instance, what: str) -> Origin:
    equation = resolved.equations[instance.equation]
    return Origin(equation.at, equation.text, what)


# --- what is missing ----------------------------------------------------------------------------


def _spoken_of(dim: tree.Dim) -> set[str]:
    """Return the sizes that grains and multiples of a dimension speak of."""
    match dim:
        case tree.Split():
            grain = _sizes_in(dim.how.grain) if isinstance(dim.how, tree.Even) else set()
            return grain | _spoken_of(dim.inner)
        case tree.Pad():
            return _sizes_in(dim.multiple) | _spoken_of(dim.inner)
        case tree.Product():
            return set().union(*map(_spoken_of, dim.parts))
        case tree.Sum():
            return set().union(*(_spoken_of(b.dim) for b in dim.branches))
    return set()


def _sizes_in(value: tree.Value) -> set[str]:
    if isinstance(value, tree.Arithmetic):
        return _sizes_in(value.left) | _sizes_in(value.right)
    return {value.name} if isinstance(value, tree.Size) else set()


def _in_order(names: Iterable[str], equation: Equation) -> list[str]:
    """Return names in the order in which a rule's tensors have them."""
    order = {a: k for f in equation.families.values() for k, a in enumerate(f.axes)}
    return sorted(names, key=lambda n: (order.get(n, len(order)), n))


def _together(missing: Sequence[str], solution: Solution) -> list[str]:
    """Return the first missing size and those that it is only known in a product with."""
    group = {missing[0]}
    for monomial in sorted(solution.products, key=len):
        if group & set(monomial):
            group |= set(monomial)
    return [n for n in missing if n in group]


def _unsolved(group: Sequence[str], users: Sequence[Equation], solution: Solution) -> Finding:
    first, *others = dict.fromkeys((e.at, e.text) for e in users)
    notes = [f"also in {at.file}:{at.line}  {text}" for at, text in others[:2]]
    names = f"{', '.join(group[:-1])} and {group[-1]}" if len(group) > 1 else group[0]
    known = [
        (monomial, value)
        for monomial, value in solution.products.items()
        if set(monomial) & set(group) and not any(n.startswith("#") for n in monomial)
    ]
    bounds = solution.bounds.get(group[0])
    if len(group) == 1 and bounds is not None:
        low, high = bounds
        message = f"padding hides the length of {names}: {low} to {high}"
        notes.append(
            f"declare it: let {names} = <its length without padding, {low} to {high}>, as the"
            " model's configuration says it; with the padded length, padding would become rows"
        )
    elif known:
        shown = " and ".join(f"{'*'.join(_in_order(m, users[0]))} = {v}" for m, v in known[:3])
        message = f"the shapes do not determine the lengths of {names}; they give only {shown}"
        some = "one of them" if len(group) == 2 else "all of them but one"
        notes.append(f"declare {some}: let {group[0]} = <a divisor of {known[0][1]}>")
    else:
        message = f"no shape determines the length of {names}"
        notes.append(f"declare it: let {group[0]} = <length>")
    return Finding("unsolved", message, first[0], first[1], tuple(notes), fit=True)
