"""Parses numbers, sizes in bytes and values (``128*tp``, ``lcm(dp, 128)``)."""

from __future__ import annotations

from typing import Literal

from ckptd.layout.lay.dims import (
    Dim,
    Even,
    Number,
    Operation,
    Pad,
    Product,
    Size,
    Split,
    Sum,
    Value,
)
from ckptd.layout.lay.lexer import Scanner, Token

__all__ = [
    "MAX_DEPTH",
    "MAX_NUMBER",
    "RESERVED",
    "UNITS",
    "argument",
    "check_height",
    "check_level",
    "factor",
    "integer",
    "integers",
    "number",
    "size_in_bytes",
    "value",
    "whole",
    "words",
]

MAX_DEPTH = 64
"""How deep dimensions and values may nest."""

MAX_NUMBER = (1 << 63) - 1

UNITS = {"B": 1} | {
    letter + ending: base**power
    for power, letter in enumerate("KMGT", 1)
    for ending, base in (("iB", 1024), ("B", 1000))
}
"""Units of sizes in bytes; lengths are never in bytes."""

RESERVED = frozenset({"pad", "lcm", "min", "max", "_"})
"""Words that are no axis and no size, as they begin something else."""

_FUNCTIONS = ("lcm", "min", "max")


# --- numbers ------------------------------------------------------------------------------------


def whole(s: Scanner, token: Token, what: str, units: dict[str, int] | None = None) -> int:
    """Return the whole number that a token stands for: ``128``, ``40e6``, with `units` ``4GiB``."""
    text = token.text.replace("_", "")
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = text[len(digits) :]
    mantissa, _, exponent = digits.lower().partition("e")
    before, _, after = mantissa.partition(".")
    factor = 1 if not unit else (units or {}).get(unit)
    # Compared before it is computed: 1e999999999 is a short text and a huge number.
    power = int(exponent[:12] or 0) - len(after)
    found = -1
    if factor is not None and len(before + after) <= 40 and abs(power) <= 40:
        top = int(before + after) * factor * 10 ** max(power, 0)
        rest = 10 ** max(-power, 0)
        found = top // rest if top % rest == 0 else -1
    if not 0 <= found <= MAX_NUMBER:
        hint = None
        if unit and units is None:
            hint = f"'{unit}' cannot follow a number here: lengths count elements, not bytes"
        raise s.fail(what, start=token.start, end=token.end, hint=hint)
    return found


def size_in_bytes(s: Scanner) -> int:
    """Take a size in bytes: ``4GiB``, ``512MB``, ``1000``."""
    what = "a size in bytes: 4GiB, 512MB"
    if s.peek().kind != "number":
        raise s.fail(what)
    return whole(s, s.take(), what, UNITS)


def integer(s: Scanner, what: str) -> int:
    """Take a whole number."""
    if s.peek().kind != "number":
        raise s.fail(what)
    return whole(s, s.take(), what)


def number(s: Scanner, what: str) -> float:
    """Take a number with a sign: ``-1.5``, ``1e-3``, ``-inf``."""
    start = s.peek().start
    sign = -1.0 if s.accept("-") else 1.0
    if not s.at("inf") and s.peek().kind != "number":
        raise s.fail(what)
    token = s.take()
    try:
        return sign * float(token.text)
    except ValueError:
        raise s.fail(what, start=start, end=token.end) from None


def words(s: Scanner, what: str) -> tuple[str, ...]:
    """Take words up to a closing bracket, which stays; commas between them are optional."""
    out: list[str] = []
    while not s.at("]"):
        if s.at(*RESERVED):
            raise s.fail(what, hint="pad, lcm, min, max and _ are no names of axes")
        out.append(s.word(what))
        s.accept(",")
    return tuple(out)


def integers(s: Scanner, what: str) -> tuple[int, ...]:
    """Take one or more whole numbers in square brackets."""
    s.open("[")
    out: list[int] = []
    while not s.at("]") or not out:
        out.append(integer(s, what))
        s.accept(",")
    s.close("]")
    return tuple(out)


# --- values -------------------------------------------------------------------------------------


def value(s: Scanner) -> Value:
    """Take a whole value: ``128*tp``, ``lcm(dp, 128)``.

    Raises
    ------
    UsageError
        ``lay-syntax``.
    """
    start = s.peek().start
    found = argument(s, 0)
    check_height(s, found, start)
    return found


def argument(s: Scanner, level: int) -> Value:
    """Take a value inside something else, at a level of nesting."""
    start = s.peek().start
    left = _term(s, level)
    while token := s.accept("+", "-"):
        operator: Literal["+", "-"] = "+" if token.text == "+" else "-"
        left = Operation(operator, left, _term(s, level), at=s.position(start))
    return left


def _term(s: Scanner, level: int) -> Value:
    start = s.peek().start
    left = factor(s, level)
    while token := s.accept("*", "//"):
        operator: Literal["*", "//"] = "*" if token.text == "*" else "//"
        left = Operation(operator, left, factor(s, level), at=s.position(start))
    return left


def factor(s: Scanner, level: int = 0) -> Value:
    """Take a number, a name, a call or something in parentheses."""
    check_level(s, level)
    token = s.peek()
    if token.kind == "number":
        found = whole(s, s.take(), "a whole number")
        return Number(found, at=s.position(token.start))
    if s.at("("):
        s.open("(")
        inner = argument(s, level + 1)
        s.close(")", "after the value")
        return inner
    if token.kind == "word" and token.text in _FUNCTIONS:
        return _call(s, level)
    if token.kind == "word" and token.text not in RESERVED:
        return Size(s.take().text, at=s.position(token.start))
    raise s.fail("a value: a number, a size, '(' or lcm(, min(, max(")


def _call(s: Scanner, level: int) -> Value:
    token = s.take()
    operator: Literal["lcm", "min", "max"] = "lcm"
    if token.text == "min":
        operator = "min"
    elif token.text == "max":
        operator = "max"
    s.open("(")
    left = argument(s, level + 1)
    s.expect(",", f"between the arguments of {operator}")
    left = Operation(operator, left, argument(s, level + 1), at=s.position(token.start))
    while s.accept(","):
        left = Operation(operator, left, argument(s, level + 1), at=s.position(token.start))
    s.close(")", f"after the arguments of {operator}")
    return left


# --- depth ---------------------------------------------------------------------------------------


def check_level(s: Scanner, level: int) -> None:
    """Refuse what nests too deeply to be read by recursion."""
    if level >= MAX_DEPTH:
        raise s.fail(f"at most {MAX_DEPTH} levels of nesting")


def check_height(s: Scanner, node: Dim | Value, start: int) -> None:
    """Refuse a tree that is too high to walk by recursion: ``a@b@b...`` nests without brackets."""
    stack: list[tuple[Dim | Value, int]] = [(node, 1)]
    while stack:
        node, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise s.fail(f"at most {MAX_DEPTH} levels of nesting", start=start, end=s.pos)
        stack += [(below, depth + 1) for below in _below(node)]


def _below(node: Dim | Value) -> tuple[Dim | Value, ...]:
    if isinstance(node, Operation):
        return (node.left, node.right)
    if isinstance(node, Split):
        grain = (node.how.grain,) if isinstance(node.how, Even) else ()
        return (node.inner, *grain)
    if isinstance(node, Product):
        return node.parts
    if isinstance(node, Sum):
        return tuple(b.dim for b in node.branches)
    return (node.inner, node.multiple) if isinstance(node, Pad) else ()
