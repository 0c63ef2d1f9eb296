"""Suggestions where a shape does not fit: other splits, other dimensions, other padding.

In it: multiples of padding that are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptd.lay.resolve import Equation, ValueScope, paths
from ckptd.lay.syntax import show, tree

_SIDES = {0: "rows", 1: "columns"}


@dataclass(frozen=True)
class Suggestion:
    """Another way to write the dimensions of a rule.

    Attributes
    ----------
    dims
        All dimensions.
    shown
        What to write.
    why
        What that means, in a few words.
    extents
        Of mesh axes that it needs besides.
    factored
        ``(axis, outer, inner)``: the mesh axis that those are parts of.
    worth_telling
        Whether to tell that it does not fit either.
    """

    dims: tuple[tree.Dim, ...]
    shown: str
    why: str
    extents: Mapping[str, int] = field(default_factory=dict)
    factored: tuple[str, str, str] | None = None
    worth_telling: bool = False

    def coordinates(self, at: Mapping[str, int]) -> Mapping[str, int]:
        """Return coordinates with those on the parts of a factored axis."""
        if self.factored is None or self.factored[0] not in at:
            return at
        axis, outer, inner = self.factored
        high, low = divmod(at[axis], self.extents[inner])
        return {**at, outer: high, inner: low}


def split_candidates(
    equation: Equation, k: int, split: tree.Split, scope: ValueScope
) -> list[Suggestion]:
    """Return what may be meant instead of an even split that does not divide."""
    out = list(_raw(equation, k, split, scope))
    out += _factored(equation, k, split, scope)
    out += _merged(equation, k, split)
    for rule, why in (("ceil", "uneven, as torch cuts"), ("bal", "uneven, balanced")):
        grain = split.how.grain if isinstance(split.how, tree.Even) else tree.UNIT
        how = tree.Even("ceil", grain) if rule == "ceil" else tree.Even("bal", grain)
        out.append(_replaced(equation, k, split, replace(split, how=how), why))
    out.append(_replaced(equation, k, split, split.inner, f"whole on each rank of {split.axis}"))
    return out


def candidates(equation: Equation, scope: ValueScope) -> list[Suggestion]:
    """Return what may be meant by a rule whose shape is not the observed one."""
    out: list[Suggestion] = []
    for k, dim in enumerate(equation.dims):
        for node in _nodes(dim):
            if isinstance(node, tree.Split):
                out += _raw(equation, k, node, scope)
                out += _merged(equation, k, node)
                for rule in ("ceil", "bal", "even"):
                    out += _as(equation, k, node, rule)
                why = f"not cut over {node.axis}"
                out.append(_replaced(equation, k, node, node.inner, why))
                out += _spread(equation, k, node)
            elif isinstance(node, tree.Pad):
                out += _padded(equation, k, node)
    out += _elsewhere(equation, scope)
    unique: dict[tuple[tree.Dim, ...], Suggestion] = {}
    for candidate in out:
        if candidate.dims != equation.dims:
            unique.setdefault(candidate.dims, candidate)
    return list(unique.values())


# --- splits -------------------------------------------------------------------------------------


def _raw(equation: Equation, k: int, split: tree.Split, scope: ValueScope) -> Iterator[Suggestion]:
    """Cut the whole dimension instead of a part of it."""
    dim = equation.dims[k]
    if dim == split:
        return
    why = f"raw {_SIDES.get(k, f'cuts of dimension {k}')}"
    extent = scope.extents.get(split.axis, 1)
    if isinstance(split.inner, tree.Atom) and scope.sizes.get(split.inner.name, extent) < extent:
        why += f", as Megatron does when {split.inner.name} < {split.axis}"
    whole = tree.Split(put(dim, split, split.inner), split.axis)
    yield _with(equation, k, whole, show(whole), why, worth_telling=True)


def _factored(
    equation: Equation, k: int, split: tree.Split, scope: ValueScope
) -> Iterator[Suggestion]:
    """See the mesh axis as two: one for the few heads, one for what each of them has."""
    extent = scope.extents.get(split.axis, 0)
    if not isinstance(split.inner, tree.Atom):
        return
    size = scope.sizes.get(split.inner.name, 0)
    if not 0 < size < extent or extent % size:
        return
    rest = extent // size
    outer, inner = ("tk", "tr") if split.axis == "tp" else (f"{split.axis}k", f"{split.axis}r")
    node = replace(split, axis=outer)
    copies: list[str] = []
    done = [False]

    def beside(dim: tree.Dim) -> tree.Dim:
        """Cut what stands beside the heads over the inner axis."""
        if isinstance(dim, tree.Sum):
            done[0] = True
            return replace(dim, branches=tuple(branch(b) for b in dim.branches))
        if isinstance(dim, tree.Atom) and not done[0] and scope.sizes.get(dim.name, 1) % rest == 0:
            done[0] = True
            return tree.Split(dim, inner)
        return dim

    def branch(found: tree.Branch) -> tree.Branch:
        if isinstance(found.dim, tree.Atom) and scope.sizes.get(found.dim.name, 1) % rest == 0:
            return replace(found, dim=tree.Split(found.dim, inner))
        copies.append(found.tag)
        return found

    def product(dim: tree.Dim) -> tree.Dim:
        if isinstance(dim, tree.Product) and split in dim.parts:
            at = dim.parts.index(split)
            after = tuple(beside(p) for p in dim.parts[at + 1 :])
            return replace(dim, parts=(*dim.parts[:at], node, *after))
        return node if dim == split else dim

    changed = _mapped(equation.dims[k], product)
    if changed == equation.dims[k]:
        changed = put(equation.dims[k], split, node)
    known = scope.extents.get(outer) == size and scope.extents.get(inner) == rest
    with_axes = "" if known else f" with {split.axis}=({outer}:{size} {inner}:{rest})"
    why = "replicated heads, as vLLM does" if copies or not done[0] else "whole heads"
    yield Suggestion(
        (*equation.dims[:k], changed, *equation.dims[k + 1 :]),
        show(changed) + with_axes,
        why,
        {outer: size, inner: rest},
        (split.axis, outer, inner),
        worth_telling=True,
    )


def _merged(equation: Equation, k: int, split: tree.Split) -> Iterator[Suggestion]:
    """Cut a product of the part and its neighbour."""
    for node in _nodes(equation.dims[k]):
        if isinstance(node, tree.Product) and split in node.parts[:-1]:
            at = node.parts.index(split)
            if not isinstance(node.parts[at + 1], tree.Atom):
                continue
            both = tree.Split(tree.Product((split.inner, node.parts[at + 1])), split.axis)
            parts = (*node.parts[:at], both, *node.parts[at + 2 :])
            changed = replace(node, parts=parts) if len(parts) > 1 else both
            yield _replaced(equation, k, node, changed, "cut both together")


def _as(equation: Equation, k: int, split: tree.Split, rule: str) -> Iterator[Suggestion]:
    if isinstance(split.how, tree.Even) and split.how.rule != rule:
        hows = {"ceil": tree.Even("ceil"), "bal": tree.Even("bal"), "even": tree.Even()}
        why = {"ceil": "as torch cuts", "bal": "balanced", "even": "evenly"}[rule]
        changed = replace(split, how=replace(hows[rule], grain=split.how.grain))
        yield _replaced(equation, k, split, changed, why)


def _spread(equation: Equation, k: int, split: tree.Split) -> Iterator[Suggestion]:
    """Cut each part of a sum instead of all of it."""
    if isinstance(split.inner, tree.Sum):
        branches = tuple(replace(b, dim=replace(split, inner=b.dim)) for b in split.inner.branches)
        changed = replace(split.inner, branches=branches)
        yield _replaced(equation, k, split, changed, "cut each part")


def _elsewhere(equation: Equation, scope: ValueScope) -> Iterator[Suggestion]:
    """Cut another dimension, or swap two."""
    dims = equation.dims
    if len(dims) == 2:
        both = (dims[1], dims[0])
        yield Suggestion(both, _shown(both), "transposed")
    bare = tuple(_bare(d) for d in dims)
    axes = {s.axis for p in paths(dims) for _, s in p.splits}
    for k in range(len(dims)):
        for axis in scope.extents:
            changed = tree.Split(bare[k] if axis in axes else dims[k], axis)
            others = bare if axis in axes else dims
            found = (*others[:k], changed, *others[k + 1 :])
            yield Suggestion(
                found, _shown(found), f"cut {_SIDES.get(k, f'dimension {k}')} over {axis}"
            )


def _padded(equation: Equation, k: int, pad: tree.Pad) -> Iterator[Suggestion]:
    """Pad to another multiple, as training frameworks do."""
    yield _replaced(equation, k, pad, pad.inner, "not padded")
    cuts = [n.axis for n in _nodes(equation.dims[k]) if isinstance(n, tree.Split)]
    multiples: list[tree.Value] = [
        tree.Arithmetic("*", tree.Number(n), tree.Size(a))
        for n in (128, 64, 256, 8, 16, 32)
        for a in cuts
    ]
    multiples += map(tree.Size, cuts)
    multiples += [tree.Number(n) for n in (128, 64, 256, 512, 1024, 8, 16, 32)]
    for multiple in multiples:
        changed = replace(pad, multiple=multiple)
        yield _replaced(equation, k, pad, changed, f"padded to a multiple of {show(multiple)}")


# --- trees --------------------------------------------------------------------------------------


def _nodes(dim: tree.Dim) -> Iterator[tree.Dim]:
    yield dim
    match dim:
        case tree.Split() | tree.Pad():
            yield from _nodes(dim.inner)
        case tree.Product():
            for part in dim.parts:
                yield from _nodes(part)
        case tree.Sum():
            for branch in dim.branches:
                yield from _nodes(branch.dim)


def _mapped(dim: tree.Dim, change: Callable[[tree.Dim], tree.Dim]) -> tree.Dim:
    """Return a tree with each node changed, from the top; what has changed is left as it is."""
    changed = change(dim)
    if changed is not dim:
        return changed
    match dim:
        case tree.Split() | tree.Pad():
            return replace(dim, inner=_mapped(dim.inner, change))
        case tree.Product():
            return replace(dim, parts=tuple(_mapped(p, change) for p in dim.parts))
        case tree.Sum():
            found = (replace(b, dim=_mapped(b.dim, change)) for b in dim.branches)
            return replace(dim, branches=tuple(found))
    return dim


def put(dim: tree.Dim, old: tree.Dim, new: tree.Dim) -> tree.Dim:
    """Return a dimension with a part of it replaced."""
    return _mapped(dim, lambda d: new if d == old else d)


def _bare(dim: tree.Dim) -> tree.Dim:
    """Return a dimension without splits."""
    match dim:
        case tree.Split():
            return _bare(dim.inner)
        case tree.Pad():
            return replace(dim, inner=_bare(dim.inner))
        case tree.Product():
            return replace(dim, parts=tuple(map(_bare, dim.parts)))
        case tree.Sum():
            return replace(dim, branches=tuple(replace(b, dim=_bare(b.dim)) for b in dim.branches))
    return dim


def _replaced(equation: Equation, k: int, old: tree.Dim, new: tree.Dim, why: str) -> Suggestion:
    changed = put(equation.dims[k], old, new)
    return _with(equation, k, changed, show(changed), why)


def _with(
    equation: Equation, k: int, dim: tree.Dim, shown: str, why: str, *, worth_telling: bool = False
) -> Suggestion:
    dims = (*equation.dims[:k], dim, *equation.dims[k + 1 :])
    return Suggestion(dims, shown, why, worth_telling=worth_telling)


def _shown(dims: Sequence[tree.Dim]) -> str:
    return f"[{' '.join(map(show, dims))}]"
