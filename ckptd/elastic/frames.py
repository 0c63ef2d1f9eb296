"""How a connection to the controller begins, and how its messages are framed and signed.

The client sends a line of JSON, the server answers with one, and from both nonces and the job's
secret each direction gets a key of its own. Then messages follow as frames: length (u32, little
endian), 16 bytes of MAC over the frame's number and its body, body in msgpack. A frame that is
changed, repeated, left out or sent back does not fit its number or its key. Nothing here does any
I/O.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from typing import Annotated, Any, Literal

import msgspec

from ckptd.decoding import converter, json_decoder, msgpack_decoder
from ckptd.errors import CorruptError, RefusedError

__all__ = [
    "FIRST_FRAME_BYTES",
    "LINE_BYTES",
    "MOST_FRAME_BYTES",
    "Frames",
    "Hello",
    "Welcome",
    "client_frames",
    "decode_hello",
    "decode_welcome",
    "encode_line",
    "new_nonce",
    "server_frames",
]

LINE_BYTES = 1024
"""Longest line of the handshake, with its newline."""
FIRST_FRAME_BYTES = 4 << 10
"""Longest body before the other side has shown that it knows the secret."""
MOST_FRAME_BYTES = 4 << 20
"""Longest body after that."""

_HEAD = struct.Struct("<I16s")
_NUMBERED = struct.Struct("<QI")
_Nonce = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]

_nonce = converter(_Nonce)
_Word = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The client's line.

    Attributes
    ----------
    v
        Version of the protocol: 1.
    job
        Whose controller it wants.
    role
        What it is.
    name
        The node's name, or who the operator is.
    nonce
        32 hexadecimal digits, drawn for this connection.
    """

    v: Literal[1] = 1
    job: _Word
    role: Literal["node", "operator"]
    name: _Word
    nonce: _Nonce


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The server's line.

    Attributes
    ----------
    v
        Version of the protocol: 1.
    nonce
        32 hexadecimal digits; empty when it refuses.
    life
        Which life of which controller answers.
    error
        Why it refuses, and closes; empty if it does not. Not signed: for people only.
    """

    v: Literal[1] = 1
    nonce: str = ""
    life: str = ""
    error: str = ""


_hello = json_decoder(Hello)
_welcome = json_decoder(Welcome)


def new_nonce() -> str:
    """Return 32 hexadecimal digits that nobody can guess."""
    return secrets.token_hex(16)


def encode_line(line: Hello | Welcome) -> bytes:
    """Return a line of the handshake, with its newline."""
    return msgspec.json.encode(line) + b"\n"


def decode_hello(raw: bytes) -> Hello:
    """Return the client's line.

    Raises
    ------
    CorruptError
        kind ``bad-frame``: it is none.
    """
    try:
        return _hello.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _bad("this is no line of the handshake", error) from error


def decode_welcome(raw: bytes) -> Welcome:
    """Return the server's line.

    Raises
    ------
    CorruptError
        kind ``bad-frame``: it is none.
    RefusedError
        kind ``not-the-controller``: the server refuses.
    """
    try:
        line = _welcome.decode(raw)
        if not line.error:
            _nonce(line.nonce)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _bad("this is no line of the handshake", error) from error
    if line.error:
        raise RefusedError(
            "the controller refuses the connection",
            kind="not-the-controller",
            found=line.error[:200],
            hint="check --job and the address",
        )
    return line


class Frames:
    """One end of a signed connection, after the handshake.

    Parameters
    ----------
    out_key, in_key
        Of the two directions.
    kind
        The union of what may arrive.
    """

    def __init__(self, out_key: bytes, in_key: bytes, kind: Any) -> None:
        self._out_key, self._in_key = out_key, in_key
        self._decoder: msgspec.msgpack.Decoder[Any] = msgpack_decoder(kind)
        self._sent = self._taken = 0
        self._buffer = bytearray()

    @property
    def trusted(self) -> bool:
        """Whether the other side has shown that it knows the secret."""
        return self._taken > 0

    @property
    def half(self) -> bool:
        """Whether a frame has begun to arrive and is not whole."""
        return bool(self._buffer)

    def pack(self, message: msgspec.Struct) -> bytes:
        """Return the next frame to send; frames must be sent in the order of these calls.

        Raises
        ------
        CorruptError
            kind ``bad-frame``: it is larger than the other side takes.
        """
        return self.pack_body(msgspec.msgpack.encode(message))

    def pack_body(self, body: bytes) -> bytes:
        """Return the next frame for a message that is encoded already; see `pack`."""
        if len(body) > MOST_FRAME_BYTES:
            raise _bad("a message is too large to be sent", f"{len(body)} bytes")
        mac = _mac(self._out_key, self._sent, body)
        self._sent += 1
        return _HEAD.pack(len(body), mac) + body

    def feed(self, data: bytes) -> list[Any]:
        """Take what has arrived; return the messages that are whole.

        Raises
        ------
        CorruptError
            kind ``bad-frame``: a frame is too large, or is no message. The connection must be
            closed.
        RefusedError
            kind ``bad-mac``: whoever sent it does not know the secret, or the frame was changed,
            repeated or left out. The connection must be closed.
        """
        self._buffer += data
        out = []
        while len(self._buffer) >= _HEAD.size:
            length, mac = _HEAD.unpack_from(self._buffer)
            limit = MOST_FRAME_BYTES if self._taken else FIRST_FRAME_BYTES
            if length > limit:
                raise _bad("a frame is too large", f"{length} bytes", f"at most {limit}")
            end = _HEAD.size + length
            if len(self._buffer) < end:
                break
            body = bytes(memoryview(self._buffer)[_HEAD.size : end])
            del self._buffer[:end]
            out.append(self._open(body, mac))
        return out

    def _open(self, body: bytes, mac: bytes) -> Any:
        if not hmac.compare_digest(mac, _mac(self._in_key, self._taken, body)):
            raise RefusedError(
                "bad signature: the message was not signed with this job's secret",
                kind="bad-mac",
                wanted="the MAC of this message with the job's secret",
                hint="do both ends have the same CKPTD_SECRET?",
            )
        self._taken += 1
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise _bad("a frame holds no message", error) from error


def client_frames(secret: bytes, hello: Hello, welcome: Welcome, kind: Any) -> Frames:
    """Return the client's end of a connection that began with these two lines."""
    to_server, to_client = _keys(secret, hello, welcome)
    return Frames(to_server, to_client, kind)


def server_frames(secret: bytes, hello: Hello, welcome: Welcome, kind: Any) -> Frames:
    """Return the server's end of a connection that began with these two lines."""
    to_server, to_client = _keys(secret, hello, welcome)
    return Frames(to_client, to_server, kind)


def _keys(secret: bytes, hello: Hello, welcome: Welcome) -> tuple[bytes, bytes]:
    """Return the keys to the server and to the client; all that was said goes into them."""
    said = (hello.job, hello.role, hello.name, hello.nonce, welcome.nonce, welcome.life)
    parts = [part.encode() for part in said]
    keys = []
    for label in (b"ckptd controller v1 to server", b"ckptd controller v1 to client"):
        mac = hmac.new(secret, digestmod=hashlib.sha256)
        for part in (label, *parts):
            # With its length before it, no part can pass for the end of another.
            mac.update(len(part).to_bytes(8, "little") + part)
        keys.append(mac.digest())
    return keys[0], keys[1]


def _mac(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, _NUMBERED.pack(number, len(body)) + body, "sha256")[:16]


def _bad(what: str, found: object, wanted: str | None = None) -> CorruptError:
    return CorruptError(what, kind="bad-frame", wanted=wanted, found=str(found)[:200])
