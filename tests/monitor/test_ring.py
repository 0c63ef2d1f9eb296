"""The ring of a rank: what is written is read, by others, whatever the file holds."""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import signal
import stat
from pathlib import Path

import numpy as np
import pytest

from ckptd.errors import CkptdError, CorruptError, NotFoundError, StoreError, UsageError
from ckptd.monitor.job import CallFlag, Phase
from ckptd.monitor.ring import (
    HEADER_BYTES,
    SLOT,
    RecorderState,
    RingGroup,
    RingIdentity,
    RingReader,
    RingShape,
    RingWriter,
    read,
)
from tests.processes import PATIENCE_S

SMALL = RingShape(slots=8, groups=3, members=6, texts=4)
ME = RingIdentity(rank=1, world=8, job="job", node="node-a", generation=3)


@pytest.fixture
def ring(tmp_path: Path) -> RingWriter:
    return RingWriter(tmp_path / "1.ring", ME, SMALL)


def group_of(ring: RingWriter, ident: int = 77, ranks: tuple[int, ...] = (0, 1)) -> RingGroup:
    group = ring.add_group(ident, len(ranks), 1, ranks, "tp", "mesh_tp")
    assert group is not None
    return group


def enter(ring: RingWriter, group: RingGroup, nbytes: int = 64) -> tuple[int, int]:
    return ring.enter(group, ring.text("all_reduce"), nbytes, ring.text("float32"), -1, 0, 5)


def test_what_is_written_is_read(ring: RingWriter) -> None:
    group = group_of(ring)
    ring.phase = Phase.TRAIN
    ring.step(41)
    ring.step(42)
    ring.beat()
    number, seq = enter(ring, group)
    ring.leave(group, number, seq)
    enter(ring, group, 128)
    view = read(ring.path)
    assert (view.rank, view.world, view.node, view.pid) == (1, 8, "node-a", os.getpid())
    assert (view.phase, view.step, view.steps_done) == (Phase.TRAIN, 42, 1)
    assert view.calls["seq"].tolist() == [1, 2]
    assert view.calls["bytes"].tolist() == [64, 128]
    assert view.calls["step"].tolist() == [42, 42]
    assert np.isnan(view.calls["end"]).tolist() == [False, True]
    assert view.calls["end"][0] >= view.calls["start"][0]
    assert view.heartbeat <= view.at
    assert view.groups.tolist() == [(77, 2, 2, 1)]
    assert view.members == {77: (0, 1)}
    assert (view.pending_group, view.pending_seq) == (77, 2)
    assert view.pending_since == view.calls["start"][1] == view.moved
    with RingReader(ring.path) as reader:
        assert reader.texts()[int(view.calls["op"][0])] == "all_reduce"
        header = reader.header()
        assert (header.job, header.generation, header.written) == ("job", 3, 2)
        assert header.birth > 0


def test_a_new_ring_shows_nothing_and_is_private(ring: RingWriter) -> None:
    view = read(ring.path)
    assert len(view.calls) == len(view.groups) == 0
    assert (view.phase, view.step) == (Phase.INIT, -1)
    assert math.isnan(view.heartbeat)
    assert math.isnan(view.pending_since)
    assert stat.S_IMODE(ring.path.stat().st_mode) == 0o600
    assert ring.path.stat().st_blocks * 512 >= SMALL.total


def test_an_old_call_makes_room(ring: RingWriter) -> None:
    group = group_of(ring)
    first = enter(ring, group)
    for _ in range(20):
        ring.leave(group, *enter(ring, group))
    before = read(ring.path).calls
    ring.leave(group, *first)  # its slot serves another call by now
    view = read(ring.path)
    assert view.calls["seq"].tolist() == list(range(14, 22))
    assert view.calls.tobytes() == before.tobytes()
    assert view.groups["completed"].tolist() == [21]
    assert read(ring.path, 3).calls["seq"].tolist() == [19, 20, 21]
    assert len(read(ring.path, 0).calls) == 0


def test_a_device_comes_to_a_call_and_ends_it_or_nobody_knows(ring: RingWriter) -> None:
    group = group_of(ring)
    calls = [ring.enter(group, 1, 8, 1, -1, CallFlag.ASYNC | CallFlag.QUEUED, 5) for _ in range(3)]
    assert read(ring.path).calls["flags"].tolist() == [CallFlag.ASYNC | CallFlag.QUEUED] * 3
    ring.reached(calls[0][0])
    ring.leave(group, *calls[1], seen=False, failed=True)
    ring.reached(calls[1][0])
    flags = read(ring.path).calls["flags"].tolist()
    both = CallFlag.FAILED | CallFlag.UNSEEN
    assert flags == [CallFlag.ASYNC, CallFlag.ASYNC | both, CallFlag.ASYNC | CallFlag.QUEUED]
    for _ in range(SMALL.slots):
        ring.leave(group, *enter(ring, group))
    before = read(ring.path).calls
    ring.reached(calls[2][0])  # its slot serves another call by now
    assert read(ring.path).calls.tobytes() == before.tobytes()


def test_the_oldest_open_call_is_found_behind_a_deep_queue(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path / "deep.ring", RingIdentity(rank=0, world=8))
    group = group_of(ring)
    for _ in range(300):
        ring.leave(group, *enter(ring, group))
    for _ in range(300):
        enter(ring, group)
    view = read(ring.path, 16)
    assert (view.pending_group, view.pending_seq) == (77, 301)
    assert view.calls["seq"].tolist() == [301, *range(585, 601)]
    assert view.pending_since == view.calls["start"][0]
    ring.leave(group, *enter(ring, group))
    # The last ones alone have ended: the first of those that are returned is under way.
    assert read(ring.path, 16).calls["seq"].tolist() == [301, *range(586, 602)]


def test_completed_is_the_end_of_an_unbroken_run(ring: RingWriter) -> None:
    group = group_of(ring)
    calls = [enter(ring, group) for _ in range(4)]
    done = []
    for i in (1, 3, 0, 2):
        ring.leave(group, *calls[i], failed=i == 3)
        done.append(int(read(ring.path).groups["completed"][0]))
    assert done == [0, 0, 2, 4]
    assert read(ring.path).calls["flags"].tolist() == [0, 0, 0, int(CallFlag.FAILED)]


def test_members_of_groups(ring: RingWriter) -> None:
    group_of(ring, 1, (0, 2, 4, 6))
    group_of(ring, 2, (0, 1, 4, 5))
    group_of(ring, 3, (7, 3, 0))  # no room among the members any more
    assert read(ring.path).members == {1: (0, 2, 4, 6), 2: (0, 1, 4, 5)}
    assert ring.add_group(4, 1, 0, (1,)) is None


def test_texts_end_when_there_is_no_room(ring: RingWriter) -> None:
    for i in range(9):
        ring.text("x" * 200 + str(i))
    with RingReader(ring.path) as reader:
        texts = reader.texts()
    assert len(texts) == SMALL.texts
    assert all(t.endswith(f"x{i}") for i, t in enumerate(texts.values()))


def test_a_slot_that_is_being_written_is_left_out(ring: RingWriter) -> None:
    group = group_of(ring)
    for _ in range(3):
        enter(ring, group)
    with ring.path.open("r+b") as file:
        file.seek(HEADER_BYTES + SLOT.itemsize)
        file.write(bytes(8))
    assert read(ring.path).calls["seq"].tolist() == [1, 3]


def test_the_recorder_s_state_is_told(ring: RingWriter) -> None:
    ring.state(RecorderState.ASIDE)
    ring.lost()
    with RingReader(ring.path) as reader:
        assert (reader.header().state, reader.header().lost) == (RecorderState.ASIDE, 1)


def _write_for_ever(path: Path, ready: multiprocessing.synchronize.Event) -> None:
    ring = RingWriter(path, ME, SMALL)
    group = group_of(ring)
    while True:
        for i in range(1000):
            number, seq = enter(ring, group, group.entered + 1)
            ring.leave(group, number, seq)
            if i == 50:
                ready.set()


def test_read_while_it_is_written_and_after_the_writer_died(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    writer = context.Process(target=_write_for_ever, args=(path, ready), daemon=True)
    writer.start()
    try:
        assert ready.wait(PATIENCE_S)
        with RingReader(path) as reader:
            for _ in range(500):
                calls = reader.view().calls
                # Each slot is whole: its size says its number.
                assert (calls["bytes"] == calls["seq"]).all()
                assert (np.diff(calls["seq"]) > 0).all()
    finally:
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(PATIENCE_S)
    view = read(path)
    assert len(view.calls) >= SMALL.slots - 1
    assert view.groups["entered"][0] > 50


def test_fuzz(ring: RingWriter, tmp_path: Path) -> None:
    group = group_of(ring)
    group_of(ring, 2, (0, 1, 4, 5))
    for _ in range(6):
        ring.leave(group, *enter(ring, group))
    whole = ring.path.read_bytes()
    dice = random.Random(5)
    path = tmp_path / "fuzzed"
    read_well = 0
    for round_ in range(600):
        data = bytearray(whole)
        # Half of the rounds leave the identity alone, so that what lies behind it is tried too.
        lowest = dice.choice((0, 200))
        for _ in range(dice.choice((1, 3, 30))):
            at = dice.randrange(lowest, dice.choice((400, len(data))))
            data[at : at + 8] = dice.choice(
                (dice.randbytes(8), b"\xff" * 8, bytes(8), b"\xff" * 7 + b"\x7f")
            )
        if round_ % 10 == 0:
            del data[dice.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            with RingReader(path) as reader:
                view = reader.view()
                reader.texts()
                reader.header()
        except CkptdError:
            continue
        read_well += 1
        assert len(view.calls) <= SMALL.slots
        assert len(view.groups) <= SMALL.groups
        assert all(max(ranks) < view.world for ranks in view.members.values())
        assert (view.groups["completed"] <= view.groups["entered"]).all()
    assert read_well > 100


@pytest.mark.parametrize("data", [b"", b"CKPTRING", b"\0" * 8192, b"\xff" * 70000])
def test_what_is_no_ring_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(CorruptError) as caught:
        read(path)
    assert "not a" in caught.value.message


def test_a_ring_that_shrinks_while_it_is_open(ring: RingWriter, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.write_bytes(ring.path.read_bytes())
    with RingReader(copy) as reader:
        os.truncate(copy, 300)
        with pytest.raises(CorruptError):
            reader.view()


def test_missing_link_pipe(ring: RingWriter, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read(tmp_path / "none")
    (tmp_path / "link").symlink_to(ring.path)
    with pytest.raises(StoreError):
        read(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CorruptError):
        read(tmp_path / "pipe")


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, at: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError) as caught:
        RingWriter(tmp_path / "ring", ME, SMALL)
    assert caught.value.kind == "no-space"
    assert not list(tmp_path.iterdir())


def test_impossible_shape(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        RingWriter(tmp_path / "ring", ME, RingShape(slots=0))
