"""The page of conversions: its commands are these, and with frameworks each is run again."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

from ckptd.readers.find import readers
from ckptd.reshard.cli.reshard import reshard
from tests.interop import matrix

SOURCES, TARGETS = matrix.sources(), matrix.targets()


def test_the_page_has_each_conversion() -> None:
    page = matrix.PAGE.read_text()
    for source in SOURCES:
        assert f"\n## {source.name}\n\n{source.made}.\n" in page
        for target in TARGETS:
            assert f"`{matrix.shown_command(source, target)}` |\n" in page
    assert page.count("\n## ") == len(SOURCES)
    assert page.count(" | `ckptd ") == len(SOURCES) * len(TARGETS)


def test_each_reader_and_each_format_is_there() -> None:
    assert {source.reader for source in SOURCES} == {reader.name for reader in readers()}
    words = [w for t in TARGETS for s in SOURCES for c in t.commands(s) for w in c]
    formats = get_args(get_args(get_type_hints(reshard, include_extras=True)["format"])[0])
    assert {*formats} - {*words} <= {"ckptd"}


@pytest.mark.plugins
@pytest.mark.dist
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_what_comes_of_it(source: matrix.Source) -> None:
    found = {target.name: outcome for target, outcome in matrix.outcomes(source)}
    page = matrix.PAGE.read_text()
    assert f"\n{matrix.row(source, found)}\n" in page, "stale: scripts/interop"
    assert f"\n{matrix.section(source, found)}" in page, "stale: scripts/interop"
