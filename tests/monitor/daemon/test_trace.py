from __future__ import annotations

import numpy as np
import pytest

from ckptd.errors import UsageError
from ckptd.monitor.daemon.documents import CallsDocument, Names
from ckptd.monitor.daemon.tape import MessageBuffer
from ckptd.monitor.daemon.trace import chrome_trace, parse_ranks, recent_calls
from ckptd.monitor.recording import ROUND, SHEET, RecordedFrame
from ckptd_simulated.feed import Simulation, mesh_for, parse_fault

NAMES = Names({}, {1: "all_reduce"})


def frames(seconds: int = 5, ranks: int = 8) -> list[RecordedFrame]:
    simulation = Simulation("j", mesh_for(ranks), [parse_fault("hang:5@3")])
    out = []
    for second in range(seconds):
        for _, body in simulation.sheets(float(second)):
            out.append(RecordedFrame(100.0 + second, SHEET, body))
        out.append(RecordedFrame(100.0 + second, ROUND))
    return out


def test_calls_are_there_once_and_in_order() -> None:
    calls = recent_calls(frames(), np.arange(8), 0.0)
    keys = list(zip(calls["row"].tolist(), calls["group"], calls["seq"], strict=True))
    assert len(set(keys)) == len(keys)
    assert calls["row"].tolist() == sorted(calls["row"].tolist())
    for rank in range(8):
        starts = calls["start"][calls["row"] == rank]
        assert (np.diff(starts) >= 0).all()
        assert starts.max() <= 105.0


def test_calls_of_other_ranks_and_times_are_left_out() -> None:
    every = frames()
    some = recent_calls(every, np.array([2, 3, 99]), 0.0)
    assert set(some["row"].tolist()) == {2, 3}
    late = recent_calls(every, np.arange(8), 103.0)
    assert not (late["end"] < 103.0).any()
    assert np.isnan(late["end"]).any()  # what goes on is shown whenever it began
    assert not len(recent_calls([], np.arange(8), 0.0))
    assert not len(recent_calls([RecordedFrame(1.0, SHEET, b"garbage")], np.arange(8), 0.0))


def test_timeline_keeps_the_newest() -> None:
    calls = recent_calls(frames(), np.arange(8), 0.0)
    newest = CallsDocument.of(calls, NAMES, now=0.0, epoch=1000.0, limit=5)
    assert newest.cut
    kept = [c.start_s for r in newest.ranks for c in r.calls]
    assert sorted(kept) == sorted(calls["start"] + 1000.0)[-5:]
    assert not CallsDocument.of(calls, NAMES, now=0.0, epoch=0.0, limit=10**6).cut


def test_trace_of_nothing() -> None:
    empty = recent_calls([], np.arange(2), 0.0)
    assert chrome_trace(empty, NAMES, {}, 1.0)["traceEvents"][0]["ph"] == "M"


def test_ranks() -> None:
    assert parse_ranks("0-2, 7,1").tolist() == [0, 1, 2, 7]
    for text in ("", "-1", "2-1", "a", "0-5000", "1,", "0-4000,5000-9000"):
        with pytest.raises(UsageError):
            parse_ranks(text)


def test_tape_forgets_the_oldest() -> None:
    tape = MessageBuffer(most_bytes=1000)
    for k in range(100):
        tape.add(RecordedFrame(float(k), SHEET, bytes(100)))
    assert [f.at for f in tape.since(0.0)] == [95.0, 96.0, 97.0, 98.0, 99.0]
    assert [f.at for f in tape.since(98.5)] == [99.0]
