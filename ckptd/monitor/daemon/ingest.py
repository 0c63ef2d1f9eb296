"""Takes agents' messages: signature, order, job checked; refused ones counted.

In it: how many senders are remembered.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from ckptd.base.net.signing import MAC_HEADER, check_request, new_challenge, sign_answer
from ckptd.errors import CkptdError, ConflictError, RefusedError
from ckptd.monitor.daemon.bodies import BodyBudget, connection_of, document, read_body, refusal
from ckptd.monitor.daemon.tape import MessageBuffer
from ckptd.monitor.recording import RecordedFrame
from ckptd.monitor.report import (
    AgentOrders,
    EvidenceReport,
    NodeReport,
    ReportLimits,
    pack,
    unpack_evidence,
    unpack_report,
)
from ckptd.monitor.watch import JobWatch

MEDIA = "application/msgpack"
_MOST_SOURCES = 1 << 16


@dataclass
class IngestCounts:
    """Counts of messages taken, by ``sheet`` and ``found``, and of those refused, by error kind."""

    taken: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)


class Ingest:
    """The endpoints of agents.

    Parameters
    ----------
    job
        Name of the job whose messages are taken.
    secret
        The job's.
    call
        Hands work to the thread that owns what messages go into; see `Rounds.call`.
    take
        What is done there with a checked message; returns the orders for its sender.
    tape
        Keeps what was taken.
    """

    def __init__(
        self,
        job: str,
        secret: bytes,
        call: Callable[[Callable[[float], AgentOrders]], Future[AgentOrders]],
        take: Callable[[NodeReport | EvidenceReport, float], AgentOrders],
        tape: MessageBuffer,
    ) -> None:
        self.challenge = new_challenge()
        self.counts = IngestCounts()
        self._job = job
        self._secret = secret
        self._call = call
        self._take = take
        self._tape = tape
        self._limits = ReportLimits(packed=8 << 20, unpacked=64 << 20)
        self._hold = BodyBudget(8 * self._limits.packed)
        self._newest: OrderedDict[tuple[str, str], int] = OrderedDict()

    async def tell_challenge(self, request: Request) -> Response:
        """Answer GET /challenge."""
        return document({"challenge": self.challenge, "job": self._job})

    async def sheets(self, request: Request) -> Response:
        """Answer POST /sheets."""
        return await self._post(request, "sheet")

    async def found(self, request: Request) -> Response:
        """Answer POST /found."""
        return await self._post(request, "found")

    async def _post(self, request: Request, kind: str) -> Response:
        mac = request.headers.get(MAC_HEADER)
        try:
            self._glance(mac)
            limit, connection = self._limits.packed, connection_of(request)
            body = await read_body(request, limit, self._hold, proved=connection.proved)
            path = request.scope["path"]
            check_request(mac, self._secret, request.method, path, self.challenge, body)
            connection.proved = True
            orders = await asyncio.wrap_future(self.hand_in(kind, body))
        except CkptdError as error:
            self.counts.refused[error.kind] += 1
            more = {"challenge": self.challenge} if error.kind == "stale-mac" else {}
            return refusal(error, **more)
        answer = pack(orders)
        return Response(
            answer, 200, {MAC_HEADER: sign_answer(self._secret, mac or "", answer)}, MEDIA
        )

    def hand_in(self, kind: str, body: bytes) -> Future[AgentOrders]:
        """Have the bytes of a ``sheet`` or ``found`` checked and taken; they are trusted as signed.

        Raises
        ------
        TransientStoreError
            kind ``busy``: too much waits. What is wrong with the message itself is the future's.
        """
        return self._call(self._taking(kind, body))

    def _glance(self, mac: str | None) -> None:
        """Refuse what cannot be signed, before a byte of its body is read."""
        words = (mac or "").split(" ")
        if len(words) != 3 or words[1] != self.challenge:
            check_request(mac, self._secret, "", "", self.challenge, b"")

    def _taking(self, kind: str, body: bytes) -> Callable[[float], AgentOrders]:
        """Return the work on one message, for the thread that owns the watch."""

        def work(now: float) -> AgentOrders:
            message: NodeReport | EvidenceReport
            if kind == "sheet":
                message = unpack_report(body, self._limits)
            else:
                message = unpack_evidence(body, self._limits)
            self._check_new(kind, message)
            orders = self._take(message, now)
            self._remember(kind, message)
            self._tape.add(RecordedFrame(now, kind, body))
            self.counts.taken[kind] += 1
            self.counts.bytes[kind] += len(body)
            return orders

        return work

    def _check_new(self, kind: str, message: NodeReport | EvidenceReport) -> None:
        if message.job != self._job:
            raise RefusedError(
                "this message belongs to another job", wanted=self._job, found=message.job
            )
        newest = self._newest.get((kind, message.source), -1)
        if message.number <= newest:
            raise ConflictError(
                "this message was already received",
                where=message.source,
                wanted=f"a number above {newest}",
                found=message.number,
            )

    def _remember(self, kind: str, message: NodeReport | EvidenceReport) -> None:
        self._newest[kind, message.source] = message.number
        self._newest.move_to_end((kind, message.source))
        while len(self._newest) > _MOST_SOURCES:
            self._newest.popitem(last=False)


def take_into(watch: JobWatch, message: NodeReport | EvidenceReport, now: float) -> AgentOrders:
    """Give a message to a watch, and return the orders for its sender."""
    if isinstance(message, NodeReport):
        watch.take(message, now)
    else:
        watch.take_found(message, now)
    return watch.orders(message.source, now)
