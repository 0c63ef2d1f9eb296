"""Daemon without HTTP: keeps history, publishes events, calls webhook, records, documents.

In it: how often the job's state is sent and kept; sizes of tape and history; errors without a
controller.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from msgspec import UNSET

from ckptd.elastic.messages import Answer, Order
from ckptd.errors import NotFoundError
from ckptd.monitor.collectives import CallTable
from ckptd.monitor.daemon.bodies import json_bytes
from ckptd.monitor.daemon.documents import (
    ControllerStatusDocument,
    IncidentDocument,
    JobDocument,
    LinksDocument,
    MeshDocument,
    Names,
    RanksDocument,
)
from ckptd.monitor.daemon.history import History, from_stored, to_stored
from ckptd.monitor.daemon.ingest import Ingest, take_into
from ckptd.monitor.daemon.lifetime import GenerationLog, RecordedSaves, TimeSpent
from ckptd.monitor.daemon.live import Hub, StreamEvent
from ckptd.monitor.daemon.response import Responder
from ckptd.monitor.daemon.rounds import RankTable, RoundResult, Rounds
from ckptd.monitor.daemon.tape import MessageBuffer
from ckptd.monitor.daemon.webhook import Webhook
from ckptd.monitor.incidents import Changes, Incident
from ckptd.monitor.recording import ROUND, SHEET, RecordedFrame, RecordingWriter, encode
from ckptd.monitor.report import AgentOrders, EvidenceReport, NodeReport, pack
from ckptd.monitor.settings import WatchSettings
from ckptd.monitor.watch import JobWatch
from ckptd.version import __version__

_TELL_S = 1.0
_KEEP_S = 10.0


@dataclass(frozen=True)
class DaemonSetup:
    """Settings of a daemon.

    Attributes
    ----------
    job, secret
        Name of the job, and its secret.
    history
        The history file.
    settings
        Of the watch.
    events
        Folders with recorded events of saves.
    webhook, webhook_key
        Where incidents are sent, and what signs them; no URL for nowhere.
    recording
        A new file where all messages are recorded; None for none.
    tape_bytes
        What the last messages may take in memory.
    history_bytes
        What the history may take on the disk.
    controller
        Returns where the job's controller is, ``HOST:PORT``, empty if that is not known; None for
        a job that has none.
    url
        Of this daemon, as the job's nodes reach it; empty: it is not announced.
    """

    job: str
    secret: bytes
    history: Path
    settings: WatchSettings = field(default_factory=WatchSettings)
    events: Sequence[str] = ()
    webhook: str | None = None
    webhook_key: bytes = b""
    recording: Path | None = None
    tape_bytes: int = 64 << 20
    history_bytes: int = 256 << 20
    controller: Callable[[], str] | None = None
    url: str = ""


class Service:
    """A daemon without its HTTP server.

    Parameters
    ----------
    setup
        Its settings.
    """

    def __init__(self, setup: DaemonSetup) -> None:
        self.setup = setup
        self.up_since = time.time()
        self.history = History(setup.history, setup.history_bytes)
        if self.history.set_aside is not None:
            _say(f"the history was damaged; it is now {self.history.set_aside}")
        self.history.put_about(setup.job)
        self._epoch = time.time() - time.monotonic()
        self.tape = MessageBuffer(setup.tape_bytes, self._recorder())
        self.hub = Hub()
        self.goodput = TimeSpent()
        self.collectives = CallTable()
        self.checkpoints = RecordedSaves(setup.events)
        self.generations = GenerationLog(self.history)
        self._told = 0
        self.webhook = Webhook(setup.webhook, setup.webhook_key) if setup.webhook else None
        watch = JobWatch(
            setup.job,
            setup.settings,
            epoch=self._epoch,
            incidents=self._remembered(),
        )
        self.names = Names(watch.sources.names, watch.sources.texts)
        self.members = watch.sources.members
        self.usage = watch.sources.usage
        self.evidence = watch.evidence
        self.rounds = Rounds(watch, self._on_round)
        self.ingest = Ingest(setup.job, setup.secret, self._call, self._take(watch), self.tape)
        self.responder = self._elastic()
        self.verdicts: Counter[tuple[str, str, str]] = Counter()
        self.latencies: list[float] = []
        self._walls: list[tuple[float, float]] = []
        self._published: dict[str, tuple[object, ...]] = {}
        self._kept_at: dict[str, float] = {}
        self._tell_at = 0.0
        self._published_revision = 0
        self._mesh_of: tuple[int, int] = (-1, -1)
        self._mesh: MeshDocument | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def _recorder(self) -> RecordingWriter | None:
        path = self.setup.recording
        return None if path is None else RecordingWriter(path, self.setup.job, self._epoch)

    def _elastic(self) -> Responder | None:
        setup = self.setup
        if setup.controller is None:
            return None
        return Responder(
            setup.controller,
            setup.job,
            setup.secret,
            setup.settings,
            rounds=self.rounds,
            tape=self.tape,
            changed=self._publish_elastic,
            answered=self._answered,
            url=setup.url,
        )

    def _remembered(self) -> list[Incident]:
        found = [from_stored(data) for data in self.history.incidents(limit=1000)]
        return sorted((i for i in found if i is not None), key=lambda i: i.opened_at)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin rounds; events are published in `loop`."""
        self._loop = loop
        self.rounds.start()
        if self.responder is not None:
            self.responder.start()

    def close(self) -> None:
        """End in order: the round at hand, then webhook and history."""
        self._loop = None
        if self.responder is not None:
            self.responder.close()
        self.rounds.close()
        if self.webhook is not None:
            self.webhook.close()
        self.history.close()
        self.tape.close()

    # -- messages ---------------------------------------------------------------------------------

    def _call(self, work: Callable[[float], AgentOrders]) -> Future[AgentOrders]:
        return self.rounds.call(lambda _watch, now: work(now))

    def _take(self, watch: JobWatch) -> Callable[[NodeReport | EvidenceReport, float], AgentOrders]:
        def take(message: NodeReport | EvidenceReport, now: float) -> AgentOrders:
            orders = take_into(watch, message, now)
            if isinstance(message, NodeReport):
                self.generations.see(message)
                self.collectives.take(
                    message.source, message.number, message.after, message.table("collectives"), now
                )
            return orders

        return take

    def acknowledge(self, ident: str, note: str) -> Future[Incident]:
        """Note that a person has seen an incident; NotFoundError."""

        def work(watch: JobWatch, now: float) -> Incident:
            incident = watch.acknowledge(ident, note, now)
            self._noted(watch, incident)
            return incident

        return self.rounds.call(work)

    def look(self, rank: int) -> Future[None]:
        """Have the stack and the last output of a rank taken; its next documents have them."""
        return self.rounds.call(lambda watch, now: watch.evidence.ask(rank, now))

    def _noted(self, watch: JobWatch, incident: Incident) -> None:
        self._keep(incident)
        # The person who acknowledged it looks at once whether that shows.
        self.rounds.last = replace(self.rounds.last, incidents=watch.incidents)
        self._publish_incident(self.rounds.last, incident)

    # -- the controller ---------------------------------------------------------------------------

    def _answered(self, watch: JobWatch, incident: Incident) -> None:
        if incident.enforced:
            self.verdicts[str(incident.kind), incident.action, "true"] += 1
        self._noted(watch, incident)

    def order(self, order: Order) -> Answer:
        """Hand an order to the controller; NotFoundError."""
        return self._controlled().controller.order(order)

    def enforce(self, ident: str) -> Answer:
        """Carry out the response of an incident.

        Raises
        ------
        NotFoundError
            No incident has that id; or no controller of this job answers, or its address is not
            known.
        ConflictError
            Nothing is to be done about it now.
        """
        elastic = self._controlled()
        return elastic.enforce(self.incident(ident), self.rounds.last.incidents)

    def _controlled(self) -> Responder:
        if self.responder is None:
            raise NotFoundError(
                "this daemon has no controller",
                where=f"job {self.setup.job}",
                hint="ckptd serve --controller HOST:PORT",
            )
        return self.responder

    def controller_document(self) -> ControllerStatusDocument:
        """Return the controller's status: a part of ``GET /elastic``, and the event ``elastic``."""
        return ControllerStatusDocument() if self.responder is None else self.responder.document()

    def shown(self, incident: Incident, evidence: bool = False) -> IncidentDocument:
        """Return the document of an incident, with what may be done about it."""
        proposal = None
        if self.responder is not None:
            proposal = self.responder.proposal(incident, self.rounds.last.incidents)
        return IncidentDocument.of(incident, self.names, evidence=evidence, proposal=proposal)

    # -- after a round ----------------------------------------------------------------------------

    def _on_round(self, result: RoundResult, changes: Changes) -> None:
        self.tape.add(RecordedFrame(result.now, ROUND))
        self.goodput.add(result)
        walls = result.walls[np.isfinite(result.walls)]
        if len(walls):
            self._walls.append((float(np.median(walls)), float(np.quantile(walls, 0.9))))
        self.generations.judge(result)
        for incident in (*changes.opened, *changes.updated, *changes.closed):
            self._changed(result, incident, opened=incident in changes.opened)
        for name, incidents in (("opened", changes.opened), ("closed", changes.closed)):
            for incident in incidents:
                self._send(name, incident)
        if self.responder is not None and result.open:
            self.responder.judge(result.open, result.incidents)
        if result.now >= self._tell_at or changes.opened or changes.closed:
            self._tell_at = result.now + _TELL_S
            self._keep_round(result)
            self._publish(result)

    def _changed(self, result: RoundResult, incident: Incident, opened: bool) -> None:
        if opened:
            self.verdicts[str(incident.kind), incident.action, str(incident.enforced).lower()] += 1
            self.latencies = [*self.latencies[-9999:], incident.latency_s]
        new = _state_of(incident)
        news = self._published.get(incident.id) != new
        if news or result.now - self._kept_at.get(incident.id, -math.inf) > _KEEP_S:
            self._keep(incident)
            self._kept_at[incident.id] = result.now
            self._published[incident.id] = new
            self._publish_incident(result, incident)
        if incident.state == "closed":
            self._published.pop(incident.id, None)
            self._kept_at.pop(incident.id, None)

    def _keep(self, incident: Incident) -> None:
        self.history.put_incident(
            incident.id, incident.opened_at, incident.state, to_stored(incident)
        )

    def _keep_round(self, result: RoundResult) -> None:
        ranks = result.job.ranks
        steps = result.steps
        own = self.rounds.ranks.rows["self_s"]
        own = own[np.isfinite(own)]
        walls, self._walls = self._walls or [(math.nan, math.nan)], []
        self.history.put_round(
            result.at,
            {
                "step_min": float(steps.min()) if len(steps) else math.nan,
                "step_max": float(steps.max()) if len(steps) else math.nan,
                "step_s_median": sum(w[0] for w in walls) / len(walls),
                "step_s_p90": sum(w[1] for w in walls) / len(walls),
                "world": result.job.world,
                "reporting": len(ranks),
                "silent_agents": sum(a.silent for a in result.agents),
                "self_median": float(np.median(own)) if len(own) else math.nan,
                "self_max": float(own.max()) if len(own) else math.nan,
                "round_ms": result.round_ms,
                "open_incidents": len(result.open),
            },
        )

    def _send(self, name: str, incident: Incident) -> None:
        if self.webhook is not None:
            self._told += 1
            self.webhook.send(
                json_bytes(
                    {
                        "event": name,
                        "life": self.hub.life,
                        "number": self._told,
                        "unix": time.time(),
                        "job": self.setup.job,
                        "incident": self.shown(incident, evidence=True),
                    }
                )
            )

    # -- documents --------------------------------------------------------------------------------

    def job_document(self, result: RoundResult) -> JobDocument:
        """Return the document of ``GET /job``."""
        return JobDocument.of(
            result,
            name=self.setup.job,
            version=__version__,
            up_since=self.up_since,
            generation=self.generations.newest,
            goodput=self.goodput.document(),
        )

    def ranks_document(self, since: int | None = None) -> RanksDocument:
        """Return the document of ``GET /ranks``; with a mesh only where it has all rows."""
        with self.rounds.ranks_lock:
            table = self.rounds.ranks
            mesh = self._mesh_now(table) if since is None else UNSET
            return RanksDocument.of(table, self.names, self.rounds.last.at, since, mesh)

    def _mesh_now(self, table: RankTable) -> MeshDocument | None:
        key = (len(self.members), len(table.rows))
        if key != self._mesh_of:
            self._mesh = MeshDocument.of(self.names, self.members, table.rows["rank"])
            self._mesh_of = key
        return self._mesh

    def incidents(
        self, state: str | None = None, before: float | None = None, limit: int = 100
    ) -> list[Incident]:
        """Return incidents, the newest first: those that are remembered, and older ones."""
        found = {i.id: i for i in self.rounds.last.incidents}
        for data in self.history.incidents(state, before, limit):
            old = from_stored(data)
            if old is not None:
                found.setdefault(old.id, old)
        chosen = [
            i
            for i in found.values()
            if (state is None or i.state == state) and (before is None or i.opened_at < before)
        ]
        return sorted(chosen, key=lambda i: (i.opened_at, i.id), reverse=True)[:limit]

    def incident(self, ident: str) -> Incident:
        """Return one incident; NotFoundError."""
        for incident in self.rounds.last.incidents:
            if incident.id == ident:
                return incident
        data = self.history.incident(ident)
        found = None if data is None else from_stored(data)
        if found is None:
            raise NotFoundError(
                "unknown incident", where=ident[:100], hint="ckptd incidents lists them"
            )
        return found

    def recording(self, seconds: float) -> bytes:
        """Return a recording of the last seconds, as far as they are in memory.

        It begins with what agents send only once: names and members of groups, and texts.
        """
        frames = self.tape.since(time.monotonic() - seconds)
        if frames:
            named = NodeReport(
                job=self.setup.job,
                source="names",
                number=0,
                members=dict(self.names.groups.copy()),
                texts=dict(self.names.texts.copy()),
            )
            frames.insert(0, RecordedFrame(frames[0].at, SHEET, pack(named)))
            fence = self.responder.last_fence if self.responder is not None else None
            if fence is not None and fence.at < frames[0].at:
                frames.insert(1, RecordedFrame(frames[0].at, fence.kind, fence.body))
        return encode(self.setup.job, self._epoch, frames)

    def first_events(self, since: int | None) -> list[StreamEvent]:
        """Return what a client of the stream gets at once."""
        result = self.rounds.last
        events = [] if since is None else self.hub.missed(since)
        if since is None:
            events = [self._incident_event(result, i) for i in result.open]
        parts = (
            ("job", self.job_document(result)),
            ("ranks", self.ranks_document(since)),
            ("links", LinksDocument.of(result)),
            ("elastic", self.controller_document()),
        )
        return [*events, *(StreamEvent(result.revision, n, json_bytes(body)) for n, body in parts)]

    def _incident_event(self, result: RoundResult, incident: Incident) -> StreamEvent:
        return StreamEvent(result.revision, "incident", json_bytes(self.shown(incident)))

    def _publish_incident(self, result: RoundResult, incident: Incident) -> None:
        self._emit(self._incident_event(result, incident), kept=True)

    def _publish(self, result: RoundResult) -> None:
        if not len(self.hub):
            self._published_revision = result.revision
            return
        mesh = self._mesh_of
        with self.rounds.ranks_lock:
            self._mesh_now(self.rounds.ranks)
        since = None if mesh != self._mesh_of else self._published_revision
        self._emit(StreamEvent(result.revision, "job", json_bytes(self.job_document(result))))
        self._emit(StreamEvent(result.revision, "ranks", json_bytes(self.ranks_document(since))))
        if result.links_at is not None and result.at - result.links_at < 3 * _TELL_S:
            self._emit(StreamEvent(result.revision, "links", json_bytes(LinksDocument.of(result))))
        self._published_revision = result.revision

    def _publish_elastic(self) -> None:
        revision = self.rounds.last.revision
        self._emit(StreamEvent(revision, "elastic", json_bytes(self.controller_document())))

    def _emit(self, event: StreamEvent, kept: bool = False) -> None:
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self.hub.publish, event, kept)
            except RuntimeError:  # the loop has ended
                self._loop = None


def _state_of(incident: Incident) -> tuple[object, ...]:
    """Return the fields whose change is stored and sent at once."""
    return (
        incident.state,
        incident.kind,
        tuple((s.target, s.name) for s in incident.verdict.suspects),
        len(incident.stacks),
        len(incident.calls),
        len(incident.logs),
        len(incident.probes),
        incident.consequences,
        incident.acknowledged_at,
        incident.note,
        incident.action,
        incident.enforced,
        incident.response,
    )


def _say(text: str) -> None:
    print(f"ckptd: {text}", file=sys.stderr, flush=True)  # noqa: T201


def page_folder() -> Path:
    """Return the folder of the web page's files."""
    return Path(os.path.dirname(__file__)) / "page"
