"""The text of Lay: what reads and writes programs; their nodes are in `ckptd.lay.syntax.tree`."""

from __future__ import annotations

from ckptd.lay.syntax.expressions import show_name
from ckptd.lay.syntax.formatter import format_text
from ckptd.lay.syntax.grammar import show
from ckptd.lay.syntax.library import load
from ckptd.lay.syntax.parser import parse, parse_statement

__all__ = ["format_text", "load", "parse", "parse_statement", "show", "show_name"]
