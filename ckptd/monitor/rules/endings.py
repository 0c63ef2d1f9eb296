"""Ends of processes before they are judged: which are good, how long others are awaited."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field, replace

import numpy as np

from ckptd.monitor.job import NO_EXIT, CallFlag, JobView, Phase
from ckptd.monitor.ring import RecorderState
from ckptd.monitor.rules.crash import singled_out
from ckptd.monitor.rules.hang import absent
from ckptd.monitor.rules.mismatch import P2P, with_newcomers
from ckptd.monitor.stats import Array


@dataclass
class Stopped:
    """Since when each process is shown as stopped; no clock."""

    _since: dict[tuple[int, int], float] = field(default_factory=dict)

    def longer(self, rows: Array, seconds: float) -> Array:
        """Return which rows were shown as stopped all along for longer than `seconds`.

        Parameters
        ----------
        rows
            Rows of `ckptd.monitor.report.REPORT_RANK`, of this round.
        seconds
            How long is long.
        """
        out = np.zeros(len(rows), bool)
        halted = (rows["alive"] != 0) & np.isin(rows["state"], np.array([b"T", b"t"]))
        before, self._since = self._since, {}
        for row in np.flatnonzero(halted).tolist():
            key = (int(rows["rank"][row]), int(rows["pid"][row]))
            idle = float(rows["idle"][row])
            first = min(before.get(key, idle), idle)  # less: it ran between
            self._since[key] = first
            out[row] = idle - first > seconds
        return out


ASKED_S = 1.0
"""An end by SIGTERM or SIGINT is held back for this long: all ranks may be ending."""
GIVEN_UP_S = 30.0
"""A rank that has not moved for this long waits for its call, whatever else it does."""
FOLLOWED_S = 0.4
"""An end with an exit code, or an abort, is held back: its cause may be seen later."""


@dataclass
class Endings:
    """When each process was first seen to have ended; no clock.

    Attributes
    ----------
    wait_s
        A process that ended successfully is missed when another waits for so long.
    held_s
        No end is reported before this: a controller that ends ranks says so within the time.
    """

    wait_s: float = 2.0
    held_s: float = 0.0
    _seen: dict[tuple[int, int], float] = field(default_factory=dict)

    def settle(self, job: JobView, rows: Array, now: float) -> JobView:
        """Return `job` with successful ends marked so, and young ends that may follow hidden.

        Parameters
        ----------
        job
            The moment.
        rows
            Rows of `ckptd.monitor.report.REPORT_RANK`, as of ``job.ranks``.
        now
            The moment, seconds.
        """
        ended = ~job.ranks["alive"]
        if not ended.any():
            self._seen.clear()
            return job
        age = self._ages(rows, np.flatnonzero(ended), now)
        ranks = job.ranks.copy()
        left = self._left_early(job)
        well = ended & self._well(job, rows) & ~left
        ranks["exit_code"][well], ranks["phase"][well] = 0, Phase.EXIT
        ranks["phase"][left] = Phase.TRAIN  # whatever it said: it is missed
        code = ranks["exit_code"]
        asked = ended & ((code == -signal.SIGTERM) | (code == -signal.SIGINT))
        asked &= ~self._singled_out(ranks, ended, age)
        aborted = code == -signal.SIGABRT  # what C++ does with an error: gloo, of another's call
        failed = ended & ~well & ~left & ((code >= 0) | (code == NO_EXIT) | aborted)
        if (well | asked)[ended].all():
            ranks["alive"][asked & (age < ASKED_S)] = True
            all_done = asked & ~self._missed(job, ended)
            ranks["exit_code"][all_done], ranks["phase"][all_done] = 0, Phase.EXIT
        else:
            # Beside another end that was asked for, it is reported as a consequence.
            ranks["alive"][asked & (age < FOLLOWED_S)] = True
        if failed.any() and not (ended & ~well & ~asked & ~failed).any():
            ranks["alive"][failed & (age < FOLLOWED_S)] = True
        ranks["alive"][ended & ~well & (age < self.held_s)] = True
        return replace(job, ranks=ranks)

    def _ages(self, rows: Array, ended: Array, now: float) -> Array:
        """Return for how long each row's process has been seen as ended, in seconds."""
        out = np.zeros(len(rows))
        seen = {}
        for row in ended.tolist():
            key = (int(rows["rank"][row]), int(rows["pid"][row]))
            seen[key] = self._seen.get(key, now)
            out[row] = now - seen[key]
        self._seen = seen
        return out

    def _well(self, job: JobView, rows: Array) -> Array:
        """Return the ranks that ended well: they said so, or no rank waits for them."""
        ranks = job.ranks
        unknown = ranks["exit_code"] == NO_EXIT
        done = (ranks["exit_code"] == 0) | (unknown & (rows["recorder"] == RecorderState.OFF))
        ended_well = (ranks["exit_code"] == 0) & (ranks["phase"] == Phase.EXIT)
        out: Array = np.where(self._awaited(job), ended_well, done)
        return out

    def _left_early(self, job: JobView) -> Array:
        """Return ranks that ended with exit code 0 while their groups still called and missed them.

        Its peers wait for it, or have ended with an error in a call that it has not entered.
        """
        ranks = job.ranks
        done = ~ranks["alive"] & (ranks["exit_code"] == 0)
        out = np.zeros(len(ranks), bool)
        if not done.any():
            return out
        failed = ~ranks["alive"] & (ranks["exit_code"] != 0) & (ranks["exit_code"] != NO_EXIT)
        # A receive that was begun and given up may be open for ever: a rank in it does not move
        # and does nothing else.
        quiet = (ranks["idle"] > self.wait_s) & (ranks["state"] != b"R")
        waits = ranks["alive"] & quiet & (ranks["pending_age"] > self.wait_s)
        waits |= ranks["alive"] & (ranks["idle"] > GIVEN_UP_S)
        job = with_newcomers(job)
        calls, groups = job.calls, job.groups
        bad = (calls["flags"] & CallFlag.FAILED) != 0
        bad |= np.isnan(calls["end"]) & ~np.isin(calls["op"], P2P)
        bad &= failed[calls["row"]]
        inside = waits & (ranks["pending_group"] != 0)
        wanted = np.append(calls["group"][bad], ranks["pending_group"][inside])
        seq = np.append(calls["seq"][bad], ranks["pending_seq"][inside])
        at = job.code_of(wanted)
        reached = np.zeros(max(len(job.group_ids), 1), np.int64)
        np.maximum.at(reached, at[at >= 0], seq[at >= 0])
        out[groups["row"][groups["entered"] < reached[job.group_codes]]] = True
        out &= done
        return out

    def _awaited(self, job: JobView) -> Array:
        """Return members that have not completed a call, for which others have waited for long."""
        ranks = job.ranks
        long = ranks["alive"] & (ranks["pending_group"] != 0)
        long &= ranks["pending_age"] > self.wait_s
        out = np.zeros(len(ranks), bool)
        if not long.any():
            return out
        job = with_newcomers(job)
        codes = job.code_of(ranks["pending_group"][long])
        if (codes < 0).any() or (absent(job)[codes] > 0).any():
            return ~out  # of a group whose members are not all known, anybody may be one
        wanted = np.zeros(len(job.group_ids), np.int64)
        np.maximum.at(wanted, codes, ranks["pending_seq"][long])
        out[job.groups["row"][job.groups["completed"] < wanted[job.group_codes]]] = True
        return out

    def _singled_out(self, ranks: Array, ended: Array, age: Array) -> Array:
        """Return which ranks alone were sent their signal, by their agents.

        Whether one was sent SIGINT, which Python catches, the agent cannot see of the others: a
        launcher that was asked by it passes it on, and one that misses a rank sends SIGTERM.
        """
        alone = singled_out(ranks)
        interrupted = alone & (ranks["exit_code"] == -signal.SIGINT)
        for row in np.flatnonzero(interrupted).tolist():
            swept = ended & (ranks["node"] == ranks["node"][row]) & (age[row] - age <= ASKED_S)
            alone[row] = (swept & (ranks["exit_code"] == -signal.SIGTERM)).any()
        ranks["answers"][interrupted & ~alone] = -1
        return alone

    def _missed(self, job: JobView, ended: Array) -> Array:
        """Return of which rows others on the same node go on, or anybody waits."""
        if self._awaited(job)[ended].any():
            return ended
        alive = np.bincount(job.ranks["node"][~ended], minlength=len(job.nodes)) > 0
        out: Array = alive[job.ranks["node"]]
        return out
