"""Live stream of the page (server-sent events): clients, queues, resume after a break.

In it: limits of clients, waiting events and bytes; how often a comment is sent.

An event's id is ``LIFE-REVISION``. A client that comes back with the last id it saw gets what
changed since then; after a restart of the daemon, everything.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ckptd.errors import TransientStoreError
from ckptd.monitor.daemon.bodies import refusal

_MOST_CLIENTS = 256
_MOST_EVENTS = 256
_MOST_BYTES = 16 << 20
_SEND_S = 15.0
_COMMENT_S = 10.0
_KEPT = 512


@dataclass(frozen=True)
class StreamEvent:
    """One event.

    Attributes
    ----------
    revision
        Of the round that made it.
    name
        ``job``, ``ranks``, ``incident``, ``links`` or ``elastic``.
    data
        JSON in one line.
    """

    revision: int
    name: str
    data: bytes


@dataclass(eq=False)
class _Client:
    """Events that wait for one client."""

    events: deque[bytes] = field(default_factory=deque)
    bytes: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)
    dropped: bool = False


class Hub:
    """Hands events to all clients; used in the event loop's thread only.

    Attributes
    ----------
    dropped
        Clients that were dropped because they did not read.
    """

    def __init__(self) -> None:
        self.life = secrets.token_hex(4)
        self.dropped = 0
        self._clients: set[_Client] = set()
        self._kept: deque[StreamEvent] = deque(maxlen=_KEPT)
        self._closed = False

    def __len__(self) -> int:
        return len(self._clients)

    def publish(self, event: StreamEvent, kept: bool = False) -> None:
        """Give an event to every client; `kept` ones are given again to those who come back."""
        if kept:
            self._kept.append(event)
        frame = self.frame(event)
        for client in self._clients:
            _give(client, frame)

    def frame(self, event: StreamEvent) -> bytes:
        """Return an event as it is sent."""
        head = f"id: {self.life}-{event.revision}\nevent: {event.name}\ndata: "
        return head.encode() + event.data + b"\n\n"

    def seen(self, last: str | None) -> int | None:
        """Return the revision that a Last-Event-ID names; None if it is not of this life."""
        life, _, number = (last or "").partition("-")
        good = life == self.life and number.isdecimal() and len(number) < 18
        return int(number) if good else None

    def missed(self, since: int) -> list[StreamEvent]:
        """Return the kept events after revision `since`."""
        return [event for event in self._kept if event.revision > since]

    def join(self) -> _Client:
        """Return a new client.

        Raises
        ------
        TransientStoreError
            kind ``busy``: there are too many, or the daemon ends.
        """
        if self._closed or len(self._clients) >= _MOST_CLIENTS:
            raise TransientStoreError(
                "too many open pages",
                kind="busy",
                wanted=f"at most {_MOST_CLIENTS}",
                hint="close other pages",
            )
        client = _Client()
        self._clients.add(client)
        return client

    def leave(self, client: _Client) -> None:
        """Forget a client."""
        self._clients.discard(client)
        self.dropped += client.dropped

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        for client in self._clients:
            client.news.set()

    @property
    def closed(self) -> bool:
        """Whether streams are to end."""
        return self._closed


def _give(client: _Client, frame: bytes) -> None:
    if client.dropped:
        return
    if len(client.events) >= _MOST_EVENTS or client.bytes + len(frame) > _MOST_BYTES:
        client.dropped = True
        client.events.clear()
        client.bytes = 0
    else:
        client.events.append(frame)
        client.bytes += len(frame)
    client.news.set()


class Streaming(Response):
    """The answer to GET /stream.

    Parameters
    ----------
    hub
        Where events come from.
    first
        Called with the revision that the client has seen, or None: what it gets at once.
    """

    def __init__(
        self, hub: Hub, request: Request, first: Callable[[int | None], list[StreamEvent]]
    ) -> None:
        super().__init__()
        self._hub = hub
        self._first = first
        self._last = request.headers.get("last-event-id") or request.query_params.get("last")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            client = self._hub.join()
        except TransientStoreError as error:
            await refusal(error)(scope, receive, send)
            return
        gone = asyncio.ensure_future(_gone(receive, client))
        try:
            await self._run(client, gone, send)
        except TimeoutError:  # it does not read: the connection is closed without an end
            client.dropped = True
        finally:
            self._hub.leave(client)
            gone.cancel()

    async def _run(self, client: _Client, gone: asyncio.Future[None], send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _write(send, b"retry: 2000\n\n")
        for event in self._first(self._hub.seen(self._last)):
            await _write(send, self._hub.frame(event))
        while not (client.dropped or self._hub.closed or gone.done()):
            try:
                async with asyncio.timeout(_COMMENT_S):
                    await client.news.wait()
            except TimeoutError:
                await _write(send, b": here\n\n")
            client.news.clear()
            while client.events and not gone.done():
                frame = client.events.popleft()
                client.bytes -= len(frame)
                await _write(send, frame)
        if not gone.done():
            await _write(send, b"", more=False)


async def _write(send: Send, body: bytes, more: bool = True) -> None:
    async with asyncio.timeout(_SEND_S):
        await send({"type": "http.response.body", "body": body, "more_body": more})


async def _gone(receive: Receive, client: _Client) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    client.news.set()
