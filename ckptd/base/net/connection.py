"""`Connection`: signed frames over a socket, after both ends have proved that they know a secret.

A frame is a fixed head (two lengths and a MAC), a msgpack message, and raw bytes behind it, which
pass between the socket and the caller's memory without a copy. The MAC is a keyed BLAKE2b of the
frame's number in its direction, the head's lengths and the message: without the key of that
direction nothing can be added, changed, repeated, dropped, reordered or sent back.

Raw bytes have no MAC of their own, only their length is protected: BLAKE2b does 0.9 GB/s on a core
that passes 2.6 GB/s through loopback TCP. Where they matter by themselves (`Store.get` and
`Store.put`: records, manifests) the message carries a seal, a keyed hash of them; large data has
digests of its own, which readers check. Nothing is encrypted.

`Greeting` and `greet_server` are the two sides of the handshake: the server sends a random number,
the client proves by an HMAC-SHA256 over it and a number of its own that it knows the secret, then
the server does. The client is first, so a stranger who connects learns nothing. Keys come from the
secret, the purpose of the connection and both numbers, one a direction: what was recorded in one
connection is worth nothing in another. On a Unix socket the kernel names the other end, and the
secret is empty.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Annotated, Any

import msgspec

from ckptd.base.runtime.ownership import in_child
from ckptd.decoding import msgpack_decoder
from ckptd.errors import CkptdError, RefusedError, StoreError, TransientStoreError, UsageError

VERSION = 2
"""Of frames and handshake."""
FIRST_BYTES = 4 << 10
"""Largest message from a peer that has not proved itself."""
MOST_BODY_BYTES = 1 << 20
"""Largest message after that, unless a connection says otherwise."""

_HEAD = struct.Struct("<II16s")
_SIGNED = struct.Struct("<QII")
_TIMEVAL = struct.Struct("ll")
_INT = struct.Struct("i")
_MAC_BYTES = 16
_NO_MAC = bytes(_MAC_BYTES)
_ROOM_BYTES = 4 << 20
_STEP_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_MOST_PLACES = 512  # the kernel takes 1024
_JOINED_BYTES = 1 << 16  # up to here one system call is worth a copy
_NONCE_BYTES = 32

Kind = msgspec.msgpack.Decoder[Any]
"""Decoder of a message, made by `ckptd.decoding.msgpack_decoder`."""


class Codec:
    """Packs messages into frames and opens frames; no I/O, so blocking and asyncio ends share it.

    Until `use_keys` a body has at most `FIRST_BYTES`. Whatever does not fit raises
    `TransientStoreError` of kind ``link-protocol``; the connection must be closed then.

    Parameters
    ----------
    peer
        The other end's name, for errors.
    most_body
        Largest message in bytes, both ways.
    """

    def __init__(self, peer: str, most_body: int = MOST_BODY_BYTES) -> None:
        self.peer = peer
        self._most_body = most_body
        self._proved = False
        self._send_key = self._receive_key = b""
        self._sent = self._received = 0
        self._buffer = bytearray()

    def use_keys(self, send: bytes, receive: bytes) -> None:
        """Protect every frame from now on: the peer has proved itself."""
        self._send_key, self._receive_key, self._proved = send, receive, True
        self._sent = self._received = 0

    def pack(self, message: msgspec.Struct | bytes, bulk_bytes: int = 0) -> bytes:
        """Return the next frame of a message, or of an encoded one, without its raw bytes.

        Frames must be sent in the order of these calls.
        """
        body = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        if len(body) > self._most_body:
            raise self._wrong("a message is too large to be sent", len(body))
        mac = _mac(self._send_key, self._sent, len(body), bulk_bytes, body)
        self._sent += 1
        return _HEAD.pack(len(body), bulk_bytes, mac) + body

    def head(self, raw: bytearray | memoryview, most_bulk: int = 0) -> tuple[int, int, bytes]:
        """Return bytes of message and bulk, and the MAC; nothing larger than allowed is let in."""
        body_bytes, bulk_bytes, mac = _HEAD.unpack_from(raw)
        most_body = self._most_body if self._proved else min(FIRST_BYTES, self._most_body)
        if body_bytes > most_body or bulk_bytes > most_bulk:
            raise self._wrong("a frame is too large", f"{body_bytes} and {bulk_bytes} bytes")
        return body_bytes, bulk_bytes, mac

    def open(self, kind: Kind, body: bytes | bytearray, bulk_bytes: int, mac: bytes) -> Any:
        """Return the message of a frame."""
        expected = _mac(self._receive_key, self._received, len(body), bulk_bytes, body)
        if not hmac.compare_digest(mac, expected):
            raise self._wrong("a frame does not have the right MAC")
        self._received += 1
        try:
            return kind.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._wrong("a frame is not a valid message", str(error)[:200]) from error

    def feed(self, data: bytes) -> None:
        """Take bytes that have arrived; `take` returns the messages in them."""
        self._buffer += data

    def take(self, kind: Kind) -> Any | None:
        """Return the next message that is whole, without bulk; None if there is none yet."""
        if len(self._buffer) < _HEAD.size:
            return None
        body_bytes, bulk_bytes, mac = self.head(self._buffer)
        end = _HEAD.size + body_bytes
        if len(self._buffer) < end:
            return None
        body = bytes(memoryview(self._buffer)[_HEAD.size : end])
        del self._buffer[:end]
        return self.open(kind, body, bulk_bytes, mac)

    @property
    def half(self) -> bool:
        """Whether a frame has begun to arrive and was not taken."""
        return bool(self._buffer)

    def seal(self, data: memoryview) -> bytes:
        """Return the keyed hash of bytes that are sent; empty where the kernel vouches for them."""
        return _keyed(self._send_key, data)

    def check_seal(self, data: memoryview, seal: bytes) -> None:
        """Refuse received bytes that do not match their keyed hash."""
        if not hmac.compare_digest(seal, _keyed(self._receive_key, data)):
            raise self._wrong("bytes do not match their checksum")

    def _wrong(self, message: str, found: object = None) -> TransientStoreError:
        return TransientStoreError(message, kind="link-protocol", where=self.peer, found=found)


class Connection:
    """One blocking end of a connection, used by one thread at a time; `close` may come from any.

    Every failure of the connection is a `TransientStoreError` (kinds ``link-lost``, ``link-late``,
    ``link-protocol``) that names the peer, and leaves it `broken`: it cannot be used again.

    Parameters
    ----------
    sock
        Connected; this connection closes it.
    peer
        The other end's name, for errors.
    send_s
        For a sent frame to make progress, in seconds.
    most_body
        Largest message in bytes, both ways.
    """

    def __init__(
        self, sock: socket.socket, peer: str, send_s: float, most_body: int = MOST_BODY_BYTES
    ) -> None:
        self.peer = peer
        self.broken = False
        self.local = sock.family == socket.AF_UNIX
        self.codec = Codec(peer, most_body)
        self._sock = sock
        # The kernel's own timeouts, on a socket that blocks: one system call fills a buffer.
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_s))
        if self.local:
            # Room for the next piece while the last one is read; the kernel may grant less. (TCP
            # sizes its buffers itself, and better.)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM_BYTES)
        else:
            tune(sock)
        in_child(self._leave_to_parent)

    def _leave_to_parent(self) -> None:
        """Close the descriptor in a forked child; shut down it would end for the parent as well."""
        self.broken = True
        self._sock.close()

    def fileno(self) -> int:
        """Return the socket's descriptor, to wait for."""
        return self._sock.fileno()

    @property
    def here(self) -> str:
        """Address of this machine, as the peer's machine is reached from it (TCP)."""
        return str(self._sock.getsockname()[0])

    # -- sending -------------------------------------------------------------------------------

    def send(self, message: msgspec.Struct | bytes, bulk: memoryview | None = None) -> None:
        """Send one frame of a message, or of an encoded one, with `bulk` behind it."""
        frame = self.codec.pack(message, 0 if bulk is None else len(bulk))
        with self._guarded():
            if bulk is not None and len(bulk) <= _JOINED_BYTES:
                self._sock.sendall(frame + bulk)
                return
            self._sock.sendall(frame)
            if bulk is not None:
                self._sock.sendall(bulk)

    def send_parts(self, message: msgspec.Struct, parts: Sequence[memoryview]) -> None:
        """Send one frame with the bytes of several places behind it, out of these places."""
        frame = self.codec.pack(message, sum(map(len, parts)))
        left = deque([memoryview(frame), *parts])
        with self._guarded():
            while left:
                sent = self._sock.sendmsg(islice(left, _MOST_PLACES))
                while left and sent >= len(left[0]):
                    sent -= len(left.popleft())
                if sent:
                    left[0] = left[0][sent:]

    def send_descriptor(self, message: msgspec.Struct, fd: int) -> None:
        """Send one frame with a descriptor beside it."""
        frame = self.codec.pack(message)
        with self._guarded():
            sent = socket.send_fds(self._sock, [frame], [fd])
            self._sock.sendall(frame[sent:])

    def send_file(self, message: msgspec.Struct, fd: int, offset: int, count: int) -> None:
        """Send one frame with `count` bytes of a file behind it, which the kernel passes on."""
        frame = self.codec.pack(message, count)
        done = 0
        with self._guarded():
            self._sock.sendall(frame)
            while done < count:
                sent = os.sendfile(self._sock.fileno(), fd, offset + done, count - done)
                if sent == 0:
                    raise self.fail("a file ended in the middle of a frame")
                done += sent

    # -- receiving -----------------------------------------------------------------------------

    def receive(
        self, kind: Kind, wait_s: float, *, most_bulk: int = 0, fds: list[int] | None = None
    ) -> tuple[Any, int]:
        """Return the next message, and how many raw bytes follow: `fill` must take them.

        Parameters
        ----------
        wait_s
            For the whole message, in seconds.
        most_bulk
            In bytes; a frame that announces more breaks the connection before anything is
            allocated.
        fds
            Descriptors that came beside the message are added here; the caller closes them.
        """
        end = time.monotonic() + wait_s
        head = bytearray(_HEAD.size)
        if fds is None:
            self._fill(memoryview(head), end)
        else:
            self._fill_with_descriptors(memoryview(head), end, fds)
        with self._guarded():
            body_bytes, bulk_bytes, mac = self.codec.head(head, most_bulk)
        body = bytearray()
        while len(body) < body_bytes:
            # As they come: what is announced, and never sent, takes no memory.
            part = bytearray(min(_STEP_BYTES, body_bytes - len(body)))
            self._fill(memoryview(part), end)
            body += part
        with self._guarded():
            return self.codec.open(kind, body, bulk_bytes, mac), bulk_bytes

    def fill(self, view: memoryview, wait_s: float, seal: bytes | None = None) -> None:
        """Receive raw bytes into `view`; they must match `seal` when one is given."""
        self._fill(view, time.monotonic() + wait_s)
        if seal is not None:
            with self._guarded():
                self.codec.check_seal(view, seal)

    def take(self, kind: Kind, wait_s: float) -> list[Any]:
        """Return the messages that are whole once something has come; none after `wait_s`.

        A frame that is half there stays for the next call, so nothing else may receive then.
        """
        with self._guarded():
            # No deadline to compare with: a thread that gets no CPU meanwhile is not a late answer.
            self._sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(max(wait_s, 1e-3))
            )
            try:
                data = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                return []
            if not data:
                raise self.fail("the connection was closed")
            self.codec.feed(data)
            out = []
            while (message := self.codec.take(kind)) is not None:
                out.append(message)
            return out

    def _fill(self, view: memoryview, end: float) -> None:
        done = 0
        while done < len(view):
            self._wait_at_most(end)
            with self._guarded():
                count = self._sock.recv_into(view[done:], 0, socket.MSG_WAITALL)
            if count == 0:
                raise self.fail("the connection was closed")
            done += count

    def _fill_with_descriptors(self, view: memoryview, end: float, fds: list[int]) -> None:
        self._wait_at_most(end)
        with self._guarded():
            # Not socket.recv_fds, which forgets its flags (Python 3.11).
            data, beside, _, _ = self._sock.recvmsg(
                len(view), socket.CMSG_LEN(_INT.size), socket.MSG_CMSG_CLOEXEC
            )
        for level, kind, raw in beside:
            if (level, kind, len(raw)) == (socket.SOL_SOCKET, socket.SCM_RIGHTS, _INT.size):
                fds.append(_INT.unpack(raw)[0])
        if not data:
            raise self.fail("the connection was closed")
        view[: len(data)] = data
        self._fill(view[len(data) :], end)

    def _wait_at_most(self, end: float) -> None:
        left = end - time.monotonic()
        if left <= 0:
            raise self.fail("no answer in time", kind="link-late")
        with self._guarded():
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(left))

    # -- state ---------------------------------------------------------------------------------

    def readable(self) -> bool:
        """Tell, without waiting, whether there is something to receive, or the peer is gone."""
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLIN)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True  # closed meanwhile: receiving tells

    def patience(self, seconds: float) -> None:
        """Set how many seconds sent bytes wait for the peer to acknowledge them (TCP only)."""
        if not self.local and hasattr(socket, "TCP_USER_TIMEOUT"):
            with contextlib.suppress(OSError):  # it is gone: the next call tells
                self._sock.setsockopt(
                    socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000)
                )

    def fail(
        self, message: str, *, kind: str = "link-lost", found: object = None
    ) -> TransientStoreError:
        """Close the connection for good and return the error that says why."""
        self.close()
        return TransientStoreError(message, kind=kind, where=self.peer, found=found)

    def close(self) -> None:
        """End the connection; a thread that waits on it is woken. Idempotent."""
        self.broken = True
        with contextlib.suppress(OSError):  # not connected any more
            self._sock.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Close the descriptor; by the thread that uses the connection, or when none does."""
        self.close()
        self._sock.close()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        if self.broken:
            raise self.fail("the connection is closed")
        try:
            yield
        except BlockingIOError:
            raise self.fail("no progress in time", kind="link-late") from None
        except OSError as error:
            raise self.fail("the connection is lost", found=error.strerror or error) from error
        except BaseException:
            self.close()  # a frame that does not fit, or interrupted in the middle of one
            raise


def tune(sock: socket.socket) -> None:
    """Have TCP send at once, and notice within about 10 s that the peer's host is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# --- the handshake --------------------------------------------------------------------------------

_About = dict[str, str | int | bool]
_Nonce = Annotated[bytes, msgspec.Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]


class _Greeted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of the messages of the handshake."""


class Challenge(_Greeted, frozen=True, tag="challenge"):
    """Server, first of all: its version, and a random number."""

    version: int
    nonce: bytes


class ClientProof(_Greeted, frozen=True, tag="proof"):
    """Client: a random number, the proof that it knows the secret, and what it says of itself."""

    nonce: _Nonce
    mac: bytes
    about: _About = {}


class ServerProof(_Greeted, frozen=True, tag="welcome"):
    """Server: that it knows the secret too, and what it says of itself. Keys hold from here on."""

    mac: bytes
    about: _About = {}


class Refusal(_Greeted, frozen=True, tag="refused"):
    """Server, in place of `ServerProof`; not signed.

    Attributes
    ----------
    kind
        ``permission``, ``link-busy`` or ``not-the-controller``, as in errors.
    text
        For people.
    """

    kind: str
    text: Annotated[str, msgspec.Meta(max_length=512)] = ""


_CHALLENGE = msgpack_decoder(Challenge)
_CLIENT_PROOF = msgpack_decoder(ClientProof)
_ANSWER = msgpack_decoder(ServerProof | Refusal)
_OTHER_SECRET = "the server and this client have different secrets"
_REFUSALS: dict[str, type[CkptdError]] = {
    "permission": StoreError,
    "link-busy": TransientStoreError,
    "not-the-controller": RefusedError,
}

Refuse = Callable[[_About, bool], Refusal | None]
"""``(what a client says of itself, whether it proved itself) -> why it is refused, or None``."""


class Greeting:
    """The server's side of one handshake; no I/O.

    Parameters
    ----------
    secret
        What both ends know; empty on a Unix socket.
    purpose
        What the connection is for: proofs and keys of one purpose are worth nothing for another.
    """

    kind = _CLIENT_PROOF
    """Decodes the client's message."""

    def __init__(self, secret: bytes, purpose: str) -> None:
        self._secret, self._purpose = secret, purpose
        self._nonce = secrets.token_bytes(_NONCE_BYTES)

    @property
    def challenge(self) -> Challenge:
        """The first message of the connection."""
        return Challenge(VERSION, self._nonce)

    def answer(
        self, proof: ClientProof, about: _About, refuse: Refuse = lambda *_: None
    ) -> ServerProof | Refusal:
        """Return the answer to the client's proof."""
        expected = self._keyed("client", proof)
        proved = hmac.compare_digest(proof.mac, _proof(expected, proof.about))
        refusal = refuse(proof.about, proved)
        if refusal is None and not proved:
            refusal = Refusal("permission", _OTHER_SECRET)
        return refusal or ServerProof(_proof(self._keyed("server", proof), about), about)

    def use_keys(self, codec: Codec, proof: ClientProof) -> None:
        """Protect what follows a `ServerProof`."""
        codec.use_keys(
            send=self._keyed("to client", proof), receive=self._keyed("to server", proof)
        )

    def _keyed(self, label: str, proof: ClientProof) -> bytes:
        return _key(self._secret, self._purpose, label, self._nonce, proof.nonce)


def greet_server(
    connection: Connection,
    secret: bytes,
    purpose: str,
    *,
    wait_s: float,
    about: _About | None = None,
) -> _About:
    """Prove ourselves to a server and let it prove itself; return its description of itself.

    Raises
    ------
    StoreError
        Kind ``permission``: the secrets differ. It speaks another protocol.
    TransientStoreError
        Kind ``link-busy``: it has no room. Kinds of `Connection`.
    RefusedError
        Kind ``not-the-controller``: it is another job's.
    """
    secret = _checked(connection, secret)
    end, mine = time.monotonic() + wait_s, about or {}
    challenge, _ = connection.receive(_CHALLENGE, wait_s)
    if challenge.version != VERSION:
        raise StoreError(
            "the server speaks another version of the protocol",
            where=connection.peer,
            wanted=VERSION,
            found=challenge.version,
        )
    if len(challenge.nonce) != _NONCE_BYTES:
        raise connection.fail("unexpected greeting", kind="link-protocol")
    nonce = secrets.token_bytes(_NONCE_BYTES)

    def keyed(label: str) -> bytes:
        return _key(secret, purpose, label, challenge.nonce, nonce)

    connection.send(ClientProof(nonce, _proof(keyed("client"), mine), mine))
    answer, _ = connection.receive(_ANSWER, end - time.monotonic())
    if isinstance(answer, Refusal):
        raise _refused(connection, answer)
    if not hmac.compare_digest(answer.mac, _proof(keyed("server"), answer.about)):
        raise StoreError(_OTHER_SECRET, kind="permission", where=connection.peer)
    connection.codec.use_keys(send=keyed("to server"), receive=keyed("to client"))
    of_server: _About = answer.about
    return of_server


def _checked(connection: Connection, secret: bytes) -> bytes:
    """Return the secret, which only a Unix socket can do without."""
    if not secret and not connection.local:
        raise UsageError("a connection over TCP needs a secret")
    return secret


def _refused(connection: Connection, refusal: Refusal) -> CkptdError:
    kind = _REFUSALS.get(refusal.kind)
    if kind is None:
        return connection.fail("refused with an unknown reason", kind="link-protocol")
    if kind is StoreError:
        return StoreError(_OTHER_SECRET, kind="permission", where=connection.peer)
    return kind(
        "the server refuses the connection",
        kind=refusal.kind,
        where=connection.peer,
        found=refusal.text,
    )


# --- keys -----------------------------------------------------------------------------------------


def _key(secret: bytes, *parts: str | bytes) -> bytes:
    if not secret:
        return b""  # a Unix socket: nothing to prove, no keys
    mac = hmac.new(secret, b"ckptd connection", hashlib.sha256)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        # With its length before it, no part can pass for the end of another.
        mac.update(len(data).to_bytes(8, "little") + data)
    return mac.digest()


def _proof(key: bytes, about: _About) -> bytes:
    raw = msgspec.msgpack.encode(about, order="deterministic")
    return hmac.digest(key, raw, "sha256") if key else b""


def _mac(key: bytes, number: int, size: int, bulk_bytes: int, body: bytes | bytearray) -> bytes:
    if not key:
        return _NO_MAC
    hashed = hashlib.blake2b(
        _SIGNED.pack(number, size, bulk_bytes), key=key, digest_size=_MAC_BYTES
    )
    hashed.update(body)
    return hashed.digest()


def _keyed(key: bytes, data: memoryview) -> bytes:
    return hashlib.blake2b(data, key=key, digest_size=_MAC_BYTES).digest() if key else b""


def _timeval(seconds: float) -> bytes:
    micros = max(1000, int(seconds * 1e6))  # zero would be for ever
    return _TIMEVAL.pack(*divmod(micros, 1_000_000))
