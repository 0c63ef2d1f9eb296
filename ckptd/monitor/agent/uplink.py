"""Agent's way to the daemon: signed HTTP requests, timeouts, retries, findings that wait.

Nothing here makes the agent wait. While the daemon is away nothing piles up: a report that did not
arrive is not sent again, since the next one says more; findings are kept, a bounded number.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections import deque

from ckptd.base.net.http import HttpClient
from ckptd.base.net.signing import (
    CHALLENGE_PATH,
    FOUND_PATH,
    MAC_HEADER,
    SHEETS_PATH,
    check_answer,
    sign_request,
)
from ckptd.errors import RefusedError, StoreError, TransientStoreError
from ckptd.monitor.report import AgentOrders, EvidenceReport, NodeReport, pack, unpack_orders

_log = logging.getLogger("ckptd.monitor")
TIMEOUT_S = 5.0
_MOST_ANSWER = 8 << 20
_MOST_CHALLENGE = 256
_MOST_FOUND = 64
_LEAST_PAUSE_S = 0.25
_MOST_PAUSE_S = 5.0
_UNAUTHORIZED = 401
_GARBAGE = "the daemon's answer is invalid"


class Uplink:
    """Sends what it is given, in a thread of its own. To be closed.

    Parameters
    ----------
    url
        Of the daemon: ``http://HOST:PORT`` or https.
    secret
        The job's.
    timeout_s
        For a connection, and for an answer.

    Raises
    ------
    UsageError
        This is no such URL.
    """

    def __init__(self, url: str, secret: bytes, timeout_s: float = TIMEOUT_S) -> None:
        self._url = url
        self._http = HttpClient(
            url,
            "the daemon",
            bare=True,
            timeout_s=timeout_s,
            most_bytes=_MOST_ANSWER,
            keep=True,
            role="agent",
        )
        self._secret = secret
        self._challenge = ""
        self._report: NodeReport | None = None
        self._found: deque[EvidenceReport] = deque(maxlen=_MOST_FOUND)
        self._orders: deque[AgentOrders] = deque(maxlen=_MOST_FOUND)
        self._changed = threading.Condition()
        self._closing = False
        self._failures = 0
        self._retry_at = 0.0
        self.sent = 0
        """Messages that the daemon has taken."""
        self.taken = 0
        """Number of the last report of these."""
        self._thread = threading.Thread(target=self._run, name="ckptd-uplink", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is left, for `timeout_s` at most, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    @property
    def ready(self) -> bool:
        """Whether a report would be sent now: none is under way, and the daemon is there."""
        with self._changed:
            return self._report is None and time.monotonic() >= self._retry_at

    @property
    def away(self) -> bool:
        """Whether the last message did not arrive."""
        return self._failures > 0

    def offer(self, report: NodeReport) -> None:
        """Have a report sent; one that waits still is replaced."""
        with self._changed:
            self._report = report
            self._changed.notify_all()

    def report(self, found: EvidenceReport) -> None:
        """Have findings sent; they wait for the daemon if it is away."""
        with self._changed:
            self._found.append(found)
            self._changed.notify_all()

    def orders(self) -> list[AgentOrders]:
        """Return what the daemon has ordered since this was last asked."""
        with self._changed:
            out = list(self._orders)
            self._orders.clear()
        return out

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while (message := self._next()) is not None:
            try:
                self._deliver(message)
            except Exception as error:  # noqa: BLE001 - whatever a daemon says must not end this
                self._failed(error, message)
        self._http.close()

    def _next(self) -> NodeReport | EvidenceReport | None:
        """Return what is to be sent next; None at the end."""
        with self._changed:
            while True:
                left = self._retry_at - time.monotonic()
                if self._closing and (left > 0 or not (self._report or self._found)):
                    return None
                if left > 0:
                    self._changed.wait(left)
                elif self._report is not None:
                    return self._report
                elif self._found:
                    return self._found[0]
                else:
                    self._changed.wait()

    def _deliver(self, message: NodeReport | EvidenceReport) -> None:
        path = SHEETS_PATH if isinstance(message, NodeReport) else FOUND_PATH
        answer = self._exchange(path, pack(message))
        # An answer to findings may be empty.
        orders = unpack_orders(answer) if answer else None
        with self._changed:
            if isinstance(message, NodeReport):
                self.taken = message.number
            self._forget(message)
            if orders is not None:
                self._orders.append(orders)
        self.sent += 1
        if self._failures:
            _log.warning("the daemon at %s is reachable again", self._url)
        self._failures = 0

    def _forget(self, message: NodeReport | EvidenceReport) -> None:
        if self._report is message:
            self._report = None
        elif self._found and self._found[0] is message:
            self._found.popleft()

    def _failed(self, error: Exception, message: NodeReport | EvidenceReport) -> None:
        """Drop the report and pause, longer each time; say so once."""
        self._http.close()
        self._failures += 1
        pause = min(_LEAST_PAUSE_S * 2 ** min(self._failures - 1, 10), _MOST_PAUSE_S)
        with self._changed:
            self._report = None
            if isinstance(error, RefusedError) and isinstance(message, EvidenceReport):
                self._forget(message)  # it would be refused again and again
            # Agents of many nodes must not all come back in the same moment.
            self._retry_at = time.monotonic() + pause * random.uniform(0.5, 1.0)
        if self._failures == 1:
            _log.warning("cannot reach the daemon at %s: %s", self._url, error)

    # --- one message ----------------------------------------------------------------------------

    def _exchange(self, path: str, body: bytes) -> bytes:
        if not self._challenge:
            said = self._http.ask("GET", CHALLENGE_PATH)
            self._challenge = _challenge_of(said.body) if said.status == 200 else ""
        for again in (False, True):
            mac = sign_request(self._secret, "POST", path, self._challenge, body)
            headers = {"Content-Type": "application/msgpack", MAC_HEADER: mac}
            answer = self._http.ask("POST", path, body, headers)
            if answer.status != _UNAUTHORIZED or again:
                break
            self._challenge = _challenge_of(answer.body)  # the daemon has a new life
        if answer.status != 200:
            self._challenge = ""
            mine = 400 <= answer.status < 500 and answer.status != 408
            raise (RefusedError if mine else TransientStoreError)(
                "the daemon rejected the message",
                where=self._url,
                found=f"HTTP {answer.status}: {answer.body[:200].decode(errors='replace')}",
                hint="CKPTD_SECRET and the job's name must match the daemon's",
            )
        check_answer(answer.headers.get(MAC_HEADER), self._secret, mac, answer.body)
        return answer.body


def _challenge_of(answer: bytes) -> str:
    """Return the challenge that an answer says; one that cannot be signed with is an error."""
    try:
        said = json.loads(answer)["challenge"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StoreError(_GARBAGE, found=repr(answer[:100])) from error
    if not isinstance(said, str) or not said.isalnum() or len(said) > _MOST_CHALLENGE:
        raise StoreError(_GARBAGE, found=repr(said)[:100])
    return said
