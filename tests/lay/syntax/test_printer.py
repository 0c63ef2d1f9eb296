"""What is printed parses back to the same tree, for random trees of every form."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.lay.syntax import format_text, parse, parse_statement, show
from ckptd.lay.syntax import tree as nodes
from ckptd.lay.syntax.grammar import FAMILY, MODIFIERS, SCALAR, STATES
from ckptd.lay.syntax.parser import read
from tests.lay.syntax import trees
from tests.lay.syntax.parts import parse_dim, parse_item, parse_name, parse_rule, parse_value

FORMS: list[tuple[trees.Strategy, Callable[[str], Any]]] = [
    (trees.VALUES, parse_value),
    (trees.DIMS, parse_dim),
    (trees.NAMES, parse_name),
    (trees.MODIFIERS, lambda text: read(MODIFIERS, text)[0]),
    (trees.RULES, parse_rule),
    (trees.STATEMENTS, parse_statement),
    (trees.STATES, lambda text: read(STATES, text)[0]),
    (trees.SCALARS, lambda text: read(SCALAR, text)),
    (trees.FAMILIES, lambda text: read(FAMILY, text)),
    (trees.LETS, parse_item),
    (trees.MESHES, parse_item),
    (trees.SPACES, parse_item),
    (trees.LAYOUTS, parse_item),
    (trees.RESHARDS, parse_item),
]


@given(st.data())
@pytest.mark.parametrize("form", range(len(FORMS)))
def test_each_form_parses_back(form: int, data: st.DataObject) -> None:
    strategy, parse_form = FORMS[form]
    tree = data.draw(strategy)
    assert parse_form(show(tree)) == tree


@given(trees.FILES)
def test_programs_parse_back(tree: nodes.File) -> None:
    assert parse(show(tree)) == tree


@given(trees.FILES)
def test_what_is_printed_is_in_normal_form(tree: nodes.File) -> None:
    assert format_text(show(tree)) == show(tree)


def test_the_strategies_build_every_node_class() -> None:
    """A new node that they do not know would go untested."""
    source = Path(trees.__file__).read_text()
    classes = {
        name
        for name, found in vars(nodes).items()
        if isinstance(found, type) and found.__module__ == nodes.__name__ and name[0] != "_"
    } - {"SyntaxNode", "Position"}
    assert {c for c in classes if not re.search(rf"\bt\.{c}\b", source)} == set()


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("((a+b))*c - 1", "(a + b)*c - 1"),
        ("a-(b-c)", "a - (b - c)"),
        ("40_000_000", "40e6"),
        ("lcm(dp,128,65536)", "lcm(lcm(dp, 128), 65536)"),
    ],
)
def test_values_in_normal_form(text: str, normal: str) -> None:
    assert show(parse_value(text)) == normal


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("( kv@tp ( q:rep | k:1 | v:1 )\n hd )", "(kv@tp (q:rep|k:1|v:1) hd)"),
        ("pad(v,128*tp)@tp:even", "pad(v, 128*tp)@tp"),
        ("f @ tp : ceil / 128", "f@tp:ceil/128"),
        ("f@tp:[3,3, 2]", "f@tp:[3 3 2]"),
        ("pad(v, 8, -inf)", "pad(v, 8, -inf)"),
    ],
)
def test_dimensions_in_normal_form(text: str, normal: str) -> None:
    assert show(parse_dim(text)) == normal


def test_no_part_of_a_program() -> None:
    with pytest.raises(TypeError, match="Position"):
        show(nodes.Layout("x", "", (), ()).at)  # type: ignore[arg-type]
