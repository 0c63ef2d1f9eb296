"""Names of foreign checkpoints: a folder, or a file in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.checkpoint.load.foreign import split_file


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("/a/b.pt", ("/a", "b.pt")),
        ("/b.pt", ("/", "b.pt")),
        ("b.safetensors", (".", "b.safetensors")),
        ("s3://bucket/a/b.ckpt", ("s3://bucket/a", "b.ckpt")),
        ("/a/step-1/.metadata", ("/a/step-1", ".metadata")),
        ("/a/b", ("/a/b", "")),
        ("s3://bucket", ("s3://bucket", "")),
    ],
)
def test_files_and_folders(url: str, found: tuple[str, str]) -> None:
    assert split_file(url) == found


def test_a_folder_that_is_called_like_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "run.ckpt"
    folder.mkdir()
    assert split_file(str(folder)) == (str(folder), "")
