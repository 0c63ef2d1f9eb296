"""A node's launcher without a controller: orders and ends that come in any order."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from ckptd.base.runtime.channel import SocketChannel
from ckptd.elastic.launchers.node import NodeLauncher, NodeSettings
from ckptd.elastic.launchers.output import Output
from ckptd.elastic.launchers.workerpool import Program, WorkerPool
from ckptd.elastic.launchers.workers import Worker
from ckptd.elastic.messages import (
    Attach,
    Begin,
    Broken,
    Ended,
    Envelope,
    FenceNow,
    FromWorker,
    Out,
    RankAssignment,
    StoreAt,
)
from ckptd.elastic.policy import Shape
from ckptd.elastic.workerend import WorkerEnd
from tests.elastic.controlled import SECRET, PretendedNode, controlled
from tests.elastic.test_dial import stranger
from tests.processes import until

pytestmark = pytest.mark.forks("small", "all")


class Alone:
    """A launcher of two ranks, which wait at their gates."""

    def __init__(
        self,
        folder: Path,
        addresses: Callable[[], str] = lambda: "",
        secret: bytes = b"x" * 32,
        job: str = "j",
        give_up_s: float = 900.0,
    ) -> None:
        self.said: list[str] = []
        self.closed = False
        program = Program(mode="exec", argv=("sleep", "600"), environ=dict(os.environ), plain=True)
        self.launcher = NodeLauncher(
            NodeSettings(job=job, node="n", slots=2, beat_s=0.05, give_up_s=give_up_s),
            program,
            Output(None, folder, "j", "default"),
            folder,
            addresses,
            secret,
            self.said.append,
        )
        self.link = self.launcher._link
        self.pool: WorkerPool = self.launcher._pool
        self.link.start()

    def until(self, what: Callable[[], object]) -> None:
        until(what, lambda: str(self.said), turn=lambda: self.launcher._once(0.05))

    def begin(self, generation: int = 1, level: int = 1) -> None:
        self.launcher._ordered(
            Begin(
                generation=generation,
                level=level,
                shape=Shape(1, 2, 1),
                step=0,
                reason="a test",
                nodes=1,
                node_rank=0,
                seats=(RankAssignment(0, 0, 0, 0, 0), RankAssignment(1, 1, 0, 1, 0)),
                world=2,
            )
        )

    def started(self) -> list[Worker]:
        """Begin generation 1, and return its workers."""
        self.begin()
        self.until(lambda: self.pool.workers.live() and all(w.pid for w in self.pool.workers))
        return list(self.pool.workers)

    def codes(self) -> list[int]:
        """Codes of ends that were told, once no worker is left."""
        said = [one.event for one in self.link._kept.values() if isinstance(one, Envelope)]
        return [event.code for event in said if isinstance(event, Ended) and not event.left]

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.launcher._close()


@contextmanager
def alone(folder: Path) -> Iterator[Alone]:
    one = Alone(folder)
    try:
        yield one
    finally:
        one.close()


def test_a_node_has_not_ended_well_before_all_codes_are_known(tmp_path: Path) -> None:
    with alone(tmp_path) as one:
        first, second = one.started()
        second.dead = True  # its descriptor says so, and the zygote has not told its code yet
        one.pool._gone(first, 0)
        assert one.codes() == []
        one.pool._gone(second, 3)
        assert one.codes() == [3]


def test_who_was_killed_is_named_and_not_who_follows(tmp_path: Path) -> None:
    """Also where the end of one that follows is known first."""
    with alone(tmp_path) as one:
        first, second = one.started()
        one.pool._gone(first, 1)
        assert not any("has ended" in text for text in one.said)
        one.pool._gone(second, -signal.SIGKILL)
        (said,) = (text for text in one.said if "has ended" in text)
        assert f"rank 1 (process {second.pid}) has ended: SIGKILL" in said
        assert one.codes() == [-signal.SIGKILL]


@pytest.mark.parametrize("ends", [False, True], ids=["fenced", "ended"])
def test_how_a_worker_failed_is_told_before_its_generation_is_over(
    tmp_path: Path, ends: bool
) -> None:
    """It is waited for others then no more: the fence may be for what this one has caused."""
    with alone(tmp_path) as one:
        first, _ = one.started()
        one.pool._gone(first, -signal.SIGKILL)
        if ends:
            one.close()
        else:
            one.launcher._ordered(FenceNow(generation=2, level=1))
        kept = [sent.event for sent in one.link._kept.values() if isinstance(sent, Envelope)]
        assert [event.code for event in kept if isinstance(event, Ended)] == [-signal.SIGKILL]
        assert any(f"(process {first.pid}) has ended: SIGKILL" in text for text in one.said)


def test_a_generation_waits_for_the_lease_that_a_controller_renews(tmp_path: Path) -> None:
    with alone(tmp_path) as one:
        one.launcher._leased(time.monotonic() - 1.0)
        one.begin()
        one.launcher._once(0.0)
        assert not list(one.pool.workers)
        one.launcher._leased(time.monotonic() + 1000.0)
        one.launcher._once(0.0)
        assert [w.killed for w in one.pool.workers] == [False, False]


@pytest.mark.long
def test_the_end_of_a_lease_kills_those_too_that_were_told_to_end(tmp_path: Path) -> None:
    with alone(tmp_path) as one:
        for worker in one.started():
            worker.killed = True
        one.launcher._leased(time.monotonic() - 1.0)
        one.until(lambda: not one.pool.workers.live())
        assert one.codes() == []


@pytest.mark.long
def test_who_is_late_gets_no_more_time_by_another_fence(tmp_path: Path) -> None:
    with alone(tmp_path) as one:
        one.started()
        one.launcher._ordered(FenceNow(generation=2, level=0))
        before = one.launcher._interrupted_until
        one.launcher._ordered(FenceNow(generation=3, level=0))
        assert one.launcher._interrupted_until == before > 0.0


def test_who_has_left_a_generation_and_cannot_be_told_to_go_on_is_killed(tmp_path: Path) -> None:
    with alone(tmp_path) as one:
        first, _ = one.started()
        first.out = True
        one.begin(generation=3, level=0)
        assert first.killed
        one.until(lambda: "generation 3" in one.said[-1])


def _with_sessions(one: Alone, stack: ExitStack) -> tuple[Worker, Worker]:
    """Begin generation 1 with two workers that hold sessions, and fence it."""
    workers = one.started()
    for worker in workers:
        ours, _ = (stack.enter_context(sock) for sock in socket.socketpair())
        channel = SocketChannel(ours, FromWorker)
        stack.callback(channel.close)
        worker.end = WorkerEnd(channel, worker.pid, Attach(worker.pid, 0, 1))
        worker.session = True
    # A fork leads a session a moment after it is there.
    one.until(lambda: all(os.getsid(worker.pid) == worker.pid for worker in workers))
    one.launcher._ordered(FenceNow(2, level=0))
    return workers[0], workers[1]


def test_a_process_that_gives_up_after_it_was_seated_breaks_its_generation(tmp_path: Path) -> None:
    """It had left the generation before, and could not let go of what that one held."""
    with alone(tmp_path) as one, ExitStack() as stack:
        workers = _with_sessions(one, stack)
        for worker in workers:
            assert worker.end is not None
            one.launcher._handle(worker.end, Out(1))
        one.begin(generation=3, level=0)
        one.until(lambda: {w.generation for w in workers} == {3})
        end = workers[1].end
        assert end is not None
        one.launcher._handle(end, Out(1, "a process group cannot be destroyed"))
        said = [each.event for each in one.link._kept.values() if isinstance(each, Envelope)]
        (broken,) = (event for event in said if isinstance(event, Broken))
        assert broken.generation == 3
        assert broken.reason == "rank 1 cannot go on: a process group cannot be destroyed"


def test_who_can_go_on_in_no_generation_is_killed_and_not_seated_again(tmp_path: Path) -> None:
    with alone(tmp_path) as one, ExitStack() as stack:
        well, unfit = _with_sessions(one, stack)
        assert unfit.end is not None
        assert well.end is not None
        one.launcher._handle(well.end, Out(1))
        one.launcher._handle(unfit.end, Out(1, "its device failed"))
        assert not unfit.idle
        one.until(lambda: unfit.dead and unfit not in list(one.pool.workers))
        assert well.idle
        assert one.launcher._node.fenced == 2
        assert one.codes() == [], "it did not end by itself: that is no fault of its own"
        text = f"rank 1 (process {unfit.pid}) is replaced by a new process"
        assert f"{text}: its device failed" in one.said


def test_a_slot_whose_device_fails_each_process_is_out_of_use(tmp_path: Path) -> None:
    with alone(tmp_path) as one, ExitStack() as stack:

        def fails(generation: int) -> tuple[Worker, Worker]:
            one.begin(generation)
            one.until(lambda: [w.generation for w in one.pool.workers if w.pid] == [generation] * 2)
            sick, other = sorted(one.pool.workers, key=lambda worker: worker.slot or 0)
            ours, _ = (stack.enter_context(sock) for sock in socket.socketpair())
            channel = SocketChannel(ours, FromWorker)
            stack.callback(channel.close)
            sick.end = WorkerEnd(channel, sick.pid, Attach(sick.pid, 0, generation))
            one.launcher._handle(sick.end, Out(generation, "the device fails: lost", device=True))
            return sick, other

        fails(1)
        up = one.launcher._state()
        assert (up.slots, up.sick) == (2, ()), "it may have been the program"
        one.launcher._ordered(FenceNow(generation=1, level=1))
        sick, other = fails(2)
        up = one.launcher._state()
        assert (up.slots, up.sick) == (1, ("slot 0: the device fails: lost",))
        assert sick.killed
        assert other.killed, "its local rank is another device's now"
        assert one.pool.slots.environ()["CUDA_VISIBLE_DEVICES"] == "1"
        assert "slot 0 is disabled" in one.said[-2]


def test_two_that_end_together_are_each_counted_for_their_own_device(tmp_path: Path) -> None:
    """The second one has ended, and how is not known yet, when the first one's slot goes."""
    with alone(tmp_path) as one:
        first, second = one.started()
        one.pool.slots.failed(0, "before", fresh=True, worked=False)
        first.dead = second.dead = True
        one.launcher._device_failed(first, "CUDA error: lost", stepped=False)
        assert one.pool.slots.in_use == [1]
        one.launcher._device_failed(second, "CUDA error: lost", stepped=False)
        assert not second.killed
        assert one.pool.slots.sick == ("slot 0: CUDA error: lost",)


def test_a_device_on_which_steps_were_made_is_not_out_of_use(tmp_path: Path) -> None:
    """Nothing was loaded, since the job is new, and nothing is committed yet."""
    with alone(tmp_path) as one:

        def runs(generation: int) -> bool:
            return [w.generation for w in one.pool.workers if w.pid] == [generation] * 2

        for generation in (1, 2):
            one.begin(generation)
            one.until(partial(runs, generation))
            worker, _ = one.pool.workers
            (one.launcher._ends_folder / f"{worker.pid}.stepped").touch()
            error = tmp_path / f"error{generation}.json"
            error.write_text('{"message": {"message": "CUDA error: device-side assert"}}')
            worker.error_file = str(error)
            one.pool._gone(worker, 1)
            assert worker.failed
            one.launcher._ordered(FenceNow(generation=generation, level=1))
        assert one.pool.slots.in_use == [0, 1]


def test_a_node_whose_workers_have_died_does_not_cost_others_their_sessions(tmp_path: Path) -> None:
    with alone(tmp_path) as one:
        workers = one.started()
        assert not one.launcher._state().sessions
        for worker in workers:
            worker.session = True
        assert one.launcher._state().sessions
        for worker in workers:
            worker.dead = True
        assert one.launcher._state().sessions


def test_a_launcher_that_ends_begins_nothing(tmp_path: Path) -> None:
    with alone(tmp_path) as one:
        one.started()
        one.begin(generation=3)  # it waits for those of generation 1 to be dead
        one.close()
        assert not any("generation 3" in text for text in one.said)
        one.launcher.leave(signal.SIGTERM)  # harmless


@pytest.mark.long
def test_a_program_that_a_worker_has_started_does_not_take_its_place(tmp_path: Path) -> None:
    with alone(tmp_path) as one:
        worker, other = one.started()
        here, there = socket.socketpair()
        with here, there:
            attach = Attach(worker.pid, 0, 1)
            channel = SocketChannel(here, FromWorker)
            end = WorkerEnd(channel, worker.pid, attach)
            one.launcher._attached(worker, end, attach)
            one.launcher._attached(worker, WorkerEnd(channel, other.pid, attach), attach)
            assert worker.end is end
            channel.close()


def test_people_are_told_that_no_controller_is_there_only_after_a_while(tmp_path: Path) -> None:
    with alone(tmp_path) as one:
        one.until(lambda: one.link.problem)
        assert one.said == []
        for silent_s, times in ((10, 1), (19, 1), (21, 2), (40, 2), (43, 3)):
            one.link._echoed_at = time.monotonic() - silent_s
            for _ in range(3):
                one.launcher._once(0.0)
            assert len(one.said) == times, (silent_s, one.said)
        first, *others = one.said
        why = "s of 900: the controller's address is unknown"
        then = "  next:   on its machine, ckptd ctl status --job j"
        assert first == f"waiting for the controller, 10 {why}\n{then}"
        assert others == [f"waiting for the controller, {s} {why}" for s in (21, 43)]
        one.link._echoed_at = time.monotonic()
        one.launcher._once(0.0)
        assert one.said[3:] == ["the controller answers"]


SAYS = {
    "nothing listens": ["the server cannot be reached", "found:  Connection refused"],
    "closes": ["the connection ", "another program, or a proxy, may answer there"],
    "is no TLS": ["the server is another program", "found:  no TLS", "may have this port"],
    "turns away": [
        "server turns ckptd's TLS away",
        "no application protocol",
        "may have this port",
    ],
    "stalls": ["lets connect, and does not answer", "another program, or a proxy, may answer"],
    "shows another program": ["the server is another program", "found:  TLS of another program"],
    "shows controller": ["have different secrets", "all nodes of job j need the same CKPTD_SECRET"],
    "shows expired": ["a certificate is not valid at this time", "clocks of the two machines"],
}
"""Servers that may answer at the controller's address, and what the launcher prints."""


@pytest.mark.parametrize("what", SAYS)
def test_people_are_told_what_answers_in_place_of_a_controller(what: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            address = "{}:{}".format(*closed.getsockname())
        if what != "nothing listens":
            address = stack.enter_context(stranger(what))
        one = Alone(tmp_path, lambda: address, SECRET.encode())
        stack.callback(one.close)
        one.until(lambda: one.link.problem)
        one.link._echoed_at -= 10.0
        one.until(lambda: any("waiting for the controller, 1" in text for text in one.said))
        text = "\n".join(one.said)
        assert not [word for word in (*SAYS[what], f"where:  {address}") if word not in text], text
        assert ("CKPTD_SECRET" in text) == (what == "shows controller")
        assert "next:   on its machine, ckptd ctl status --job j" in text
        one.link._echoed_at -= 900.0
        one.until(lambda: one.launcher._ending)
        ending = one.launcher._ending
        assert ending is not None
        assert SAYS[what][0] in ending.text
        assert address in ending.text


def test_people_are_told_that_the_secret_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_SECRET", "another one" * 3)
    folder = tmp_path / "n"
    folder.mkdir()
    with controlled(tmp_path) as c:
        one = Alone(folder, c.seat, b"another one" * 3)
        try:
            one.until(lambda: one.said)
            assert one.link.there
        finally:
            one.close()
    assert "the server and this client have different secrets" in one.said[0]
    assert "need the same CKPTD_SECRET; here it is set" in one.said[0]


def test_people_are_told_that_the_port_is_another_jobs(tmp_path: Path) -> None:
    folder = tmp_path / "n"
    folder.mkdir()
    with controlled(tmp_path) as c:
        one = Alone(folder, c.seat, job="another")
        try:
            one.until(lambda: one.said)
            assert not one.link.there
        finally:
            one.close()
    assert "the controller of another job answers" in one.said[0]
    assert (
        "all nodes of job another need the same job name and address of the controller"
        in one.said[0]
    )
    assert "CKPTD_SECRET" not in one.said[0]


@pytest.mark.long
def test_a_launcher_whose_name_is_taken_waits_for_the_other_one_to_end(tmp_path: Path) -> None:
    folder = tmp_path / "n"
    folder.mkdir()
    with controlled(tmp_path) as c:
        first = PretendedNode("n", c.seat)
        until(lambda: first.begins)
        one = Alone(folder, c.seat, SECRET.encode())
        try:
            one.until(lambda: one.said)
            assert first.link.connected
            assert not any(isinstance(order, FenceNow) for order in first.orders)
            first.close()
            one.until(lambda: any("generation" in text for text in one.said))
        finally:
            one.close()
    assert "is node n of this job" in one.said[0]
    assert "need different names" in one.said[0]


def test_a_store_that_is_there_before_a_generation_can_begin_is_not_forgotten(
    tmp_path: Path,
) -> None:
    with alone(tmp_path) as one:
        one.launcher._leased(time.monotonic() - 1.0)
        one.begin()
        one.launcher._ordered(StoreAt(1, "localhost", 9))
        one.launcher._leased(time.monotonic() + 1000.0)
        workers = list(one.pool.workers)
        assert len(workers) == 2
        one.until(lambda: all(w.pid and w.gate == -1 for w in workers))
        assert not any(w.killed for w in workers)


def test_a_gate_opens_for_nobody() -> None:
    read, write = os.pipe()
    os.close(read)
    worker = Worker(1, 1, RankAssignment(0, 0, 0, 0, 0), 0, gate=write)
    worker.open_gate({"A": "b"})
    assert worker.gate == -1


def test_a_launcher_that_nobody_answers_ends_by_a_deadline_once_nothing_runs(
    tmp_path: Path,
) -> None:
    one = Alone(tmp_path, give_up_s=1.0)
    try:
        (first, second) = one.started()
        one.until(lambda: one.link.silent_s > 2.0)
        assert one.launcher._ending is None, "its ranks may train until their lease ends"
        for worker in (first, second):
            worker.kill()
        one.until(lambda: one.launcher._ending)
        ending = one.launcher._ending
        assert ending is not None
        assert (ending.kind, ending.code) == ("no-controller", 1)
        assert "no controller has answered for" in ending.text
    finally:
        one.close()
