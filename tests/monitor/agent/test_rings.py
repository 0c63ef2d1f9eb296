"""Rings are found and followed; bad ones, foreign ones and old ones are left, or removed."""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptd.errors import CkptdError
from ckptd.monitor.agent import rings as module
from ckptd.monitor.agent.rings import Ring, Rings
from ckptd.monitor.ring import Counter, RingIdentity, RingWriter
from tests.monitor.agent.writers import Writer, writers
from tests.processes import PATIENCE_S, stop


@contextmanager
def rings(folder: Path, job: str | None = None) -> Iterator[Rings]:
    found = Rings(folder, job)
    try:
        yield found
    finally:
        found.close()


def follow(found: Rings, true: Callable[[], object]) -> None:
    """Look again and again until something is so."""
    end = time.monotonic() + PATIENCE_S
    while True:
        now = time.monotonic()
        found.refresh(now)
        for ring in list(found.ranks.values()):
            try:
                ring.glance(now)
            except CkptdError as error:
                found.spoiled(ring, error)
                continue
            ring.look(now)
        if true():
            return
        assert now < end, "in vain"
        time.sleep(0.02)


def test_ranks_are_found_when_they_come(tmp_path: Path) -> None:
    with rings(tmp_path / "later") as found:
        assert found.refresh(time.monotonic()) == []
        with writers(tmp_path / "later", 2) as ranks:
            opened = found.refresh(time.monotonic())
            assert sorted(ring.rank for ring in opened) == [0, 1]
            assert found.ranks[1].process is not None
            assert found.ranks[1].header.pid == ranks[1].pid
            written = found.ranks[0].counters[Counter.WRITTEN]
            follow(found, lambda: found.ranks[0].counters[Counter.WRITTEN] > written)
            assert found.ranks[0].alive


def test_an_end_is_seen_with_its_code(tmp_path: Path) -> None:
    with writers(tmp_path, 3) as ranks, rings(tmp_path) as found:
        found.refresh(time.monotonic())
        ranks[0].say("exit 5")
        os.kill(ranks[1].pid, signal.SIGKILL)
        follow(found, lambda: not found.ranks[0].alive and not found.ranks[1].alive)
        assert found.ranks[0].exit_code == 5
        assert found.ranks[1].exit_code == -9
        assert found.ranks[2].alive
        assert found.ranks[2].exit_code is None


def test_a_stopped_rank_shows_it(tmp_path: Path) -> None:
    with writers(tmp_path, 1) as ranks, rings(tmp_path) as found:
        found.refresh(time.monotonic())
        stop(ranks[0].pid)
        follow(found, lambda: found.ranks[0].state == "T")
        assert found.ranks[0].alive


@pytest.mark.long
def test_a_held_gil_is_told_from_a_frozen_process(tmp_path: Path) -> None:
    with writers(tmp_path, 2) as ranks, rings(tmp_path) as found:
        found.refresh(time.monotonic())
        ranks[0].say("gil")
        stop(ranks[1].pid)  # threads of a stopped process do not wake, as those of a frozen one
        follow(found, lambda: found.ranks[0].answers == 1 and found.ranks[1].answers == 0)


@pytest.mark.long
def test_a_rank_that_sleeps_or_spins_is_not_asked(tmp_path: Path) -> None:
    with writers(tmp_path, 2) as ranks, rings(tmp_path) as found:
        found.refresh(time.monotonic())
        ranks[0].say("hold")
        ranks[1].say("spin")
        # A heart that did not get the processor for a while beats again.
        follow(
            found,
            lambda: all(
                time.monotonic() > ring.moved + 3 and ring.answers == -1
                for ring in found.ranks.values()
            ),
        )


def test_the_newest_life_of_a_rank_counts(tmp_path: Path) -> None:
    with writers(tmp_path, 2) as ranks, rings(tmp_path) as found:
        found.refresh(time.monotonic())
        for rank in ranks:
            os.kill(rank.pid, signal.SIGKILL)
        follow(found, lambda: not any(ring.alive for ring in found.ranks.values()))
        # A smaller world: of the old life nothing is left.
        with writers(tmp_path, 1, generation=1) as again:
            follow(found, lambda: list(found.ranks) == [0] and found.ranks[0].alive)
            assert found.ranks[0].header.pid == again[0].pid
            assert found.ranks[0].header.generation == 1


def test_what_ended_before_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with writers(tmp_path, 1) as ranks:
        os.kill(ranks[0].pid, signal.SIGKILL)
    monkeypatch.setattr(module, "_STALE_S", 0.0)  # its last heartbeat is no sign of life any more
    with rings(tmp_path) as found:
        assert found.refresh(time.monotonic()) == []
        assert found.ranks == {}


def test_a_rank_that_lived_for_a_moment_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STALE_S", 600.0)  # a busy machine looks long after its end
    with rings(tmp_path) as found:
        with writers(tmp_path, 1):
            pass
        follow(found, lambda: 0 in found.ranks and not found.ranks[0].alive)
        assert found.ranks[0].exit_code is None  # nobody saw how


def test_only_rings_of_the_job(tmp_path: Path) -> None:
    with writers(tmp_path, 1, job="mine"), rings(tmp_path, "other") as other:
        assert other.refresh(time.monotonic()) == []
        with rings(tmp_path, "mine") as mine:
            assert len(mine.refresh(time.monotonic())) == 1


def test_bad_files_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "noise.ring").write_bytes(os.urandom(5000))
    (tmp_path / "empty.ring").touch()
    (tmp_path / "folder.ring").mkdir()
    (tmp_path / "link.ring").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "pipe.ring")
    with (
        writers(tmp_path, 1),
        rings(tmp_path) as found,
        caplog.at_level(logging.WARNING, "ckptd.monitor"),
    ):
        for turn in range(3):
            found.refresh(time.monotonic() + 10 * turn)
        assert list(found.ranks) == [0]
        assert found.bad == 2
    assert len(caplog.records) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_of_others_are_not_opened(tmp_path: Path) -> None:
    with writers(tmp_path, 1) as ranks, rings(tmp_path) as found:
        os.chown(ranks[0].path, 12345, -1)
        assert found.refresh(time.monotonic()) == []
        assert found.bad == 0


def test_a_ring_that_shrinks_is_let_go(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path / "x-1-1.ring", RingIdentity(rank=1, world=2))
    with writers(tmp_path, 1), rings(tmp_path) as found:
        found.refresh(time.monotonic())
        assert sorted(found.ranks) == [0, 1]
        os.truncate(ring.path, 100)
        follow(found, lambda: list(found.ranks) == [0])
        assert found.bad == 1


def test_a_ring_that_vanishes_is_read_on(tmp_path: Path) -> None:
    with writers(tmp_path, 1) as ranks, rings(tmp_path) as found:
        found.refresh(time.monotonic())
        ranks[0].path.unlink()
        written = found.ranks[0].counters[Counter.WRITTEN]
        follow(found, lambda: found.ranks[0].counters[Counter.WRITTEN] > written + 20)


def aged(path: Path) -> None:
    before = time.time() - 48 * 3600
    os.utime(path, (before, before))


def test_old_files_of_dead_processes_are_removed(tmp_path: Path) -> None:
    with Writer(tmp_path, 0, 2).process as process:
        process.stdin and process.stdin.close()
        process.wait()
    dead = next(tmp_path.glob("x-0-*.ring"))
    young = RingWriter(tmp_path / "x-9-999999.ring", RingIdentity(rank=1, world=2)).path
    stranger = tmp_path / "notes.txt"
    stranger.touch()
    half = tmp_path / f".x-0-{process.pid}.ring.{process.pid}"
    half.touch()
    # Zeros where its heartbeat was: a ring of an earlier boot, or from before the first beat.
    with open(dead, "r+b") as file:
        file.seek(256)
        file.write(bytes(8))
    with writers(tmp_path, 2) as ranks, rings(tmp_path) as found:
        for path in (dead, stranger, half, ranks[1].path):
            aged(path)
        assert sorted(found.clean()) == sorted([dead, half])
        assert young.exists()
        assert stranger.exists()
        assert ranks[1].path.exists()


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    (tmp_path / "noise.ring").write_bytes(os.urandom(5000))
    ring = RingWriter(tmp_path / "x-1-1.ring", RingIdentity(rank=1, world=2))
    gc.collect()  # or what others left is closed meanwhile
    before = len(os.listdir("/proc/self/fd"))
    found = Rings(tmp_path)
    found.refresh(time.monotonic())
    assert isinstance(found.ranks[1], Ring)
    found.close()
    assert len(os.listdir("/proc/self/fd")) == before, ring
