"""Makes a node's reports: new calls, groups, texts, usage; how many calls are sent."""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ckptd.errors import CkptdError
from ckptd.monitor.agent.health import Health
from ckptd.monitor.agent.processes import Process, environment
from ckptd.monitor.agent.rings import Ring, Rings
from ckptd.monitor.agent.totals import RingTotals
from ckptd.monitor.job import Phase, RankView
from ckptd.monitor.report import (
    USAGE,
    AgentState,
    GroupInfo,
    NodeReport,
    RankNote,
    ReportLimits,
    from_views,
)
from ckptd.monitor.ring import Counter, process_birth
from ckptd.monitor.stats import Array

# --- ranks that have no ring yet ------------------------------------------------------------------


RINGS_VARIABLE = "CKPTD_RINGS"
_WAITS_S = 1.0
_AGAIN_S = 2.0
_MOST_WORLD = 1 << 24


class Unborn:
    """Finds such ranks of one folder of rings.

    Parameters
    ----------
    folder
        Where they will put their rings.
    node
        Name of this node.
    """

    def __init__(self, folder: Path, node: str) -> None:
        self._folder = os.path.realpath(folder)
        self._node = node
        self._scanned = float("-inf")
        self._found: dict[tuple[int, int], tuple[int, int, int, float]] = {}

    def views(
        self, now: float, born: Sequence[RankView], generation: int
    ) -> Iterator[tuple[RankView, RankNote]]:
        """Yield what is to be seen of ranks that others wait for and that have no ring.

        Parameters
        ----------
        now
            Monotonic seconds.
        born
            What the ranks with rings show.
        generation
            Of those: others are another life of the job.
        """
        here = {view.rank for view in born if view.alive}
        most = max((view.world for view in born), default=0)
        if len(here) >= most or not any(_waits(view, now) for view in born):
            self._found.clear()
            return
        if now - self._scanned >= _AGAIN_S:
            self._scanned = now
            self._scan(now, here, most)
        for (pid, birth), (rank, world, life, seen) in self._found.items():
            state = _state(pid, birth)
            if rank not in here and life == generation and state:
                view = RankView(
                    rank=rank,
                    world=world,
                    node=self._node,
                    pid=pid,
                    at=now,
                    moved=seen,
                    process_state=state,
                    phase=Phase.INIT,
                )
                yield view, RankNote(generation=life)

    def _scan(self, now: float, here: Collection[int], most: int) -> None:
        """Look through all processes; of those that say to be one rank the oldest is it."""
        before, self._found = self._found, {}
        oldest: dict[int, tuple[int, int]] = {}
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            environ = environment(pid)
            if os.path.realpath(environ.get(RINGS_VARIABLE, "/")) != self._folder:
                continue
            rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
            if not 0 <= rank < world == most or rank in here:
                continue
            birth = process_birth(pid)
            if birth and (birth, pid) < oldest.get(rank, (birth + 1, 0)):
                oldest[rank] = (birth, pid)
                key, name = (pid, birth), "CKPTD_GENERATION"
                life = _number(environ, name if name in environ else "TORCHELASTIC_RESTART_COUNT")
                seen = before[key][3] if key in before else now
                self._found[key] = (rank, world, max(life, 0), seen)
        kept = {(pid, birth) for birth, pid in oldest.values()}
        self._found = {key: value for key, value in self._found.items() if key in kept}


def _waits(view: RankView, now: float) -> bool:
    inside = view.alive and view.phase is Phase.INIT and view.pending_group != 0
    return inside and now - view.pending_since > _WAITS_S


def _state(pid: int, birth: int) -> str:
    process = Process.find(pid, birth)
    if process is None:
        return ""
    try:
        return process.state() if process.runs() else ""
    finally:
        process.close()


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() and int(text) < _MOST_WORLD else -1


# --- reports --------------------------------------------------------------------------------------


FEW_CALLS = 16
"""Calls of a rank that moves."""
MORE_CALLS = 64
"""Of one that looks stuck."""
MANY_CALLS = 512
"""Of a rank whose calls were ordered, or differ from those of others."""

_WIDE_S = 1.5
"""For this long many calls of all ranks are sent when calls of some differ."""
_TICKS = 100  # of the kernel's clock in /proc, the same on all Linux machines of today
_USAGE_S = 5.0
"""Seconds between two looks at what processes use of the machine."""
_LIMITS = ReportLimits()


class ReportMaker:
    """Makes reports of `rings`, numbered from 1.

    Parameters
    ----------
    job, node
        Names in the reports.
    rings
        What is read.
    totals
        What the ranks' calls and samples add up to.
    address
        Where link probes are answered; empty if they are not.
    health
        What the node's hardware shows.
    """

    def __init__(
        self,
        job: str,
        node: str,
        rings: Rings,
        totals: RingTotals,
        address: str,
        health: Health | None = None,
    ) -> None:
        self.job = job
        self.node = node
        self.source = secrets.token_hex(8)
        self._rings = rings
        self._totals = totals
        self._address = address
        self._health = health
        self._unborn = Unborn(rings.folder, node)
        self._number = 0
        self._again = False
        self._wide_until = -math.inf
        self._seen: dict[Ring, tuple[int, int]] = {}
        self._members: dict[int, GroupInfo] = {}
        self._texts: dict[int, str] = {}
        self._used: dict[int, float] = {}
        self._used_at = -math.inf

    def tell_again(self) -> None:
        """Send everything with the next report, as to a new daemon."""
        self._again = True

    def make(
        self, now: float, stuck: Collection[int], asked: Collection[int], taken: int = 0
    ) -> NodeReport:
        """Return the next report.

        Parameters
        ----------
        now
            Monotonic seconds.
        stuck, asked
            Ranks of which more of the last calls are sent, and of which many are.
        taken
            Number of the last report that is known to have arrived.
        """
        again, self._again = self._again, False
        if again:
            self._seen.clear()
            self._members.clear()
            self._texts.clear()
        members: dict[int, GroupInfo] = {}
        texts: dict[int, str] = {}
        views, notes = [], {}
        if self._totals.differing.some():
            self._wide_until = now + _WIDE_S  # any one report may be overtaken by the next
        many = set(self._rings.ranks) if now < self._wide_until else set(asked)
        for rank, ring in sorted(self._rings.ranks.items()):
            calls = MORE_CALLS if rank in stuck or not ring.alive else FEW_CALLS
            try:
                wanted = MANY_CALLS if rank in many else calls
                new = self._has_news(ring)
                view = ring.reader.view(wanted, members=new)
                if new:
                    self._news(ring, view, members, texts)
            except CkptdError as error:
                self._rings.spoiled(ring, error)
                continue
            views.append(_completed(view, ring))
            notes[rank] = _note(ring)
        life = max((note.generation for note in notes.values()), default=0)
        for view, note in self._unborn.views(now, views, life):
            views.append(view)
            notes[view.rank] = note
        return self._report(views, notes, members, texts, taken, again=again)

    def _report(
        self,
        views: list[RankView],
        notes: dict[int, RankNote],
        members: dict[int, GroupInfo],
        texts: dict[int, str],
        taken: int,
        *,
        again: bool,
    ) -> NodeReport:
        self._number += 1
        rows = {view.rank: row for row, view in enumerate(views)}
        tables, after = self._totals.take(self._number, taken, rows, again=again)
        usage = self._usage(rows, time.monotonic())
        state = self._state()
        return from_views(
            views,
            job=self.job,
            source=self.source,
            number=self._number,
            notes=notes,
            agents={self.node: state, **dict.fromkeys((v.node for v in views), state)},
            members=members,
            texts=texts,
            after=after,
            usage=usage,
            **tables,
        )

    def _usage(self, rows: Mapping[int, int], now: float) -> Array:
        """Return what the processes use of the machine, now and then; else no rows."""
        passed = now - self._used_at
        if passed < _USAGE_S:
            return np.zeros(0, USAGE)
        before, self._used, self._used_at = self._used, {}, now
        found = []
        for rank, row in rows.items():
            ring = self._rings.ranks.get(rank)
            if ring is not None and ring.alive and ring.process is not None:
                ticks, memory, threads = ring.process.usage()
                earlier = before.get(ring.process.pid, math.inf)
                cpu = (ticks - earlier) / _TICKS / passed if ticks >= earlier else math.nan
                self._used[ring.process.pid] = ticks
                found.append((row, cpu, memory, threads))
        return np.array(found, USAGE)

    def _state(self) -> AgentState:
        return AgentState(
            address=self._address,
            cpu_s=time.process_time(),
            overruns=self._totals.overruns,
            rings=len(self._rings.ranks),
            bad_rings=self._rings.bad,
            recorder_s=self._totals.recorder_s,
            signs=self._health.signs() if self._health else (),
        )

    def _has_news(self, ring: Ring) -> bool:
        """Return whether a ring has groups or texts that were not looked at before."""
        counts = (ring.counters[Counter.GROUPS], ring.counters[Counter.TEXTS])
        if self._seen.get(ring) == counts:
            return False
        self._seen = {r: c for r, c in self._seen.items() if r in self._rings.ranks.values()}
        self._seen[ring] = counts
        return True

    def _news(
        self, ring: Ring, view: RankView, members: dict[int, GroupInfo], texts: dict[int, str]
    ) -> None:
        """Add the groups and texts of a ring that were not sent before."""
        infos = {
            ident: (name, kind, limit) for ident, name, kind, limit in ring.reader.group_infos()
        }
        for ident, ranks in view.members.items():
            name, kind, timeout_s = infos.get(ident, ("", "", 0.0))
            info = msgspec.structs.replace(GroupInfo.of(ranks, name, kind), timeout_s=timeout_s)
            if self._members.get(ident) != info and len(self._members) < _LIMITS.members:
                self._members[ident] = members[ident] = info
        for code, text in ring.reader.texts().items():
            if code not in self._texts and len(self._texts) < _LIMITS.texts:
                self._texts[code] = texts[code] = text


def _completed(view: RankView, ring: Ring) -> RankView:
    """Return a view with what only the node knows."""
    more: dict[str, Any] = {"alive": ring.alive, "exit_code": ring.exit_code}
    if ring.answers >= 0:
        more["answers"] = bool(ring.answers)
    if ring.starved_s > 0:
        # CPU starvation does not count as silence.
        more["moved"] = min(view.moved + ring.starved_s, view.at)
    return msgspec.structs.replace(view, process_state=ring.state, **more)


def _note(ring: Ring) -> RankNote:
    header, counters = ring.header, ring.counters
    up = time.clock_gettime(time.CLOCK_BOOTTIME)
    return RankNote(
        generation=header.generation,
        lived=up - header.birth / _TICKS if header.birth else math.nan,
        recorder=ring.recorder,
        lost=min(max(counters[Counter.LOST], 0), 1 << 62),
        written=min(max(counters[Counter.WRITTEN], 0), 1 << 62),
    )
