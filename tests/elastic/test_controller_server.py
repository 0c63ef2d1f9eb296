"""What a hostile or broken client does to a controller: nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ckptd.base.net.address import parse_address
from ckptd.base.net.connection import Connection, greet_server
from ckptd.base.net.roles import Role
from ckptd.decoding import msgpack_decoder
from ckptd.elastic.dial import MOST_FRAME_BYTES, PURPOSE, dial
from ckptd.elastic.messages import Beat, Envelope, LeaseRenewal, Left, NodeUp, ToNode
from ckptd.errors import RefusedError, StoreError
from tests.elastic.controlled import SECRET, ControllerProcess, controlled, pretended, status_when
from tests.processes import PATIENCE_S, until

KEY = SECRET.encode()
_PATIENT = """\
import ckptd.elastic.controller_server as server
from ckptd.cli.main import main

server._HANDSHAKE_S = server._HALF_FRAME_S = server._SILENCE_S = 1e6
main()
"""
"""A controller that cuts nobody off for silence: where it hangs up, it has refused something."""


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControllerProcess]:
    command = [sys.executable, "-c", _PATIENT]
    with controlled(tmp_path_factory.mktemp("c"), "--nodes", "2", command=command) as process:
        yield process


@contextlib.contextmanager
def plain(controller: ControllerProcess) -> Iterator[socket.socket]:
    with socket.create_connection(parse_address(controller.address), timeout=PATIENCE_S) as sock:
        yield sock


def is_closed(sock: socket.socket) -> bool:
    """Wait until the other side closes; whatever it says before that is read."""
    sock.settimeout(PATIENCE_S)
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(4096):
            pass
    return True


HEAD = struct.Struct("<II")
TO_NODE = msgpack_decoder(ToNode)


def greeted(
    connection: Connection, name: str, *, secret: bytes = KEY, role: Role = "agent"
) -> None:
    greet_server(
        connection,
        secret,
        PURPOSE,
        role=role,
        node=name,
        scope="j",
        wait_s=PATIENCE_S,
        about={"job": "j"},
    )


@contextlib.contextmanager
def shaken(
    controller: ControllerProcess, name: str = "evil", secret: bytes = KEY
) -> Iterator[tuple[Connection, socket.socket]]:
    """A client that has shaken hands, and then does what it likes."""
    with plain(controller) as sock:
        connection = Connection(sock, "controller", PATIENCE_S, MOST_FRAME_BYTES)
        greeted(connection, name, secret=secret)
        yield connection, sock


def beat(name: str = "evil", number: int = 1) -> Beat:
    return Beat(number=number, up=NodeUp(node=name, life="x", slots=1))


@pytest.mark.parametrize(
    "garbage",
    [
        os.urandom(4096),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0" * 2000,
        HEAD.pack(0, 0),
        HEAD.pack(9, 0) + b"\x91" * 9,
        b"\n" * 24,
    ],
    ids=["random", "http", "zeros", "empty", "deep", "newline"],
)
def test_garbage_is_hung_up_on(controller: ControllerProcess, garbage: bytes) -> None:
    with plain(controller) as sock:
        sock.sendall(garbage)
        assert is_closed(sock)


def test_another_job_is_told_so(controller: ControllerProcess) -> None:
    with pytest.raises(RefusedError) as caught:
        dial(
            controller.address,
            job="other",
            role="agent",
            name="n",
            secret=KEY,
            timeout_s=PATIENCE_S,
        )
    assert caught.value.kind == "not-the-controller"


@pytest.mark.parametrize("length", [4097, 1 << 22, (1 << 32) - 1])
def test_huge_lengths_of_strangers_are_hung_up_on(
    controller: ControllerProcess, length: int
) -> None:
    with plain(controller) as sock:
        sock.sendall(HEAD.pack(length, 0))
        assert is_closed(sock)


@pytest.mark.parametrize("lengths", [(MOST_FRAME_BYTES + 1, 0), (10, 1)])
def test_huge_lengths_of_peers_are_hung_up_on(
    controller: ControllerProcess, lengths: tuple[int, int]
) -> None:
    with shaken(controller) as (connection, sock):
        connection._put(memoryview(HEAD.pack(*lengths)))
        assert is_closed(sock)


def test_a_wrong_secret_is_told_and_hung_up_on(controller: ControllerProcess) -> None:
    with pytest.raises(StoreError) as caught, shaken(controller, secret=b"?" * 32):
        pass
    assert caught.value.kind == "permission"
    with controller.operator() as operator:
        assert "evil" not in {row.name for row in operator.status().nodes}


def test_a_client_of_no_job_or_role_or_name_is_told_and_hung_up_on(
    controller: ControllerProcess,
) -> None:
    for role, name in (("rank", "n"), ("reader", "n"), ("controller", "n"), ("agent", "n" * 257)):
        with plain(controller) as sock:
            connection = Connection(sock, "controller", PATIENCE_S)
            with pytest.raises(StoreError) as caught:
                greeted(connection, name, role=role)
            assert caught.value.kind == "permission"
            assert is_closed(sock)
    with plain(controller) as sock:
        connection = Connection(sock, "controller", PATIENCE_S)
        with pytest.raises(RefusedError):
            greet_server(connection, KEY, PURPOSE, role="agent", wait_s=PATIENCE_S)


def test_a_replayed_conversation_and_a_replayed_frame_are_hung_up_on(
    controller: ControllerProcess,
) -> None:
    said: list[bytes] = []

    class Recorded(socket.socket):
        def sendall(self, data: bytes, *args: int) -> None:  # type: ignore[override]
            said.append(bytes(data))
            super().sendall(data, *args)

    with plain(controller) as sock, Recorded(fileno=sock.detach()) as recorded:
        connection = Connection(recorded, "controller", PATIENCE_S)
        greeted(connection, "twice")
        connection.send(beat("twice"))
        until(lambda: any(isinstance(m, LeaseRenewal) for m in connection.take(TO_NODE, 1.0)))
        recorded.sendall(said[-1])
        assert is_closed(recorded)
    with plain(controller) as sock:
        sock.sendall(b"".join(said))
        assert is_closed(sock)


def test_a_node_that_speaks_for_another_is_hung_up_on(controller: ControllerProcess) -> None:
    for message in (beat("n1"), Envelope(event=Left(node="n1"), number=1)):
        with shaken(controller, "liar") as (connection, sock):
            connection.send(message)
            assert is_closed(sock)


def test_an_impossible_message_with_the_right_key_is_hung_up_on(
    controller: ControllerProcess,
) -> None:
    for body in (b"\xc1", msgspec.msgpack.encode({"type": "Order"}), b"\x91" * 4000):
        with shaken(controller) as (connection, sock):
            connection.send(body)
            assert is_closed(sock)


@pytest.mark.long
def test_half_of_something_and_silence_end_by_a_deadline(tmp_path: Path) -> None:
    with controlled(tmp_path, "--nodes", "2") as controller, contextlib.ExitStack() as stack:
        socks = [stack.enter_context(plain(controller)) for _ in range(3)]
        socks[1].sendall(HEAD.pack(10, 0))
        socks[2].sendall(b"\0")
        assert all(is_closed(sock) for sock in socks)
        connection, sock = stack.enter_context(shaken(controller, "half"))
        connection.send(beat("half"))
        connection._put(memoryview(connection.codec.pack(beat("half", 2))[:10]))
        assert is_closed(sock)


@pytest.mark.long
def test_a_crowd_of_strangers_does_not_keep_nodes_out(tmp_path: Path) -> None:
    with controlled(tmp_path) as c, contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(plain(c)).sendall(b"{")
        with pretended(1, c.seat) as nodes, c.operator() as operator:
            status_when(operator, lambda s: s.state == "running")
            assert nodes[0].begins


@pytest.mark.long
def test_a_half_open_connection_is_silence(tmp_path: Path) -> None:
    """A node that was cut off without a word is lost after silent_s, though TCP knows nothing."""
    with (
        controlled(tmp_path, "--nodes", "1:2", "--set", "silent_s=1", "--set", "save_s=1") as c,
        pretended(1, c.seat),
        c.operator() as operator,
        shaken(c, "dumb") as (connection, _),
    ):
        connection.send(beat("dumb"))
        status_when(operator, lambda s: s.world == 2, "both")
        lost = status_when(operator, lambda s: s.world == 1 and s.state == "running", "one")
        assert not {row.name: row for row in lost.nodes}["dumb"].up
