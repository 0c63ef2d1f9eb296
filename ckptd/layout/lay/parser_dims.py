"""Parses splits (``@tp:ceil``) and dimensions (``(kv@tp rep hd)``)."""

from __future__ import annotations

from typing import Literal

from ckptd.layout.lay.dims import (
    EVEN,
    Atom,
    Branch,
    Dim,
    Even,
    How,
    One,
    Pad,
    Product,
    Rest,
    Split,
    Sum,
    Widths,
    Wild,
)
from ckptd.layout.lay.lexer import Scanner
from ckptd.layout.lay.parser_value import (
    RESERVED,
    argument,
    check_height,
    check_level,
    factor,
    integers,
    number,
)

__all__ = ["dim", "dims", "how", "splits"]

_DIM = "a dimension: an axis, 1, '(' or pad("


# --- splits -------------------------------------------------------------------------------------


def how(s: Scanner) -> How:
    """Take what may follow a mesh axis: ``:ceil``, ``:[3 3 2]``, ``/128``, ``:ceil/128``."""
    rule: Literal["even", "ceil", "bal"] = "even"
    if s.accept(":"):
        if s.at("["):
            return Widths(integers(s, "the widths of the parts"))
        if s.accept("ceil"):
            rule = "ceil"
        elif s.accept("bal"):
            rule = "bal"
        elif not s.accept("even"):
            raise s.fail("how to split: even, ceil, bal or [widths]")
    if not s.accept("/"):
        return EVEN if rule == "even" else Even(rule)
    start = s.peek().start
    grain = factor(s)
    check_height(s, grain, start)
    return Even(rule, grain)


def splits(s: Scanner) -> tuple[tuple[str, How], ...]:
    """Take any number of ``@axis`` with how they split."""
    out = []
    while s.accept("@"):
        out.append((s.word("a mesh axis"), how(s)))
    return tuple(out)


# --- dimensions ---------------------------------------------------------------------------------


def dims(s: Scanner) -> tuple[Dim, ...]:
    """Take dimensions in square brackets."""
    s.open("[", "and the dimensions")
    out = []
    while not s.at("]"):
        if s.at(",", "}", ")") or s.peek().kind == "end":
            raise s.fail(f"{_DIM}, or ']'", hint="dimensions are separated by blanks")
        out.append(dim(s))
    s.close("]")
    return tuple(out)


def dim(s: Scanner) -> Dim:
    """Take one dimension.

    Raises
    ------
    UsageError
        ``lay-syntax``, also when it nests deeper than `MAX_DEPTH`.
    """
    start = s.peek().start
    found = _dim(s, 0)
    check_height(s, found, start)
    return found


def _dim(s: Scanner, level: int) -> Dim:
    start = s.peek().start
    found = _primary(s, level)
    for axis, rule in splits(s):
        found = Split(found, axis, rule, at=s.position(start))
    return found


def _primary(s: Scanner, level: int) -> Dim:
    check_level(s, level)
    token = s.peek()
    if s.at("("):
        return _group(s, level)
    if s.at("pad"):
        return _pad(s, level)
    if s.accept("..."):
        return Rest(at=s.position(token.start))
    if s.accept("_"):
        return Wild(at=s.position(token.start))
    if token.kind == "number" and token.text == "1":
        s.take()
        return One(at=s.position(token.start))
    if token.kind == "word" and token.text not in RESERVED:
        return Atom(s.take().text, at=s.position(token.start))
    hint = None
    if token.kind == "number":
        hint = "a length has a name: write an axis here and say its size with `let axis = number`"
    raise s.fail(_DIM, hint=hint)


def _group(s: Scanner, level: int) -> Dim:
    start = s.open("(").start
    first = s.peek()
    if first.kind == "word":
        s.take()
        if s.at(":"):
            s.pos = first.start
            return _tagged(s, level, start)
        s.pos = first.start
    parts = [_dim(s, level + 1)]
    while not s.at(")"):
        if s.at("|"):
            raise s.fail("')'", hint="each part of a sum has a tag: (q:a|k:b)")
        parts.append(_dim(s, level + 1))
    s.close(")")
    return Product(tuple(parts), at=s.position(start))


def _tagged(s: Scanner, level: int, start: int) -> Sum:
    branches = [_branch(s, level)]
    while s.accept("|"):
        branches.append(_branch(s, level))
    s.close(")", "or '|' after a part of the sum")
    return Sum(tuple(branches), at=s.position(start))


def _branch(s: Scanner, level: int) -> Branch:
    start = s.peek().start
    tag = s.word("a tag")
    s.expect(":", "after the tag")
    found = _dim(s, level + 1)
    return Branch(tag, found, at=s.position(start))


def _pad(s: Scanner, level: int) -> Pad:
    start = s.take().start
    s.open("(", "after pad")
    inner = _dim(s, level + 1)
    s.expect(",", "and the multiple to pad to")
    multiple = argument(s, level + 1)
    fill = number(s, "what to fill with, a number") if s.accept(",") else 0.0
    s.close(")", "after pad")
    return Pad(inner, multiple, fill, at=s.position(start))
