"""Which reader opens a folder: ckptd's own, and those of other packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptd.errors import CkptdError, CorruptError, MismatchError, UsageError
from ckptd.readers import find
from ckptd.readers.base import Foreign, ForeignPiece, Listing
from ckptd.readers.find import find_foreign
from ckptd.readers.zips import Extent
from ckptd.store import open_store
from ckptd.types import Box
from tests.readers.opening import open_reader


class RawReader:
    """Reads files of bytes."""

    name = "raw"

    def recognise(self, names: Listing) -> int:
        return 10 if names.ending(".raw") else 0

    def open(self, names: Listing) -> Foreign:
        sizes = {f: names.size(f) for f in names.ending(".raw")}
        return Foreign(
            [
                ForeignPiece(f, "uint8", (n,), Box.whole((n,)), names.key(f), Extent(0))
                for f, n in sizes.items()
            ]
        )


class Entry:
    """An entry point."""

    name, value, dist = "raw", "elsewhere:RawReader", None

    def __init__(self, loaded: Any) -> None:
        self.loaded = loaded

    def load(self) -> Any:
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


def announce(monkeypatch: pytest.MonkeyPatch, loaded: Any) -> None:
    monkeypatch.setattr(find, "entries", lambda group: [Entry(loaded)])


def test_a_reader_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.raw").write_bytes(b"abc")
    assert find_foreign(open_store(tmp_path)) is None
    announce(monkeypatch, RawReader)
    reader = open_reader(tmp_path)
    assert reader.tensor("x.raw").tobytes() == b"abc"
    assert reader.manifest.metadata["ckptd.foreign"]["format"] == "raw"


def test_errors_that_a_reader_does_not_expect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.raw").write_bytes(b"abc")
    for error in (RecursionError("deep"), TypeError("none"), KeyError("x"), UnicodeError("y")):

        class Surprised(RawReader):
            def open(self, names: Listing, error: Exception = error) -> Foreign:
                raise error

        announce(monkeypatch, Surprised)
        with pytest.raises(CorruptError) as caught:
            find_foreign(open_store(tmp_path))
        assert (caught.value.message, caught.value.__cause__) == (
            "the metadata of a checkpoint is damaged, or its reader is",
            error,
        )


def test_a_package_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch, ImportError("no such thing"))
    with pytest.raises(UsageError) as caught:
        find_foreign(open_store(tmp_path))
    assert "an installed plugin fails to load" in caught.value.message


def test_a_tie_lists_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(RawReader):
        name = "other"

    (tmp_path / "x.raw").write_bytes(b"abc")
    monkeypatch.setattr(find, "entries", lambda group: [Entry(RawReader), Entry(Other)])
    with pytest.raises(MismatchError) as caught:
        find_foreign(open_store(tmp_path))
    assert (caught.value.message, caught.value.found) == (
        "checkpoints of several formats in one folder",
        "raw, other",
    )


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CkptdError) as caught:
        open_reader(tmp_path, "gone.pt")
    assert (caught.value.message, caught.value.where) == (
        "a file of the checkpoint is missing",
        "gone.pt",
    )
