"""Calling the controller: a socket on which both sides have said who they are."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any, Literal

import msgspec

from ckptd.elastic.frames import (
    LINE_BYTES,
    Frames,
    Hello,
    client_frames,
    decode_welcome,
    encode_line,
    new_nonce,
)
from ckptd.errors import CorruptError
from ckptd.net.address import parse_address

__all__ = ["Connection", "dial"]

_READ = 1 << 16


class Connection:
    """A signed connection; used by one thread.

    Attributes
    ----------
    life
        Which life of which controller answers.
    here
        Address of this machine, as the controller's machine is reached from it.
    """

    def __init__(self, sock: socket.socket, frames: Frames, life: str, early: bytes) -> None:
        self.life = life
        self.here: str = sock.getsockname()[0]
        self._sock, self._frames, self._early = sock, frames, early

    def fileno(self) -> int:
        """Return the socket's descriptor, to wait for."""
        return self._sock.fileno()

    def send(self, message: msgspec.Struct, timeout_s: float) -> None:
        """Send a message.

        Raises
        ------
        OSError
            The connection is broken, or takes nothing for so long: it must be closed.
        """
        self._sock.settimeout(timeout_s)
        self._sock.sendall(self._frames.pack(message))

    def take(self, timeout_s: float) -> list[Any]:
        """Return what has arrived whole; nothing if nothing comes within `timeout_s`.

        Raises
        ------
        OSError
            The connection is broken or closed.
        CorruptError, RefusedError
            What came is none of the controller's: see `ckptd.elastic.frames.Frames.feed`.
        """
        if self._early:
            early, self._early = self._early, b""
            if messages := self._frames.feed(early):
                return messages
        self._sock.settimeout(max(timeout_s, 1e-3))
        try:
            data = self._sock.recv(_READ)
        except TimeoutError:
            return []
        if not data:
            raise ConnectionResetError("the controller has closed the connection")
        return self._frames.feed(data)

    def close(self) -> None:
        """Close it. Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def dial(
    address: str,
    *,
    job: str,
    role: Literal["node", "operator"],
    name: str,
    secret: bytes,
    kind: Any,
    timeout_s: float,
) -> Connection:
    """Connect to the controller at `address` and shake hands, within `timeout_s`.

    Raises
    ------
    OSError
        Nobody answers there.
    UsageError
        kind ``bad-url``: it is no address.
    CorruptError
        kind ``bad-frame``: whoever answers is no controller.
    RefusedError
        kind ``not-the-controller``: it is another job's.
    """
    end = time.monotonic() + timeout_s
    hello = Hello(job=job, role=role, name=name, nonce=new_nonce())
    try:
        sock = socket.create_connection(parse_address(address), timeout=timeout_s)
    except UnicodeError as error:  # no name can look like that
        raise OSError(f"{address}: {error}") from error
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sock.getsockname() == sock.getpeername():
            # Of a free port on this machine, TCP can connect a socket to itself.
            raise ConnectionRefusedError("nobody listens there")
        sock.sendall(encode_line(hello))
        line, early = _line(sock, end)
        welcome = decode_welcome(line)
        frames = client_frames(secret, hello, welcome, kind)
        return Connection(sock, frames, welcome.life, early)
    except BaseException:
        sock.close()
        raise


def _line(sock: socket.socket, end: float) -> tuple[bytes, bytes]:
    data = b""
    while b"\n" not in data:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the controller does not shake hands")
        sock.settimeout(left)
        piece = sock.recv(LINE_BYTES)
        if not piece:
            raise ConnectionResetError("the connection was closed in the handshake")
        data += piece
        if len(data) > LINE_BYTES and b"\n" not in data[:LINE_BYTES]:
            raise CorruptError("this is no line of the handshake", kind="bad-frame")
    line, _, early = data.partition(b"\n")
    return line, early
