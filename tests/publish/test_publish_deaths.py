"""The trainer or a server dies: what is whole is had, and nobody waits for what is not."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import ckptd
from ckptd.base.runtime.channel import SocketChannel
from ckptd.errors import CkptdError
from ckptd.publish.client import PublishClient
from ckptd.publish.link import ServerLink
from ckptd.publish.messages import (
    ORDER,
    REPLY,
    AskHold,
    AskRelease,
    AskSlot,
    HoldAnswer,
    Opening,
    ServerEntry,
    ServerStop,
    SetLeader,
    VersionWhole,
)
from ckptd.publish.server import PublishServer
from ckptd.testing.ranks import run_ranks
from tests.processes import PATIENCE_S, kill, lives, stop, until, wait_for_end
from tests.publish.jobs import TRAINER
from tests.reshard.torch.layout.jobs import Tree, chunks, differing, whole
from tests.reshard.torch.layout.test_binder import FUSED, fused

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

LINGER_S = 10.0
SECRET = b"some random text"
SCRIPT = """
import sys, time
import ckptd
from tests.reshard.torch.layout.jobs import whole
from tests.reshard.torch.layout.test_binder import WHOLE
publisher = ckptd.Publisher(WHOLE, sys.argv[1], linger_s=float(sys.argv[2]))
publisher.publish(1, {"model": whole(1)}).wait(30)
print(publisher.server_pid, flush=True)
time.sleep(600)
"""


@pytest.mark.forks("small", "all")
def test_the_last_version_outlives_the_trainer_and_then_goes(tmp_path: Path) -> None:
    at = tmp_path / "at"
    command = [sys.executable, "-c", SCRIPT, str(at), str(LINGER_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        server = int(trainer.stdout.readline())
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    into = Tree(fused(whole(99)))
    with ckptd.Subscriber(FUSED, into, at) as subscriber:
        report = subscriber.update(wait_s=30)
        assert report is not None
        assert differing(dict(into.state_dict()), fused(whole(1))) == []
        # Its memory goes with it, though the worker stays connected and waits for a newer version.
        until(lambda: subscriber.update(1.0) is None and not lives(server), "the server's end")
        assert subscriber.update() is None
        assert subscriber.version == report.version


def lost_server(place: str) -> list[str]:
    """Rank 1's server is killed: no version is whole any more, and every rank comes to know."""
    rank = dist.get_rank()
    state = {"model": Tree(chunks(whole(1), rank, 2))}
    found = []
    with ckptd.Publisher(TRAINER, place) as publisher:
        assert publisher.publish(1, state).wait(PATIENCE_S)
        if rank == 1:
            kill(publisher.server_pid)
            wait_for_end(publisher.server_pid)
        dist.barrier()
        for step in range(2, 6):
            try:
                publisher.publish(step, state)
                found.append("")
            except CkptdError as error:
                found.append(error.kind)
            publisher.before_mutation()
            dist.barrier()
    return found


def test_a_lost_server_is_an_error_on_every_rank(tmp_path: Path) -> None:
    done = run_ranks(2, lost_server, str(tmp_path / "at"), deadline_s=PATIENCE_S)
    assert done[0][0] == ""
    assert done[0][-1] == done[1][-1] == "process"


def serving(
    rank: int, linger_s: float, port: int = 0
) -> tuple[SocketChannel, ServerEntry, threading.Thread]:
    """Run the server of a rank in a thread; return its rank's side, and where it listens."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=PublishServer(SocketChannel(theirs, ORDER)).run)
    thread.start()
    channel = SocketChannel(ours, REPLY)
    channel.send(Opening("epoch", rank, 2, SECRET, "127.0.0.1", port, "", 2, 60.0, linger_s))
    item = channel.receive(30)
    assert item is not None
    return channel, item[0].entry, thread


def ends(entry: ServerEntry) -> bool:
    """Whether a server says that it is to end."""
    link = ServerLink.to(entry, SECRET)
    link.close()
    return link.ending


def test_every_server_of_a_closed_publisher_stays_while_a_version_is_held() -> None:
    leader, entry, first = serving(0, 0.2)
    other, _, second = serving(1, 0.2)
    other.send(SetLeader(entry))
    leader.send(AskSlot(1, 7))
    leader.send(VersionWhole(1))
    worker, late = (ServerLink.to(entry, SECRET) for _ in range(2))
    try:
        assert worker.newest(0, 30.0).number == 1
        assert worker.ask(AskHold(1), HoldAnswer).good
        for channel in (leader, other):
            channel.send(ServerStop())
        until(lambda: ends(entry))
        second.join(1.5)
        assert second.is_alive()
        assert first.is_alive()
        assert not late.ask(AskHold(1), HoldAnswer).good  # else it would never end
        worker.ask(AskRelease(), HoldAnswer)
        for thread in (first, second):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    finally:
        for end in (worker, late, leader, other):
            end.close()


def test_a_trainer_that_starts_anew_gets_the_address_of_the_one_before() -> None:
    dead, entry, first = serving(0, 3.0)
    dead.close()
    until(lambda: ends(entry))
    begun = time.monotonic()
    channel, again, second = serving(0, 0.0, int(entry.address.rpartition(":")[2]))
    assert time.monotonic() - begun > 1.0
    assert again is not None
    assert again.address == entry.address
    first.join(PATIENCE_S)
    assert not first.is_alive()
    begun = time.monotonic()
    other, refused, third = serving(0, 0.0, int(entry.address.rpartition(":")[2]))
    assert refused is None  # the trainer there lives: nothing is waited for
    assert time.monotonic() - begun < 30.0
    for end, thread in ((channel, second), (other, third)):
        end.close()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_version_that_a_lost_server_never_makes_known_is_an_error() -> None:
    lost: list[int] = []
    client = PublishClient(
        Opening("e", 1, 2, SECRET, "127.0.0.1", 0, "", 2, 60.0, 1.0),
        lambda number, _: lost.append(number),
        lambda *_: None,
    )
    try:
        client.ready()
        stop(client.pid)
        client.send(VersionWhole(3))
        kill(client.pid)
        until(lambda: lost == [3])
    finally:
        client.close()


def test_a_trainer_that_dies_before_the_answer_leaves_its_version_whole() -> None:
    ours, theirs = socket.socketpair()
    server = PublishServer(SocketChannel(theirs, ORDER))
    thread = threading.Thread(target=server.run)
    thread.start()
    channel = SocketChannel(ours, REPLY)
    secret = b"s" * 16
    channel.send(Opening("epoch", 0, 1, secret, "127.0.0.1", 0, "", 2, 60.0, 3.0))
    item = channel.receive(30)
    assert item is not None
    channel.send(AskSlot(1, 7))
    channel.send(VersionWhole(1))
    channel.close()  # it hears neither answer
    link = ServerLink.to(item[0].entry, secret)
    try:
        assert link.newest(0, 30.0).step == 7
    finally:
        link.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
