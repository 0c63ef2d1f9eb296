"""What a release is made from: version, changes, citation, issue forms."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from ckptd import __version__
from tests.processes import PATIENCE_S

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def test_the_newest_entry_of_the_changes_is_this_version() -> None:
    found = re.findall(r"(?m)^## (\S+) \((\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text())
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found[0] == (__version__, citation["date-released"])
    assert citation["version"] == __version__


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_issue_forms_have_what_a_form_needs(form: Path) -> None:
    found = yaml.safe_load(form.read_text())
    if form.stem == "config":
        assert set(found) == {"blank_issues_enabled"}
        return
    assert {"name", "description", "body"} <= set(found)
    for part in found["body"]:
        assert part["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert part["attributes"].get("label") or part["attributes"].get("value")


def test_a_release_is_refused_while_something_is_not_committed(tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=tmp_path / "tree", capture_output=True, text=True, timeout=PATIENCE_S
        )

    subprocess.run(["git", "clone", "-q", "--depth=1", f"file://{ROOT}", tmp_path / "tree"])
    (tmp_path / "tree/more").write_text("more")
    done = run("scripts/release")
    assert done.returncode == 1
    assert "not committed: ?? more" in done.stderr
    (tmp_path / "tree/more").unlink()
    note = tmp_path / "tree/docs/changes/+new.bugfix.md"
    note.write_text("Something.\n")
    run("git", "add", ".")
    run("git", "-c", "user.name=x", "-c", "user.email=x@example.org", "commit", "-qm", "x")
    done = run("scripts/release")
    assert done.returncode == 1
    assert "not in CHANGELOG.md: " in done.stderr
    assert not (tmp_path / "tree/dist").exists()
