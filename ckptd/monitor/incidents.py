"""Incidents: verdicts confirmed, merged by cause, followed, closed; evidence; isolation budget.

In it: how many ranks' stacks are asked for, how long evidence is waited for, latency, what explains
what.

`IncidentTracker` makes incidents of verdicts, one for each cause. `WantedEvidence` asks agents once
for the stacks and logs of suspects.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from ckptd.errors import NotFoundError
from ckptd.monitor.job import CallFlag, JobView
from ckptd.monitor.report import EvidenceReport, GroupInfo, ProbeResult, Sign, Stack
from ckptd.monitor.rules.signs import with_signs
from ckptd.monitor.rules.slow import FIRST_SLOW
from ckptd.monitor.settings import IsolationBudget, WatchSettings
from ckptd.monitor.verdict import STOPS, SuspectKind, Verdict, VerdictKind


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One incident, as it is now; a change makes a new one with the same `id`.

    Attributes
    ----------
    id
        ``{job}-{n}``, with n rising in the life of a daemon's history.
    kind
        Class of the verdict.
    verdict
        The newest one.
    opened_at, updated_at, closed_at
        Unix seconds of the daemon's clock; `closed_at` is None while it is open.
    rounds
        Rounds that showed it.
    state
        ``open`` or ``closed``.
    generation, step
        Newest generation, and largest step of any rank, when it opened; step -1 if unknown.
    enforced
        Whether something was done about it, and not only reported.
    response
        What was done, or why it was not, in words; empty where nothing was tried.
    action
        What the policy of its class asks for: ``log``, ``ask`` or ``act``.
    latency_s
        Age of its oldest sign when it opened, in seconds.
    nodes
        Nodes of the suspects.
    pids
        Node and process id of the first ranks that are named.
    consequences
        What followed from it, in words: ranks that ended after a crash, say.
    stacks
        By global rank.
    calls
        Last calls of the suspects as text, by global rank.
    logs
        Last lines of output, by global rank.
    probes
        Results of link probes made on its account.
    acknowledged_at, note
        When a person took note of it, and what they wrote; None and empty until then.
    """

    id: str
    kind: str
    verdict: Verdict
    opened_at: float
    updated_at: float
    closed_at: float | None = None
    rounds: int = 1
    state: str = "open"
    generation: int = 0
    step: int = -1
    enforced: bool = False
    response: str = ""
    action: str = "log"
    latency_s: float = 0.0
    nodes: tuple[str, ...] = ()
    pids: dict[int, tuple[str, int]] = msgspec.field(default_factory=dict)
    consequences: tuple[str, ...] = ()
    stacks: dict[int, Stack] = msgspec.field(default_factory=dict)
    calls: dict[int, str] = msgspec.field(default_factory=dict)
    logs: dict[int, str] = msgspec.field(default_factory=dict)
    probes: tuple[ProbeResult, ...] = ()
    acknowledged_at: float | None = None
    note: str = ""


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """The changes of a round in the incidents, each as it is after the round."""

    opened: tuple[Incident, ...] = ()
    updated: tuple[Incident, ...] = ()
    closed: tuple[Incident, ...] = ()


# --- evidence -------------------------------------------------------------------------------------


MOST_RANKS = 8
"""Ranks of one verdict of which stacks are taken."""
WAITING_RANKS = 2
"""Ranks that wait, beside the suspects: what they wait in says much."""
ASK_AGAIN_S = 60.0
"""The same rank is asked again after so long."""
EVIDENCE_S = 120.0
SHOWN_CALLS = 32
"""Calls of a rank that are stored as text."""
_WITH_STACKS = frozenset(
    {
        VerdictKind.CRASH,
        VerdictKind.HANG,
        VerdictKind.DEADLOCK,
        VerdictKind.COMM_HANG,
        VerdictKind.MISMATCH,
        VerdictKind.DESYNC,
        VerdictKind.CANNOT_SAY,
    }
)


@dataclass
class WantedEvidence:
    """Ranks to ask about, and what was found lately; no clock."""

    stacks: dict[int, Stack] = field(default_factory=dict)
    logs: dict[int, str] = field(default_factory=dict)
    came: dict[int, float] = field(default_factory=dict)
    generation: int = 0
    _asked: dict[int, float] = field(default_factory=dict)
    _wanted: set[int] = field(default_factory=set)

    def want(self, verdicts: Iterable[Verdict], job: JobView, now: float) -> None:
        """Ask for the stacks of suspects that stand still, and of some that wait for them."""
        for verdict in verdicts:
            if verdict.kind not in _WITH_STACKS:
                continue
            named = suspected_ranks(verdict, job)[:MOST_RANKS]
            # Of a crash the output of the others shows whether it was the first.
            crash = verdict.kind is VerdictKind.CRASH
            inside = job.ranks["rank"][crash | (job.ranks["pending_group"] != 0)]
            others = [r for r in inside[: MOST_RANKS + WAITING_RANKS].tolist() if r not in named][
                :WAITING_RANKS
            ]
            for rank in [*named, *others]:
                if now - self._asked.get(rank, -np.inf) > ASK_AGAIN_S:
                    self._asked[rank] = now
                    self._wanted.add(rank)

    def ask(self, rank: int, now: float) -> None:
        """Ask for the stack and the last output of a rank that a person looks at."""
        self._asked[rank] = now
        self._wanted.add(rank)

    def orders(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks, of these, whose stacks are wanted; each is returned once."""
        if not self._wanted:
            return ()
        out = tuple(sorted(self._wanted.intersection(ranks)))
        self._wanted.difference_update(out)
        return out

    def take(self, found: EvidenceReport, now: float) -> None:
        """Keep what was found, for as long as it may concern an incident."""
        for rank in (*found.stacks, *found.logs):
            self.came[rank] = now
        self.stacks.update(found.stacks)
        self.logs.update(found.logs)

    def forget(self, now: float, generation: int) -> None:
        """Drop what is old, or of an earlier generation: other processes have its ranks now."""
        new = generation > self.generation
        for rank in [r for r, at in self.came.items() if new or now - at > EVIDENCE_S]:
            del self.came[rank]
            self.stacks.pop(rank, None)
            self.logs.pop(rank, None)
        asked = {r: at for r, at in self._asked.items() if not new or r in self._wanted}
        self._asked = {r: at for r, at in asked.items() if now - at <= ASK_AGAIN_S}
        self.generation = generation
        self._wanted &= self._asked.keys()


def suspected_ranks(verdict: Verdict, job: JobView) -> list[int]:
    """Return the ranks that a verdict names; if none, some that are inside its groups."""
    named = [int(n) for n in verdict.names() if n.isdecimal()]
    if named:
        return named
    inside = np.isin(job.ranks["pending_group"], np.array(verdict.groups, np.uint64))
    out: list[int] = job.ranks["rank"][inside][:MOST_RANKS].tolist()
    return out


def calls_text(
    job: JobView, ranks: Iterable[int], texts: Mapping[int, str], names: Mapping[int, GroupInfo]
) -> dict[int, str]:
    """Return the last calls of ranks as lines of text, the oldest first."""
    out = {}
    for rank in ranks:
        row = np.flatnonzero(job.ranks["rank"] == rank)
        if not len(row):
            continue
        first, last = np.searchsorted(job.calls["row"], [row[0], row[0] + 1])
        calls = job.calls[max(first, last - SHOWN_CALLS) : last]
        if len(calls):
            out[rank] = "\n".join(_line(call, texts, names) for call in calls)
    return out


def _line(call: np.void, texts: Mapping[int, str], names: Mapping[int, GroupInfo]) -> str:
    op = texts.get(int(call["op"]), f"{int(call['op']):08x}")
    info = names.get(int(call["group"]))
    kind, name = info.told() if info is not None else ("", "")
    group = kind or name or f"{int(call['group']):016x}"
    spent = call["end"] - call["start"]
    flags = CallFlag(int(call["flags"]))
    if CallFlag.UNSEEN in flags:
        ended = "end unknown"
    elif spent == spent:
        ended = f"took {spent:.6f} s"
    else:
        ended = "its device has not reached it" if CallFlag.QUEUED in flags else "goes on"
    site = texts.get(int(call["site"]), "")
    return (
        f"{call['start']:+.3f} s  {group} #{int(call['seq'])}  {op}  "
        f"{int(call['bytes'])} bytes  step {int(call['step'])}  {ended}  {site}"
    ).rstrip()


# --- incidents from verdicts ----------------------------------------------------------------------


STANDING = frozenset(
    {VerdictKind.HANG, VerdictKind.DEADLOCK, VerdictKind.COMM_HANG, VerdictKind.CANNOT_SAY}
)
"""Something stands still; which of these it is may show only with more reports."""

CALLS = frozenset({VerdictKind.MISMATCH, VerdictKind.DESYNC})
"""Members of a group make different calls: both show of one that was left out."""

_LEADS_ON = frozenset({VerdictKind.CRASH, *CALLS, *STANDING})


def touching(one: Verdict, other: Verdict) -> bool:
    """Return whether two verdicts share a suspect or a group, or one names none."""
    mine, theirs = _named(one), _named(other)
    return bool(mine & theirs) or not (mine and theirs)


def _named(verdict: Verdict) -> set[tuple[str, str]]:
    names = {(str(s.target), s.name) for s in verdict.suspects}
    return names | {(str(SuspectKind.GROUP), f"{g:016x}") for g in verdict.groups}


def same_cause(known: Verdict, new: Verdict) -> bool:
    """Return whether two verdicts have one cause."""
    if known.kind is new.kind is VerdictKind.CRASH:
        # Processes end one after the other; each silent node has a verdict of its own.
        return bool(known.names() and new.names()) or touching(known, new)
    for family in (STANDING, CALLS):
        if known.kind in family and new.kind in family:
            return known.kind is new.kind is VerdictKind.CANNOT_SAY or touching(known, new)
    return known.kind is new.kind and touching(known, new)


def explains(new: Verdict, known: Verdict) -> bool:
    """Return whether calls are why ranks ended: a backend ends them before these are compared."""
    calls = new.kind in CALLS and known.kind is VerdictKind.CRASH
    return calls and bool(new.suspects) and _who(new) <= _who(known)


def follows(known: Verdict, new: Verdict) -> bool:
    """Return whether `new` may follow from `known`: ends and waits after a stop of the job."""
    if known.kind not in _LEADS_ON:
        return False
    if new.kind is VerdictKind.CRASH:
        return known.kind is not VerdictKind.CANNOT_SAY
    return new.kind in STANDING and known.kind in (VerdictKind.CRASH, *CALLS)


HOUR_S = 3600.0


class IsolationLedger:
    """Nodes that were isolated, and when; no clock.

    Parameters
    ----------
    budget
        What is allowed.
    """

    def __init__(self, budget: IsolationBudget) -> None:
        self._budget = budget
        self._times: list[float] = []
        self._nodes: set[str] = set()

    @property
    def nodes(self) -> frozenset[str]:
        """Nodes isolated so far."""
        return frozenset(self._nodes)

    def take(self, nodes: Iterable[str], total: int, now: float) -> bool:
        """Take the isolation of `nodes` from the budget; return False, taking nothing, if too much.

        Parameters
        ----------
        nodes
            Names. Those isolated before cost nothing again.
        total
            Nodes of the job.
        now
            The moment, seconds.
        """
        new = set(nodes) - self._nodes
        self._times = [t for t in self._times if now - t < HOUR_S]
        share = max(int(self._budget.share * total), 1)
        if len(self._times) + len(new) > self._budget.per_hour:
            return False
        if len(self._nodes) + len(new) > share:
            return False
        self._times += [now] * len(new)
        self._nodes |= new
        return True


_SPEEDY = frozenset(
    {
        VerdictKind.CRASH,
        VerdictKind.SLOW_RANK,
        VerdictKind.SLOW_LINK,
        VerdictKind.CORRUPTION,
        VerdictKind.NOT_FINITE,
    }
)
"""One round is enough: these were seen several times before the verdict, or are plain."""
_ISOLATES = frozenset(
    {
        VerdictKind.CRASH,
        VerdictKind.HANG,
        VerdictKind.COMM_HANG,
        VerdictKind.SLOW_LINK,
        VerdictKind.CORRUPTION,
    }
)
"""Kinds for which nodes are left out; for the others the program must change."""
_STOPPED = frozenset({VerdictKind.CRASH, *CALLS, *STANDING})
"""Kinds for which stacks and exit reports of ranks are evidence."""
_AGES = ("since last arrival s", "idle s", "age s", FIRST_SLOW)
_LATE_S = 5.0
MOST_WORDS = 64
"""Most consequences that are stored with one incident."""
PROBES = 4096
"""Results of probes kept with one incident."""


@dataclass(frozen=True)
class RoundFacts:
    """The facts of a round beside its verdicts.

    Attributes
    ----------
    now, unix
        Monotonic, and seconds since 1970.
    generation, step
        The newest generation; the largest step of any rank, -1 if unknown.
    nodes
        Nodes of the job.
    node_of, pid_of
        Node and process id of each rank.
    early
        Whether the watch has only just begun: it reports nothing that needs time.
    signs
        What each node's hardware and kernel show.
    """

    now: float
    unix: float
    generation: int = 0
    step: int = -1
    nodes: int = 1
    node_of: Mapping[int, str] = field(default_factory=dict)
    pid_of: Mapping[int, int] = field(default_factory=dict)
    early: bool = False
    signs: Mapping[str, Sequence[Sign]] = field(default_factory=dict)


@dataclass
class _Case:
    """An incident that is open, or a verdict that may become one."""

    verdict: Verdict
    rounds: int
    seen: float
    begun: float
    generation: int
    ident: str = ""


class IncidentTracker:
    """All incidents of a job; no clock.

    Parameters
    ----------
    job
        Its name, for ids.
    settings
        When a verdict becomes an incident, and when it ends.
    incidents
        Of an earlier life.
    """

    def __init__(
        self, job: str, settings: WatchSettings, incidents: Sequence[Incident] = ()
    ) -> None:
        self._slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", job)
        self._settings = settings
        self._ledger = IsolationLedger(settings.budget)
        self._incidents = {i.id: i for i in incidents}
        self._open: list[_Case] = []
        self._maybe: list[_Case] = []
        numbers = [int(i.rpartition("-")[2]) for i in self._incidents if i[-1:].isdigit()]
        self._next = max(numbers, default=0) + 1
        self._left = [i for i in incidents if i.state == "open"]

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """Those that are remembered, the oldest first."""
        return tuple(self._incidents.values())

    @property
    def suspected(self) -> tuple[Verdict, ...]:
        """Verdicts of open incidents, and of those that may become one."""
        return tuple(c.verdict for c in (*self._open, *self._maybe))

    def get(self, ident: str) -> Incident:
        """Return an incident; NotFoundError."""
        if ident not in self._incidents:
            raise NotFoundError("unknown incident", where=ident)
        return self._incidents[ident]

    def change(self, ident: str, **fields: Any) -> Incident:
        """Return an incident with other fields, and remember it so."""
        changed = msgspec.structs.replace(self.get(ident), **fields)
        self._incidents[ident] = changed
        return changed

    # --- a round --------------------------------------------------------------------------------

    def judge(self, verdicts: Sequence[Verdict], moment: RoundFacts) -> Changes:
        """Take the verdicts of a round, and return what they change."""
        opened: list[Incident] = []
        updated: dict[str, Incident] = {}
        maybe = []
        self._take_up(moment)
        for seen in verdicts:
            verdict = with_signs(seen, moment.signs, moment.node_of)
            case = self._known(verdict, moment)
            if case is not None:
                self._seen(case, verdict, moment, updated)
                continue
            cause = self._cause(verdict, moment)
            if cause is not None:
                self._follow(cause, verdict, moment, updated)
                continue
            case = self._candidate(verdict, moment)
            if case.rounds >= self._needed(verdict) and not self._too_early(verdict, moment):
                opened.append(self._begin(case, moment))
            else:
                maybe.append(case)
        self._maybe = maybe
        closed = self._end(moment)
        new = {i.id for i in opened}
        return Changes(
            opened=tuple(self._incidents[i.id] for i in opened),
            updated=tuple(i for i in updated.values() if i.id not in new),
            closed=closed,
        )

    def _take_up(self, moment: RoundFacts) -> None:
        """Go on with incidents that an earlier life left open."""
        for incident in self._left:
            self._open.append(
                _Case(
                    incident.verdict,
                    incident.rounds,
                    moment.now,
                    moment.now,
                    incident.generation,
                    incident.id,
                )
            )
        self._left = []

    def _known(self, verdict: Verdict, moment: RoundFacts) -> _Case | None:
        for case in self._open:
            # What stops the job after a restart is another one's, though it be the same rank.
            other = case.generation != moment.generation
            if same_cause(case.verdict, verdict) and not (verdict.kind in STOPS and other):
                return case
            soon = moment.now - case.begun <= _LATE_S and not other
            if soon and explains(verdict, case.verdict):
                return case
        return None

    def _cause(self, verdict: Verdict, moment: RoundFacts) -> _Case | None:
        limit = self._settings.consequences_s
        for case in self._open:
            recent = moment.now - case.seen <= limit and moment.now - case.begun <= 10 * limit
            if follows(case.verdict, verdict) and recent and moment.generation == case.generation:
                return case
        return None

    def _candidate(self, verdict: Verdict, moment: RoundFacts) -> _Case:
        for case in self._maybe:
            if same_cause(case.verdict, verdict):
                # Of two verdicts of one round that have one cause, the second confirms nothing.
                case.rounds += moment.now > case.seen
                case.verdict, case.seen = verdict, moment.now
                return case
        return _Case(verdict, 1, moment.now, moment.now, moment.generation)

    def _needed(self, verdict: Verdict) -> int:
        sure = verdict.kind in (VerdictKind.MISMATCH, VerdictKind.DESYNC) and verdict.suspects
        agreed = sure and max(s.confidence for s in verdict.suspects) > 0.9
        return 1 if verdict.kind in _SPEEDY or agreed else self._settings.confirm

    def _too_early(self, verdict: Verdict, moment: RoundFacts) -> bool:
        plain = verdict.kind in _SPEEDY or verdict.kind in (
            VerdictKind.MISMATCH,
            VerdictKind.DESYNC,
        )
        return moment.early and not plain

    def _begin(self, case: _Case, moment: RoundFacts) -> Incident:
        verdict = case.verdict
        case.ident = f"{self._slug}-{self._next}"
        self._next += 1
        self._open.append(case)
        nodes = _nodes(verdict, moment)
        incident = Incident(
            id=case.ident,
            kind=str(verdict.kind),
            verdict=verdict,
            opened_at=moment.unix,
            updated_at=moment.unix,
            rounds=case.rounds,
            generation=moment.generation,
            step=moment.step,
            action=self._action(verdict, nodes, moment),
            latency_s=latency(verdict),
            nodes=nodes,
            pids=_pids(verdict, moment),
        )
        self._incidents[case.ident] = incident
        return incident

    def _action(self, verdict: Verdict, nodes: Sequence[str], moment: RoundFacts) -> str:
        wanted = self._settings.policy.get(verdict.kind, "log")
        # Of one that does something the node is sound.
        isolates = verdict.kind in _ISOLATES and not verdict.numbers.get("runs", 0)
        isolates &= wanted == "act"
        if isolates and not self._ledger.take(nodes, moment.nodes, moment.now):
            return "ask"
        return wanted

    def _seen(
        self, case: _Case, verdict: Verdict, moment: RoundFacts, updated: dict[str, Incident]
    ) -> None:
        case.seen = moment.now
        case.rounds += 1
        known = self._incidents[case.ident]
        fields: dict[str, Any] = {"updated_at": moment.unix, "rounds": known.rounds + 1}
        if verdict.kind is VerdictKind.CRASH and not _better(case, verdict, moment):
            words = _ends(known, verdict)
            verdict = known.verdict
            if moment.now - case.begun < _LATE_S:  # a source may be slower than the end of a rank
                verdict = with_signs(verdict, moment.signs, moment.node_of)
            fields["consequences"] = _more(known.consequences, words)
        if known.kind == VerdictKind.CRASH and verdict.kind in CALLS:
            ended = [f"rank {s.name}: {s.detail}" for s in known.verdict.suspects]
            fields["consequences"] = _more((), [*ended, *known.consequences])
        if verdict.kind is VerdictKind.CANNOT_SAY:
            verdict = known.verdict  # what was known is not less so
        if _other(known.verdict, verdict):
            nodes = _nodes(verdict, moment)
            pids = _pids(verdict, moment)
            fields |= {"kind": str(verdict.kind), "nodes": nodes, "pids": pids}
            if known.verdict.kind is not verdict.kind:
                fields["action"] = self._action(verdict, nodes, moment)
        case.verdict = verdict
        changed = self.change(case.ident, verdict=verdict, **fields)
        if _other(known.verdict, verdict) or changed.consequences != known.consequences:
            updated[case.ident] = changed

    def _follow(
        self, case: _Case, verdict: Verdict, moment: RoundFacts, updated: dict[str, Incident]
    ) -> None:
        """Add `verdict` as a consequence of an open incident; it does not keep that one open."""
        known = self._incidents[case.ident]
        words = (
            _ends(known, verdict)
            if verdict.kind is VerdictKind.CRASH
            else [f"then: {verdict.kind}"]
        )
        more = _more(known.consequences, words)
        if more != known.consequences:
            updated[case.ident] = self.change(case.ident, consequences=more, updated_at=moment.unix)

    def _end(self, moment: RoundFacts) -> tuple[Incident, ...]:
        closed = []
        for case in list(self._open):
            if moment.now - case.seen > self._settings.close_s:
                self._open.remove(case)
                closed.append(self.change(case.ident, state="closed", closed_at=moment.unix))
        if closed:
            self._forget()
        return tuple(closed)

    def fence(self, below: int, reason: str, moment: RoundFacts) -> tuple[Incident, ...]:
        """Close what is open of generations before `below`, which are ended on purpose.

        What a link or a node's arithmetic shows does not end with the ranks.
        """
        self._take_up(moment)
        closed = []
        for case in [c for c in self._open if c.generation < below]:
            if case.verdict.kind not in (VerdictKind.SLOW_LINK, VerdictKind.CORRUPTION):
                self._open.remove(case)
                known = self._incidents[case.ident].consequences
                words = _more(known, [f"the generation was fenced: {reason}".rstrip(": ")])
                changed = self.change(
                    case.ident, state="closed", closed_at=moment.unix, consequences=words
                )
                closed.append(changed)
        self._maybe = []
        self._forget()
        return tuple(closed)

    def _forget(self) -> None:
        done = [i for i, incident in self._incidents.items() if incident.state == "closed"]
        for ident in done[: max(len(done) - self._settings.kept, 0)]:
            del self._incidents[ident]

    # --- evidence -------------------------------------------------------------------------------

    def attach(
        self,
        stacks: Mapping[int, Stack],
        logs: Mapping[int, str],
        calls: Mapping[int, str],
        unix: float,
    ) -> tuple[Incident, ...]:
        """Put evidence on ranks to open incidents of what stopped; return those that changed."""
        changed = []
        for case in self._open:
            if case.verdict.kind not in _STOPPED:
                continue
            known = self._incidents[case.ident]
            fields: dict[str, Any] = {
                name: {**new, **old}
                for name, new, old in (
                    ("stacks", stacks, known.stacks),
                    ("logs", logs, known.logs),
                    ("calls", calls, known.calls),
                )
                if new.keys() - old.keys()
            }
            if fields:
                changed.append(self.change(case.ident, updated_at=unix, **fields))
        return tuple(changed)

    def attach_probes(self, results: Sequence[ProbeResult], unix: float) -> tuple[Incident, ...]:
        """Put the results of a round of probes to open incidents of communication."""
        changed = []
        for case in self._open:
            if case.verdict.kind in (VerdictKind.COMM_HANG, VerdictKind.SLOW_LINK):
                kept = tuple(results[:PROBES])
                changed.append(self.change(case.ident, updated_at=unix, probes=kept))
        return tuple(changed)


def latency(verdict: Verdict) -> float:
    """Return how long a verdict's sign had been there, in seconds; 0 if it does not say."""
    ages = [verdict.numbers[name] for name in _AGES if name in verdict.numbers]
    return float(ages[0]) if ages else 0.0


def _nodes(verdict: Verdict, moment: RoundFacts) -> tuple[str, ...]:
    named = [n for n in verdict.names() if n.isdecimal()]
    nodes = [moment.node_of[int(n)] for n in named if int(n) in moment.node_of]
    return tuple(dict.fromkeys([*_named_nodes(verdict), *nodes]))


def _pids(verdict: Verdict, moment: RoundFacts) -> dict[int, tuple[str, int]]:
    ranks = [int(n) for n in verdict.names() if n.isdecimal()][:MOST_WORDS]
    return {r: (moment.node_of[r], moment.pid_of[r]) for r in ranks if moment.pid_of.get(r)}


def _named_nodes(verdict: Verdict) -> list[str]:
    return [s.name for s in verdict.suspects if s.target in ("node", "sender", "receiver")]


def _other(known: Verdict, verdict: Verdict) -> bool:
    """Whether a verdict says something else than before, and not only other figures."""
    return known.kind is not verdict.kind or _who(known) != _who(verdict)


def _who(verdict: Verdict) -> set[tuple[str, str]]:
    return {(str(s.target), s.name) for s in verdict.suspects}


def _better(case: _Case, verdict: Verdict, moment: RoundFacts) -> bool:
    """Whether a verdict on a crash that is just known names its cause better: by a signal."""
    young = moment.now - case.begun < 2.0
    signalled = verdict.numbers.get("by signal", 0) and not case.verdict.numbers.get("by signal", 0)
    return young and bool(signalled)


def _ends(known: Incident, verdict: Verdict) -> list[str]:
    # Of a crash those who ended first are no news; of a hang it is one that they ended.
    first = set(known.verdict.names()) if known.kind == VerdictKind.CRASH else set()
    told = [
        line
        for line in verdict.evidence
        if line.startswith("rank ") and line.split(":")[0].removeprefix("rank ") not in first
    ]
    mine = [f"rank {s.name}: {s.detail}" for s in verdict.suspects if s.target == "rank"]
    return told + [m for m in mine if m.split(":")[0].removeprefix("rank ") not in first]


def _more(told: tuple[str, ...], words: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*told, *words]))[:MOST_WORDS]
