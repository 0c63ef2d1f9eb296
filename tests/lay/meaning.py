"""What a dimension means, element by element: the definition of ``005-lay.md`` written down.

An entry is ``(tags, {axis: index})`` or a fill, given as its value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise, product
from typing import TypeAlias

from hypothesis import strategies as st

from ckptd.lay.boxes import DimBox, Found
from ckptd.lay.resolve import ValueScope, evaluate
from ckptd.lay.syntax.tree import (
    Atom,
    Branch,
    Dim,
    Even,
    How,
    Number,
    One,
    Pad,
    Product,
    Split,
    Sum,
    Widths,
)

Entry: TypeAlias = tuple[tuple[str, ...], dict[str, int]] | float


def part_of(n: int, how: How, extent: int, coordinate: int, scope: ValueScope) -> range:
    """Deal the elements out one by one."""
    if isinstance(how, Widths):
        start = sum(how.widths[:coordinate])
        return range(start, start + how.widths[coordinate])
    grain = evaluate(how.grain, scope)
    units = [range(i, min(n, i + grain)) for i in range(0, n, grain)]
    counts = [0] * extent
    if how.rule == "bal":
        for i in range(len(units)):
            counts[i % extent] += 1
    else:
        most = -(-len(units) // extent)
        for i in range(len(units)):
            counts[i // most] += 1
    start = sum(counts[:coordinate])
    mine = [e for u in units[start : start + counts[coordinate]] for e in u]
    return range(mine[0], mine[-1] + 1) if mine else range(0)


def seq(dim: Dim, scope: ValueScope, coordinates: Mapping[str, int] | None) -> list[Entry]:
    """All entries of a dimension; None: the stored form."""
    match dim:
        case Atom() if dim.name in scope.refined:
            return seq(scope.refined[dim.name], scope, coordinates)
        case Atom():
            return [((), {dim.name: i}) for i in range(scope.sizes[dim.name])]
        case One():
            return [((), {})]
        case Product():
            return list(_products([seq(p, scope, coordinates) for p in dim.parts]))
        case Sum():
            return [
                e if isinstance(e, float) else ((b.tag, *e[0]), e[1])
                for b in dim.branches
                for e in seq(b.dim, scope, coordinates)
            ]
        case Split():
            inner = seq(dim.inner, scope, coordinates)
            if coordinates is None:
                return inner
            extent, mine = scope.extents[dim.axis], coordinates[dim.axis]
            return [inner[i] for i in part_of(len(inner), dim.how, extent, mine, scope)]
        case Pad():
            inner = seq(dim.inner, scope, coordinates)
            multiple = evaluate(dim.multiple, scope)
            return inner + [float(dim.fill)] * (-len(inner) % multiple)
    raise AssertionError(dim)


def _products(parts: list[list[Entry]]) -> Iterator[Entry]:
    for entries in product(*parts):
        fill = next((e for e in entries if isinstance(e, float)), None)
        if fill is not None:
            yield fill
            continue
        tags: tuple[str, ...] = ()
        axes: dict[str, int] = {}
        for e in entries:
            assert not isinstance(e, float)
            tags, axes = tags + e[0], axes | e[1]
        yield tags, axes


def elements(found: list[Found]) -> dict[int, Entry]:
    """Position by position what boxes say."""
    out: dict[int, Entry] = {}
    for f in found:
        if isinstance(f, DimBox):
            for ids in product(*(range(r.size) for r in f.runs)):
                at = f.start + sum(i * r.stride for i, r in zip(ids, f.runs, strict=True))
                assert at not in out
                out[at] = (
                    f.tags,
                    {r.axis: r.start + i for i, r in zip(ids, f.runs, strict=True)},
                )
        else:
            for ids in product(*(range(n) for n, _ in f.steps)):
                at = f.start + sum(i * s for i, (_, s) in zip(ids, f.steps, strict=True))
                assert at not in out
                out[at] = f.value
    return out


EXTENTS = {"tp": 2, "dp": 3, "ep": 2}


@st.composite
def dimensions(draw: st.DrawFn, *, inner_pads: bool = True) -> tuple[Dim, ValueScope]:
    """Draw a dimension whose axes are all different on each way, and its scope."""
    sizes: dict[str, int] = {}
    scope = ValueScope(sizes, EXTENTS)
    counter = iter(range(1000))

    def atom() -> Dim:
        name = f"a{next(counter)}"
        sizes[name] = draw(st.integers(0, 4))
        return Atom(name)

    def how(n: int, extent: int) -> How:
        kind = draw(st.sampled_from(["even", "ceil", "bal", "widths"]))
        grain = draw(st.integers(1, 3))
        if kind == "even" and -(-n // grain) % extent == 0:
            return Even("even", Number(grain))
        if kind == "widths":
            cuts = sorted(draw(st.integers(0, n)) for _ in range(extent - 1))
            ends = [0, *cuts, n]
            return Widths(tuple(b - a for a, b in pairwise(ends)))
        return Even("bal" if kind == "bal" else "ceil", Number(grain))

    def node(depth: int, axes: frozenset[str], room: int) -> Dim:
        kind = draw(st.sampled_from(["atom", "one", "product", "sum", "split", "split", "pad"]))
        if depth == 0 or kind == "atom":
            return atom()
        if kind == "one":
            return One()
        if kind == "product":
            left = draw(st.sets(st.sampled_from(sorted(EXTENTS)), max_size=3))
            return Product(
                (node(depth - 1, axes & left, room // 2), node(depth - 1, axes - left, room // 2))
            )
        if kind == "sum":
            branches = [
                Branch(f"t{next(counter)}", node(depth - 1, axes, room // 2))
                for _ in range(draw(st.integers(2, 3)))
            ]
            return Sum(tuple(branches))
        if kind == "pad" and inner_pads:
            return Pad(
                node(depth - 1, axes, room),
                Number(draw(st.integers(1, 5))),
                float(draw(st.integers(1, 3))),
            )
        if kind == "split" and axes:
            axis = draw(st.sampled_from(sorted(axes)))
            inner = node(depth - 1, axes - {axis}, room)
            lengths = {len(seq(inner, scope, c)) for c in places()}
            extent = EXTENTS[axis]
            # Recorded widths and even parts only fit when all coordinates have one length.
            if len(lengths) == 1:
                return Split(inner, axis, how(lengths.pop(), extent))
            return Split(inner, axis, Even(draw(st.sampled_from(["ceil", "bal"]))))
        return atom()

    return node(4, frozenset(EXTENTS), 64), scope


def places() -> list[dict[str, int]]:
    """All coordinates on the mesh of these tests."""
    return [
        dict(zip(EXTENTS, c, strict=True)) for c in product(*(range(n) for n in EXTENTS.values()))
    ]
