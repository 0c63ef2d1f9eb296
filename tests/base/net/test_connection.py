"""Handshake and frames: what fits is taken, anything else ends the connection."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from ckptd.base.net.connection import (
    FIRST_BYTES,
    HELLO,
    MOST_BODY_BYTES,
    VERSION,
    Admitted,
    Codec,
    Connection,
    Hello,
    Refusal,
    answer_hello,
    greet_server,
)
from ckptd.base.net.roles import Certified, Role
from ckptd.base.net.tls import PROTOCOL, identity
from ckptd.decoding import msgpack_decoder
from ckptd.errors import CkptdError, RefusedError, StoreError, TransientStoreError, UsageError
from tests.processes import PATIENCE_S

SECRET, OTHER = b"s" * 32, b"t" * 32
HEAD = struct.Struct("<II")


class Note(msgspec.Struct, frozen=True, tag=True):
    number: int
    text: str = ""


NOTE = msgpack_decoder(Note)


def codec(**more: Any) -> Codec:
    """One end, after the handshake."""
    found = Codec("there", **more)
    found.let_in()
    return found


def taken(codec: Codec, data: bytes) -> list[Any]:
    codec.feed(data)
    out = []
    while (message := codec.take(NOTE)) is not None:
        out.append(message)
    return out


def refused(codec: Codec, data: bytes) -> CkptdError:
    with pytest.raises(TransientStoreError) as caught:
        taken(codec, data)
    assert caught.value.kind == "link-protocol"
    assert caught.value.where == codec.peer
    return caught.value


# --- frames ---------------------------------------------------------------------------------------


def test_messages_pass_in_any_pieces() -> None:
    here, there = codec(), codec()
    raw = here.pack(Note(1)) + here.pack(Note(2, "x"))
    got = [message for k in range(len(raw)) for message in taken(there, raw[k : k + 1])]
    assert got == [Note(1), Note(2, "x")]
    assert not there.half
    assert taken(here, there.pack(Note(3)) + there.pack(Note(4))) == [Note(3), Note(4)]


def test_lengths_are_checked_before_anything_is_kept() -> None:
    stranger = Codec("stranger")
    assert "too large" in refused(stranger, HEAD.pack(FIRST_BYTES + 1, 0)).message
    assert taken(codec(), HEAD.pack(FIRST_BYTES + 1, 0)) == []
    refused(codec(), HEAD.pack(MOST_BODY_BYTES + 1, 0))
    refused(codec(), HEAD.pack(10, 1))
    refused(codec(most_body=10), HEAD.pack(11, 0))
    with pytest.raises(TransientStoreError, match="too large to be sent"):
        codec().pack(bytes(MOST_BODY_BYTES + 1))


def test_a_frame_that_is_no_message_is_refused() -> None:
    for body in (b"", b"\xc1", b"\x91" * 2000, msgspec.msgpack.encode({"type": "Other"})):
        assert "not a valid message" in refused(codec(), codec().pack(body)).message


# --- blocking ends --------------------------------------------------------------------------------


def sockets(tcp: bool = True) -> tuple[socket.socket, socket.socket]:
    if not tcp:
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname(), timeout=PATIENCE_S)
        return here, listener.accept()[0]


@contextmanager
def ends(tcp: bool = True) -> Iterator[tuple[Connection, Connection]]:
    here, there = (Connection(sock, "peer", PATIENCE_S) for sock in sockets(tcp))
    try:
        yield here, there
    finally:
        here.release()
        there.release()


def serve(
    server: Connection,
    answer: Callable[[Hello, Certified | None], msgspec.Struct],
    secret: bytes = SECRET,
    role: Role = "agent",
) -> threading.Thread:
    """Be the other side of one handshake, in a thread that ends with it."""

    def run() -> None:
        try:
            if not server.local:
                server.expect_tls(identity(secret, role))
            hellos: list[Any] = []
            while not hellos:
                hellos = server.take(HELLO, PATIENCE_S)
            server.send(answer(hellos[0], server.proved))
            server.codec.let_in()
        except CkptdError:
            server.release()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def greet(
    client: Connection,
    server: Connection,
    answer: Callable[[Hello, Certified | None], msgspec.Struct] = lambda *_: Admitted(
        {"life": "c1"}
    ),
    **more: Any,
) -> Any:
    theirs = {name: more.pop(name) for name in ("server_secret", "server_role") if name in more}
    thread = serve(
        server, answer, theirs.get("server_secret", SECRET), theirs.get("server_role", "agent")
    )
    ours: dict[str, Any] = {"proof": SECRET, "purpose": "probe", "role": "agent"} | more
    try:
        return greet_server(client, wait_s=PATIENCE_S, **ours)
    finally:
        thread.join(PATIENCE_S)


@pytest.mark.parametrize("tcp", [True, False])
def test_both_ends_prove_themselves_and_say_what_they_are(tcp: bool) -> None:
    said: list[Any] = []

    def answer(hello: Hello, peer: Certified | None) -> Admitted:
        said.extend([hello, peer])
        return Admitted({"life": "c1"})

    with ends(tcp) as (client, server):
        about = {"job": "j", "n": 1}
        assert greet(client, server, answer, node="a/b ü", about=about) == {"life": "c1"}
        assert said == [
            Hello(VERSION, "probe", about),
            Certified("agent", "a/b ü") if tcp else None,
        ]
        assert client.proved == (Certified("agent", socket.gethostname()) if tcp else None)
        parts = [memoryview(os.urandom(size)) for size in (300_000, 0, 1, 70_000, 5)]
        for act in (
            lambda: client.send_parts(Note(1), parts),
            lambda: client.send(Note(1), memoryview(b"".join(parts))),
        ):
            thread = threading.Thread(target=act)
            thread.start()
            message, count = server.receive(NOTE, PATIENCE_S, most_bulk=1 << 20)
            room = bytearray(count)
            server.fill(memoryview(room), PATIENCE_S)
            thread.join(PATIENCE_S)
            assert (message, bytes(room)) == (Note(1), b"".join(parts))
        server.send(Note(2))
        server.send(Note(3))
        got = client.take(NOTE, PATIENCE_S)
        while len(got) < 2:
            got += client.take(NOTE, PATIENCE_S)
        assert got == [Note(2), Note(3)]
        assert client.take(NOTE, 0.0) == []


def test_what_has_come_already_is_readable() -> None:
    """One read takes all from the kernel: what is left of it is not waited for."""
    with ends() as (client, server):
        greet(client, server)
        server.send(Note(1))
        server.send(Note(2), memoryview(b"bulk"))
        assert client.receive(NOTE, PATIENCE_S)[0] == Note(1)
        assert client.readable()
        assert client.receive(NOTE, PATIENCE_S, most_bulk=4) == (Note(2), 4)
        room = bytearray(4)
        client.fill(memoryview(room), PATIENCE_S)
        assert room == b"bulk"
        assert not client.readable()


@pytest.mark.parametrize("tcp", [True, False])
def test_a_file_is_sent_and_its_early_end_is_no_signal(tcp: bool) -> None:
    with ends(tcp) as (client, server), open(os.memfd_create("file"), "wb+", 0) as file:
        greet(client, server)
        data = os.urandom(700_000)
        file.write(data)
        sender = threading.Thread(
            target=lambda: server.send_file(Note(1), file.fileno(), 5, 699_000)
        )
        sender.start()
        assert client.receive(NOTE, PATIENCE_S, most_bulk=1 << 20) == (Note(1), 699_000)
        room = bytearray(699_000)
        client.fill(memoryview(room), PATIENCE_S)
        sender.join(PATIENCE_S)
        assert room == data[5 : 5 + 699_000]
        file.truncate(10)
        with pytest.raises(TransientStoreError, match="a file ended"):
            server.send_file(Note(1), file.fileno(), 0, 100)


@pytest.mark.parametrize("whose", ["client's", "server's"])
def test_another_secret_is_said_and_nothing_else(whose: str) -> None:
    heard: list[Any] = []

    def answer(hello: Hello, peer: Certified | None) -> Admitted:
        heard.append(hello)
        return Admitted()

    more = {"proof": OTHER} if whose == "client's" else {"server_secret": OTHER}
    with ends() as (client, server):
        with pytest.raises(StoreError, match="different secrets") as caught:
            greet(client, server, answer, **more)
        assert caught.value.kind == "permission"
        assert not heard
    with ends() as (client, server), pytest.raises(UsageError):
        greet_server(client, b"", "probe", role="agent", wait_s=1.0)


def test_a_client_without_a_certificate_is_not_heard() -> None:
    with ends() as (client, server):
        thread = serve(server, lambda *_: Admitted())
        client.shake(None, PATIENCE_S)  # the server has proved itself
        with pytest.raises(CkptdError):
            client.send(Hello(VERSION, "probe"))
            client.receive(msgpack_decoder(Admitted), PATIENCE_S)
        thread.join(PATIENCE_S)
        assert server.broken
        assert server.proved is None


def test_a_server_of_another_role_is_not_told_anything() -> None:
    with ends() as (client, server):
        heard: list[Any] = []
        thread = serve(server, lambda hello, _: heard.append(hello) or Admitted(), role="rank")
        with pytest.raises(StoreError) as caught:
            greet_server(client, SECRET, "probe", role="agent", wait_s=PATIENCE_S)
        assert (caught.value.kind, caught.value.found) == ("permission", "rank")
        client.release()
        thread.join(PATIENCE_S)
        assert not heard


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (Refusal("not-the-controller", "of job k"), RefusedError),
        (Refusal("link-busy"), TransientStoreError),
        (Refusal("permission", "no"), StoreError),
        (Refusal("made-up", "x" * 100), TransientStoreError),
    ],
)
def test_reasons_of_a_server(refusal: Refusal, kind: type[CkptdError]) -> None:
    with ends() as (client, server):
        with pytest.raises(kind) as caught:
            greet(client, server, lambda *_: refusal)
        made_up = refusal.kind == "made-up"
        assert caught.value.kind == ("link-protocol" if made_up else refusal.kind)


def test_what_a_server_answers() -> None:
    agent = Certified("agent", "n")
    assert answer_hello(Hello(VERSION, "probe"), "probe", agent, {"a": 1}) == Admitted({"a": 1})
    assert answer_hello(Hello(VERSION, "probe"), "probe", None, {}) == Admitted()
    busy = Refusal("link-busy")
    assert answer_hello(Hello(VERSION, "probe"), "probe", agent, {}, busy) == busy
    for hello, peer, kind in (
        (Hello(VERSION + 1, "probe"), agent, "version"),
        (Hello(VERSION, "store"), agent, "permission"),
        (Hello(VERSION, "probe"), Certified("rank", "n"), "permission"),
        (Hello(VERSION, "probe"), Certified("", ""), "permission"),
    ):
        found = answer_hello(hello, "probe", peer, {}, busy)
        assert isinstance(found, Refusal)
        assert found.kind == kind


def test_another_version_is_said() -> None:
    with ends(tcp=False) as (client, server):
        with pytest.raises(StoreError, match="another version of the protocol") as caught:
            greet(client, server, lambda *_: Refusal("version", "7"))
        assert (caught.value.wanted, caught.value.found) == (str(VERSION), "7")
    with ends() as (client, server):
        context = identity(SECRET, "agent").context(server=True)
        context.set_alpn_protocols(["ckptd/9"])
        try:
            with pytest.raises(StoreError, match="another version of the protocol"):
                greet(client, server)
        finally:
            context.set_alpn_protocols([PROTOCOL])


def test_what_is_no_server_of_ours() -> None:
    """A server of the version before greets first, and without TLS."""
    with ends() as (client, server):
        server.codec.let_in()
        server.send(Note(1, "x" * 100))
        with pytest.raises(StoreError, match="another version of the protocol"):
            greet_server(client, SECRET, "probe", role="agent", wait_s=PATIENCE_S)


def test_a_descriptor_passes_beside_a_message() -> None:
    with ends(tcp=False) as (client, server):
        assert client.local
        read, write = os.pipe()
        fds: list[int] = []
        client.send_descriptor(Note(1), write)
        os.close(write)
        assert server.receive(NOTE, PATIENCE_S, fds=fds)[0] == Note(1)
        os.write(fds[0], b"hi")
        assert os.read(read, 2) == b"hi"
        os.close(read)
        os.close(fds[0])


def test_waits_end_and_what_broke_stays_broken() -> None:
    with ends() as (client, server):
        with pytest.raises(TransientStoreError) as caught:
            client.receive(NOTE, 0.05)
        assert caught.value.kind == "link-late"
        assert client.broken
        with pytest.raises(TransientStoreError) as caught:
            client.send(Note(1))
        assert caught.value.kind == "link-lost"
        with pytest.raises(TransientStoreError, match="closed"):
            server.take(NOTE, PATIENCE_S)
