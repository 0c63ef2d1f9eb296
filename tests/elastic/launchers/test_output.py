"""Files of workers that are shown on the console as well."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from ckptd.elastic.launchers.output import Output, error_of
from ckptd.errors import UsageError
from tests.processes import until


def test_followers_end_with_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    output = Output(None, tmp_path, "j", "default", tee=1)
    for attempt in range(20):
        files = output.streams(attempt, 0)
        Path(files.stdout).write_text(f"{attempt}\n" + attempt * "x")
        output.ended(files.error_file)
        until(lambda: not output._tails[-1].runs)
        assert len(output._tails) == 1
    assert shown.getvalue().count("[default0]:") == 39
    output.finish()


def test_lines_of_ranks_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    output = Output(None, tmp_path, "j", "default", tee=1)
    paths = [Path(output.streams(0, rank).stdout) for rank in range(2)]
    with paths[0].open("a", buffering=1) as first, paths[1].open("a", buffering=1) as second:
        first.write("begins\nloss")
        first.flush()
        until(lambda: "begins" in shown.getvalue())
        second.write("other\n")
        until(lambda: "other" in shown.getvalue())
        first.write(" 0.5\nlast")
        second.write("words")
    output.finish()
    lines = shown.getvalue().splitlines()
    assert sorted(lines) == [
        "[default0]:begins",
        "[default0]:last",
        "[default0]:loss 0.5",
        "[default1]:other",
        "[default1]:words",
    ]


def test_what_a_console_cannot_show_is_shown_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    output = Output(None, tmp_path, "j", "default", tee=1)
    files = output.streams(0, 0)
    Path(files.stdout).write_bytes("ü\n".encode() + b"\xff\0\n" + b"y" * 200_000 + b"\nend\n")
    output.finish()
    lines = raw.getvalue().split(b"\n")
    assert lines[:2] == [b"[default0]:?", b"[default0]:?\0"]
    assert lines[2].count(b"y") == 200_000
    assert lines[3] == b"[default0]:end"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="files of workers"):
        Output(tmp_path / "file" / "logs", tmp_path, "j", "default")


@pytest.mark.parametrize("raw", [b"", b"\xff", b'{"message": {"message": "\xff"}}', b"[" * 99_999])
def test_an_error_file_that_is_none(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(raw)
    assert error_of(str(path)) == ""
