"""Strangers at a door: they keep nobody out, cost no thread, and are gone after seconds."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from ckptd.base.net.connection import Connection, greet_server
from ckptd.base.net.door import Door, Strangers
from ckptd.decoding import msgpack_decoder
from ckptd.errors import StoreError, TransientStoreError, UsageError
from tests.processes import PATIENCE_S, until

SECRET = b"0123456789abcdef"
ANY = msgpack_decoder(str)


def echo(wire: Connection) -> None:
    while True:
        said, _ = wire.receive(ANY, PATIENCE_S)
        wire.send(b"\xa1" + said.encode())


@contextmanager
def opened(**more: Any) -> Iterator[tuple[Door, tuple[str, int]]]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    limits: dict[str, Any] = {"clients": 2, "greeting_s": PATIENCE_S, "send_s": PATIENCE_S}
    door = Door(listener, lambda: SECRET, "probe", echo, name="tests", **limits | more)
    try:
        yield door, listener.getsockname()
    finally:
        assert door.close(PATIENCE_S) is None


@contextmanager
def client(address: tuple[str, int], secret: bytes = SECRET) -> Iterator[Connection]:
    wire = Connection(socket.create_connection(address, PATIENCE_S), "door", PATIENCE_S)
    try:
        greet_server(wire, secret, "probe", role="agent", wait_s=PATIENCE_S)
        yield wire
    finally:
        wire.release()


def answers(wire: Connection) -> bool:
    wire.send(b"\xa1x")
    return bool(wire.receive(ANY, PATIENCE_S)[0] == "x")


def ended(sock: socket.socket) -> bool:
    sock.settimeout(PATIENCE_S)
    try:
        while sock.recv(1 << 10):
            pass
    except ConnectionError:
        pass
    return True


def test_silent_connections_keep_nobody_out_and_have_no_threads() -> None:
    before = threading.active_count()
    with opened(strangers=8) as (door, address), ExitStack() as crowd:
        held = [crowd.enter_context(socket.create_connection(address)) for _ in range(40)]
        with client(address) as wire:
            assert answers(wire)
            assert threading.active_count() - before == 2  # the door's, and the client's
            assert ended(held[0])  # the oldest left
            assert door.counts().accepted == 1
            assert door.counts().refused >= 32
            assert answers(wire)


def test_silence_ends_and_bytes_one_by_one_are_silence() -> None:
    with opened(greeting_s=0.2) as (door, address):
        with socket.create_connection(address) as silent, socket.create_connection(address) as slow:
            slow.sendall(b"\x20")
            assert ended(silent)
            assert ended(slow)
        until(lambda: door.counts().refused == 2)


def test_a_client_that_has_no_room_is_told() -> None:
    with opened() as (door, address), client(address) as first, client(address) as second:
        with pytest.raises(TransientStoreError) as caught, client(address):
            pass
        assert caught.value.kind == "link-busy"
        with pytest.raises(StoreError) as other, client(address, b"another secret.."):
            pass
        assert other.value.kind == "permission"  # a stranger does not learn that there is no room
        assert answers(first)
        first.close()
        until(lambda: door.counts().served == 1)
        with client(address) as third:
            assert answers(third)
            assert answers(second)


def test_what_comes_before_the_answer_ends_the_connection() -> None:
    with opened() as (door, address), socket.create_connection(address) as noisy:
        noisy.sendall(os.urandom(4000))
        assert ended(noisy)
        until(lambda: door.counts().refused == 1)


def test_a_door_to_the_network_needs_a_secret() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(UsageError, match="needs a secret"),
    ):
        Door(listener, lambda: b"", "probe", echo, name="t", clients=1, greeting_s=1.0, send_s=1.0)


def test_the_oldest_stranger_goes_first() -> None:
    cut: list[int] = []
    strangers = Strangers(2, cut.append, -1.0)
    for number in range(4):
        strangers.enter(number)
    assert (cut, strangers.held()) == ([0, 1], [2, 3])
    assert strangers.leave(2)
    assert not strangers.leave(2)
    strangers.cut_late()
    assert (cut, strangers.held()) == ([0, 1, 3], [])
