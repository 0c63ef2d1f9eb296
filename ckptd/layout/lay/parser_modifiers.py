"""Parses modifiers of rules: ``same``, ``cast(bfloat16)``, ``on pp=last`` and the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ckptd.layout.lay.lexer import Scanner
from ckptd.layout.lay.modifiers import (
    Affine,
    Alias,
    Average,
    Cast,
    Drop,
    FollowRows,
    For,
    Modifier,
    On,
    Quantized,
    Range,
    Replicas,
)
from ckptd.layout.lay.parser_name import name
from ckptd.layout.lay.parser_value import integer, integers, number

__all__ = ["alias", "conditions", "modifiers"]


def modifiers(s: Scanner) -> tuple[Modifier, ...]:
    """Take all modifiers that follow."""
    out: list[Modifier] = []
    while s.peek().kind == "word" and s.peek().text in _MODIFIERS:
        out.append(_MODIFIERS[s.peek().text](s))
    return tuple(out)


def _replicas(s: Scanner) -> Replicas:
    token = s.take()
    kind: Literal["same", "any"] = "same" if token.text == "same" else "any"
    return Replicas(kind, at=s.position(token.start))


def _average(s: Scanner) -> Average:
    token = s.take()
    kind: Literal["avg", "sum"] = "avg" if token.text == "avg" else "sum"
    s.open("(", f"after {kind}")
    axis = s.word("the mesh axis to combine over")
    s.close(")")
    return Average(kind, axis, at=s.position(token.start))


def _cast(s: Scanner) -> Cast:
    start = s.take().start
    s.open("(", "after cast")
    dtype = s.word("a type: bfloat16, float32, ...")
    s.close(")")
    return Cast(dtype, at=s.position(start))


def _quantized(s: Scanner) -> Quantized:
    start = s.take().start
    s.open("(", "after q")
    dtype = s.word("a type: float8_e4m3fn, int8, ...")
    s.expect(",", "and the block: [128 128]")
    block = integers(s, "the lengths of a block")
    s.expect(",", "and scale={name}_scale")
    s.expect("scale")
    s.expect("=")
    scale = name(s, "the name of the scales")
    s.close(")")
    return Quantized(dtype, block, scale, at=s.position(start))


def _affine(s: Scanner) -> Affine:
    start = s.take().start
    s.open("(", "after affine")
    scale = number(s, "a number")
    s.expect(",", "and what is added")
    shift = number(s, "a number")
    s.close(")")
    return Affine(scale, shift, at=s.position(start))


def alias(s: Scanner) -> Alias:
    """Take the word ``alias``."""
    start = s.take().start
    return Alias(at=s.position(start))


def _drop(s: Scanner) -> Drop:
    start = s.take().start
    return Drop(at=s.position(start))


def _on(s: Scanner) -> On:
    start = s.take().start
    axis = s.word("a mesh axis: on pp=0")
    s.expect("=", "and a coordinate: on pp=0, on pp=last")
    if s.accept("last"):
        return On(axis, "last", at=s.position(start))
    return On(axis, integer(s, "a coordinate: a whole number or last"), at=s.position(start))


def conditions(s: Scanner) -> tuple[For, ...]:
    """Take all ``for`` that follow; a tensor may be called so too (``for[h]``)."""
    out: list[For] = []
    while s.at("for"):
        back = s.pos
        s.take()
        if s.peek().kind != "word":
            s.pos = back
            break
        s.pos = back
        out.append(_for(s))
    return tuple(out)


def _for(s: Scanner) -> For:
    start = s.take().start
    axis = s.word("an index of the name: for l=0..2")
    s.expect("=", "and its numbers: for l=0..2")
    if not s.at("["):
        return For(axis, (_range(s),), at=s.position(start))
    s.open("[")
    ranges = [_range(s)]
    while not s.at("]"):
        s.accept(",")
        ranges.append(_range(s))
    s.close("]")
    return For(axis, tuple(ranges), at=s.position(start))


def _range(s: Scanner) -> Range:
    what = "numbers: 5, 0..2, 3.., or 1../2"
    start = s.peek().start
    first = integer(s, what)
    if not s.accept(".."):
        return Range(first, first)
    last = integer(s, what) if s.peek().kind == "number" else None
    step = integer(s, "a step: 1../2") if s.accept("/") else 1
    if not step or (last is not None and last < first):
        raise s.fail(f"{what}; the last is not below the first", start=start, end=s.pos)
    return Range(first, last, step)


def _follow_rows(s: Scanner) -> FollowRows:
    start = s.take().start
    s.expect("rows", "after follow")
    s.open("(", "and the name of the tensor to follow")
    found = name(s)
    s.close(")")
    return FollowRows(found, at=s.position(start))


_MODIFIERS: dict[str, Callable[[Scanner], Modifier]] = {
    "same": _replicas,
    "any": _replicas,
    "avg": _average,
    "sum": _average,
    "cast": _cast,
    "q": _quantized,
    "affine": _affine,
    "alias": alias,
    "drop": _drop,
    "on": _on,
    "for": _for,
    "follow": _follow_rows,
}
