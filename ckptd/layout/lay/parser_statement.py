"""Parses what stands in a layout: rules, ``use``, ``default``, ``flat``, ``pipe`` and others."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Literal

from ckptd.layout.lay.dims import UNIT, Value
from ckptd.layout.lay.lexer import Scanner
from ckptd.layout.lay.modifiers import Modifier
from ckptd.layout.lay.parser_dims import dims, splits
from ckptd.layout.lay.parser_modifiers import alias, modifiers
from ckptd.layout.lay.parser_name import dotted, name
from ckptd.layout.lay.parser_value import integer, value, words
from ckptd.layout.lay.program import (
    Default,
    Files,
    Flat,
    FlatGroup,
    Object,
    Order,
    Pipe,
    Rule,
    Statement,
    Stored,
    Use,
)

__all__ = ["rule", "statement"]


# --- rules --------------------------------------------------------------------------------------


def rule(s: Scanner) -> Rule:
    """Take ``name = reference[dims] modifiers``."""
    start = s.peek().start
    left = name(s, "the name of a tensor")
    s.expect("=", "after the name")
    if s.at("drop", "follow") and not _reference_ahead(s):
        return Rule(left, None, (), modifiers(s), at=s.position(start))
    first: tuple[Modifier, ...] = ()
    if s.at("alias") and not _reference_ahead(s):
        first = (alias(s),)
    reference = name(s, "the logical tensor: L{l}.q[...], or drop")
    shape = dims(s) if s.at("[") or not first else ()
    return Rule(left, reference, shape, (*first, *modifiers(s)), at=s.position(start))


def _reference_ahead(s: Scanner) -> bool:
    """Whether the word that comes next is itself a reference: ``drop[h]``."""
    back = s.pos
    name(s)
    found = s.at("[")
    s.pos = back
    return found


def _rule_ahead(s: Scanner) -> bool:
    """Whether a rule begins here, even one whose name is a keyword: ``flat = E[h]``."""
    token = s.peek()
    if token.kind != "word":
        return True
    back = s.pos
    name(s)
    found = s.at("=")
    s.pos = back
    return found


# --- the other statements -----------------------------------------------------------------------


def statement(s: Scanner) -> Statement:
    """Take one statement of a layout.

    Raises
    ------
    UsageError
        ``lay-syntax``.
    """
    if _rule_ahead(s):
        return rule(s)
    keyword = s.peek().text
    if keyword not in _STATEMENTS:
        raise _unknown(s, keyword)
    return _STATEMENTS[keyword](s)


def _unknown(s: Scanner, keyword: str) -> Exception:
    near = get_close_matches(keyword, _STATEMENTS, n=1)
    start = s.peek().start
    if near:
        return s.fail("a statement", start=start, end=start + len(keyword), hint=f"{near[0]}?")
    name(s)
    return s.fail(
        "'=' after the name",
        hint=f"a layout holds rules (name = reference[dims]) and {', '.join(_STATEMENTS)}",
    )


def _use(s: Scanner) -> Use:
    start = s.take().start
    return Use(dotted(s, "the name of a layout"), at=s.position(start))


def _default(s: Scanner) -> Default:
    start = s.take().start
    return Default(dims(s), modifiers(s), at=s.position(start))


def _flat(s: Scanner) -> Flat:
    start = s.take().start
    group = _flat_group(s)
    at = s.peek().start
    cuts = splits(s)
    if len(cuts) != 1:
        raise s.fail("one mesh axis to cut the buffer over: @dp", start=at, end=max(s.pos, at + 1))
    s.expect("of", "and the states: params, m, s, w or *")
    states = _states(s)
    order: Order = "module"
    begin: Value = UNIT
    end: Value = UNIT
    while s.at("order", "start", "end"):
        key = s.take().text
        if key == "order":
            order = _order(s)
        else:
            s.expect("/", f"after {key}")
            multiple = value(s)
            begin, end = (multiple, end) if key == "start" else (begin, multiple)
    mods = modifiers(s)
    return Flat(group, cuts[0], states, order, begin, end, mods, at=s.position(start))


def _order(s: Scanner) -> Order:
    if s.accept("reverse"):
        return "reverse"
    if s.accept("robin"):
        return "robin"
    s.expect("module", ", reverse or robin")
    return "module"


def _flat_group(s: Scanner) -> FlatGroup:
    if s.accept("each"):
        return FlatGroup("each")
    if s.accept("bucket"):
        return FlatGroup("bucket", elements=integer(s, "the number of elements of a bucket"))
    s.expect("group", ", each or bucket after flat")
    s.open("(", "and the names that share a buffer")
    found = name(s)
    s.close(")")
    return FlatGroup("group", found)


def _states(s: Scanner) -> tuple[str, ...]:
    if s.accept("*"):
        return ("*",)
    out = [s.word("a state: params, m, s, w or *")]
    while s.accept(","):
        out.append(s.word("a state"))
    return tuple(out)


def _pipe(s: Scanner) -> Pipe:
    start = s.take().start
    axis = s.word("the axis of layers: pipe l@pp")
    cuts: list[str] = []
    while s.accept("@"):
        cuts.append(s.word("a mesh axis"))
    if not cuts:
        raise s.fail("'@' and a mesh axis")
    stages = s.string('the stages in quotes: "Et*3|(tt|)*29,m|L"')
    return Pipe(axis, tuple(cuts), stages, at=s.position(start))


def _object(s: Scanner) -> Object:
    start = s.take().start
    what = "the name of an object"
    label = s.string(what) if s.peek().kind == "string" else dotted(s, what)
    s.open("[", "and the mesh axes that it differs on")
    axes = words(s, "a mesh axis")
    s.close("]")
    s.expect("on", "-change, and what to do")
    s.expect("-", "in on-change")
    s.expect("change", "in on-change")
    token = s.peek()
    change: Literal["error", "drop", "reseed", "reduce"]
    if s.accept("error"):
        change = "error"
    elif s.accept("drop"):
        change = "drop"
    elif s.accept("reseed"):
        change = "reseed"
    elif s.accept("reduce"):
        s.expect("=", "and the name of a reduction")
        reduce = s.word("the name of a reduction")
        return Object(label, axes, "reduce", reduce, at=s.position(start))
    else:
        raise s.fail("error, drop, reseed or reduce=...", start=token.start, end=token.end)
    return Object(label, axes, change, at=s.position(start))


def _files(s: Scanner) -> Files:
    start = s.take().start
    return Files(name(s, "the name of a file in quotes", padded=True), at=s.position(start))


def _stored(s: Scanner) -> Stored:
    start = s.take().start
    found = Stored()
    params, states = found.params, found.states
    if s.peek().kind == "string":
        params = s.string("")
    elif not s.at("states"):
        raise s.fail('names in checkpoints: stored "{name}" states "optim.{name}.{state}"')
    if s.accept("states"):
        states = s.string("the names of states in quotes")
    return Stored(params, states, at=s.position(start))


_STATEMENTS: dict[str, Callable[[Scanner], Statement]] = {
    "use": _use,
    "default": _default,
    "flat": _flat,
    "pipe": _pipe,
    "obj": _object,
    "files": _files,
    "stored": _stored,
}
