"""What a controller keeps for people must never end it."""

from __future__ import annotations

from pathlib import Path

from ckptd.elastic.control.history import RecoveryHistory


def test_a_full_disk_is_said_once_and_ends_nothing() -> None:
    said: list[str] = []
    history = RecoveryHistory(Path("/dev/full"), say=said.append)
    history.tell("one")
    history.tell("two")
    history.close()
    assert [text for text in said if "no more events" in text] == [
        "no more events are kept: No space left on device"
    ]
    assert set(history.told) == set(said) > {"one", "two"}


def test_strangers_cannot_fill_the_disk(tmp_path: Path) -> None:
    history = RecoveryHistory(tmp_path / "events")
    history.refused("a stranger")
    size = (tmp_path / "events").stat().st_size
    for _ in range(100):
        history.refused("a stranger")
    history.close()
    assert (tmp_path / "events").stat().st_size == size


def test_a_file_that_cannot_be_opened_is_said_and_ends_nothing(tmp_path: Path) -> None:
    history = RecoveryHistory(tmp_path / "no" / "events")
    history.tell("one")
    history.close()
    assert history.told == (
        f"no events are kept in {tmp_path}/no/events: No such file or directory",
        "one",
    )
