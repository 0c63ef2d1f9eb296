"""Parses what stands in a program: meshes, lets, spaces, layouts, reshards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ckptd.layout.lay.lexer import Scanner
from ckptd.layout.lay.name import Name, NamePart, Text, join
from ckptd.layout.lay.parser_let import let
from ckptd.layout.lay.parser_modifiers import conditions
from ckptd.layout.lay.parser_name import dotted, name
from ckptd.layout.lay.parser_statement import statement
from ckptd.layout.lay.parser_value import MAX_DEPTH, integer, size_in_bytes, words
from ckptd.layout.lay.program import (
    Family,
    Layout,
    Let,
    Mesh,
    MeshAxis,
    Reshard,
    Scalar,
    Space,
    State,
    Statement,
    Use,
)

__all__ = ["Item", "Span", "end_of_statement", "item", "skip_lines", "space_body", "states"]

Item: TypeAlias = Mesh | Let | Space | Layout | Reshard | Use


@dataclass(frozen=True, slots=True)
class Span:
    """Where one line of the program's normal form comes from, for the formatter.

    Attributes
    ----------
    start, end
        Offsets in the text.
    kind
        A statement of its own, or a line that opens or closes a block.
    node
        What stands there; the states of a ``follow``; None for a closing brace.
    """

    start: int
    end: int
    kind: Literal["statement", "open", "close"]
    node: Item | Statement | Family | Scalar | tuple[State, ...] | None


Trace: TypeAlias = list[Span]


def skip_lines(s: Scanner) -> None:
    """Go behind line ends and ``;``."""
    while s.peek().kind == "newline" or s.at(";"):
        s.take()


def end_of_statement(s: Scanner, closing: str = "") -> None:
    """Go behind the end of a statement: a line end, ``;``, or before `closing`."""
    if s.peek().kind not in ("newline", "end") and not s.at(";", *closing):
        raise s.fail("the end of the line or ';'")
    skip_lines(s)


def item(s: Scanner, trace: Trace) -> Item:
    """Take one item of a program and note its lines in `trace`.

    Raises
    ------
    UsageError
        ``lay-syntax``.
    """
    token = s.peek()
    take = _ITEMS.get(token.text) if token.kind == "word" else None
    if take is None:
        hint = (
            "a '}' too many?" if token.text == "}" else "rules stand in a layout: layout L on M {"
        )
        raise s.fail("mesh, let, space, layout, reshard or use", hint=hint)
    s.take()
    found = take(s, token.start, trace)
    if not isinstance(found, Layout | Space):
        trace.append(Span(token.start, s.pos, "statement", found))
    return found


# --- one line -----------------------------------------------------------------------------------


def _let(s: Scanner, start: int, trace: Trace) -> Let:
    return let(s)


def _mesh(s: Scanner, start: int, trace: Trace) -> Mesh:
    if s.at("none"):
        raise s.fail("another name: none stands for no mesh")
    label = s.word("the name of a mesh")
    s.expect("=", "and its axes: mesh M = pp:2 tp:4")
    axes = _axes(s, 0)
    local = _axes(s, 0) if s.accept("local") else ()
    return Mesh(label, axes, local, at=s.position(start))


def _axes(s: Scanner, level: int) -> tuple[MeshAxis, ...]:
    if level >= MAX_DEPTH:
        raise s.fail(f"at most {MAX_DEPTH} levels of nesting")
    out = [_axis(s, level)]
    while s.peek().kind == "word" and not s.at("local"):
        out.append(_axis(s, level))
    return tuple(out)


def _axis(s: Scanner, level: int) -> MeshAxis:
    if s.at("local"):
        raise s.fail("an axis: tp:8")
    label = s.word("an axis: tp:8")
    s.expect(":", "and the length of the axis")
    extent = integer(s, "the length of the axis")
    parts: tuple[MeshAxis, ...] = ()
    if s.accept("="):
        s.open("(", "and the finer axes: tp:8=(tk:4 tr:2)")
        parts = _axes(s, level + 1)
        s.close(")")
    return MeshAxis(label, extent, parts)


def _use(s: Scanner, start: int, trace: Trace) -> Use:
    return Use(dotted(s, "the name of a shipped layout or space"), at=s.position(start))


def _reshard(s: Scanner, start: int, trace: Trace) -> Reshard:
    source = dotted(s, "the name of a layout")
    s.expect("->", "and the layout to change to")
    target = dotted(s, "the name of a layout")
    via: Literal["disk", "memory", "peer"] = "disk"
    if s.accept("via"):
        if s.accept("memory"):
            via = "memory"
        elif s.accept("peer"):
            via = "peer"
        else:
            s.expect("disk", ", memory or peer")
    budget = size_in_bytes(s) if s.accept("budget") else None
    return Reshard(source, target, via, budget, at=s.position(start))


# --- blocks -------------------------------------------------------------------------------------


def _layout(s: Scanner, start: int, trace: Trace) -> Layout:
    label = dotted(s, "the name of a layout")
    space = dotted(s, "the name of a space") if s.accept("of") else ""
    s.expect("on", "and a mesh, or on none")
    meshes = () if s.accept("none") else _meshes(s)
    skip_lines(s)
    s.expect("{", "and the rules of the layout")
    trace.append(Span(start, s.pos, "open", Layout(label, space, meshes, ())))
    out: list[Statement] = []
    skip_lines(s)
    while not s.at("}"):
        if s.peek().kind == "end":
            begin = s.line_of(start)
            raise s.fail("'}' at the end of the layout", hint=f"{label} begins in line {begin}")
        begin = s.peek().start
        out.append(statement(s))
        trace.append(Span(begin, s.pos, "statement", out[-1]))
        end_of_statement(s, "}")
    _close(s, trace)
    return Layout(label, space, meshes, tuple(out), at=s.position(start))


def _meshes(s: Scanner) -> tuple[str, ...]:
    out = [s.word("the name of a mesh, or none")]
    while s.accept(","):
        out.append(s.word("the name of a mesh"))
    return tuple(out)


def _space(s: Scanner, start: int, trace: Trace) -> Space:
    label = dotted(s, "the name of a space")
    skip_lines(s)
    s.expect("{", "and the tensors of the space")
    trace.append(Span(start, s.pos, "open", Space(label, ())))
    body = space_body(s, trace)
    if not s.at("}"):
        raise s.fail("'}' at the end of the space")
    _close(s, trace)
    at = s.position(start)
    return Space(label, body.families, body.states, body.scalars, body.lets, at=at)


def _close(s: Scanner, trace: Trace) -> None:
    token = s.take()
    trace.append(Span(token.start, token.end, "close", None))


def space_body(s: Scanner, trace: Trace) -> Space:
    """Take what stands between the braces of a space, up to a ``}`` or the end."""
    families: list[Family] = []
    followers: list[State] = []
    scalars: list[Scalar] = []
    lets: list[Let] = []
    skip_lines(s)
    while not s.at("}") and s.peek().kind != "end":
        start = s.peek().start
        keyword = _keyword(s)
        found: Family | Scalar | Let | tuple[State, ...]
        if keyword == "follow":
            found = states(s)
            followers += found
        elif keyword == "scalar":
            found = _scalar(s)
            scalars.append(found)
        elif keyword == "let":
            found = let(s)
            lets.append(found)
        else:
            found = _family(s, families[-1].name if families else None)
            families.append(found)
        trace.append(Span(start, s.pos, "statement", found))
        if keyword == "let":
            end_of_statement(s, "}")
        skip_lines(s)
    return Space("", tuple(families), tuple(followers), tuple(scalars), tuple(lets))


def _keyword(s: Scanner) -> str:
    """Take ``follow``, ``scalar`` or ``let``, unless it is the name of a tensor: ``let[h]``."""
    if not s.at("follow", "scalar", "let"):
        return ""
    back, word = s.pos, s.peek().text
    name(s)
    if s.at("["):
        s.pos = back
        return ""
    s.pos = back
    return s.take().text if s.peek().text == word else ""


def states(s: Scanner) -> tuple[State, ...]:
    """Take states: ``m=exp_avg, s=exp_avg_sq``."""
    out = [_state(s)]
    while s.accept(","):
        out.append(_state(s))
    return tuple(out)


def _state(s: Scanner) -> State:
    label = s.word("a state: m=exp_avg")
    if not s.accept("="):
        return State(label, label)
    what = "the name of the state in checkpoints"
    return State(label, s.string(what) if s.peek().kind == "string" else dotted(s, what))


def _scalar(s: Scanner) -> Scalar:
    start = s.peek().start
    label = s.word("the name of a scalar: step(param)")
    per: Literal["param", "group", "global"] = "param"
    if s.at("("):
        s.open("(")
        if s.accept("group"):
            per = "group"
        elif s.accept("global"):
            per = "global"
        else:
            s.expect("param", ", group or global")
        s.close(")")
    return Scalar(label, per, at=s.position(start))


def _family(s: Scanner, before: Name | None) -> Family:
    start = s.peek().start
    short = s.at(".")
    found = name(s, "a tensor: L{l}.q[kv rep hd h]")
    if short:
        found = Name(join((*_prefix(s, start, before), *found.parts)), at=found.at)
    s.open("[", "and the axes of the tensor")
    atoms = words(s, "an axis, or ']'")
    s.close("]")
    return Family(found, atoms, conditions(s), at=s.position(start))


def _prefix(s: Scanner, start: int, before: Name | None) -> tuple[NamePart, ...]:
    """Return the name of the family before up to its last dot: what ``.k`` goes on from."""
    parts = list(before.parts) if before else []
    while parts:
        last = parts.pop()
        if isinstance(last, Text) and "." in last.text:
            return (*parts, Text(last.text[: last.text.rindex(".")]))
    hint = "a name that begins with a dot goes on from the tensor before it"
    raise s.fail("the whole name", start=start, end=s.pos, hint=hint)


_ITEMS: dict[str, Callable[[Scanner, int, Trace], Item]] = {
    "mesh": _mesh,
    "let": _let,
    "space": _space,
    "layout": _layout,
    "reshard": _reshard,
    "use": _use,
}
