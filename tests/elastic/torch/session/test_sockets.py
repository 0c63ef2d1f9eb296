"""Ending what ranks wait for in gloo, at the worst moments: while a message is under way."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ckptd.elastic.torch.session.sockets import GroupSockets, sockets_of_this_process
from ckptd.testing.ranks import run_ranks
from tests.processes import PATIENCE_S, until, wait_for_stop

NO_STORE = frozenset[int]()
LONG = timedelta(hours=1)
"""Of a collective: it ends by itself long after the test has failed."""


@pytest.fixture
def pair() -> Iterator[tuple[GroupSockets, socket.socket, socket.socket]]:
    """Both ends of a connection, the first of which is a group's."""
    watched = GroupSockets()
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        there = stack.enter_context(socket.create_connection(server.getsockname()))
        there.settimeout(PATIENCE_S)
        watched._begin()
        here = stack.enter_context(server.accept()[0])
        watched._end()
        here.settimeout(PATIENCE_S)
        yield watched, here, there


def unread(sock: int | socket.socket) -> int:
    """Return how many bytes have arrived at a connection that nobody has read."""
    found: int = struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, bytes(4)))[0]
    return found


def test_a_connection_is_shut_down_once_it_is_at_rest(
    pair: tuple[GroupSockets, socket.socket, socket.socket],
) -> None:
    watched, here, there = pair
    for count in (1, 2):
        there.sendall(b"x")
        until(lambda count=count: unread(here) == count, "a byte")
        assert watched.shut(store_ports=NO_STORE) == 1, "something has come"
    assert here.recv(2) == b"xx"
    assert watched.shut(store_ports=NO_STORE) == 1, "something was read"
    here.sendall(b"y")
    until(lambda: unread(there) == 1, "a byte")
    assert watched.shut(store_ports=NO_STORE) == 1, "something was sent"
    there.sendall(b"z")
    assert there.recv(1) == b"y"
    until(lambda: unread(here) == 1, "a byte")
    assert [watched.shut(store_ports=NO_STORE) for _ in range(3)] == [1, 1, 0]
    assert here.recv(9) == b"z", "what has come is read before the end"
    assert here.recv(9) == b""
    here.sendall(b"and a write does not fail")
    assert there.recv(1) == b"a"


def test_a_connection_that_is_never_at_rest_is_shut_down_in_the_end(
    pair: tuple[GroupSockets, socket.socket, socket.socket],
) -> None:
    watched, here, there = pair
    assert watched.shut(store_ports=NO_STORE, whole=True) == 0
    assert here.recv(1) == there.recv(1) == b""
    with pytest.raises(BrokenPipeError):
        here.sendall(b"x")


def test_sockets_are_watched_again_after_the_making_of_a_group_was_cut_short() -> None:
    watched = GroupSockets()
    watched._begin()  # interrupted before its end
    watched.forget()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as other, server.accept()[0] as end:
            other.settimeout(PATIENCE_S)
            assert watched.shut(store_ports=NO_STORE, whole=True) == 0
            watched._begin()
            watched._end()
            assert watched.shut(store_ports=NO_STORE, whole=True) == 0
            end.sendall(b"x")
            assert other.recv(1) == b"x"


# --- with gloo ------------------------------------------------------------------------------------


def group_of_two() -> tuple[GroupSockets, dist.ProcessGroup, int]:
    """Make a group that is watched; return its one connection as well."""
    watched = GroupSockets()
    watched.watch()
    before = sockets_of_this_process()
    group = dist.new_group(timeout=LONG)
    watched.close()
    for link, fd in sockets_of_this_process().items():
        if link not in before:
            with socket.socket(fileno=os.dup(fd)) as sock:
                if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    return watched, group, sock.detach()
    raise AssertionError("the group has no connection")


def ends(call: Callable[[], object]) -> None:
    """Fail the rank, with what it does, if a call does not end: gloo itself waits for an hour."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE_S / 2)
    if thread.is_alive():
        os.kill(os.getpid(), signal.SIGABRT)


def shut(watched: GroupSockets) -> None:
    """Shut down what is at rest, as the thread that interrupts a generation does."""
    until(lambda: not watched.shut(store_ports=NO_STORE), "all connections are shut down")


def begins(folder: Path, fd: int) -> None:
    """Return, in rank 1, when the other rank has begun its call; in rank 0, when it may begin."""
    if dist.get_rank() == 0:
        until((folder / "ready").exists, "the other rank looks")
        return
    before = received(fd)
    (folder / "ready").touch()
    until(lambda: received(fd) > before, "the other rank begins")
    (folder / "begun").touch()


def send_to_one_that_asks_at_the_end(folder: Path) -> None:
    """A rank whose thread of gloo is late: it reads what was asked for when the end is there too.

    The whole process is stopped in place of that thread, and a child shuts down what both have.
    """
    watched, group, fd = group_of_two()
    value = torch.ones(1000)
    begins(folder, fd)
    if dist.get_rank() == 1:
        until((folder / "stopped").exists, "the other rank is stopped")
        dist.irecv(value, 0, group=group)
        until((folder / "over").exists, "the other rank is out")
        return
    mother = os.getpid()
    if (child := os.fork()) == 0:
        try:
            until((folder / "begun").exists, "the send has begun")
            os.kill(mother, signal.SIGSTOP)
            wait_for_stop(mother)
            (folder / "stopped").touch()
            until(lambda: unread(fd) > 0, "the other rank has asked")
            shut(watched)
        finally:
            os.kill(mother, signal.SIGCONT)
            os._exit(0)
    ends(lambda: tried(lambda: dist.send(value, 1, group=group)))
    os.waitpid(child, 0)
    (folder / "over").touch()


def receive_by_pieces(folder: Path) -> None:
    """A message that is under way when the generation ends, of gloo's own form."""
    watched, group, fd = group_of_two()
    value, pieces = torch.zeros(1 << 20), 8
    size = value.nbytes // pieces
    begins(folder, fd)
    if dist.get_rank() == 1:
        with socket.socket(fileno=fd) as sock:
            sock.setblocking(True)
            sock.sendall(struct.pack("6Q", 48 + value.nbytes, 1, 0, 0, value.nbytes, 0))
            for number in range(pieces):
                until((folder / f"{number}").exists, f"piece {number} is wanted")
                sock.sendall(torch.ones(size // 4).numpy().tobytes())
            until((folder / "over").exists, "the other rank is out")
        return

    def interrupt() -> None:
        until((folder / "begun").exists, "the message is asked for")
        for number in range(pieces):
            before = received(fd)
            (folder / f"{number}").touch()
            until(lambda: received(fd) >= before + size, f"piece {number}")  # noqa: B023
            assert watched.shut(store_ports=NO_STORE) == 1
        shut(watched)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    ends(lambda: dist.recv(value, 1, group=group))
    thread.join()
    assert bool((value == 1).all())
    (folder / "over").touch()


def received(fd: int) -> int:
    with socket.socket(fileno=os.dup(fd)) as sock:
        found: int = struct.unpack("Q", sock.getsockopt(6, socket.TCP_INFO, 136)[128:])[0]
    return found


def tried(call: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # its message may come through still, or not
        call()


@pytest.mark.dist
@pytest.mark.parametrize("program", [send_to_one_that_asks_at_the_end, receive_by_pieces])
def test_a_rank_comes_out_while_a_message_is_under_way(
    program: Callable[[Path], None], tmp_path: Path
) -> None:
    """gloo does not tell such an operation that its connection has failed."""
    run_ranks(2, program, tmp_path, deadline_s=PATIENCE_S)
