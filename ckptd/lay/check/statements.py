"""Checks of statements that are no rules: ``flat``, ``pipe``, ``obj``, ``stored``, ``files``."""

from __future__ import annotations

from collections.abc import Iterator

from ckptd.lay.indexes import BUFFER
from ckptd.lay.resolve import Finding, MeshShape, Resolved
from ckptd.lay.syntax import show
from ckptd.lay.syntax.tree import Flat, Name, NameIndex, Object, Pipe, Text


def statement_findings(resolved: Resolved) -> Iterator[Finding]:
    """Yield what is wrong with the statements of a layout that are no rules."""
    mesh = resolved.mesh or MeshShape(1, {}, {})
    for flat in resolved.flats:
        yield from _flat(flat, resolved, mesh)
    for pipe in resolved.pipes:
        yield from _pipe(pipe, resolved)
    for held in resolved.objects:
        for axis in held.axes:
            if axis not in mesh.extents:
                yield _finding(held, f"unknown mesh axis {axis}")
    if "{name}" not in resolved.params:
        message = f'stored "{resolved.params}" lacks {{name}}: all tensors would have one name'
        yield Finding("stored", message)
    for template in resolved.state_templates if resolved.states else ():
        lacking = [p for p in ("{name}", "{state}") if p not in template]
        if lacking:
            message = f'states "{template}" lacks {lacking[0]}: states would share names'
            yield Finding("stored", message)


def _flat(flat: Flat, resolved: Resolved, mesh: MeshShape) -> Iterator[Finding]:
    axis = flat.split[0]
    if axis not in mesh.extents:
        yield _finding(flat, f"unknown mesh axis {axis}")
    elif axis in mesh.local:
        yield _finding(flat, f"{axis} is a local axis: all its parts lie on the same rank")
    if flat.called is not None:
        yield from _called(flat, flat.called)
    known = {s.name for s in resolved.states} | {"params", "*"}
    for state in flat.states:
        if state not in known:
            names = ", ".join(sorted(known - {"*"}))
            yield _finding(flat, f"unknown state {state}; the space has {names}")


def _called(flat: Flat, called: Name) -> Iterator[Finding]:
    """Yield what is wrong with the name of a flat's buffers."""
    if flat.group.kind == "each":
        yield _finding(flat, "each tensor is a buffer and keeps its name: leave 'as' out")
        return
    parts = flat.group.name.parts if flat.group.name else ()
    known = {p.axis for p in parts if isinstance(p, NameIndex)} | {BUFFER}
    names = ", ".join(f"{{{n}}}" for n in sorted(known))
    for part in called.parts:
        index = isinstance(part, NameIndex) and part.axis in known and not part.splits
        if not isinstance(part, Text) and not index:
            message = f"{show(part)} is unknown in the name of a buffer: use {names}"
            yield _finding(flat, message)


def _pipe(pipe: Pipe, resolved: Resolved) -> Iterator[Finding]:
    """Yield a finding if no index is cut as a pipe says."""
    used = {
        (p.axis, tuple(axis for axis, _ in p.splits))
        for e in resolved.equations
        for p in e.name.parts
        if isinstance(p, NameIndex) and p.splits
    }
    if (pipe.axis, pipe.splits) not in used:
        other = [splits for axis, splits in used if axis == pipe.axis]
        message = "no name is cut like this pipe"
        if other:
            message += f": names have {{{pipe.axis}@{'@'.join(other[0])}}}"
        at, text = pipe.at, show(pipe)
        yield Finding("pipe", message, at, text, severity="warning")


def _finding(statement: Flat | Object, message: str) -> Finding:
    return Finding("statement", message, statement.at, show(statement))
