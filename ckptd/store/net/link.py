"""Client's connections to a store server: one call each, a pool of idle ones, lost answers.

In it: how many idle ones are kept.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from ckptd.base.net.address import Address, UnixAddress
from ckptd.base.net.connection import Connection, greet_server
from ckptd.base.runtime.ownership import in_child
from ckptd.decoding import converter, msgpack_decoder
from ckptd.errors import CkptdError, UsageError
from ckptd.store.base import Capabilities
from ckptd.store.net.messages import (
    MOST_PIECE_BYTES,
    PURPOSE,
    Answer,
    Complete,
    Failed,
    ObjectPiece,
    Page,
)

_T = TypeVar("_T", bound=msgspec.Struct)
_ANSWER = msgpack_decoder(Answer)
_promised = converter(Capabilities)
_MOST_IDLE = 16
_PATIENCE_S = 10.0


class StoreLink:
    """One connection to a `StoreServer`, for one call at a time.

    Calls raise what the server's store raised, or a `TransientStoreError` of `Connection`; after
    that one, or an exception in the middle of an answer, the link is not `clean` and cannot be
    used.

    Parameters
    ----------
    address, secret
        Of the server; the secret is empty for Unix sockets.
    connect_s
        For the connection, and again for the greeting, in seconds.
    answer_s
        For each message of an answer, in seconds.
    """

    def __init__(
        self, address: Address | UnixAddress, secret: bytes, *, connect_s: float, answer_s: float
    ) -> None:
        sock = address.connect(connect_s, address.url)
        try:
            self.wire = Connection(sock, address.url, answer_s)
        except BaseException:
            sock.close()
            raise
        self.clean = True
        self._answer_s = answer_s
        try:
            greeting = greet_server(self.wire, secret, PURPOSE, role="rank", wait_s=connect_s)
            try:
                self.capabilities = _promised(greeting)
            except msgspec.ValidationError as error:
                raise self.wire.fail(
                    "an invalid greeting of a store server", kind="link-protocol", found=error
                ) from error
        except BaseException:
            self.wire.release()
            raise

    def ask(self, request: msgspec.Struct, kind: type[_T], wait_s: float | None = None) -> _T:
        """Send a request whose answer is one message, and return that."""
        self.begin(request)
        answer = self.expect(kind, wait_s)
        self.clean = True
        return answer

    def begin(self, request: msgspec.Struct, bulk: memoryview | None = None) -> None:
        """Send a request, or a part of one; its answer is not complete before `finish`."""
        self.clean = False
        self.wire.send(request, bulk)

    def expect(self, kind: type[_T], wait_s: float | None = None) -> _T:
        """Return the next message of an answer, which must be of `kind`."""
        answer, _ = self._receive(wait_s)
        if not isinstance(answer, kind):
            raise self._surprise(answer)
        return answer

    def finish(self, wait_s: float | None = None) -> None:
        """Receive the end of an answer."""
        self.expect(Complete, wait_s)
        self.clean = True

    def receive_bytes(self, view: memoryview) -> None:
        """Fill `view` from the pieces of an answer, and finish it."""
        done = 0
        while done < len(view):
            left = min(MOST_PIECE_BYTES, len(view) - done)
            answer, count = self._receive(None, most_bulk=left)
            if not isinstance(answer, ObjectPiece) or not count:
                raise self._surprise(answer)
            self.wire.fill(view[done : done + count], self._answer_s)
            done += count
        self.finish()

    def receive_pages(self) -> list[Page]:
        """Return the pages of an answer, and finish it."""
        pages: list[Page] = []
        while True:
            answer, _ = self._receive(None)
            if isinstance(answer, Complete):
                self.clean = True
                return pages
            if not isinstance(answer, Page):
                raise self._surprise(answer)
            pages.append(answer)

    def receive_descriptor(self, kind: type[_T]) -> tuple[_T, int] | None:
        """Return a message and the descriptor beside it, or None when the answer is `Complete`."""
        fds: list[int] = []
        try:
            answer, _ = self._receive(None, fds=fds)
            if isinstance(answer, Complete) and not fds:
                self.clean = True
                return None
            if not isinstance(answer, kind) or not fds:
                raise self._surprise(answer)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        self.clean = True
        return answer, fds[0]

    def _receive(
        self, wait_s: float | None, *, most_bulk: int = 0, fds: list[int] | None = None
    ) -> tuple[Any, int]:
        wait_s = self._answer_s if wait_s is None else wait_s
        answer, count = self.wire.receive(_ANSWER, wait_s, most_bulk=most_bulk, fds=fds)
        if isinstance(answer, Failed):
            self.clean = True
            raise CkptdError.from_dict(answer.error)
        return answer, count

    def _surprise(self, answer: object) -> CkptdError:
        found = type(answer).__name__
        return self.wire.fail("an answer without a request", kind="link-protocol", found=found)


class LinkPool:
    """Links for the threads of one store: each call has one for itself, idle ones are kept."""

    def __init__(self, connect: Callable[[], StoreLink], where: str) -> None:
        self._connect = connect
        self._where = where
        self._lock = threading.Lock()
        self._idle: list[StoreLink] = []
        self._used: set[StoreLink] = set()
        self._closed = False
        in_child(self._begin_anew)

    def _begin_anew(self) -> None:
        """Have links of its own in a forked child: those of the parent are the parent's."""
        self._lock = threading.Lock()
        self._idle, self._used = [], set()

    @contextmanager
    def use(self) -> Iterator[StoreLink]:
        """Give a link for one call."""
        link = self.take()
        try:
            yield link
        finally:
            self.give_back(link)

    def take(self) -> StoreLink:
        """Return a link, which must be given back; errors are those of `StoreLink`."""
        while (link := self._pop()) is not None:
            if not link.wire.readable():
                link.wire.patience(_PATIENCE_S)  # a writer had more
                return link
            self.give_back(link, drop=True)  # the server is gone, or came back
        link = self._connect()
        link.wire.patience(_PATIENCE_S)
        with self._lock:
            self._used.add(link)
            closed = self._closed
        if closed:
            self.give_back(link, drop=True)
            raise self._closed_error()
        return link

    def give_back(self, link: StoreLink, *, drop: bool = False) -> None:
        """Keep `link` for the next call, unless it broke in this one."""
        with self._lock:
            self._used.discard(link)
            fit = link.clean and not link.wire.broken and not self._closed and not drop
            keep = fit and len(self._idle) < _MOST_IDLE
            if keep:
                self._idle.append(link)
        if not keep:
            link.wire.release()

    def close(self) -> None:
        """Close all links; calls under way fail. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            used = [*self._used]
        for link in idle:
            link.wire.release()
        for link in used:
            link.wire.close()

    def _pop(self) -> StoreLink | None:
        with self._lock:
            if self._closed:
                raise self._closed_error()
            link = self._idle.pop() if self._idle else None
            if link is not None:
                self._used.add(link)
            return link

    def _closed_error(self) -> UsageError:
        return UsageError("the store is closed", kind="closed", where=self._where)
