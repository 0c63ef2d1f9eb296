"""Handshake and frames: what fits is taken, anything else ends the connection."""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from ckptd.base.net.connection import (
    FIRST_BYTES,
    MOST_BODY_BYTES,
    VERSION,
    Challenge,
    ClientProof,
    Codec,
    Connection,
    Greeting,
    Refusal,
    Refuse,
    ServerProof,
    greet_server,
)
from ckptd.decoding import msgpack_decoder
from ckptd.errors import CkptdError, RefusedError, StoreError, TransientStoreError, UsageError
from tests.processes import PATIENCE_S

SECRET, OTHER = b"s" * 32, b"t" * 32
HEAD = struct.Struct("<II16s")


class Note(msgspec.Struct, frozen=True, tag=True):
    number: int
    text: str = ""


NOTE = msgpack_decoder(Note)


def codecs(secret: bytes = SECRET, other: bytes = SECRET, **more: Any) -> tuple[Codec, Codec]:
    """Two ends after a handshake, without its proofs."""
    server, client = Greeting(other, "test"), Greeting(secret, "test")
    client._nonce = server._nonce
    proof = ClientProof(os.urandom(32), b"")
    here, there = Codec("there", **more), Codec("here", **more)
    server.use_keys(there, proof)
    here.use_keys(client._keyed("to server", proof), client._keyed("to client", proof))
    return here, there


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


def test_messages_pass_both_ways_in_any_pieces() -> None:
    client, server = codecs()
    raw = client.pack(Note(1)) + client.pack(Note(2, "x"))
    got = [message for k in range(len(raw)) for message in taken(server, raw[k : k + 1])]
    assert got == [Note(1), Note(2, "x")]
    assert not server.half
    assert taken(client, server.pack(Note(3)) + server.pack(Note(4))) == [Note(3), Note(4)]


def test_another_secret_is_refused() -> None:
    client, server = codecs(other=OTHER)
    refused(server, client.pack(Note(1)))


def test_keys_are_those_of_one_purpose_and_one_connection() -> None:
    proof = ClientProof(os.urandom(32), b"")
    one, other = Greeting(SECRET, "one"), Greeting(SECRET, "other")
    other._nonce = one._nonce
    fresh = Greeting(SECRET, "one")
    keys = {
        greeting._keyed(label, p)
        for greeting in (one, other, fresh)
        for label in ("client", "server", "to client", "to server")
        for p in (proof, ClientProof(os.urandom(32), b""))
    }
    assert len(keys) == 24


def test_a_frame_counts_once_in_its_order_and_direction() -> None:
    client, server = codecs()
    first = client.pack(Note(1))
    assert taken(server, first)
    refused(server, first)
    client, server = codecs()
    client.pack(Note(1))
    refused(server, client.pack(Note(2)))
    client, server = codecs()
    refused(client, client.pack(Note(1)))


def test_any_changed_byte_is_noticed() -> None:
    length = len(codecs()[0].pack(Note(1)))
    for k in range(8, length):
        client, server = codecs()
        raw = client.pack(Note(1))
        refused(server, raw[:k] + bytes([raw[k] ^ 1]) + raw[k + 1 :])


def test_what_is_protected_is_the_number_the_lengths_and_the_message() -> None:
    """The MAC of a frame, computed from its description."""
    codec = Codec("right")
    codec.use_keys(b"k" * 32, b"r" * 32)
    for number in range(2):
        body = msgspec.msgpack.encode(Note(7))
        fields = struct.pack("<QII", number, len(body), 3)
        mac = hashlib.blake2b(fields + body, key=b"k" * 32, digest_size=16).digest()
        assert codec.pack(Note(7), 3) == HEAD.pack(len(body), 3, mac) + body


def test_lengths_are_checked_before_anything_is_kept() -> None:
    stranger = Codec("stranger")
    assert "too large" in refused(stranger, HEAD.pack(FIRST_BYTES + 1, 0, b"")).message
    client, server = codecs()
    assert taken(server, HEAD.pack(FIRST_BYTES + 1, 0, b"")) == []
    refused(codecs()[1], HEAD.pack(MOST_BODY_BYTES + 1, 0, b""))
    refused(codecs()[1], HEAD.pack(10, 1, b""))
    refused(codecs(most_body=10)[1], HEAD.pack(11, 0, b""))
    with pytest.raises(TransientStoreError, match="too large to be sent"):
        client.pack(bytes(MOST_BODY_BYTES + 1))


def test_a_signed_frame_that_is_no_message_is_refused() -> None:
    for body in (b"", b"\xc1", b"\x91" * 2000, msgspec.msgpack.encode({"type": "Other"})):
        client, server = codecs()
        assert "not a valid message" in refused(server, client.pack(body)).message


def test_a_seal_fits_its_bytes_and_direction() -> None:
    client, server = codecs()
    seal = client.seal(memoryview(b"data"))
    server.check_seal(memoryview(b"data"), seal)
    for codec, data in ((server, b"date"), (client, b"data")):
        with pytest.raises(TransientStoreError, match="checksum"):
            codec.check_seal(memoryview(data), seal)


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


def greeted(
    client: Connection,
    server: Connection,
    secret: bytes = SECRET,
    refuse: Refuse = lambda *_: None,
) -> tuple[Any, Any]:
    """Shake hands; return what each side was told."""
    said: list[Any] = []
    about: dict[str, str | int | bool] = {"life": "c1"}

    def serve() -> None:
        greeting = Greeting(SECRET, "test")
        server.send(greeting.challenge)
        proof, _ = server.receive(Greeting.kind, PATIENCE_S)
        answer = greeting.answer(proof, about, refuse)
        server.send(answer)
        greeting.use_keys(server.codec, proof)
        said.append(proof.about)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        got = greet_server(client, secret, "test", wait_s=PATIENCE_S, about={"job": "j", "n": 1})
    finally:
        thread.join(PATIENCE_S)
    return got, said[0]


def test_both_ends_prove_themselves_and_say_what_they_are() -> None:
    with ends() as (client, server):
        assert greeted(client, server) == ({"life": "c1"}, {"job": "j", "n": 1})
        data = os.urandom(300_000)
        client.send(Note(1), memoryview(data))
        message, count = server.receive(NOTE, PATIENCE_S, most_bulk=1 << 20)
        room = bytearray(count)
        server.fill(memoryview(room), PATIENCE_S)
        assert (message, bytes(room)) == (Note(1), data)
        server.send(Note(2))
        server.send(Note(3))
        got = client.take(NOTE, PATIENCE_S)
        while len(got) < 2:
            got += client.take(NOTE, PATIENCE_S)
        assert got == [Note(2), Note(3)]
        assert client.take(NOTE, 0.0) == []
        assert client.here == "127.0.0.1"


def test_another_secret_is_said_and_nothing_else() -> None:
    with ends() as (client, server):
        with pytest.raises(StoreError) as caught:
            greeted(client, server, OTHER)
        assert caught.value.kind == "permission"
    with ends() as (client, server), pytest.raises(UsageError):
        greet_server(client, b"", "test", wait_s=1.0)


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (Refusal("not-the-controller", "of job k"), RefusedError),
        (Refusal("link-busy"), TransientStoreError),
        (Refusal("made-up", "x" * 100), TransientStoreError),
    ],
)
def test_reasons_of_a_server(refusal: Refusal, kind: type[CkptdError]) -> None:
    proofs: list[bool] = []

    def refuse(about: dict[str, Any], proved: bool) -> Refusal:
        proofs.append(proved)
        return refusal

    with ends() as (client, server):
        with pytest.raises(kind) as caught:
            greeted(client, server, refuse=refuse)
        made_up = refusal.kind == "made-up"
        assert caught.value.kind == ("link-protocol" if made_up else refusal.kind)
        assert proofs == [True]


def test_all_that_is_said_goes_into_the_proofs() -> None:
    greeting = Greeting(SECRET, "test")
    nonce = os.urandom(32)

    class Client(Greeting):
        _nonce = greeting._nonce

        def proof(self, about: dict[str, Any], told: dict[str, Any]) -> ClientProof:
            with ends(tcp=False) as (client, server):
                server.send(Challenge(VERSION, greeting._nonce))
                thread = threading.Thread(target=self._greet, args=(client, about))
                thread.start()
                proof, _ = server.receive(Greeting.kind, PATIENCE_S)
                server.release()
                thread.join(PATIENCE_S)
            return ClientProof(proof.nonce, proof.mac, told)

        def _greet(self, client: Connection, about: dict[str, Any]) -> None:
            with pytest.raises(TransientStoreError):
                greet_server(client, SECRET, "test", wait_s=PATIENCE_S, about=about)

    client = Client(SECRET, "test")
    good = client.proof({"job": "j", "role": "node"}, {"job": "j", "role": "node"})
    assert isinstance(greeting.answer(good, {}), ServerProof)
    for told in ({}, {"job": "k", "role": "node"}, {"job": "j", "role": "operator"}):
        assert isinstance(greeting.answer(client.proof(good.about, told), {}), Refusal)
    replayed = ClientProof(good.nonce, good.mac, good.about)
    assert isinstance(Greeting(SECRET, "test").answer(replayed, {}), Refusal)
    assert isinstance(greeting.answer(ClientProof(nonce, b""), {}), Refusal)


def test_a_server_that_cannot_prove_itself_is_found_out() -> None:
    with ends() as (client, server):

        def lie() -> None:
            server.send(Challenge(VERSION, bytes(32)))
            server.receive(Greeting.kind, PATIENCE_S)
            server.send(ServerProof(bytes(32)))

        liar = threading.Thread(target=lie)
        liar.start()
        with pytest.raises(StoreError) as caught:
            greet_server(client, SECRET, "test", wait_s=PATIENCE_S)
        assert caught.value.kind == "permission"
        liar.join(PATIENCE_S)


@pytest.mark.parametrize(
    ("challenge", "words"),
    [
        (Challenge(VERSION + 1, bytes(32)), "the server speaks another version of the protocol"),
        (Challenge(VERSION, b"x"), "unexpected greeting"),
    ],
)
def test_another_protocol(challenge: Challenge, words: str) -> None:
    with ends() as (client, server):
        server.send(challenge)
        with pytest.raises(StoreError) as caught:
            greet_server(client, SECRET, "test", wait_s=PATIENCE_S)
        assert words in caught.value.message


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
