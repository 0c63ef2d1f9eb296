"""Documents of the API as structs: job, ranks, groups, calls, incidents, elastic, checkpoints.

In it: the sentence (headline) of an incident, names of groups, limit of evidence.

docs/reference/api.md describes their fields for users. Times are seconds since 1970 in fields that
are called `now` or end in ``at``, and seconds in fields that end in ``_s``. NaN and infinity are
encoded as null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, Struct, UnsetType

from ckptd.elastic.messages import Answer, Status
from ckptd.events.event import STALL_PHASES
from ckptd.events.profile import SaveProfile
from ckptd.monitor.daemon.rounds import RankTable, RoundResult
from ckptd.monitor.incidents import Incident, WantedEvidence
from ckptd.monitor.job import NO_EXIT, CallFlag, phase_name
from ckptd.monitor.links import Effect
from ckptd.monitor.report import GroupInfo, ProbeResult, Stack
from ckptd.monitor.rules.said import said_of
from ckptd.monitor.rules.slow import SHARE
from ckptd.monitor.stats import Array
from ckptd.monitor.verdict import STOPS, Suspect, SuspectKind, Verdict, VerdictKind

MOST_EVIDENCE = 256 << 10
"""Characters of stacks, calls and logs of one incident that are stored and sent."""
AXES = ("pp", "dp", "dp_replicate", "dp_shard", "fsdp", "cp", "ep", "tp")
"""Kinds of groups that are axes of a mesh, the slowest first."""
_MOST_KINDS = 32
_PREFIX = "mesh_"
_KNOWN = {"default_pg": "world", "undefined": "group", "": "group"}
_SHOWN_CALLS = 64


class Names:
    """Names by hash; the hash in hexadecimal where no agent has sent the name.

    Parameters
    ----------
    groups, texts
        What agents have sent; both may grow while this is used.
    """

    def __init__(self, groups: dict[int, GroupInfo], texts: dict[int, str]) -> None:
        self.groups = groups
        self.texts = texts
        self._kinds: set[str] = set()

    def op(self, number: int) -> str:
        """Return the name of an operation."""
        return self.texts.get(number) or f"op {number:08x}"

    def group(self, number: int) -> str:
        """Return the name of a group."""
        info = self.groups.get(number)
        return (info.told()[1] if info else "") or f"{number:016x}"

    def site(self, number: int) -> str:
        """Return where a call was made; empty if that is unknown."""
        return self.texts.get(number) or (f"{number:016x}" if number else "")

    def kind(self, number: int) -> str:
        """Return the kind of a group as one of a few words: ``dp``, ``world``."""
        info = self.groups.get(number)
        return self.kind_word(info.kind if info else "")

    def kind_word(self, kind: str) -> str:
        """Return the word for a kind as a program names it, such as ``mesh_dp``."""
        kind = kind.removeprefix(_PREFIX)
        word = _KNOWN.get(kind, kind)
        if word not in self._kinds:
            # Each word is a label of metrics, so a program cannot make arbitrarily many.
            if len(self._kinds) >= _MOST_KINDS or not word.isprintable() or len(word) > 32:
                return "other"
            self._kinds.add(word)
        return word


# --- the job ------------------------------------------------------------------------------------


class GoodputDocument(Struct, frozen=True):
    """How the job spent the time since the daemon's start.

    Attributes
    ----------
    seconds
        By phase of most ranks, ``stuck``, ``again``, ``slow``, ``restarting`` or ``waiting``; see
        `ckptd.monitor.daemon.lifetime.TimeSpent`.
    share
        Share of TRAIN in all seconds but those of ``waiting``.
    """

    seconds: dict[str, float]
    share: float


class StepRange(Struct, frozen=True):
    """Least and largest step of all ranks."""

    min: int
    max: int


class AgentCounts(Struct, frozen=True):
    """Agents that report, and that are silent."""

    up: int
    silent: int


class RoundDocument(Struct, frozen=True):
    """Number and CPU time of the last round; how often agents send."""

    number: int
    cpu_ms: float
    period_s: float


class JobDocument(Struct, frozen=True, kw_only=True):
    """Document of ``GET /job`` and of the event ``job``."""

    job: str
    version: str
    world: int
    ranks_reporting: int
    ranks_alive: int
    nodes: int
    generation: int
    now: float
    up_since: float
    step: StepRange | None
    phases: dict[str, int]
    state: str
    open_incidents: list[str]
    agents: AgentCounts
    round: RoundDocument
    goodput: GoodputDocument | None
    revision: int

    @staticmethod
    def of(
        result: RoundResult,
        *,
        name: str,
        version: str,
        up_since: float,
        generation: int,
        goodput: GoodputDocument | None,
    ) -> JobDocument:
        """Return the document after a round."""
        ranks = result.job.ranks
        steps = result.steps
        codes, counts = np.unique(ranks["phase"], return_counts=True)
        silent = sum(a.silent for a in result.agents)
        return JobDocument(
            job=name,
            version=version,
            world=result.job.world,
            ranks_reporting=len(ranks),
            ranks_alive=int((ranks["alive"] != 0).sum()),
            nodes=len(result.job.nodes),
            generation=generation,
            now=result.at,
            up_since=up_since,
            step=StepRange(int(steps.min()), int(steps.max())) if len(steps) else None,
            phases={phase_name(int(c)): int(n) for c, n in zip(codes, counts, strict=True)},
            state="incident" if result.open else ("ok" if len(ranks) else "waiting"),
            open_incidents=[i.id for i in result.open],
            agents=AgentCounts(len(result.agents) - silent, silent),
            round=RoundDocument(result.rounds, round(result.round_ms, 3), result.period_s),
            goodput=goodput,
            revision=result.revision,
        )


class MeshDocument(Struct, frozen=True):
    """Axes of the job's mesh, the slowest first, and the coordinates of each row's rank."""

    axes: list[str]
    coords: Array

    @staticmethod
    def of(names: Names, members: Mapping[int, Sequence[int]], ranks: Array) -> MeshDocument | None:
        """Return the mesh that the groups of a job show; None if they do not show one.

        A rank's coordinate along an axis is its place in its group of that kind. Where two ranks
        would have the same coordinates (an axis has no groups of its own) there is no mesh.

        Parameters
        ----------
        names, members
            Groups, and the members that agents have sent.
        ranks
            Global ranks of the rows.
        """
        if not len(ranks):
            return None
        found: dict[str, Array] = {}
        size = int(ranks.max()) + 1
        for ident, group in list(members.items()):
            axis = names.kind(ident)
            if axis not in AXES or len(group) < 2:
                continue
            column = found.setdefault(axis, np.full(size, -1))
            listed = np.asarray(group)
            inside = (listed >= 0) & (listed < size)
            column[listed[inside]] = np.flatnonzero(inside)
        axes = [axis for axis in AXES if axis in found]
        if not axes:
            return None
        coords = np.stack([found[axis][ranks] for axis in axes], axis=1)
        if (coords < 0).any() or len(np.unique(coords, axis=0)) < len(coords):
            return None
        return MeshDocument(axes, coords)


class RanksDocument(Struct, frozen=True, kw_only=True):
    """Document of ``GET /ranks`` and of the event ``ranks``: columns, one element a rank.

    `mesh` is left out where only changed rows were asked for.
    """

    now: float
    revision: int
    since: int | None
    nodes: list[str]
    rank: Array
    node: Array
    pid: list[int | None]
    alive: Array
    exit_code: list[int | None]
    state: list[str]
    phase: list[str]
    step: Array
    heartbeat_age_s: Array
    progress_age_s: Array
    pending_age_s: Array
    pending: list[str | None]
    self_s: Array
    score: Array
    status: Array
    mesh: MeshDocument | UnsetType | None = UNSET

    @staticmethod
    def of(
        table: RankTable,
        names: Names,
        now: float,
        since: int | None = None,
        mesh: MeshDocument | UnsetType | None = UNSET,
    ) -> RanksDocument:
        """Return the columns of a table: of all rows, or of those changed after `since`."""
        rows = table.rows if since is None else table.rows[table.revisions > since]
        return RanksDocument(
            now=now,
            revision=table.revision,
            since=since,
            nodes=table.nodes,
            rank=rows["rank"],
            node=rows["node"],
            pid=[pid or None for pid in rows["pid"].tolist()],
            alive=rows["alive"],
            exit_code=[_exit_code(code) for code in rows["exit_code"].tolist()],
            state=[_letter(state) for state in rows["state"].tolist()],
            phase=[phase_name(phase) for phase in rows["phase"].tolist()],
            step=rows["step"],
            heartbeat_age_s=np.round(rows["heartbeat_age_s"], 3),
            progress_age_s=np.round(rows["progress_age_s"], 3),
            pending_age_s=np.round(rows["pending_age_s"], 3),
            pending=[_pending(names, *key) for key in rows[["op", "group", "seq"]].tolist()],
            self_s=np.round(rows["self_s"], 6),
            score=np.round(rows["score"], 3),
            status=rows["status"],
            mesh=mesh,
        )


def _exit_code(code: int) -> int | None:
    return None if code == NO_EXIT else code


def _letter(state: bytes) -> str:
    return state.decode("ascii", "replace")


def _pending(names: Names, op: int, group: int, seq: int) -> str | None:
    if not group:
        return None
    what = names.op(op) if op else "a call"
    return f"{what} {names.group(group)} #{seq}"


class LinkEffectDocument(Struct, frozen=True, kw_only=True):
    """One reason why links are slow; `name` is a node, or ``a>b`` for a link."""

    target: str
    name: str
    ratio: float
    edges: int
    echo: bool

    @staticmethod
    def of(effect: Effect, nodes: Sequence[str]) -> LinkEffectDocument:
        """Return the document of an effect; its indices count `nodes`."""
        ends = [nodes[n] for n in (effect.source, effect.to) if n >= 0]
        return LinkEffectDocument(
            target=effect.target,
            name=">".join(ends) if effect.target is SuspectKind.LINK else ends[0],
            ratio=effect.ratio,
            edges=effect.edges,
            echo=effect.echo,
        )


class LinksDocument(Struct, frozen=True):
    """Document of ``GET /links`` and of the event ``links``: the last round of probes.

    An edge is source and destination (indices of `nodes`), delay in seconds, and its ratio to the
    median of all links.
    """

    nodes: tuple[str, ...] = ()
    edges: tuple[tuple[int, int, float, float], ...] = ()
    effects: tuple[LinkEffectDocument, ...] = ()
    at: float | None = None

    @staticmethod
    def of(result: RoundResult) -> LinksDocument:
        """Return what the last round of probes showed."""
        links = result.links
        if links is None:
            return LinksDocument()
        effects = tuple(LinkEffectDocument.of(e, links.nodes) for e in links.effects)
        return LinksDocument(links.nodes, links.edges, effects, result.links_at)


# --- calls --------------------------------------------------------------------------------------


class CallDocument(Struct, frozen=True, kw_only=True):
    """One collective of a rank."""

    op: str
    group: str
    kind: str
    seq: int
    bytes: int | None
    start_s: float
    end_s: float | None
    site: str
    step: int | None
    phase: str
    failed: bool
    queued: bool
    """Its device has not come to it."""
    unseen: bool
    """Its end is not known: `end_s` is when it was enqueued."""

    @staticmethod
    def of(call: Any, names: Names, moved: float = 0.0) -> CallDocument:
        """Return one row of `CALL`; `moved` is added to its times."""
        end, flags = float(call["end"]), CallFlag(int(call["flags"]))
        return CallDocument(
            op=names.op(int(call["op"])),
            group=names.group(int(call["group"])),
            kind=names.kind(int(call["group"])),
            seq=int(call["seq"]),
            bytes=int(call["bytes"]) if call["bytes"] >= 0 else None,
            start_s=float(call["start"]) + moved,
            end_s=None if np.isnan(end) else end + moved,
            site=names.site(int(call["site"])),
            step=int(call["step"]) if call["step"] >= 0 else None,
            phase=phase_name(int(call["phase"])),
            failed=CallFlag.FAILED in flags,
            queued=CallFlag.QUEUED in flags and bool(np.isnan(end)),
            unseen=CallFlag.UNSEEN in flags,
        )


class RankCalls(Struct, frozen=True):
    """Calls of one rank, the oldest first."""

    rank: int
    calls: list[CallDocument]


class CallsDocument(Struct, frozen=True, kw_only=True):
    """Document of ``GET /collectives``: calls by rank; `cut` if there were more."""

    now: float
    ranks: list[RankCalls]
    cut: bool

    @staticmethod
    def of(calls: Array, names: Names, *, now: float, epoch: float, limit: int) -> CallsDocument:
        """Return the newest `limit` calls; `epoch` makes monotonic times seconds since 1970."""
        cut = len(calls) > limit
        if cut:
            newest = np.argsort(-calls["start"], kind="stable")[:limit]
            calls = calls[np.sort(newest)]
        ranks = []
        for rank in np.unique(calls["row"]).tolist():
            mine = calls[calls["row"] == rank]
            ranks.append(RankCalls(rank, [CallDocument.of(c, names, epoch) for c in mine]))
        return CallsDocument(now=now, ranks=ranks, cut=cut)


class GroupDocument(Struct, frozen=True, kw_only=True):
    """A group of a rank, and how far the rank is in it; `id` is hexadecimal."""

    id: str
    name: str
    kind: str
    size: int
    entered: int
    completed: int

    @staticmethod
    def of(row: Any, names: Names) -> GroupDocument:
        """Return one row of `GROUP`."""
        ident = int(row["group"])
        return GroupDocument(
            id=f"{ident:016x}",
            name=names.group(ident),
            kind=names.kind(ident),
            size=int(row["size"]),
            entered=int(row["entered"]),
            completed=int(row["completed"]),
        )


class StackDocument(Stack, frozen=True, kw_only=True):
    """Stacks of a rank, and the incident for which they were taken; empty: a person asked."""

    incident: str


class RankDocument(Struct, frozen=True, kw_only=True):
    """Document of ``GET /ranks/RANK``."""

    now: float
    rank: int
    node: str
    pid: int | None
    alive: bool
    exit_code: int | None
    state: str
    answers: bool | None
    phase: str
    step: int
    steps_done: int
    heartbeat_age_s: float
    progress_age_s: float
    pending_age_s: float
    self_s: float | None
    cpu: float | None
    memory: int | None
    threads: int | None
    groups: list[GroupDocument]
    calls: list[CallDocument]
    stack: StackDocument | None
    log: str | None
    looked_at: float | None

    @staticmethod
    def of(
        result: RoundResult,
        rank: int,
        names: Names,
        usage: Any = None,
        lately: WantedEvidence | None = None,
    ) -> RankDocument | None:
        """Return what is known of a rank; None if it does not report.

        `usage` is a row of `ckptd.monitor.report.USAGE`, `lately` what ranks were asked for.
        """
        came = lately or WantedEvidence()
        job = result.job
        at = np.flatnonzero(job.ranks["rank"] == rank)
        if not len(at):
            return None
        row = job.ranks[at[0]]
        calls = job.calls[job.calls["row"] == at[0]][-_SHOWN_CALLS:]
        return RankDocument(
            now=result.at,
            rank=rank,
            node=job.nodes[row["node"]],
            pid=int(row["pid"]) or None,
            alive=bool(row["alive"]),
            exit_code=_exit_code(int(row["exit_code"])),
            state=_letter(row["state"]),
            answers=None if row["answers"] < 0 else bool(row["answers"]),
            phase=phase_name(int(row["phase"])),
            step=int(row["step"]),
            steps_done=int(row["steps_done"]),
            heartbeat_age_s=float(row["heartbeat"]),
            progress_age_s=float(row["idle"]),
            pending_age_s=float(row["pending_age"]),
            self_s=result.self_s.get(rank),
            cpu=None if usage is None else round(float(usage["cpu"]), 3),
            memory=None if usage is None else int(usage["memory"]),
            threads=None if usage is None else int(usage["threads"]),
            groups=[GroupDocument.of(g, names) for g in job.groups[job.groups["row"] == at[0]]],
            calls=[CallDocument.of(c, names, result.at) for c in calls],
            stack=_newest_stack(result.incidents, rank, came.stacks.get(rank)),
            log=came.logs.get(rank)
            or next((i.logs[rank] for i in result.incidents[::-1] if rank in i.logs), None),
            looked_at=result.at - result.now + came.came[rank] if rank in came.came else None,
        )


def _newest_stack(
    incidents: Sequence[Incident], rank: int, came: Stack | None
) -> StackDocument | None:
    for incident in reversed(incidents):
        if rank in incident.stacks and came in (None, incident.stacks[rank]):
            stack = msgspec.structs.asdict(incident.stacks[rank])
            return StackDocument(incident=incident.id, **stack)
    if came is None:
        return None
    return StackDocument(incident="", **msgspec.structs.asdict(came))


# --- incidents ----------------------------------------------------------------------------------


class VerdictDocument(Struct, frozen=True, kw_only=True):
    """A `Verdict`. Groups are hexadecimal text, as JavaScript has no 64-bit integers."""

    kind: str
    suspects: tuple[Suspect, ...]
    evidence: tuple[str, ...]
    rules_out: tuple[str, ...]
    refuted_by: str
    action: str
    numbers: Mapping[str, float]
    groups: list[str]
    group_names: list[str] | UnsetType
    place: str

    @staticmethod
    def of(verdict: Verdict, names: Names | None) -> VerdictDocument:
        """Return the document of a verdict; without `names`, groups have no names."""
        fields = msgspec.structs.asdict(verdict) | {
            "groups": [f"{g:016x}" for g in verdict.groups],
            "group_names": UNSET if names is None else [names.group(g) for g in verdict.groups],
        }
        return VerdictDocument(**fields)


_MOST_NAMED = 3


def headline(incident: Incident) -> str:
    """Return what an incident is in one sentence: who, where, since when, who waits."""
    verdict, numbers = incident.verdict, incident.verdict.numbers
    first = verdict.evidence[0] if verdict.evidence else str(verdict.kind)
    ranks = [s for s in verdict.suspects if s.target is SuspectKind.RANK] or verdict.suspects
    if not ranks or verdict.kind is VerdictKind.SLOW_RANK:
        return _sentence(first)  # a slow rank's evidence begins with such a sentence
    who = _who(ranks)
    if ranks[0].target is SuspectKind.RANK and 0 < len(incident.nodes) <= _MOST_NAMED:
        who += f" on {', '.join(incident.nodes)}"
    has = "has" if len(ranks) == 1 else "have"
    detail = f": {ranks[0].detail}" if ranks[0].detail else ""
    if verdict.kind is VerdictKind.HANG and "waiting" in numbers:
        idle, waiting = numbers["idle s"], numbers["waiting"]
        first = f"{has} not moved for {idle:.0f} s{detail}; {waiting:.0f} ranks wait"
    elif verdict.kind is VerdictKind.CRASH:
        first = f"{has} ended{detail}"
    else:
        return _sentence(f"{who}: {first}")
    return _sentence(f"{who} {first}")


def _who(suspects: Sequence[Suspect]) -> str:
    target = suspects[0].target
    group = target is SuspectKind.GROUP
    names = [s.detail or s.name if group else s.name for s in suspects[:_MOST_NAMED]]
    more = len(suspects) - len(names)
    listed = ", ".join(names) + (f" and {more:,} more" if more else "")
    return f"{target}{'s' if len(suspects) > 1 else ''} {listed}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


class EvidenceCounts(Struct, frozen=True):
    """Ranks of which an incident has stacks, calls and logs; number of its probes."""

    stacks: list[int]
    calls: list[int]
    logs: list[int]
    probes: int


class Proposal(Struct, frozen=True):
    """Response to an incident that a person may order.

    Attributes
    ----------
    text
        As of a button.
    nodes
        Nodes that would be excluded.
    """

    text: str
    nodes: tuple[str, ...]


class IncidentDocument(Struct, frozen=True, kw_only=True):
    """An `Incident`. The evidence itself is in the document of a single incident only.

    `cost` is the share of the job that it takes while it lasts; None where that is not known.
    `said` is what the output of its ranks shows.
    """

    id: str
    kind: str
    headline: str
    cost: float | None
    verdict: VerdictDocument
    opened_at: float
    updated_at: float
    closed_at: float | None
    rounds: int
    state: str
    generation: int
    step: int
    enforced: bool
    response: str
    action: str
    latency_s: float
    nodes: tuple[str, ...]
    pids: dict[int, tuple[str, int]]
    consequences: tuple[str, ...]
    acknowledged_at: float | None
    note: str
    evidence: EvidenceCounts
    stacks: dict[int, Stack] | UnsetType = UNSET
    calls: dict[int, str] | UnsetType = UNSET
    logs: dict[int, str] | UnsetType = UNSET
    said: str | UnsetType = UNSET
    probes: tuple[ProbeResult, ...] | UnsetType = UNSET
    proposal: Proposal | UnsetType | None = UNSET

    @staticmethod
    def of(
        incident: Incident,
        names: Names | None = None,
        *,
        evidence: bool = False,
        proposal: Proposal | UnsetType | None = UNSET,
    ) -> IncidentDocument:
        """Return the document of an incident.

        Parameters
        ----------
        incident
            The incident; of too much evidence the rest is left out.
        names
            Names of groups; without them `verdict` has hashes only.
        evidence
            Whether stacks, calls, logs and probes are part of it.
        proposal
            What may be done about it; left out where no controller could.
        """
        fields = msgspec.structs.asdict(clipped(incident))
        if not evidence:
            fields |= dict.fromkeys(("stacks", "calls", "logs", "probes"), UNSET)
        fields["verdict"] = VerdictDocument.of(incident.verdict, names)
        counts = EvidenceCounts(
            sorted(incident.stacks),
            sorted(incident.calls),
            sorted(incident.logs),
            len(incident.probes),
        )
        numbers = incident.verdict.numbers
        return IncidentDocument(
            evidence=counts,
            proposal=proposal,
            headline=headline(incident),
            said=said_of(fields["logs"]) if evidence else UNSET,
            cost=1.0 if incident.kind in STOPS else numbers.get(SHARE),
            **fields,
        )


class IncidentListDocument(Struct, frozen=True):
    """Document of ``GET /incidents``: the newest first."""

    incidents: list[IncidentDocument]


def clipped(incident: Incident) -> Incident:
    """Return an incident with at most `MOST_EVIDENCE` characters of evidence."""
    left = MOST_EVIDENCE
    stacks = {}
    for rank, stack in incident.stacks.items():
        text = stack.text[: max(left, 0)]
        left -= len(text)
        if text:
            stacks[rank] = msgspec.structs.replace(stack, text=text)
    kept: dict[str, dict[int, str]] = {"calls": {}, "logs": {}}
    for name, into in kept.items():
        for rank, text in getattr(incident, name).items():
            into[rank] = text[: max(left, 0)]
            left -= len(into[rank])
    return msgspec.structs.replace(incident, stacks=stacks, calls=kept["calls"], logs=kept["logs"])


# --- generations and the controller ---------------------------------------------------------------


class GenerationDocument(Struct, frozen=True, kw_only=True):
    """One generation of the job.

    Attributes
    ----------
    generation, world
        Its number, and its ranks.
    started, ended
        When its first report came, and the first of a later one; seconds since 1970.
    why
        Id of the incident before its end; empty if there was none.
    split
        Seconds from the first sign of that incident until it opened (``detect_s``), and until
        the next generation reported (``restart_s``).
    """

    generation: int
    world: int
    started: float
    ended: float | None = None
    why: str = ""
    split: dict[str, float] = msgspec.field(default_factory=dict)


class ControllerLinkDocument(Struct, frozen=True):
    """Whether the daemon is connected to the controller, and where that is."""

    connected: bool
    address: str


class ControllerStatusDocument(Struct, frozen=True):
    """The event ``elastic``: both fields are null without a controller."""

    controller: ControllerLinkDocument | None = None
    status: Status | None = None


class ElasticDocument(Struct, frozen=True, kw_only=True):
    """Document of ``GET /elastic``: generations, and the fields of `ControllerStatusDocument`."""

    generations: list[GenerationDocument]
    controller: ControllerLinkDocument | None
    status: Status | None


class AnswerDocument(Struct, frozen=True, kw_only=True):
    """The controller's answer to an order; `error` where it refused."""

    ok: bool
    kind: str
    text: str
    error: dict[str, str] | UnsetType = UNSET

    @staticmethod
    def of(answer: Answer) -> AnswerDocument:
        """Return the document of an answer."""
        error = UNSET if answer.ok else {"kind": answer.kind, "message": answer.text}
        return AnswerDocument(ok=answer.ok, kind=answer.kind, text=answer.text, error=error)


# --- checkpoints --------------------------------------------------------------------------------


class TierDocument(Struct, frozen=True, kw_only=True):
    """The newest durable checkpoint of a tier."""

    tier: str
    last_step: int
    durable_at: float
    bytes: int


class SaveDocument(Struct, frozen=True, kw_only=True):
    """One save: what it cost, by phase (`stalls_s`) and by tier (`durations_s`).

    `numbers` are those of its metadata.
    """

    step: int
    generation: int
    begun_at: float
    outcome: str
    reason: str
    bytes: int
    stalls_s: dict[str, float]
    slowest_rank: int | None
    slowest: str
    durations_s: dict[str, float]
    numbers: dict[str, float]

    @staticmethod
    def of(save: SaveProfile) -> SaveDocument:
        """Return the document of a save."""
        return SaveDocument(
            step=save.step,
            generation=save.generation,
            begun_at=save.begun_ns / 1e9,
            outcome=save.outcome,
            reason=save.reason,
            bytes=save.bytes,
            stalls_s={p.name: p.max_s for p in save.phases if p.name in STALL_PHASES},
            slowest_rank=save.stall.slowest_rank if save.stall else None,
            slowest=save.slowest,
            durations_s={"all": save.seconds, **save.durable_s},
            numbers=save.numbers,
        )


class VersionsDocument(Struct, frozen=True, kw_only=True):
    """Published weights, and the workers that follow them.

    Attributes
    ----------
    number, step, published_at
        The newest version of the newest publisher.
    workers, behind
        Worker processes that have one of its last 64 versions; how many versions the slowest lacks.
    received, whole
        Bytes that came over sockets or from a store, and what the same tensors are whole.
    mapped
        Bytes that workers of the trainer's hosts took out of slots.
    """

    number: int
    step: int
    published_at: float
    workers: int
    behind: int
    received: int
    whole: int
    mapped: int


class CheckpointsDocument(Struct, frozen=True):
    """Document of ``GET /checkpoints``: from recorded events; `problems` are errors of folders.

    `versions` is null where no weights were published.
    """

    tiers: list[TierDocument] = msgspec.field(default_factory=list)
    saves: list[SaveDocument] = msgspec.field(default_factory=list)
    problems: list[dict[str, Any]] = msgspec.field(default_factory=list)
    versions: VersionsDocument | None = None

    @staticmethod
    def of(
        saves: Sequence[SaveProfile],
        problems: list[dict[str, Any]],
        versions: VersionsDocument | None = None,
    ) -> CheckpointsDocument:
        """Return the document of recorded saves."""
        newest: dict[str, TierDocument] = {}
        for save in saves:
            for tier, seconds in save.durable_s.items():
                at = save.begun_ns / 1e9 + seconds
                if tier not in newest or newest[tier].durable_at <= at:
                    newest[tier] = TierDocument(
                        tier=tier, last_step=save.step, durable_at=at, bytes=save.bytes
                    )
        return CheckpointsDocument(
            list(newest.values()), [SaveDocument.of(s) for s in saves], problems, versions
        )
