"""Webhook: signed POSTs of incidents, tries and pauses, queue."""

from __future__ import annotations

import hashlib
import hmac
import queue
import threading
from dataclasses import dataclass

from ckptd.base.net.http import HttpClient
from ckptd.errors import CkptdError

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
        It is no such URL.
    """

    def __init__(self, url: str, key: bytes, first_wait_s: float = _FIRST_WAIT_S) -> None:
        self.sent = Sent()
        self._http = HttpClient(
            url, "a service for incidents", where="--webhook", timeout_s=_ANSWER_S
        )
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
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "ckptd",
            SIGNATURE_HEADER: sign_hook(self._key, body),
        }
        try:
            with self._http.stream("POST", self._http.target, body, headers) as answer:
                return answer.status
        except CkptdError:
            return None
