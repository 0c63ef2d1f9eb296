"""`FakeKube`: enough of the Kubernetes API over real HTTP, with pods that really run.

Lists with pages, watches with their history and its end, deletion with grace and preconditions,
tokens, and answers that say "later". What runs a pod is this machine (`Kubelet`).
"""

from __future__ import annotations

import copy
import json
import ssl
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from tests.httpserver import HttpServer
from tests.plugins.kubernetes.fakekubelet import Kubelet

__all__ = ["FakeKube"]

Json = dict[str, Any]

_KINDS = {"pods": "Pod", "podtemplates": "PodTemplate", "nodes": "Node"}
_LOOK_S = 0.2


class Refused(Exception):
    """An answer that is no success."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason

    def status(self) -> Json:
        """Return it as the API says it."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "reason": self.reason,
            "message": f"the fake says {self.reason}",
            "code": self.code,
        }


class FakeKube:
    """A cluster; close it, or use it as a context.

    Parameters
    ----------
    machines
        Names of its nodes.
    token
        What requests must carry; None asks for none.
    tls
        Certificate and key, as files.
    second_s
        How long a second of grace takes here.
    nodes_allowed
        Whether nodes may be read: a Role alone does not allow it.

    Attributes
    ----------
    token
        What is asked for now.
    busy
        So many more requests are answered with 429.
    gone_as_status
        How the end of history is told: by HTTP's 410, or by an event.
    page
        Most objects of one answer.
    requests
        Methods and paths that came.
    recreate
        Whether a Job makes deleted pods anew.
    deaf
        Whether pods go on after TERM, until they are killed.
    answer_s
        After how long questions are answered.
    """

    def __init__(
        self,
        machines: Sequence[str] = ("m0", "m1", "m2"),
        *,
        token: str | None = None,
        tls: tuple[Path, Path] | None = None,
        second_s: float = 0.02,
        nodes_allowed: bool = True,
    ) -> None:
        self.token = token
        self.busy = 0
        self.gone_as_status = False
        self.page = 500
        self.requests: list[tuple[str, str]] = []
        self.recreate = False
        self.deaf = False
        self.answer_s = 0.0
        self.nodes_allowed = nodes_allowed
        self._second_s = second_s
        self._changed = threading.Condition(threading.RLock())
        self._objects: dict[tuple[str, str], Json] = {}
        self._history: list[tuple[int, str, str, Json]] = []
        self._version = self._oldest = 1
        self._round = 0
        self._closing = False
        self._kubelet = Kubelet(self._ended)
        for name in machines:
            ready = {"type": "Ready", "status": "True"}
            self.put("nodes", {"metadata": {"name": name}, "status": {"conditions": [ready]}})
        self._server = HttpServer(("127.0.0.1", 0), _handler(self))
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._scheme = "http" if tls is None else "https"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"{self._scheme}://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """End all pods, and stop listening. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._kubelet.close()
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what a test does to the cluster -----------------------------------------------------------

    def put(self, kind: str, item: Json) -> Json:
        """Create an object, or replace one; return it as it is kept."""
        with self._changed:
            name = item["metadata"]["name"]
            old = self._objects.get((kind, name))
            uid = old["metadata"]["uid"] if old else str(uuid.uuid4())
            kept = copy.deepcopy(item)
            kept["kind"] = _KINDS[kind]
            kept["metadata"].setdefault("uid", uid)
            self._objects[kind, name] = kept
            self._tell(kind, "MODIFIED" if old else "ADDED", kept)
            return copy.deepcopy(kept)

    def get(self, kind: str, name: str) -> Json | None:
        """Return an object as it is now."""
        with self._changed:
            return copy.deepcopy(self._objects.get((kind, name)))

    def names(self, kind: str) -> list[str]:
        """Return the names of all objects of a kind."""
        with self._changed:
            return sorted(name for k, name in self._objects if k == kind)

    def change(self, kind: str, name: str, part: str, **fields: Any) -> None:
        """Set fields of ``spec``, ``status`` or ``metadata`` of an object."""
        with self._changed:
            item = copy.deepcopy(self._objects[kind, name])
            item.setdefault(part, {}).update(fields)
            self.put(kind, item)

    def create(self, pod: Json) -> Json:
        """Create a pod and run it, as the API does for a request."""
        with self._changed:
            name = pod["metadata"]["name"]
            if ("pods", name) in self._objects:
                raise Refused(409, "AlreadyExists")
            machine = self._machine_for(pod)
            made = copy.deepcopy(pod)
            if machine is None:
                waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
                made["status"] = {"phase": "Pending", "conditions": [waits]}
                return self.put("pods", made)
            made["spec"]["nodeName"] = machine
            made["status"] = {"phase": "Running"}
            kept = self.put("pods", made)
            self._kubelet.run(kept)
            return kept

    def delete(self, name: str, grace: float = 30.0, uid: str | None = None) -> Json:
        """Delete a pod, after its grace: the server's own way, and everybody else's."""
        with self._changed:
            pod = self._objects.get(("pods", name))
            if pod is None:
                raise Refused(404, "NotFound")
            if uid is not None and pod["metadata"]["uid"] != uid:
                raise Refused(409, "Conflict")
            end = datetime.fromtimestamp(time.time() + grace, UTC)
            stamp = end.isoformat(timespec="seconds").replace("+00:00", "Z")
            self.change("pods", name, "metadata", deletionTimestamp=stamp)
            found = pod["metadata"]["uid"]
        args = (name, found, grace * self._second_s)
        threading.Thread(target=self._remove, args=args, daemon=True).start()
        return pod

    def forget_history(self) -> None:
        """Forget what changed until now, and end all watches: who comes back is told 410."""
        with self._changed:
            self._version += 1
            self._oldest = self._version
            self._history.clear()
            self.cut_watches()

    def cut_watches(self) -> None:
        """End the watches that are open."""
        with self._changed:
            self._round += 1
            self._changed.notify_all()

    # -- inside ------------------------------------------------------------------------------------

    def _tell(self, kind: str, event: str, item: Json) -> None:
        self._version += 1
        item["metadata"]["resourceVersion"] = str(self._version)
        self._history.append((self._version, kind, event, copy.deepcopy(item)))
        self._changed.notify_all()

    def _machine_for(self, pod: Json) -> str | None:
        affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
        terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
        fields = [f for t in terms.get("nodeSelectorTerms") or () for f in t.get("matchFields", ())]
        avoided = {v for f in fields if f["operator"] == "NotIn" for v in f["values"]}
        items = [i for (kind, _), i in self._objects.items() if kind == "nodes"]
        free = {i["metadata"]["name"] for i in items if not (i.get("spec") or {}).get("taints")}
        used = [i["spec"].get("nodeName") for (k, _), i in self._objects.items() if k == "pods"]
        return min(free - avoided, key=lambda m: (used.count(m), m), default=None)

    def _ended(self, uid: str, code: int) -> None:
        with self._changed:
            for (kind, name), item in list(self._objects.items()):
                if kind == "pods" and item["metadata"]["uid"] == uid:
                    ended = [{"name": "x", "state": {"terminated": {"exitCode": code}}}]
                    phase = "Failed" if code else "Succeeded"
                    self.change("pods", name, "status", phase=phase, containerStatuses=ended)

    def _remove(self, name: str, uid: str, after_s: float) -> None:
        while not self._reached(name):
            time.sleep(_LOOK_S)
        if not self.deaf:
            self._kubelet.ask(uid)
        time.sleep(after_s)
        self._kubelet.kill(uid)
        with self._changed:
            pod = self._objects.get(("pods", name))
            if pod is None or pod["metadata"]["uid"] != uid or self._closing:
                return
            del self._objects["pods", name]
            self._tell("pods", "DELETED", copy.deepcopy(pod))
            if self.recreate:
                self._make_anew(pod)

    def _reached(self, name: str) -> bool:
        """Whether the machine of a pod answers: a deletion waits for it."""
        with self._changed:
            pod = self._objects.get(("pods", name)) or {}
            machine = self._objects.get(("nodes", pod.get("spec", {}).get("nodeName", ""))) or {}
            said = machine.get("status", {}).get("conditions") or ()
            silent = any(c["type"] == "Ready" and c["status"] != "True" for c in said)
            return self._closing or not silent

    def _make_anew(self, pod: Json) -> None:
        meta = {k: v for k, v in pod["metadata"].items() if k in ("labels", "ownerReferences")}
        meta["name"] = f"{pod['spec']['hostname']}-{uuid.uuid4().hex[:5]}"
        spec = {k: v for k, v in pod["spec"].items() if k != "nodeName"}
        self.create({"metadata": meta, "spec": spec})

    # -- what requests ask for ---------------------------------------------------------------------

    def check(self, method: str, path: str, bearer: str | None) -> None:
        """Let a request in or not."""
        with self._changed:
            self.requests.append((method, path))
            if self.busy > 0:
                self.busy -= 1
                raise Refused(429, "TooManyRequests")
            if self.token is not None and bearer != f"Bearer {self.token}":
                raise Refused(401, "Unauthorized")
            if path.startswith("/api/v1/nodes") and not self.nodes_allowed:
                raise Refused(403, "Forbidden")

    def listed(self, kind: str, query: dict[str, str]) -> Json:
        """Return a page of a list."""
        with self._changed:
            chosen = sorted(n for k, n in self._objects if k == kind)
            items = [self._objects[kind, n] for n in chosen if n > query.get("continue", "")]
            items = [i for i in items if _selected(i, query)]
            size = min(self.page, int(query.get("limit", self.page)))
            meta = {"resourceVersion": str(self._version)}
            if len(items) > size:
                meta["continue"] = items[size - 1]["metadata"]["name"]
            return {"kind": "List", "metadata": meta, "items": copy.deepcopy(items[:size])}

    def watched(self, kind: str, query: dict[str, str]) -> Iterator[Json | None]:
        """Yield events from a version on, and None where the connection is looked at."""
        at, end = int(query["resourceVersion"]), time.monotonic() + int(query["timeoutSeconds"])
        with self._changed:
            this = self._round
            if at < self._oldest:
                if self.gone_as_status:
                    raise Refused(410, "Expired")
                yield {"type": "ERROR", "object": Refused(410, "Expired").status()}
                return
        while time.monotonic() < end:
            with self._changed:
                fresh = [e for e in self._history if e[0] > at]
                if not fresh:
                    self._changed.wait(_LOOK_S)
                if self._closing or self._round != this:
                    return
            for version, of, event, item in fresh:
                at = version
                if of == kind and _selected(item, query):
                    yield {"type": event, "object": item}
            yield None
        meta = {"resourceVersion": str(at)}
        yield {"type": "BOOKMARK", "object": {"kind": _KINDS[kind], "metadata": meta}}


def _selected(item: Json, query: dict[str, str]) -> bool:
    labels = item["metadata"].get("labels") or {}
    pairs = [p.partition("=") for p in query.get("labelSelector", "").split(",") if p]
    return all(labels.get(key) == value for key, _, value in pairs)


def _handler(kube: FakeKube) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

        def _serve(self) -> None:
            parts = urlsplit(self.path)
            query = {k: v[-1] for k, v in parse_qs(parts.query).items()}
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else {}
            time.sleep(kube.answer_s)
            try:
                kube.check(self.command, parts.path, self.headers.get("Authorization"))
                kind, name = _named(parts.path)
                if self.command == "GET" and "watch" in query:
                    self._stream(kube.watched(kind, query))
                else:
                    self._answer(200, self._do(kind, name, query, body))
            except Refused as refused:
                self._answer(refused.code, refused.status())

        def _do(self, kind: str, name: str, query: dict[str, str], body: Json) -> Json:
            match self.command:
                case "GET" if not name:
                    return kube.listed(kind, query)
                case "POST" if kind == "pods":
                    return kube.create(body)
                case "DELETE" if kind == "pods":
                    uid = (body.get("preconditions") or {}).get("uid")
                    return kube.delete(name, body.get("gracePeriodSeconds", 30), uid)
                case "GET":
                    found = kube.get(kind, name)
                    if found is None:
                        raise Refused(404, "NotFound")
                    return found
            raise Refused(405, "MethodNotAllowed")

        def _answer(self, code: int, body: Json) -> None:
            raw = json.dumps(body).encode()
            self.send_response(code)
            if code == 429:
                self.send_header("Retry-After", "0")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def _stream(self, events: Iterator[Json | None]) -> None:
            first = next(events, None)  # a refusal must come before the header
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                self._chunk(first)
                for event in events:
                    self._chunk(event)
                self.wfile.write(b"0\r\n\r\n")
            except OSError:
                self.close_connection = True

        def _chunk(self, event: Json | None) -> None:
            if event is not None:
                raw = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(raw), raw))
                self.wfile.flush()

        do_GET = do_POST = do_DELETE = _serve

    return Handler


def _named(path: str) -> tuple[str, str]:
    parts = path.strip("/").split("/")
    rest = parts[4:] if parts[2:3] == ["namespaces"] else parts[2:]
    if parts[:2] != ["api", "v1"] or not rest or rest[0] not in _KINDS or len(rest) > 2:
        raise Refused(404, "NotFound")
    return rest[0], rest[1] if len(rest) == 2 else ""
