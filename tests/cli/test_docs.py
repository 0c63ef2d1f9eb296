"""docs/reference/cli.md says everything that the command line takes and prints."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from ckptd.cli.main import VERBS as OWN
from ckptd.cli.main import app, installed_verbs
from ckptd.cli.output import Document
from tests.cli.running import Cli

REFERENCE = Path(__file__).parents[2] / "docs/reference"
PAGE = (REFERENCE / "cli.md").read_text()
SECTIONS = dict(re.findall(r"^## ckptd (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


VERBS = [*OWN, *installed_verbs()]

INNER = {
    "agent": ("run", "status", "stop"),
    "ctl": ("status", "why", "restart", "exclude", "drain", "add", "pause", "resume", "stop"),
    "lay": ("check", "fmt", "show"),
    "recorder": ("build",),
}
"""Verbs that are a family of verbs."""

SHARED = {"ctl": 3}
"""Documents of a family whose verbs share some: all orders to a controller have one."""


def documents() -> dict[str, list[type[Document]]]:
    """Documents by verb; those of a family together."""
    for verb in VERBS:
        app[verb].default_command  # noqa: B018 - imports its module
    out: dict[str, list[type[Document]]] = {}
    for cls in (
        own for kind in Document.__subclasses__() for own in kind.__subclasses__() or [kind]
    ):
        out.setdefault(str(cls.__struct_config__.tag).partition(" ")[0], []).append(cls)
    return out


def structs_in(kind: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for inner in get_args(kind):
        yield from structs_in(inner)


def fields(cls: type[msgspec.Struct]) -> set[str]:
    """Names of all fields of a document and of what it contains."""
    hints = get_type_hints(cls)
    names = set(cls.__struct_encode_fields__)
    for name in cls.__struct_fields__:
        for inner in structs_in(hints[name]):
            names |= fields(inner)
    return names


def test_every_verb_has_a_section() -> None:
    assert list(SECTIONS) == list(VERBS)


def test_every_verb_has_a_document() -> None:
    assert set(documents()) | {"demo"} >= set(VERBS)


def linked(section: str) -> str:
    """Sections of other pages of the reference that tell more of a document."""
    out = ""
    for page, title in re.findall(r"\]\((\w+\.md)#([a-z-]+)\)", section):
        text = (REFERENCE / page).read_text()
        parts = re.findall(r"^#+ ([^\n]+)\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
        out += "".join(part for head, part in parts if head.lower().replace(" ", "-") == title)
    return out


@pytest.mark.parametrize("verb", [v for v in VERBS if v != "demo"])
def test_every_field_is_documented(verb: str) -> None:
    said = set(re.findall(r"`([a-z_]+)`", SECTIONS[verb] + linked(SECTIONS[verb])))
    assert documents()[verb]
    # An option that makes another verb of it has a document of its own.
    own = [cls for cls in documents()[verb] if " --" not in str(cls.__struct_config__.tag)]
    assert len(own) == SHARED.get(verb, len(INNER.get(verb, ("",))))
    for cls in documents()[verb]:
        assert not fields(cls) - said - {"schema"}


def options(cli: Cli, verb: str) -> set[str]:
    helps = [cli.good(verb, *([i] if i else []), "--help-all").out for i in INNER.get(verb, ("",))]
    helps = [re.sub(r"(?m)^Example: .*$", "", text) for text in helps]
    found = {o for text in helps for o in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)}
    return found - {"--help", "--help-all"}


@pytest.mark.parametrize("verb", VERBS)
def test_options_are_documented_and_none_is_invented(cli: Cli, verb: str) -> None:
    taken = options(cli, verb)
    assert "--json" in taken
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", SECTIONS[verb])) == taken


def test_switches_have_one_spelling(cli: Cli, root: str) -> None:
    assert cli("ls", root, "--no-json").code == 2


def test_exit_codes() -> None:
    from ckptd import errors
    from ckptd.cli.main import BROKEN_PIPE, INTERRUPTED

    codes = {getattr(errors, name).exit_code for name in errors.__all__ if name != "KINDS"}
    table = PAGE.partition("## Exit codes")[2].partition("\n## ")[0]
    said = {int(n) for n in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    assert said == codes | {0, INTERRUPTED, BROKEN_PIPE}


def test_every_document_of_the_package_belongs_to_a_verb() -> None:
    for verb in VERBS:
        for command in [app[verb][i] for i in INNER.get(verb, ())] or [app[verb]]:
            importlib.import_module(command.default_command.__module__)
    assert set(documents()) <= set(VERBS)
