"""Client of a daemon for verbs: requests, events, the address file's token, errors."""

from __future__ import annotations

import contextlib
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ckptd.base.net.http import HttpClient, HttpStream
from ckptd.decoding import ANYTHING
from ckptd.errors import CkptdError, RefusedError, StoreError
from ckptd.monitor.daemon.place import find_daemon


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
        It is no such URL.
    """

    def __init__(self, url: str, token: str = "", timeout_s: float = 30.0) -> None:
        self._http = HttpClient(
            url, "the daemon", where="--daemon", timeout_s=timeout_s, role="operator"
        )
        self.url = self._http.url
        given = urllib.parse.parse_qs(self._http.query).get("token", [""])[0]
        self._headers = {"Authorization": f"Bearer {given or token}"} if given or token else {}

    def get(self, path: str, **query: object) -> Any:
        """Return the document that ``/api/v1`` and `path` tells.

        Raises
        ------
        TransientStoreError
            It does not answer.
        CkptdError
            What the daemon answers.
        """
        return self._json("GET", path, query, None)

    def post(self, path: str, body: object) -> Any:
        """Return the answer to a JSON document; errors as of `get`."""
        return self._json("POST", path, {}, msgspec.json.encode(body))

    def events(self, last: str = "") -> Iterator[tuple[str, str, Any]]:
        """Yield id, name and document of each event, as they come; ends with the connection.

        Parameters
        ----------
        last
            Id of the last event that was seen; what changed since then comes first.
        """
        query = {"last": last or None}
        with self._asked("GET", "/stream", query, None) as answer:
            for ident, name, data in answer.events():
                yield ident, name, ANYTHING.decode(data)

    def _json(self, method: str, path: str, query: Mapping[str, object], body: bytes | None) -> Any:
        with self._asked(method, path, query, body) as answer:
            data = answer.whole().body
        try:
            return ANYTHING.decode(data)
        except msgspec.MsgspecError as error:
            raise StoreError("the server is not a ckptd daemon", where=self.url) from error

    @contextlib.contextmanager
    def _asked(
        self, method: str, path: str, query: Mapping[str, object], body: bytes | None
    ) -> Iterator[HttpStream]:
        chosen = {key: value for key, value in query.items() if value is not None}
        text = f"?{urllib.parse.urlencode(chosen)}" if chosen else ""
        with self._http.stream(method, f"/api/v1{path}{text}", body, self._headers) as answer:
            if answer.status >= 300:
                raise _error(answer, self.url)
            yield answer


def connect(url: str | None = None, job: str | None = None) -> DaemonClient:
    """Return a client of the daemon at `url`, or of the one that runs on this machine for `job`.

    Raises
    ------
    NotFoundError
        None is named, and none or several run here.
    """
    if url is not None:
        return DaemonClient(url)
    address = find_daemon(job)
    return DaemonClient(address.url, address.token)


def _error(answer: HttpStream, url: str) -> CkptdError:
    try:
        given = ANYTHING.decode(answer.whole().body)["error"]
        error = CkptdError.from_dict({"class": "StoreError", **given})
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
        return StoreError(
            "the server is not a ckptd daemon", where=url, found=f"status {answer.status}"
        )
    if error.kind == "no-token":
        return RefusedError(
            "the daemon requires its token",
            kind="no-token",
            where=url,
            hint="give the whole URL that ckptd serve prints, with ?token=",
        )
    return error
