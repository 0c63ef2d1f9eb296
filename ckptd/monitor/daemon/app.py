"""HTTP API version 1: routes and their handlers, limits of requests, the page's files."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from ckptd.base.net.signing import CHALLENGE_PATH, FOUND_PATH, SHEETS_PATH
from ckptd.decoding import json_decoder
from ckptd.errors import CkptdError, NotFoundError, UsageError
from ckptd.monitor.daemon.access import LOGIN_PATH, Access, Guard
from ckptd.monitor.daemon.acts import ActsLog
from ckptd.monitor.daemon.bodies import document, read_body, refusal
from ckptd.monitor.daemon.controller import order_of
from ckptd.monitor.daemon.documents import (
    AnswerDocument,
    CallsDocument,
    ElasticDocument,
    IncidentListDocument,
    LinksDocument,
    RankDocument,
)
from ckptd.monitor.daemon.history import SERIES, jobs_beside, read_series
from ckptd.monitor.daemon.live import Streaming
from ckptd.monitor.daemon.metrics import exposition
from ckptd.monitor.daemon.service import Service, page_folder
from ckptd.monitor.daemon.trace import chrome_trace, parse_ranks, recent_calls
from ckptd.monitor.stats import Array

_objects = json_decoder(dict[str, Any])

V1 = "/api/v1"
_SMALL_BODY = 16 << 10
_MOST_NOTE = 2000
_ANSWER_S = 30.0

Endpoint = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")


class _Whole(IntegerConvertor):
    """Numbers in a path; of thousands of digits Python makes none."""

    regex = "[0-9]{1,18}"


register_url_convertor("whole", _Whole())


class DaemonApi:
    """Endpoints for people and scripts.

    Parameters
    ----------
    service
        The daemon.
    access
        Checks of logins and tokens.
    """

    def __init__(self, service: Service, access: Access) -> None:
        self._service = service
        self._access = access

    def routes(self) -> list[BaseRoute]:
        """Return all routes but the page's."""
        s = self._service
        gets: Mapping[str, Endpoint] = {
            "/job": self._job,
            "/ranks": self._ranks,
            "/ranks/{rank:whole}": self._rank,
            "/links": self._links,
            "/collectives": self._collectives,
            "/trace": self._trace,
            "/checkpoints": self._checkpoints,
            "/incidents": self._incidents,
            "/incidents/{ident}": self._incident,
            "/elastic": self._elastic,
            "/history": self._history,
            "/jobs": self._jobs,
            "/stream": self._stream,
            "/recording": self._recording,
        }
        posts: Mapping[str, Endpoint] = {
            f"{V1}/incidents/{{ident}}/ack": self._acknowledge,
            f"{V1}/incidents/{{ident}}/enforce": self._enforce,
            f"{V1}/ranks/{{rank:whole}}/look": self._look,
            f"{V1}/elastic/orders": self._order,
            LOGIN_PATH: self._login,
            SHEETS_PATH: s.ingest.sheets,
            FOUND_PATH: s.ingest.found,
        }
        return [
            *(Route(V1 + path, _answering(end), methods=["GET"]) for path, end in gets.items()),
            *(Route(path, _answering(end), methods=["POST"]) for path, end in posts.items()),
            Route(CHALLENGE_PATH, s.ingest.tell_challenge, methods=["GET"]),
            Route("/metrics", _answering(self._metrics), methods=["GET"]),
            Route("/healthz", self._health, methods=["GET"]),
            Route("/", self._front, methods=["GET"]),
        ]

    # -- the job ----------------------------------------------------------------------------------

    async def _job(self, request: Request) -> Response:
        s = self._service
        return document(s.job_document(s.rounds.last))

    async def _ranks(self, request: Request) -> Response:
        since = _number(request, "since", None, 0, 1 << 53)
        whole = None if since is None else int(since)
        return document(await run_in_threadpool(self._service.ranks_document, whole))

    async def _rank(self, request: Request) -> Response:
        rank = int(request.path_params["rank"])
        return document(await run_in_threadpool(self._rank_document, rank))

    def _rank_document(self, rank: int) -> RankDocument:
        s = self._service
        found = RankDocument.of(s.rounds.last, rank, s.names, s.usage.get(rank), s.evidence)
        if found is None:
            raise NotFoundError("unknown rank", where=str(rank))
        return found

    async def _look(self, request: Request) -> Response:
        rank = int(request.path_params["rank"])
        found = await run_in_threadpool(self._rank_document, rank)
        async with asyncio.timeout(_ANSWER_S):
            await asyncio.wrap_future(self._service.look(rank))
        return document(found)

    async def _links(self, request: Request) -> Response:
        return document(LinksDocument.of(self._service.rounds.last))

    async def _elastic(self, request: Request) -> Response:
        s = self._service
        now, old = s.controller_document(), s.generations.all()
        found = ElasticDocument(generations=old, controller=now.controller, status=now.status)
        return document(found)

    async def _order(self, request: Request) -> Response:
        order = order_of(await _json_body(request))
        answer = await run_in_threadpool(self._service.order, order)
        return document(AnswerDocument.of(answer), 200 if answer.ok else 409)

    async def _checkpoints(self, request: Request) -> Response:
        return document(await run_in_threadpool(self._service.checkpoints.document))

    async def _history(self, request: Request) -> Response:
        what = request.query_params.get("what", "step")
        names = what.split(",")
        if not set(names) <= set(SERIES) or len(names) > len(SERIES):
            raise _bad("what", ", ".join(SERIES), what)
        now = time.time()
        until = _number(request, "until", None, 0, 1e12)
        seconds = _number(request, "seconds", 3600, 1, 4e8) or 0.0
        points = int(_number(request, "points", 1000, 1, 10_000) or 1)
        since = (now if until is None else until) - seconds
        series = await run_in_threadpool(
            self._series_of(request.query_params.get("job")), names, since, until or now, points
        )
        return document({"what": what, "now": now, **series})

    def _series_of(self, job: str | None) -> Callable[..., dict[str, list[float | None]]]:
        """Return what reads the series of this job, or of one whose history lies beside its own."""
        history = self._service.history
        if job is None or job == self._service.setup.job:
            return history.series
        path = jobs_beside(history.path).get(job)
        if path is None:
            raise NotFoundError("no history of that job is here", where=job[:100])
        return functools.partial(read_series, path)

    async def _jobs(self, request: Request) -> Response:
        s = self._service
        others = await run_in_threadpool(jobs_beside, s.history.path)
        return document({"jobs": [s.setup.job, *sorted(set(others) - {s.setup.job})]})

    # -- calls ------------------------------------------------------------------------------------

    async def _collectives(self, request: Request) -> Response:
        seconds = _number(request, "seconds", 10, 0.1, 3600) or 0.0
        limit = int(_number(request, "limit", 5000, 1, 100_000) or 1)
        ranks = self._ranks_asked(request)
        return document(await run_in_threadpool(self._timeline, ranks, seconds, limit))

    def _timeline(self, ranks: Array, seconds: float, limit: int) -> CallsDocument:
        s = self._service
        now, epoch = time.monotonic(), time.time() - time.monotonic()
        calls = recent_calls(s.tape.since(now - seconds), ranks, now - seconds)
        return CallsDocument.of(calls, s.names, now=now + epoch, epoch=epoch, limit=limit)

    async def _trace(self, request: Request) -> Response:
        seconds = _number(request, "seconds", 30, 0.1, 3600) or 0.0
        ranks = self._ranks_asked(request)
        body = await run_in_threadpool(self._trace_document, ranks, seconds)
        answer = document(body)
        answer.headers["content-disposition"] = 'attachment; filename="trace.json"'
        return answer

    def _trace_document(self, ranks: Array, seconds: float) -> dict[str, Any]:
        s = self._service
        now = time.monotonic()
        calls = recent_calls(s.tape.since(now - seconds), ranks, now - seconds)
        with s.rounds.ranks_lock:
            table, nodes = s.rounds.ranks.rows, list(s.rounds.ranks.nodes)
        where = {int(r["rank"]): nodes[r["node"]] for r in table}
        return chrome_trace(calls, s.names, where, now)

    def _ranks_asked(self, request: Request) -> Array:
        text = request.query_params.get("ranks")
        if text:
            return parse_ranks(text)
        known: Array = self._service.rounds.ranks.rows["rank"]
        return known[:64]

    async def _recording(self, request: Request) -> Response:
        seconds = _number(request, "seconds", 600, 1, 86400) or 0.0
        body = await run_in_threadpool(self._service.recording, seconds)
        headers = {"content-disposition": 'attachment; filename="job.recording"'}
        return Response(body, 200, headers, "application/octet-stream")

    # -- incidents --------------------------------------------------------------------------------

    async def _incidents(self, request: Request) -> Response:
        state = request.query_params.get("state") or None
        if state not in (None, "open", "closed"):
            raise _bad("state", "open or closed", str(state))
        limit = int(_number(request, "limit", 100, 1, 1000) or 1)
        before = _number(request, "before", None, 0, 1e12)
        s = self._service
        found = await run_in_threadpool(s.incidents, state, before, limit)
        return document(IncidentListDocument([s.shown(i) for i in found]))

    async def _incident(self, request: Request) -> Response:
        s = self._service
        found = await run_in_threadpool(s.incident, request.path_params["ident"])
        return document(s.shown(found, evidence=True))

    async def _acknowledge(self, request: Request) -> Response:
        body = await _json_body(request)
        note = body.get("note", "")
        if not isinstance(note, str) or len(note) > _MOST_NOTE:
            raise _bad("note", f"text of at most {_MOST_NOTE} characters", "something else")
        future = self._service.acknowledge(request.path_params["ident"], note)
        async with asyncio.timeout(_ANSWER_S):
            incident = await asyncio.wrap_future(future)
        return document(self._service.shown(incident))

    async def _enforce(self, request: Request) -> Response:
        ident = request.path_params["ident"]
        answer = await run_in_threadpool(self._service.enforce, ident)
        return document(AnswerDocument.of(answer), 200 if answer.ok else 409)

    # -- the rest ---------------------------------------------------------------------------------

    async def _stream(self, request: Request) -> Response:
        return Streaming(self._service.hub, request, self._service.first_events)

    async def _metrics(self, request: Request) -> Response:
        body, media = await run_in_threadpool(exposition, self._service)
        return Response(body, 200, {"cache-control": "no-store", "content-type": media})

    async def _health(self, request: Request) -> Response:
        alive = self._service.rounds.alive
        return document({"healthy": alive}, 200 if alive else 503)

    async def _login(self, request: Request) -> Response:
        token = (await _json_body(request)).get("token")
        shown = self._access.of_token(token) if isinstance(token, str) else None
        if shown is None:
            return document({"error": {"kind": "no-token", "message": "the token is wrong"}}, 401)
        answer = document({"job": self._service.setup.job})
        self._access.admit(answer, request, shown)
        return answer

    async def _front(self, request: Request) -> Response:
        token = request.query_params.get("token")
        if token is None:
            page = await StaticFiles(directory=page_folder()).get_response(
                "index.html", request.scope
            )
            page.headers["cache-control"] = "no-cache"
            return page
        # The token leaves the address line, and with it the history of the browser.
        answer = RedirectResponse("/", 303)
        if (shown := self._access.of_token(token)) is not None:
            self._access.admit(answer, request, shown)
        return answer


class _Page(StaticFiles):
    """Files of the page; asked for again at each visit, as an update may have changed them."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        answer = super().file_response(*args, **kwargs)
        answer.headers["cache-control"] = "no-cache"
        return answer


def make_app(service: Service, access: Access) -> ASGIApp:
    """Return the whole application behind its access checks."""
    routes = DaemonApi(service, access).routes()
    app = Starlette(
        routes=[*routes, Mount("/", _Page(directory=page_folder()))],
        exception_handlers={HTTPException: _plain_error},
    )
    return Guard(app, access, ActsLog(service.setup.history))


async def _plain_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    messages = {
        404: f"no such endpoint: {request.url.path}",
        405: f"{request.url.path} does not accept {request.method}",
    }
    fields = {
        "kind": "not-found" if status == 404 else "bad-argument",
        "message": messages.get(status, "the request failed"),
        "hint": f"{V1}/job; docs/reference/api.md lists all endpoints",
    }
    return document({"error": fields}, status)


def _answering(endpoint: Endpoint) -> Endpoint:
    """Return `endpoint` with errors of ckptd as answers."""

    @functools.wraps(endpoint)
    async def wrapped(request: Request) -> Response:
        try:
            return await endpoint(request)
        except CkptdError as error:
            return refusal(error)
        except TimeoutError:
            return document({"error": {"kind": "busy", "message": "the daemon is busy"}}, 503)

    return wrapped


async def _json_body(request: Request) -> dict[str, Any]:
    body = await read_body(request, _SMALL_BODY)
    try:
        return _objects.decode(body or b"{}")
    except msgspec.MsgspecError as error:
        raise _bad("the body", "a JSON object", "something else") from error


def _number(
    request: Request, name: str, default: float | None, low: float, high: float
) -> float | None:
    text = request.query_params.get(name)
    if text is None or text == "":
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise _bad(name, f"a number from {low:g} to {high:g}", text)
    return value


def _bad(where: str, wanted: str, found: str) -> UsageError:
    return UsageError("invalid request", where=where, wanted=wanted, found=found[:100])
