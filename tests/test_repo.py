"""Habits of this repository that no other tool checks."""

from __future__ import annotations

import ast
import configparser
import itertools
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]

# On one worker, for it parses each file once.
pytestmark = pytest.mark.xdist_group("source")

# In pieces, so that this file passes its own test.
MACHINE_PATHS = re.compile(
    r"(?<![\w.}$])/(?:" + "|".join(["work", "root", "home/" + r"\w+"]) + ")/"
)
MARKS = re.compile(r"\b(?:TO" + "DO|FIX" + "ME)\\b")

SHIPPED = ("ckptd", "plugins", "examples")
Function = ast.FunctionDef | ast.AsyncFunctionDef
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@cache
def files() -> tuple[Path, ...]:
    """All text files that people write."""
    tops = ["ckptd", "plugins", "examples", "tests", "bench", "docs", "scripts", ".ci"]
    found = [p for top in tops for p in (ROOT / top).rglob("*")]
    found += [p for p in ROOT.iterdir() if p.suffix in {".md", ".toml", ".txt", ".yaml", ".cfg"}]
    text = {".py", ".md", ".toml", ".txt", ".yaml", ".sh", ".json", ".js", ".html", ".css", ""}
    return tuple(
        sorted(
            p
            for p in found
            if p.is_file()
            and p.suffix in text
            and "__pycache__" not in p.parts
            # Recorded data: fixtures of old versions, results of campaigns.
            and "compat" not in p.relative_to(ROOT).parts
        )
    )


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def python_files(*tops: str) -> list[Path]:
    return [
        p
        for p in files()
        if p.suffix == ".py" and (not tops or p.relative_to(ROOT).parts[0] in tops)
    ]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(path)))


@pytest.fixture(scope="module", autouse=True)
def _forget() -> Iterator[None]:
    """Let no later test's garbage collection walk the trees of all files."""
    yield
    tree.cache_clear()
    nodes.cache_clear()


def functions(path: Path) -> Iterator[Function]:
    return (n for n in nodes(path) if isinstance(n, Function))


def test_files_are_found() -> None:
    assert len(python_files("ckptd")) > 10
    assert ROOT / "scripts/test" in files()


@pytest.mark.parametrize(
    ("pattern", "what"), [(MACHINE_PATHS, "a path of one machine"), (MARKS, "unfinished work")]
)
def test_words_that_do_not_belong(pattern: re.Pattern[str], what: str) -> None:
    found = [
        f"{shown(p)}:{number}: {line.strip()[:100]}"
        for p in files()
        for number, line in enumerate(p.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, what


# --- public functions: documented, and their return type said ---------------------------------


def is_public(name: str) -> bool:
    return not name.startswith("_")


def test_public_functions_say_what_they_return() -> None:
    without = [
        f"{shown(p)}:{f.lineno} {f.name}"
        for p in python_files(*SHIPPED)
        for f in functions(p)
        if f.returns is None
    ]
    assert not without


def test_public_names_are_documented() -> None:
    documented = documented_methods()
    without = []
    for path in python_files(*SHIPPED):
        for owner, node in public_definitions(tree(path)):
            if node.name.startswith("test_"):  # contract tests say it in their names
                continue
            if "overload" in map(ast.unparse, node.decorator_list):  # the last one is documented
                continue
            inherited = owner is not None and inherits(owner, node.name, documented)
            if not ast.get_docstring(node) and not inherited:
                without.append(f"{shown(path)}:{node.lineno} {node.name}")
    assert not without


def public_definitions(
    module: ast.Module,
) -> Iterator[tuple[ast.ClassDef | None, Function | ast.ClassDef]]:
    """Public functions and classes of a module, and the public methods of the latter."""
    for node in module.body:
        if isinstance(node, Function | ast.ClassDef) and is_public(node.name):
            yield None, node
        if isinstance(node, ast.ClassDef) and is_public(node.name):
            for inner in node.body:
                if isinstance(inner, Function) and is_public(inner.name) and not is_setter(inner):
                    yield node, inner


def is_setter(function: Function) -> bool:
    """A property is documented at its getter, an overloaded function at its implementation."""
    decorators = {ast.unparse(d).rsplit(".", 1)[-1] for d in function.decorator_list}
    return bool(decorators & {"setter", "deleter", "overload"})


def bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(b).split("[")[0].rsplit(".", 1)[-1] for b in node.bases]


@cache
def documented_methods() -> dict[str, tuple[list[str], frozenset[str]]]:
    """Class name -> its bases, and the methods that have a docstring there."""
    classes: dict[str, tuple[list[str], frozenset[str]]] = {}
    for path in python_files(*SHIPPED):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                methods = (n for n in node.body if isinstance(n, Function))
                names = frozenset(m.name for m in methods if ast.get_docstring(m))
                classes[node.name] = (bases(node), names)
    return classes


def inherits(
    owner: ast.ClassDef, method: str, classes: dict[str, tuple[list[str], frozenset[str]]]
) -> bool:
    """Whether a class of ours above `owner` documents the method that this one overrides."""
    todo = bases(owner)
    while todo:
        above, names = classes.get(todo.pop(), ([], frozenset()))
        if method in names:
            return True
        todo += above
    return False


# --- decoding and crashing ---------------------------------------------------------------------


def called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def decoders_in_passing(path: Path) -> Iterator[tuple[int, str]]:
    """Yield calls with which msgspec collects what it knows of a type in the middle of something.

    Two threads that do so at once end the process, see `ckptd/decoding.py`. Within a function only
    what the caller says may be decoded: the type is one of the parameters.
    """
    if "msgspec" not in path.read_text() and "decoding" not in path.read_text():
        return
    given = {
        id(node): {arg.arg for arg in (*f.args.args, *f.args.kwonlyargs)}
        for f in functions(path)
        for node in ast.walk(f)
        if isinstance(node, ast.Call)
    }
    for node in nodes(path):
        if not isinstance(node, ast.Call):
            continue
        name = called(node)
        bare = re.fullmatch(r"(msgspec\.)?((json|msgpack)\.Decoder|convert)", name)
        typed = name.endswith("decode") and any(k.arg == "type" for k in node.keywords)
        ours = name in {"json_decoder", "msgpack_decoder", "converter"}
        late = ours and id(node) in given and ast.unparse(node.args[0]) not in given[id(node)]
        if typed or late or (bare and name != "convert"):
            yield node.lineno, ast.unparse(node)[:80]


def test_decoders_are_made_at_import() -> None:
    paths = [p for p in python_files(*SHIPPED) if p.name != "decoding.py"]
    found = {shown(p): list(decoders_in_passing(p)) for p in paths}
    assert not {path: calls for path, calls in found.items() if calls}


def test_decoders_in_passing_are_found(tmp_path: Path) -> None:
    lines = [
        "import msgspec",
        "good = json_decoder(int)",
        "bad = msgspec.json.Decoder(int)",
        "def f(raw, kind):",
        "    a = json_decoder(kind).decode(raw)",
        "    b = json_decoder(int).decode(raw)",
        "    c = msgspec.json.decode(raw, type=int)",
        "    d = msgspec.convert(raw, int)",
        "    e = msgspec.json.decode(raw)",
    ]
    path = tmp_path / "module.py"
    path.write_text("\n".join(lines))
    assert {line for line, _ in decoders_in_passing(path)} == {3, 6, 7, 8}


def test_processes_of_ours_report_their_crashes() -> None:
    """A writing process that was ended by SIGSEGV had said nothing: its log was empty."""
    mains = [p for p in python_files(*SHIPPED) if '__name__ == "__main__"' in p.read_text()]
    mains += [ROOT / "ckptd/cli/main.py", ROOT / "ckptd/elastic/torch/session/zygote.py"]
    assert len(mains) > 8
    silent = [
        shown(p)
        for p in mains
        if "ckptd/testing" not in shown(p)
        and not any(
            isinstance(n, ast.Call) and called(n) in {"report_crashes", "faulthandler.enable"}
            for n in nodes(p)
        )
    ]
    assert not silent


# --- packaging ---------------------------------------------------------------------------------


def test_every_package_has_its_place_in_the_import_rules() -> None:
    rules = configparser.ConfigParser()
    rules.read(ROOT / ".importlinter")
    layers = re.findall(r"ckptd\.(\w+)", rules["importlinter:contract:layers"]["layers"])
    testing = re.findall(r"ckptd\.(\w+)", rules["importlinter:contract:testing"]["source_modules"])
    modules = {p.stem for p in (ROOT / "ckptd").iterdir() if p.is_dir() or p.suffix == ".py"} - {
        "__init__",
        "__main__",
        "__pycache__",
        "testing",
    }
    assert modules <= set(layers)
    assert modules <= set(testing)


def beside() -> list[Path]:
    """Return the packages that ship with ckptd and that it does not import."""
    return [p.parent for top in ("plugins", "examples") for p in ROOT.glob(f"{top}/*/__init__.py")]


def test_every_plugin_is_packaged() -> None:
    found = {shown(p) for p in beside()}
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert set(packages) == {"ckptd"} | found
    assert all(re.fullmatch(r"(plugins|examples)/ckptd_\w+", p) for p in found)


def test_the_import_rules_know_every_plugin() -> None:
    rules = configparser.ConfigParser()
    rules.read(ROOT / ".importlinter")
    plugins = {p.name for p in beside()}
    for section, key in [
        ("importlinter", "root_packages"),
        ("importlinter:contract:plugins", "forbidden_modules"),
        ("importlinter:contract:plugins-apart", "modules"),
    ]:
        assert set(rules[section][key].split()) - {"ckptd"} == plugins


def test_plugins_import_fronts_alone() -> None:
    """What lies in a package of ckptd is its own affair: plugins use what the package exports."""
    inner = []
    for path in python_files("plugins"):
        for node in nodes(path):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            for name in (n for n in names if n.startswith("ckptd.")):
                front = ROOT / name.replace(".", "/") / "__init__.py"
                if not front.is_file() and name.count(".") > 1:
                    inner.append(f"{shown(path)}:{node.lineno} {name}")
    assert not inner


def test_every_dependency_is_pinned_within_its_range() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line]
    pins = {}
    for line in (x for x in lines if not x.startswith("#")):
        pin = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.]*)", line)
        assert pin, f"not an exact pin: {line}"
        pins[canonicalize_name(pin[1])] = pin[2]
    project = PROJECT["project"]
    wanted = itertools.chain(
        project["dependencies"],
        *project["optional-dependencies"].values(),
        PROJECT["build-system"]["requires"],
    )
    for requirement in map(Requirement, wanted):
        if requirement.name != "ckptd":
            version = pins.get(canonicalize_name(requirement.name))
            assert version, f"constraints.txt has no pin for {requirement}"
            assert requirement.specifier.contains(version), f"{requirement} excludes {version}"


def test_the_scripts_know_every_extra() -> None:
    text = (ROOT / "scripts/install").read_text()
    for extra in PROJECT["project"]["optional-dependencies"]:
        assert re.search(rf"^ +.*\b{extra}\b.*\)", text, flags=re.MULTILINE), extra


# --- documentation -----------------------------------------------------------------------------


def test_links_between_pages_resolve() -> None:
    broken = []
    for page in (p for p in files() if p.suffix == ".md"):
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            to = page.parent / path if path else page
            if "://" in target or target.startswith("mailto:"):
                continue
            if not to.exists() or (anchor and to.suffix == ".md" and anchor not in anchors(to)):
                broken.append(f"{shown(page)}: {target}")
    assert not broken


@cache
def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub and the site make them, and of entries of the API."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ +(.*)$", text, flags=re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", head).strip().lower() for head in heads]
    found = {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in plain}
    return found | set(re.findall(r"^::: ([\w.]+)$", text, flags=re.MULTILINE))


def test_change_notes_are_named_as_the_generator_wants() -> None:
    kinds = "|".join(t["directory"] for t in PROJECT["tool"]["towncrier"]["type"])
    name = re.compile(rf"(\d+|\+[\w-]+)\.({kinds})(\.\d+)?\.md")
    odd = [
        p.name
        for p in (ROOT / "docs/changes").iterdir()
        if p.name not in {"README.md", "CHANGELOG.md"} and not name.fullmatch(p.name)
    ]
    assert not odd


def test_design_notes_are_listed() -> None:
    folder = ROOT / "docs/design"
    index = (folder / "README.md").read_text()
    notes = sorted(p.name for p in folder.glob("*.md") if p.name != "README.md")
    assert notes
    assert [n for n in notes if f"({n})" not in index] == []
