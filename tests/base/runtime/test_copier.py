"""The native copy of loads, and what is done without it."""

from __future__ import annotations

import errno
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ckptd.base.runtime import copier
from ckptd.base.runtime.copier import COPIER, copy_values
from ckptd.errors import UsageError


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Let no test find, or leave, what another has loaded."""
    copier._native.cache_clear()
    yield
    copier._native.cache_clear()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CKPTD_BUILDS", str(tmp_path_factory.mktemp("builds")))
        return COPIER.build()


@pytest.fixture
def builds(built: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CKPTD_BUILDS", str(built.parent))
    return built


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors gain nothing")
@pytest.mark.usefixtures("builds")
def test_the_native_copy_writes_the_values_and_nothing_around_them() -> None:
    assert copier._native() is not None
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, 1 << 20, dtype=np.uint8)
    least = copier.LEAST_BYTES
    for size in (least, least + 1, least + 4095, least + 16384, (1 << 19) + 77):
        for at, start in ((0, 0), (1, 63), (64, 8), (4095, 3)):
            target = np.full(1 << 20, 7, np.uint8)
            expected = target.copy()
            expected[at : at + size] = source[start : start + size]
            copy_values(target[at : at + size], source[start : start + size])
            assert np.array_equal(target, expected), (size, at, start)


@pytest.mark.usefixtures("builds")
def test_what_lies_in_strides_is_copied_too() -> None:
    source = np.arange(1 << 20, dtype=np.uint32).reshape(1024, 1024)
    target = np.zeros((1024, 1024), np.uint32)
    copy_values(target, source.T)
    assert np.array_equal(target, source.T)
    copy_values(target.T, source)
    assert np.array_equal(target, source.T)


def test_without_a_build_numpy_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_BUILDS", str(tmp_path / "none"))
    source, target = np.arange(1 << 18), np.zeros(1 << 18, np.int64)
    copy_values(target, source)
    assert copier._native() is None
    assert np.array_equal(target, source)


@pytest.mark.parametrize("damage", ["not a library", "failed its self-test"])
def test_a_build_that_does_not_work_is_logged_and_not_used(
    damage: str, builds: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = builds
    if damage == "not a library":
        found = builds.with_name("damaged.so")
        found.write_bytes(b"\x7fELF")
    else:
        monkeypatch.setattr(copier, "_is_right", lambda native: False)
    monkeypatch.setattr(type(COPIER), "built", lambda self: found)
    source, target = np.arange(1 << 18), np.zeros(1 << 18, np.int64)
    copy_values(target, source)
    assert np.array_equal(target, source)
    assert "loads copy with numpy" in caplog.text


@pytest.mark.usefixtures("builds")
def test_what_is_read_only_is_not_written() -> None:
    """Its memory may be that of a file, of which a write is the end of the process."""
    source, target = np.arange(1 << 18), np.zeros(1 << 18, np.int64)
    target.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        copy_values(target, source)
    assert not target.any()


def test_without_a_folder_for_builds_numpy_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in containers that run as a number of a user whom nothing knows."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("CKPTD_BUILDS", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert COPIER.built() is None
    with pytest.raises(UsageError, match="CKPTD_BUILDS"):
        COPIER.build()
    monkeypatch.setenv("CKPTD_BUILDS", str(tmp_path))

    def closed(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", closed)
    assert COPIER.built() is None


def test_no_build_is_made_or_taken_where_others_may_write(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that lies there already may be anybody's."""
    place = tmp_path / "builds"
    place.mkdir()
    (place / built.name).write_bytes(b"what somebody else has put there")
    place.chmod(0o777)
    monkeypatch.setenv("CKPTD_BUILDS", str(place))
    assert COPIER.built() is None
    with pytest.raises(UsageError, match="only this user may write") as caught:
        COPIER.build()
    assert "has no folder for its build" in caught.value.message
    place.chmod(0o700)
    (place / built.name).chmod(0o666)
    assert COPIER.build().read_bytes() == built.read_bytes()
    monkeypatch.setenv("CKPTD_BUILDS", str(place / built.name / "below"))
    with pytest.raises(UsageError, match="Not a directory"):
        COPIER.build()


def test_of_processes_that_want_a_build_at_once_one_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of a job ask together, and a compiler takes half a minute of a core for each."""
    calls = tmp_path / "calls"
    compiler = tmp_path / "compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        '[ "$1" != --version ] || { echo "one 1.0"; exit 0; }\n'
        f"echo called >>{calls}\nsleep 0.3\n"
        'while [ "$1" != -o ]; do shift; done\necho made >"$2"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("CKPTD_BUILDS", str(tmp_path / "builds"))
    with ThreadPoolExecutor(4) as pool:  # each call locks a file that it has opened itself
        paths = {wanted.result() for wanted in [pool.submit(COPIER.build) for _ in range(4)]}
    assert [path.read_text() for path in paths] == ["made\n"]
    assert calls.read_text() == "called\n"
    assert COPIER.built() in paths
