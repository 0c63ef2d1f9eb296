"""Parses ``let``: a dimension, a value or a name, by how it begins."""

from __future__ import annotations

from ckptd.errors import UsageError
from ckptd.layout.lay import parser_dims
from ckptd.layout.lay.dims import Dim, Value
from ckptd.layout.lay.lexer import Scanner
from ckptd.layout.lay.name import Glob, Index, Name, Text
from ckptd.layout.lay.parser_name import name
from ckptd.layout.lay.parser_value import value
from ckptd.layout.lay.program import Let

__all__ = ["is_path", "let"]


def let(s: Scanner) -> Let:
    """Take what follows the word ``let``, which is the last token taken.

    Raises
    ------
    UsageError
        ``lay-syntax``.
    """
    start = s.pos - len("let")
    label = s.word("a name: let kv = 8")
    s.expect("=", f"and what {label} stands for")
    found = _let_value(s)
    return Let(label, found, at=s.position(start))


def _let_value(s: Scanner) -> Dim | Value | Name:
    """Take a dimension, a value or a name.

    A digit, ``size``, ``lcm(``, ``min(``, ``max(`` begin a value; ``(``, ``[``, ``pad(`` or an
    axis with ``@`` a dimension, unless it only makes sense as a value; all else is a name.
    """
    token = s.peek()
    if token.kind == "number":
        return value(s)
    if s.at("["):
        return _bracketed(s)
    if s.at("("):
        return _parenthesis(s)
    if s.at("size", "pad", "lcm", "min", "max"):
        s.take()
        ahead = s.peek()
        called = s.at("(")
        s.pos = token.start
        if token.text == "pad" and called:
            return parser_dims.dim(s)
        if token.text in ("lcm", "min", "max") and called:
            return value(s)
        if token.text == "size" and _value_begins(s, token.end, ahead.start):
            s.take()
            return value(s)
    return _let_name(s)


def _value_begins(s: Scanner, end: int, ahead: int) -> bool:
    """Whether a value follows the word ``size``, on the same line and after a blank."""
    return ahead > end and s.text[ahead : ahead + 1] not in ("", "\n", ";", "}")


def _bracketed(s: Scanner) -> Dim:
    s.open("[")
    found = parser_dims.dim(s)
    s.close("]", "after the dimension")
    return found


def _parenthesis(s: Scanner) -> Dim | Value:
    """Take what begins with ``(``: a product or sum such as ``(two half)``, or ``(a+b)*2``."""
    back, brackets = s.pos, list(s.brackets)
    failed: UsageError | None = None
    try:
        found = parser_dims.dim(s)
        if not s.at("*", "//", "+", "-"):
            return found
    except UsageError as error:
        failed, reached = error, s.pos
        s.pos, s.brackets = back, list(brackets)
        try:
            return value(s)
        except UsageError as other:
            raise (other if s.pos > reached else failed) from None
    s.pos, s.brackets = back, list(brackets)
    return value(s)


def _let_name(s: Scanner) -> Dim | Name:
    token = s.peek()
    found = name(s, "a name, a value or a dimension")
    if s.at("@") and token.kind == "word":
        s.pos = token.start
        return parser_dims.dim(s)
    globs = any(isinstance(p, Glob) for p in found.parts)
    if token.kind == "word" and ((globs and not is_path(found)) or s.at("+", "-", "//")):
        raise s.fail(
            "a name, a value or a dimension",
            start=token.start,
            end=s.pos,
            hint="a value that begins with a name: size h*4",
        )
    return found


def is_path(found: Name) -> bool:
    """Whether dots or indexes show that a name with a glob is not a multiplication."""
    return any(isinstance(p, Index) or (isinstance(p, Text) and "." in p.text) for p in found.parts)
