from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.errors import RefusedError
from ckptd_demo.story import Folder


def test_a_new_and_an_empty_folder_are_taken(tmp_path: Path) -> None:
    Folder(tmp_path / "a" / "new").prepare()
    (tmp_path / "empty").mkdir()
    Folder(tmp_path / "empty").prepare()
    assert (tmp_path / "a" / "new").is_dir()


def test_an_earlier_demo_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.prepare()
    for path in (folder.checkpoints, folder.copies, folder.resharded, folder.runs):
        (path / "inner").mkdir(parents=True)
    folder.plot.write_bytes(b"old")
    (tmp_path / "notes.txt").write_text("mine")
    Folder(tmp_path).prepare()
    assert not folder.plot.exists()
    assert not folder.resharded.exists()
    assert not any(path.exists() for path in (folder.checkpoints, folder.copies, folder.runs))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_of_somebody_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    inner = tmp_path / "checkpoints" / "precious"
    inner.mkdir(parents=True)
    with pytest.raises(RefusedError, match="in use"):
        Folder(tmp_path).prepare()
    assert inner.is_dir()


def test_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(RefusedError):
        Folder(path).prepare()
    assert path.read_text() == "mine"


def test_a_link_is_removed_and_not_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("mine")
    folder = Folder(tmp_path / "demo")
    folder.prepare()
    folder.checkpoints.symlink_to(tmp_path / "elsewhere")
    folder.prepare()
    assert not folder.checkpoints.exists()
    assert (tmp_path / "elsewhere" / "file").exists()
