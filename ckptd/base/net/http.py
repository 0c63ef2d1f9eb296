"""`HttpClient`: asks an HTTP or HTTPS server: answers of bounded size, streams of events.

In it: errors of a server that does not answer; longest line of a stream.

It is made of `http.client`: a client of a package would bring six others into every agent, take
0.1 s to import, and must be made to bound an answer all the same.
"""

from __future__ import annotations

import contextlib
import http.client
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptd.base.net.address import parse_http
from ckptd.base.net.certificates import certified, given_files, read_files
from ckptd.base.net.roles import Role
from ckptd.errors import StoreError, TransientStoreError

_MOST_LINE = 64 << 20
_FAILURES = (OSError, http.client.HTTPException, UnicodeError)  # the last: no name of a host


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Status, headers (by any case) and body of an answer."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes


class HttpStream:
    """An answer whose body is still to be read; no part of it may be larger than allowed."""

    def __init__(self, response: http.client.HTTPResponse, url: str, most_bytes: int) -> None:
        self.status = response.status
        self._response, self._url, self._most_bytes = response, url, most_bytes

    def whole(self) -> HttpAnswer:
        """Return the answer with all of its body."""
        body = self._response.read(self._most_bytes + 1)
        if len(body) > self._most_bytes:
            raise self._too_large(self._most_bytes)
        return HttpAnswer(self.status, self._response.headers, body)

    def lines(self, most_bytes: int = _MOST_LINE) -> Iterator[bytes]:
        """Yield the lines of a stream, of at most so many bytes, until the server ends it."""
        while line := self._response.readline(most_bytes + 1):
            if len(line) > most_bytes:
                raise self._too_large(most_bytes)
            yield line

    def events(self) -> Iterator[tuple[str, str, bytes]]:
        """Yield id, name and data of each event of a stream, until the server ends it."""
        ident, name = "", ""
        for line in self.lines():
            field, _, value = line.rstrip(b"\n").partition(b": ")
            if field == b"id":
                ident = value.decode()
            elif field == b"event":
                name = value.decode()
            elif field == b"data":
                yield ident, name, value

    def _too_large(self, most_bytes: int) -> StoreError:
        return StoreError(
            "the answer is too large",
            where=self._url,
            wanted=f"at most {most_bytes} bytes",
        )


class _Certified(http.client.HTTPSConnection):
    """Believes a server by the role in its certificate, whatever the name of its host."""

    def connect(self) -> None:
        super().connect()
        role = certified(self.sock.getpeercert() or {}).role
        if role != "operator":
            raise OSError(f"the server's certificate is of role {role or None}, and not operator")


class HttpClient:
    """Asks one server.

    Parameters
    ----------
    url
        ``http://HOST:PORT`` or https; with `bare` nothing may follow.
    what
        What the server is, for errors: ``a daemon``.
    where
        Which option gave the URL, for the error.
    kind, large_kind
        Of the errors when it does not answer, and when an answer is too large.
    timeout_s
        For a connection, and between two parts of an answer.
    most_bytes
        Largest answer.
    keep
        Whether the connection is kept for the next request. Only one thread may ask then.
    ca_file
        Certificates of which one must have signed that of the server, read with the first request;
        None for those of the system.
    role
        This process's own: where its certificates are files, the server is a daemon of the same
        authority, and proves itself by them.

    Attributes
    ----------
    url
        Of the server alone, without what followed.
    query, target
        What followed: the query alone, and path and query.

    Raises
    ------
    UsageError
        It is no such URL.
    """

    def __init__(
        self,
        url: str,
        what: str,
        *,
        where: str | None = None,
        bare: bool = False,
        timeout_s: float = 30.0,
        most_bytes: int = 256 << 20,
        keep: bool = False,
        ca_file: Path | None = None,
        role: Role | None = None,
    ) -> None:
        parts = parse_http(url, what, where=where, bare=bare)
        self.url = f"{parts.scheme}://{parts.netloc}"
        self.query = parts.query
        self.target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._https = parts.scheme == "https"
        self._ca_file, self._role = ca_file, role
        self._context: ssl.SSLContext | None = None
        # With no port http.client looks for one in the host, and takes the end of an IPv6 address.
        self._host, self._port = parts.hostname or "", parts.port or (443 if self._https else 80)
        self._what, self._timeout_s, self._most_bytes = what, timeout_s, most_bytes
        self._keep = keep
        self._kept: http.client.HTTPConnection | None = None

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> HttpAnswer:
        """Return the whole answer, of any status.

        Parameters
        ----------
        timeout_s
            In place of the client's own.

        Raises
        ------
        TransientStoreError
            The server does not answer, or stops in the middle.
        StoreError
            kind `large_kind`: the answer is too large.
        """
        with self.stream(method, path, body, headers, timeout_s) as answer:
            return answer.whole()

    @contextlib.contextmanager
    def stream(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[HttpStream]:
        """Give an answer to be read while the block runs; errors as of `ask`."""
        connection: http.client.HTTPConnection | None = None
        response: http.client.HTTPResponse | None = None
        fit = False
        try:
            wait_s = self._timeout_s if timeout_s is None else timeout_s
            connection, response = self._asked(method, path, body, dict(headers or {}), wait_s)
            where = self.url + path.partition("?")[0]  # a query may hold what nobody else may read
            yield HttpStream(response, where, self._most_bytes)
            fit = response.isclosed() and not response.will_close
        except _FAILURES as error:
            raise TransientStoreError(
                f"{self._what} does not answer",
                kind="link-lost",
                where=self.url,
                found=str(error) or type(error).__name__,
            ) from error
        finally:
            if fit and self._keep:
                self._kept = connection
            elif connection is not None and response is not None:
                # The socket closes when both are closed.
                response.close()
                connection.close()

    def close(self) -> None:
        """Close the connection that is kept. Idempotent."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()

    def _asked(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], wait_s: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        while True:
            kept, self._kept = self._kept, None
            connection = kept or self._connection(wait_s)
            connection.timeout = wait_s
            if connection.sock is not None:
                connection.sock.settimeout(wait_s)
            try:
                connection.request(method, path, body, headers)
                return connection, connection.getresponse()
            except ConnectionError:
                connection.close()
                if kept is None:  # otherwise the server has closed it since the last request
                    raise
            except BaseException:
                connection.close()
                raise

    def _connection(self, wait_s: float) -> http.client.HTTPConnection:
        if not self._https:
            return http.client.HTTPConnection(self._host, self._port, timeout=wait_s)
        if self._role is not None and given_files():
            context = ssl.create_default_context(cadata=read_files(self._role)[0].decode())
            context.check_hostname = False
            return _Certified(self._host, self._port, timeout=wait_s, context=context)
        if self._context is None:
            self._context = ssl.create_default_context(cafile=self._ca_file)
            self._context.set_alpn_protocols(["http/1.1"])
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=wait_s, context=self._context
        )
