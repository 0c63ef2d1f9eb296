"""Which constructs occur in a program: so that none is missed by accident."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptd.lay.resolve import Equation, Resolved
from ckptd.lay.syntax.tree import (
    UNIT,
    Alias,
    Assigned,
    Atom,
    Dim,
    Even,
    File,
    For,
    Layout,
    Let,
    NameIndex,
    On,
    One,
    Pad,
    Product,
    Replicas,
    Split,
    Sum,
    Widths,
)

__all__ = ["CONSTRUCTS", "constructs"]

_CONSTRUCTS = """
    product, product in a product, sum, sum in a sum, sum in a product, two sums, split of an
    axis, split of a product, split of a sum, split in a sum, split in some branches only, split
    in a product, split of a split, even, ceil, bal, widths, assigned, grain, pad, split of a pad,
    pad inside of a product, one, refined axis, its parts, no dimensions, index, whole stack, index
    split, index split twice, local number, virtual stages, pipe, pipe over virtual stages, on,
    for, the same name for others, tensors of some numbers, alias, replicas, flat each, flat
    group, flat group by index, flat bucket, flat parts, parts until full, named buffers, two
    flats, flat of params, flat of states, flat of all, reverse, robin, start, end, grain of a flat,
    two meshes, axis seen as finer ones, split over a finer axis, no mesh, one rank, states,
    other names of states
"""
_TABLES = {Widths: "widths", Assigned: "assigned"}
CONSTRUCTS = tuple(" ".join(c.split()) for c in _CONSTRUCTS.split(","))


def constructs(file: File, layouts: Sequence[Resolved]) -> set[str]:
    """Return which constructs occur in a program."""
    found: set[str] = set()
    for layout in layouts:
        found |= set(_in_layout(layout))
        for equation in layout.equations:
            found |= set(_in_equation(equation))
        names = [e.name for e in layout.equations]
        found |= {"the same name for others"} if len(set(names)) < len(names) else set()
        found |= {"tensors of some numbers" for f in layout.families.values() if f.only}
    for item in file.items:
        if isinstance(item, Layout):
            found |= {"two meshes"} if len(item.meshes) > 1 else set()
        elif isinstance(item, Let):
            found.add("refined axis")
    return found


def _in_layout(layout: Resolved) -> Iterator[str]:
    mesh = layout.mesh
    yield "states" if layout.states else ""
    yield "other names of states" if layout.other_states else ""
    yield "no mesh" if mesh is None else "one rank" if mesh.world == 1 else ""
    yield "axis seen as finer ones" if mesh and any("_" in a for a in mesh.extents) else ""
    for pipe in layout.pipes:
        yield "pipe"
        yield "pipe over virtual stages" if "vpp" in pipe.splits else ""
    yield "two flats" if len(layout.flats) > 1 else ""
    for flat in layout.flats:
        yield f"flat {flat.group.kind}"
        name = flat.group.name
        yield (
            "flat group by index"
            if name and any(isinstance(p, NameIndex) for p in name.parts)
            else ""
        )
        yield "named buffers" if flat.called is not None else ""
        yield "parts until full" if flat.group.kind == "parts" and flat.group.elements else ""
        yield flat.order if flat.order != "module" else ""
        yield "start" if flat.start != UNIT else ""
        yield "end" if flat.end != UNIT else ""
        how = flat.split[1]
        yield "grain of a flat" if isinstance(how, Even) and how.grain != UNIT else ""
        yield "flat of all" if "*" in flat.states else ""
        yield "flat of params" if "params" in flat.states else ""
        yield "flat of states" if {"m", "s"} & set(flat.states) else ""


def _in_equation(equation: Equation) -> Iterator[str]:
    for m in equation.modifiers:
        yield {On: "on", For: "for", Alias: "alias", Replicas: "replicas"}[type(m)]
    for part in equation.name.parts:
        if isinstance(part, NameIndex):
            yield "index"
            yield ("", "index split", "index split twice")[len(part.splits)]
            yield "local number" if part.local else ""
            yield "virtual stages" if "vpp" in (part.axis, *(a for a, _ in part.splits)) else ""
    yield "" if equation.dims else "no dimensions"
    for dim in equation.dims:
        yield from _in_dim(dim, ())


def _in_dim(dim: Dim, outside: tuple[type, ...]) -> Iterator[str]:
    match dim:
        case Atom():
            yield "whole stack" if dim.name in ("l", "e") else ""
            yield "its parts" if dim.name[-1] in "xy" else ""
        case One():
            yield "one"
        case Product():
            yield "product"
            yield "product in a product" if Product in outside[-1:] else ""
            yield "two sums" if sum(isinstance(p, Sum) for p in dim.parts) > 1 else ""
        case Sum():
            yield "sum"
            yield "sum in a sum" if Sum in outside else ""
            yield "sum in a product" if Product in outside else ""
            cut = [any(isinstance(d, Split) for d in _below(b.dim)) for b in dim.branches]
            yield "split in a sum" if any(cut) else ""
            yield "split in some branches only" if any(cut) and not all(cut) else ""
        case Split():
            kinds = {Atom: "an axis", Product: "a product", Sum: "a sum", Pad: "a pad"}
            yield f"split of {kinds.get(type(dim.inner), 'a split')}"
            yield "split in a product" if Product in outside else ""
            yield dim.how.rule if isinstance(dim.how, Even) else _TABLES[type(dim.how)]
            yield "grain" if isinstance(dim.how, Even) and dim.how.grain != UNIT else ""
            yield "split over a finer axis" if "_" in dim.axis else ""
        case Pad():
            yield "pad"
            yield "pad inside of a product" if Product in outside else ""
    for child in _children(dim):
        yield from _in_dim(child, (*outside, type(dim)))


def _children(dim: Dim) -> tuple[Dim, ...]:
    match dim:
        case Product():
            return dim.parts
        case Sum():
            return tuple(b.dim for b in dim.branches)
        case Split() | Pad():
            return (dim.inner,)
    return ()


def _below(dim: Dim) -> Iterator[Dim]:
    yield dim
    for child in _children(dim):
        yield from _below(child)
