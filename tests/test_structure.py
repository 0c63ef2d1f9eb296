"""The shape of the tree: no circle, no crowded folder, no name with two meanings, true notes."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted((ROOT / "ckptd").rglob("*.py"))
MOST_IN_A_FOLDER = 25
pytestmark = pytest.mark.xdist_group("source")  # one worker parses them


@cache
def tree_of(path: Path) -> ast.Module:
    """Return a module parsed, not before a test wants it: every worker collects this file."""
    return ast.parse(path.read_text(), str(path))


@pytest.fixture(scope="module", autouse=True)
def _forget() -> Iterator[None]:
    """Let no later test's garbage collection walk the trees of all modules."""
    yield
    tree_of.cache_clear()


def name_of(path: Path) -> str:
    """Return a module's dotted name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path): path for path in MODULES}


def imported(path: Path) -> Iterator[str]:
    """Yield the modules of ckptd that one imports, wherever in it the import stands."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in NAMES)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in NAMES:
                    yield inner
                elif node.module in NAMES:
                    yield node.module


def circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """Return the strongly connected components with more than one member (Tarjan, 1972)."""
    numbers: dict[str, int] = {}
    lows: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        numbers[node] = lows[node] = len(numbers)
        stack.append(node)
        for other in arrows[node]:
            if other not in numbers:
                visit(other)
                lows[node] = min(lows[node], lows[other])
            elif other in stack:
                lows[node] = min(lows[node], numbers[other])
        if lows[node] == numbers[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(set(stack[at:]))
            del stack[at:]

    for node in arrows:
        if node not in numbers:
            visit(node)
    return found


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]
    assert circles({"a": {"b"}, "b": set()}) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    arrows = {name: set(imported(path)) - {name} for name, path in NAMES.items()}
    # The package itself imports what its public names come from, when they are first used.
    arrows = {name: others - {"ckptd"} for name, others in arrows.items()}
    assert [sorted(circle) for circle in circles(arrows)] == []


@pytest.mark.parametrize("top", ["ckptd", "plugins", "examples"])
def test_no_folder_is_crowded(top: str) -> None:
    count: dict[str, int] = defaultdict(int)
    for path in (ROOT / top).rglob("*.py"):
        count[str(path.parent.relative_to(ROOT))] += path.name != "__init__.py"
    assert {folder: n for folder, n in count.items() if n > MOST_IN_A_FOLDER} == {}


def test_no_public_class_has_the_name_of_another() -> None:
    where = defaultdict(list)
    for path in MODULES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(name_of(path))
    assert {name: modules for name, modules in where.items() if len(modules) > 1} == {}


@pytest.mark.parametrize("page", sorted((ROOT / "docs/design").glob("*.md")), ids=lambda p: p.stem)
def test_modules_that_a_design_page_names_are_there(page: Path) -> None:
    named = re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", page.read_text())
    bases = [ROOT, ROOT / "ckptd", *([ROOT / "ckptd/lay"] if page.stem == "lay" else [])]
    assert [n for n in named if not any((base / n).exists() for base in bases)] == []
