"""Findings with sizes: splits that do not divide or add up, observed shapes that no rule makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from ckptd.errors import CkptdError
from ckptd.lay.bind.observed import Coordinates, SeenTensor
from ckptd.lay.bind.suggest import Suggestion, candidates, put, split_candidates
from ckptd.lay.boxes import padded, sequence
from ckptd.lay.resolve import Bound, Equation, Finding, MeshShape, ValueScope, evaluate, part, paths
from ckptd.lay.syntax import show, tree

Shape = tuple[int, ...]
Shapes = Mapping[int, Mapping[Coordinates, SeenTensor]]
"""By number of the equation in the bound layout: the observed shape at coordinates."""

_MAX_LENGTHS = 256


def fit_findings(bound: Bound, shapes: Shapes) -> Iterator[Finding]:
    """Yield the splits that do not divide or add up, and shapes that are not the rules'."""
    mesh = bound.layout.mesh or MeshShape(1, {}, {})
    scope = ValueScope(bound.sizes, mesh.extents, bound.layout.refined)
    piped = {(p.axis, p.splits) for p in bound.layout.pipes}
    indexes: set[tuple[str, tuple[tuple[str, tree.How], ...]]] = set()
    for number, looked_up in enumerate(bound.layout.equations):
        equation = _as_written(looked_up, bound.layout.refined)
        seen = shapes.get(number, {})
        told = False
        for index in (p for p in equation.name.parts if isinstance(p, tree.NameIndex)):
            key = (index.axis, index.splits)
            # Many rules have the same index: the first one is reported.
            if key not in indexes and (index.axis, tuple(a for a, _ in key[1])) not in piped:
                indexes.add(key)
                yield from _index(equation, index, scope)
        for k, dim in enumerate(equation.dims):
            for finding in _splits(equation, k, dim, scope, seen):
                told = True
                yield finding
        if not told:
            yield from _shapes(equation, scope, seen)


def with_fits(findings: Sequence[Finding], fits: Sequence[Finding]) -> list[Finding]:
    """Return findings of what was observed and of `fit_findings` as one list.

    That sizes contradict each other, and that a rule does not make an observed shape, is often
    one mistake; the latter says which rule would.
    """
    told = {(f.at, f.code) for f in fits}
    rules = {f.at for f in fits if f.code in ("shape", "indivisible", "uncovered")}
    left = [
        f
        for f in findings
        if (f.at, f.code) not in told and not (f.code == "sizes" and f.at in rules)
    ]
    return [*fits, *left]


def _as_written(equation: Equation, refined: Mapping[str, tree.Dim]) -> Equation:
    """Return a rule with the names of refined atoms, as people write it."""
    dims = equation.dims
    for name, parts in refined.items():
        dims = tuple(put(d, parts, tree.Atom(name)) for d in dims)
    return replace(equation, dims=dims)


def _index(equation: Equation, index: tree.NameIndex, scope: ValueScope) -> Iterator[Finding]:
    """Yield what is wrong with the splits of an index in a name."""
    dim: tree.Dim = tree.Atom(index.axis)
    for axis, how in index.splits:
        dim = tree.Split(dim, axis, how)
    for finding in _splits(equation, -1, dim, scope, {}):
        notes = finding.notes
        if finding.code == "indivisible":
            uneven = tuple(
                (a, tree.Even("ceil") if isinstance(h, tree.Even) else h) for a, h in index.splits
            )
            cut = show(tree.Name((replace(index, splits=uneven),)))
            notes = (f"uneven, in the name: {cut}; or say which stage has which: pipe",)
        yield replace(finding, notes=notes)


# --- splits -------------------------------------------------------------------------------------


def _splits(
    equation: Equation,
    k: int,
    dim: tree.Dim,
    scope: ValueScope,
    seen: Mapping[Coordinates, SeenTensor],
) -> Iterator[Finding]:
    """Yield what is wrong with the splits of a dimension; `k` is -1 for an index in the name."""
    for split in _all_splits(dim):
        lengths = _lengths(split.inner, scope)
        extent = scope.extents.get(split.axis)
        if lengths is None or extent is None:
            continue
        for length in sorted(lengths):
            wrong = _wrong_split(split, length, extent, scope)
            if wrong is None:
                continue
            message, code = wrong
            found: Sequence[Suggestion] = ()
            if code == "indivisible" and k >= 0:
                found = split_candidates(equation, k, split, scope)
            head, notes = _fits(found, scope, seen)
            text = f"{message}{'. ' + head if head else ''}"
            yield Finding(code, text, equation.at, equation.text, notes, fit=True)
            return


def _wrong_split(
    split: tree.Split, length: int, extent: int, scope: ValueScope
) -> tuple[str, str] | None:
    """Return what is wrong with a split of a sequence of some length, and its code."""
    what = _named(split.inner, length)
    if isinstance(split.how, tree.Assigned):
        there = len(split.how.coordinates)
        if there == length:
            return None
        return f"{what}, and {there} coordinates of {split.axis} are assigned", "uncovered"
    if isinstance(split.how, tree.Widths):
        total = sum(split.how.widths)
        if total == length:
            return None
        left = length - total
        rest = (
            f"the last {left if left > 1 else 'one'} {'are' if left > 1 else 'is'} on no rank"
            if total < length
            else (f"the widths hold {total - length} too many")
        )
        widths = " ".join(map(str, split.how.widths))
        return f"{what}, and the widths [{widths}] add up to {total}: {rest}", "uncovered"
    grain = evaluate(split.how.grain, scope)
    if grain < 1:
        return f"the grain of @{split.axis} is {grain}", "grain"
    units = -(-length // grain)
    if split.how.rule != "even" or units % extent == 0:
        return None
    unit = f", in {units} units of {grain}," if grain > 1 else ""
    return f"{what}{unit} does not divide over {split.axis}={extent} (even)", "indivisible"


def _named(dim: tree.Dim, length: int) -> str:
    if isinstance(dim, tree.Atom):
        return f"{dim.name}={length}"
    return f"{show(dim)}, which is {length} long,"


def _all_splits(dim: tree.Dim) -> Iterator[tree.Split]:
    """Yield the splits of a dimension, inner ones first."""
    match dim:
        case tree.Split():
            yield from _all_splits(dim.inner)
            yield dim
        case tree.Pad():
            yield from _all_splits(dim.inner)
        case tree.Product():
            for one in dim.parts:
                yield from _all_splits(one)
        case tree.Sum():
            for branch in dim.branches:
                yield from _all_splits(branch.dim)


def _lengths(dim: tree.Dim, scope: ValueScope) -> frozenset[int] | None:
    """Return all lengths that a dimension has on some rank; None if a size is not known."""
    try:
        return _all_lengths(dim, scope)
    except CkptdError:
        return None


def _all_lengths(dim: tree.Dim, scope: ValueScope) -> frozenset[int]:
    match dim:
        case tree.Atom() if dim.name in scope.refined:
            return _all_lengths(scope.refined[dim.name], scope)
        case tree.Atom():
            return frozenset([scope.size(dim.name)])
        case tree.One():
            return frozenset([1])
        case tree.Pad():
            return frozenset(padded(n, dim, scope) for n in _all_lengths(dim.inner, scope))
        case tree.Product():
            out = frozenset([1])
            for one in dim.parts:
                out = _few(a * b for a, b in product(out, _all_lengths(one, scope)))
            return out
        case tree.Sum():
            out = frozenset([0])
            for branch in dim.branches:
                out = _few(a + b for a, b in product(out, _all_lengths(branch.dim, scope)))
            return out
        case tree.Split():
            return _few(_part_lengths(dim, scope))
    return frozenset()


def _part_lengths(split: tree.Split, scope: ValueScope) -> Iterator[int]:
    extent = scope.extent(split.axis)
    for length in _all_lengths(split.inner, scope):
        if isinstance(split.how, tree.Assigned):
            counts = Counter(split.how.coordinates)
            yield from (counts[c] for c in range(extent))
            continue
        if isinstance(split.how, tree.Widths):
            yield from split.how.widths
            continue
        # First, last and the ones next to where a formula changes: parts have few lengths.
        grain = max(1, evaluate(split.how.grain, scope))
        units = -(-length // grain)
        edges = {0, extent - 1, units % extent, -(-units // max(1, -(-units // extent)))}
        edges |= {e - 1 for e in edges}
        rule = tree.Even("ceil", split.how.grain) if split.how.rule == "even" else split.how
        for coordinate in sorted(e for e in edges if 0 <= e < extent):
            start, stop = part(length, rule, extent, coordinate, scope)
            yield stop - start


def _few(lengths: Iterator[int]) -> frozenset[int]:
    out: set[int] = set()
    for length in lengths:
        out.add(length)
        if len(out) == _MAX_LENGTHS:
            break
    return frozenset(out)


# --- observed shapes ----------------------------------------------------------------------------


def _shapes(
    equation: Equation, scope: ValueScope, seen: Mapping[Coordinates, SeenTensor]
) -> Iterator[Finding]:
    """Yield a finding if the observed shapes are not those of a rule."""
    for at, found in seen.items():
        shape = _shape(equation.dims, scope, dict(at) if at or not _stored(seen) else None)
        if shape is None or shape == found.shape:
            continue
        where = f" on rank {found.rank}" if found.rank is not None else ""
        message = (
            f"{found.name} is {_show(found.shape)}{where}, and this rule makes it {_show(shape)}"
        )
        head, notes = _fits(candidates(equation, scope), scope, seen)
        text = f"{message}. {head}" if notes else message
        used = f"this rule's shape is with {_sizes_of(equation, scope)}"
        yield Finding("shape", text, equation.at, equation.text, (*notes, used), fit=True)
        return


def _sizes_of(equation: Equation, scope: ValueScope) -> str:
    """Return the sizes that a rule's shape comes from."""
    names = dict.fromkeys(leaf.atom for path in paths(equation.dims) for leaf in path.leaves)
    return " ".join(f"{n}={scope.sizes[n]}" for n in names if n in scope.sizes)


def _stored(seen: Mapping[Coordinates, SeenTensor]) -> bool:
    return all(s.rank is None for s in seen.values())


def _fits(
    found: Sequence[Suggestion], scope: ValueScope, seen: Mapping[Coordinates, SeenTensor]
) -> tuple[str, tuple[str, ...]]:
    """Return which candidates have the observed shapes, as text."""
    if not found:
        return "", ()
    accepted, rejected = [], []
    for candidate in found:
        wide = replace(scope, extents={**scope.extents, **candidate.extents})
        needs = None
        for at, observed in seen.items():
            shape = _shape(candidate.dims, wide, candidate.coordinates(dict(at)))
            if shape != observed.shape:
                needs = shape
                break
        else:
            if seen or _divides(candidate.dims, wide):
                accepted.append(candidate)
            continue
        if needs is not None and candidate.worth_telling:
            rejected.append((candidate, needs))
    # Several ways may be written alike: with other meshes, say.
    accepted = list({(c.shown, c.why): c for c in reversed(accepted)}.values())[::-1][:4]
    rejected = rejected[:2]
    width = max((len(c.shown) for c in (*accepted, *(c for c, _ in rejected))), default=0)
    notes = [f"{c.shown:<{width}}   {c.why}" for c in accepted]
    notes += [f"{c.shown:<{width}}   {c.why}: needs {_show(s)}, rejected" for c, s in rejected]
    if not seen:
        return ("These would:" if notes else "", tuple(notes))
    first = next(iter(seen.values()))
    local = "local " if first.rank is not None else ""
    verb = "fits:" if accepted else "fits none of:"
    return (f"Observed {local}shape {_show(first.shape)} {verb}" if notes else "", tuple(notes))


def _divides(dims: Sequence[tree.Dim], scope: ValueScope) -> bool:
    return all(
        lengths is not None
        and all(_wrong_split(s, n, scope.extents.get(s.axis, 1), scope) is None for n in lengths)
        for d in dims
        for s in _all_splits(d)
        for lengths in [_lengths(s.inner, scope)]
    )


def _shape(
    dims: Sequence[tree.Dim], scope: ValueScope, coordinates: Mapping[str, int] | None
) -> Shape | None:
    """Return a shape at some coordinates; None if it cannot be computed."""
    try:
        return tuple(sequence(d, scope, coordinates).length for d in dims)
    except CkptdError:
        return None


def _show(shape: Shape) -> str:
    return f"[{','.join(map(str, shape))}]"
