"""Forwarder between agents and daemon: merges reports, splits orders; silent sources, limits.

It keeps the newest report of each source only, so a root that is away costs no memory: when it is
back, it hears how things are then.
"""

from __future__ import annotations

import secrets
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ckptd.base.net.signing import CHALLENGE_PATH, FOUND_PATH, SHEETS_PATH
from ckptd.errors import TransientStoreError
from ckptd.monitor.agent.uplink import Uplink
from ckptd.monitor.collectives import CallTable, Outbox
from ckptd.monitor.daemon.access import Access, Guard
from ckptd.monitor.daemon.bodies import document
from ckptd.monitor.daemon.ingest import Ingest
from ckptd.monitor.daemon.tape import MessageBuffer
from ckptd.monitor.report import (
    GAP,
    AgentOrders,
    EvidenceReport,
    GroupInfo,
    LinkProbe,
    NodeReport,
    ReportLimits,
    merge,
)
from ckptd.monitor.stats import Array

_LEAST_S = 0.1
_LOOK_S = 0.02
_SILENT_S = 5.0
_FORGET_S = 600.0
_MOST_SOURCES = 4096
_MOST_WAITING = 4096
_MOST_ROWS = 1 << 16
_MOST_ASKED = 256
_MOST_SAID = 10
_ROW_TABLES = ("steps", "sums")


@dataclass
class _Below:
    """One source below: its newest report, and what it is still to be told."""

    report: NodeReport
    arrived: float
    named: bool
    passed: bool = False
    stacks: set[int] = field(default_factory=set)
    calls: set[int] = field(default_factory=set)
    probes: dict[int, LinkProbe] = field(default_factory=dict)


class Forwarder:
    """Takes reports from agents and sends one in their place. To be closed.

    Parameters
    ----------
    job, secret
        Whose messages pass.
    url
        Of the daemon above.
    """

    def __init__(self, job: str, secret: bytes, url: str) -> None:
        self._job = job
        self._source = secrets.token_hex(8)
        self._numbers = {"sheet": 0, "found": 0}
        self._limits = ReportLimits()
        self._below: dict[str, _Below] = {}
        self._members: dict[int, GroupInfo] = {}
        self._texts: dict[int, str] = {}
        self._unsent: tuple[set[int], set[int]] = (set(), set())
        self._book = CallTable()
        self._outbox = Outbox(self._book.totals)
        self._period_s = 0.25
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="forward")
        self._room = threading.BoundedSemaphore(_MOST_WAITING)
        self._ended = threading.Event()
        self.defects = 0
        """Sheets that could not be passed on, which is a defect of ckptd; the next is tried."""
        self.up = Uplink(url, secret)
        self.ingest = Ingest(job, secret, self._call, self._take, MessageBuffer(0))
        self._thread = threading.Thread(target=self._work, name="passing-on", daemon=True)

    def start(self) -> None:
        """Begin to pass on."""
        self._thread.start()

    def close(self) -> None:
        """End; what was not passed on is lost."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(5.0)
        self._worker.shutdown(cancel_futures=True)
        self.up.close()

    def app(self, access: Access) -> ASGIApp:
        """Return what agents talk to."""
        routes = [
            Route(CHALLENGE_PATH, self.ingest.tell_challenge, methods=["GET"]),
            Route(SHEETS_PATH, self.ingest.sheets, methods=["POST"]),
            Route(FOUND_PATH, self.ingest.found, methods=["POST"]),
            Route("/healthz", self._health, methods=["GET"]),
        ]
        return Guard(Starlette(routes=routes), access)

    async def _health(self, request: Request) -> Response:
        alive = self._thread.is_alive()
        return document(
            {
                "healthy": alive,
                "forwards": True,
                "away": self.up.away,
                "sources": len(self._below),
                "defects": self.defects,
            },
            200 if alive else 503,
        )

    # -- from below; all in the worker's one thread -----------------------------------------------

    def _call(self, work: Callable[[float], AgentOrders]) -> Future[AgentOrders]:
        if not self._room.acquire(blocking=False):
            raise TransientStoreError("the forwarder is overloaded", kind="busy", hint="try again")
        future = self._worker.submit(lambda: work(time.monotonic()))
        future.add_done_callback(lambda _: self._room.release())
        return future

    def _take(self, message: NodeReport | EvidenceReport, now: float) -> AgentOrders:
        if isinstance(message, EvidenceReport):
            self._numbers["found"] += 1
            self.up.report(
                msgspec.structs.replace(message, source=self._source, number=self._numbers["found"])
            )
            below = self._below.get(message.source)
            return self._orders(below) if below else AgentOrders(period_s=self._period_s)
        before = self._below.get(message.source)
        if before is None and len(self._below) >= _MOST_SOURCES:
            raise TransientStoreError("too many agents send reports here", kind="busy")
        self._learn(message)
        self._book.take(
            message.source, message.number, message.after, message.table("collectives"), now
        )
        named = bool(message.members) or (before is not None and before.named)
        if before is not None and not before.passed:
            message = _with_rows_of(message, before.report)
        new = _Below(message, now, named)
        if before is not None:
            new.stacks, new.calls, new.probes = before.stacks, before.calls, before.probes
        self._below[message.source] = new
        return self._orders(new)

    def _learn(self, report: NodeReport) -> None:
        for key, info in report.members.items():
            if self._members.get(key) != info and len(self._members) < self._limits.members:
                self._members[key] = info
                self._unsent[0].add(key)
        for key, text in report.texts.items():
            if self._texts.get(key) != text and len(self._texts) < self._limits.texts:
                self._texts[key] = text
                self._unsent[1].add(key)

    def _orders(self, below: _Below) -> AgentOrders:
        """Return what a source is to do, once."""
        orders = AgentOrders(
            period_s=self._period_s,
            tell=not below.named,
            stacks=tuple(sorted(below.stacks)),
            calls=tuple(sorted(below.calls)),
            probes=tuple(below.probes.values()),
        )
        below.stacks, below.calls, below.probes = set(), set(), {}
        return orders

    # -- upwards ----------------------------------------------------------------------------------

    def _work(self) -> None:
        due = time.monotonic()
        while not self._ended.wait(_LOOK_S):
            if time.monotonic() >= due and self.up.ready:
                due = time.monotonic() + self._period_s
                self._safely(self._worker.submit(self._pass_on))

    def _safely(self, passing: Future[None]) -> None:
        """Wait until a report was passed on; that one cannot be must not end all that follow."""
        error = passing.exception()
        if error is not None:
            self.defects += 1
            if self.defects <= _MOST_SAID:
                print(f"ckptd: reports were not forwarded: {error!r}", file=sys.stderr, flush=True)  # noqa: T201

    def _pass_on(self) -> None:
        now = time.monotonic()  # in the thread that takes reports: none is younger than that
        for orders in self.up.orders():
            self._obey(orders)
        silent = max(_SILENT_S, 3 * self._period_s)
        for source, below in list(self._below.items()):
            if now - below.arrived > _FORGET_S:
                del self._below[source]
        if not self._below:
            return
        reports = [
            b.report if now - b.arrived <= silent else _bare(b.report) for b in self._below.values()
        ]
        members, texts = self._unsent
        self._unsent = (set(), set())
        self._numbers["sheet"] += 1
        collectives, after = self._outbox.take(self._numbers["sheet"], self.up.taken)
        self.up.offer(
            merge(
                reports,
                [now - b.arrived for b in self._below.values()],
                job=self._job,
                source=self._source,
                number=self._numbers["sheet"],
                members={k: self._members[k] for k in members},
                texts={k: self._texts[k] for k in texts},
                collectives=collectives,
                after=after,
            )
        )
        for below in self._below.values():
            below.report = msgspec.structs.replace(below.report, gaps=b"", steps=b"", sums=b"")
            below.passed = True

    def _obey(self, orders: AgentOrders) -> None:
        """Keep what the daemon above orders until the source asks for it."""
        self._period_s = max(orders.period_s, _LEAST_S)
        if orders.tell:
            self._unsent = (set(self._members), set(self._texts))
        for below in self._below.values():
            part = orders.of_part(below.report.nodes, below.report.table("ranks")["rank"].tolist())
            below.stacks |= set(part.stacks)
            below.calls |= set(part.calls)
            for probe in part.probes[: max(_MOST_ASKED - len(below.probes), 0)]:
                below.probes[probe.nonce] = probe


def _bare(report: NodeReport) -> NodeReport:
    """Return a silent agent's report without its ranks, which then do not report."""
    nothing = dict.fromkeys(("ranks", "groups", "calls", "gaps", "steps", "sums"), b"")
    return msgspec.structs.replace(report, **nothing)


def _with_rows_of(new: NodeReport, old: NodeReport) -> NodeReport:
    """Return `new` with the rows that only `old` had and that were not passed on yet."""
    ranks, before = new.table("ranks")["rank"], old.table("ranks")["rank"]
    order = np.argsort(ranks, kind="stable")
    parts = {"gaps": (old.gaps + new.gaps)[-_MOST_ROWS * GAP.itemsize :]}
    for name in _ROW_TABLES:
        table = old.table(name)
        if not len(table) or not len(ranks):
            parts[name] = getattr(new, name)
            continue
        parts[name] = _moved(table, before, ranks, order).tobytes() + getattr(new, name)
    return msgspec.structs.replace(new, **parts)


def _moved(table: Array, before: Array, ranks: Array, order: Array) -> Array:
    """Return rows with the place that their rank has now; those of others are left out."""
    wanted = before[table["row"]]
    at = order[np.minimum(np.searchsorted(ranks[order], wanted), len(ranks) - 1)]
    kept = ranks[at] == wanted
    out: Array = table[kept][-_MOST_ROWS:].copy()
    out["row"] = at[kept][-_MOST_ROWS:]
    return out
