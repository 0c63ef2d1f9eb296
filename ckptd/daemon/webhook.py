"""Tells another service of incidents: signed POSTs from a thread of their own, never awaited."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import queue
import ssl
import threading
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from ckptd.errors import UsageError

__all__ = ["SIGNATURE_HEADER", "Webhook", "sign_hook"]

SIGNATURE_HEADER = "Ckptd-Signature"
_TRIES = 5
_FIRST_WAIT_S = 1.0
_ANSWER_S = 5.0
_MOST_WAITING = 256


def sign_hook(key: bytes, body: bytes) -> str:
    """Return the value of ``Ckptd-Signature``: ``sha256=`` and the HMAC of the body."""
    return f"sha256={hmac.new(key, body, hashlib.sha256).hexdigest()}"


@dataclass
class Sent:
    """How many messages went out; `dropped` found no room, `failed` no good answer."""

    done: int = 0
    failed: int = 0
    dropped: int = 0


class Webhook:
    """Sends bodies to one URL, in order, each up to five times.

    Parameters
    ----------
    url
        ``http://`` or ``https://``.
    key
        What signs the bodies.
    first_wait_s
        Before the second try, seconds; each further wait is twice as long.

    Raises
    ------
    UsageError
        kind ``bad-argument``: it is no such URL.
    """

    def __init__(self, url: str, key: bytes, first_wait_s: float = _FIRST_WAIT_S) -> None:
        self.sent = Sent()
        self._to = _parsed(url)
        self._key = key
        self._wait_s = first_wait_s
        self._waiting: queue.Queue[bytes | None] = queue.Queue(_MOST_WAITING)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="webhook", daemon=True)
        self._thread.start()

    def send(self, body: bytes) -> None:
        """Take a JSON body to be sent; returns at once. When too many wait, it is dropped."""
        try:
            self._waiting.put_nowait(body)
        except queue.Full:
            self.sent.dropped += 1

    def close(self, timeout_s: float = 3.0) -> None:
        """Send what waits, once each, for at most `timeout_s`; then end."""
        self._ended.set()
        try:
            self._waiting.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (body := self._waiting.get()) is not None:
            if self._deliver(body):
                self.sent.done += 1
            else:
                self.sent.failed += 1

    def _deliver(self, body: bytes) -> bool:
        wait = self._wait_s
        for attempt in range(_TRIES):
            status = self._post(body)
            if status is not None and 200 <= status < 300:
                return True
            refused = status is not None and 400 <= status < 500 and status not in (408, 429)
            if refused or self._ended.is_set() or attempt == _TRIES - 1:
                return False
            self._ended.wait(wait)
            wait *= 2
        return False

    def _post(self, body: bytes) -> int | None:
        """Return the status of the answer; None if there was none."""
        to = self._to
        connection = _connection(to)
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "ckptd",
            SIGNATURE_HEADER: sign_hook(self._key, body),
        }
        path = (to.path or "/") + (f"?{to.query}" if to.query else "")
        try:
            connection.request("POST", path, body, headers)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException, ValueError):  # the last: no name of a host
            return None
        finally:
            connection.close()


def _connection(to: SplitResult) -> http.client.HTTPConnection:
    host = to.hostname or ""
    if to.scheme == "https":
        return http.client.HTTPSConnection(
            host, to.port, timeout=_ANSWER_S, context=ssl.create_default_context()
        )
    return http.client.HTTPConnection(host, to.port, timeout=_ANSWER_S)


def _parsed(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    # What is not ASCII could not be put into a request.
    if not good or not url.isascii() or not url.isprintable() or " " in url:
        raise UsageError(
            "not a URL that incidents can be sent to",
            kind="bad-argument",
            where="--webhook",
            wanted="http:// or https://",
            found=url,
        )
    return parts
