from __future__ import annotations

from pathlib import Path

from ckptd.monitor.recording import encode
from tests.cli.running import Cli
from tests.monitor.test_recording import frames
from tests.monitor.watched import JOB


def recorded(tmp_path: Path, count: int | None = None) -> str:
    path = tmp_path / "job.recording"
    path.write_bytes(encode(JOB, 1e9, frames()[:count]))
    return str(path)


def test_incidents_are_shown_and_make_the_exit_code(cli: Cli, tmp_path: Path) -> None:
    result = cli("replay", recorded(tmp_path))
    assert (result.code, result.err) == (1, "")
    assert "non-communication hang" in result.out
    assert "rank 5" in result.out
    assert "refuted if" in result.out


def test_without_an_incident_all_is_fine(cli: Cli, tmp_path: Path) -> None:
    result = cli.good("replay", recorded(tmp_path, 20))
    assert "no incident" in result.out


def test_as_a_document(cli: Cli, tmp_path: Path) -> None:
    file = recorded(tmp_path)
    document = cli.json("replay", file, code=1)
    assert (document["file"], document["job"], document["refused"]) == (file, JOB, 0)
    assert document["sheets"] == 96
    (incident,) = document["incidents"]
    assert incident["kind"] == "non-communication hang"
    assert incident["suspects"][0]["name"] == "5"
    assert incident["nodes"] == ["n0"]
    assert 10 <= incident["at_s"] <= 11.5
    assert incident["until_s"] is None


def test_settings_are_changed(cli: Cli, tmp_path: Path) -> None:
    file = recorded(tmp_path)
    cli.good("replay", file, "--set", "floor.train=600")
    cli.good("replay", file, "--set", "confirm=100")
    assert cli("replay", file, "--set", "floor.train=5", "--set", "confirm=1").code == 1


def test_a_setting_that_is_none_is_told_with_those_that_are(cli: Cli, tmp_path: Path) -> None:
    for wrong in ("floor.tain=5", "confirm", "confirm=x", "policy.crash=shoot", "slow.ratio=-1"):
        result = cli("replay", recorded(tmp_path), "--set", wrong)
        assert result.code == 2
        assert "floor.train" in result.err


def test_a_torn_end_is_noted(cli: Cli, tmp_path: Path) -> None:
    file = Path(recorded(tmp_path, 20))
    file.write_bytes(file.read_bytes()[:-7])
    result = cli("replay", str(file))
    assert result.code == 0
    assert "torn" in result.err


def test_what_a_recording_says_does_not_steer_the_terminal(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "job.recording"
    path.write_bytes(encode("job\x1b[2J", 1e9, frames()[:3]))
    result = cli("replay", str(path))
    assert result.out.startswith("job")
    assert "\x1b" not in result.out + result.err


def test_what_is_no_recording(cli: Cli, tmp_path: Path) -> None:
    assert cli("replay", str(tmp_path / "none")).code == 4
    (tmp_path / "text").write_text("hello")
    result = cli("replay", str(tmp_path / "text"), "--json")
    assert result.code == 3
    assert "not a recording of ckptd" in result.error["message"]
