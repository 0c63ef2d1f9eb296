"""Mistakes in programs: every single change of a kind that a person would make, one at a time.

Each mutant is a program in which one statement of one layout was changed, and still is a program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from ckptd.lay.syntax import show
from ckptd.lay.syntax.tree import (
    Alternatives,
    Assigned,
    Branch,
    Default,
    Dim,
    Even,
    File,
    Flat,
    How,
    Layout,
    Let,
    Mesh,
    MeshAxis,
    Modifier,
    Name,
    NameIndex,
    NamePart,
    Number,
    On,
    Pad,
    Pipe,
    Product,
    Rule,
    Split,
    Statement,
    Sum,
    Text,
    Widths,
)

__all__ = ["KINDS", "Mutant", "mutants"]

KINDS = (
    "split moved out",
    "split moved in",
    "splits exchanged",
    "split dropped",
    "other mesh axis",
    "other how",
    "tags swapped",
    "branches swapped",
    "parts swapped",
    "pad dropped",
    "local number",
    "index not cut",
    "index cut otherwise",
    "names exchanged",
    "alternatives exchanged",
    "other stage",
    "other stages",
    "flat changed",
)


@dataclass(frozen=True)
class Mutant:
    """A changed program.

    Attributes
    ----------
    kind
        One of `KINDS`.
    before, after
        The statement, or the statements.
    file
        The whole program.
    """

    kind: str
    before: str
    after: str
    file: File

    def __str__(self) -> str:
        return f"{self.kind}: {self.before}  ->  {self.after}"


Change = tuple[str, Statement]


def mutants(file: File, layout: str) -> Iterator[Mutant]:
    """Yield all mutants of a layout of a program."""
    found = next(i for i in file.items if isinstance(i, Layout) and i.name == layout)
    axes = _mesh_axes(file, found)
    for k, statement in enumerate(found.statements):
        for kind, changed in _changes(statement, axes):
            statements = (*found.statements[:k], changed, *found.statements[k + 1 :])
            if changed != statement:
                yield Mutant(kind, show(statement), show(changed), _put(file, found, statements))
    yield from _lets(file, found)
    rules = [(k, s) for k, s in enumerate(found.statements) if isinstance(s, Rule)]
    for (i, one), (j, two) in combinations(rules, 2):
        if len(one.dims) == len(two.dims):
            statements_list = list(found.statements)
            statements_list[i] = replace(one, name=two.name)
            statements_list[j] = replace(two, name=one.name)
            before, after = f"{show(one)}; {show(two)}", "their names exchanged"
            yield Mutant(
                "names exchanged", before, after, _put(file, found, tuple(statements_list))
            )


def _lets(file: File, layout: Layout) -> Iterator[Mutant]:
    """Yield mutants of the names that begin the names of a layout's rules."""
    texts = [s.name.parts[0] for s in layout.statements if isinstance(s, Rule)]
    for k, let in enumerate(file.items):
        if not isinstance(let, Let) or not isinstance(let.value, Name):
            continue
        if not any(isinstance(t, Text) and t.text.startswith(f"{let.name}.") for t in texts):
            continue
        for i, part in enumerate(let.value.parts):
            for kind, changed in _in_part(part, _mesh_axes(file, layout)):
                parts = (*let.value.parts[:i], changed, *let.value.parts[i + 1 :])
                other = replace(let, value=Name(parts))
                items = (*file.items[:k], other, *file.items[k + 1 :])
                if other != let:
                    yield Mutant(kind, show(let), show(other), File(items))


def _put(file: File, layout: Layout, statements: tuple[Statement, ...]) -> File:
    changed = replace(layout, statements=statements)
    return File(tuple(changed if i is layout else i for i in file.items))


def _mesh_axes(file: File, layout: Layout) -> list[str]:
    """Return all mesh axes of a layout."""

    def names(axes: Sequence[MeshAxis]) -> Iterator[str]:
        for a in axes:
            yield a.name
            yield from names(a.parts)

    meshes = [i for i in file.items if isinstance(i, Mesh) and i.name in layout.meshes]
    return list(dict.fromkeys(n for m in meshes for n in names((*m.axes, *m.local))))


def _changes(statement: Statement, axes: list[str]) -> Iterator[Change]:
    match statement:
        case Rule():
            for kind, dims in _in_each(statement.dims, lambda d: _in_dim(d, axes)):
                yield kind, replace(statement, dims=dims)
            yield from _in_name(statement, axes)
            for k, m in enumerate(statement.modifiers):
                if isinstance(m, On):
                    other = On(m.axis, 1 if m.coordinate == 0 else 0)
                    rest = statement.modifiers
                    moved: tuple[Modifier, ...] = (*rest[:k], other, *rest[k + 1 :])
                    yield "other stage", replace(statement, modifiers=moved)
        case Default():
            for kind, dims in _in_each(statement.dims, lambda d: _in_dim(d, axes)):
                yield kind, replace(statement, dims=dims)
        case Flat():
            for flat in _flats(statement, axes):
                yield "flat changed", flat
        case Pipe():
            for text in _stages(statement.stages):
                yield "other stages", replace(statement, stages=text)
            yield "other stages", replace(statement, splits=statement.splits[::-1])


# --- dimensions ---------------------------------------------------------------------------------


def _in_each(
    dims: tuple[Dim, ...], change: Callable[[Dim], Iterator[tuple[str, Dim]]]
) -> Iterator[tuple[str, tuple[Dim, ...]]]:
    """Yield a list of dimensions with one of them changed."""
    for k, dim in enumerate(dims):
        for kind, changed in change(dim):
            yield kind, (*dims[:k], changed, *dims[k + 1 :])
    for i, j in combinations(range(len(dims)), 2):
        swapped = list(dims)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        yield "parts swapped", tuple(swapped)


def _in_dim(dim: Dim, axes: list[str]) -> Iterator[tuple[str, Dim]]:
    """Yield a dimension with one change at its top, or below."""
    yield from _at_top(dim, axes)
    match dim:
        case Product():
            for k, part in enumerate(dim.parts):
                for kind, changed in _in_dim(part, axes):
                    parts = (*dim.parts[:k], changed, *dim.parts[k + 1 :])
                    yield kind, replace(dim, parts=parts)
        case Sum():
            for k, branch in enumerate(dim.branches):
                for kind, changed in _in_dim(branch.dim, axes):
                    one = replace(branch, dim=changed)
                    yield (
                        kind,
                        replace(dim, branches=(*dim.branches[:k], one, *dim.branches[k + 1 :])),
                    )
        case Split() | Pad():
            for kind, changed in _in_dim(dim.inner, axes):
                yield kind, replace(dim, inner=changed)


def _at_top(dim: Dim, axes: list[str]) -> Iterator[tuple[str, Dim]]:
    match dim:
        case Split():
            yield "split dropped", dim.inner
            for axis in axes:
                yield "other mesh axis", replace(dim, axis=axis)
            for how in _hows(dim.how):
                yield "other how", replace(dim, how=how)
            yield from _inwards(dim)
        case Product():
            for i, j in combinations(range(len(dim.parts)), 2):
                parts = list(dim.parts)
                parts[i], parts[j] = parts[j], parts[i]
                yield "parts swapped", replace(dim, parts=tuple(parts))
            for k, part in enumerate(dim.parts):
                if isinstance(part, Split):
                    outside = replace(dim, parts=(*dim.parts[:k], part.inner, *dim.parts[k + 1 :]))
                    yield "split moved out", Split(outside, part.axis, part.how)
        case Sum():
            yield from _in_sum(dim)
        case Pad():
            yield "pad dropped", dim.inner
            if isinstance(dim.inner, Split):
                inner = dim.inner
                yield (
                    "split moved out",
                    Split(replace(dim, inner=inner.inner), inner.axis, inner.how),
                )


def _in_sum(dim: Sum) -> Iterator[tuple[str, Dim]]:
    for i, j in combinations(range(len(dim.branches)), 2):
        one, two = dim.branches[i], dim.branches[j]
        branches = list(dim.branches)
        branches[i], branches[j] = Branch(two.tag, one.dim), Branch(one.tag, two.dim)
        yield "tags swapped", replace(dim, branches=tuple(branches))
        branches[i], branches[j] = two, one
        yield "branches swapped", replace(dim, branches=tuple(branches))
    inner = [b.dim for b in dim.branches]
    splits = [d for d in inner if isinstance(d, Split)]
    if len(splits) == len(inner) and len({(s.axis, s.how) for s in splits}) == 1:
        bare = tuple(Branch(b.tag, s.inner) for b, s in zip(dim.branches, splits, strict=True))
        yield "split moved out", Split(replace(dim, branches=bare), splits[0].axis, splits[0].how)


def _inwards(dim: Split) -> Iterator[tuple[str, Dim]]:
    inner = dim.inner
    match inner:
        case Product():
            for k, part in enumerate(inner.parts):
                parts = (*inner.parts[:k], replace(dim, inner=part), *inner.parts[k + 1 :])
                yield "split moved in", replace(inner, parts=parts)
        case Sum():
            branches = tuple(replace(b, dim=replace(dim, inner=b.dim)) for b in inner.branches)
            yield "split moved in", replace(inner, branches=branches)
        case Pad():
            yield "split moved in", replace(inner, inner=replace(dim, inner=inner.inner))
        case Split():
            exchanged = Split(Split(inner.inner, dim.axis, dim.how), inner.axis, inner.how)
            yield "splits exchanged", exchanged


def _hows(how: How) -> Iterator[How]:
    """Yield other ways to split."""
    if isinstance(how, Widths):
        yield Widths(how.widths[1:] + how.widths[:1])
        yield Widths(how.widths[::-1])
    if isinstance(how, Assigned):
        yield Assigned(how.coordinates[1:] + how.coordinates[:1])
        yield Assigned(how.coordinates[::-1])
    grain = how.grain if isinstance(how, Even) else Number(1)
    yield Even("even", grain)
    yield Even("ceil", grain)
    yield Even("bal", grain)
    yield Even("ceil", Number(1 if grain != Number(1) else 2))


# --- names --------------------------------------------------------------------------------------


def _in_name(rule: Rule, axes: list[str]) -> Iterator[Change]:
    for k, part in enumerate(rule.name.parts):
        for kind, changed in _in_part(part, axes):
            parts = (*rule.name.parts[:k], changed, *rule.name.parts[k + 1 :])
            yield kind, replace(rule, name=Name(parts))


def _in_part(part: NamePart, axes: list[str]) -> Iterator[tuple[str, NamePart]]:
    match part:
        case NameIndex():
            yield "local number", replace(part, local=not part.local)
            if not part.splits:
                return
            yield "index not cut", replace(part, splits=())
            for k, (axis, how) in enumerate(part.splits):
                for other in axes:
                    splits = (*part.splits[:k], (other, how), *part.splits[k + 1 :])
                    yield "index cut otherwise", replace(part, splits=splits)
                for another in _hows(how):
                    splits = (*part.splits[:k], (axis, another), *part.splits[k + 1 :])
                    yield "index cut otherwise", replace(part, splits=splits)
            if len(part.splits) > 1:
                yield "splits exchanged", replace(part, splits=part.splits[::-1])
        case Alternatives():
            for i, j in combinations(range(len(part.texts)), 2):
                texts = list(part.texts)
                texts[i], texts[j] = texts[j], texts[i]
                yield "alternatives exchanged", replace(part, texts=tuple(texts))


# --- flats and pipes ----------------------------------------------------------------------------


def _flats(flat: Flat, axes: list[str]) -> Iterator[Flat]:
    yield replace(flat, order="module" if flat.order != "module" else "reverse")
    for n in (1, 2, 64):
        yield replace(flat, start=Number(n))
        yield replace(flat, end=Number(n))
    axis, how = flat.split
    for other in axes:
        yield replace(flat, split=(other, how))
    for another in _hows(how):
        assert not isinstance(another, Assigned)
        yield replace(flat, split=(axis, another))
    for kind in ("each", "bucket"):
        group = replace(flat.group, kind=kind, name=None, elements=100 * (kind == "bucket"))
        yield replace(flat, group=group)
    if flat.group.kind == "bucket":
        yield replace(flat, group=replace(flat.group, elements=1))
        yield replace(flat, group=replace(flat.group, kind="parts"))
    if flat.group.kind == "parts":
        yield replace(flat, group=replace(flat.group, elements=0 if flat.group.elements else 8))
    for k in range(len(flat.states)):
        if len(flat.states) > 1:
            yield replace(flat, states=(*flat.states[:k], *flat.states[k + 1 :]))


def _stages(text: str) -> Iterator[str]:
    """Yield a stage string with a layer moved from a stage to the next or back."""
    for k in range(len(text) - 1):
        if text[k : k + 2] in ("t|", "|t"):
            yield text[:k] + text[k + 1] + text[k] + text[k + 2 :]
