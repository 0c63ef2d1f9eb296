"""`JobWatch`: one round: gathers reports, runs all rules, links, incidents, evidence, orders.

In it: how long an end is held back where a controller may have meant it; slow steps without a slow
rank.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from ckptd.errors import RefusedError
from ckptd.monitor.incidents import (
    Changes,
    Incident,
    IncidentTracker,
    RoundFacts,
    WantedEvidence,
    calls_text,
    suspected_ranks,
)
from ckptd.monitor.job import AgentView, JobView
from ckptd.monitor.links import LinkMatrix, LinkProber
from ckptd.monitor.report import (
    GAP,
    AgentOrders,
    EvidenceReport,
    Fencing,
    NodeReport,
    gathered,
    job_of,
    selected,
)
from ckptd.monitor.ring import RecorderState
from ckptd.monitor.rules.corruption import SumTable
from ckptd.monitor.rules.diagnose import diagnose
from ckptd.monitor.rules.endings import Endings, Stopped
from ckptd.monitor.rules.limits import CallLoops, Learned, learn, learn_cut_short
from ckptd.monitor.rules.notfinite import FirstBad
from ckptd.monitor.rules.signs import recent_signs
from ckptd.monitor.rules.slow import RankRoles, StepPace
from ckptd.monitor.settings import WatchSettings
from ckptd.monitor.sources import AgentHealth, ReportSources, old
from ckptd.monitor.stats import Array
from ckptd.monitor.verdict import Suspect, Verdict, VerdictKind

STUCK = "communication stands still"
SLOWER = "steps take longer, and no rank's own time does"
RECHECK = "to check whether it still holds"
HELD_S = 1.0
"""With a controller, an end is held back for this long: the controller may have meant it."""


class JobWatch:
    """The watch over one job. No method reads a clock: each takes the moment, monotonic seconds.

    Parameters
    ----------
    job
        Name of the job whose reports are taken.
    settings
        The defaults if left out.
    epoch
        Unix time at which the monotonic clock was 0; for the times that people read.
    incidents
        What an earlier life of the daemon knew; their numbers are not given again, and those that
        are open go on.
    """

    def __init__(
        self,
        job: str,
        settings: WatchSettings | None = None,
        *,
        epoch: float = 0.0,
        incidents: Sequence[Incident] = (),
    ) -> None:
        self.name = job
        self.settings = settings or WatchSettings()
        self.epoch = epoch
        self.sources = ReportSources(self.settings)
        self.learned = Learned()
        """The usual figures so far."""
        self.rounds = 0
        """Rounds so far."""
        self.round_cpu_s = 0.0
        """CPU seconds of the last round."""
        self.generation = 0
        """The newest generation in any report."""
        links = self.settings.links
        self._links = LinkProber(
            links, every_s=self.settings.probe_s, peers=self.settings.probe_peers
        )
        self._cases = IncidentTracker(job, self.settings, incidents)
        self._endings = Endings(self.settings.wait_s)
        self._stopped = Stopped()
        self._fenced = 0
        self._over: tuple[Incident, ...] = ()
        self.evidence = WantedEvidence()
        """Stacks and output of ranks that came lately, and those to ask for."""
        self._loops = CallLoops()
        self._pace = StepPace(self.settings.slow)
        self._sums = SumTable()
        self._bad = FirstBad()
        self._gaps: list[Array] = []
        self._job = job_of((), {})
        self._names: dict[int, str] = {}
        self._timeouts: dict[int, float] = {}
        self._agents: tuple[AgentHealth, ...] = ()
        self._began: float | None = None
        self._fresh = False

    # --- what comes in --------------------------------------------------------------------------

    def take(self, report: NodeReport, now: float) -> None:
        """Take a checked report.

        Raises
        ------
        RefusedError
            It is of another job;: its source has sent it, or a newer one, before.
        """
        self._check_job(report.job)
        self.sources.take(report, now)
        self._fresh = True
        self._began = now if self._began is None else self._began
        ranks = report.table("ranks")
        if len(report.steps):
            self._pace.add(report.table("steps"), ranks)
        if len(report.sums):
            self._sums.add(report.table("sums"), ranks["rank"], now)
            self._bad.add(report.table("sums"), ranks["rank"], now)
        if len(report.gaps):
            self._gaps.append(report.table("gaps"))

    def take_found(self, found: EvidenceReport, now: float) -> None:
        """Take checked findings; errors as of `take`."""
        self._check_job(found.job)
        source = self.sources.by_name.get(found.source)
        if source is not None:
            if found.number <= source.found:
                raise old(found.source, source.found, found.number)
            source.found = found.number
        self.evidence.take(found, now)
        for result in found.probes:
            self._links.take(result)

    def fence(self, fencing: Fencing, now: float) -> None:
        """Take that a controller ends ranks on purpose; the first word of one, with 0, ends none.

        Whatever such ranks show from now on is not judged, and what was open on their account is
        over with the next round. Ranks of the generation that follows are another life.
        """
        self._endings.held_s = HELD_S
        if fencing.below > self._fenced:
            self._fenced = fencing.below
            # What did something when it was ended may well do so again, and take its time.
            busy = self._job.ranks["state"] == b"R"
            self.learned = learn_cut_short(self.learned, self._job, busy)
            self._over += self._cases.fence(
                fencing.below, fencing.reason, RoundFacts(now, now + self.epoch)
            )
            self._pace.forget()
            self._sums.forget()
            self._bad.forget()
            self._fresh = True

    def _check_job(self, job: str) -> None:
        if job != self.name:
            raise RefusedError("this message belongs to another job", wanted=self.name, found=job)

    # --- a round --------------------------------------------------------------------------------

    def round(self, now: float) -> Changes:
        """Judge what is known, and return what that changes.

        Nothing is judged twice: without a new report since the last round nothing changes. A round
        is to be made every ``sources.period_s``, which grows with the job.
        """
        self.rounds += 1
        self._agents = tuple(self.sources.agents(now))
        if not self._fresh:
            return Changes()
        self._fresh = False
        start = time.thread_time()
        changes = self._judge(now)
        over, self._over = self._over, ()
        self.round_cpu_s = time.thread_time() - start
        return msgspec.structs.replace(changes, closed=(*over, *changes.closed))

    def _judge(self, now: float) -> Changes:
        job, rows = self._gather(now)
        self._learn(job, rows, now)
        recorded = _recorded(rows)
        settled = selected(self._endings.settle(job, rows, now), recorded)
        limits = self.settings.limits
        stopped = self._stopped.longer(rows, limits.stopped_s)[recorded]
        standing = diagnose(settled, limits, self.learned, stopped, self._loops)
        if settled.ranks["alive"].any():
            self._pace.judge(settled, self.sources.names)
        else:
            self._pace.forget()
        self._probe(standing, now)
        standing = tuple(self._with_links(v, now) for v in standing)
        values = (*self._sums.judge(now), *self._bad.judge(job, now))
        verdicts = (*standing, *self._pace.verdicts, *self._slow_links(), *values)
        moment = self._moment(job, now)
        changes = self._cases.judge(verdicts, moment)
        self.evidence.want(self._cases.suspected, settled, now)
        return self._with_evidence(changes, settled, moment)

    def _gather(self, now: float) -> tuple[JobView, Array]:
        agents = self._agents
        silent = {a.node: a for a in agents if a.silent}
        missing = self.sources.running(silent, self._fenced)
        addresses = self.sources.addresses()
        speaking = {node: a for node, a in addresses.items() if node not in silent}
        if silent and 2 * len(silent) <= len(agents):
            self._links.ask_reach(missing, addresses, now)
        else:
            self._links.ask_reach((), speaking, now)
        views = [
            AgentView(node, max(silent[node].missed, 1), self._links.reachable.get(node))
            for node in sorted(missing)
        ]
        reports = self.sources.recent(now)
        job, rows = gathered(reports, self.sources.members, views, silent.keys(), self._fenced)
        named = self.sources.names
        if len(self._names) != len(named):
            self._names = {g: " ".join(info.told()).strip() for g, info in named.items()}
            self._timeouts = {g: info.timeout_s for g, info in named.items()}
        self._job = replace(
            job,
            texts=self.sources.texts,
            group_names=self._names,
            timeouts=self._timeouts,
        )
        return self._job, rows

    def _learn(self, job: JobView, rows: Array, now: float) -> None:
        generation = int(rows["generation"].max()) if len(rows) else self.generation
        if generation > self.generation:
            self._pace.forget()
            self._sums.forget()
            self._bad.forget()
            self._loops = CallLoops()
        self.generation = max(generation, self.generation)
        gaps = np.concatenate(self._gaps) if self._gaps else np.zeros(0, GAP)
        self._gaps = []
        if len(rows):
            self.learned = learn(self.learned, job, gaps)
            if not job.ranks["steps_done"].all():  # loops say nothing of ranks that make steps
                self._loops = self._loops.after(job, now)

    def _moment(self, job: JobView, now: float) -> RoundFacts:
        began = now if self._began is None else self._began
        return RoundFacts(
            now=now,
            unix=now + self.epoch,
            generation=self.generation,
            step=int(job.ranks["step"].max()) if len(job.ranks) else -1,
            nodes=max(len(job.nodes), 1),
            node_of=self._node_of(job),
            pid_of=dict(zip(job.ranks["rank"].tolist(), job.ranks["pid"].tolist(), strict=True)),
            signs={a.node: recent_signs(a.state.signs, a.age_s) for a in self._agents},
            early=now - began < self.settings.settle_s,
        )

    def _node_of(self, job: JobView) -> dict[int, str]:
        names = [job.nodes[n] for n in job.ranks["node"].tolist()]
        return dict(zip(job.ranks["rank"].tolist(), names, strict=True))

    # --- links ----------------------------------------------------------------------------------

    def _probe(self, standing: Sequence[Verdict], now: float) -> None:
        silent = {a.node for a in self._agents if a.silent}
        addresses = {n: a for n, a in self.sources.addresses().items() if n not in silent}
        stuck = [v for v in standing if v.kind is VerdictKind.COMM_HANG]
        if stuck:
            self._links.ask(STUCK, addresses, now, self._nodes_of(stuck))
        elif self._pace.longer:
            self._links.ask(SLOWER, addresses, now, ())
        elif self._links.verdicts:
            self._links.ask(RECHECK, addresses, now, ())
        results = self._links.results
        if self._links.advance(set(addresses), now):
            self._cases.attach_probes(results, now + self.epoch)

    def _nodes_of(self, verdicts: Sequence[Verdict]) -> list[str]:
        ranks = [r for v in verdicts for r in suspected_ranks(v, self._job)]
        mine = np.isin(self._job.ranks["rank"], np.array(ranks, np.int64))
        return [self._job.nodes[n] for n in np.unique(self._job.ranks["node"][mine]).tolist()]

    def _slow_links(self) -> tuple[Verdict, ...]:
        matrix = self._links.matrix
        # Of communication that stands still, links are part of that verdict.
        return () if matrix is None or matrix.why == STUCK else self._links.verdicts

    def _with_links(self, verdict: Verdict, now: float) -> Verdict:
        matrix = self._links.matrix
        if verdict.kind is not VerdictKind.COMM_HANG or matrix is None or matrix.why != STUCK:
            return verdict
        if now - matrix.at > verdict.numbers["since last arrival s"]:
            return verdict  # links were probed for another hang, before this one began
        suspects: list[Suspect] = [s for v in self._links.verdicts for s in v.suspects]
        lines = [line for v in self._links.verdicts for line in v.evidence]
        return msgspec.structs.replace(
            verdict,
            suspects=(*suspects, *verdict.suspects),
            evidence=(*verdict.evidence, *(lines or [_nothing_found(matrix)])),
        )

    # --- evidence -------------------------------------------------------------------------------

    def _with_evidence(self, changes: Changes, job: JobView, moment: RoundFacts) -> Changes:
        more = self._cases.attach(self.evidence.stacks, self.evidence.logs, {}, moment.unix)
        self.evidence.forget(moment.now, moment.generation)
        for incident in changes.opened:
            suspects = suspected_ranks(incident.verdict, job)[:8]
            self._cases.change(
                incident.id,
                calls=calls_text(job, suspects, self.sources.texts, self.sources.names),
                stacks=dict(self.evidence.stacks),
                logs=dict(self.evidence.logs),
            )
        new = {i.id for i in changes.opened}
        updated = {i.id: i for i in (*changes.updated, *more) if i.id not in new}
        return Changes(
            opened=tuple(self._cases.get(i) for i in new),
            updated=tuple(self._cases.get(i) for i in updated),
            closed=changes.closed,
        )

    # --- what goes out --------------------------------------------------------------------------

    def orders(self, source: str, now: float) -> AgentOrders:
        """Return what a source is to do next; what is asked for is asked once."""
        known = self.sources.by_name.get(source)
        if known is None:
            return AgentOrders(period_s=self.sources.period_s)
        stacks = self.evidence.orders(known.report.table("ranks")["rank"].tolist())
        probes = self._links.probes(known.report.nodes, self.sources.addresses(), now)
        return AgentOrders(
            period_s=self.sources.period_s,
            tell=not known.named,
            stacks=stacks,
            calls=stacks,
            probes=tuple(probes),
        )

    def acknowledge(self, ident: str, note: str, now: float) -> Incident:
        """Note that a person has seen an incident; NotFoundError."""
        return self._cases.change(ident, acknowledged_at=now + self.epoch, note=note)

    def answered(self, ident: str, done: bool, words: str) -> Incident:
        """Note what was done about an incident; NotFoundError."""
        enforced = done or self._cases.get(ident).enforced
        return self._cases.change(ident, enforced=enforced, response=words)

    # --- what is known --------------------------------------------------------------------------

    def job(self, now: float) -> JobView:
        """Return all ranks that reported in the last round, as of their newest reports."""
        return self._job

    @property
    def agents(self) -> tuple[AgentHealth, ...]:
        """Agents that reported, as of the last round."""
        return self._agents

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """Incidents that are remembered, the oldest first."""
        return self._cases.incidents

    @property
    def mismatches(self) -> int:
        """How often replicas of a step did not agree."""
        return self._sums.mismatches

    @property
    def links(self) -> LinkMatrix | None:
        """The result of the last round of probes; None before the first."""
        return self._links.matrix

    @property
    def roles(self) -> RankRoles:
        """The ranks that each rank of the last round is compared with."""
        return self._pace.roles

    @property
    def scores(self) -> Mapping[int, float]:
        """How many times its like's own time each rank takes, where that is known."""
        return self._pace.ratio

    def walls(self, after: int) -> tuple[int, Array]:
        """Return the newest finished step, and what steps later than `after` took, by rank."""
        return self._pace.walls(after, self._job.ranks["rank"])

    @property
    def self_s(self) -> Mapping[int, float]:
        """Median own time of a step of each rank, in seconds, where steps are reported."""
        return self._pace.self_s


def _nothing_found(matrix: LinkMatrix) -> str:
    if np.isfinite(matrix.seconds).any():
        return "probes show no link slower than others"
    return "no probe came back: nodes may announce addresses that others do not reach (CKPTD_BIND)"


def _recorded(rows: Array) -> Array:
    """Return which ranks show what they do: the counters of others stand still for ever."""
    off = np.isin(rows["recorder"], [RecorderState.OFF, RecorderState.ASIDE])
    out: Array = ~off | (rows["alive"] == 0)
    return out
