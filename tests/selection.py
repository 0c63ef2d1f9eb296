"""Which tests `scripts/test --fast` runs: those that start no process, few cases of each."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

__all__ = ["is_fast", "starts_processes"]

ROOT = Path(__file__).parents[1]
CASES = 3
"""Most cases of a parametrised test that run."""
# Starting a process, or something that does: a checkpointer has a writer, a store's server is one.
STARTS = re.compile(
    r"\b(?:subprocess|multiprocessing|Popen|os\.fork|os\.posix_spawn|run_ranks|[Zz]ygote|moto)\b"
    r"|\bckptd\.testing\.ranks\b|\b(?:Checkpointer|serving)\("
)
MARKS = ("long", "dist", "slow", "s3", "slurm", "cuda", "plugins")


def is_fast(item: pytest.Item, cases: Counter[str]) -> bool:
    """Tell whether a test belongs to the fast ones; `cases` counts those of each function.

    Its module has passed `starts_processes`.
    """
    if any(item.get_closest_marker(mark) for mark in MARKS):
        return False
    name = item.nodeid.partition("[")[0]
    cases[name] += 1
    return cases[name] <= CASES


@cache
def starts_processes(module: Path) -> bool:
    """Tell whether a module of tests, or what it imports of them, names a way to start one."""
    todo = [module]
    todo += [
        c
        for d in module.parents
        if d.parent.is_relative_to(ROOT / "tests")
        if (c := d / "conftest.py").is_file()
    ]
    seen: set[Path] = set()
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            if STARTS.search(path.read_text()):
                return True
            todo += imported(path)
    return False


@cache
def imported(path: Path) -> tuple[Path, ...]:
    """Return the modules of tests that one imports."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
        elif isinstance(node, ast.Import):
            names += [a.name for a in node.names]
    found = (ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith("tests."))
    return tuple(p for p in found if p.is_file())
