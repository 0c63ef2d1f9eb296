"""What users read is plain English: patterns that need a second reading stay at zero.

Messages are all strings of the packages but docstrings: errors, hints, help, log lines.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOPS = ("ckptd", "plugins", "bench", "examples")

# On one worker, for it reads each file once.
pytestmark = pytest.mark.xdist_group("english")

PLAIN = {
    "who": r"(?:^|[.;:] )(?:Who|Whose)\b(?![^.]*\?)|\b[Ww]hoever\b",
    "anew": r"\banew\b",
    "told": r"\b(?:is|are|was|were) told\b",
    "stands for": r"\bst(?:ands?|ood) for\b",
    "not had": r"\b(?:to be|not) had\b|\bfor want of\b|\bin good order\b|\bheard of\b|\bof ours\b",
}
"""Write instead: the process that acts; again; is notified, gets or logs; means, represents; is
available, because ... ran out, successfully, reports, of ckptd."""

MESSAGES = PLAIN | {
    "this is no": r"\b(?<![Tt]here )(?:is|are) (?:no|none)\b(?! (?:longer|more|less|later)\b)",
    "no such": r"\b[Tt]here (?:is|are) no such\b",
    "nobody": r"\b(?:[Nn]obody|[Ss]omebody|[Ss]trangers?)\b",
}
"""A message says what is wrong and what was expected: "invalid X", "unknown X", "X is not a Y"."""

BEGINNINGS = r"(?:What|Let|Who(?:ever|se)?)\b"
"""A docstring begins with a noun or with an imperative instead."""


def hits(text: str, patterns: dict[str, str]) -> list[str]:
    flat = " ".join(text.split())
    if not re.search("|".join(patterns.values()), flat):
        return []
    return [
        f"{name}: ...{flat[max(0, m.start() - 40) : m.end() + 30]}..."
        for name, pattern in patterns.items()
        for m in re.finditer(pattern, flat)
    ]


@cache
def texts() -> dict[str, list[tuple[str, str]]]:
    """Return messages, docstrings and comments of packages and benches, each with its place."""
    found: dict[str, list[tuple[str, str]]] = {"messages": [], "docstrings": [], "comments": []}
    for path in [p for top in TOPS for p in sorted((ROOT / top).rglob("*.py"))]:
        source, where = path.read_text(), str(path.relative_to(ROOT))
        docstrings: set[ast.AST] = set()
        parts: set[ast.AST] = set()
        for n in ast.walk(ast.parse(source)):
            if isinstance(n, ast.Expr):
                docstrings.add(n.value)
            elif isinstance(n, ast.JoinedStr):
                parts.update(n.values)
                fixed = (str(v.value) if isinstance(v, ast.Constant) else "X" for v in n.values)
                found["messages"].append((f"{where}:{n.lineno}", "".join(fixed)))
            elif isinstance(n, ast.Constant) and isinstance(n.value, str) and n not in parts:
                kind = "docstrings" if n in docstrings else "messages"
                found[kind].append((f"{where}:{n.lineno}", n.value))
        lines = re.sub(r"^ *#", "#", source, flags=re.MULTILINE)
        blocks = re.findall(r"(?:^#.*\n)+|(?<=  )# .*", lines, flags=re.MULTILINE)
        found["comments"] += [(where, re.sub("^# ?", "", b, flags=re.MULTILINE)) for b in blocks]
    return found


def without_code(page: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", " ", page, flags=re.DOTALL)


def test_messages_are_plain() -> None:
    spoken = [(where, text) for where, text in texts()["messages"] if " " in text]
    wrong = [f"{where}: {hit}" for where, text in spoken for hit in hits(text, MESSAGES)]
    assert not wrong, "\n".join(wrong)


def pages() -> list[Path]:
    docs = ROOT / "docs"
    found = [ROOT / "README.md", *docs.glob("*.md"), *(docs / "guide").glob("*.md")]
    found += [p for top in ("ckptd", "plugins") for p in (ROOT / top).rglob("README.md")]
    return sorted(found)


@pytest.mark.parametrize("path", pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_guides_are_plain(path: Path) -> None:
    assert not hits(without_code(path.read_text()), PLAIN)


def test_words_of_the_page_are_plain() -> None:
    """Texts in the page's scripts: what stands in quotes and has a blank."""
    scripts = sorted((ROOT / "ckptd/monitor/daemon/page").rglob("*.js"))
    assert scripts
    wrong = [
        f"{path.relative_to(ROOT)}: {hit}"
        for path in scripts
        for text in re.findall(r'"((?:[^"\\\n]|\\.)* (?:[^"\\\n]|\\.)*)"', path.read_text())
        for hit in hits(text, MESSAGES)
    ]
    assert not wrong, "\n".join(wrong)


def test_docstrings_and_comments_are_plain() -> None:
    both = [*texts()["docstrings"], *texts()["comments"]]
    wrong = [f"{where}: {hit}" for where, text in both for hit in hits(text, PLAIN)]
    first = [(where, text) for where, text in texts()["docstrings"] if re.match(BEGINNINGS, text)]
    wrong += [f"{where}: beginning: {text.splitlines()[0]}" for where, text in first]
    assert not wrong, "\n".join(wrong)


def test_the_patterns_are_found() -> None:
    wrong = {
        "who": ["Who is late does not get more.", "It ends. Whose turn it is"],
        "anew": ["workers are started\n anew"],
        "told": ["the node is told"],
        "stands for": ["what it stood for"],
        "not had": ["killed for want of memory", "it ended in good order"],
        "this is no": ["this is no job", "these are no local ranks", "a request is none"],
        "no such": ["There is no such part"],
        "nobody": ["Nobody answers"],
    }
    for name, texts in wrong.items():
        for text in texts:
            assert [h.partition(":")[0] for h in hits(text, MESSAGES)] == [name]
    for text in ("there is no file", "it is no longer there", "which holds none", "a node answers"):
        assert not hits(text, MESSAGES)
