"""Server's end of a store connection: requests answered; `Limits` of clients, file mapping."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from ckptd.base.net.connection import Connection
from ckptd.base.net.door import MOST_STRANGERS
from ckptd.decoding import msgpack_decoder
from ckptd.errors import CkptdError, RefusedError, StoreError
from ckptd.store.base import Store, Writer, check_end
from ckptd.store.net import messages
from ckptd.store.net.messages import Complete, Failed, ObjectPiece, Page, Request, Writing
from ckptd.store.net.rules import Rules
from ckptd.types import ByteRange

_REQUEST = msgpack_decoder(Request)
_WRITING = msgpack_decoder(Writing)
_ALIGN = 4096
_MOST_FIELD = 4000
_COPIED_BYTES = 2 << 20
"""Read and sent at a time, where the store gives no descriptor."""
_MAPPED_BYTES = 1 << 20
"""From so many bytes on it is worth asking the store for a descriptor."""
_WHOLE_BYTES = 64 << 20
"""Up to here a get reads the object at once, so that one that is replaced is not seen mixed."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of clients at a server.

    Attributes
    ----------
    connections
        Served at once; the next client receives the error that there is no room.
    strangers
        Connections at once that have not proved themselves; the oldest is closed for one more. A
        client proves itself in one round trip: one that is silent keeps no other out.
    greeting_s
        For a client to prove itself, in seconds.
    idle_s
        A connection without a request, or a writer without its next piece, ends after so many
        seconds; the writer's object is dropped.
    frame_s
        For the bytes behind a message to arrive, and for sent bytes to make progress, in seconds.
    """

    connections: int = 256
    strangers: int = MOST_STRANGERS
    greeting_s: float = 5.0
    idle_s: float = 600.0
    frame_s: float = 60.0


class Session:
    """Answers one client's requests, one after another."""

    def __init__(self, wire: Connection, store: Store, rules: Rules, limits: Limits) -> None:
        self._wire = wire
        self._store = store
        self._rules = rules
        self._limits = limits

    def run(self) -> None:
        """Answer until the connection ends, which is a `TransientStoreError` of `Connection`."""
        while True:
            request, _ = self._wire.receive(_REQUEST, self._limits.idle_s)
            body = self._body(request.size) if isinstance(request, messages.Put) else b""
            self._guarded(request, body)

    def _guarded(self, request: Request, body: bytes) -> None:
        try:
            self._wire.permit(request, messages.PURPOSE)
            self._rules.check(request)
            answer = self._answer(request, body)
            if answer is not None:
                self._wire.send(answer)
        except CkptdError as error:
            if self._wire.broken:
                raise
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - whatever the store raises is sent to its client
            self._fail(_unexpected(error))

    def _fail(self, error: CkptdError) -> None:
        fields = {k: None if v is None else v[:_MOST_FIELD] for k, v in error.to_dict().items()}
        self._wire.send(Failed(fields))

    def _answer(self, request: Request, body: bytes) -> msgspec.Struct | None:
        """Do what is asked; return the last message of the answer, None when it is sent already."""
        store = self._store
        match request:
            case messages.Get():
                self._get(request)
            case messages.Read():
                self._read(request.key, request.offset, request.length)
            case messages.Open():
                return self._open(request.key)
            case messages.Stat():
                info = store.stat(request.key)
                return messages.ObjectFound(info.size, info.modified, info.tag)
            case messages.List():
                self._pages((o.key, o.size, o.modified) for o in store.list(request.prefix))
            case messages.Children():
                self._pages(store.children(request.prefix))
            case messages.Sweep():
                self._pages(
                    store.sweep(
                        request.prefix, older_than_s=request.older_than_s, deep=request.deep
                    )
                )
            case messages.Put():
                store.put(request.key, body, create_only=request.create_only)
            case messages.BeginWriter():
                return self._write(request)
            case messages.Delete():
                store.delete(request.keys)
            case messages.Sync():
                store.sync(request.prefix)
            case messages.AbortWriter():
                pass  # of a writer that failed already
        return Complete()

    def _pages(self, items: Iterable[Any]) -> None:
        left = iter(items)
        while page := tuple(islice(left, messages.PAGE)):
            named = isinstance(page[0], str)
            self._wire.send(Page(names=page) if named else Page(objects=page))

    # -- reading -------------------------------------------------------------------------------

    def _get(self, request: messages.Get) -> None:
        start, end = request.start, request.end
        if end is None:
            end = self._store.stat(request.key).size
            whole = None
        else:
            whole = _range(start, end)
        if end - start <= _WHOLE_BYTES:
            data = memoryview(self._store.get(request.key, whole))
            self._wire.send(messages.Sized(len(data)))
            for at in range(0, len(data), messages.PIECE_BYTES):
                piece = data[at : at + messages.PIECE_BYTES]
                self._wire.send(ObjectPiece(), piece)
        else:
            check_end(request.key, end, self._store.stat(request.key).size)
            self._wire.send(messages.Sized(end - start))
            self._copy(request.key, _range(start, end))

    def _read(self, key: str, offset: int, length: int) -> None:
        wanted = _range(offset, offset + length)
        opened = self._store.open_file(key) if length >= _MAPPED_BYTES else None
        if opened is None:
            self._copy(key, wanted)
            return
        try:
            if offset + opened.shift < 0:
                self._copy(key, wanted)
                return
            # Another object may follow in the same file.
            check_end(key, wanted.end, self._store.stat(key).size)
            place = ByteRange(offset + opened.shift, wanted.end + opened.shift)
            for at in range(place.start, place.end, messages.PIECE_BYTES):
                count = min(messages.PIECE_BYTES, place.end - at)
                self._wire.send_file(ObjectPiece(), opened.fd, at, count)
        finally:
            os.close(opened.fd)

    def _copy(self, key: str, wanted: ByteRange) -> None:
        room = _room(min(_COPIED_BYTES, wanted.length), wanted.start)
        if not wanted.length:
            self._store.read_into(key, wanted.start, room)  # it may not exist, or be shorter
        for at in range(wanted.start, wanted.end, _COPIED_BYTES):
            piece = room[: min(_COPIED_BYTES, wanted.end - at)]
            self._store.read_into(key, at, piece)
            self._wire.send(ObjectPiece(), piece)

    def _open(self, key: str) -> Complete | None:
        if not self._wire.local:
            raise RefusedError("descriptors pass through Unix sockets only", where=key)
        opened = self._store.open_file(key)
        if opened is None:
            return Complete()
        try:
            self._wire.send_descriptor(messages.FileOpened(opened.shift), opened.fd)
        finally:
            os.close(opened.fd)
        return None

    # -- writing -------------------------------------------------------------------------------

    def _body(self, size: int) -> bytes:
        """Receive the pieces of a put; memory grows with what really arrives."""
        if not 0 <= size <= messages.MOST_PUT_BYTES:
            raise self._wire.fail("a put of impossible size", kind="link-protocol", found=size)
        body = bytearray()
        while len(body) < size:
            left = min(messages.MOST_PIECE_BYTES, size - len(body))
            message, count = self._wire.receive(_WRITING, self._limits.idle_s, most_bulk=left)
            if not isinstance(message, ObjectPiece) or not count:
                raise self._wire.fail("unexpected message during a put", kind="link-protocol")
            start = len(body)
            body += bytes(count)
            with memoryview(body) as view:
                self._wire.fill(view[start:], self._limits.frame_s)
        return bytes(body)

    def _write(self, request: messages.BeginWriter) -> Complete | None:
        with self._store.writer(request.key, request.size) as writer:
            self._wire.send(Complete())
            return self._stream(writer)

    def _stream(self, writer: Writer) -> Complete | None:
        """Pass pieces on until the commit; after a failure the rest of them is thrown away."""
        failed = False
        written = 0
        while True:
            message, count = self._wire.receive(
                _WRITING, self._limits.idle_s, most_bulk=messages.MOST_PIECE_BYTES
            )
            match message:
                case messages.CommitWriter():
                    if failed:
                        return None  # the answer was given when it failed
                    writer.commit()
                    return Complete()
                case messages.AbortWriter():
                    writer.abort()
                    return Complete()
                case _:
                    room = _room(count, written)
                    self._wire.fill(room, self._limits.frame_s)
                    failed = failed or not self._append(writer, room)
                    written += count

    def _append(self, writer: Writer, data: memoryview) -> bool:
        try:
            writer.write(data)
        except CkptdError as error:
            self._fail(error)
            return False
        except Exception as error:  # noqa: BLE001 - whatever the store raises is sent to its client
            self._fail(_unexpected(error))
            return False
        return True


def _range(start: int, end: int) -> ByteRange:
    if not 0 <= start <= end:
        raise StoreError("invalid range of bytes", where=f"[{start}, {end})")
    return ByteRange(start, end)


def _room(count: int, place: int) -> memoryview:
    """Return fresh memory whose address lies to a page as `place` does: disks take it directly.

    Fresh, because a store may write from it in the background until the commit.
    """
    raw = np.empty(count + _ALIGN, np.uint8)
    shift = (place - raw.ctypes.data) % _ALIGN
    return raw[shift : shift + count].data


def _unexpected(error: Exception) -> StoreError:
    return StoreError("the server's store failed", found=f"{type(error).__name__}: {error}")
