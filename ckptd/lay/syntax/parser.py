"""Parser: text to syntax tree, of a program, a statement or a part.

A recursive-descent parser, driven by the table of the grammar. It reads each character a bounded
number of times, nests no deeper than `lexer.MAX_DEPTH`, and every way it can fail is a
`UsageError` of the kind ``lay-syntax`` that says what was wanted and what stands there.
"""

from __future__ import annotations

from typing import TypeVar

from ckptd.lay.syntax import grammar
from ckptd.lay.syntax.lexer import Scanner
from ckptd.lay.syntax.pieces import Syntax
from ckptd.lay.syntax.tree import File, Statement

T = TypeVar("T")


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


def scan(text: str, file: str = "<text>") -> tuple[File, Scanner]:
    """Read a whole program and keep what the formatter needs: lines and comments.

    Raises
    ------
    UsageError
        ``lay-syntax``.
    """
    s = Scanner(text, file)
    return grammar.FILE.take(s), s


def read(piece: Syntax[T], text: str, file: str = "<text>") -> T:
    """Read a part of a program, and nothing more.

    Raises
    ------
    UsageError
        ``lay-syntax``.
    """
    s = Scanner(text, file)
    s.skip_lines()
    found = piece.take(s)
    s.skip_lines()
    if s.peek().kind != "end":
        raise s.fail("nothing more")
    return found


def parse_statement(text: str, file: str = "<text>") -> Statement:
    """Read one statement of a layout."""
    return read(grammar.STATEMENT, text, file)
