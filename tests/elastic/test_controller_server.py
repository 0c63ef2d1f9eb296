"""What a hostile or broken client does to a controller: nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ckptd.elastic.dial import dial
from ckptd.elastic.frames import Hello, client_frames, decode_welcome, encode_line, new_nonce
from ckptd.elastic.messages import Left, NodeUp
from ckptd.elastic.wire import Beat, Echo, Said, ToNode
from ckptd.errors import RefusedError
from ckptd.net.address import parse_address
from tests.elastic.controlled import (
    LONG_S,
    SECRET,
    ControllerProcess,
    controlled,
    pretended,
    status_when,
    until,
)

KEY = SECRET.encode()


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControllerProcess]:
    with controlled(tmp_path_factory.mktemp("c"), "--nodes", "2") as process:
        yield process


@contextlib.contextmanager
def plain(controller: ControllerProcess) -> Iterator[socket.socket]:
    with socket.create_connection(parse_address(controller.address), timeout=LONG_S) as sock:
        yield sock


def is_closed(sock: socket.socket) -> bool:
    """Wait until the other side closes; false if it says something else after all."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def hello(**changes: str) -> Hello:
    return Hello(job="j", role="node", name=changes.get("name", "evil"), nonce=new_nonce())


def shaken(sock: socket.socket, said: Hello) -> bytes:
    sock.sendall(encode_line(said))
    line = b""
    while not line.endswith(b"\n"):
        line += sock.recv(1)
    return line


def beat(name: str = "evil", number: int = 1) -> Beat:
    return Beat(number=number, up=NodeUp(node=name, life="x", slots=1))


@pytest.mark.parametrize(
    "garbage",
    [
        os.urandom(4096),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0" * 2000,
        b'{"v":1}\n',
        b"{" * 1023 + b"\n",
        b"\n",
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
            role="node",
            name="n",
            secret=KEY,
            kind=ToNode,
            timeout_s=LONG_S,
        )
    assert caught.value.kind == "not-the-controller"


@pytest.mark.parametrize("length", [4097, 1 << 22, (1 << 32) - 1])
def test_huge_lengths_of_strangers_are_hung_up_on(
    controller: ControllerProcess, length: int
) -> None:
    with plain(controller) as sock:
        shaken(sock, hello())
        sock.sendall(struct.pack("<I16s", length, b"x" * 16))
        assert is_closed(sock)


def test_a_wrong_secret_is_hung_up_on(controller: ControllerProcess) -> None:
    with plain(controller) as sock:
        said = hello()
        welcome = decode_welcome(shaken(sock, said))
        sock.sendall(client_frames(b"?" * 32, said, welcome, ToNode).pack(beat()))
        assert is_closed(sock)
    with controller.operator() as operator:
        assert "evil" not in {row.name for row in operator.status().nodes}


def test_a_replayed_conversation_and_a_replayed_frame_are_hung_up_on(
    controller: ControllerProcess,
) -> None:
    with plain(controller) as sock:
        said = hello(name="twice")
        frames = client_frames(KEY, said, decode_welcome(shaken(sock, said)), ToNode)
        raw = frames.pack(beat("twice"))
        sock.sendall(raw)
        data = sock.recv(4096)
        assert any(isinstance(m, Echo) for m in frames.feed(data))
        sock.sendall(raw)
        until(lambda: is_closed_or_more(sock))
    with plain(controller) as sock:
        shaken(sock, said)
        sock.sendall(raw)
        assert is_closed(sock)


def is_closed_or_more(sock: socket.socket) -> bool:
    try:
        return sock.recv(4096) == b""
    except ConnectionResetError:
        return True


def test_a_node_that_speaks_for_another_is_hung_up_on(controller: ControllerProcess) -> None:
    for message in (beat("n1"), Said(event=Left(node="n1"), number=1)):
        with plain(controller) as sock:
            said = hello(name="liar")
            frames = client_frames(KEY, said, decode_welcome(shaken(sock, said)), ToNode)
            sock.sendall(frames.pack(message))
            assert is_closed(sock)


def test_an_impossible_message_with_the_right_key_is_hung_up_on(
    controller: ControllerProcess,
) -> None:
    for body in (b"\xc1", msgspec.msgpack.encode({"type": "Order"}), b"\x91" * 4000):
        with plain(controller) as sock:
            said = hello()
            frames = client_frames(KEY, said, decode_welcome(shaken(sock, said)), ToNode)
            sock.sendall(frames.pack_body(body))
            assert is_closed(sock)


@pytest.mark.long
def test_half_of_something_and_silence_end_by_a_deadline(controller: ControllerProcess) -> None:
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(plain(controller)) for _ in range(3)]
        socks[1].sendall(b'{"v":1,')
        said = hello()
        welcome = decode_welcome(shaken(socks[2], said))
        raw = client_frames(KEY, said, welcome, ToNode).pack(beat())
        socks[2].sendall(raw[: len(raw) // 2])
        assert all(is_closed(sock) for sock in socks)
    with plain(controller) as sock:
        said = hello(name="half")
        frames = client_frames(KEY, said, decode_welcome(shaken(sock, said)), ToNode)
        sock.sendall(frames.pack(beat("half")))
        sock.sendall(frames.pack(beat("half", 2))[:10])
        until(lambda: is_closed_or_more(sock))


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
        plain(c) as sock,
    ):
        said = hello(name="dumb")
        frames = client_frames(KEY, said, decode_welcome(shaken(sock, said)), ToNode)
        sock.sendall(frames.pack(beat("dumb")))
        status_when(operator, lambda s: s.world == 2, "both")
        lost = status_when(operator, lambda s: s.world == 1 and s.state == "running", "one")
        assert not {row.name: row for row in lost.nodes}["dumb"].up
