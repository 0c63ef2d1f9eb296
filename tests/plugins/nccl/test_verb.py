from __future__ import annotations

import shutil
from pathlib import Path

from tests.cli.running import Cli

REAL = Path(__file__).parent / "flight"


def test_who_did_not_come(cli: Cli) -> None:
    result = cli("replay", "--flight-recorder", str(REAL / "pickled"))
    assert (result.code, result.err) == (1, "")
    assert "4 dumps of a job of 4 ranks" in result.out
    assert "non-communication hang: rank 2" in result.out
    assert "refuted if" in result.out


def test_as_a_document(cli: Cli) -> None:
    document = cli.json("replay", "--flight-recorder", str(REAL / "swap"), code=1)
    assert document["ranks"] == 4
    (verdict,) = document["verdicts"]
    assert verdict["kind"] == "deadlock"


def test_what_is_no_dump_is_told(cli: Cli, tmp_path: Path) -> None:
    shutil.copytree(REAL / "hang", tmp_path, dirs_exist_ok=True)
    (tmp_path / "rank2.json").write_text("{}")
    (tmp_path / "rank9\x1b[2J.json").write_text("{}")
    result = cli("replay", "--flight-recorder", str(tmp_path))
    assert "rank2.json is not a dump" in result.err
    assert "\x1b" not in result.err
    assert "cannot say: rank 2" in result.out


def test_either_a_recording_or_a_folder(cli: Cli, tmp_path: Path) -> None:
    assert cli("replay").code == 2
    assert cli("replay", "x", "--flight-recorder", str(tmp_path)).code == 2
    result = cli("replay", "--flight-recorder", str(tmp_path / "none"))
    assert result.code != 0
    assert "no dump of a flight recorder" in result.err
