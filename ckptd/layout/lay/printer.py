"""Prints the syntax tree, so that parsing what is printed gives the same tree."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from ckptd.layout.lay import printer_dims as low
from ckptd.layout.lay.dims import UNIT, Branch, Dim, Number, Operation, Size, Value
from ckptd.layout.lay.lexer import quote
from ckptd.layout.lay.modifiers import Alias, Modifier
from ckptd.layout.lay.name import Glob, Name, NamePart, Text
from ckptd.layout.lay.parser_let import is_path
from ckptd.layout.lay.parser_name import DOTTED
from ckptd.layout.lay.parser_value import UNITS
from ckptd.layout.lay.printer_dims import (
    show_dims,
    show_modifier,
    show_name,
    show_number,
    show_value,
)
from ckptd.layout.lay.program import (
    Default,
    Family,
    File,
    Files,
    Flat,
    FlatGroup,
    Layout,
    Let,
    Mesh,
    MeshAxis,
    Object,
    Pipe,
    Reshard,
    Rule,
    Scalar,
    Space,
    State,
    Statement,
    Stored,
    Use,
)

__all__ = ["Shown", "head", "show", "show_right", "show_states"]

Shown: TypeAlias = (
    File
    | Mesh
    | MeshAxis
    | Let
    | Space
    | Family
    | State
    | Scalar
    | Layout
    | Statement
    | FlatGroup
    | Reshard
    | Dim
    | Branch
    | Value
    | Name
    | NamePart
    | Modifier
)
"""Everything that a program is made of."""

INDENT = "  "


def show(node: Shown) -> str:
    """Return the text of a part of a program.

    Parameters
    ----------
    node
        Any node. Parsing its text as what it is gives an equal node, if every word in it is one
        (axes, tags and the like: a letter or ``_``, then letters, digits and ``_``).

    Returns
    -------
    str
        One line, or several for a `Space`, a `Layout` and a `File`, which ends with a line end.
    """
    match node:
        case File(items):
            return _show_file(items)
        case Space() | Layout():
            return "\n".join((head(node), *(INDENT + line for line in _body(node)), "}"))
        case Number() | Size() | Operation():
            return show_value(node)
        case Name():
            return show_name(node)
        case Branch():
            return low.show_branch(node)
    return _show_item(node) or _show_statement(node) or _show_low(node)


def _show_low(node: Shown) -> str:
    """Return a part of a rule: all that `show` did not tell apart is one of three."""
    if isinstance(node, NamePart):
        return low.show_part(node)
    if isinstance(node, Modifier):
        return show_modifier(node)
    if isinstance(node, Dim):
        return low.show_dim(node)
    raise TypeError(f"{type(node).__name__} is no part of a program")


# --- a program ----------------------------------------------------------------------------------


def _show_file(items: Iterable[Mesh | Let | Space | Layout | Reshard | Use]) -> str:
    """Return a program: blocks stand apart, single lines stand together."""
    out: list[str] = []
    before = None
    for item in items:
        block = isinstance(item, Space | Layout)
        if out and (block or isinstance(before, Space | Layout)):
            out.append("")
        out.append(show(item))
        before = item
    return "\n".join([*out, ""]) if out else ""


def head(node: Space | Layout) -> str:
    """Return the first line of a space or layout, with its brace."""
    if isinstance(node, Space):
        return f"space {node.name} {{"
    of = f" of {node.space}" if node.space else ""
    return f"layout {node.name}{of} on {', '.join(node.meshes) or 'none'} {{"


def _body(node: Space | Layout) -> list[str]:
    if isinstance(node, Layout):
        return [show(s) for s in node.statements]
    lines = [show(f) for f in node.families]
    lines += [show_states(node.states)] if node.states else []
    return [*lines, *(show(s) for s in node.scalars), *(show(let) for let in node.lets)]


def _show_item(node: Shown) -> str | None:
    match node:
        case Mesh(name, axes, local):
            end = f" local {_axes(local)}" if local else ""
            return f"mesh {name} = {_axes(axes)}{end}"
        case MeshAxis(name, extent, parts):
            end = f"=({_axes(parts)})" if parts else ""
            return f"{name}:{extent}{end}"
        case Let(name, value):
            return f"let {name} = {_show_let(value)}"
        case Family(name, atoms, only):
            # A bare name that begins with a dot goes on from the family before it.
            first = name.parts[0]
            dot = isinstance(first, Text) and first.text.startswith(".")
            text = f"{show_name(name, quoted=dot)}[{' '.join(atoms)}]"
            return _join(text, *map(show_modifier, only))
        case State(name, stored):
            return name if name == stored else f"{name}={_dotted(stored)}"
        case Scalar(name, per):
            return f"scalar {name}({per})"
        case Reshard(source, target, via, budget):
            end = "" if budget is None else f" budget {_bytes(budget)}"
            return f"reshard {source} -> {target} via {via}{end}"
    return None


def _axes(axes: tuple[MeshAxis, ...]) -> str:
    return " ".join(map(show, axes))


def show_states(states: tuple[State, ...]) -> str:
    """Return the ``follow`` line of a space."""
    return f"follow {', '.join(map(show, states))}"


def _show_let(value: Dim | Value | Name) -> str:
    """Return what a ``let`` stands for, such that its beginning says which of the three it is."""
    if isinstance(value, Value):
        text = show_value(value)
        call = text.startswith(("lcm(", "min(", "max("))
        return text if text[0].isdigit() or text[0] == "(" or call else f"size {text}"
    if isinstance(value, Name):
        globs = any(isinstance(p, Glob) for p in value.parts)
        plain = show_name(value)
        return show_name(value, quoted=plain[0].isdigit() or (globs and not is_path(value)))
    text = low.show_dim(value)
    return text if text[0] == "(" and text[-1] == ")" else f"[{text}]"


def _bytes(size: int) -> str:
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]}{unit}"
    return f"{size}B"


def _dotted(text: str) -> str:
    return text if DOTTED.fullmatch(text) else quote(text)


# --- statements ---------------------------------------------------------------------------------


def _show_statement(node: Shown) -> str | None:
    match node:
        case Use(name):
            return f"use {name}"
        case Rule():
            return f"{show_name(node.name)} = {show_right(node)}"
        case Default(dims, modifiers):
            return _join("default", show_dims(dims), *map(show_modifier, modifiers))
        case Flat():
            return _show_flat(node)
        case FlatGroup():
            return _show_group(node)
        case Pipe(axis, splits, stages):
            return f"pipe {axis}{''.join(f'@{m}' for m in splits)} {quote(stages)}"
        case Object(name, axes, change, reduce):
            end = f"={reduce}" if change == "reduce" else ""
            return f"obj {_dotted(name)}[{' '.join(axes)}] on-change {change}{end}"
        case Files(name):
            return f"files {show_name(name, quoted=True)}"
        case Stored():
            return _show_stored(node)
    return None


def show_right(rule: Rule) -> str:
    """Return what stands right of the ``=`` of a rule."""
    modifiers = rule.modifiers
    if rule.reference is None:
        return _join(*map(show_modifier, modifiers))
    alias = bool(modifiers) and isinstance(modifiers[0], Alias)
    dims = show_dims(rule.dims) if rule.dims or not alias else ""
    text = f"{'alias ' if alias else ''}{show_name(rule.reference)}{dims}"
    return _join(text, *map(show_modifier, modifiers[alias:]))


def _show_flat(flat: Flat) -> str:
    axis, how = flat.split
    return _join(
        f"flat {_show_group(flat.group)} @{axis}{low.show_how(how)} of {','.join(flat.states)}",
        "" if flat.order == "module" else f"order {flat.order}",
        "" if flat.start == UNIT else f"start/{show_value(flat.start)}",
        "" if flat.end == UNIT else f"end/{show_value(flat.end)}",
        *map(show_modifier, flat.modifiers),
    )


def _show_group(group: FlatGroup) -> str:
    if group.kind == "bucket":
        return f"bucket {show_number(group.elements)}"
    return f"group({show_name(group.name)})" if group.name else group.kind


def _show_stored(stored: Stored) -> str:
    default = Stored()
    states = "" if stored.states == default.states else f"states {quote(stored.states)}"
    params = "" if stored.params == default.params and states else quote(stored.params)
    return _join("stored", params, states)


def _join(*texts: str) -> str:
    return " ".join(t for t in texts if t)
