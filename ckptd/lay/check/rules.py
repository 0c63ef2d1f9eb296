"""Checks of a single rule: axes missing or twice, mesh axes, modifiers, quantization, widths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from difflib import get_close_matches
from itertools import permutations

from ckptd.lay.resolve import (
    Equation,
    Family,
    Finding,
    MeshShape,
    Path,
    Resolved,
    independent,
    paths,
)
from ckptd.lay.scales import SCALE_KINDS
from ckptd.lay.syntax import show, tree

_MAX_TAGS = 6


def rule_findings(resolved: Resolved) -> Iterator[Finding]:
    """Yield what is wrong with each rule by itself."""
    mesh = resolved.mesh or MeshShape(1, {}, {})
    # Once for all rules: a layout may have as many rules as its space has tensors.
    axes = {a for f in resolved.families.values() for a in f.axes}
    axes |= {*resolved.sizes, *resolved.refined}
    for equation in resolved.equations:
        found = paths(equation.dims)
        yield from _atoms(equation, found, mesh)
        yield from _mesh_axes(equation, found, mesh)
        yield from _local_axes(equation, found, mesh)
        yield from _modifiers(equation, mesh)
        yield from _values(equation, axes, mesh)


def signature(family: Family) -> str:
    """Return a logical tensor as a space writes it: ``L{l}.q[kv rep hd h]``."""
    return f"{family.name}[{' '.join(family.axes[family.indexes :])}]"


# --- each axis of a tensor exactly once ---------------------------------------------------------


def _atoms(equation: Equation, found: Sequence[Path], mesh: MeshShape) -> Iterator[Finding]:
    indexes = [p.axis for p in equation.name.parts if isinstance(p, tree.NameIndex)]
    for axis in indexes:
        if axis not in mesh.local and not any(axis in f.axes for f in equation.families.values()):
            families = " or ".join(sorted({signature(f) for f in equation.families.values()}))
            message = f"the name has the index {{{axis}}}, which is not an axis of {families}"
            note = (
                f"{axis} is an axis of the mesh: write {{a@{axis}}}, with the axis a that it cuts"
            )
            yield _finding(equation, "index", message, (note,) if axis in mesh.extents else ())
    wrong = [
        finding
        for path in found
        for finding in _path(equation, path, [a for a in indexes if a not in mesh.local])
    ]
    yield from _repeated(equation, [a for a in indexes if a not in mesh.extents])
    order = _tag_order(equation, found, indexes) if wrong else None
    if order is None:
        yield from wrong
        return
    written = "|".join(p.tags[0] for p in found)
    yield _finding(
        equation,
        "tag-order",
        f"the order of the tags differs from that of the parts: {wrong[0].message}",
        (f"instead of {written}, the order {'|'.join(order)} gives each tensor its axes",),
    )


def _repeated(equation: Equation, indexes: Sequence[str]) -> Iterator[Finding]:
    """Yield the tensors that each number of an index would have again, as they lack the axis."""
    if any(isinstance(m, tree.Alias) for m in equation.modifiers):
        return
    for tags, family in equation.families.items():
        lacking = [a for a in indexes if a not in family.axes]
        others = [f for f in equation.families.values() if set(lacking) & set(f.axes)]
        if lacking and others:
            axis = next(a for a in lacking if any(a in f.axes for f in others))
            message = (
                f"{signature(family)} (tag {'.'.join(tags)}) has no axis {axis}: each tensor of "
                f"{{{axis}}} in the name would hold the same elements again"
            )
            notes = (
                f"declare it for each {axis} in the space, as {signature(others[0])} is",
                "or give it its own rule, and mark these as copies with alias",
            )
            yield _finding(equation, "duplicate", message, notes)


def _path(equation: Equation, path: Path, indexes: Sequence[str]) -> Iterator[Finding]:
    """Yield which axes one way misses, has twice, or has and should not."""
    family = equation.families[path.tags]
    tag = f" (tag {'.'.join(path.tags)})" if path.tags else ""
    mine = [a for a in indexes if a in family.axes]
    counts = Counter([*mine, *(leaf.atom for leaf in path.leaves), *_pins(equation, family)])
    unknown = [a for a in counts if a not in family.axes]
    missing = [a for a in family.axes if not counts[a]]
    for axis in unknown:
        near = get_close_matches(axis, missing or family.axes, n=1, cutoff=0.3)
        notes = (f"did you mean {near[0]}?",) if near else ()
        message = f"{axis} is not an axis of {signature(family)}{tag}"
        yield _finding(equation, "unknown-axis", message, notes)
    if missing and not unknown:
        names = " and ".join(missing)
        message = f"this rule leaves out {names} of {signature(family)}{tag}"
        index = missing[0] in family.axes[: family.indexes]
        where = f"{{{missing[0]}}} in the name, or " if index else ""
        notes = (f"write {where}{missing[0]} in the dimension that runs through it",)
        yield _finding(equation, "missing-axis", message, notes)
    for axis, count in counts.items():
        if count > 1 and axis in family.axes:
            message = f"{axis} of {signature(family)}{tag} occurs {count} times instead of once"
            yield _finding(equation, "axis-twice", message, _either(equation, path, axis))


def _either(equation: Equation, path: Path, axis: str) -> tuple[str, ...]:
    """Return what to write instead of an axis that stands in the name and in a dimension."""
    index = next(
        (p for p in equation.name.parts if isinstance(p, tree.NameIndex) and p.axis == axis), None
    )
    dims = [leaf.dim for leaf in path.leaves if leaf.atom == axis]
    if axis in equation.pinned:
        return (f"the reference says {axis}={equation.pinned[axis]}: write {{{axis}}} there",)
    if index is None or not dims:
        return ()
    cut = "".join(f"@{a}" for a, _ in index.splits)
    return (
        f"a list of tensors has {show(index)} in the name, and no {axis} in dimension {dims[0]}",
        f"one tensor with all of them has {axis}{cut} in a dimension, and no {axis} in the name",
    )


def _pins(equation: Equation, family: Family) -> list[str]:
    return [a for a in equation.pinned if a in family.axes]


def _tag_order(
    equation: Equation, found: Sequence[Path], indexes: Sequence[str]
) -> tuple[str, ...] | None:
    """Return an order of the tags with which all parts have the axes of their tensors."""
    if not 1 < len(found) <= _MAX_TAGS or any(len(p.tags) != 1 for p in found):
        return None
    tags = [p.tags[0] for p in found]
    for order in permutations(tags):
        if list(order) != tags and all(
            _fits(equation, path, equation.families[tag,], indexes)
            for path, tag in zip(found, order, strict=True)
        ):
            return order
    return None


def _fits(equation: Equation, path: Path, family: Family, indexes: Iterable[str]) -> bool:
    mine = [a for a in indexes if a in family.axes]
    have = [*mine, *(leaf.atom for leaf in path.leaves), *_pins(equation, family)]
    return sorted(have) == sorted(family.axes)


# --- axes of the mesh ---------------------------------------------------------------------------


def _mesh_axes(equation: Equation, found: Sequence[Path], mesh: MeshShape) -> Iterator[Finding]:
    names = [
        (axis, how, "the name")
        for p in equation.name.parts
        if isinstance(p, tree.NameIndex)
        for axis, how in p.splits
    ]
    reported: set[str] = set()
    for axis, how, _ in (*names, *((s.axis, s.how, "") for p in found for _, s in p.splits)):
        if axis not in reported:
            message = _unknown_axis(axis, mesh) or _widths(axis, how, mesh)
            if message:
                reported.add(axis)
                known = {a for f in equation.families.values() for a in f.axes}
                behind = f"'@' needs an axis of the mesh, but {axis} is an axis of the tensor"
                notes = (behind,) if axis in known - set(mesh.extents) else ()
                yield _finding(equation, "mesh-axis", message, notes)
    if reported:
        return
    for path in found:
        cuts = [
            *((a, w) for a, _, w in names),
            *((s.axis, f"dimension {k}") for k, s in path.splits),
        ]
        finding = _cut_twice(equation, path, cuts, mesh)
        if finding is not None:
            yield finding
            return


def _local_axes(equation: Equation, found: Sequence[Path], mesh: MeshShape) -> Iterator[Finding]:
    """Yield what is wrong with the local axes of a rule: a rank has all of their coordinates."""
    indexes = [p for p in equation.name.parts if isinstance(p, tree.NameIndex)]
    written = {p.axis for p in indexes}
    fixed = {m.axis for m in equation.modifiers if isinstance(m, tree.On)}
    for axis in mesh.local:
        if any(s.axis == axis for p in found for _, s in p.splits):
            message = f"{axis} is a local axis: it cuts indexes in names, and no dimension"
            yield _finding(equation, "mesh-axis", message)
        cut = [p for p in indexes if any(a == axis for a, _ in p.splits)]
        if axis in written and not cut and axis not in fixed:
            message = f"the name has the index {{{axis}}}, and nothing in it is cut over {axis}"
            notes = (f"if only one stage has the tensor, say which: on {axis}=0",)
            yield _finding(equation, "index", message, notes)
        if axis not in written | fixed and any(p.local for p in cut):
            message = f"several tensors of a rank would have one name: each {axis} counts from 0"
            notes = (f"write {{{axis}}} in the name too, or the global number, without '#'",)
            yield _finding(equation, "index", message, notes)


def _unknown_axis(axis: str, mesh: MeshShape) -> str | None:
    if axis in mesh.extents:
        return None
    if not mesh.extents:
        return f"this layout is 'on none', so it has no mesh axis {axis}"
    near = get_close_matches(axis, mesh.extents, n=1)
    known = f"did you mean {near[0]}?" if near else f"the mesh has {' '.join(mesh.extents)}"
    return f"unknown mesh axis {axis}; {known}"


def _widths(axis: str, how: object, mesh: MeshShape) -> str | None:
    if isinstance(how, tree.Widths) and len(how.widths) != mesh.extents[axis]:
        return f"{len(how.widths)} widths for @{axis}, which has {mesh.extents[axis]} parts"
    if isinstance(how, tree.Assigned) and max(how.coordinates) >= mesh.extents[axis]:
        most = max(how.coordinates)
        where = f"number {how.coordinates.index(most)} to {axis}={most}"
        return f"@{axis}:at assigns {where}, and {axis} has {mesh.extents[axis]} parts"
    return None


def _cut_twice(
    equation: Equation, path: Path, cuts: Sequence[tuple[str, str]], mesh: MeshShape
) -> Finding | None:
    """Return a finding if the cuts on one way depend on each other."""
    tag = f" of tag {'.'.join(path.tags)}" if path.tags else ""
    for k, (axis, where) in enumerate(cuts):
        for other, before in cuts[:k]:
            if other == axis:
                place = f"{where} twice" if where == before else f"{before} and {where}"
                message = (
                    f"@{axis} cuts {place}{tag}: no rank would hold what lies off the diagonal"
                )
                return _finding(equation, "cut-twice", message)
            if not independent(mesh, (other, axis)):
                message = f"@{other} and @{axis}{tag} cut over the same ranks"
                notes = ("some pairs of their coordinates have no rank, so parts would be lost",)
                return _finding(equation, "cut-twice", message, notes)
    if not independent(mesh, [a for a, _ in cuts]):
        axes = " ".join(f"@{a}" for a, _ in cuts)
        return _finding(equation, "cut-twice", f"{axes}{tag} together cut over the same ranks")
    for modifier in equation.modifiers:
        if isinstance(modifier, tree.On) and modifier.axis in mesh.extents:
            for axis, where in cuts:
                if not independent(mesh, (axis, modifier.axis)):
                    message = f"@{axis} cuts {where}, and 'on {modifier.axis}' keeps one part only"
                    return _finding(equation, "uncovered", message)
    return None


# --- modifiers, grains, multiples ---------------------------------------------------------------


def _modifiers(equation: Equation, mesh: MeshShape) -> Iterator[Finding]:
    seen: set[str] = set()
    for modifier in equation.modifiers:
        if isinstance(modifier, tree.On | tree.Average):
            unknown = _unknown_axis(modifier.axis, mesh)
            if unknown:
                yield _finding(equation, "mesh-axis", unknown)
                continue
        if isinstance(modifier, tree.On):
            extent = mesh.extents[modifier.axis]
            if modifier.axis in seen:
                yield _finding(
                    equation, "on", f"'on {modifier.axis}' comes twice: no rank has both"
                )
            if modifier.coordinate != "last" and modifier.coordinate >= extent:
                message = f"'on {modifier.axis}={modifier.coordinate}' matches no rank"
                notes = (f"{modifier.axis} has the coordinates 0 to {extent - 1}",)
                yield _finding(equation, "on", message, notes)
            seen.add(modifier.axis)
        if isinstance(modifier, tree.Average) and modifier.axis in _cutting(equation):
            message = (
                f"{modifier.kind}({modifier.axis}) combines replicas, and @{modifier.axis} cuts"
            )
            yield _finding(equation, "average", message)
        if isinstance(modifier, tree.Quantized):
            yield from _quantized(equation, modifier)


def _quantized(equation: Equation, modifier: tree.Quantized) -> Iterator[Finding]:
    if len(modifier.block) != len(equation.dims) or 0 in modifier.block:
        block = " ".join(map(str, modifier.block))
        message = f"the block [{block}] has to have one length above 0 for each dimension"
        yield _finding(equation, "block", f"{message} ({len(equation.dims)})")
    for scale in filter(None, (modifier.scale, modifier.overall)):
        if not any(isinstance(p, tree.NameIndex) and p.axis == "name" for p in scale.parts):
            yield _finding(
                equation, "block", "the name of the scales lacks {name}: all would share one"
            )
    if (modifier.overall is None) != (modifier.kind != "float8_e4m3fn"):
        message = "scales of float8_e4m3fn need overall=NAME, and other scales must not have it"
        yield _finding(equation, "block", message)
    if modifier.kind not in SCALE_KINDS:
        message = f"scales are {', '.join(filter(None, SCALE_KINDS))}, and not {modifier.kind}"
        yield _finding(equation, "block", message)


def _cutting(equation: Equation) -> set[str]:
    out = {s.axis for p in paths(equation.dims) for _, s in p.splits}
    return out | {
        a for p in equation.name.parts if isinstance(p, tree.NameIndex) for a, _ in p.splits
    }


def _values(equation: Equation, axes: AbstractSet[str], mesh: MeshShape) -> Iterator[Finding]:
    """Yield the names in grains and multiples that have no meaning, or two."""
    for name in sorted({n for d in equation.dims for v in _values_in(d) for n in _names(v)}):
        if name not in axes and name not in mesh.extents:
            message = f"{name} is neither an axis of the space nor of the mesh"
            yield _finding(equation, "value", message, (f"declare it: let {name} = <number>",))
        elif name in axes and name in mesh.extents:
            message = f"{name} may be the axis of the space or that of the mesh"
            yield _finding(equation, "value", message, ("rename one of them",))


def _values_in(dim: tree.Dim) -> Iterator[tree.Value]:
    match dim:
        case tree.Split():
            if isinstance(dim.how, tree.Even):
                yield dim.how.grain
            yield from _values_in(dim.inner)
        case tree.Pad():
            yield dim.multiple
            yield from _values_in(dim.inner)
        case tree.Product():
            for part in dim.parts:
                yield from _values_in(part)
        case tree.Sum():
            for branch in dim.branches:
                yield from _values_in(branch.dim)


def _names(value: tree.Value) -> set[str]:
    if isinstance(value, tree.Arithmetic):
        return _names(value.left) | _names(value.right)
    return {value.name} if isinstance(value, tree.Size) else set()


def _finding(equation: Equation, code: str, message: str, notes: tuple[str, ...] = ()) -> Finding:
    return Finding(code, message, equation.at, equation.text, notes)
