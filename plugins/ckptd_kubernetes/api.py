"""A small client of the Kubernetes API: requests, and streams of a watch, over plain http.client.

In a pod it is let in by the service account: its token, which is read again for every request since
it is replaced while the pod runs, and the cluster's certificate authority.
"""

from __future__ import annotations

import http.client
import os
import random
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec

from ckptd.decoding import json_decoder
from ckptd.errors import DeadlineError, StoreError, UsageError

__all__ = ["Api", "ApiError", "Json", "in_cluster"]

Json = dict[str, Any]

_documents = json_decoder(Json)

_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_MOST_BYTES = 64 << 20
_MOST_LINE = 4 << 20
_MOST_TOKEN = 64 << 10
_ONE_REQUEST_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_AGAIN = (429, 500, 502, 503, 504)
_LOCAL = ("127.0.0.1", "localhost", "::1")


class ApiError(StoreError):
    """The API server refused, with kind ``scheduler``.

    Attributes
    ----------
    status
        Of HTTP; 410 for a watch whose place in history is gone.
    """

    def __init__(self, status: int, where: str, found: str) -> None:
        hint = {
            401: "is the service account's token mounted, and has it not expired?",
            403: "compare the Role with docs/examples/kubernetes/rbac.yaml",
        }.get(status)
        super().__init__(
            "the Kubernetes API refused",
            kind="scheduler",
            where=where,
            found=f"{status} {found}"[:2000],
            hint=hint,
        )
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Api:
    """Where the API server is, and how it lets us in. Thread-safe: a connection for each request.

    Parameters
    ----------
    url
        ``https://host:port``; ``http://`` only on this machine, as of ``kubectl proxy``.
    namespace
        Where the job's pods are.
    token_file
        Read for every request; None sends no token.
    ca_file
        Certificates that the server's must be signed by; None for those of the system.

    Raises
    ------
    UsageError
        kind ``bad-url``: another scheme, or http to another machine.
    """

    url: str
    namespace: str
    token_file: Path | None = None
    ca_file: Path | None = None
    _context: list[ssl.SSLContext] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        plain = parts.scheme == "http" and parts.hostname in _LOCAL
        if not plain and (parts.scheme != "https" or not parts.hostname):
            raise UsageError(
                "this is no address of a Kubernetes API",
                kind="bad-url",
                where=self.url,
                wanted="https://HOST:PORT, or http:// on this machine",
            )

    def pods(self, name: str = "") -> str:
        """Return the path of the namespace's pods, or of one."""
        return self.path("pods", name)

    def path(self, kind: str, name: str = "") -> str:
        """Return the path of the namespace's objects of a kind of core/v1, or of one."""
        found = f"/api/v1/namespaces/{self.namespace}/{kind}"
        return f"{found}/{name}" if name else found

    def call(
        self,
        method: str,
        path: str,
        timeout_s: float,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
    ) -> Json:
        """Return the answer to one request.

        It is repeated when the server is busy (429, as long as it says) or cannot be reached.

        Raises
        ------
        ApiError
            It refused.
        DeadlineError
            kind ``scheduler-time-out``: no answer in `timeout_s` seconds.
        """
        end = time.monotonic() + timeout_s
        pause, why = _FIRST_PAUSE_S, "no answer"
        target = path + (f"?{urlencode(query)}" if query else "")
        while (left := end - time.monotonic()) > 0:
            wait = pause
            try:
                with self._answer(method, target, min(left, _ONE_REQUEST_S), body) as answer:
                    raw = _read(answer, path)
                    if answer.status < 400:
                        return _decoded(raw, path)
                    error = ApiError(answer.status, path, _message(raw))
                    if answer.status not in _AGAIN:
                        raise error
                    why = str(error.found)
                    wait = max(pause, _retry_after(answer))
            except (OSError, http.client.HTTPException) as broken:
                why = f"{type(broken).__name__}: {broken}"
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            time.sleep(max(0.0, min(wait * (1 + random.random() / 4), end - time.monotonic())))
        raise DeadlineError(
            "the Kubernetes API did not answer in time",
            kind="scheduler-time-out",
            where=f"{self.url}{path}",
            wanted=f"an answer within {timeout_s:.3g} s",
            found=why,
        )

    def stream(self, path: str, query: Mapping[str, str], idle_s: float) -> Iterator[Json]:
        """Yield the events of a watch until the server ends it.

        Raises
        ------
        ApiError
            It refused; 410: the place in history that `query` names is gone.
        OSError, http.client.HTTPException
            The connection broke, or nothing came for `idle_s` seconds.
        """
        with self._answer("GET", f"{path}?{urlencode(query)}", idle_s, None) as answer:
            if answer.status >= 400:
                raise ApiError(answer.status, path, _message(_read(answer, path)))
            while line := answer.readline(_MOST_LINE + 1):
                if len(line) > _MOST_LINE:
                    raise _too_large(path, _MOST_LINE)
                if line.strip():
                    yield _decoded(line, path)

    @contextmanager
    def _answer(
        self, method: str, target: str, timeout_s: float, body: Json | None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connection(timeout_s)
        try:
            headers = {"Accept": "application/json", **self._bearer()}
            raw = None
            if body is not None:
                raw = msgspec.json.encode(body)
                headers["Content-Type"] = "application/json"
            connection.request(method, target, raw, headers)
            with connection.getresponse() as answer:
                yield answer
        finally:
            connection.close()

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        if parts.scheme == "http":
            return http.client.HTTPConnection(host, parts.port, timeout=timeout_s)
        if not self._context:
            self._context.append(ssl.create_default_context(cafile=self.ca_file))
        return http.client.HTTPSConnection(
            host, parts.port, timeout=timeout_s, context=self._context[0]
        )

    def _bearer(self) -> dict[str, str]:
        if self.token_file is None:
            return {}
        with self.token_file.open("rb") as file:
            token = file.read(_MOST_TOKEN).decode("ascii", "replace").strip()
        return {"Authorization": f"Bearer {token}"}


def in_cluster(folder: Path = _FOLDER) -> Api:
    """Return the API of the cluster that this pod runs in.

    Raises
    ------
    UsageError
        kind ``no-cluster``: this is no pod, or it has no service account.
    """
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    port = os.environ.get("KUBERNETES_SERVICE_PORT_HTTPS") or os.environ.get(
        "KUBERNETES_SERVICE_PORT", "443"
    )
    try:
        namespace = (folder / "namespace").read_text().strip()
        there = (folder / "token").exists() and (folder / "ca.crt").exists()
    except OSError:
        namespace, there = "", False
    if not (host and namespace and there):
        raise UsageError(
            "this process is in no pod with a service account",
            kind="no-cluster",
            where=str(folder),
            wanted="KUBERNETES_SERVICE_HOST, and token, ca.crt and namespace in that folder",
            hint="automountServiceAccountToken: true, and serviceAccountName as in"
            " docs/examples/kubernetes/rbac.yaml",
        )
    shown = f"[{host}]" if ":" in host else host
    return Api(
        url=f"https://{shown}:{port}",
        namespace=namespace,
        token_file=folder / "token",
        ca_file=folder / "ca.crt",
    )


def _read(answer: http.client.HTTPResponse, where: str) -> bytes:
    raw = answer.read(_MOST_BYTES + 1)
    if len(raw) > _MOST_BYTES:
        raise _too_large(where, _MOST_BYTES)
    return raw


def _too_large(where: str, most: int) -> StoreError:
    return StoreError(
        "the Kubernetes API answers more than is taken",
        kind="scheduler",
        where=where,
        wanted=f"at most {most} bytes",
    )


def _decoded(raw: bytes, where: str) -> Json:
    try:
        return _documents.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(
            "the Kubernetes API answers something else than an object of JSON",
            kind="scheduler",
            where=where,
            found=raw[:200].decode("utf-8", "replace"),
        ) from error


def _message(raw: bytes) -> str:
    """Return what a Status says, or the beginning of whatever came."""
    try:
        found = _documents.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return raw[:200].decode("utf-8", "replace")
    return f"{found.get('reason', '')}: {found.get('message', '')}"


def _retry_after(answer: http.client.HTTPResponse) -> float:
    text = answer.getheader("Retry-After", "") or ""
    return min(float(text), 30.0) if text.isdigit() else 0.0
