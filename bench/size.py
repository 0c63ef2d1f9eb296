"""How much code there is: lines without blanks, comments and docstrings, by package.

    python bench/size.py [FOLDER] [--json | --budget]

A line counts when it has a token that is neither a comment nor part of a docstring. FOLDER is a
checkout, by default this one; packages are the folders below ``ckptd``, ``plugins`` and
``examples``, then ``tests`` and ``bench`` as a whole.

``--budget`` compares the slices of ``ckptd`` with the table in ``docs/design/house.md``, and exits
with 1 when one has more code than it may have.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import common

ROOT = Path(__file__).resolve().parents[1]
HOUSE = "docs/design/house.md"
GROUND = "ground"
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Size:
    """Counts of one package, or of all.

    Attributes
    ----------
    lines
        All lines of its files.
    code
        Those with code.
    largest
        Code lines of its largest file.
    """

    files: int = 0
    lines: int = 0
    code: int = 0
    classes: int = 0
    functions: int = 0
    largest: int = 0

    def add(self, text: str) -> None:
        """Count one file."""
        tree = ast.parse(text)
        code = code_lines(text, tree)
        self.files += 1
        self.lines += text.count("\n")
        self.code += code
        self.largest = max(self.largest, code)
        for node in ast.walk(tree):
            self.classes += isinstance(node, ast.ClassDef)
            self.functions += isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def code_lines(text: str, tree: ast.Module) -> int:
    """Return how many lines of a module have code."""
    documented = {number for first, last in docstrings(tree) for number in range(first, last + 1)}
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - documented)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """Yield the first and last lines of docstrings, also of those below attributes."""
    for node in ast.walk(tree):
        for inner in node.body if isinstance(node, _Documented) else ():
            match inner:
                case ast.Expr(ast.Constant(str())):
                    yield inner.lineno, inner.end_lineno or inner.lineno


def package_of(path: Path) -> str:
    """Return the package of a file: ``ckptd/checkpoint/save``, ``plugins/ckptd_x``, ``tests``."""
    top, *folders = path.parts[:-1]
    if top in ("tests", "bench"):
        return top
    return "/".join([top, *folders])


def sizes(root: Path) -> dict[str, Size]:
    """Count all packages of a checkout."""
    found: dict[str, Size] = {}
    for top in ("ckptd", "plugins", "examples", "tests", "bench"):
        for path in sorted((root / top).rglob("*.py")):
            name = package_of(path.relative_to(root))
            found.setdefault(name, Size()).add(path.read_text())
    return found


def slice_sizes(root: Path) -> dict[str, int]:
    """Count the code lines of each slice; the files directly in ``ckptd`` and events are ground."""
    found: dict[str, int] = {}
    for path in sorted((root / "ckptd").rglob("*.py")):
        top, *rest = path.relative_to(root / "ckptd").parts
        name = top if rest and top != "events" else GROUND
        text = path.read_text()
        found[name] = found.get(name, 0) + code_lines(text, ast.parse(text))
    return found


def budgets(root: Path) -> dict[str, int]:
    """Read how many code lines each slice may have, from the page that says so."""
    _, _, section = (root / HOUSE).read_text().partition("\n## Budgets\n")
    rows = re.findall(r"(?m)^\| (\w+) \| (\d+) \|$", section.partition("\n## ")[0])
    return {name: int(most) for name, most in rows}


def compare_with_budgets(root: Path) -> int:
    """Print slices, code lines and budgets, and what is wrong; return the exit code."""
    found, most = slice_sizes(root), budgets(root)
    rows = [
        [name, found.get(name, 0), most.get(name, "")] for name in [*most, *found.keys() - most]
    ]
    print(common.table(["slice", "code", "budget"], rows))
    wrong = [
        f"{name}: {code} code lines, {code - most[name]} above its budget of {most[name]}"
        for name, code in found.items()
        if code > most.get(name, code)
    ]
    wrong += [f"{name}: has no budget in {HOUSE}" for name in sorted(found.keys() - most)]
    wrong += [
        f"{name}: has a budget in {HOUSE}, and no code" for name in sorted(most.keys() - found)
    ]
    print(*wrong, sep="\n", file=sys.stderr, end="\n" if wrong else "")
    return int(bool(wrong))


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--json", action="store_true", help="counts by package as JSON")
    parser.add_argument("--budget", action="store_true", help="slices against their budgets")
    options = parser.parse_args()
    if options.budget:
        sys.exit(compare_with_budgets(options.folder))
    found = sizes(options.folder)
    for top in ("ckptd", "plugins", "examples"):
        inside = [s for name, s in found.items() if name.split("/")[0] == top]
        if inside:
            total = {k: sum(getattr(s, k) for s in inside) for k in asdict(Size())}
            total["largest"] = max(s.largest for s in inside)
            found[f"{top}, all"] = Size(**total)
    if options.json:
        json.dump({name: asdict(size) for name, size in found.items()}, sys.stdout, indent=1)
        return
    head = ["package", *asdict(Size())]
    print(common.table(head, [[name, *asdict(size).values()] for name, size in found.items()]))


if __name__ == "__main__":
    main()
