"""docs/reference/environment.md has every variable of ours that the code names, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/environment.md").read_text()
NAME = re.compile(r"CKPTD_[A-Z_]*[A-Z]")


def named(source: str) -> set[str]:
    """Return the variables that a module names: as a whole text, or in a longer one."""
    texts = [n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant)]
    return {v for text in texts if isinstance(text, str) for v in NAME.findall(text)}


def test_the_page_has_the_variables_of_the_code() -> None:
    modules = [p for top in ("ckptd", "plugins") for p in (ROOT / top).rglob("*.py")]
    code = set().union(*(named(p.read_text()) for p in modules))
    page = set(re.findall(r"^\| `(CKPTD_\w+)` \|", PAGE, re.MULTILINE))
    assert len(code) > 20
    assert code == page


def test_a_variable_is_found_wherever_it_is_named() -> None:
    assert named('A = "CKPTD_A"\nprint(f"CKPTD_B={A}", {"CKPTD_C_D": 1})') == {
        "CKPTD_A",
        "CKPTD_B",
        "CKPTD_C_D",
    }
