"""Response to incidents with a controller: policy by class (act, ask), nodes excluded, restarts.

In it: when a restart is in vain or not repeated; which class of incident acts by itself; spares;
ranks that are busy and left alone.

`response` decides, from data only, which nodes are excluded and whether the ranks restart. The
policy of an incident's class says whether that is done at once (``act``), offered to a person
(``ask``), or neither. A `Responder` follows the controller, tells the watch which generations the
controller has ended, and carries responses out.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from ckptd.elastic.messages import Answer, NodeRow, Status, Suspected
from ckptd.errors import CkptdError, ConflictError, NotFoundError, TransientStoreError, first_few
from ckptd.monitor.daemon.controller import ControllerLink
from ckptd.monitor.daemon.documents import (
    ControllerLinkDocument,
    ControllerStatusDocument,
    Proposal,
)
from ckptd.monitor.daemon.lifetime import RecoveryCounts
from ckptd.monitor.daemon.rounds import Rounds
from ckptd.monitor.daemon.tape import MessageBuffer
from ckptd.monitor.incidents import Incident
from ckptd.monitor.recording import FENCING, RecordedFrame
from ckptd.monitor.report import Fencing, pack
from ckptd.monitor.rules.limits import ENGINE_S
from ckptd.monitor.settings import WatchSettings
from ckptd.monitor.verdict import SuspectKind, VerdictKind
from ckptd.monitor.watch import JobWatch

_MOST_REASON = 300
_MOST_FENCE_REASON = 500

RUN_POLICY: Mapping[VerdictKind, str] = {
    VerdictKind.HANG: "act",
    VerdictKind.COMM_HANG: "act",
    VerdictKind.DEADLOCK: "act",
    VerdictKind.DESYNC: "ask",
    VerdictKind.MISMATCH: "ask",
    VerdictKind.SLOW_RANK: "ask",
    VerdictKind.SLOW_LINK: "ask",
    VerdictKind.CORRUPTION: "ask",
}
"""The default policy of a job that has a controller."""

_AGAIN_S = 3600.0
"""A restart does not cure what a restart has not cured within this time."""
_PROGRAM = frozenset({VerdictKind.DEADLOCK, VerdictKind.DESYNC, VerdictKind.MISMATCH})
_SLOW = frozenset({VerdictKind.SLOW_RANK, VerdictKind.SLOW_LINK})
_ENDS = frozenset({SuspectKind.NODE, SuspectKind.SENDER, SuspectKind.RECEIVER})


@dataclass(frozen=True)
class Response:
    """Response to an incident: a restart of the ranks, perhaps without some nodes.

    Attributes
    ----------
    nodes
        Nodes that are excluded; the ranks restart in any case.
    text
        For people, in a few words, as of a button.
    alone
        Whether it may be done without a person, where the policy says ``act``.
    """

    nodes: tuple[str, ...]
    text: str
    alone: bool = True


def response(
    incident: Incident, status: Status | None, before: Iterable[Incident], wanted: str
) -> Response | None:
    """Return the response to an incident; None if it has none.

    Parameters
    ----------
    incident
        What happened.
    status
        The controller's newest status; None before the first.
    before
        Other incidents that are remembered.
    wanted
        What the policy of the class says; ``incident.action`` is less where the budget of
        isolations is used up.
    """
    before = tuple(before)
    kind = incident.verdict.kind
    earlier = [i for i in before if _like(i, incident)]
    if kind in _PROGRAM:
        # A defect of the program comes again whatever node is excluded. Once may have been chance.
        return Response((), "restart", alone=not earlier and not _may_go_on(incident))
    if kind in _SLOW:
        nodes = _running(_nodes(incident), status)
        spare = nodes and _spares(status) >= len(nodes)
        return _exclude(nodes, alone=True) if spare else None
    if kind is VerdictKind.CORRUPTION:
        return _exclude(_running(incident.nodes, status), alone=True)
    if kind not in (VerdictKind.HANG, VerdictKind.COMM_HANG):
        return None  # the launcher handles a crash; nothing follows from "cannot say"
    cannot_run = incident.verdict.numbers.get("cannot run", 0) > 0
    alone = cannot_run or not (_may_go_on(incident) or _in_vain(incident, before))
    if not alone or _busy(incident):
        # The node is sound: the work takes as long on another one.
        return Response((), "restart", alone=alone)
    if wanted == "act" and incident.action == "ask":
        return Response((), "restart")  # no more nodes may be excluded, and the job stands still
    at_fault = _nodes(incident)
    cannot_run |= kind is VerdictKind.COMM_HANG
    if not cannot_run and not any(set(at_fault) & set(i.nodes) for i in earlier):
        return Response((), "restart")
    return _exclude(_running(at_fault, status), alone=True) or Response((), "restart")


def is_over(incident: Incident, status: Status) -> bool:
    """Return whether the controller has ended the generation of an incident."""
    return 0 < incident.generation < status.generation


_PATIENCE = 4
_STANDING_S = ("idle s", "since last arrival s", "age s")


def _busy(incident: Incident) -> bool:
    """Return whether a suspected rank computes, reads or writes."""
    return incident.verdict.numbers.get("runs", 0) > 0


def _may_go_on(incident: Incident) -> bool:
    """Return whether the ranks may well go on by themselves.

    A busy rank evaluates, saves or reads data, and would begin again after a restart: it has the
    time after which the backend itself gives up. An idle one waits for something that no counter
    shows: it has several times its limit.
    """
    numbers = incident.verdict.numbers
    stood = next((numbers[name] for name in _STANDING_S if name in numbers), 0.0)
    if _busy(incident):
        return stood < numbers.get("engine s", ENGINE_S)
    return incident.verdict.kind is VerdictKind.HANG and stood < _PATIENCE * numbers.get(
        "limit s", 0.0
    )


def _in_vain(incident: Incident, before: Iterable[Incident]) -> bool:
    """Return whether a restart for a hang at the same place brought no step beyond it."""
    place = incident.verdict.place
    return bool(place) and any(
        other.id != incident.id
        and other.enforced
        and other.verdict.place == place
        and incident.step <= other.step
        for other in before
    )


def _like(other: Incident, incident: Incident) -> bool:
    """Return whether another incident of the class had its response not long before."""
    recent = 0 <= incident.opened_at - other.opened_at < _AGAIN_S
    same = other.id != incident.id and other.kind == incident.kind
    return same and recent and other.enforced


def _nodes(incident: Incident) -> tuple[str, ...]:
    """Return the nodes at fault; of communication, those that probes name and not all members."""
    if incident.verdict.kind in (VerdictKind.COMM_HANG, VerdictKind.SLOW_LINK):
        named = [s.name for s in incident.verdict.suspects if s.target in _ENDS]
        return tuple(dict.fromkeys(named))
    return incident.nodes


def _running(nodes: Sequence[str], status: Status | None) -> tuple[str, ...]:
    """Return those of `nodes` that run ranks; none if no other node runs ranks."""
    if status is None:
        return ()
    here = {row.name for row in status.nodes if row.running and row.up}
    chosen = tuple(n for n in nodes if n in here)
    return chosen if len(chosen) < len(here) else ()


def _spares(status: Status | None) -> int:
    rows: Sequence[NodeRow] = () if status is None else status.nodes
    return sum(row.spare and row.up and row.slots > 0 and row.out_until_s == 0 for row in rows)


def _exclude(nodes: tuple[str, ...], *, alone: bool) -> Response | None:
    if not nodes:
        return None
    return Response(nodes, f"exclude {', '.join(nodes)} and restart", alone=alone)


# --- carrying responses out -----------------------------------------------------------------------


class Responder:
    """Follows a job's controller and carries out the responses to incidents. To be closed.

    The watch learns which generations the controller has ended, so that the end of their ranks is
    no incident. A response is carried out at most once for each incident, in a thread of its own.

    Parameters
    ----------
    addresses, job, secret, url
        As of `ControllerLink`.
    settings
        The policy.
    rounds
        Owns the watch.
    tape
        Records the messages to the watch.
    changed
        Called from any thread when `document` has changed.
    answered
        Called in the watch's thread with an incident whose response was sent or refused.

    Attributes
    ----------
    controller
        The link.
    counts
        Counters for metrics.
    last_fence
        The newest frame that fenced generations, for recordings that begin after it.
    """

    def __init__(
        self,
        addresses: Callable[[], str],
        job: str,
        secret: bytes,
        settings: WatchSettings,
        *,
        rounds: Rounds,
        tape: MessageBuffer,
        changed: Callable[[], None],
        answered: Callable[[JobWatch, Incident], None],
        url: str = "",
    ) -> None:
        self._settings, self._rounds, self._tape = settings, rounds, tape
        self._changed, self._answered = changed, answered
        self._fenced = -1
        self._waiting: queue.SimpleQueue[tuple[Incident, Response] | None] = queue.SimpleQueue()
        self._asked: set[str] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="responder", daemon=True)
        self.counts = RecoveryCounts()
        self.last_fence: RecordedFrame | None = None
        self.controller = ControllerLink(addresses, job, secret, self._on_status, url)

    def start(self) -> None:
        """Begin to connect."""
        self.controller.start()
        self._thread.start()

    def close(self) -> None:
        """End after the response that is being sent, which has its own deadline."""
        self.controller.close()
        self._waiting.put(None)
        if self._thread.is_alive():
            self._thread.join(1.0)

    # --- the controller's status ----------------------------------------------------------------

    def _on_status(self, status: Status | None) -> None:
        if status is not None:
            self.counts.take(status)
            if status.generation > self._fenced:
                self._fence(status)
        self._changed()

    def _fence(self, status: Status) -> None:
        """Tell the watch that ranks of generations before the newest end on purpose."""
        fencing = Fencing(below=status.generation, reason=status.reason[:_MOST_FENCE_REASON])

        def work(watch: JobWatch, now: float) -> None:
            watch.fence(fencing, now)
            self.last_fence = RecordedFrame(now, FENCING, pack(fencing))
            self._tape.add(self.last_fence)

        try:
            self._rounds.call(work)
        except TransientStoreError:
            return  # too many calls wait: the next status has the same generation
        self._fenced = status.generation

    def document(self) -> ControllerStatusDocument:
        """Return the controller's newest status, and whether it is connected."""
        link = self.controller
        address = link.status.address if link.status is not None else ""
        return ControllerStatusDocument(
            ControllerLinkDocument(link.connected, address), link.status
        )

    # --- responses ------------------------------------------------------------------------------

    def _response(self, incident: Incident, others: Sequence[Incident]) -> Response | None:
        """Return what is to be done about an open incident now; None if nothing is."""
        status = self.controller.status
        if incident.state != "open" or incident.enforced or status is None or status.ended:
            return None
        if is_over(incident, status):
            return None
        wanted = self._settings.policy.get(incident.verdict.kind, "log")
        return response(incident, status, others, wanted)

    def judge(self, open_: Sequence[Incident], others: Sequence[Incident]) -> None:
        """Carry out the responses that need no person; returns at once."""
        if not self.controller.connected:
            return
        for incident in open_:
            if self._settings.policy.get(incident.verdict.kind) != "act":
                continue
            chosen = self._response(incident, others)
            if chosen is not None and chosen.alone and self._take(incident.id):
                self._waiting.put((incident, chosen))

    def proposal(self, incident: Incident, others: Sequence[Incident]) -> Proposal | None:
        """Return what a person may have done about an incident; None if nothing."""
        if not self.controller.connected or incident.response:
            return None
        found = self._response(incident, others)
        return None if found is None else Proposal(found.text, found.nodes)

    def enforce(self, incident: Incident, others: Sequence[Incident]) -> Answer:
        """Carry out the response that a person has agreed to; waits for the controller.

        Raises
        ------
        ConflictError
            There is none, or it was carried out.
        NotFoundError
            No controller answers.
        """
        chosen = self._response(incident, others)
        if chosen is None or not self._take(incident.id):
            raise ConflictError(
                "this incident needs no action now",
                where=incident.id,
                hint="it is closed, was answered, or its class has no response; ckptd ctl sends"
                " any other order",
            )
        return self._send(incident, chosen)

    def _take(self, ident: str) -> bool:
        with self._lock:
            new = ident not in self._asked
            self._asked.add(ident)
            return new

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                self._send(*item)
            except CkptdError as error:
                # The next round tries again, for as long as the incident is open.
                print(f"ckptd: {item[0].id}: {error}", file=sys.stderr, flush=True)  # noqa: T201

    def _send(self, incident: Incident, chosen: Response) -> Answer:
        reason = f"{incident.id}: {incident.kind} of {_suspects(incident)}"[:_MOST_REASON]
        suspected = Suspected(
            nodes=chosen.nodes,
            reason=reason,
            since_s=max(incident.latency_s + time.time() - incident.opened_at, 0.0),
            generation=incident.generation,
        )
        try:
            answer = self.controller.order(suspected)
        except NotFoundError:
            with self._lock:
                self._asked.discard(incident.id)
            raise
        text = chosen.text if answer.ok else f"{chosen.text}: refused, {answer.text}"
        self._mark(incident.id, answer.ok, text)
        return answer

    def _mark(self, ident: str, done: bool, text: str) -> Future[Incident]:
        def work(watch: JobWatch, now: float) -> Incident:
            incident = watch.answered(ident, done, text)
            self._answered(watch, incident)
            return incident

        return self._rounds.call(work)


def _suspects(incident: Incident) -> str:
    named = [f"{s.target} {s.name}" for s in incident.verdict.suspects]
    return first_few(named, 4) or "an unknown suspect"
