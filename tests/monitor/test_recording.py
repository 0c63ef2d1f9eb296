from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.errors import CorruptError, NotFoundError, StoreError
from ckptd.monitor.gather import from_views
from ckptd.monitor.recording import (
    FOUND,
    ROUND,
    SHEET,
    Frame,
    Recording,
    RecordingWriter,
    encode,
    replay,
)
from ckptd.monitor.report import Found, pack, unpack
from ckptd.monitor.settings import WatchSettings, changed
from ckptd.monitor.simulator import Fault, Mesh, Planted, play, views
from ckptd.monitor.watch import Watch
from tests.monitor.watched import JOB, clean, told

MESH = Mesh(2, 2, 4)
HUNG = play(MESH, [Fault(Planted.HANG, 5, 1)], np.random.default_rng(3))


def frames(rounds: bool = False) -> list[Frame]:
    """A job that is well for 10 s, and then stands still."""
    out = []
    for number, at in enumerate(np.arange(500.0, 512.0, 0.25).tolist()):
        job = clean(MESH) if at < 510 else HUNG
        for node in ("n0", "n1"):
            mine = [v for v in views(job) if v.node == node]
            sheet = from_views(mine, job=JOB, source=node, number=number)
            out.append(Frame(at, SHEET, pack(sheet)))
        if rounds:
            out.append(Frame(at + 0.01, ROUND))
    return out


def recorded(path: Path, some: list[Frame]) -> Path:
    path.write_bytes(encode(JOB, 1e9, some))
    return path


def test_frames_come_back_as_they_were(tmp_path: Path) -> None:
    some = [Frame(1.5, SHEET, b"abc"), Frame(1.5, ROUND), Frame(2.0, FOUND, bytes(5000))]
    recording = Recording(recorded(tmp_path / "r", some))
    assert (recording.job, recording.epoch) == (JOB, 1e9)
    assert list(recording.frames()) == some
    assert recording.unread == 0


def test_a_file_written_bit_by_bit_is_the_same(tmp_path: Path) -> None:
    some = frames()
    with RecordingWriter(tmp_path / "w", JOB, 1e9) as writer:
        for frame in some:
            writer.add(frame)
    assert (tmp_path / "w").read_bytes() == encode(JOB, 1e9, some)
    assert (tmp_path / "w").stat().st_mode & 0o777 == 0o600
    with pytest.raises(StoreError):
        RecordingWriter(tmp_path / "w", JOB, 1e9)


def test_a_full_file_takes_no_more(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "w", JOB, 1e9, most_bytes=3000) as writer:
        for _ in range(4):
            writer.add(Frame(1.0, SHEET, bytes(1000)))
        writer.add(Frame(2.0, ROUND))
    assert writer.left_out == 2
    assert (tmp_path / "w").stat().st_size <= 3000
    assert [f.kind for f in Recording(tmp_path / "w").frames()] == [SHEET, SHEET, ROUND]


def test_a_torn_end_is_left_out(tmp_path: Path) -> None:
    some = [Frame(1.0, SHEET, b"abc"), Frame(2.0, SHEET, b"def")]
    whole = encode(JOB, 0.0, some)
    for cut in range(1, len(encode(JOB, 0.0, some[1:])) - len(encode(JOB, 0.0, []))):
        (tmp_path / "r").write_bytes(whole[:-cut])
        recording = Recording(tmp_path / "r")
        assert list(recording.frames()) == some[:1]
        assert recording.unread > 0


def test_reading_ends_at_a_damaged_frame(tmp_path: Path) -> None:
    some = [Frame(float(k), SHEET, b"abc") for k in range(3)]
    data = bytearray(encode(JOB, 0.0, some))
    begin = len(encode(JOB, 0.0, some[:1]))
    for place in range(begin, len(encode(JOB, 0.0, some[:2]))):
        bad = bytearray(data)
        bad[place] ^= 0x41
        (tmp_path / "r").write_bytes(bad)
        recording = Recording(tmp_path / "r")
        assert list(recording.frames()) == some[:1]
        assert recording.unread == len(data) - begin


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_frames_or_refused(data: bytes, behind: bool) -> None:
    fd = os.memfd_create("recording")
    try:
        os.write(fd, (encode(JOB, 0.0, []) if behind else b"") + data)
        path = Path(f"/proc/self/fd/{fd}")
        try:
            list(Recording(path).frames())
        except CorruptError as error:
            if error.kind != "bad-recording" or behind:
                raise
    finally:
        os.close(fd)


def test_what_is_no_recording_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as missing:
        Recording(tmp_path / "none")
    assert missing.value.kind == "no-recording"
    (tmp_path / "text").write_text("hello")
    with pytest.raises(CorruptError) as bad:
        Recording(tmp_path / "text")
    assert bad.value.kind == "bad-recording"
    with pytest.raises(StoreError):
        Recording(tmp_path)


# --- replay -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [False, True])
def test_a_replay_finds_what_the_watch_would(tmp_path: Path, rounds: bool) -> None:
    path = recorded(tmp_path / "r", frames(rounds))
    result = replay(path)
    assert told(result.incidents) == [("non-communication hang", ("5",))]
    opened = [at for at, changes in result.changes if changes.opened]
    assert len(opened) == 1
    assert 10 <= opened[0] <= 11.5
    assert (result.sheets, result.refused, result.unread) == (96, 0, 0)
    assert result.incidents[0].opened_at == pytest.approx(1e9 + 500 + opened[0])


def test_a_replay_says_the_same_twice(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r", frames())
    one, other = replay(path), replay(path)
    assert one.changes == other.changes
    assert one.incidents == other.incidents


def test_a_replay_is_what_happened(tmp_path: Path) -> None:
    """A live watch, its rounds recorded, and the replay of it."""
    watch = Watch(JOB, epoch=1e9)
    changes = []
    for frame in frames(rounds=True):
        if frame.kind == SHEET:
            watch.take(unpack(frame.body), frame.at)
        else:
            told_now = watch.round(frame.at)
            if told_now.opened or told_now.updated or told_now.closed:
                changes.append(told_now)
    result = replay(recorded(tmp_path / "r", frames(rounds=True)))
    assert [c for _, c in result.changes] == changes
    assert result.incidents == watch.incidents


def test_other_settings_say_other_things(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r", frames())
    assert replay(path, changed(WatchSettings(), "floor.train=600")).incidents == ()


def test_messages_that_are_none_are_counted(tmp_path: Path) -> None:
    bad = [
        Frame(500.0, SHEET, b"garbage"),
        Frame(500.0, FOUND, b""),
        Frame(500.0, SHEET, frames()[0].body),
        Frame(500.0, SHEET, frames()[0].body),  # sent again
        Frame(500.0, FOUND, pack(Found(job="other", source="n0", number=0))),
    ]
    result = replay(recorded(tmp_path / "r", bad))
    assert (result.frames, result.sheets, result.refused) == (5, 1, 4)
    assert result.incidents == ()


def test_a_clock_that_jumps_does_not_cost_a_lifetime(tmp_path: Path) -> None:
    some = [Frame(at, SHEET, pack(Found(job=JOB, source="n", number=0))) for at in (0.0, 1e11)]
    assert replay(recorded(tmp_path / "r", some)).rounds < 10


def test_an_empty_recording_shows_nothing(tmp_path: Path) -> None:
    result = replay(recorded(tmp_path / "r", []))
    assert (result.frames, result.rounds, result.incidents) == (0, 0, ())
