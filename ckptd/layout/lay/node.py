"""The base of Lay's syntax tree: where something was written."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["NOWHERE", "Node", "Position"]


@dataclass(frozen=True, slots=True)
class Position:
    """Where something was written: file (or ``<text>``), line and column from 1, length."""

    file: str = "<text>"
    line: int = 1
    column: int = 1
    length: int = 1


NOWHERE = Position("", 0, 0, 0)
"""Of what was built by a program and never written."""


@dataclass(frozen=True, slots=True)
class Node:
    """A part of a program.

    Attributes
    ----------
    at
        Never counts in comparisons, so that a printed and parsed tree equals the printed one.
    """

    at: Position = field(default=NOWHERE, compare=False, repr=False, kw_only=True)
