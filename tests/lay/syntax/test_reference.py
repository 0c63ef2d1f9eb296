"""docs/reference/lay.md: all its programs are programs, and all that they name exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from ckptd.errors import UsageError
from ckptd.lay.resolve import is_recipe, resolve_all
from ckptd.lay.syntax import library, parse
from ckptd.lay.syntax.grammar import Item
from ckptd.lay.syntax.tree import Dim, File, Layout, Modifier, NamePart, Statement, Value

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/reference/lay.md").read_text()
BLOCKS = re.findall(r"^```(\w+)( rules)?\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
PROGRAMS = [text for kind, rules, text in BLOCKS if kind == "lay" and not rules]
RULES = [text for kind, rules, text in BLOCKS if kind == "lay" and rules]


def check(program: File) -> None:
    for item in program.items:
        if isinstance(item, Layout) and not is_recipe(item):
            assert resolve_all([program], item.name)[1] == []


def test_blocks_are_found() -> None:
    assert len(PROGRAMS) > 15
    assert len(RULES) > 5
    assert PAGE.count("```") == 2 * len(BLOCKS)


@pytest.mark.parametrize("text", PROGRAMS)
def test_programs(text: str) -> None:
    check(parse(text))


@pytest.mark.parametrize("text", RULES)
def test_statements(text: str) -> None:
    layout = parse(f"layout x on M {{\n{text}}}").items[0]
    assert isinstance(layout, Layout)
    assert len(layout.statements) == len(text.splitlines())


def test_every_shipped_name_is_on_the_page() -> None:
    assert {n for n in library.names() if f"`{n}`" not in PAGE} == set()


def test_every_form_has_an_example() -> None:
    """Each class of the tree occurs in some block of the page."""
    shown = " ".join(map(repr, [parse(t) for t in PROGRAMS]))
    shown += " ".join(repr(parse(f"layout x on M {{\n{t}}}")) for t in RULES)
    unions = (Dim, Value, Modifier, NamePart, Statement, Item)
    classes = {c.__name__ for union in unions for c in get_args(union)}
    assert len(classes) > 35
    assert {c for c in classes if f"{c}(" not in shown} == set()


def test_the_page_shows_an_error_as_it_is() -> None:
    with pytest.raises(UsageError) as caught:
        parse("layout x on M {" + "\n" * 11 + "  layers.{l}.weight = W[o@tp, i]", "mine.lay")
    assert f"```text\n{caught.value}\n```" in PAGE
