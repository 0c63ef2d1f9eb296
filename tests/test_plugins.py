"""How installed packages add verbs: by entry points."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ckptd.errors import UsageError
from ckptd.plugins import DUMPS, VERBS, Verb, entries, load_entry
from tests.cli.running import COMMAND
from tests.processes import PATIENCE_S

ROOT = Path(__file__).parents[1]
MODULE = """
from ckptd.plugins import Verb
GREET = Verb("zz_verbs:greet", "Greet.", verbatim=True)
def greet(*words: str) -> int:
    print(*words)
    return 7
"""
NAMES = ["greet = zz_verbs:GREET", "wrong = zz_verbs:greet", "gone = zz_verbs:X", "ls = zz_verbs:X"]


def install(folder: Path, name: str, lines: list[str], group: str = VERBS) -> None:
    """Make what pip leaves behind, but for the module."""
    info = folder / f"{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}:{ROOT / 'plugins'}"}
    return subprocess.run(
        [*COMMAND, *words], env=env, capture_output=True, text=True, timeout=PATIENCE_S
    )


def test_a_verb_of_an_installed_package(tmp_path: Path) -> None:
    (tmp_path / "zz_verbs.py").write_text(MODULE)
    install(tmp_path, "zz_verbs", NAMES)
    done = command(tmp_path, "greet", "--loud", "x", "--json", "--help")
    assert (done.returncode, done.stdout) == (7, "--loud x --json --help\n")
    listed = command(tmp_path, "--help-all")
    assert "Greet." in listed.stdout
    assert "List the checkpoints" in listed.stdout  # no package takes a verb over
    for name in ("wrong", "gone"):
        assert f"verb {name} of zz_verbs 1.2" in listed.stderr
        assert command(tmp_path, name).returncode == 2
    assert "fails to load" not in command(tmp_path, "gc", str(tmp_path)).stderr


def test_shipped_verbs_load() -> None:
    assert all(isinstance(e.load(), Verb) for e in entries(VERBS))


@pytest.mark.parametrize("value", ["ckptd_gone:X", "zz_verbs:NOTHING"])
def test_a_package_that_does_not_load_is_named(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zz_verbs.py").write_text(MODULE)
    install(tmp_path, "aaa", [f"a = {value}"], DUMPS)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError) as caught:
        load_entry(DUMPS, "ckptd_nccl", "--flight-recorder")
    assert "an installed plugin fails to load" in caught.value.message
    assert "aaa 1.2" in str(caught.value.where)


def test_an_option_that_no_package_serves_names_ours() -> None:
    with pytest.raises(UsageError) as caught:
        load_entry("ckptd.nothing", "ckptd_nothing", "--nothing")
    assert caught.value.kind == "missing-package"
    assert "ckptd_nothing" in caught.value.message
