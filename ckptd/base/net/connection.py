"""`Connection`: frames, handshake and errors of a connection that is there; sizes of messages.

In it: protocol version, versions refused, limits before and after proof; TCP keepalive, by which a
dead peer is noticed.

A frame is a fixed head (two lengths), a msgpack message, and raw bytes behind it, which pass
between the connection and the caller's memory. Between hosts all of it goes through TLS 1.3, in
which both ends show a certificate of the job's authority (`ckptd.base.net.tls`): without the secret
no byte can be read, changed, added, repeated, dropped, reordered or sent back, of messages and of
large data alike. On a Unix socket the kernel names the other end, and nothing is encrypted.

Then a client says what it wants and what it is (`Hello`), and the server answers with what it is
itself, or why it does not serve this client.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from ckptd.base.net.address import same_user
from ckptd.base.net.handed import Proof
from ckptd.base.net.roles import DOORS, Certified, Role
from ckptd.base.runtime.ownership import in_child
from ckptd.decoding import Decoder, msgpack_decoder
from ckptd.errors import CkptdError, RefusedError, StoreError, TransientStoreError, UsageError

if TYPE_CHECKING:
    from ckptd.base.net.tls import Identity, TlsSession

VERSION = 3
"""Of frames and handshake."""
FIRST_BYTES = 4 << 10
"""Largest message from a peer that has not proved itself."""
MOST_BODY_BYTES = 1 << 20
"""Largest message after that, unless a connection says otherwise."""

_HEAD = struct.Struct("<II")
_TIMEVAL = struct.Struct("ll")
_INT = struct.Struct("i")
_ROOM_BYTES = 4 << 20
_STEP_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_MOST_PLACES = 512  # the kernel takes 1024
_JOINED_BYTES = 1 << 16  # up to here one system call is worth a copy
_SEALED_BYTES = 1 << 18  # encrypted, or received and decrypted, in one go

Kind = Decoder[Any]
"""Decoder of a message, made by `ckptd.decoding.msgpack_decoder`."""


class Codec:
    """Packs messages into frames and opens frames; no I/O, so blocking and asyncio ends share it.

    Until `let_in` a body has at most `FIRST_BYTES`. Whatever does not fit raises
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
        self._let_in = False
        self._buffer = bytearray()

    def let_in(self) -> None:
        """Allow large messages from now on: each side knows what the other is."""
        self._let_in = True

    def pack(self, message: msgspec.Struct | bytes, bulk_bytes: int = 0) -> bytes:
        """Return the frame of a message, or of an encoded one, without its raw bytes."""
        body = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        if len(body) > self._most_body:
            raise self._wrong("a message is too large to be sent", len(body))
        return _HEAD.pack(len(body), bulk_bytes) + body

    def head(self, raw: bytearray | memoryview, most_bulk: int = 0) -> tuple[int, int]:
        """Return bytes of message and bulk; nothing larger than allowed is let in."""
        body_bytes, bulk_bytes = _HEAD.unpack_from(raw)
        most_body = self._most_body if self._let_in else min(FIRST_BYTES, self._most_body)
        if body_bytes > most_body or bulk_bytes > most_bulk:
            raise self._wrong("a frame is too large", f"{body_bytes} and {bulk_bytes} bytes")
        return body_bytes, bulk_bytes

    def open(self, kind: Kind, body: bytes | bytearray) -> Any:
        """Return the message of a frame."""
        try:
            return kind.decode(body)
        except msgspec.MsgspecError as error:
            raise self._wrong("a frame is not a valid message", str(error)[:200]) from error

    def feed(self, data: bytes) -> None:
        """Take bytes that have arrived; `take` returns the messages in them."""
        self._buffer += data

    def take(self, kind: Kind) -> Any | None:
        """Return the next message that is whole, without bulk; None if there is none yet."""
        if len(self._buffer) < _HEAD.size:
            return None
        body_bytes, _ = self.head(self._buffer)
        end = _HEAD.size + body_bytes
        if len(self._buffer) < end:
            return None
        body = bytes(memoryview(self._buffer)[_HEAD.size : end])
        del self._buffer[:end]
        return self.open(kind, body)

    @property
    def half(self) -> bool:
        """Whether a frame has begun to arrive and was not taken."""
        return bool(self._buffer)

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
        self.tls: TlsSession | None = None
        self._room = memoryview(b"")
        self._hint: str | None = None
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

    @property
    def proved(self) -> Certified | None:
        """The role and node of the other end, proved; None before that, and on a Unix socket."""
        return None if self.tls is None else self.tls.peer

    def check_user(self) -> None:
        """Refuse the other end of a Unix socket that does not run as our user."""
        if not same_user(self._sock):
            raise StoreError("the server runs as another user", kind="permission", where=self.peer)

    def permit(self, message: msgspec.Struct, purpose: str) -> None:
        """Refuse a message that the role of the other end may not send.

        Raises
        ------
        StoreError
            Kind ``permission``.
        """
        peer, name = self.proved, type(message).__name__
        if peer is not None and name not in DOORS[purpose].may.get(peer.role, ()):
            raise StoreError(
                "a certificate does not allow this",
                kind="permission",
                where=self.peer,
                wanted=f"a role that may ask {name}",
                found=peer.role,
            )

    def expect_tls(self, identity: Identity) -> None:
        """Have `take` prove both ends first: what is sent and received from now on is encrypted."""
        from ckptd.base.net.tls import TlsSession

        self.tls = TlsSession(identity, server=True, where=self.peer)

    def shake(
        self, identity: Identity | None, wait_s: float, purpose: str | None = None
    ) -> Certified:
        """Prove both ends, as the client; return what the server is.

        With a `purpose`, one of `DOORS`, it has the role that answers there.

        The last of it goes out with what is sent next, so that a server which refuses us has
        nothing unread, and what it says of that arrives.

        Raises
        ------
        StoreError
            Kind ``permission``: the secrets differ, or its role is another one. It speaks another
            protocol.
        RefusedError
            Kind ``not-the-controller``: it is of another scope.
        """
        from ckptd.base.net.tls import TlsSession

        end = time.monotonic() + wait_s
        self._hint = "check the address: another program, or a proxy, may answer there"
        tls = self.tls = TlsSession(identity, server=False, where=self.peer)
        while True:
            with self._guarded():
                try:
                    done = tls.shake()
                except CkptdError:
                    self._sock.sendall(tls.to_send())
                    raise
                if done and tls.peer is not None:
                    if purpose is not None and tls.peer.role != DOORS[purpose].serves:
                        raise StoreError(
                            "the server's certificate is of another role",
                            kind="permission",
                            where=self.peer,
                            wanted=DOORS[purpose].serves,
                            found=tls.peer.role,
                        )
                    self._hint = None
                    return tls.peer
                self._sock.sendall(tls.to_send())
            self._wait_at_most(end)
            with self._guarded("the server lets connect, and does not answer"):
                data = self._sock.recv(_READ_BYTES)
            if not data:
                raise self.fail("the connection was closed")
            tls.feed(data)

    # -- sending -------------------------------------------------------------------------------

    def send(self, message: msgspec.Struct | bytes, bulk: memoryview | None = None) -> None:
        """Send one frame of a message, or of an encoded one, with `bulk` behind it."""
        frame = self.codec.pack(message, 0 if bulk is None else len(bulk))
        with self._guarded():
            if bulk is None or len(bulk) <= _JOINED_BYTES:
                self._put(memoryview(frame if bulk is None else frame + bulk))
            else:
                self._put(memoryview(frame), bulk)

    def send_parts(self, message: msgspec.Struct, parts: Sequence[memoryview]) -> None:
        """Send one frame with the bytes of several places behind it, out of these places."""
        frame = self.codec.pack(message, sum(map(len, parts)))
        with self._guarded():
            self._put(memoryview(frame), *parts)

    def _put(self, *parts: memoryview) -> None:
        """Send the bytes of several places, one after another."""
        if (tls := self.tls) is not None:
            self._put_sealed(tls, parts)
            return
        left = deque(parts)
        while left:
            sent = self._sock.sendmsg(islice(left, _MOST_PLACES))
            while left and sent >= len(left[0]):
                sent -= len(left.popleft())
            if sent:
                left[0] = left[0][sent:]

    def _put_sealed(self, tls: TlsSession, parts: Sequence[memoryview]) -> None:
        held = 0
        for part in parts:
            for at in range(0, len(part), _SEALED_BYTES):
                piece = part[at : at + _SEALED_BYTES]
                tls.write(piece)
                held += len(piece)
                if held >= _SEALED_BYTES:
                    self._sock.sendall(tls.to_send())
                    held = 0
        if held:
            self._sock.sendall(tls.to_send())

    def send_descriptor(self, message: msgspec.Struct, fd: int) -> None:
        """Send one frame with a descriptor beside it."""
        frame = self.codec.pack(message)
        with self._guarded():
            sent = socket.send_fds(self._sock, [frame], [fd])
            self._sock.sendall(frame[sent:])

    def send_file(self, message: msgspec.Struct, fd: int, offset: int, count: int) -> None:
        """Send one frame with `count` bytes of a file behind it, out of the page cache."""
        frame = self.codec.pack(message, count)
        done = 0
        with self._guarded():
            self._put(memoryview(frame))
            while done < count and self.tls is not None:
                # Read, and not mapped: in a file that is truncated meanwhile that is no signal.
                room = self._own_room()[: count - done]
                got = os.preadv(fd, [room], offset + done)
                if got == 0:
                    raise self.fail("a file ended in the middle of a frame")
                self._put(room[:got])
                done += got
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
            body_bytes, bulk_bytes = self.codec.head(head, most_bulk)
        body = bytearray()
        while len(body) < body_bytes:
            # As they come: what is announced, and never sent, takes no memory.
            part = bytearray(min(_STEP_BYTES, body_bytes - len(body)))
            self._fill(memoryview(part), end)
            body += part
        with self._guarded():
            return self.codec.open(kind, body), bulk_bytes

    def fill(self, view: memoryview, wait_s: float) -> None:
        """Receive raw bytes into `view`."""
        self._fill(view, time.monotonic() + wait_s)

    def take(self, kind: Kind, wait_s: float) -> list[Any]:
        """Return the messages that are whole once something has come; none after `wait_s`.

        A frame that is half there stays for the next call, so nothing else may receive then.
        """
        with self._guarded():
            # No deadline to compare with: a thread that gets no CPU meanwhile is not a late answer.
            self._sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(max(wait_s, 1e-3))
            )
            if not (data := self._plain(b"")):
                try:
                    came = self._sock.recv(_READ_BYTES)
                except BlockingIOError:
                    return []
                if not came:
                    raise self.fail("the connection was closed")
                data = self._plain(came)
            self.codec.feed(data)
            out = []
            while (message := self.codec.take(kind)) is not None:
                out.append(message)
            return out

    def _plain(self, came: bytes) -> bytes:
        """Return what is in bytes that came; a handshake that is not done goes on with them."""
        if (tls := self.tls) is None:
            return came
        tls.feed(came)
        try:
            return tls.read() if tls.shake() else b""
        finally:
            if out := tls.to_send():  # why the other end is refused, if it is
                self._sock.sendall(out)

    def _own_room(self) -> memoryview:
        """Return the room for bytes on their way into TLS, and out of it."""
        if not self._room:
            self._room = memoryview(bytearray(_SEALED_BYTES))
        return self._room

    def _fill_sealed(self, tls: TlsSession, view: memoryview, end: float) -> None:
        done, room = 0, self._own_room()
        while True:
            with self._guarded():
                done += tls.read_into(view[done:])
            if done == len(view):
                return
            self._wait_at_most(end)
            with self._guarded():
                came = self._sock.recv_into(room)
            if came == 0:
                raise self.fail("the connection was closed")
            tls.feed(room[:came])

    def _fill(self, view: memoryview, end: float) -> None:
        if self.tls is not None:
            self._fill_sealed(self.tls, view, end)
            return
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

    def readable(self, wait_s: float = 0.0) -> bool:
        """Tell whether there is something to receive, or the peer is gone; wait so long for it."""
        if self.tls is not None and self.tls.pending:
            return True
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLIN)
            return bool(poll.poll(int(wait_s * 1000)))
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
        return TransientStoreError(
            message, kind=kind, where=self.peer, found=found, hint=self._hint
        )

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
    def _guarded(self, late: str = "no progress in time") -> Iterator[None]:
        if self.broken:
            raise self.fail("the connection is closed")
        try:
            yield
        except BlockingIOError:
            raise self.fail(late, kind="link-late") from None
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


class _Greeted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of the messages of the handshake."""


class Hello(_Greeted, frozen=True, tag="hello"):
    """Client: the version and the purpose that it wants to speak, and what it says of itself."""

    version: int
    purpose: Annotated[str, msgspec.Meta(max_length=256)]
    about: _About = {}


class Admitted(_Greeted, frozen=True, tag="welcome"):
    """Server: what it says of itself."""

    about: _About = {}


class Refusal(_Greeted, frozen=True, tag="refused"):
    """Server, in place of `Admitted`.

    Attributes
    ----------
    kind
        ``permission``, ``version``, ``link-busy`` or ``not-the-controller``.
    text
        For people.
    """

    kind: str
    text: Annotated[str, msgspec.Meta(max_length=512)] = ""


HELLO = msgpack_decoder(Hello)
"""Decodes a client's first message."""
_ANSWER = msgpack_decoder(Admitted | Refusal)
_REFUSALS: dict[str, type[CkptdError]] = {
    "permission": StoreError,
    "link-busy": TransientStoreError,
    "not-the-controller": RefusedError,
}


def answer_hello(
    hello: Hello,
    purpose: str,
    peer: Certified | None,
    about: _About,
    refusal: Refusal | None = None,
) -> Admitted | Refusal:
    """Return a server's answer to a client.

    Parameters
    ----------
    purpose
        What the server is for, one of `DOORS`.
    peer
        What the client's certificate says; None on a Unix socket.
    about
        What the server says of itself.
    refusal
        Why the server does not serve this client, if it does not.
    """
    if hello.version != VERSION:
        return Refusal("version", str(VERSION))
    if hello.purpose != purpose:
        return Refusal("permission", "this server has another purpose")
    if peer is not None and peer.role not in DOORS[purpose].may:
        return Refusal(
            "permission", f"a certificate of role {peer.role or None} opens nothing here"
        )
    return refusal or Admitted(about)


def greet_server(
    connection: Connection,
    proof: Proof,
    purpose: str,
    *,
    role: Role,
    node: str = "",
    scope: str = "",
    wait_s: float,
    about: _About | None = None,
) -> _About:
    """Prove ourselves to a server and let it prove itself; return its description of itself.

    Parameters
    ----------
    proof
        Under the authority of both ends; a Unix socket needs none.
    purpose
        One of `DOORS`.
    role, node
        What our certificate says; by default the node is this host.
    scope
        Of the server, see `ckptd.base.net.tls.Identity`.

    Raises
    ------
    StoreError
        Kind ``permission``: the secrets differ, the server runs as another user, or a certificate
        is of a role that has no business there. It speaks another protocol.
    TransientStoreError
        Kind ``link-busy``: it has no room. Kinds of `Connection`.
    RefusedError
        Kind ``not-the-controller``: it is another job's.
    """
    end = time.monotonic() + wait_s
    if connection.local:
        connection.check_user()
    elif not proof:
        raise UsageError("a connection over TCP needs a secret")
    else:
        from ckptd.base.net.tls import identity_at

        connection.shake(identity_at(purpose, proof, role, node, scope), wait_s, purpose)
    connection.send(Hello(VERSION, purpose, about or {}))
    answer, _ = connection.receive(_ANSWER, end - time.monotonic())
    if isinstance(answer, Refusal):
        raise _refused(connection, answer)
    connection.codec.let_in()
    of_server: _About = answer.about
    return of_server


def _refused(connection: Connection, refusal: Refusal) -> CkptdError:
    if refusal.kind == "version":
        return StoreError(
            "the server speaks another version of the protocol",
            where=connection.peer,
            wanted=VERSION,
            found=refusal.text,
        )
    kind = _REFUSALS.get(refusal.kind)
    if kind is None:
        return connection.fail("refused with an unknown reason", kind="link-protocol")
    return kind(
        "the server refuses the connection",
        kind=refusal.kind,
        where=connection.peer,
        found=refusal.text,
    )


def _timeval(seconds: float) -> bytes:
    micros = max(1000, int(seconds * 1e6))  # zero would be for ever
    return _TIMEVAL.pack(*divmod(micros, 1_000_000))
