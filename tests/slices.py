"""Folders of tests that `scripts/test --changed` runs, one a line; all of them are ``tests``.

Changed is what differs from where this branch left ``origin/main``, committed or not. The tests of
a slice, a plugin or an example run when a file of it has changed, or one of a slice that it
imports; those of a folder of tests, when a file in it has changed, or a helper elsewhere that it
imports. What belongs to no slice (set-up, what all slices stand on, what all tests share) is tested
by everything.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import grimp

__all__ = ["affected", "changed"]

ROOT = Path(__file__).resolve().parents[1]
TREES = ("ckptd", "plugins", "examples")
ALWAYS = ["tests/test_repo.py", "tests/test_structure.py"]


def changed(base: str = "origin/main") -> list[str]:
    """Return the files that differ from the commit at which this branch left another."""

    def git(*words: str, check: bool = True) -> list[str]:
        asked = ["git", "-C", str(ROOT), *words]
        done = subprocess.run(asked, capture_output=True, text=True, check=check)
        return done.stdout.split("\n")[:-1]

    left_at, *_ = *git("merge-base", "HEAD", base, check=False), "HEAD"
    others = git("ls-files", "--others", "--exclude-standard")
    return sorted({*git("diff", "--name-only", "--no-renames", left_at), *others})


def affected(files: Iterable[str]) -> list[str]:
    """Return the folders and files of tests that changes in `files` may break."""
    found, packages = set[str](), set[str]()
    for file in files:
        parts = file.split("/")
        if parts[0] == "docs" or file.endswith(".md"):
            found.add("tests/docs")
        elif parts[0] in TREES and len(parts) > 2:
            packages.add(f"ckptd.{parts[1]}" if parts[0] == "ckptd" else parts[1])
        elif parts[0] == "tests" and len(parts) > 2:
            found |= {_folder(file), *_importers_among_tests(file)}
        else:
            return ["tests"]
    found.update(folder for name in _with_importers(packages) for folder in _tests_of(name))
    return [*sorted(f for f in found if (ROOT / f).exists()), *ALWAYS] if found else []


def _with_importers(packages: set[str]) -> set[str]:
    if not packages:
        return set()
    sys.path[:0] = [str(ROOT / tree) for tree in TREES[1:]]
    tops = [p.parent.name for tree in TREES[1:] for p in (ROOT / tree).glob("ckptd_*/__init__.py")]
    graph = grimp.build_graph("ckptd", *tops, cache_dir=str(ROOT / ".import_linter_cache"))
    for name in {*tops, *graph.find_children("ckptd")}:
        if graph.find_children(name):
            graph.squash_module(name)
    there = packages & graph.modules  # one may have gone with all that it had
    return packages.union(*map(graph.find_modules_that_directly_import, there)) - {"ckptd"}


def _tests_of(package: str) -> Iterator[str]:
    first, _, name = package.partition(".")
    if name:
        yield from (f"tests/{name}", f"tests/cli/{name}")
    else:
        yield from (f"tests/{tree}/{first.removeprefix('ckptd_')}" for tree in TREES[1:])


def _folder(file: str) -> str:
    parts = file.split("/")
    return "/".join(parts[: 3 if parts[1] == "cli" and len(parts) > 3 else 2])


def _importers_among_tests(file: str) -> Iterator[str]:
    if Path(file).name.startswith("test_"):
        return
    name = re.compile(rf"\b{re.escape(file.removesuffix('.py').replace('/', '.'))}\b")
    for path in (ROOT / "tests").rglob("*.py"):
        if name.search(path.read_text()):
            yield _folder(str(path.relative_to(ROOT)))


if __name__ == "__main__":
    print("\n".join(affected(changed())))
