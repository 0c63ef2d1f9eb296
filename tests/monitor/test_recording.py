from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.errors import CorruptError, NotFoundError, StoreError
from ckptd.monitor.recording import (
    FOUND,
    ROUND,
    SHEET,
    JobRecording,
    RecordedFrame,
    RecordingWriter,
    encode,
    replay,
)
from ckptd.monitor.report import EvidenceReport, from_views, pack, unpack_report
from ckptd.monitor.settings import WatchSettings, changed
from ckptd.monitor.watch import JobWatch
from ckptd_simulated.job import Fault, Mesh, Planted, play, views
from tests.monitor.watched import JOB, clean, told

MESH = Mesh(2, 2, 4)
HUNG = play(MESH, [Fault(Planted.HANG, 5, 1)], np.random.default_rng(3))


def frames(rounds: bool = False) -> list[RecordedFrame]:
    """A job that is well for 10 s, and then stands still."""
    out = []
    for number, at in enumerate(np.arange(500.0, 512.0, 0.25).tolist()):
        job = clean(MESH) if at < 510 else HUNG
        for node in ("n0", "n1"):
            mine = [v for v in views(job) if v.node == node]
            sheet = from_views(mine, job=JOB, source=node, number=number)
            out.append(RecordedFrame(at, SHEET, pack(sheet)))
        if rounds:
            out.append(RecordedFrame(at + 0.01, ROUND))
    return out


def recorded(path: Path, some: list[RecordedFrame]) -> Path:
    path.write_bytes(encode(JOB, 1e9, some))
    return path


def test_frames_come_back_as_they_were(tmp_path: Path) -> None:
    some = [
        RecordedFrame(1.5, SHEET, b"abc"),
        RecordedFrame(1.5, ROUND),
        RecordedFrame(2.0, FOUND, bytes(5000)),
    ]
    recording = JobRecording(recorded(tmp_path / "r", some))
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
            writer.add(RecordedFrame(1.0, SHEET, bytes(1000)))
        writer.add(RecordedFrame(2.0, ROUND))
    assert writer.left_out == 2
    assert (tmp_path / "w").stat().st_size <= 3000
    assert [f.kind for f in JobRecording(tmp_path / "w").frames()] == [SHEET, SHEET, ROUND]


def test_a_torn_end_is_left_out(tmp_path: Path) -> None:
    some = [RecordedFrame(1.0, SHEET, b"abc"), RecordedFrame(2.0, SHEET, b"def")]
    whole = encode(JOB, 0.0, some)
    for cut in range(1, len(encode(JOB, 0.0, some[1:])) - len(encode(JOB, 0.0, []))):
        (tmp_path / "r").write_bytes(whole[:-cut])
        recording = JobRecording(tmp_path / "r")
        assert list(recording.frames()) == some[:1]
        assert recording.unread > 0


def test_reading_ends_at_a_damaged_frame(tmp_path: Path) -> None:
    some = [RecordedFrame(float(k), SHEET, b"abc") for k in range(3)]
    data = bytearray(encode(JOB, 0.0, some))
    begin = len(encode(JOB, 0.0, some[:1]))
    for place in range(begin, len(encode(JOB, 0.0, some[:2]))):
        bad = bytearray(data)
        bad[place] ^= 0x41
        (tmp_path / "r").write_bytes(bad)
        recording = JobRecording(tmp_path / "r")
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
            list(JobRecording(path).frames())
        except CorruptError as error:
            if "not a recording" not in error.message or behind:
                raise
    finally:
        os.close(fd)


def test_what_is_no_recording_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as missing:
        JobRecording(tmp_path / "none")
    assert "the recording does not exist" in missing.value.message
    (tmp_path / "text").write_text("hello")
    with pytest.raises(CorruptError) as bad:
        JobRecording(tmp_path / "text")
    assert "not a recording of ckptd" in bad.value.message
    with pytest.raises(StoreError):
        JobRecording(tmp_path)


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
    watch = JobWatch(JOB, epoch=1e9)
    changes = []
    for frame in frames(rounds=True):
        if frame.kind == SHEET:
            watch.take(unpack_report(frame.body), frame.at)
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
        RecordedFrame(500.0, SHEET, b"garbage"),
        RecordedFrame(500.0, FOUND, b""),
        RecordedFrame(500.0, SHEET, frames()[0].body),
        RecordedFrame(500.0, SHEET, frames()[0].body),  # sent again
        RecordedFrame(500.0, FOUND, pack(EvidenceReport(job="other", source="n0", number=0))),
    ]
    result = replay(recorded(tmp_path / "r", bad))
    assert (result.frames, result.sheets, result.refused) == (5, 1, 4)
    assert result.incidents == ()


def test_a_clock_that_jumps_does_not_cost_a_lifetime(tmp_path: Path) -> None:
    some = [
        RecordedFrame(at, SHEET, pack(EvidenceReport(job=JOB, source="n", number=0)))
        for at in (0.0, 1e11)
    ]
    assert replay(recorded(tmp_path / "r", some)).rounds < 10


def test_an_empty_recording_shows_nothing(tmp_path: Path) -> None:
    result = replay(recorded(tmp_path / "r", []))
    assert (result.frames, result.rounds, result.incidents) == (0, 0, ())
