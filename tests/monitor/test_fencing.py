"""What a controller ends on purpose is no incident, and what follows it is another life."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.errors import CorruptError
from ckptd.monitor.job import RankView
from ckptd.monitor.recording import FENCING, ROUND, SHEET, RecordedFrame, encode, replay
from ckptd.monitor.report import Fencing, RankNote, pack, unpack_fencing
from tests.monitor.jobs import changed
from tests.monitor.test_lives import gone, notes, starting, training
from tests.monitor.watched import Fed, told

REASON = "restart was ordered"


def _fence(fed: Fed, below: int, reason: str = REASON) -> None:
    fed.watch.fence(unpack_fencing(pack(Fencing(below=below, reason=reason))), fed.now)


def _killed(seen: list[RankView]) -> list[RankView]:
    return gone(seen, dict.fromkeys((v.rank for v in seen), -9))


def test_ranks_that_a_controller_ends_did_not_crash() -> None:
    fed = Fed()
    _fence(fed, 0)
    fed.notes = notes(1)
    fed.settle(training(40))
    # Some are seen to have ended before the controller's word has come.
    fed.show(gone(training(41), {3: -9, 4: -9}), rounds=2)
    _fence(fed, 2)
    fed.show(_killed(training(41)), rounds=40)
    assert told(fed.opened) == []


def test_a_crash_that_no_controller_meant_is_told_all_the_same() -> None:
    fed = Fed()
    _fence(fed, 1)
    fed.notes = notes(1)
    fed.settle(training(40))
    fed.show(gone(training(41), {6: -11}), rounds=8)
    assert told(fed.opened) == [("crash", ("6",))]


def test_a_fence_closes_what_was_open_of_that_life_and_says_so() -> None:
    fed = Fed()
    fed.notes = notes(1)
    fed.settle(training(40))
    fed.show(gone(training(41), {6: -11}), rounds=2)
    assert [i.state for i in fed.watch.incidents] == ["open"]
    _fence(fed, 2)
    fed.round()
    (incident,) = fed.closed
    assert incident.state == "closed"
    assert incident.consequences[-1] == f"the generation was fenced: {REASON}"


def test_the_next_life_has_other_ranks_on_other_nodes() -> None:
    """Eight ranks of one node follow sixteen of two; the other node's agent is heard no more."""
    fed = Fed()
    fed.notes = notes(1)
    fed.settle(training(40))
    _fence(fed, 2)
    fed.show(_killed(training(41))[:8], rounds=4)
    fed.notes = notes(3)
    _fence(fed, 3)
    half = [changed(v, world=8) for v in starting(3, range(8))]
    fed.show(half, rounds=40)
    assert fed.watch.job(fed.now).world == 8
    assert len(fed.watch.job(fed.now).ranks) == 8
    for step in range(30, 60):
        now = [changed(v, world=8) for v in training(step, life=3, ranks=range(8))]
        fed.show(now, rounds=2)
    assert told(fed.opened) == []
    fed.show(gone(now, {2: -11}), rounds=8)
    assert told(fed.opened) == [("crash", ("2",))]


def test_processes_that_live_on_in_another_generation_are_another_life() -> None:
    """Sessions: the same processes go on with other rank numbers and groups."""
    fed = Fed()
    fed.notes = notes(1)
    fed.settle(training(40))
    _fence(fed, 2)
    shifted = [changed(v, rank=(v.rank + 5) % 16) for v in starting(0, range(16))]
    fed.notes = notes(3)
    fed.show(shifted, rounds=40)
    assert told(fed.opened) == []
    assert fed.watch.generation == 3


def test_ranks_without_a_generation_are_never_taken_for_fenced() -> None:
    fed = Fed()
    _fence(fed, 7)
    fed.notes = {r: RankNote() for r in range(16)}
    fed.settle(training(40))
    assert len(fed.watch.job(fed.now).ranks) == 16


def test_an_incident_of_an_earlier_life_of_the_daemon_is_closed_as_well() -> None:
    before = Fed()
    before.notes = notes(1)
    before.settle(training(40))
    before.show(gone(training(41), {6: -11}), rounds=2)
    after = Fed(incidents=before.watch.incidents)
    _fence(after, 2)
    after.round()
    assert [i.state for i in after.watch.incidents] == ["closed"]


def test_a_recording_holds_the_fence(tmp_path: Path) -> None:
    frames: list[RecordedFrame] = []
    fed = Fed()
    take, judge, fence = fed.watch.take, fed.watch.round, fed.watch.fence
    fed.watch.take = lambda s, at: (frames.append(RecordedFrame(at, SHEET, pack(s))), take(s, at))[
        1
    ]  # type: ignore[method-assign,func-returns-value]
    fed.watch.round = lambda at: (frames.append(RecordedFrame(at, ROUND)), judge(at))[1]  # type: ignore[method-assign]
    fed.watch.fence = lambda f, at: (
        frames.append(RecordedFrame(at, FENCING, pack(f))),
        fence(f, at),
    )[1]  # type: ignore[method-assign,func-returns-value]
    fed.notes = notes(1)
    _fence(fed, 1)
    fed.settle(training(40))
    fed.show(gone(training(41), {6: -11}), rounds=8)
    _fence(fed, 2)
    fed.show(_killed(training(41)), rounds=40)
    (tmp_path / "r").write_bytes(encode("job", 1e9, frames))
    assert replay(tmp_path / "r").incidents == fed.watch.incidents
    assert len(fed.watch.incidents) == 1


@pytest.mark.parametrize("below", [-1, 1 << 62])
def test_what_is_no_generation_is_refused(below: int) -> None:
    with pytest.raises(CorruptError) as caught:
        unpack_fencing(pack(Fencing(below=below)))
    assert "not a valid message between agent and daemon" in caught.value.message
