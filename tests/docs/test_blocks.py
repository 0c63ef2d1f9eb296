"""Code blocks of README and docs/ run, are run by another test, or say why they do not run.

A comment in the line before a block says the latter two: ``<!-- run by tests/... -->``,
``<!-- not run: REASON -->``.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from ckptd.cli.main import app, installed_verbs
from ckptd.elastic.cli import separated
from ckptd.lay.syntax import parse
from tests import programs
from tests.processes import free_port

# On one worker: each has a process of its own that imports PyTorch.
pytestmark = pytest.mark.xdist_group("blocks")

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if "changes" not in p.parts),
]
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!-- (run by|not run:) ([^\n]*) -->\n *\Z")


class Block(NamedTuple):
    page: str
    line: int
    language: str
    code: str
    mark: str
    why: str


@cache
def blocks(language: str) -> list[Block]:
    """Fenced blocks of a language, with what the comment before each says."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for fence in FENCE.finditer(text):
            said = COMMENT.search(text[: fence.start()])
            mark, why = said.groups() if said else ("", "")
            code = re.sub(rf"^{fence[1]}", "", fence[3], flags=re.MULTILINE)
            line = text[: fence.start(3)].count("\n")
            name = str(page.relative_to(ROOT))
            found.append(Block(name, line, fence[2].strip(), code, mark, why))
    return [b for b in found if b.language == language]


def test_languages_are_those_that_are_looked_at() -> None:
    known = {"python", "lay", "lay rules", "json", "yaml", "toml", "bash", "text", ""}
    marks = [FENCE.findall(page.read_text()) for page in PAGES]
    assert {language for found in marks for _, language, _ in found} <= known


def test_marks_are_true() -> None:
    for block in blocks("python"):
        if block.mark == "run by":
            test = ROOT / block.why
            assert test.is_file(), block
            assert Path(block.page).name in test.read_text(), block
        elif block.mark:
            assert len(block.why) > 10, block


def to_run() -> dict[str, list[Block]]:
    pages: dict[str, list[Block]] = {}
    for block in blocks("python"):
        if not block.mark:
            pages.setdefault(block.page, []).append(block)
    return pages


@pytest.mark.parametrize("page", to_run())
def test_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"page": page, "blocks": [(b.line, b.code) for b in to_run()[page]]}
    (tmp_path / "blocks.json").write_text(json.dumps(given))
    monkeypatch.setenv("CKPTD_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    done = programs.run(ROOT / "tests/docs/kit.py", "blocks.json", cwd=tmp_path, forking=True)
    assert done.returncode == 0, done.stderr


UNDER_WAY = """
import torch.distributed as dist

others = {}  # of a function of this block, what it has would not go when the block ends
exec('''
import threading, time
main, held = threading.get_ident(), threading.Event()
def hold(_):
    if threading.get_ident() != main:
        held.set()
        time.sleep(1)
''', others)
while not others["held"].is_set():
    dist.all_reduce(torch.ones(1 << 20), async_op=True).get_future().then(others["hold"])
"""


@pytest.mark.parametrize("last", ["", "raise ValueError('mine')\n"])
def test_a_block_ends_whose_collective_is_still_under_way(tmp_path: Path, last: str) -> None:
    """A reducer that was the last to hold their group waited for threads that wanted the GIL."""
    given = {"page": "page", "blocks": [(1, UNDER_WAY + last)]}
    (tmp_path / "blocks.json").write_text(json.dumps(given))
    done = programs.run(ROOT / "tests/docs/kit.py", "blocks.json", cwd=tmp_path)
    assert done.returncode == bool(last), done.stderr
    assert "mine" in done.stderr or not last


def commands() -> Iterator[tuple[str, str]]:
    """Command lines of ckptd in indented blocks, one each."""
    for page in PAGES:
        text = re.sub(r"\\\n\s*", " ", page.read_text())
        for line in re.findall(
            r"^(?: {4}|\t)\s*(?:\$ )?((?:\w+=\S+ |exec )*ckptd .*)$", text, re.MULTILINE
        ):
            command = re.split(r"\s+#|\s+\||;|\s+&|\s+\d?>", line)[0]
            if not re.search(r"\[|\.\.\.|\||\bVERB\b", command):
                yield str(page.relative_to(ROOT)), command.strip()


def test_commands_parse() -> None:
    installed_verbs()
    found = list(commands())
    wrong = []
    for page, line in found:
        words = shlex.split(line)
        words = words[words.index("ckptd") + 1 :]
        if words[0] in {"run", "slurm"}:
            words = ["run", *separated(words[1:], {})]
        try:
            app.parse_args(words, exit_on_error=False, print_error=False)
        except Exception as error:  # noqa: BLE001 - whatever the parser raises
            wrong.append(f"{page}: {line}: {error}")
    assert not wrong
    assert len(found) > 100


@pytest.mark.parametrize("language", ["json", "yaml"])
def test_data_parses(language: str) -> None:
    for block in blocks(language):
        (json.loads if language == "json" else yaml.safe_load)(block.code)


def test_lay_parses() -> None:
    """Those of docs/reference/lay.md are checked whole by tests/lay/syntax/test_reference.py."""
    for block in blocks("lay"):
        parse(block.code)
