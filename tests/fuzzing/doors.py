"""Doors whose clients do more than have one message decoded: whole requests, and what follows them.

An HTTP request may say `{token}`, `{reader}`, `{session}`, `{mac}` and `{length}` where the real
ones belong, which no mutation would hit. Without the first three it has shown nothing, and is let
in nowhere.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import suppress
from functools import lru_cache
from typing import Any, NoReturn
from unittest import mock

import msgspec
from h11 import LocalProtocolError
from prometheus_client import make_wsgi_app
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from ckptd.base.net.address import listen_at
from ckptd.base.net.connection import Connection
from ckptd.base.net.signing import CHALLENGE_PATH, access_token, reader_token, sign_request
from ckptd.base.net.wsgi import _Server as MetricsServer
from ckptd.base.runtime import ranks as waiting
from ckptd.base.runtime.announcements import Announcements
from ckptd.base.torch import ranks
from ckptd.base.torch.ranks import Agreement, JobBoard
from ckptd.elastic.control.controller import _MOST_AHEAD
from ckptd.elastic.controller_server import _FROM_NODE, _FROM_OPERATOR
from ckptd.elastic.launchers.nodestate import NodeState
from ckptd.elastic.link import NodeLink
from ckptd.elastic.messages import (
    Announce,
    Ask,
    Beat,
    Begin,
    Broken,
    DaemonAt,
    Ended,
    Envelope,
    Fenced,
    FenceNow,
    Hosting,
    JobEvent,
    LeaseRenewal,
    Left,
    Loaded,
    NodeUp,
    Notice,
    OperatorCommand,
    Order,
    OrderKind,
    Progress,
    RankAssignment,
    Saved,
    SaveNow,
    Shutdown,
    StoreAt,
    Subscribe,
    Suspected,
    Taken,
    Tell,
    Tick,
    Timed,
    ToNode,
)
from ckptd.elastic.policy import Shape
from ckptd.errors import CkptdError
from ckptd.events.metrics import Metrics
from ckptd.monitor.daemon.access import _SHOWN, Access
from ckptd.monitor.daemon.app import make_app
from ckptd.monitor.daemon.server import Serving
from ckptd.monitor.daemon.service import DaemonSetup, Service
from ckptd.monitor.report import EvidenceReport, from_views, pack
from tests.fuzzing.sessions import GAP, SCRATCH, asked, served
from tests.monitor.jobs import inside

_SECRET = b"s" * 32
_HANGS_S = 8.0
_PROOFS = (b"{token}", b"{reader}", b"{session}")


# --- the daemon -----------------------------------------------------------------------------------


class _Wire(asyncio.Transport):
    """A connection that keeps nothing of what is sent to it but how it begins."""

    def __init__(self, protocol: Any) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self._protocol, self._closed = protocol, False
        self.begins = b""

    def write(self, data: Any) -> None:
        self.begins = self.begins or bytes(data[:16])

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    abort = close

    def pause_reading(self) -> None:
        """Nothing more comes anyway."""

    resume_reading = pause_reading


class _Daemon:
    """A daemon of a job with four ranks, and its HTTP server, without a socket."""

    def __init__(self) -> None:
        from tests.monitor.daemon.daemons import JOB, SECRET, quick_settings, sheets

        history = SCRATCH / f"history-{os.getpid()}"
        setup = DaemonSetup(job=JOB, secret=SECRET, history=history, settings=quick_settings())
        self.secret, self.service = SECRET, Service(setup)
        self.access = Access(token=access_token(SECRET))
        self.app = make_app(self.service, self.access)
        self.loop = asyncio.new_event_loop()
        self.waits, self.proved = asyncio.Event(), False
        self.failed: list[BaseException] = []
        ending = self.service.hub.close
        self.server = Serving(
            self, socket.socket(), started=self.service.start, ending=ending
        )._server
        self.server.config.load()
        self.service.start(self.loop)
        for body in sheets():
            self.service.ingest.hand_in("sheet", body).result(_HANGS_S)
        end, plain = f"{time.monotonic() + 1e6:.0f}", Request({"type": "http", "scheme": "http"})
        session = f"{self.access._cookie(plain)}={self.access._session(end)}"
        shown = (self.access.token, reader_token(self.access.token), session)
        self.known = dict(zip(_PROOFS, (text.encode() for text in shown), strict=True))

    def told(self, raw: bytes) -> bytes:
        """Return what a stranger sends, with what he says he knows."""
        self.proved = any(proof in raw for proof in _PROOFS)
        head, gap, body = raw.partition(b"\r\n\r\n")
        body = body.replace(b"{token}", self.known[b"{token}"])
        path = (head.split(b" ", 2)[1:2] or [b""])[0].decode("latin-1")
        mac = sign_request(self.secret, "POST", path, self.service.ingest.challenge, body)
        right = {**self.known, b"{mac}": mac.encode(), b"{length}": b"%d" % len(body)}
        for word, true in right.items():
            head = head.replace(word, true)
        return head + gap + body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Note what fails in the application, and when it waits for more of its client."""

        async def heard() -> Message:
            coming = asyncio.ensure_future(receive())
            for _ in range(3):
                await asyncio.sleep(0)
            if not coming.done():
                self.waits.set()
            return await coming

        async def said(message: Message) -> None:
            assert message.get("status", 200) in range(200, 500) or message["status"] == 503
            await send(message)

        try:
            await self.app(scope, heard, said)
            assert self.proved or _SHOWN not in scope, "somebody is let in who has shown nothing"
        except LocalProtocolError:  # uvicorn has answered somebody who goes on with no HTTP
            raise
        except Exception as error:
            self.failed.append(error)
            raise

    async def answer(self, raw: bytes) -> None:
        """Answer what one connection sends, and its end."""
        self.waits.clear()
        config, state = self.server.config, self.server.server_state
        http: Any = config.http_protocol_class
        protocol = http(config, state, {}, self.loop)
        wire = _Wire(protocol)
        protocol.connection_made(wire)
        protocol.data_received(raw)
        waits = asyncio.ensure_future(self.waits.wait())
        while state.tasks and not self.waits.is_set():
            both = asyncio.wait([*state.tasks, waits], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait_for(both, _HANGS_S)
        waits.cancel()
        wire.close()
        await asyncio.sleep(0)
        if state.tasks:
            await asyncio.wait_for(asyncio.wait([*state.tasks]), _HANGS_S)
        assert b" 500 " not in wire.begins or self.failed
        assert not http.strangers.held()
        assert not state.connections


@lru_cache(maxsize=1)
def _daemon() -> _Daemon:
    return _Daemon()


def http(raw: bytes) -> None:
    """Send a daemon these bytes, in place of a browser, a script or an agent."""
    daemon = _daemon()
    if told := daemon.told(raw):  # a transport gives no empty bytes
        daemon.loop.run_until_complete(daemon.answer(told))
    if daemon.failed:
        raise daemon.failed.pop()


def access(raw: bytes) -> None:
    """Have headers judged: path, host, origin, authorization, cookie."""
    daemon = _daemon()
    told = daemon.told(raw).split(GAP)
    names = (b"host", b"origin", b"authorization", b"cookie")
    scope: Scope = {
        "type": "http",
        "method": "POST" if raw[:1] == b"+" else "GET",
        "scheme": "http",
        "path": told[0][1:].decode("utf-8", "replace"),
        "headers": list(zip(names, told[1:], strict=False)),
    }
    try:
        with suppress(ValueError):  # it is answered as one that cannot be taken apart
            daemon.access.check(Request(scope))
    finally:
        assert daemon.proved or _SHOWN not in scope


_HOST = b" HTTP/1.1\r\nHost: localhost\r\n"
_BEARER = b"Authorization: Bearer {token}\r\n"
_READS = (
    b"/api/v1/job",
    b"/api/v1/ranks?since=1",
    b"/api/v1/ranks/2",
    b"/api/v1/links",
    b"/api/v1/collectives?seconds=9.5&limit=10&ranks=0-2,3",
    b"/api/v1/trace?seconds=9&ranks=1",
    b"/api/v1/checkpoints",
    b"/api/v1/incidents?state=open&limit=10&before=1e9",
    b"/api/v1/incidents/i-1",
    b"/api/v1/elastic",
    b"/api/v1/history?what=step&seconds=60&points=9&until=2e9&job=job",
    b"/api/v1/jobs",
    b"/api/v1/stream?last=a-1",
    b"/api/v1/recording?seconds=5",
    b"/metrics",
    b"/",
    b"/js/main.js",
)
_ACTS = (
    (b"/api/v1/incidents/i-1/ack", b'{"note": "seen"}'),
    (b"/api/v1/incidents/i-1/enforce", b"{}"),
    (b"/api/v1/ranks/1/look", b""),
    (b"/api/v1/elastic/orders", b'{"kind": "drain", "nodes": ["n0"], "reason": "r"}'),
    (b"/api/v1/login", b'{"token": "{token}"}'),
)
_FOUND = pack(EvidenceReport(job="job", source="n0", number=1))
_SHEET = pack(from_views([inside(0, 7, 3, 1.0, 4)], job="job", source="n0", number=99))
_SIZED = b"Content-Length: {length}\r\n\r\n"
HTTP_SEEDS = [
    *(b"GET " + path + _HOST + _BEARER + b"\r\n" for path in _READS),
    *(b"POST " + path + _HOST + _BEARER + _SIZED + body for path, body in _ACTS),
    b"GET /?token={token}" + _HOST + b"\r\n",
    b"GET " + CHALLENGE_PATH.encode() + _HOST + b"\r\nGET /healthz" + _HOST + b"\r\n",
    b"GET /api/v1/job" + _HOST + b"Authorization: bearer {reader}\r\n\r\n",
    b"GET /api/v1/stream" + _HOST + b"Cookie: a=b; {session}\r\nLast-Event-ID: x-2\r\n\r\n",
    b"POST /api/v1/login" + _HOST + b"Origin: http://localhost\r\nContent-Type: "
    b"application/x-www-form-urlencoded\r\nContent-Length: {length}\r\n\r\ntoken=a&b=c",
    b"POST /api/v1/sheets" + _HOST + b"Ckptd-Mac: {mac}\r\n" + _SIZED + _SHEET,
    b"POST /api/v1/found" + _HOST + b"Ckptd-Mac: {mac}\r\n" + _SIZED + _FOUND,
    b"POST /api/v1/login" + _HOST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
]
ACCESS_SEEDS = [
    GAP.join([b"+/api/v1/job", b"localhost:80", b"http://localhost:80", b"", b"a=b; {session}"]),
    GAP.join(
        [
            b"-/metrics",
            b"[::1]:80",
            b"http://[::1]:80",
            b"Bearer {token}",
            b'a="\\101"; b=c; Path=/',
        ]
    ),
]


# --- an agent's metrics ---------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _metrics() -> MetricsServer:
    server = MetricsServer(listen_at("127.0.0.1", 0, "metrics"))
    server.set_app(make_wsgi_app(Metrics().registry()))
    return server


def metrics(raw: bytes) -> None:
    """Ask an agent for its metrics."""
    here, there = socket.socketpair()
    with here, there:
        there.sendall(raw)
        there.shutdown(socket.SHUT_WR)
        _metrics().finish_request(here, ("127.0.0.1", 1))
        here.shutdown(socket.SHUT_WR)
        assert b" 500 " not in there.recv(64)


METRICS_SEEDS = [
    b"GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: application/openmetrics-text;q=0.9\r\n\r\n",
    b"GET /?name[]=ckptd_saves HTTP/1.0\r\nAccept-Encoding: gzip;q=1, br\r\n\r\n",
    b"POST /favicon.ico HTTP/1.1\r\nContent-Length: 3\r\nContent-Type: text/plain\r\n\r\nabc",
]


# --- torch's store --------------------------------------------------------------------------------


class _Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class _Told:
    """A store at which a stranger answers every question with the next thing that he has."""

    def __init__(self, values: list[bytes]) -> None:
        self.values = values[::-1]

    def check(self, names: list[str]) -> bool:
        return len(self.values) >= len(names)

    def compare_set(self, name: str, expected: str, desired: str) -> bytes:
        return self.values.pop() if self.values else desired.encode()

    def multi_get(self, names: list[str]) -> list[bytes]:
        return [self.values.pop() for _ in names]

    def set(self, name: str, value: bytes) -> None:
        """What is said to him changes nothing."""

    def delete_key(self, name: str) -> bool:
        return True

    def add(self, name: str, amount: int) -> int:
        return amount


def _agreed(board: JobBoard, what: int) -> object:
    """Ask the other ranks as their callers do."""
    agreement = Agreement(board, 1.0)
    if what == 0:
        return agreement.on_rank_zero("a", dict)
    if what == 1:
        return agreement.in_tree("a", b"", b"".join)
    if what == 2:
        return ranks.host_count(agreement)
    if what == 3:
        return agreement.no_errors(None)
    if what == 4:
        return agreement.life()
    return Announcements(board).word(lambda _: "", None)


def board(raw: bytes) -> None:
    """Ask ranks at a store that a stranger holds, of a job with a secret and of one without."""
    if not raw:
        return
    what, rank, proved = raw[0] % 6, raw[0] // 6 % 2, raw[0] // 12 % 2
    told: Any = _Told(raw[1:].split(GAP))
    clock = _Clock()
    with mock.patch.object(waiting, "time", clock), mock.patch.object(ranks, "time", clock):
        asks = JobBoard(told, rank, 3, "", _SECRET if proved else None)
        with suppress(CkptdError):
            _agreed(asks, what)
            needs_nobody = rank == 0 and what in (0, 5)
            assert needs_nobody or not proved, "a rank believes what no rank has said"


_ERROR = msgspec.json.encode({"class": "StoreError", "message": "m", "kind": "listen"})
BOARD_SEEDS = [
    bytes([6]) + b"+{}",
    bytes([6]) + b"-" + _ERROR,
    bytes([18]) + b"-" + _ERROR,
    bytes([1]) + GAP.join([b"+a", b"+b"]),
    bytes([7]) + b"+ab",
    bytes([2]) + GAP.join(2 * [b"+" + msgspec.msgpack.encode([b"host"])]),
    bytes([8]) + b'+{"h":[0,1,2]}',
    bytes([3]) + GAP.join([b"null", _ERROR]),
    bytes([9]) + b'{"2":' + _ERROR + b"}",
    bytes([4]) + GAP.join(4 * [bytes(32)]),
    bytes([10]) + GAP.join(4 * [bytes(48)]),
    bytes([11]) + msgspec.msgpack.encode(("save", 9)),
    bytes([23]) + msgspec.msgpack.encode(("save", 9)),
]


# --- the controller, and its nodes ----------------------------------------------------------------


async def _controlled(raw: bytes) -> None:
    from tests.elastic.control.test_controller_peers import Made

    made = Made("memory://fuzzed")
    owners = (("agent", "a"), ("agent", "b"), ("operator", "o"))
    peers = [made.join(*owner) for owner in owners]
    controller, claims = made.controller, 0

    async def handle(event: JobEvent) -> None:
        with suppress(CkptdError):  # this controller ends
            await controller._handle(event)

    try:
        for body in raw.split(GAP):
            number = body[0] % 3 if body else 0
            peer = peers[number]
            try:
                kind = _FROM_NODE if peer.role == "agent" else _FROM_OPERATOR
                controller.received(peer, peer._codec.open(kind, body[1:]))
            except CkptdError:
                controller.gone(peer)
                peers[number] = made.join(*owners[number])
            while controller._events:
                event, after = controller._events.popleft()
                await handle(event)
                if after is not None:
                    after()
            await handle(Tick())
            msgspec.json.encode(made.status())
            claims += _MOST_AHEAD
            assert made.machine.generation <= claims, "numbers of generations are used up"
        controller._appender._log.read()  # no message makes it unreadable
        for timer in controller._broken.values():
            timer.cancel()
    finally:
        controller._appender.close()


@lru_cache(maxsize=1)
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def controller(raw: bytes) -> None:
    """Have a controller take what two nodes and an operator say after they are let in."""
    from ckptd.store.memory import forget_memory

    try:
        _loop().run_until_complete(_controlled(raw))
    finally:
        forget_memory("fuzzed")


def node(raw: bytes) -> None:
    """Have a node's link and its state take what a controller says."""
    state = NodeState("n", lambda event: link.tell(event))
    link = NodeLink(str, "j", _SECRET, lambda: state.up(1, "h"), lambda order: obey(order))
    link._sent_at = dict.fromkeys(range(8), 1.0)

    def obey(order: ToNode) -> None:
        before = (state.fence, state.fenced, state.started)
        if isinstance(order, FenceNow) and state.order_fence(order.generation):
            state.keep_fence(order.generation)
        elif isinstance(order, Begin) and state.order_begin(order) and state.waiting:
            state.start(order)
        assert all(
            a <= b for a, b in zip(before, (state.fence, state.fenced, state.started), strict=True)
        )

    def follow(wire: Connection) -> NoReturn:
        while True:  # `NodeLink._run` takes an error of ckptd as the end of a connection
            link._wait(wire, 0.0)
            link._send_unsent(wire)

    with link._wake_in, link._wake_out, suppress(CkptdError):
        served(follow, raw)


_BEGIN = Begin(
    generation=2,
    level=1,
    shape=Shape(1, 2, 1),
    step=5,
    reason="a fault",
    nodes=2,
    node_rank=0,
    seats=(RankAssignment(0, 0, 0, 0, 0),),
    world=2,
    hosts_store=True,
)


def _says(*said: tuple[int, msgspec.Struct]) -> bytes:
    return GAP.join(bytes([number]) + msgspec.msgpack.encode(each) for number, each in said)


def _up(name: str, number: int, **more: Any) -> Beat:
    return Beat(number, NodeUp(node=name, life="1", slots=1, **more))


_TRAINS = (
    (0, _up("a", 1)),
    (1, _up("b", 1)),
    (0, _up("a", 2, running=1)),
    (1, _up("b", 2, running=1)),
    (0, Envelope(Loaded(node="a", generation=1), 1)),
    (1, Envelope(Loaded(node="b", generation=1), 1)),
    (0, Hosting(1, "127.0.0.1", 9)),
    (0, Timed(1, "a", {"spawned": 0.5, "stepped": 2.0})),
    (0, Envelope(Progress(generation=1, step=3), 2)),
)
CONTROLLER_SEEDS = [
    _says(*_TRAINS, (2, Subscribe(1)), (1, Envelope(Ended(node="b", generation=1, code=3), 2))),
    _says(*_TRAINS, (0, Envelope(Broken(node="a", generation=1, reason="nccl"), 3))),
    _says(*_TRAINS, (2, OperatorCommand(1, Order(kind=OrderKind.DRAIN, nodes=("b",))))),
    _says(*_TRAINS, (2, OperatorCommand(1, Suspected(nodes=("a",), reason="slow")))),
    _says(*_TRAINS, (1, Envelope(Notice(node="b", seconds=9.0), 2)), (1, _up("b", 3, fenced=2))),
    _says(*_TRAINS, (0, _up("a", 3, running=1, fenced=1 << 19))),
    _says((2, Ask(1)), (2, Announce(2, "http://10.0.0.1:80")), (0, Envelope(Left(node="a")))),
    _says(
        *_TRAINS,
        (0, Envelope(Saved(generation=1, step=4))),
        (1, Envelope(Fenced(node="b", generation=2))),
    ),
]
NODE_SEEDS = [
    asked(
        LeaseRenewal(1, 0, 9.0), FenceNow(2, 1), _BEGIN, StoreAt(2, "h", 9), SaveNow(generation=2)
    ),
    asked(DaemonAt("http://10.0.0.1:80"), Tell(text="t", aloud=True, command="c")),
    asked(LeaseRenewal(2, 1, 0.0), Shutdown("done", "t", 0), FenceNow(3)),
    asked(Taken("another launcher")),
]
