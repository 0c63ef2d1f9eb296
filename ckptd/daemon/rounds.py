"""The thread that owns the watch: takes messages in order, does a round when one is due.

HTTP never touches the watch. It hands in messages, gets their answers as futures, and reads the
`Board` that each round leaves.
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
from typing import Any, TypeVar

import numpy as np

from ckptd.daemon.documents.columns import Ranks
from ckptd.errors import CkptdError, TransientStoreError
from ckptd.monitor.incidents.incident import Changes, Incident
from ckptd.monitor.job import Job
from ckptd.monitor.links.matrix import Effect
from ckptd.monitor.sources import AgentStatus
from ckptd.monitor.stats import Array
from ckptd.monitor.verdict import Target
from ckptd.monitor.watch import Watch

__all__ = ["Board", "Rounds", "empty_board"]

T = TypeVar("T")
_MOST_WAITING = 4096


@dataclass(frozen=True)
class Board:
    """What a round leaves for whoever asks; never changes.

    Attributes
    ----------
    revision
        Rises with each round.
    at, now
        When the round ended: seconds since 1970, and of the monotonic clock.
    job
        All ranks.
    incidents
        Those that are remembered, the oldest first.
    agents
        Agents by node.
    links
        Delays as ``(source, destination, seconds, ratio)``, nodes as numbers of `link_nodes`.
    link_nodes, link_effects, links_at
        Names; what makes links slow; when they were probed, seconds since 1970, or None.
    mismatches
        How often replicas of a step did not agree, so far.
    rounds, round_ms, period_s
        How many there were, CPU time of the last, and how often agents send.
    """

    revision: int
    at: float
    now: float
    job: Job
    incidents: tuple[Incident, ...] = ()
    agents: tuple[AgentStatus, ...] = ()
    links: Sequence[tuple[int, int, float, float]] = ()
    link_nodes: tuple[str, ...] = ()
    link_effects: Sequence[Mapping[str, Any]] = ()
    links_at: float | None = None
    mismatches: int = 0
    rounds: int = 0
    round_ms: float = 0.0
    period_s: float = 0.0
    self_s: Mapping[int, float] = field(default_factory=dict)

    @property
    def open(self) -> tuple[Incident, ...]:
        """Open incidents."""
        return tuple(i for i in self.incidents if i.state == "open")


def empty_board() -> Board:
    """Return the board of a daemon that has heard nothing."""
    from ckptd.monitor.job import JOINED_CALL, JOINED_GROUP, RANK

    nothing = [np.zeros(0, dtype) for dtype in (RANK, JOINED_GROUP, JOINED_CALL)]
    job = Job(0, (), nothing[0], nothing[1], nothing[2], {})
    return Board(0, time.time(), time.monotonic(), job)


class Rounds:
    """Owns a `Watch` in a thread of its own.

    Parameters
    ----------
    watch
        Nobody else may touch it from `start` on.
    on_round
        Told after each round, in this thread: the board, and what changed.

    Attributes
    ----------
    board
        Of the last round.
    ranks
        Rows for the API; changed by rounds only, so copy what is to stay.
    defects
        Rounds that ended in an exception that is a defect of ours; the next goes on.
    """

    def __init__(self, watch: Watch, on_round: Callable[[Board, Changes], None]) -> None:
        self.board = empty_board()
        self.ranks = Ranks()
        self.ranks_lock = threading.Lock()
        self.defects = 0
        self._watch = watch
        self._on_round = on_round
        self._waiting: queue.Queue[tuple[Callable[[Watch, float], Any], Future[Any]] | None]
        self._waiting = queue.Queue(_MOST_WAITING)
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="rounds", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """End after the message at hand; answers that are still awaited are cancelled."""
        self._ended = True
        with contextlib.suppress(queue.Full):  # it looks at `_ended` after each message
            self._waiting.put_nowait(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def call(self, function: Callable[[Watch, float], T]) -> Future[T]:
        """Have `function` called with the watch and the moment, after what was handed in before.

        Raises
        ------
        TransientStoreError
            kind ``busy``: too much waits.
        """
        future: Future[T] = Future()
        try:
            self._waiting.put_nowait((function, future))
        except queue.Full:
            raise TransientStoreError(
                "the daemon cannot follow its agents", kind="busy", hint="try again"
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
            board = self._make_board(now, began)
            with self.ranks_lock:
                self.ranks.update(board.job, board.open, self._watch.scores, board.self_s)
            self.board = board
            self._on_round(board, changes)
        except Exception as error:  # noqa: BLE001 - one bad round must not end the watch
            self.defects += 1
            if self.defects <= 10:
                print(f"ckptd: a round failed: {error!r}", file=sys.stderr, flush=True)  # noqa: T201

    def _make_board(self, now: float, began: float) -> Board:
        watch, before = self._watch, self.board
        job = watch.job(now)
        return Board(
            revision=before.revision + 1,
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
            **_links(watch),
        )


def _links(watch: Watch) -> dict[str, Any]:
    """Return what the last round of probes showed, as fields of a board."""
    matrix = watch.links
    if matrix is None:
        return {}
    columns = (matrix.source, matrix.to, matrix.seconds, matrix.ratio)
    return {
        "links": tuple(zip(*columns, strict=True)),
        "link_nodes": matrix.nodes,
        "link_effects": tuple(_effect(e, matrix.nodes) for e in matrix.effects),
        "links_at": watch.epoch + matrix.at,
    }


def _effect(effect: Effect, nodes: Sequence[str]) -> dict[str, Any]:
    ends = [nodes[n] for n in (effect.source, effect.to) if n >= 0]
    name = ">".join(ends) if effect.target is Target.LINK else ends[0]
    return {
        "target": str(effect.target),
        "name": name,
        "ratio": effect.ratio,
        "edges": effect.edges,
        "echo": effect.echo,
    }


def _answer(item: tuple[Callable[[Watch, float], Any], Future[Any]], watch: Watch) -> None:
    function, future = item
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(watch, time.monotonic()))
    except CkptdError as error:
        future.set_exception(error)
    except Exception as error:  # noqa: BLE001 - told to whoever handed it in
        future.set_exception(error)


def times_of(values: Array) -> tuple[float, float]:
    """Return median and largest of what is known; NaN if nothing is."""
    known = values[np.isfinite(values)]
    return (float(np.median(known)), float(known.max())) if len(known) else (np.nan, np.nan)
