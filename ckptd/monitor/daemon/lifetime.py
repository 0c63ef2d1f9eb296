"""Goodput, recoveries and recorded saves over a daemon's life; causes of recoveries, buckets."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np

from ckptd.elastic.messages import Recovery, Status
from ckptd.errors import CkptdError
from ckptd.events.event import AnyEvent, Opened, VersionApplied, VersionPublished
from ckptd.events.eventfiles import EventFolder
from ckptd.events.profile import Profiles
from ckptd.monitor.daemon.documents import (
    CheckpointsDocument,
    GenerationDocument,
    GoodputDocument,
    VersionsDocument,
)
from ckptd.monitor.daemon.history import History
from ckptd.monitor.daemon.rounds import RoundResult
from ckptd.monitor.incidents import Incident
from ckptd.monitor.job import CallFlag, Phase, phase_name
from ckptd.monitor.report import NodeReport
from ckptd.monitor.rules.slow import SHARE
from ckptd.monitor.stats import Array
from ckptd.monitor.verdict import STOPS

_MOST_KNOWN = 1000
_LONGEST_S = 5.0
_FRESH_S = 10.0
_LAST_SAVES = 50
_LAST_VERSIONS = 64
"""A worker that has none of these has ended, or takes no part any more."""


class GenerationLog:
    """Follows the generations that node reports name; keeps the newest thousand.

    Parameters
    ----------
    history
        Where they are stored, and loaded from at the start.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._known = {
            int(row[0]): GenerationDocument(
                generation=int(row[0]),
                world=int(row[1] or 0),
                started=float(row[2] or 0.0),
                ended=row[3],
                why=str(row[4] or ""),
            )
            for row in history.generations()
        }
        self._seen: dict[int, int] = {}
        self.newest = max(self._known, default=0)

    def see(self, report: NodeReport) -> None:
        """Note the generation of the ranks in a report."""
        ranks = report.table("ranks")
        if len(ranks):
            newest = int(ranks["generation"].max())
            if newest >= self.newest:
                self._seen[newest] = int(ranks["world"].max())

    def judge(self, result: RoundResult) -> None:
        """Take in the reports since the last round."""
        seen, self._seen = self._seen, {}
        if not seen:
            return
        newest, world = max(seen.items())
        before = self._known.get(newest)
        if before is None:
            self._begin(newest, world, result)
        elif before.world != world:
            self._put(msgspec.structs.replace(before, world=world))

    def _begin(self, generation: int, world: int, result: RoundResult) -> None:
        now = time.time()
        last = self._known.get(self.newest)
        if last is not None and last.ended is None:
            why = max(
                (i for i in result.incidents if i.opened_at >= last.started),
                key=lambda i: i.opened_at,
                default=None,
            )
            split = {"detect_s": why.latency_s, "restart_s": now - why.opened_at} if why else {}
            self._put(
                msgspec.structs.replace(last, ended=now, why=why.id if why else "", split=split)
            )
        self.newest = generation
        self._put(GenerationDocument(generation=generation, world=world, started=now))
        while len(self._known) > _MOST_KNOWN:
            del self._known[min(self._known)]

    def _put(self, one: GenerationDocument) -> None:
        self._known[one.generation] = one
        self._history.put_generation(one.generation, one.world, one.started, one.ended, one.why)

    def all(self) -> list[GenerationDocument]:
        """Return the known generations, the oldest first."""
        return [one for _, one in sorted(self._known.copy().items())]


TRAIN, STUCK, AGAIN, SLOW, RESTARTING, WAITING = (
    Phase.TRAIN.name,
    "stuck",
    "again",
    "slow",
    "restarting",
    "waiting",
)


class TimeSpent:
    """Splits the time since the daemon's start by use, in seconds; it has no clock of its own.

    Time in phase TRAIN is classified when a step ends: it was ``again`` if the job had made that
    step before, ``stuck`` if an incident that stops the job was seen since the step before or the
    ranks ended, and otherwise TRAIN, less the share that an open incident says that ``slow`` ranks
    cost. While no rank lives it is ``restarting``; ``waiting`` before the first and after ranks
    that ended well. Steps that only the recorder counts begin at 0 in each process: they are
    never ``again``, unless a checkpointer has told the one from which they go on.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._last: float | None = None
        self._open = self._away = 0.0
        self._stands = self._ended_well = self._counted = False
        self._life: tuple[int, int] | None = None
        self._high = -1
        self._slow: set[str] = set()

    def add(self, result: RoundResult) -> None:
        """Count the time since the round before."""
        before, self._last = self._last, result.now
        spent = 0.0 if before is None else min(result.now - before, _LONGEST_S)
        ranks = result.job.ranks
        ranks_alive = ranks[ranks["alive"] != 0]
        if not len(ranks_alive):
            self._without_ranks(ranks, spent)
            return
        self._returned()
        life = _life(ranks_alive)
        moved = self._follow(life, result)
        phase = phase_name(int(np.bincount(np.clip(ranks_alive["phase"], 0, None)).argmax()))
        stands = any(i.kind in STOPS for i in _seen(result))
        if phase != TRAIN:
            self._seconds[STUCK if stands else phase] += spent
        else:
            self._open += spent
            self._stands |= stands
            if moved or life == (-1, 0):
                # Above the steps of its process: it has loaded the one where it began.
                named = not self._counted or life[0] > life[1] + 1
                self._decide(life[0] if named else -1, result)

    def _without_ranks(self, ranks: Array, spent: float) -> None:
        if len(ranks):
            self._ended_well = bool((ranks["exit_code"] == 0).all())
        self._fail(TRAIN if self._ended_well else STUCK)
        self._away += spent

    def _returned(self) -> None:
        if self._ended_well:
            self._life, self._high = None, -1  # another run
        if self._life is None:
            self._seconds[WAITING] += self._away
        else:
            self._seconds[RESTARTING] += self._away
        self._away, self._ended_well = 0.0, False

    def _follow(self, life: tuple[int, int], result: RoundResult) -> bool:
        """Return whether a step has ended; notice that ranks began again."""
        before, self._life = self._life, life
        if before is None:
            return False
        if life[1] < before[1] or 0 <= life[0] < before[0]:
            self._fail(STUCK)
            self._high = max(self._high, before[0])
            return False
        if life > before:
            self._counted = bool((result.job.calls["flags"] & CallFlag.COUNTED).any())
        return life > before

    def _decide(self, step: int, result: RoundResult) -> None:
        """Decide what the time since the last step was."""
        spent, self._open = self._open, 0.0
        if self._stands:
            self._seconds[STUCK] += spent
        elif 0 <= step <= self._high:
            self._seconds[AGAIN] += spent
        else:
            slow = self._slowness(result)
            self._seconds[SLOW] += slow * spent
            self._seconds[TRAIN] += (1 - slow) * spent
        self._stands = False

    def _slowness(self, result: RoundResult) -> float:
        """Return the share of a step that slow ranks cost; what they cost before counts as well."""
        share = 0.0
        for incident in _seen(result):
            cost = incident.verdict.numbers.get(SHARE, 0.0)
            share = max(share, cost)
            if cost and incident.id not in self._slow:
                self._slow.add(incident.id)
                early = min(cost * incident.latency_s, self._seconds[TRAIN])
                self._seconds[SLOW] += early
                self._seconds[TRAIN] -= early
        return share

    def _fail(self, kind: str) -> None:
        """Decide about the time since the last step: the step that was made does not end."""
        self._seconds[kind] += self._open
        self._open, self._stands = 0.0, False

    def document(self) -> GoodputDocument | None:
        """Return the seconds, and the share of training; None at first."""
        seconds = defaultdict(float, self._seconds)
        seconds[STUCK if self._stands else TRAIN] += self._open
        away = RESTARTING if self._life is not None and not self._ended_well else WAITING
        seconds[away] += self._away
        total = sum(seconds.values()) - seconds[WAITING]
        if total <= 0:
            return None
        told = {name: round(s, 3) for name, s in sorted(seconds.items()) if s > 0}
        return GoodputDocument(told, round(seconds[TRAIN] / total, 4))


def _life(ranks: Array) -> tuple[int, int]:
    """Return the step that most ranks are in, and the steps that their processes have made."""
    marked = ranks["step"][ranks["step"] >= 0]
    step = int(np.median(marked)) if len(marked) else -1
    return step, int(np.median(ranks["steps_done"]))


def _seen(result: RoundResult) -> list[Incident]:
    """Return the open incidents that the last reports still show: they close some time later."""
    recent = max(4 * result.period_s, 1.0)
    return [i for i in result.open if result.at - i.updated_at < recent]


class RecordedSaves:
    """Reads event folders on request, at most every ten seconds.

    Parameters
    ----------
    folders
        Those that ``Checkpointer(events=...)`` writes to.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = tuple(folders)
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._document = CheckpointsDocument()

    def document(self) -> CheckpointsDocument:
        """Return what saves cost, and the newest checkpoint of each tier. Reads files."""
        with self._lock:
            if time.monotonic() - self._read_at > _FRESH_S:
                self._document = self._read()
                self._read_at = time.monotonic()
            return self._document

    def _read(self) -> CheckpointsDocument:
        profiles, versions = Profiles(last=_LAST_SAVES), Versions()
        problems = []
        for folder in self._folders:
            try:
                for head, event in EventFolder.open(folder).read():
                    profiles.add(event)
                    versions.add(head, event)
            except CkptdError as error:
                problems.append(error.to_dict())
        return CheckpointsDocument.of(profiles.saves(), problems, versions.document())


class Versions:
    """Adds up events of published weights; they may come in any order of processes."""

    def __init__(self) -> None:
        self._published: defaultdict[tuple[str, int], list[VersionPublished]] = defaultdict(list)
        self._applied: defaultdict[tuple[str, int, int], list[VersionApplied]] = defaultdict(list)

    def add(self, head: Opened, event: AnyEvent) -> None:
        """Take an event in."""
        if isinstance(event, VersionPublished) and not event.skipped:
            self._published[head.host, head.pid].append(event)
        elif isinstance(event, VersionApplied) and event.number:
            self._applied[head.host, head.pid, event.rank].append(event)

    def document(self) -> VersionsDocument | None:
        """Return the newest version, and who has which; None: there is none."""
        if not self._published:
            return None
        one = max(self._published.values(), key=lambda found: max(e.at_ns for e in found))
        one.sort(key=lambda e: e.at_ns)
        newest = first = one[-1]
        for event in reversed(one[:-1]):
            if event.number >= first.number:
                break  # of the publisher before
            first = event
        began = first.at_ns - first.duration_ns
        workers = []
        received = whole = mapped = 0
        for found in self._applied.values():
            mine = [e for e in found if e.at_ns >= began and e.number <= newest.number]
            lacks = newest.number - max((e.number for e in mine), default=0)
            if mine and lacks < _LAST_VERSIONS:
                workers.append(lacks)
            received += sum(e.received for e in mine)
            whole += sum(e.bytes + e.unchanged for e in mine if e.received)
            mapped += sum(e.bytes for e in mine if not e.received)
        return VersionsDocument(
            number=newest.number,
            step=newest.step,
            published_at=newest.at_ns / 1e9,
            workers=len(workers),
            behind=max(workers, default=0),
            received=received,
            whole=whole,
            mapped=mapped,
        )


# --- recoveries -----------------------------------------------------------------------------------

RECOVERY_PARTS = tuple(
    part.encode_name
    for part in msgspec.structs.fields(Recovery)
    if part.type is float and part.name != "at"
)
"""Parts of a recovery, in their order, and all of it."""

RECOVERY_BUCKETS_S = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_MOST_RECOVERIES = 1 << 12
_SETTLED_S = 1.0
"""Marks of the slowest node may still come so long after a recovery."""
_CLASSES = (
    ("ended with", "crash"),
    ("is gone", "node"),
    ("nothing is heard", "node"),
    ("came back", "node"),
    ("lost", "node"),
    ("hang", "hang"),
    ("deadlock", "deadlock"),
    ("desync", "desync"),
    ("mismatch", "mismatch"),
    ("slow", "slow"),
    ("corruption", "corruption"),
    ("growing", "growth"),
    ("collective", "broken"),
    ("no step was", "no-step"),
    ("controller", "controller"),
    ("order", "order"),
    ("notice", "notice"),
    ("taken away", "notice"),
)


def cause_class(text: str) -> str:
    """Return the class of a recovery's cause: its words name nodes, which labels must not."""
    lowered = text.lower()
    return next((word for sign, word in _CLASSES if sign in lowered), "other")


class RecoveryCounts:
    """Counts the recoveries in a controller's statuses, which list only the last ones.

    Any thread may use it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[int, None] = {}
        self.recoveries: Counter[tuple[str, str]] = Counter()
        self.parts: dict[str, list[float]] = {}
        """By part: how many took up to each bound, then how many more; last the sum."""
        self.steps_lost = 0
        self.status: Status | None = None

    def take(self, status: Status) -> None:
        """Take a status; a recovery counts once, when it does not change any more."""
        with self._lock:
            self.status = status
            for recovery in status.recoveries:
                young = status.at - recovery.at < _SETTLED_S
                if recovery.after in self._seen or (young and not status.ended):
                    continue
                self._seen[recovery.after] = None
                self._count(recovery)
            while len(self._seen) > _MOST_RECOVERIES:
                del self._seen[next(iter(self._seen))]

    def _count(self, recovery: Recovery) -> None:
        self.recoveries[str(recovery.level), cause_class(recovery.cause)] += 1
        self.steps_lost += recovery.steps_lost or 0
        took = msgspec.to_builtins(recovery)
        for part in RECOVERY_PARTS:
            counts = self.parts.setdefault(part, [0.0] * (len(RECOVERY_BUCKETS_S) + 2))
            counts[bisect_left(RECOVERY_BUCKETS_S, took[part])] += 1
            counts[-1] += took[part]
