"""URLs find their stores; installed packages add some, broken ones are reported."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from ckptd.errors import CkptdError, UsageError
from ckptd.store import base, open_store, register_store, registry_problems
from ckptd.store.base import registered_schemes, scheme_of
from ckptd.store.generic import FsspecStore
from ckptd.store.local import LocalStore
from ckptd.store.memory import MemoryStore, forget_memory
from ckptd.store.s3 import S3Store


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("relative/path", LocalStore),
        ("/absolute/path", LocalStore),
        ("file:///absolute/path", LocalStore),
        ("FILE:///absolute/path", LocalStore),
        ("c:/is/a/path", LocalStore),
        ("memory://x", MemoryStore),
        ("s3://bucket/prefix", S3Store),
        ("fsspec+memory://x", FsspecStore),
        ("fsspec+file:///x", FsspecStore),
        ("simplecache::memory://x", FsspecStore),
        ("local:///x", FsspecStore),
    ],
)
def test_url_to_store(url: str, kind: type) -> None:
    assert type(open_store(url)) is kind


def test_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    assert isinstance(open_store(tmp_path), LocalStore)
    assert scheme_of("a::b/c") == "file"


@pytest.mark.parametrize("url", ["", "memory://", "memory:///", "s3://", "nothing://x", "s3:///x"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert caught.value.message in (
        "a memory store needs a name",
        "no bucket",
        "no store for this URL scheme",
        "invalid URL of a store",
    )


def test_a_missing_package_is_told() -> None:
    with pytest.raises(UsageError) as caught:
        open_store("gs://bucket")
    assert caught.value.kind == "missing-package"
    assert "gcsfs" in str(caught.value)


def test_memory_is_shared_by_name_in_this_process() -> None:
    name = uuid.uuid4().hex
    open_store(f"memory://{name}").put("a", b"1")
    assert open_store(f"memory://{name}/").get("a") == b"1"
    assert not open_store(f"memory://{name}2").exists("a")
    forget_memory(name)
    assert not open_store(f"memory://{name}").exists("a")


def test_built_in_stores_go_through_the_registry() -> None:
    assert {"file", "memory", "s3"} <= set(registered_schemes())
    with pytest.raises(UsageError):
        register_store("file", "x:y")
    with pytest.raises(UsageError):
        register_store("no scheme", "x:y")


def test_a_registered_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_openers", dict(base._openers))
    register_store("mine", lambda url, options: MemoryStore(url.partition("://")[2]))
    assert open_store("mine://x").url == "memory://x"
    register_store("memory", "ckptd.store.local:open_local", replace=True)


def install(folder: Path, name: str, module: str, entries: list[str]) -> None:
    """Make what pip leaves behind: a module and a dist-info folder with entry points."""
    (folder / f"{name}.py").write_text(module)
    info = folder / f"{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("\n".join(["[ckptd.stores]", *entries]) + "\n")


GOOD = """
from ckptd.store.memory import MemoryStore
def open_it(url, options):
    assert options == {"depth": 3}
    return MemoryStore(url.partition("://")[2])
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path, "zz_good", GOOD, ["good = zz_good:open_it"])
    install(tmp_path, "zz_broken", "raise RuntimeError('no driver')", ["broken = zz_broken:x"])
    install(tmp_path, "zz_missing", "", ["missing = zz_missing:not_there"])
    install(tmp_path, "zz_greedy", GOOD, ["s3 = zz_greedy:open_it", "No Scheme = zz_greedy:x"])
    install(tmp_path, "zz_number", "x = 3", ["number = zz_number:x"])
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_an_installed_store(packages: Path) -> None:
    store = open_store("good://place", depth=3)
    assert store.url == "memory://place"
    assert "good" in registered_schemes()


def test_a_broken_package_breaks_only_its_own_scheme(packages: Path) -> None:
    assert isinstance(open_store("memory://x"), MemoryStore)
    assert isinstance(open_store("s3://bucket"), S3Store)
    for url, word in (("broken://x", "no driver"), ("missing://x", "not_there")):
        with pytest.raises(UsageError) as caught:
            open_store(url)
        assert "the package that opens this URL scheme fails to load" in caught.value.message
        assert word in str(caught.value)


def test_problems_are_reported(packages: Path) -> None:
    problems = {p.scheme: p for p in registry_problems()}
    assert set(problems) == {"broken", "missing", "s3", "No Scheme", "number"}
    assert "no driver" in problems["broken"].message
    assert problems["broken"].origin == "zz_broken 1.2 (zz_broken:x)"
    assert "another store" in problems["s3"].message
    assert "not a URL scheme" in problems["No Scheme"].message
    assert "not callable" in problems["number"].message


def test_no_package_is_no_problem() -> None:
    assert registry_problems() == []


def test_nothing_heavy_is_imported_to_open_a_path() -> None:
    code = (
        "import sys; from ckptd.store import open_store; open_store('x').exists('y'); "
        "heavy = ['torch', 'fsspec', 's3fs', 'botocore', 'asyncio', 'importlib.metadata']; "
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_errors_of_opening_are_ours() -> None:
    with pytest.raises(CkptdError):
        open_store("http+weird://x", anything=object())
