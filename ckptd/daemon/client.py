"""Asks a daemon: what verbs use, with the token that the daemon's address file or URL has."""

from __future__ import annotations

import contextlib
import http.client
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ckptd.daemon.place import find_daemon
from ckptd.errors import CkptdError, RefusedError, StoreError, TransientStoreError, UsageError

__all__ = ["DaemonClient", "connect"]

_MOST_ANSWER = 256 << 20
_MOST_LINE = 64 << 20


class DaemonClient:
    """Asks one daemon.

    Parameters
    ----------
    url
        ``http://HOST:PORT``, or with ``/?token=TOKEN`` as ``ckptd serve`` prints it.
    token
        Where the URL has none.
    timeout_s
        For a connection, and between two parts of an answer.

    Raises
    ------
    UsageError
        kind ``bad-argument``: it is no such URL.
    """

    def __init__(self, url: str, token: str = "", timeout_s: float = 30.0) -> None:
        parts = _parsed(url)
        said = urllib.parse.parse_qs(parts.query).get("token", [""])[0]
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._https = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port
        self._token = said or token
        self._timeout_s = timeout_s

    def get(self, path: str, **query: object) -> Any:
        """Return the document that ``/api/v1`` and `path` tells.

        Raises
        ------
        TransientStoreError
            kind ``daemon-away``: it does not answer.
        CkptdError
            What the daemon answers.
        """
        return self._json("GET", path, query, None)

    def post(self, path: str, body: object) -> Any:
        """Return the answer to a JSON document; errors as of `get`."""
        return self._json("POST", path, {}, msgspec.json.encode(body))

    def download(self, path: str, **query: object) -> bytes:
        """Return an answer that is no JSON; errors as of `get`."""
        with self._asked("GET", path, query, None) as answer:
            return _whole(answer)

    def events(self, last: str = "") -> Iterator[tuple[str, str, Any]]:
        """Yield id, name and document of each event, as they come; ends with the connection.

        Parameters
        ----------
        last
            Id of the last event that was seen; what changed since then comes first.
        """
        query = {"last": last or None}
        with self._asked("GET", "/stream", query, None) as answer:
            ident, name = "", ""
            while line := _line(answer):
                field, _, value = line.rstrip(b"\n").partition(b": ")
                if field == b"id":
                    ident = value.decode()
                elif field == b"event":
                    name = value.decode()
                elif field == b"data":
                    yield ident, name, msgspec.json.decode(value)

    def _json(self, method: str, path: str, query: Mapping[str, object], body: bytes | None) -> Any:
        with self._asked(method, path, query, body) as answer:
            data = _whole(answer)
        try:
            return msgspec.json.decode(data)
        except msgspec.MsgspecError as error:
            raise StoreError(
                "the answer is not a daemon's", kind="not-a-daemon", where=self.url
            ) from error

    @contextlib.contextmanager
    def _asked(
        self, method: str, path: str, query: Mapping[str, object], body: bytes | None
    ) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout_s)
        chosen = {key: value for key, value in query.items() if value is not None}
        text = f"?{urllib.parse.urlencode(chosen)}" if chosen else ""
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            connection.request(method, f"/api/v1{path}{text}", body, headers)
            answer = connection.getresponse()
            if answer.status >= 300:
                raise _error(answer, self.url)
            yield answer
        except (OSError, http.client.HTTPException) as error:
            raise TransientStoreError(
                "the daemon does not answer",
                kind="daemon-away",
                where=self.url,
                found=str(error) or type(error).__name__,
            ) from error
        finally:
            connection.close()


def connect(url: str | None = None, job: str | None = None) -> DaemonClient:
    """Return a client of the daemon at `url`, or of the one that runs on this machine for `job`.

    Raises
    ------
    NotFoundError
        kind ``no-daemon``: none is named, and none or several run here.
    """
    if url is not None:
        return DaemonClient(url)
    address = find_daemon(job)
    return DaemonClient(address.url, address.token)


def _parsed(url: str) -> urllib.parse.SplitResult:
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise UsageError(
            "not the URL of a daemon",
            kind="bad-argument",
            where="--daemon",
            wanted="http://HOST:PORT/?token=TOKEN",
            found=url,
        )
    return parts


def _whole(answer: http.client.HTTPResponse) -> bytes:
    data = answer.read(_MOST_ANSWER + 1)
    if len(data) > _MOST_ANSWER:
        raise StoreError("the answer is too large", kind="not-a-daemon")
    return data


def _line(answer: http.client.HTTPResponse) -> bytes:
    line = answer.readline(_MOST_LINE)
    if len(line) >= _MOST_LINE:
        raise StoreError("the answer is too large", kind="not-a-daemon")
    return line


def _error(answer: http.client.HTTPResponse, url: str) -> CkptdError:
    data = answer.read(64 << 10)
    try:
        said = msgspec.json.decode(data)["error"]
        error = CkptdError.from_dict({"class": "StoreError", **said})
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
        return StoreError(
            "the answer is not a daemon's",
            kind="not-a-daemon",
            where=url,
            found=f"status {answer.status}",
        )
    if error.kind == "no-token":
        return RefusedError(
            "the daemon wants its token",
            kind="no-token",
            where=url,
            hint="give the whole URL that ckptd serve prints, with ?token=",
        )
    return error
