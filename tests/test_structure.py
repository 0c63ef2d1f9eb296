"""The shape of the tree: no circle, no crowded folder, no name with two meanings, true notes."""

from __future__ import annotations

import ast
import configparser
import os
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


HOUSE = ROOT / "docs/design/house.md"
READMES = sorted((ROOT / "ckptd").glob("**/README.md"))
MOST_OF_A_README = 80  # without the list of files at its end
FILES = "\n## Files\n\n"
SOURCES = sorted(
    path
    for path in (ROOT / "ckptd").rglob("*.*")
    if path.suffix in (".py", ".lay", ".js", ".cpp") and path.parent.name != "uplot"
)
WRITE_FILES = "WRITE_FILES=1 scripts/test tests/test_structure.py"
SLICES = sorted(
    p.parent.name for p in (ROOT / "ckptd").glob("*/__init__.py") if p.parent.name != "events"
)


def named_in(text: str) -> set[str]:
    """Return the paths and modules that a page names in backticks."""
    found = set(re.findall(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:py|cpp|lay|md))`", text))
    return found - {path for path in found if path.startswith("./")}


def missing(page: Path, *bases: Path) -> list[str]:
    """Return what a page names and none of the folders has."""
    there = [ROOT, ROOT / "ckptd", *bases]
    return sorted(n for n in named_in(page.read_text()) if not any((b / n).exists() for b in there))


@cache
def contracts() -> configparser.ConfigParser:
    """Return the import rules."""
    rules = configparser.ConfigParser()
    rules.read(ROOT / ".importlinter")
    return rules


def lines_of(contract: str, option: str) -> list[str]:
    """Return the lines of an option of a contract."""
    return contracts()[f"importlinter:contract:{contract}"].get(option, "").split("\n")[1:]


def allowed(importer: str, other: str) -> bool:
    """Tell whether the rules between slices let one import another."""
    heights = {}
    for height, line in enumerate(reversed(lines_of("layers", "layers"))):
        for name in re.findall(r"ckptd\.(\w+)", line):
            heights[name] = height, " : " in line
    (a, _), (b, beside) = heights[importer], heights[other]
    if b > a or (a == b and not beside):
        return False
    pairs = {
        (source, forbidden)
        for name in contracts().sections()
        if contracts()[name].get("type") == "forbidden"
        for source in contracts()[name]["source_modules"].split()
        for forbidden in contracts()[name]["forbidden_modules"].split()
    }
    return (f"ckptd.{importer}", f"ckptd.{other}") not in pairs


def test_names_of_pages_are_found() -> None:
    text = "`a/b.py`, `a/b`, `c.py`, `a.b`, `plugins/`, `GET /x`, `./x/y`, `a/*.py`, a/c.py"
    assert named_in(text) == {"a/b.py", "a/b", "c.py", "plugins/"}


@pytest.mark.parametrize("page", sorted((ROOT / "docs/design").glob("*.md")), ids=lambda p: p.stem)
def test_modules_that_a_design_page_names_are_there(page: Path) -> None:
    bases = [ROOT / "ckptd/lay"] if page.stem == "lay" else []
    assert [n for n in missing(page, *bases) if n.endswith(".py")] == []


def functions_of(path: Path) -> set[str]:
    """Return the functions and classes of a module, methods as ``Class.method``."""
    found = set()
    for node in tree_of(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{n.name}" for n in node.body if isinstance(n, ast.FunctionDef)}
    return found


def untrue(text: str, *bases: Path) -> list[str]:
    """Return each `file.py: function` of a text that is in none of the folders."""
    return [
        f"{name}: {function}"
        for name, function in re.findall(r"`([\w/]+\.py): ([\w.]+)`", text)
        if not any((b / name).exists() and function in functions_of(b / name) for b in bases)
    ]


def test_what_docstrings_name_is_there() -> None:
    """A class or function by its module; a word of that module is enough."""
    wrong = []
    for path in NAMES.values():
        for name in set(re.findall(r"(?<!`)`(ckptd(?:\.\w+)+)`(?!`)", path.read_text())):
            module = max((m for m in NAMES if f"{name}.".startswith(f"{m}.")), key=len)
            first = name.removeprefix(module).strip(".").partition(".")[0]
            if not re.search(rf"\b{first}\b", NAMES[module].read_text()):
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert wrong == []


def test_functions_that_a_page_names_are_found() -> None:
    text = (
        "`checkpoint/save/arena.py: Slot.begin` `x.py: f` `checkpoint/save/arena.py: Slots.begin`"
    )
    assert untrue(text, ROOT / "ckptd") == ["x.py: f", "checkpoint/save/arena.py: Slots.begin"]


@pytest.mark.parametrize(
    "page",
    [*sorted((ROOT / "docs/design").glob("*.md")), *READMES],
    ids=lambda p: f"{p.parent.name}-{p.stem}",
)
def test_functions_that_a_page_names_are_there(page: Path) -> None:
    bases = [ROOT / "ckptd/checkpoint"] if page.name == "save.md" else [page.parent]
    assert untrue(page.read_text(), ROOT / "ckptd", *bases) == []


def test_one_save_is_told_line_by_line() -> None:
    page = (ROOT / "docs/design/save.md").read_text()
    _, _, section = page.partition("\n## One save, line by line\n")
    section = section.partition("\n## ")[0]
    assert len(section.splitlines()) <= 70
    steps = [int(n) for n in re.findall(r"(?m)^(\d+)\. ", section)]
    assert steps == list(range(1, 23))
    named = [part for part in re.split(r"(?m)^\d+\. ", section)[1:] if ".py: " in part]
    assert len(named) == len(steps)


def test_every_slice_has_a_page() -> None:
    assert [p.parent.name for p in READMES] == ["ckptd", *SLICES]


@pytest.mark.parametrize("page", READMES, ids=lambda p: p.parent.name)
def test_the_page_of_a_slice_is_true_and_short(page: Path) -> None:
    text = page.read_text()
    assert len(text.partition(FILES)[0].splitlines()) <= MOST_OF_A_README
    assert missing(page, page.parent) == []
    started = re.findall(r"`python -m ([\w.]+)", text)
    assert [n for n in started if n not in NAMES and n + ".__main__" not in NAMES] == []
    nouns = re.findall(r"(?m)^\| `(\w+)` \| `([\w/.]+)` \|", text)
    assert 5 <= len(nouns) <= 10
    where = {noun: (page.parent / module).read_text() for noun, module in nouns}
    assert [
        n for n, code in where.items() if not re.search(rf"(?m)^(class |def )?{n}\b", code)
    ] == []


def sentence_of(path: Path) -> str:
    """Return the first sentence of a file's docstring or comment, with a paragraph `In it`."""
    if path.suffix == ".py":
        first, *more = (ast.get_docstring(tree_of(path)) or "").split("\n\n")
        text = "\n".join([first, *(p for p in more[:1] if p.startswith("In it: "))])
    else:
        head = re.match(r"(?:(?:#|//) .*\n)+", path.read_text())
        text = re.sub(r"(?m)^(?:#|//) ", "", head[0] if head else "")
        text = re.split(r"(?<=\.)\s+(?=[A-Z])", text)[0]
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def file_rows(folder: Path) -> Iterator[str]:
    """Yield a row for each file of a slice."""
    for path in SOURCES:
        own = path.relative_to(ROOT / "ckptd").parts
        if folder.name == (own[0] if len(own) > 1 and own[0] != "events" else "ckptd"):
            yield f"| `{path.relative_to(folder)}` | {sentence_of(path)} |"


def files_of(folder: Path) -> str:
    """Return the section of a slice's README that lists its files."""
    intro = f"What each file says of itself; `{WRITE_FILES}` renews the list."
    return "\n".join([FILES, intro, "", "| file | is |", "|---|---|", *file_rows(folder), ""])


@pytest.mark.parametrize("page", READMES, ids=lambda p: p.parent.name)
def test_the_page_of_a_slice_lists_its_files(page: Path) -> None:
    before, _, _ = page.read_text().partition(FILES)
    wanted = before + files_of(page.parent)
    assert "|  |" not in wanted, "a file says nothing of itself"
    if os.environ.get("WRITE_FILES"):
        page.write_text(wanted)
    assert page.read_text() == wanted, f"not what the files say: {WRITE_FILES} renews it"


@pytest.mark.parametrize("page", READMES, ids=lambda p: p.parent.name)
def test_the_page_of_a_slice_says_that_no_import_is_passed_over(page: Path) -> None:
    assert "no import is passed over" in " ".join(page.read_text().lower().split())


def test_no_import_between_slices_is_passed_over() -> None:
    """Two plugins may; between slices a row of ckptd/parts.py is what there is."""
    passing = [s for s in contracts().sections() if "ignore_imports" in contracts()[s]]
    assert passing == ["importlinter:contract:plugins-apart"]


def test_rules_between_slices_are_read() -> None:
    assert allowed("checkpoint", "base")
    assert allowed("monitor", "elastic")
    assert allowed("plugins", "version")
    assert not allowed("checkpoint", "elastic")
    assert not allowed("checkpoint", "lay")
    assert not allowed("readers", "elastic")
    assert not allowed("monitor", "store")


def test_slices_import_what_they_may_also_for_types_and_in_functions() -> None:
    """import-linter leaves imports for types out."""
    wrong = []
    for name, path in NAMES.items():
        own = name.partition(".")[2].partition(".")[0]
        if own in ("", "__main__", "testing"):
            continue
        for other in imported(path):
            there = other.partition(".")[2].partition(".")[0]
            if there and there != own and (there == "testing" or not allowed(own, there)):
                wrong.append(f"{name} -> {other}")
    assert wrong == []


def test_every_slice_has_a_budget() -> None:
    _, _, section = HOUSE.read_text().partition("\n## Budgets\n")
    rows = re.findall(r"(?m)^\| (\w+) \| \d+ \|$", section)
    assert sorted(rows) == sorted(["ground", *SLICES])


def shadowed(root: Path) -> list[str]:
    """Return the programs beside a folder called torch that are run by their path.

    Python puts the folder of such a program first on ``sys.path``: ``import torch`` would give it
    the folder beside it. With ``python -m`` that is the current folder. A program is a file that
    a text names by its path, or one that guards its main part and that none starts as a module.
    """
    texts = {
        path: path.read_text()
        for top in ("ckptd", "plugins", "examples", "tests", "bench")
        for path in (root / top).rglob("*.py")
    }
    as_modules = {n for text in texts.values() for n in re.findall(r'"-m",\s*"([\w.]+)"', text)}
    # `Path(__file__).with_name("x.py")`, `HERE / "x.py"`, `ROOT / "tests/x.py"`
    by_path = {
        base / name
        for path, text in texts.items()
        for name in re.findall(r'"((?:\w+/)*\w+\.py)"', text)
        for base in (path.parent, root)
    }
    found = []
    for path, text in texts.items():
        if not (path.parent / "torch").is_dir() or path.name in ("__init__.py", "__main__.py"):
            continue
        name = path.relative_to(root).as_posix()
        guarded = '\nif __name__ == "__main__":' in text
        started = name.removesuffix(".py").replace("/", ".") in as_modules
        if path in by_path or (guarded and not started):
            found.append(name)
    return sorted(found)


def test_no_program_is_run_beside_a_folder_called_torch(tmp_path: Path) -> None:
    (tmp_path / "tests/ring/torch").mkdir(parents=True)
    for name in ("ring/program", "ring/module", "ring/__main__", "ring/torch/inside", "other"):
        (tmp_path / f"tests/{name}.py").write_text('\nif __name__ == "__main__":\n    main()\n')
    for name in ("ring/node", "ring/helpers", "ring/torch/node"):
        (tmp_path / f"tests/{name}.py").write_text("main()\n")
    (tmp_path / "tests/ring/test_ring.py").write_text(
        'run(["python", "-m", "tests.ring.module"])\nrun([Path(__file__).with_name("node.py")])\n'
    )
    assert shadowed(tmp_path) == ["tests/ring/node.py", "tests/ring/program.py"]
    assert shadowed(ROOT) == []
