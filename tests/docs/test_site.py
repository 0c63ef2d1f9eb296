"""The site's facts, without the build: scripts/docs makes the pages and checks the same there.

Every page is in the navigation, every public name has an entry, and every kind of error is on the
page of symptoms.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

import ckptd
from ckptd.errors import KINDS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PYTHON = DOCS / "reference/python"
FRONTS = [
    "ckptd",
    "ckptd.elastic",
    "ckptd.events",
    "ckptd.monitor",
    "ckptd.readers",
    "ckptd.store",
    "ckptd.store.net",
    "ckptd.types",
    *(f"ckptd.testing.{name}" for name in ("launchers", "ranks", "store", "transport")),
]
"""Modules whose `__all__` is public; those of plugins are beside them."""


def leaves(part: Any) -> Iterator[str]:
    """Pages of the navigation."""
    if isinstance(part, str):
        yield part
    for inner in (
        part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    ):
        yield from leaves(inner)


def test_every_page_is_in_the_navigation_once() -> None:
    listed = list(leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    pages = {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md") if "changes" not in p.parts}
    assert sorted(set(listed)) == sorted(listed)
    # What is made of files outside docs/ is the business of scripts/site/hooks.py.
    assert {p for p in listed if not p.startswith("repo/")} - {"recover.md"} == pages


@cache
def entries() -> tuple[list[str], list[str]]:
    """Names that the pages of the API have an entry for, and modules that they promise whole."""
    text = "\n".join(page.read_text() for page in sorted(PYTHON.glob("*.md")))
    names = re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
    return names, re.findall(r"^<!-- all of ([\w.]+) -->$", text, re.MULTILINE)


def source(module: str) -> ast.Module:
    base = ROOT if module.startswith("ckptd.") or module == "ckptd" else ROOT / "plugins"
    path = base.joinpath(*module.split("."))
    return ast.parse(
        (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    )


def exported(module: str) -> list[str]:
    """`__all__`, without an import: a plugin's framework need not be there."""
    found = [
        name
        for node in source(module).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for name in ast.literal_eval(node.value)
    ]
    return [f"{module}.{name}" for name in found if name != "__version__"]


def plugins() -> set[str]:
    """Plugins that give more than a verb."""
    found = {
        p.parent.name for p in (ROOT / "plugins").glob("*/__init__.py") if p.parent.name[0] != "_"
    }
    return {name for name in found if exported(name) not in ([], [f"{name}.VERB"])}


def test_every_public_name_has_an_entry() -> None:
    names, modules = entries()
    assert {*FRONTS, *plugins()} <= set(modules)
    assert len(names) == len(set(names))
    missing = {name for module in modules for name in exported(module)} - set(names)
    # A function of the module of its name: its entry names both.
    assert not {name for name in missing if f"{name}.{name.rpartition('.')[2]}" not in names}


def test_the_index_has_every_name_of_the_front() -> None:
    linked = set(re.findall(r"\]\[ckptd\.(\w+)\]", (PYTHON / "index.md").read_text()))
    assert linked == set(ckptd.__all__) - {"__version__"}


@pytest.mark.parametrize("module", FRONTS)
def test_constants_have_docstrings(module: str) -> None:
    """Of classes and functions tests/test_repo.py asks it; the site shows none without."""
    home = importlib.import_module(module)
    without = []
    for name in exported(module):
        word = name.rpartition(".")[2]
        value = getattr(home, word)
        if not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)):
            where = [module, *imported_from(module, word)]
            without += [name] if not any(documented(w, word) for w in where) else []
    assert not without


def imported_from(module: str, name: str) -> list[str]:
    return [
        str(node.module)
        for node in ast.walk(source(module))
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]
    ]


def documented(module: str, name: str) -> bool:
    """Whether an assignment to the name is followed by a string."""
    return any(
        isinstance(node, ast.Assign | ast.AnnAssign)
        and name in ast.unparse(node).partition("=")[0]
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
        for node, after in pairwise(source(module).body)
    )


def test_every_kind_of_error_is_among_the_symptoms() -> None:
    text = (DOCS / "symptoms.md").read_text()
    kinds = {kind for kinds in KINDS.values() for kind in kinds}
    assert kinds <= set(re.findall(r"`([a-z0-9-]+)`", text))


def test_messages_that_symptoms_quote_are_those_of_the_code() -> None:
    said = re.findall(r"It says (\*.*?)\. [A-Z]", (DOCS / "symptoms.md").read_text())
    quotes = {quote for words in said for quote in re.findall(r"\*(.+?)\*", words)}
    code = "\n".join(path.read_text() for path in (ROOT / "ckptd").rglob("*.py"))
    assert len(quotes) > 6
    assert not {quote for quote in quotes if quote not in code}
