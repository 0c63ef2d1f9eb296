"""Objects of a kind as the API server has them now, kept by a list and a watch after it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

from ckptd.errors import CkptdError
from ckptd_kubernetes.api import Api, ApiError, Json

__all__ = ["Watch"]

_log = logging.getLogger("ckptd.elastic")
_LIST_S = 10.0
_GONE = 410
_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 5.0
_LASTED_S = 1.0
"""A request that was open for so long was worth it: the next one follows at once."""
_MOST = 20_000
"""Objects that are kept: no job has more pods, no cluster more nodes."""


class Watch:
    """A thread that lists once and follows from there.

    A watch that the server ends goes on where it was. When that place in history is gone
    (410), everything is listed again. Whatever fails is tried again, a little later each time.

    Parameters
    ----------
    api
        The server.
    path
        Of the objects.
    query
        What narrows them: ``labelSelector``.
    round_s
        How long the server is asked to keep one request open; what breaks unseen is noticed within
        twice that.

    Attributes
    ----------
    failure
        Why it cannot be followed now; None while it can.
    lists
        How often everything was listed.
    """

    def __init__(
        self, api: Api, path: str, query: Mapping[str, str], *, round_s: float = 60.0
    ) -> None:
        self._api = api
        self._path = path
        self._query = dict(query)
        self._round_s = round_s
        self._lock = threading.Lock()
        self._objects: dict[str, Json] = {}
        self._tried = threading.Event()
        self._stop = threading.Event()
        self.failure: CkptdError | OSError | None = None
        self.lists = 0
        self._thread = threading.Thread(target=self._run, name="ckptd-kube-watch", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the first list, or for the first failure; return whether there is a list."""
        self._tried.wait(timeout_s)
        return self.lists > 0

    def objects(self) -> list[Json]:
        """Return what is known now; empty before the first list."""
        with self._lock:
            return list(self._objects.values())

    def close(self) -> None:
        """End it; the thread itself ends with its request. Idempotent."""
        self._stop.set()

    def _run(self) -> None:
        version, pause = "", _FIRST_PAUSE_S
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                version = version or self._list()
                version = self._follow(version)
                self.failure = None
            except ApiError as error:
                version = "" if error.status == _GONE else version
                self._failed(error)
            except (CkptdError, OSError) as error:
                self._failed(error)
            lasted = time.monotonic() - began >= _LASTED_S
            pause = _FIRST_PAUSE_S if lasted else pause
            if self.failure is not None or not lasted:
                # Also after a good end: a proxy may end each request at once, for as long as it is.
                self._stop.wait(pause)
                pause = min(2 * pause, _LAST_PAUSE_S)

    def _failed(self, error: CkptdError | OSError) -> None:
        if self.failure is None and not (isinstance(error, ApiError) and error.status == _GONE):
            _log.warning("%s cannot be watched for now: %s", self._path, error)
        self.failure = error
        self._tried.set()

    def _list(self) -> str:
        """List everything, and return the version from which a watch goes on."""
        found: dict[str, Json] = {}
        query, version = {**self._query, "limit": "500"}, ""
        while True:
            page = self._api.call("GET", self._path, _LIST_S, query=query)
            found |= {_uid(item): item for item in page.get("items") or () if _uid(item)}
            meta = page.get("metadata") or {}
            version = str(meta.get("resourceVersion") or "")
            if not meta.get("continue") or len(found) > _MOST:
                break
            query["continue"] = str(meta["continue"])
        with self._lock:
            self._objects = found
        self.lists += 1
        self.failure = None
        self._tried.set()
        return version

    def _follow(self, version: str) -> str:
        query = {
            **self._query,
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, round(self._round_s))),
        }
        for event in self._api.stream(self._path, query, 2 * self._round_s):
            if self._stop.is_set():
                break
            version = self._take(event) or version
        return version

    def _take(self, event: Json) -> str:
        """Take one event in, and return its version."""
        kind, item = event.get("type"), event.get("object")
        if not isinstance(item, dict):
            return ""
        if kind == "ERROR":
            status = item.get("code")
            code = status if isinstance(status, int) else 500
            raise ApiError(code, self._path, str(item.get("message", "")))
        uid = _uid(item)
        with self._lock:
            if kind == "DELETED":
                self._objects.pop(uid, None)
            elif kind in ("ADDED", "MODIFIED") and uid:
                self._objects[uid] = item
        return str((item.get("metadata") or {}).get("resourceVersion") or "")


def _uid(item: Json) -> str:
    meta = item.get("metadata")
    return str(meta.get("uid") or "") if isinstance(meta, dict) else ""
