"""The error tree, and docs/reference/errors.md in step with it and with every kind in the code."""

from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from ckptd import errors
from ckptd.errors import KINDS, CkptdError, ConflictError, CorruptError

pytestmark = pytest.mark.xdist_group("source")
ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/reference/errors.md").read_text()
CLASSES = {cls.__name__: cls for cls in KINDS}
SOUGHT = (ast.Call, ast.Constant)
MAKERS = {"fail": "TransientStoreError", "_refused": "RefusedError"}
"""Functions that make an error of a kind, and its class."""


@pytest.fixture(scope="module", autouse=True)
def _forget() -> Iterator[None]:
    """Let no later test's garbage collection walk the trees of all modules."""
    yield
    nodes.cache_clear()


def rows(section: str) -> list[list[str]]:
    """Cells of the table rows below a heading, without the backticks."""
    text = re.split(rf"^## {section}$", PAGE, flags=re.MULTILINE)[1].split("\n## ")[0]
    lines = re.findall(r"^\| (`.*) \|$", text, flags=re.MULTILINE)
    return [[cell.strip().replace("`", "") for cell in line.split(" | ")] for line in lines]


def documented() -> set[tuple[str, str]]:
    """(class, kind) pairs of the page; a row may name several classes."""
    return {(name, r[0]) for r in rows("Kinds") for name in r[1].split(", ")}


@cache
def nodes() -> dict[Path, list[ast.Call | ast.Constant]]:
    """Calls and constants of each module that ships."""
    return {
        path: [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, SOUGHT)]
        for top in ("ckptd", "plugins", "examples")
        for path in sorted((ROOT / top).rglob("*.py"))
    }


def raised() -> Iterator[tuple[str, str, str]]:
    """(class, kind, where) of every error with a kind of its own that the code builds."""
    for path, found in nodes().items():
        for node in found:
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
            name = MAKERS.get(name.rpartition(".")[2], name)
            for word in node.keywords:
                if word.arg == "kind" and name in CLASSES:
                    for part in ast.walk(word.value):
                        if isinstance(part, ast.Constant) and isinstance(part.value, str):
                            yield name, part.value, f"{path.relative_to(ROOT)}:{node.lineno}"


def strings_in_code() -> set[str]:
    return {
        node.value
        for path, found in nodes().items()
        for node in found
        if path != Path(errors.__file__)
        and isinstance(node, ast.Constant)
        and isinstance(node.value, str)
    }


def test_the_page_lists_every_class_as_it_is() -> None:
    found = {r[0]: (r[1], r[2], int(r[3])) for r in rows("Classes")}
    assert found == {
        name: (cls.__bases__[0].__name__, cls.default_kind, cls.exit_code)
        for name, cls in CLASSES.items()
    }


TABLE = {(cls.__name__, kind) for cls, kinds in KINDS.items() for kind in kinds}


def test_every_kind_in_the_code_is_one_of_the_table() -> None:
    other = [f"{w}: {c} {k}" for c, k, w in raised() if (c, k) not in TABLE]
    assert not other, "not in KINDS; an error that nobody branches on has its class's own kind"


def test_every_kind_of_the_table_is_in_the_code() -> None:
    assert not {kind for _, kind in TABLE} - strings_in_code()


def test_the_page_is_the_table() -> None:
    kinds = [r[0] for r in rows("Kinds")]
    assert len(kinds) == len(set(kinds))
    assert documented() == TABLE
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", kind) for kind in kinds)


def test_the_tree_in_the_module_is_the_tree() -> None:
    names = re.findall(r"\b([A-Z]\w+Error)\b", (errors.__doc__ or "").split("Each error")[0])
    assert sorted(set(names)) == sorted(CLASSES)


def test_a_kind_by_default_means_nothing_else() -> None:
    assert not {cls.default_kind for cls in CLASSES.values()} & {kind for _, kind in TABLE}


def test_kinds_by_default_differ() -> None:
    kinds = [cls.default_kind for cls in CLASSES.values()]
    assert len(kinds) == len(set(kinds))


def sample(cls: type[CkptdError]) -> CkptdError:
    return cls("it broke", kind="of-test", where="w", wanted=3, found=(4, 5), hint="try again")


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_an_error_survives_pickle_and_plain_data(name: str) -> None:
    error = sample(CLASSES[name])
    for copy in (pickle.loads(pickle.dumps(error)), CkptdError.from_dict(error.to_dict())):
        assert type(copy) is CLASSES[name]
        assert copy.to_dict() == error.to_dict()
        assert str(copy) == str(error)


def test_the_text_says_where_wanted_found_and_hint() -> None:
    assert str(sample(CorruptError)).splitlines() == [
        "it broke",
        "  where:  w",
        "  wanted: 3",
        "  found:  (4, 5)",
        "  hint:   try again",
    ]
    assert str(ConflictError("taken")) == "taken"


def test_an_error_of_a_newer_version_becomes_the_base_class() -> None:
    error = CkptdError.from_dict({"class": "FutureError", "message": "m", "kind": "new"})
    assert (type(error), error.message, error.kind) == (CkptdError, "m", "new")


def test_zero_and_empty_are_shown() -> None:
    error = CorruptError("short", wanted=1, found=0)
    assert "found:  0" in str(error)


def test_what_a_file_says_in_an_error_neither_steers_a_terminal_nor_begins_a_line() -> None:
    said = "a\x1b[2J\nERROR all is lost"
    error = CkptdError("bad " + said[:5], where=said, wanted=said, found=said, hint=said)
    lines = str(error).split("\n")
    assert all(line.isprintable() for line in lines)
    assert "\x1b" not in error.message
    assert [line for line in lines if line.endswith("ERROR all is lost")] == [
        " " * 10 + "ERROR all is lost"
    ] * 4
    assert CkptdError.from_dict(error.to_dict()).where == said
