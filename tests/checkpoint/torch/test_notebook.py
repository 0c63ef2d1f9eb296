"""What a notebook shows of a checkpointer, and the notebook among the examples."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

import ckptd

pytestmark = pytest.mark.usefixtures("writing_thread")

EXAMPLE = Path(__file__).parents[3] / "docs/examples/notebook.ipynb"


def rows(html: str) -> list[list[str]]:
    """Parse it: what is not well-formed, or has an element more, is found."""
    page = ET.fromstring(f"<div>{html}</div>")
    assert {e.tag for e in page.iter()} <= {"div", "p", "pre", "table", "tr", "td"}
    return [[cell.text or "" for cell in row] for row in page.iter("tr")]


def test_what_is_shown(tmp_path: Path) -> None:
    root = str(tmp_path / "a<b>&'\"")
    evil = "<script>alert(1)</script>&"
    with ckptd.Checkpointer(root) as ck:
        assert repr(ck) == (f"<ckptd.Checkpointer {root!r}, rank 0 of 1: nothing saved or loaded>")
        assert rows(ck._repr_html_()) == [["no checkpoint yet"]]
        for step in range(1, 23):
            ck.save(step, {"w": torch.zeros(3)}, metadata={"loss": 1.0, evil: evil})
        ck.wait()
        ck.tag(22, "prod")
        ck.annotate(22, {"loss": 0.5})
        assert repr(ck) == f"<ckptd.Checkpointer {root!r}, rank 0 of 1: generation 1, step 22>"
        html = ck._repr_html_()
        assert "<script" not in html
        head, *found = rows(html)
        assert [int(row[0]) for row in found] == list(range(3, 23))
        assert found[-1][head.index("tags")] == "prod"
        assert json.loads(found[-1][head.index("metadata")]) == {"loss": 0.5, evil: evil}
        (tmp_path / "a<b>&'\"" / "ckptd.json").write_text("damage")
        assert "damage" not in ck._repr_html_()
        assert rows(ck._repr_html_()) == []
    assert repr(ck).endswith("rank 0 of 1: closed>")
    assert rows(ck._repr_html_()) == []


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells, one after the other, in one namespace; the last expression of each is shown."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(EXAMPLE.read_text())
    assert notebook["nbformat"] == 4
    code = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    assert all(c["outputs"] == [] for c in notebook["cells"] if c["cell_type"] == "code")
    names: dict[str, object] = {}
    for number, cell in enumerate(code):
        exec(compile(cell, f"cell {number}", "exec"), names)
    assert names["resumed"] == 30
    ck = names["ck"]
    assert isinstance(ck, ckptd.Checkpointer)
    ck.close()
