"""`bench/all.py` names headline tables older than their code, and writes the README's figures."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "bench"))
try:
    headline = importlib.import_module("all")
finally:
    sys.path.remove(str(ROOT / "bench"))
common = headline.common
SOME = "save_load"


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, and a table that was measured there."""
    monkeypatch.setattr(common, "HERE", tmp_path / "bench")
    monkeypatch.setattr(common, "RESULTS", tmp_path / "bench" / "results")
    monkeypatch.setattr(headline, "MOST_COMMITS", 2)
    (tmp_path / "bench" / "results").mkdir(parents=True)
    git(tmp_path, "init", "-q")
    measured(tmp_path, change(tmp_path, "ckptd/checkpoint/save.py"))
    return tmp_path


def git(root: Path, *arguments: str) -> str:
    who = ("-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    ended = subprocess.run(
        ["git", "-C", str(root), *who, *arguments], check=True, capture_output=True, text=True
    )
    return ended.stdout.strip()


def change(root: Path, path: str) -> str:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    with (root / path).open("a") as file:
        file.write("x = 1\n")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "x: change")
    return git(root, "rev-parse", "HEAD")


def measured(root: Path, commit: str) -> None:
    (root / f"bench/results/{SOME}.json").write_text(json.dumps({"commit": commit}))


def test_commits_to_the_code_that_is_measured_make_a_table_old(history: Path) -> None:
    for _ in range(2):
        change(history, "ckptd/checkpoint/save.py")
    assert headline.too_old([SOME]) == []
    change(history, "ckptd/store/disk.py")
    assert "3 commits" in headline.too_old([SOME])[0]


def test_other_commits_do_not(history: Path) -> None:
    for _ in range(4):
        change(history, "ckptd/monitor/rules.py")
    assert headline.too_old([SOME]) == []


@pytest.mark.parametrize("commit", ["0123456789ab", "unknown", ""])
def test_a_table_of_an_unknown_commit_is_old(history: Path, commit: str) -> None:
    measured(history, commit)
    assert "not in this history" in headline.too_old([SOME])[0]


def test_a_table_that_was_never_measured_is_old(history: Path) -> None:
    (history / f"bench/results/{SOME}.json").unlink()
    assert headline.too_old([SOME])


def test_a_table_with_uncommitted_changes_counts_from_its_commit(history: Path) -> None:
    measured(history, git(history, "rev-parse", "HEAD") + "+")
    assert headline.too_old([SOME]) == []


def test_a_table_says_where_it_comes_from(history: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headline, "HEADLINES", {SOME: headline.HEADLINES[SOME]})
    monkeypatch.setattr(headline, "UNTOLD", frozenset())
    page, kept = history / "bench/RESULTS.md", history / f"bench/results/{SOME}.json"
    common.publish(SOME, "python x", "| a |", {})
    assert headline.untold() == []
    text, told = page.read_text(), json.loads(kept.read_text())
    page.write_text("\n".join(line for line in text.splitlines() if "commit" not in line))
    assert "does not tell commit" in headline.untold()[0]
    page.write_text(text)
    for key in ("commit", "date", "load", "machine", "command"):
        kept.write_text(json.dumps({k: v for k, v in told.items() if k != key}))
        assert "does not tell commit" in headline.untold()[0]
    monkeypatch.setattr(headline, "UNTOLD", frozenset({SOME}))
    assert headline.untold() == []
    kept.write_text(json.dumps(told))
    assert "take it off" in headline.untold()[0]


def test_the_tables_that_do_not_are_those_that_are_named() -> None:
    assert headline.untold() == []


def test_every_headline_bench_is_there() -> None:
    for command, paths in headline.HEADLINES.values():
        assert (ROOT / "bench" / command.split()[0]).is_file()
        assert all((ROOT / path).is_dir() for path in paths)


def test_the_readme_tells_figures_of_the_tables() -> None:
    page = headline.README.read_text()
    assert headline.written(page) == page


def test_a_figure_of_another_table_changes_the_readme(history: Path) -> None:
    sample = {"blocked_s": 1.5, "durable_s": 2.5, "cached_s": 3.5}
    runs = {"ckptd": [sample], "DCP save": [{**sample, "blocked_s": 10.0}], "DCP async": [sample]}
    told = {"commit": "0", "command": "python x", "date": "2026-01-02", "data": {"runs": runs}}
    (history / "bench/results/first.json").write_text(json.dumps(told))
    (history / f"bench/results/{SOME}.json").unlink()
    rows = headline.figures().splitlines()[2:]
    assert rows[0].split(" | ")[1:] == ["1.50", "–", "1.50, DCP async", "`python x`, 2026-01-02 |"]
    assert len(rows) == 3
