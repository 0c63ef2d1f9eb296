"""Channels between a trainer and its writing process: messages, descriptors; largest message.

`SocketChannel` frames msgpack messages over a private Unix socket pair and can pass one file
descriptor beside a message. `QueueChannel` is the same within one process, for stores that no
other process can see.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import time
from array import array
from typing import Any, Protocol

import msgspec

from ckptd.base.runtime.ownership import in_child
from ckptd.decoding import msgpack_decoder
from ckptd.errors import ProcessError

_HEAD = struct.Struct("<IB")
MAX_MESSAGE_BYTES = 1 << 30


class Channel(Protocol):
    """One end. `send` is called by one thread at a time, `receive` by one other."""

    def send(self, message: msgspec.Struct, fd: int | None = None) -> None:
        """Deliver a message, with a descriptor beside it; `ProcessError` when the peer is gone."""

    def receive(self, timeout_s: float) -> tuple[Any, int | None] | None:
        """Return ``(message, descriptor or None)``, or None after `timeout_s`.

        Raises
        ------
        EOFError
            The peer is gone and everything it sent has been received.
        """

    def shut(self) -> None:
        """End what is sent and received, also by other threads; they then close it."""

    def close(self) -> None:
        """Close this end. Idempotent."""


class SocketChannel:
    """A channel over a connected Unix stream socket; `kind` is the union of what may arrive.

    Nothing larger than `most_bytes` is taken. What an interrupt leaves of a message goes before the
    next one, if any of it was sent.
    """

    def __init__(self, sock: socket.socket, kind: Any, most_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._most_bytes = most_bytes
        # Two objects, because a timeout belongs to the object and two threads use it at once.
        self._sock = sock
        self._out = sock.dup()
        self._out.settimeout(60.0)
        self._frame, self._sent = b"", list[int]()
        self._decoder = msgpack_decoder(kind)
        self._buffer = bytearray()
        self._fds: list[int] = []
        # A child that kept it open would hide from the other end that this process has died.
        in_child(self.close)

    def send(self, message: msgspec.Struct, fd: int | None = None) -> None:
        """See `Channel`."""
        body = msgspec.msgpack.encode(message)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [-1 if fd is None else fd]))
        try:
            if self._sent:
                self._send_rest([])
            self._sent = []  # first: what was sent of a frame is not of the next one
            self._frame = _HEAD.pack(len(body), fd is not None) + body
            self._send_rest([] if fd is None else [rights])
            self._sent, self._frame = [], b""
        except OSError as error:
            raise ProcessError("the other process has ended", found=str(error)) from error

    def _send_rest(self, beside: list[tuple[int, int, array[int]]]) -> None:
        while (at := sum(self._sent)) < len(self._frame):
            rest = [memoryview(self._frame)[at:]]
            # Both in one call: Python runs no signal handler between what is sent and its count.
            self._sent.extend(map(self._out.sendmsg, [rest], [beside]))
            beside = []

    def receive(self, timeout_s: float) -> tuple[Any, int | None] | None:
        """See `Channel`."""
        end = time.monotonic() + timeout_s
        while True:
            if (message := self._pop()) is not None:
                return message
            left = end - time.monotonic()
            if left <= 0:
                return None
            try:
                self._sock.settimeout(left)
                data, fds, _, _ = socket.recv_fds(self._sock, 1 << 18, 4)
            except TimeoutError:
                return None
            except OSError as error:
                raise EOFError(str(error)) from error
            self._fds += fds
            if not data:
                raise EOFError("peer closed the channel")
            self._buffer += data

    def _pop(self) -> tuple[Any, int | None] | None:
        if len(self._buffer) < _HEAD.size:
            return None
        length, with_fd = _HEAD.unpack_from(self._buffer)
        if length > self._most_bytes:
            raise EOFError("message too large")
        if len(self._buffer) < _HEAD.size + length:
            return None
        body = bytes(self._buffer[_HEAD.size : _HEAD.size + length])
        del self._buffer[: _HEAD.size + length]
        if with_fd and not self._fds:
            raise EOFError("a descriptor is missing")  # this process may open no more files
        message = self._decoder.decode(body)
        return message, (self._fds.pop(0) if with_fd else None)

    def shut(self) -> None:
        """See `Channel`."""
        with contextlib.suppress(OSError):  # the other end is gone already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """See `Channel`; descriptors that were not taken are closed."""
        self._out.close()
        self._sock.close()
        while self._fds:
            os.close(self._fds.pop())


class QueueChannel:
    """One end of a channel inside a process."""

    def __init__(self, inbox: queue.SimpleQueue[Any], outbox: queue.SimpleQueue[Any]) -> None:
        self._inbox = inbox
        self._outbox = outbox

    def send(self, message: msgspec.Struct, fd: int | None = None) -> None:
        """See `Channel`."""
        self._outbox.put((message, fd))

    def receive(self, timeout_s: float) -> tuple[Any, int | None] | None:
        """See `Channel`."""
        try:
            item: tuple[Any, int | None] | None = self._inbox.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None
        if item is None:
            raise EOFError("peer closed the channel")
        return item

    def shut(self) -> None:
        """See `Channel`."""
        self._inbox.put(None)
        self._outbox.put(None)

    def close(self) -> None:
        """See `Channel`."""
        self._outbox.put(None)


def queue_pair() -> tuple[QueueChannel, QueueChannel]:
    """Return the two ends of a channel inside this process."""
    a: queue.SimpleQueue[Any] = queue.SimpleQueue()
    b: queue.SimpleQueue[Any] = queue.SimpleQueue()
    return QueueChannel(a, b), QueueChannel(b, a)
