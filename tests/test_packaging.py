"""What an install gives: ckptd, the plugins under their own names, and the command."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ckptd
from tests.processes import PATIENCE_S

ROOT = Path(__file__).parents[1]
BUILD = "import sys, hatchling.build as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a copy of what is packaged, with one plugin more."""
    copy = tmp_path / "tree"
    copy.mkdir()
    for name in ("ckptd", "plugins", "examples"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "docs", copy / "docs")
    (copy / "scripts/site").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "scripts/site/wheel.py"):
        shutil.copy(ROOT / name, copy / name)
    plugin = copy / "plugins/ckptd_example"
    plugin.mkdir()
    (plugin / "__init__.py").write_text("GREETING = 'from a plugin'\n")
    project = copy / "pyproject.toml"
    before = project.read_text()
    after = re.sub(r"(?m)^packages = \[", 'packages = ["plugins/ckptd_example", ', before)
    assert after != before
    project.write_text(after)
    return copy


def build(hook: str, tree: Path, into: Path) -> Path:
    into.mkdir()
    command = [sys.executable, "-c", BUILD, hook, str(into)]
    done = subprocess.run(
        command, cwd=tree, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return into / done.stdout.split()[-1]


def named_pages() -> set[str]:
    """Pages that docstrings and messages of what is shipped name."""
    shipped = [p for top in ("ckptd", "plugins", "examples") for p in (ROOT / top).rglob("*.py")]
    found = {n for p in shipped for n in re.findall(r"docs/[\w/-]+\.md", p.read_text())}
    assert len(found) > 10
    return found


def test_a_wheel_holds_the_package_and_its_plugins(tree: Path, tmp_path: Path) -> None:
    wheel = zipfile.ZipFile(build("build_wheel", tree, tmp_path / "out"))
    names = wheel.namelist()
    info = f"ckptd-{ckptd.__version__}.dist-info"
    plugins = {p.parent.name for p in ROOT.glob("[pe]*s/ckptd_*/__init__.py")}
    assert {n.split("/")[0] for n in names} == {"ckptd", "ckptd_example", info} | plugins
    assert {
        "ckptd/py.typed",
        "ckptd/lay/shipped/hf.llama.lay",
        "ckptd/monitor/torch/recorder/recorder.cpp",
    } <= set(names)
    assert {
        f"ckptd/monitor/daemon/page/{n}" for n in ("index.html", "js/main.js", "fonts/inter.woff2")
    } <= set(names)
    assert f"{info}/licenses/LICENSE" in names
    assert [n for n in names if n.endswith("README.md")] == []  # pages for those who change it
    assert named_pages() - {n.removeprefix("ckptd/") for n in names} == set()
    assert "ckptd = ckptd.cli.main:main" in wheel.read(f"{info}/entry_points.txt").decode()

    site = tmp_path / "site"
    wheel.extractall(site)
    code = "import ckptd_example, ckptd; print(ckptd_example.GREETING, ckptd.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert done.stdout.strip() == f"from a plugin {site / 'ckptd/__init__.py'}"


def test_an_editable_install_points_at_all_folders(tree: Path, tmp_path: Path) -> None:
    wheel = zipfile.ZipFile(build("build_editable", tree, tmp_path / "out"))
    (pth,) = (n for n in wheel.namelist() if n.endswith(".pth"))
    assert wheel.read(pth).decode().split() == [str(tree / d) for d in ("", "examples", "plugins")]


def test_what_is_installed_is_compared_with_the_pins(tmp_path: Path) -> None:
    """Every pin has hashes; another file than one of these is named."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pin = next(i for i, line in enumerate(lines) if line.startswith("numpy=="))
    known = lines[pin + 1].removeprefix("#   sha256:")
    report = tmp_path / "report.json"
    for digest, code in ((known, 0), ("0" * 64, 1)):
        hashes = {"archive_info": {"hashes": {"sha256": digest}}}
        item = {"metadata": {"name": "NumPy"}, "download_info": hashes}
        report.write_text(json.dumps({"install": [item]}))
        command = [sys.executable, "-I", ROOT / "scripts/pins", "--check", report]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == code
        assert ("numpy: sha256" in done.stderr) == (code == 1)
    named = {line.partition("==")[0] for line in lines if "==" in line and line[0] != "#"}
    with_hash = {
        a.partition("==")[0]
        for a, b in itertools.pairwise(lines)
        if b.startswith("#   sha256:") and "==" in a and a[0] != "#"
    }
    assert named - with_hash == {"torch"}
