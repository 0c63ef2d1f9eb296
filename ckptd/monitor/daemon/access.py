"""Access to the daemon: hosts, origins, token, cookie and its lifetime, security headers (CSP)."""

from __future__ import annotations

import hmac
import ipaddress
import math
import secrets
import socket
import time
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ckptd.base.net.signing import (
    CHALLENGE_PATH,
    FOUND_PATH,
    SHEETS_PATH,
    derived_key,
    reader_token,
)
from ckptd.errors import CkptdError, RefusedError
from ckptd.monitor.daemon.acts import ActsLog
from ckptd.monitor.daemon.bodies import connection_of, refusal

LOGIN_PATH = "/api/v1/login"
_API = "/api/"
_AGENTS = frozenset({CHALLENGE_PATH, SHEETS_PATH, FOUND_PATH})
_OPEN = frozenset({"/healthz", LOGIN_PATH, *_AGENTS})
_SESSION_S = 12 * 3600
_READS = "r"
"""At the end of the time in the cookie of a session that reads."""
_SHOWN = "ckptd.shown"
_MOST_BODY = 1000

_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    b"font-src 'self'; connect-src 'self'; manifest-src 'self'; base-uri 'none'; "
    b"form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = [
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
]


@dataclass(frozen=True)
class Shown:
    """The rights that a request has shown.

    Attributes
    ----------
    who
        See `ckptd.monitor.daemon.acts.Act`.
    acts
        Whether it may act, and not only read.
    """

    who: str
    acts: bool


@dataclass(frozen=True)
class Access:
    """The proof that a request must show.

    Attributes
    ----------
    token
        Says that a person or script may read and act. It follows from the job's secret and is
        never printed.
    login
        Says so as well, in this life of the daemon; it stands in the URL that is printed. The
        cookie of those who have logged in, with either, follows from it and ends in 12 hours.
        Each of the two has a reader's token, see `ckptd.base.net.signing.reader_token`.
    metrics_open
        Whether ``/metrics`` is served without a token.
    names
        Names of the host, besides addresses and its own, under which browsers may reach it.
    """

    token: str
    login: str = field(default_factory=lambda: secrets.token_hex(20))
    metrics_open: bool = True
    names: frozenset[str] = field(default_factory=frozenset)

    def admit(self, response: Response, request: Request, shown: Shown) -> None:
        """Set the cookie of those who have shown a token: it lets them do what that did."""
        request.scope[_SHOWN] = shown
        end = math.ceil(time.monotonic() + _SESSION_S)
        response.set_cookie(
            self._cookie(request),
            self._session(f"{end}" if shown.acts else f"{end}{_READS}"),
            max_age=_SESSION_S,
            httponly=True,
            samesite="strict",
            secure=_secure(request),
        )

    def _cookie(self, request: Request) -> str:
        """Return the name of the cookie: those of one host are shared by all its ports."""
        name = f"ckptd_{derived_key(self.login.encode(), 'cookie').hex()[:8]}"
        return f"__Host-{name}" if _secure(request) else name

    def _session(self, end: str) -> str:
        """Return the cookie's value: good in this life, until `end` of its monotonic clock."""
        return f"{end}-{derived_key(self.login.encode(), 'session', end).hex()}"

    def of_token(self, text: str) -> Shown | None:
        """Return what one of the tokens shows; takes as long whatever `text` is."""
        raw, full = text.encode(errors="replace"), (self.token, self.login)
        acts = [hmac.compare_digest(raw, each.encode()) for each in full]
        reads = [hmac.compare_digest(raw, reader_token(each).encode()) for each in full]
        if any(acts):
            return Shown("token", True)
        return Shown("reader", False) if any(reads) else None

    def check(self, request: Request) -> None:
        """Refuse a request that may not be answered.

        Raises
        ------
        RefusedError
            kinds ``bad-host`` or ``no-token`` among others.
        """
        host = request.headers.get("host", "")
        # Agents call the daemon what they like: a page that is led here cannot sign.
        if request.scope["path"] not in _AGENTS and not self._known(host):
            raise RefusedError(
                "the daemon does not accept requests for that host name",
                kind="bad-host",
                found=host[:100],
                hint="ckptd serve --name NAME allows one",
            )
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            raise RefusedError("the request comes from a page of another site", found=origin[:100])
        acts = request.method != "GET"
        shown = self._shown(request, acts)
        if shown is not None:
            request.scope[_SHOWN] = shown
            connection_of(request).proved = True
            if acts and not shown.acts and not self._open(request):
                raise RefusedError(
                    "this token, or the session that began with it, is for reading",
                    where=request.scope["path"][:100],
                    hint="ckptd open prints a link that lets its holder act",
                )
        elif not self._open(request):
            raise RefusedError(
                "this request needs the token",
                kind="no-token",
                where=request.scope["path"][:100],
                hint="log in with the URL that ckptd serve prints, or send"
                " Authorization: Bearer TOKEN",
            )

    def _known(self, host: str) -> bool:
        """Whether a Host header is ours: a name of a stranger may lead here by its DNS alone."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in {"localhost", socket.gethostname().lower(), *self.names}
        return True

    def _open(self, request: Request) -> bool:
        path = request.scope["path"]
        if path == "/metrics":
            return self.metrics_open
        return path in _OPEN or not path.startswith(_API)

    def _shown(self, request: Request, acts: bool) -> Shown | None:
        given = request.headers.get("authorization", "")
        if given.lower().startswith("bearer "):
            return self.of_token(given[7:].strip())
        if acts and "origin" not in request.headers:
            return None  # a cookie alone does not say which page sent it
        try:
            cookies = SimpleCookie(request.headers.get("cookie", "")[:4096])
        except CookieError:
            return None
        found = cookies.get(self._cookie(request))
        if found is None:
            return None
        end, _, mac = found.value.partition("-")
        end = end[:20]
        good = hmac.compare_digest(
            found.value.encode(errors="replace"), self._session(end).encode(errors="replace")
        )
        if not good or time.monotonic() >= int(end.removesuffix(_READS)):
            return None
        reads = end.endswith(_READS)
        return Shown(f"{'reading ' if reads else ''}session {mac[:8]}", not reads)


def _secure(request: Request) -> bool:
    return bool(request.scope["scheme"] == "https")


class Guard:
    """The application behind `Access`; sets headers that keep other sites out of the page."""

    def __init__(self, app: ASGIApp, access: Access, acts: ActsLog | None = None) -> None:
        self._app = app
        self._access = access
        self._acts = acts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        request, body = Request(scope), b""

        async def heard() -> Message:
            nonlocal body
            message = await receive()
            body = (body + message.get("body", b""))[:_MOST_BODY]
            return message

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
                self._note(request, body, message["status"])
            await send(message)

        try:
            self._access.check(request)
        except CkptdError as error:
            await refusal(error)(scope, receive, guarded)
            return
        except ValueError:  # a Host or Origin that cannot be taken apart
            await refusal(RefusedError("the Host or Origin header is invalid", kind="bad-host"))(
                scope, receive, guarded
            )
            return
        await self._app(scope, heard, guarded)

    def _note(self, request: Request, body: bytes, status: int) -> None:
        """Write down what somebody did who has shown a token; agents only report."""
        path, shown = request.scope["path"], request.scope.get(_SHOWN)
        logs_in = path == LOGIN_PATH or (path == "/" and "token" in request.query_params)
        acts = (request.method != "GET" and path not in _AGENTS) or logs_in
        if self._acts is not None and shown is not None and acts:
            text = "" if logs_in else body.decode(errors="replace")
            host = request.client.host if request.client else ""
            self._acts.add(shown.who, host, request.method, path[:200], text, status)
