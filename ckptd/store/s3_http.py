"""HTTP connections of S3: deadlines, proxies, idle ones, bodies without copies.

In it: when an idle connection is dropped; largest answer.

botocore signs and parses; its hook ``before-send`` hands each request to `S3Transport.send`. So
bytes go from the caller's memory to the socket, and from the socket into the caller's memory,
without a copy, and a request can be ended from another thread.
"""

from __future__ import annotations

import base64
import http.client
import io
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from ckptd.errors import StoreError, TransientStoreError

_CHUNK_BYTES = 1 << 20
_IDLE_S = 12.0
"""Gateways forget a connection that is silent for longer, and the next request on it fails."""
_MOST_ANSWER_BYTES = 64 << 20
"""Of an answer that is not an object. A page of 1,000 names has less than one MiB."""


class Flight:
    """Requests that end together."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.lines: set[_Line] = set()

    def end(self) -> None:
        """End what is under way, from any thread: nothing writes into a caller's buffer after."""
        self.over.set()
        for line in list(self.lines):
            line.cut()


class S3Body:
    """Pieces of a caller's memory, as the file that botocore signs and http.client sends.

    `read` gives the next piece, however much was asked for.
    """

    def __init__(self, views: Iterable[memoryview]) -> None:
        self._views = [
            view[start : start + _CHUNK_BYTES]
            for view in views
            for start in range(0, len(view), _CHUNK_BYTES)
        ]
        self._next = 0

    def __len__(self) -> int:
        return sum(map(len, self._views))

    def read(self, _size: int = -1) -> memoryview | bytes:
        """Return the next piece, nothing at the end."""
        if self._next == len(self._views):
            return b""
        self._next += 1
        return self._views[self._next - 1]

    def tell(self) -> int:
        """Return the number of the next piece."""
        return self._next

    def seek(self, number: int) -> None:
        """Make this piece the next one."""
        self._next = number


class _Answer(http.client.HTTPResponse):
    """An answer as botocore and its `StreamingBody` read it."""

    def stream(self) -> Iterator[bytes]:
        """Give the body of an answer that is not an object."""
        found = self.read(_MOST_ANSWER_BYTES + 1)
        if len(found) > _MOST_ANSWER_BYTES:
            raise StoreError("the answer is too large", wanted=f"{_MOST_ANSWER_BYTES} bytes")
        yield found


class _Line(io.RawIOBase):
    """A connection, and its socket as http.client takes it, whose calls end at `self.end`."""

    def __init__(self, url: SplitResult, transport: S3Transport, seconds: float) -> None:
        from botocore.utils import get_environ_proxies

        proxy = get_environ_proxies(url.geturl()).get(url.scheme, "")
        at = urlsplit(proxy if "//" in proxy else f"//{proxy}") if proxy else url
        if proxy and at.scheme not in ("", "http"):
            raise StoreError("a proxy must be http://", where=url.geturl(), found=at.scheme)
        self._to_proxy = {}
        if at.username is not None:
            pair = f"{unquote(at.username)}:{unquote(at.password or '')}".encode()
            word = f"Basic {base64.b64encode(pair).decode()}"
            self._to_proxy = {"Proxy-Authorization": word}
        self._whole_url = bool(proxy) and url.scheme == "http"
        host, port = at.hostname or "", at.port
        if url.scheme == "http":
            self._connection = http.client.HTTPConnection(host, port, seconds)
        else:
            self._connection = http.client.HTTPSConnection(
                host, port, timeout=seconds, context=transport.tls()
            )
            if proxy:
                self._connection.set_tunnel(url.hostname or "", url.port, self._to_proxy)
        self._connection.auto_open = 0
        self._connection.response_class = _Answer
        self._connection.connect()
        self._socket: socket.socket = self._connection.sock
        self._connection.sock = self
        self._longest_s = transport.longest_s
        self._answer: http.client.HTTPResponse | None = None
        self._idle_since = self.end = 0.0
        self._ended = False

    def ask(self, request: Any, url: SplitResult) -> http.client.HTTPResponse:
        """Send a request and return the answer, of which the head is here."""
        self._answer = None
        # Asking first whether to send costs a round trip, and a second where the store is silent.
        headers = {k: v for k, v in request.headers.items() if k.lower() != "expect"}
        target = f"{url.path or '/'}?{url.query}".removesuffix("?")
        if self._whole_url:
            headers |= self._to_proxy
            target = f"{url.scheme}://{url.netloc}{target}"
        sent = True
        try:
            self._connection.request(request.method, target, request.body, headers)
        except (BrokenPipeError, ConnectionResetError):
            sent = False  # the answer may say why
        self._answer = self._connection.getresponse()
        if self._ended:  # http.client takes half a head for a whole one
            raise http.client.IncompleteRead(b"")
        self._answer.will_close |= not sent
        return self._answer

    def is_free(self) -> bool:
        """Say whether all was read, so that another request may follow."""
        self._idle_since = time.monotonic()
        return self._answer is not None and self._answer.isclosed() and not self._answer.will_close

    def is_usable(self) -> bool:
        """Say whether the next request may be sent: it was free lately, and nothing came since."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return time.monotonic() - self._idle_since < _IDLE_S and not poll.poll(0)

    def cut(self) -> None:
        """End what another thread does here."""
        # Not SSLSocket's own: that thread would take ciphertext for data.
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def hang_up(self) -> None:
        """Close the socket."""
        self._socket.close()

    # -- what http.client asks of a socket, and of the file over it ----------------------------

    def _within(self) -> socket.socket:
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long")
        self._socket.settimeout(min(left, self._longest_s))
        return self._socket

    def sendall(self, data: Any) -> None:
        """Send a piece of a body, or a head."""
        self._within().sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        """Return what the answer is read from."""
        return io.BufferedReader(self, 1 << 16)

    def readable(self) -> bool:
        """Say yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what has come."""
        # Ceph's gateway sends a body when its head is acknowledged: 40 ms later where that waits.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        count = self._within().recv_into(buffer)
        self._ended = not count
        return count

    def close(self) -> None:
        """Do nothing: an answer ends with this, and not the connection; see `hang_up`."""


class S3Transport:
    """The connections of a client. Each serves one request at a time, and is kept for the next.

    Parameters
    ----------
    connect_s, longest_s
        Deadlines in seconds: for a connection, and for the next bytes.
    authorities
        Path of the authorities' certificates; None: any certificate is right.
    """

    def __init__(self, connect_s: float, longest_s: float, authorities: str | None) -> None:
        self.longest_s = longest_s
        self._connect_s = connect_s
        self._authorities = authorities
        self._tls: ssl.SSLContext | None = None
        self._idle: dict[tuple[str, str], list[_Line]] = {}
        self._now = threading.local()

    def tls(self) -> ssl.SSLContext:
        """Return what connections over TLS are made with."""
        if self._tls is None:
            found = ssl.create_default_context(cafile=self._authorities)
            if self._authorities is None:
                found.check_hostname = False
                found.verify_mode = ssl.CERT_NONE
            self._tls = found
        return self._tls

    @contextmanager
    def requests(self, flight: Flight, seconds: float) -> Iterator[None]:
        """Make this thread's requests part of `flight`, each with a deadline, its body included."""
        now = self._now
        now.flight, now.end, now.lines = flight, time.monotonic() + seconds, []
        try:
            yield
        finally:
            for origin, line in now.lines:
                flight.lines.discard(line)
                if line.is_free():
                    self._idle.setdefault(origin, []).append(line)
                else:
                    line.hang_up()

    def send(self, request: Any, **_: Any) -> Any:
        """Send a request that botocore has signed; return its answer."""
        from botocore.awsrequest import AWSResponse

        url = urlsplit(request.url)
        now, origin = self._now, (url.scheme, url.netloc)
        line = self._take(origin) or _Line(
            url, self, max(1e-3, min(self._connect_s, now.end - time.monotonic()))
        )
        now.lines.append((origin, line))
        line.end = now.end
        now.flight.lines.add(line)
        if now.flight.over.is_set():
            raise TransientStoreError("the request was given up")
        answer = line.ask(request, url)
        return AWSResponse(request.url, answer.status, answer.getheaders(), answer)

    def _take(self, origin: tuple[str, str]) -> _Line | None:
        idle = self._idle.get(origin, [])
        with suppress(IndexError):  # other threads take them too
            while True:
                line = idle.pop()
                if line.is_usable():
                    return line
                line.hang_up()
        return None

    def close(self) -> None:
        """Close what no request uses."""
        for idle in self._idle.values():
            while idle:
                with suppress(IndexError):
                    idle.pop().hang_up()
