"""Handshake and frames: what fits is taken, anything else closes the connection."""

from __future__ import annotations

import struct

import pytest

from ckptd.elastic.frames import (
    FIRST_FRAME_BYTES,
    MOST_FRAME_BYTES,
    Frames,
    Hello,
    Welcome,
    client_frames,
    decode_hello,
    decode_welcome,
    encode_line,
    new_nonce,
    server_frames,
)
from ckptd.elastic.messages import Fenced, NodeUp
from ckptd.elastic.wire import Beat, Echo, FromNode, Said, SaveNow, ToNode
from ckptd.errors import CorruptError, RefusedError

SECRET = b"s" * 32


def _hello(**changes: str) -> Hello:
    fields = {"job": "j", "role": "node", "name": "n0", "nonce": new_nonce(), **changes}
    return Hello(**fields)  # type: ignore[arg-type]


def _pair(secret: bytes = SECRET, other: bytes = SECRET) -> tuple[Frames, Frames]:
    hello, welcome = _hello(), Welcome(nonce=new_nonce(), life="c1")
    return (
        client_frames(secret, hello, welcome, ToNode),
        server_frames(other, hello, welcome, FromNode),
    )


def _beat(number: int = 1) -> Beat:
    return Beat(number=number, up=NodeUp(node="n0", life="l", slots=2))


def test_messages_pass_both_ways_in_any_pieces() -> None:
    client, server = _pair()
    said = Said(event=Fenced(node="n0", generation=3), number=7)
    raw = client.pack(_beat()) + client.pack(said)
    got = [message for k in range(len(raw)) for message in server.feed(raw[k : k + 1])]
    assert got == [_beat(), said]
    assert client.feed(server.pack(Echo(number=1)) + server.pack(SaveNow(generation=2))) == [
        Echo(number=1),
        SaveNow(generation=2),
    ]


def test_lines_pass() -> None:
    hello = _hello()
    assert decode_hello(encode_line(hello)) == hello
    welcome = Welcome(nonce=new_nonce(), life="c1")
    assert decode_welcome(encode_line(welcome)) == welcome


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"GET / HTTP/1.1\r\n",
        b"\xff\xfe\n",
        b"[" * 900,
        b'{"v":2,"job":"j","role":"node","name":"n","nonce":"' + b"0" * 32 + b'"}',
        b'{"v":1,"job":"j","role":"king","name":"n","nonce":"' + b"0" * 32 + b'"}',
        b'{"v":1,"job":"","role":"node","name":"n","nonce":"' + b"0" * 32 + b'"}',
        b'{"v":1,"job":"j","role":"node","name":"n","nonce":"short"}',
    ],
)
def test_no_line_of_a_client(line: bytes) -> None:
    with pytest.raises(CorruptError) as caught:
        decode_hello(line)
    assert caught.value.kind == "bad-frame"


def test_no_line_of_a_server() -> None:
    for line in (b"HTTP/1.0 400\r\n", b'{"v":1,"nonce":"x"}', b'{"v":3}'):
        with pytest.raises(CorruptError):
            decode_welcome(line)
    with pytest.raises(RefusedError) as caught:
        decode_welcome(encode_line(Welcome(error="another job's")))
    assert caught.value.kind == "not-the-controller"


def test_another_secret_is_refused() -> None:
    client, server = _pair(other=b"t" * 32)
    with pytest.raises(RefusedError) as caught:
        server.feed(client.pack(_beat()))
    assert caught.value.kind == "bad-mac"
    assert not server.trusted


def test_all_that_was_said_goes_into_the_keys() -> None:
    hello, welcome = _hello(), Welcome(nonce=new_nonce(), life="c1")
    raw = client_frames(SECRET, hello, welcome, ToNode).pack(_beat())
    others = [
        (_hello(nonce=hello.nonce, name="n1"), welcome),
        (_hello(nonce=hello.nonce, role="operator"), welcome),
        (_hello(nonce=hello.nonce, job="k"), welcome),
        (hello, Welcome(nonce=welcome.nonce, life="c2")),
        (hello, Welcome(nonce=new_nonce(), life="c1")),
    ]
    for said, answered in others:
        with pytest.raises(RefusedError):
            server_frames(SECRET, said, answered, FromNode).feed(raw)
    assert server_frames(SECRET, hello, welcome, FromNode).feed(raw) == [_beat()]


def test_a_frame_counts_once_in_its_order_and_direction() -> None:
    client, server = _pair()
    first, second = client.pack(_beat(1)), client.pack(_beat(2))
    assert server.feed(first)
    with pytest.raises(RefusedError):
        server.feed(first)
    client, server = _pair()
    first, second = client.pack(_beat(1)), client.pack(_beat(2))
    with pytest.raises(RefusedError):
        server.feed(second)
    client, server = _pair()
    with pytest.raises(RefusedError):
        client.feed(client.pack(_beat()))


def test_any_changed_byte_is_noticed() -> None:
    raw = _pair()[0].pack(_beat())
    for k in range(4, len(raw)):
        hello, welcome = _hello(), Welcome(nonce=new_nonce(), life="c1")
        raw = client_frames(SECRET, hello, welcome, ToNode).pack(_beat())
        bad = raw[:k] + bytes([raw[k] ^ 1]) + raw[k + 1 :]
        with pytest.raises(RefusedError):
            server_frames(SECRET, hello, welcome, FromNode).feed(bad)


def test_lengths_are_checked_before_anything_is_kept() -> None:
    client, server = _pair()
    with pytest.raises(CorruptError) as caught:
        server.feed(struct.pack("<I16s", FIRST_FRAME_BYTES + 1, b""))
    assert caught.value.kind == "bad-frame"
    client, server = _pair()
    server.feed(client.pack(_beat()))
    assert server.feed(struct.pack("<I16s", FIRST_FRAME_BYTES + 1, b"")) == []
    client, server = _pair()
    server.feed(client.pack(_beat()))
    with pytest.raises(CorruptError):
        server.feed(struct.pack("<I16s", MOST_FRAME_BYTES + 1, b""))
    with pytest.raises(CorruptError):
        client.pack_body(bytes(MOST_FRAME_BYTES + 1))


def test_a_signed_frame_that_is_no_message_is_refused() -> None:
    for body in (b"", b"\xc1", b"\x91" * 2000, b"\x81\xa4type\xa4Echo"):
        client, server = _pair()
        with pytest.raises(CorruptError):
            server.feed(client.pack_body(body))
