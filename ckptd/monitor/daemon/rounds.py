"""Rounds of the diagnosis in a thread; table of ranks and their status (ok, waiting, suspect, ...).

In it: which changes of a row are sent; how many messages may wait.

HTTP handlers never touch the watch. They hand in messages, receive the answers as futures, and read
the `RoundResult` that each round leaves.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ckptd.errors import CkptdError, TransientStoreError
from ckptd.monitor.incidents import Changes, Incident
from ckptd.monitor.job import JobView, no_job
from ckptd.monitor.links import LinkMatrix
from ckptd.monitor.sources import AgentHealth
from ckptd.monitor.stats import Array
from ckptd.monitor.verdict import SuspectKind, VerdictKind
from ckptd.monitor.watch import JobWatch

T = TypeVar("T")
_MOST_WAITING = 4096


@dataclass(frozen=True)
class RoundResult:
    """The result of a round; never changes.

    Attributes
    ----------
    revision
        Rises with each round.
    at, now
        When the round ended: seconds since 1970, and on the monotonic clock.
    job
        All ranks.
    incidents
        Those that are remembered, the oldest first.
    agents
        Agents by node.
    links, links_at
        The last round of probes, and when it ended, seconds since 1970; None before the first.
    mismatches
        How often replicas of a step did not agree, so far.
    rounds, round_ms, period_s
        Number of rounds, CPU time of the last, and how often agents send.
    self_s
        Median own time of a step, by rank.
    walls
        What the steps took that ended since the round before: seconds by rank; empty where none.
    """

    revision: int
    at: float
    now: float
    job: JobView
    incidents: tuple[Incident, ...] = ()
    agents: tuple[AgentHealth, ...] = ()
    links: LinkMatrix | None = None
    links_at: float | None = None
    mismatches: int = 0
    rounds: int = 0
    round_ms: float = 0.0
    period_s: float = 0.0
    self_s: Mapping[int, float] = field(default_factory=dict)
    walls: Array = field(default_factory=lambda: np.zeros(0))

    @property
    def open(self) -> tuple[Incident, ...]:
        """Open incidents."""
        return tuple(i for i in self.incidents if i.state == "open")

    @property
    def steps(self) -> Array:
        """Steps of the ranks that mark them."""
        steps: Array = self.job.ranks["step"]
        return steps[steps >= 0]


# --- a row for each rank ------------------------------------------------------------------------

STATUS = ("ok", "waiting", "suspect", "dead", "silent", "slow")
"""Names of the numbers in the column ``status``."""
_OK, _WAITING, _SUSPECT, _DEAD, _SILENT, _SLOW = range(6)

_WAITING_S = 1.0
"""A rank that is inside a call for this long is waiting."""
_AGES = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""An age counts as changed when it passes one of these, seconds: it always grows."""
_SHARE = 0.02
"""A figure counts as changed when it differs by more than this share."""


def _exactly(old: Array, new: Array) -> Array:
    out: Array = old != new
    return out


def _by_age(old: Array, new: Array) -> Array:
    out: Array = np.searchsorted(_AGES, old) != np.searchsorted(_AGES, new)
    return out


def _by_share(old: Array, new: Array) -> Array:
    with np.errstate(invalid="ignore"):
        near = np.abs(new - old) <= _SHARE * np.abs(old)
    out: Array = ~((np.isnan(old) & np.isnan(new)) | near)
    return out


def _by_letter(old: Array, new: Array) -> Array:
    # A rank runs or sleeps from one moment to the next, and neither means anything.
    return _exactly(np.where(old == b"R", b"S", old), np.where(new == b"R", b"S", new))


class _Column(NamedTuple):
    dtype: str
    source: str = ""
    """The column of the job's table that it is; empty: it is computed."""
    changed: Callable[[Array, Array], Array] = _exactly


_COLUMNS = {
    "rank": _Column("<i8", "rank"),
    "node": _Column("<i4"),
    "pid": _Column("<i8", "pid"),
    "alive": _Column("?", "alive"),
    "exit_code": _Column("<i4", "exit_code"),
    "state": _Column("S1", "state", _by_letter),
    "phase": _Column("<i4", "phase"),
    "step": _Column("<i8", "step"),
    "heartbeat_age_s": _Column("<f8", "heartbeat", _by_age),
    "progress_age_s": _Column("<f8", "idle", _by_age),
    "pending_age_s": _Column("<f8", changed=_by_age),
    "group": _Column("<u8"),
    "seq": _Column("<i8"),
    "op": _Column("<u4"),
    "self_s": _Column("<f8", changed=_by_share),
    "score": _Column("<f8", changed=_by_share),
    "status": _Column("<i4"),
}
RANK_ROW: np.dtype[Any] = np.dtype([(name, column.dtype) for name, column in _COLUMNS.items()])
"""One row for each rank that has reported in this generation."""


class RankTable:
    """Rows of all ranks that have reported in this generation, sorted by rank.

    Attributes
    ----------
    revision
        Rises with each `update`.
    nodes
        Names of nodes; a name keeps its index.
    rows
        Rows of `RANK_ROW`.
    revisions
        The revision at which each row last changed.
    """

    def __init__(self) -> None:
        self.revision = 0
        self.nodes: list[str] = []
        self._index: dict[str, int] = {}
        self.rows: Array = np.zeros(0, RANK_ROW)
        self.revisions: Array = np.zeros(0, np.int64)

    def update(
        self,
        job: JobView,
        incidents: Sequence[Incident],
        scores: Mapping[int, float],
        self_s: Mapping[int, float],
    ) -> None:
        """Take the job as it is after a round."""
        new = self._with_silent(self._rows_of(job, scores, self_s), job.world)
        _mark_suspects(new, incidents, self._index)
        self.revision += 1
        old = self.rows
        if len(old) == len(new) and np.array_equal(old["rank"], new["rank"]):
            changed = np.zeros(len(new), bool)
            for name, column in _COLUMNS.items():
                changed |= column.changed(old[name], new[name])
            self.revisions = np.where(changed, self.revision, self.revisions)
        else:
            self.revisions = np.full(len(new), self.revision)
        self.rows = new

    def _rows_of(
        self, job: JobView, scores: Mapping[int, float], self_s: Mapping[int, float]
    ) -> Array:
        ranks = job.ranks[np.argsort(job.ranks["rank"], kind="stable")]
        new = np.zeros(len(ranks), RANK_ROW)
        for name, column in _COLUMNS.items():
            if column.source:
                new[name] = ranks[column.source]
        node = np.array([self._index_of(name) for name in job.nodes], np.int32)
        new["node"] = node[ranks["node"]] if len(ranks) else 0
        waits = (ranks["pending_group"] != 0) & (ranks["pending_age"] >= _WAITING_S)
        waits &= ranks["alive"] != 0
        new["pending_age_s"] = np.where(waits, ranks["pending_age"], np.nan)
        new["group"] = np.where(waits, ranks["pending_group"], 0)
        new["seq"] = np.where(waits, ranks["pending_seq"], 0)
        new["op"] = _operations(job, new)
        new["score"], new["self_s"] = _values_of(scores, new), _values_of(self_s, new)
        new["status"] = np.where(new["alive"], np.where(waits, _WAITING, _OK), _DEAD)
        return new

    def _index_of(self, node: str) -> int:
        if node not in self._index:
            self._index[node] = len(self.nodes)
            self.nodes.append(node)
        return self._index[node]

    def _with_silent(self, new: Array, world: int) -> Array:
        """Add the last rows of ranks that no longer report."""
        lost = self.rows[~np.isin(self.rows["rank"], new["rank"])]
        lost = lost[lost["rank"] < world] if len(new) else lost
        if not len(lost):
            return new
        lost = lost.copy()
        lost["status"] = _SILENT
        out = np.concatenate([new, lost])
        return out[np.argsort(out["rank"], kind="stable")]


def _operations(job: JobView, new: Array) -> Array:
    """Return the operation that each rank waits in; 0 where it is not among its last calls."""
    out = np.zeros(len(new), np.uint32)
    order = np.argsort(job.ranks["rank"], kind="stable")
    last = job.last_call[order]
    known = last >= 0
    if known.any():
        calls = job.calls[np.maximum(last, 0)]
        same = (calls["group"] == new["group"]) & (calls["seq"] == new["seq"]) & known
        out = np.where(same & (new["group"] != 0), calls["op"], 0).astype(np.uint32)
    return out


def _values_of(values: Mapping[int, float], rows: Array) -> Array:
    if not values:
        return np.full(len(rows), np.nan)
    return np.array([values.get(rank, np.nan) for rank in rows["rank"].tolist()], float)


def _mark_suspects(rows: Array, incidents: Sequence[Incident], index: Mapping[str, int]) -> None:
    """Mark the suspects of open incidents; a dead or silent rank keeps its status."""
    for incident in incidents:
        status = _SLOW if incident.kind == VerdictKind.SLOW_RANK else _SUSPECT
        names = [int(n) for n in incident.verdict.names() if n.isdecimal()]
        nodes = [index[n] for n in incident.verdict.names(SuspectKind.NODE) if n in index]
        # A verdict names a node besides its ranks where it suspects most of them.
        hit = np.isin(rows["rank"], names) if names else np.isin(rows["node"], nodes)
        hit &= ~np.isin(rows["status"], (_DEAD, _SILENT))
        rows["status"][hit] = status


# --- rounds -------------------------------------------------------------------------------------


class Rounds:
    """Owns a `JobWatch` in a thread of its own.

    Parameters
    ----------
    watch
        From `start` on, no other thread may touch it.
    on_round
        Called after each round, in this thread, with its result and what changed.

    Attributes
    ----------
    last
        Result of the last round; an empty one before the first.
    ranks
        Rows for the API; read them under `ranks_lock`.
    defects
        Rounds that raised an exception, which is a defect of ckptd; the next round goes on.
    """

    def __init__(self, watch: JobWatch, on_round: Callable[[RoundResult, Changes], None]) -> None:
        self.last = RoundResult(0, time.time(), time.monotonic(), no_job())
        self.ranks = RankTable()
        self.ranks_lock = threading.Lock()
        self.defects = 0
        self._watch = watch
        self._told = -1
        self._on_round = on_round
        self._waiting: queue.Queue[tuple[Callable[[JobWatch, float], Any], Future[Any]] | None]
        self._waiting = queue.Queue(_MOST_WAITING)
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="rounds", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """End after the message that is being handled; futures of later ones are cancelled."""
        self._ended = True
        with contextlib.suppress(queue.Full):  # it looks at `_ended` after each message
            self._waiting.put_nowait(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def call(self, function: Callable[[JobWatch, float], T]) -> Future[T]:
        """Call `function` with the watch and the time in the thread, after all earlier calls.

        Raises
        ------
        TransientStoreError
            kind ``busy``: too many calls wait.
        """
        future: Future[T] = Future()
        try:
            self._waiting.put_nowait((function, future))
        except queue.Full:
            raise TransientStoreError(
                "the daemon has too many messages to handle", kind="busy", hint="try again"
            ) from None
        return future

    def _work(self) -> None:
        due = time.monotonic()
        while not self._ended:
            left = due - time.monotonic()
            try:
                item = (
                    self._waiting.get(timeout=max(left, 0.0))
                    if left > 0
                    else (self._waiting.get_nowait())
                )
            except queue.Empty:
                item = None
            if item is not None:
                _answer(item, self._watch)
            now = time.monotonic()
            if now >= due and not self._ended:
                self._round(now)
                due = max(due + self._watch.sources.period_s, time.monotonic())
        self._refuse_rest()

    def _refuse_rest(self) -> None:
        while True:
            try:
                item = self._waiting.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                item[1].cancel()

    def _round(self, now: float) -> None:
        began = time.thread_time()
        try:
            changes = self._watch.round(now)
            result = self._result(now, began)
            with self.ranks_lock:
                self.ranks.update(result.job, result.open, self._watch.scores, result.self_s)
            self.last = result
            self._on_round(result, changes)
        except Exception as error:  # noqa: BLE001 - one bad round must not end the watch
            self.defects += 1
            if self.defects <= 10:
                print(f"ckptd: a round failed: {error!r}", file=sys.stderr, flush=True)  # noqa: T201

    def _result(self, now: float, began: float) -> RoundResult:
        watch, links = self._watch, self._watch.links
        job = watch.job(now)
        self._told, walls = watch.walls(self._told)
        return RoundResult(
            revision=self.last.revision + 1,
            at=time.time(),
            now=now,
            job=job,
            incidents=watch.incidents,
            agents=watch.agents,
            mismatches=watch.mismatches,
            rounds=watch.rounds,
            round_ms=1e3 * (time.thread_time() - began),
            period_s=watch.sources.period_s,
            self_s=watch.self_s,
            walls=walls,
            links=links,
            links_at=None if links is None else watch.epoch + links.at,
        )


def _answer(item: tuple[Callable[[JobWatch, float], Any], Future[Any]], watch: JobWatch) -> None:
    function, future = item
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(watch, time.monotonic()))
    except CkptdError as error:
        future.set_exception(error)
    except Exception as error:  # noqa: BLE001 - raised where the future is awaited
        future.set_exception(error)
