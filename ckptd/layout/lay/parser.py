"""Reads programs: text to syntax tree.

A recursive-descent parser by hand. It reads each character a bounded number of times, nests no
deeper than `parser_dims.MAX_DEPTH`, and every way it can fail is a `UsageError` of the kind
``lay-syntax`` that says what was wanted and what stands there. The grammar:
``docs/reference/lay.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ckptd.layout.lay import parser_dims, parser_item, parser_modifiers, parser_name, parser_value
from ckptd.layout.lay import parser_statement as statements
from ckptd.layout.lay.dims import Dim, Value
from ckptd.layout.lay.lexer import Scanner
from ckptd.layout.lay.modifiers import Modifier
from ckptd.layout.lay.name import Name
from ckptd.layout.lay.parser_item import Item, Span, end_of_statement, skip_lines
from ckptd.layout.lay.program import File, Rule, Space, State, Statement

__all__ = [
    "parse",
    "parse_dim",
    "parse_dims",
    "parse_file_name",
    "parse_item",
    "parse_modifiers",
    "parse_name",
    "parse_rule",
    "parse_space",
    "parse_statement",
    "parse_states",
    "parse_value",
    "scan",
]

T = TypeVar("T")


# --- entry points -------------------------------------------------------------------------------


def parse(text: str, file: str = "<text>") -> File:
    """Read a whole program.

    Parameters
    ----------
    text
        The program; untrusted.
    file
        What to call it in messages and positions.

    Returns
    -------
    File

    Raises
    ------
    UsageError
        ``lay-syntax``; `where` is ``file:line:column``.
    """
    return scan(text, file)[0]


def scan(text: str, file: str = "<text>") -> tuple[File, list[Span], Scanner]:
    """Read a whole program and keep what the formatter needs: lines and comments.

    Raises
    ------
    UsageError
        ``lay-syntax``.
    """
    s = Scanner(text, file)
    trace: list[Span] = []
    items: list[Item] = []
    skip_lines(s)
    while s.peek().kind != "end":
        items.append(parser_item.item(s, trace))
        end_of_statement(s)
    return File(tuple(items)), trace, s


def parse_item(text: str, file: str = "<text>") -> Item:
    """Read one ``mesh``, ``let``, ``space``, ``layout``, ``reshard`` or ``use``.

    Raises
    ------
    UsageError
        ``lay-syntax``.
    """
    return _one(text, file, lambda s: parser_item.item(s, []))


def parse_statement(text: str, file: str = "<text>") -> Statement:
    """Read one statement of a layout.

    Raises
    ------
    UsageError
        ``lay-syntax``.
    """
    return _one(text, file, statements.statement)


def parse_rule(text: str, file: str = "<text>") -> Rule:
    """Read one rule: ``name = reference[dims] modifiers``.

    Raises
    ------
    UsageError
        ``lay-syntax``.
    """
    return _one(text, file, statements.rule)


def parse_dim(text: str, file: str = "<text>") -> Dim:
    """Read one dimension: ``(kv@tp rep hd)``.

    Raises
    ------
    UsageError
        ``lay-syntax``.
    """
    return _one(text, file, parser_dims.dim)


def parse_dims(text: str, file: str = "<text>") -> tuple[Dim, ...]:
    """Read dimensions in brackets: ``[o@tp i]``.

    Raises
    ------
    UsageError
        ``lay-syntax``.
    """
    return _one(text, file, parser_dims.dims)


def parse_value(text: str, file: str = "<text>") -> Value:
    """Read one value: ``128*tp``.

    Raises
    ------
    UsageError
        ``lay-syntax``.
    """
    return _one(text, file, parser_value.value)


def parse_modifiers(text: str, file: str = "<text>") -> tuple[Modifier, ...]:
    """Read modifiers: ``same on pp=last``.

    Raises
    ------
    UsageError
        ``lay-syntax``.
    """
    return _one(text, file, parser_modifiers.modifiers)


def parse_name(text: str, file: str = "<text>") -> Name:
    """Read one name: ``decoder.layers.{#l@pp}``.

    Raises
    ------
    UsageError
        ``lay-syntax``.
    """
    return _one(text, file, parser_name.name)


def parse_file_name(text: str, file: str = "<text>") -> Name:
    """Read the name of a file, in which indexes may have digits: ``"r{tp:02}"``.

    Raises
    ------
    UsageError
        ``lay-syntax``.
    """
    return _one(text, file, lambda s: parser_name.name(s, padded=True))


def parse_states(text: str, file: str = "<text>") -> tuple[State, ...]:
    """Read states: ``m=exp_avg, s=exp_avg_sq``.

    Raises
    ------
    UsageError
        ``lay-syntax``.
    """
    return _one(text, file, parser_item.states)


def parse_space(text: str, file: str = "<text>") -> Space:
    """Read what stands between the braces of a space; its name is empty.

    Raises
    ------
    UsageError
        ``lay-syntax``.
    """
    return _one(text, file, lambda s: parser_item.space_body(s, []))


def _one(text: str, file: str, take: Callable[[Scanner], T]) -> T:
    s = Scanner(text, file)
    skip_lines(s)
    found = take(s)
    skip_lines(s)
    if s.peek().kind != "end":
        raise s.fail("nothing more")
    return found
