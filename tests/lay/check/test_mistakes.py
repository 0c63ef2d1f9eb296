"""Typical mistakes, and what is said about them: golden files.

Each program says in comments what it is checked with: ``#: layout NAME``, ``#: sizes a=1 b=2``,
``#: rank 0 NAME [SHAPE]``, ``#: stored NAME [SHAPE]``. ``UPDATE_GOLDEN=1`` writes the files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.errors import UsageError
from ckptd.lay.check import check_program
from ckptd.lay.check.layouts import Observation
from ckptd.lay.resolve import render
from ckptd.lay.syntax import parse

HERE = Path(__file__).parent / "mistakes"
PROGRAMS = sorted(HERE.glob("*.lay"))


def told(path: Path) -> str:
    """Return what a check says about a program, as the user sees it."""
    text = path.read_text()
    layout = ""
    sizes: dict[str, int] = {}
    stored: dict[str, tuple[int, ...]] = {}
    ranks: dict[int, dict[str, tuple[int, ...]]] = {}
    for line in text.splitlines():
        match line.removeprefix("#: ").split(maxsplit=1) if line.startswith("#: ") else []:
            case ["layout", name]:
                layout = name
            case ["sizes", rest]:
                sizes = {k: int(v) for k, v in (pair.split("=") for pair in rest.split())}
            case ["stored", rest]:
                name, shape = shaped(rest)
                stored[name] = shape
            case ["rank", rest]:
                rank, rest = rest.split(maxsplit=1)
                name, shape = shaped(rest)
                ranks.setdefault(int(rank), {})[name] = shape
    observed: Observation | None = ranks or stored or None
    findings = check_program([parse(text, path.name)], layout, observed, sizes)
    return render(findings) + "\n"


def shaped(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, shape = text.partition(" ")
    return name, tuple(map(int, shape.strip("[]").split()))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: p.stem)
def test_what_is_said_about_a_mistake(path: Path) -> None:
    golden = path.with_suffix(".txt")
    found = told(path)
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(found)
    assert found == golden.read_text()


def test_there_are_ten_mistakes_and_each_is_told() -> None:
    assert len(PROGRAMS) >= 10
    assert all(path.with_suffix(".txt").read_text().strip() for path in PROGRAMS)


SOURCES = [p.read_text() for p in (*PROGRAMS, *(HERE.parent / "programs").glob("*.lay"))]
PIECES = re.compile(r"[A-Za-z_]+|[0-9]+|\s+|.", re.DOTALL)


@given(st.sampled_from(SOURCES), st.lists(st.tuples(st.integers(0), st.integers(0)), max_size=4))
@settings(max_examples=60, deadline=None)
def test_a_broken_program_is_told_and_breaks_nothing(
    text: str, swaps: list[tuple[int, int]]
) -> None:
    """Pieces of real programs at wrong places end in findings or in errors of ours."""
    pieces = PIECES.findall(text)
    for one, two in swaps:
        pieces[one % len(pieces)] = pieces[two % len(pieces)]
    names = re.findall(r"^layout (\S+)", text, re.MULTILINE)
    sizes = {"kv": 4, "rep": 2, "hd": 8, "h": 64, "f": 96, "v": 100, "l": 4, "e": 8, "half": 4}
    try:
        program = parse("".join(pieces))
    except UsageError:
        return
    for name in names:
        for finding in check_program([program], name, {"model.norm.weight": (64,)}, sizes):
            assert finding.render()


def test_the_example_of_few_heads_names_what_fits() -> None:
    text = (HERE / "kv-heads.txt").read_text()
    assert "kv=8 does not divide over tp=16 (even). Observed local shape [640,8192] fits:" in text
    assert "(kv (q:rep|k:1|v:1) hd)@tp" in text
    assert "raw rows, as Megatron does when kv < tp" in text
    assert "with tp=(tk:8 tr:2)" in text
    assert "replicated heads, as vLLM does: needs [768,8192], rejected" in text
