"""HTTP server of the daemon: connections, unproved ones, timeouts, TLS, end in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import threading
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from ckptd.base.net.address import Address
from ckptd.base.net.certificates import REREAD_S, given_files
from ckptd.base.net.door import Strangers
from ckptd.base.net.tls import https
from ckptd.base.runtime.host import many_files
from ckptd.errors import UsageError
from ckptd.monitor.daemon.bodies import ClientConnection

_HEAD_S = 15.0
_IDLE_S = 75
_END_S = 5
_BACKLOG = 2048
_MOST_CONNECTIONS = 8192
_MOST_STRANGERS = 4096
_LOOK_S = 0.25


def url_of(sock: socket.socket, name: str | None = None) -> str:
    """Return the URL of a listening socket, under the name given or its own address."""
    host, port = sock.getsockname()[:2]
    return f"http{'s' if given_files() else ''}://{Address(name or host, port)}"


class _Patient(H11Protocol):
    """Closes connections that begin a request and do not finish its head in time.

    A limited number of unproved connections is held at once; then the oldest goes for the next
    one, so that silent connections block no other.
    """

    strangers: ClassVar[Strangers[_Patient]]
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connection = ClientConnection()
        self.app_state = {**self.app_state, "connection": self._connection}
        self.strangers.enter(self)
        self._watch()

    def cut(self) -> None:
        """Close the connection at once, unless it has proved itself meanwhile."""
        if not self._connection.proved:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()  # a part of the next head may be here already

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()
        self.strangers.leave(self)
        super().connection_lost(exc)

    def _busy(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _watch(self) -> None:
        if self._busy():
            if self._late is not None:
                self._late.cancel()
                self._late = None
        elif self._late is None:
            self._late = self.loop.call_later(_HEAD_S, self._close_late)

    def _close_late(self) -> None:
        self._late = None
        # One that waits between two requests is closed by uvicorn, later.
        part, _ = self.conn.trailing_data
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or (part and cycle.response_complete):
            self.transport.close()


class _Sealed(SSLProtocol):
    """TLS before HTTP: until it has shaken hands a connection is a stranger here, as above."""

    context: ClassVar[ssl.SSLContext]
    http: ClassVar[type[_Patient]]
    strangers: ClassVar[Strangers[_Sealed]]

    def __init__(self, *args: Any, **given: Any) -> None:
        waits: dict[str, Any] = {"ssl_handshake_timeout": _HEAD_S, "ssl_shutdown_timeout": _END_S}
        loop, its = asyncio.get_running_loop(), self.http(*args, **given)
        shaken: asyncio.Future[None] = loop.create_future()
        shaken.add_done_callback(self._shaken)
        super().__init__(loop, its, self.context, shaken, server_side=True, **waits)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._tcp = cast("asyncio.Transport", transport)
        self.strangers.enter(self)
        super().connection_made(transport)

    def _shaken(self, shaken: asyncio.Future[None]) -> None:
        shaken.exception()  # it is closed then
        self.strangers.leave(self)

    def cut(self) -> None:
        """Close the connection at once."""
        self._tcp.abort()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: `Serving.run` handles them, and a signal is no failure."""
        yield


class Serving:
    """One HTTP server in the event loop of the thread that calls `run`.

    Parameters
    ----------
    app
        What answers.
    sock
        A listening socket.
    started
        Called in the loop before the first request is answered.
    ending
        Called in the loop when the end begins, so that streams end.
    idle
        Says whether to end by itself; asked four times a second.
    """

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        *,
        started: Callable[[asyncio.AbstractEventLoop], None],
        ending: Callable[[], None],
        idle: Callable[[], bool] = lambda: False,
    ) -> None:
        self._sock = sock
        self._started = started
        self._ending = ending
        self._idle = idle
        self._end = threading.Event()
        strangers: Strangers[_Patient] = Strangers(_MOST_STRANGERS, _Patient.cut)
        http: Any = type("_Patient", (_Patient,), {"strangers": strangers})
        self._tls = https()
        if self._tls is not None:
            shaking: Strangers[_Sealed] = Strangers(_MOST_STRANGERS, _Sealed.cut)
            its = {"context": self._tls, "http": http, "strangers": shaking}
            http = type("_Sealed", (_Sealed,), its)
        self._server = _Server(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=http,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                date_header=False,
                backlog=_BACKLOG,
                limit_concurrency=_MOST_CONNECTIONS,
                timeout_keep_alive=_IDLE_S,
                timeout_graceful_shutdown=_END_S,
                h11_max_incomplete_event_size=32 << 10,
            )
        )

    def run(self, signals: bool = True) -> None:
        """Serve until `stop`, TERM or INT (if `signals`), or until it is idle."""
        many_files()
        asyncio.run(self._run(signals))

    def stop(self) -> None:
        """Begin the end; from any thread."""
        self._end.set()

    async def _run(self, signals: bool) -> None:
        loop = asyncio.get_running_loop()
        if signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
        self._started(loop)
        watching = asyncio.ensure_future(self._until_end())
        try:
            await self._server.serve(sockets=[self._sock])
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    async def _until_end(self) -> None:
        asked = read = time.monotonic()
        while not self._end.is_set():
            await asyncio.sleep(0.05)
            if time.monotonic() - asked > _LOOK_S:
                asked = time.monotonic()
                if self._idle():
                    break
            if time.monotonic() - read > REREAD_S:
                read = time.monotonic()
                with contextlib.suppress(UsageError):  # the one before serves on
                    https(self._tls)
        self._ending()
        self._server.should_exit = True
