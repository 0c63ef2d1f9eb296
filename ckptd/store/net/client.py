"""`NetStore`: a store that another process holds (``ckptd://``); its options, timeouts, tries."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from ckptd.base.net.address import parse_server
from ckptd.base.net.signing import check_secret
from ckptd.errors import CkptdError, ConflictError, TransientStoreError, UsageError
from ckptd.store import base
from ckptd.store.net import messages
from ckptd.store.net.link import LinkPool, StoreLink
from ckptd.store.net.messages import Complete, ObjectPiece
from ckptd.store.wrap import Backoff
from ckptd.types import ByteRange

_T = TypeVar("_T")
_LOST = frozenset({"link-lost", "link-busy", "link-protocol"})


class NetOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of ``ckptd://`` and ``ckptd+unix://``.

    Attributes
    ----------
    secret
        What client and server both know, in hexadecimal digits; not for Unix sockets.
    connect_s
        For a connection, and for the greeting after it, in seconds.
    answer_s
        For each message of an answer, and for sent bytes to make progress, in seconds.
    durable_s
        For the commit of a writer, and for `Store.sync`, in seconds.
    retry_s
        A call whose connection is lost is tried again for so long, in seconds, where repeating it
        does no harm. A server that did not answer in time is not asked again.
    """

    secret: str | None = None
    connect_s: float = 5.0
    answer_s: float = 60.0
    durable_s: float = 600.0
    retry_s: float = 5.0


def open_net(url: str, options: dict[str, Any]) -> NetStore:
    """Open ``ckptd://host:port`` or ``ckptd+unix:///path``."""
    return NetStore(url, base.parse_options(url, options, NetOptions))


class NetStore(base.Store):
    """The store of a `StoreServer`, over TCP or a Unix socket.

    It promises what the server's store promises (`capabilities` asks the server the first time),
    but for `Store.local_path`; over a Unix socket `open_file` gives descriptors of what the server
    can open, so that nothing is copied. Besides the errors of that store each call may raise
    `TransientStoreError` of kind ``link-lost``, ``link-late``, ``link-busy`` or ``link-protocol``,
    `StoreError` of kind ``permission``, and `RefusedError` where the server is read-only.

    Over TCP all of it passes through TLS 1.3 (`ckptd.base.net.tls`): without the secret nobody in
    between can read or change a byte.

    Parameters
    ----------
    url
        Of the server.
    options
        See `NetOptions`.
    """

    def __init__(self, url: str, options: NetOptions | None = None) -> None:
        self._settings = options or NetOptions()
        self._address = parse_server(url)
        self.url = self._address.url
        defaults = msgspec.structs.asdict(NetOptions())
        given = msgspec.structs.asdict(self._settings)
        self.options: dict[str, Any] = {k: v for k, v in given.items() if v != defaults[k]}
        local = self._address.local
        self._secret = b"" if local else check_secret(self._settings.secret, self.url)
        self._pool = LinkPool(self._connect, self.url)

    def _connect(self) -> StoreLink:
        s = self._settings
        return StoreLink(self._address, self._secret, connect_s=s.connect_s, answer_s=s.answer_s)

    def _call(self, act: Callable[[StoreLink], _T]) -> _T:
        """Do `act` on a link, and again on another one while connections are lost."""

        def once() -> _T:
            with self._pool.use() as link:
                return act(link)

        return self._retried(once)

    def _retried(self, act: Callable[[], _T]) -> _T:
        backoff = Backoff(
            base.RetrySpec(deadline_s=self._settings.retry_s, first_s=0.05, longest_s=1.0)
        )
        while True:
            try:
                return act()
            except TransientStoreError as error:
                if error.kind not in _LOST:
                    raise
                backoff.wait(error)

    @cached_property
    def capabilities(self) -> base.Capabilities:  # type: ignore[override]
        """The promises of the server's store, as seen from here."""
        found = self._call(lambda link: link.capabilities)
        return replace(found, local_files=False, shared=True)

    # -- reading -------------------------------------------------------------------------------

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """Return the whole object, or exactly `byte_range` of it."""
        start, end = (byte_range.start, byte_range.end) if byte_range else (0, None)
        request = messages.Get(base.check_key(key), start, end)

        def act(link: StoreLink) -> bytes:
            link.begin(request)
            size = link.expect(messages.Sized).size
            # Without a range these are records and manifests: no claim is allocated beyond.
            if not 0 <= size <= base.MOST_WHOLE_BYTES or (end is not None and size != end - start):
                raise link.wire.fail("other bytes than requested", kind="link-protocol")
            data = bytearray(size)
            link.receive_bytes(memoryview(data))
            return bytes(data)

        return self._call(act)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` of the object, straight from the connection."""
        view = base.as_bytes_view(buffer)
        request = messages.Read(base.check_key(key), offset, len(view))

        def act(link: StoreLink) -> None:
            link.begin(request)
            link.receive_bytes(view)

        self._call(act)

    def stat(self, key: str) -> base.ObjectInfo:
        """Return size and time of one object."""
        request = messages.Stat(base.check_key(key))
        found = self._call(lambda link: link.ask(request, messages.ObjectFound))
        return base.ObjectInfo(key, found.size, found.modified, found.tag)

    def open_file(self, key: str) -> base.OpenFile | None:
        """Return a descriptor from the server (Unix sockets), or None where it can give none."""
        base.check_key(key)
        if not self._address.local:
            return None

        def act(link: StoreLink) -> base.OpenFile | None:
            link.begin(messages.Open(key))
            found = link.receive_descriptor(messages.FileOpened)
            return None if found is None else base.OpenFile(found[1], found[0].shift)

        return self._call(act)

    # -- listing -------------------------------------------------------------------------------

    def list(self, prefix: str = "") -> Iterator[base.ObjectInfo]:
        """Yield every object below `prefix`, in key order; the listing is received whole."""
        for page in self._pages(messages.List(base.check_prefix(prefix))):
            for found in page.objects:
                yield base.ObjectInfo(*found)

    def children(self, prefix: str = "") -> base.Names:
        """Return names directly below `prefix`, sorted; folders end in "/"."""
        return self._names(messages.Children(base.check_prefix(prefix)))

    def sweep(
        self, prefix: str = "", *, older_than_s: float = 86_400.0, deep: bool = True
    ) -> base.Names:
        """Remove leftovers of interrupted calls below `prefix` and return their names."""
        return self._names(messages.Sweep(base.check_prefix(prefix), older_than_s, deep))

    def _pages(self, request: msgspec.Struct) -> tuple[messages.Page, ...]:
        def act(link: StoreLink) -> tuple[messages.Page, ...]:
            link.begin(request)
            return tuple(link.receive_pages())

        return self._call(act)

    def _names(self, request: msgspec.Struct) -> base.Names:
        return [name for page in self._pages(request) for name in page.names]

    # -- writing -------------------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Write a small object whole; as atomic and durable as the server's store does it.

        A create-only put whose answer was lost is repeated; when the key is taken then, equal
        bytes are our own.
        """
        view = base.as_bytes_view(memoryview(data))
        if len(view) > messages.MOST_PUT_BYTES:
            raise UsageError(
                "too large for one put",
                kind="size",
                where=key,
                wanted=f"at most {messages.MOST_PUT_BYTES} bytes",
                found=f"{len(view)} bytes",
                hint="use Store.writer",
            )
        request = messages.Put(base.check_key(key), len(view), create_only)
        tries = itertools.count()

        def act(link: StoreLink) -> int:
            number = next(tries)
            link.begin(request)
            for piece in _pieces(view):
                link.begin(ObjectPiece(), piece)
            link.finish()
            return number

        try:
            self._call(act)
        except ConflictError:
            if next(tries) == 1 or not base.holds(self, key, data):
                raise

    def writer(self, key: str, size: int) -> base.Writer:
        """Begin a large object; its bytes are sent as they come and not kept in between.

        A writer has a connection of its own. It is not repeated when that is lost.
        """
        writer = _NetWriter(self._pool, base.check_key(key), size, self._settings)
        self._retried(writer.begin)
        return writer

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; one that is gone already is no error."""
        checked = [base.check_key(k) for k in keys]
        for start in range(0, len(checked), messages.PAGE):
            request = messages.Delete(tuple(checked[start : start + messages.PAGE]))
            self._call(lambda link, r=request: link.ask(r, Complete))  # type: ignore[misc]

    def sync(self, prefix: str) -> None:
        """Make the names below folder `prefix`, and the folder's own name, durable."""
        request = messages.Sync(base.check_prefix(prefix))
        self._call(lambda link: link.ask(request, Complete, self._settings.durable_s))

    def close(self) -> None:
        """Close all connections."""
        self._pool.close()


class _NetWriter(base.SizedWriter):
    def __init__(self, pool: LinkPool, key: str, size: int, settings: NetOptions) -> None:
        super().__init__(key, size)
        self._pool = pool
        self._settings = settings
        self._link: StoreLink | None = None

    def begin(self) -> None:
        """Take a link and begin the object on the server."""
        link = self._pool.take()
        try:
            link.ask(messages.BeginWriter(self.key, self.size), Complete)
            link.wire.patience(self._settings.answer_s)  # its disk may be slow
        except BaseException:
            self._pool.give_back(link)
            raise
        self._link = link

    def _append(self, view: memoryview) -> None:
        link = self._held()
        for piece in _pieces(view):
            if link.wire.readable():
                link.finish()  # raises: the server speaks before the commit only when it failed
                raise link.wire.fail("an answer came too early", kind="link-protocol")
            link.begin(ObjectPiece(), piece)

    def _finish(self) -> None:
        link = self._held()
        link.begin(messages.CommitWriter())
        link.finish(self._settings.durable_s)
        self._leave()

    def _drop(self) -> None:
        link = self._held()
        try:
            link.begin(messages.AbortWriter())
            try:
                link.finish()
            except CkptdError:
                if link.wire.broken:
                    raise
                link.finish()  # that was about a piece sent before
        finally:
            self._leave()

    def _held(self) -> StoreLink:
        if self._link is None:
            raise TransientStoreError("the connection is gone", kind="link-lost", where=self.key)
        return self._link

    def _leave(self) -> None:
        """Give the link back."""
        link, self._link = self._link, None
        if link is not None:
            self._pool.give_back(link)


def _pieces(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(view), messages.PIECE_BYTES):
        yield view[start : start + messages.PIECE_BYTES]
