"""Client of the Kubernetes API: requests with a deadline, and the streams of a watch.

In a pod the service account authenticates it: by its token, which is read again for every request
since it is replaced while the pod runs, and by the cluster's certificate authority.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec

from ckptd.base.net import HttpAnswer, HttpClient
from ckptd.decoding import json_decoder
from ckptd.errors import CkptdError, DeadlineError, StoreError, TransientStoreError, UsageError

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
    """The API server refused, with.

    Attributes
    ----------
    status
        Of HTTP; 410 for a watch whose place in history is gone.
    """

    def __init__(self, status: int, where: str, found: str) -> None:
        hint = {
            401: "is the service account's token mounted, and has it not expired?",
            403: "compare the Role with deploy/helm/ckptd/templates/rbac.yaml",
        }.get(status)
        super().__init__(
            "the Kubernetes API refused",
            where=where,
            found=f"{status} {found}"[:2000],
            hint=hint,
        )
        self.status = status


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
        Another scheme, or http to another machine.
    """

    def __init__(
        self,
        *,
        url: str,
        namespace: str,
        token_file: Path | None = None,
        ca_file: Path | None = None,
    ) -> None:
        parts = urlsplit(url)
        plain = parts.scheme == "http" and parts.hostname in _LOCAL
        if not plain and (parts.scheme != "https" or not parts.hostname):
            raise UsageError(
                "invalid address of a Kubernetes API",
                where=url,
                wanted="https://HOST:PORT, or http:// on this machine",
            )
        self.url, self.namespace, self._token_file = url, namespace, token_file
        self._http = HttpClient(
            url,
            "the Kubernetes API",
            most_bytes=_MOST_BYTES,
            ca_file=ca_file,
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
            No answer in `timeout_s` seconds.
        """
        end = time.monotonic() + timeout_s
        pause, why = _FIRST_PAUSE_S, "no answer"
        target = path + (f"?{urlencode(query)}" if query else "")
        raw = None if body is None else msgspec.json.encode(body)
        while (left := end - time.monotonic()) > 0:
            wait = pause
            try:
                wait_s = min(left, _ONE_REQUEST_S)
                answer = self._http.ask(method, target, raw, self._headers(), wait_s)
                if answer.status < 400:
                    return _decoded(answer.body, path)
                error = ApiError(answer.status, path, _message(answer.body))
                if answer.status not in _AGAIN:
                    raise error
                why = str(error.found)
                wait = max(pause, _retry_after(answer))
            except (OSError, TransientStoreError) as broken:
                why = str(broken.found if isinstance(broken, CkptdError) else broken)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            time.sleep(max(0.0, min(wait * (1 + random.random() / 4), end - time.monotonic())))
        raise DeadlineError(
            "the Kubernetes API did not answer in time",
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
        TransientStoreError, OSError
            The connection broke, nothing came for `idle_s` seconds, or there is no token.
        """
        target = f"{path}?{urlencode(query)}"
        with self._http.stream("GET", target, None, self._headers(), idle_s) as answer:
            if answer.status >= 400:
                raise ApiError(answer.status, path, _message(answer.whole().body))
            for line in answer.lines(_MOST_LINE):
                if line.strip():
                    yield _decoded(line, path)

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if self._token_file is not None:
            with self._token_file.open("rb") as file:
                token = file.read(_MOST_TOKEN).decode("ascii", "replace").strip()
            headers["Authorization"] = f"Bearer {token}"
        return headers


def in_cluster(folder: Path = _FOLDER) -> Api:
    """Return the API of the cluster that this pod runs in.

    Raises
    ------
    UsageError
        This is no pod, or it has no service account.
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
            "this process does not run in a pod with a service account",
            where=str(folder),
            wanted="KUBERNETES_SERVICE_HOST, and token, ca.crt and namespace in that folder",
            hint="automountServiceAccountToken: true, and serviceAccountName as in"
            " deploy/helm/ckptd/templates/rbac.yaml",
        )
    shown = f"[{host}]" if ":" in host else host
    return Api(
        url=f"https://{shown}:{port}",
        namespace=namespace,
        token_file=folder / "token",
        ca_file=folder / "ca.crt",
    )


def _decoded(raw: bytes, where: str) -> Json:
    try:
        return _documents.decode(raw)
    except msgspec.MsgspecError as error:
        raise StoreError(
            "the Kubernetes API answers something else than an object of JSON",
            where=where,
            found=raw[:200].decode("utf-8", "replace"),
        ) from error


def _message(raw: bytes) -> str:
    """Return what a Status says, or the beginning of whatever came."""
    try:
        found = _documents.decode(raw)
    except msgspec.MsgspecError:
        return raw[:200].decode("utf-8", "replace")
    return f"{found.get('reason', '')}: {found.get('message', '')}"


def _retry_after(answer: HttpAnswer) -> float:
    text = answer.headers.get("Retry-After", "")
    return min(float(text), 30.0) if text.isdigit() else 0.0
