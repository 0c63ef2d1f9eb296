"""Workers pass on what they pull: the trainer sends it once, and nothing wrong is ever applied."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import torch

import ckptd
from ckptd.base.net.connection import Connection
from ckptd.publish.messages import AskPassed, ServerEntry
from ckptd.publish.passing import Passing, Sources, _Share, _Taker
from tests.processes import PATIENCE_S, kill, stop, until
from tests.programs import Program
from tests.publish.passworker import Done, values_of
from tests.reshard.torch.layout.jobs import whole
from tests.reshard.torch.layout.test_binder import WHOLE, fused

pytestmark = pytest.mark.timeout(300)
NEEDED = sum(t.nbytes for t in fused(whole(1)).values())
MORE = 1 << 16
"""Bytes of a connection to the trainer that are no weights: certificates, names, questions."""


class Cluster:
    """A trainer in this process, and workers on hosts of their own."""

    def __init__(self, at: Path, ends: ExitStack) -> None:
        self.at = at
        self.full = whole(1)
        self.publisher = ends.enter_context(ckptd.Publisher(WHOLE, at, linger_s=1.0))
        self.step = 0
        self._ends = ends

    def publish(self) -> str:
        """Publish; return the digest of what workers are to hold."""
        self.step += 1
        assert self.publisher.publish(self.step, {"model": self.full}, wait_s=60).wait(PATIENCE_S)
        return values_of(fused(self.full))

    def change(self) -> None:
        """Change some elements of each tensor."""
        generator = torch.Generator().manual_seed(self.step)
        for name, tensor in self.full.items():
            changed = torch.rand(tensor.shape, generator=generator) < 0.02
            self.full[name] = torch.where(changed, tensor * 1.5 + 1, tensor)

    def worker(self, host: str, **spec: object) -> Program:
        """Start a worker on a host."""
        raw = msgspec.json.encode({"at": str(self.at), **spec}).decode()
        env = dict(os.environ, CKPTD_NODE=host)
        found = Program("-m", "tests.publish.passworker", raw, env=env)
        for end in (found.stdout.close, found.stderr.close, found.kill):
            self._ends.callback(end)
        return found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as ends:
        yield Cluster(tmp_path / "at", ends)


def done(worker: Program) -> Done:
    line = worker.stdout.readline()
    assert line, worker.stderr.read()
    return msgspec.json.decode(line, type=Done)


@pytest.mark.parametrize("count", [1, 4, 16])
def test_a_trainer_sends_once_however_many_workers_there_are(cluster: Cluster, count: int) -> None:
    workers = [cluster.worker(f"host-{i % 5}", updates=2) for i in range(count)]
    wanted = cluster.publish()
    found = [done(w) for w in workers]
    assert {d.values for d in found} == {wanted}
    assert sum(d.received for d in found) == count * NEEDED
    assert sum(d.received - d.passed for d in found) == NEEDED
    before = sum(d.of_trainer for d in found)
    assert before < NEEDED + count * MORE
    cluster.change()
    wanted = cluster.publish()
    found = [done(w) for w in workers]
    assert {d.values for d in found} == {wanted}
    (size,) = {d.received for d in found}
    assert 0 < size < NEEDED // 4
    assert sum(d.received - d.passed for d in found) == size


def test_without_it_a_trainer_sends_to_each(cluster: Cluster) -> None:
    workers = [cluster.worker("host", pass_on=False) for _ in range(2)]
    wanted = cluster.publish()
    found = [done(w) for w in workers]
    assert [(d.values, d.received, d.passed) for d in found] == [(wanted, NEEDED, 0)] * 2
    assert sum(d.of_trainer for d in found) > 2 * NEEDED


@pytest.mark.parametrize("fault", ["killed", "stopped", "bytes", "digest"])
def test_a_source_that_fails_in_the_middle_is_gone_round(cluster: Cluster, fault: str) -> None:
    wanted = cluster.publish()
    source = cluster.worker("host-0", fault=fault)
    assert done(source).values == wanted
    # On a busy machine a source is late with what it gives well.
    found = done(cluster.worker("host-1", late_s=10.0 if fault == "stopped" else 60.0))
    assert found.values == wanted
    assert 0 < found.passed < found.received == NEEDED  # what was right before it is kept
    third = done(cluster.worker("host-2", late_s=2.0))  # named the first, or one that is whole
    assert third.values == wanted


@pytest.mark.parametrize("fault", ["lie", "waits"])
def test_a_source_that_lies_gives_nothing(cluster: Cluster, fault: str) -> None:
    wanted = cluster.publish()
    assert done(cluster.worker("host-0", fault=fault)).values == wanted
    found = done(cluster.worker("host-1", late_s=2.0))
    assert (found.values, found.passed, found.received) == (wanted, 0, NEEDED)


def test_a_source_that_gives_an_older_version_is_found_out(
    cluster: Cluster, tmp_path: Path
) -> None:
    wanted = cluster.publish()
    source = cluster.worker("host-0", fault="older", updates=3)
    assert done(source).values == wanted
    other = cluster.worker("host-1", updates=3, before=str(tmp_path / "go"))
    found = done(other)
    for step in (2, 3):
        assert (found.values, found.passed) == (wanted, found.received)
        cluster.full = whole(step)
        wanted = cluster.publish()
        assert done(source).values == wanted
        (tmp_path / f"go{step}").touch()
        found = done(other)
    assert (found.values, found.passed) == (wanted, 0)


def test_what_another_worker_takes_stays_as_it_is(cluster: Cluster, tmp_path: Path) -> None:
    first = cluster.publish()
    asked = tmp_path / "asked"
    source = cluster.worker("host-0", updates=3, fault="slow", asked=str(asked))
    assert done(source).values == first
    late = cluster.worker("host-1")
    until(asked.exists, "a question")
    cluster.full = whole(2)
    second = cluster.publish()
    assert done(source).values == second
    asked.with_suffix(".go").touch()
    found = done(late)
    assert (found.values, found.passed) == (first, NEEDED)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_with_all_sources_gone_the_trainer_serves(cluster: Cluster, end: signal.Signals) -> None:
    wanted = cluster.publish()
    sources = [cluster.worker(f"host-{i}") for i in range(3)]
    assert {done(s).values for s in sources} == {wanted}
    for source in sources:
        kill(source.pid) if end == signal.SIGKILL else stop(source.pid)
    found = done(cluster.worker("host-2"))
    assert (found.values, found.passed, found.received) == (wanted, 0, NEEDED)


def test_without_trainer_a_worker_that_waits_keeps_what_it_has(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.publish()
    asked = tmp_path / "asked"
    done(cluster.worker("host-0", fault="waits", asked=str(asked)))
    late = cluster.worker("host-1", late_s=1000.0, wait_s=1.0)
    until(asked.exists, "a question")
    kill(cluster.publisher.server_pid)
    found = done(late)
    assert (found.step, found.values) == (-1, values_of(fused(whole(99))))


def test_who_has_more_behind_it_has_its_turn_first() -> None:
    passing = Passing(b"a secret of a test, long enough", "127.0.0.1")
    share = passing._pulled[-1].shares[b"k"] = _Share()
    turns: list[int] = []

    def take(place: int) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            taker = _Taker(passing, Connection(ours, "a test", 1.0, 1 << 20))
            while not taker._offered(AskPassed(b"k", PATIENCE_S, place)).sums:
                pass
            turns.append(place)
            taker.leave()

    threads = [threading.Thread(target=take, args=(place,)) for place in (4, 2, 1)]
    for number, thread in enumerate(threads, 1):
        thread.start()
        until(lambda: len(share.waiting) == number, "a worker that waits")  # noqa: B023
    share.sums.append(b"of an answer")
    passing._settle(share, whole=True)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert turns == [1, 2, 4]
    passing.close()


def test_a_worker_keeps_its_place_between_two_questions() -> None:
    passing = Passing(b"a secret of a test, long enough", "127.0.0.1")
    share = passing._pulled[-1].shares[b"k"] = _Share()
    with ExitStack() as ends:
        takers = []
        for _ in range(3):
            ours, theirs = socket.socketpair()
            ends.enter_context(ours)
            ends.enter_context(theirs)
            takers.append(_Taker(passing, Connection(ours, "a test", 1.0, 1 << 20)))
        first, second, third = takers

        def takes(taker: _Taker, place: int) -> bool:
            return bool(taker._offered(AskPassed(b"k", 0.0, place)).sums)

        assert not takes(first, 1)
        share.sums.append(b"of an answer")
        passing._settle(share, whole=True)
        assert not takes(second, 2)  # the first one is about to ask again
        assert takes(first, 1)
        first.leave()
        assert not takes(third, 4)
        assert takes(second, 2)
        second._end_turn()
        assert takes(third, 4)
        third.leave()
        second.leave()
        assert (share.waiting, share.users, share.busy) == ([], 0, set())
    passing.close()


def test_a_worker_that_died_in_its_place_keeps_nobody_waiting() -> None:
    passing = Passing(b"a secret of a test, long enough", "127.0.0.1")
    share = passing._pulled[-1].shares[b"k"] = _Share(whole=True, sums=[b"of an answer"])
    share.waiting.append((True, 0))  # of one that will not ask again
    ours, theirs = socket.socketpair()
    gone, there = (_Taker(passing, Connection(s, "a test", 1.0, 1 << 20)) for s in (ours, theirs))
    gone._share, gone._waits, share.users = share, (True, 0), 1
    assert not there._offered(AskPassed(b"k", 0.0, 1)).sums
    threading.Timer(0.1, gone.leave).start()
    assert there._offered(AskPassed(b"k", PATIENCE_S, 1)).sums
    there.leave()
    ours.close()
    theirs.close()
    passing.close()


def entry(host: int, number: int) -> ServerEntry:
    return ServerEntry(f"host-{host}", f"10.0.{host}.{number}:1", "", "")


def test_hosts_are_a_tree_and_workers_of_a_host_one_within_it() -> None:
    sources = Sources()
    paths = {}
    for number in range(4):
        for host in range(8):
            at = entry(host, number)
            paths[host, number] = sources.path(b"k", at, at)
    assert paths[0, 0] == ((), 0)
    firsts = {h: [e.host for e in paths[h, 0][0]] for h in range(8)}
    assert firsts[1] == ["host-0"]
    assert firsts[3] == ["host-1", "host-0"]
    assert firsts[6] == ["host-2", "host-0"]
    assert firsts[7] == ["host-3", "host-1", "host-0"]
    # A second worker of a host takes of its own host; of others only if that is gone.
    assert paths[7, 1][0] == (entry(7, 0), *paths[7, 0][0])
    assert paths[7, 3][0] == (entry(7, 1), entry(7, 0), *paths[7, 0][0])
    # Of those that take of one, who has more behind it is the first.
    assert [paths[h, 0][1] for h in (1, 2, 4)] == [1, 2, 4]
    assert [paths[7, n][1] for n in (1, 2, 3)] == [1, 2, 3]
    assert sources.path(b"other", entry(9, 9), "another") == ((), 0)


def test_one_takes_the_place_of_a_worker_that_failed() -> None:
    sources = Sources()
    all_of = [entry(host, number) for number in range(2) for host in range(4)]
    for at in all_of:
        sources.path(b"k", at, at)
    gone = entry(0, 0)
    found = {at: sources.path(b"k", at, at, (gone.address,))[0] for at in all_of[1:]}
    assert [at for at, path in found.items() if not path] == [entry(0, 1)]
    assert found[entry(1, 0)] == (entry(0, 1),)
    assert found[entry(3, 1)] == (entry(3, 0), entry(1, 0), entry(0, 1))
    # Nobody waits for one that waits for it, though only some have noticed.
    sources.leave(gone)
    order = [*all_of[1:]]
    for at in order:
        for one in (*found[at], *sources.path(b"k", at, at)[0]):
            assert (int(one.host[-1]), all_of.index(one)) < (int(at.host[-1]), all_of.index(at))


def test_who_leaves_or_asks_something_else_is_named_no_more() -> None:
    sources = Sources()
    first, second, third = (entry(h, 0) for h in range(3))
    sources.path(b"k", first, 1)
    assert sources.path(b"k", second, 2)[0] == (first,)
    sources.leave(1)
    assert sources.path(b"k", third, 3)[0] == (second,)
    sources.path(b"next", second, 2)
    assert sources.path(b"k", first, 1)[0] == (second,)  # it gives the one before as well
    sources.path(b"after it", second, 2)
    assert sources.path(b"k", first, 1)[0] == (third,)
    for asker in (1, 2, 3):
        sources.leave(asker)
    assert not sources._asking
    assert not sources._of
