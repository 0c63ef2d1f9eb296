"""One row a rank, as the API tells it: from the job's columns, with what changed since when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ckptd.monitor.incidents.incident import Incident
from ckptd.monitor.job import NO_EXIT, Job
from ckptd.monitor.report import GroupInfo
from ckptd.monitor.stats import Array
from ckptd.monitor.verdict import Kind, Target
from ckptd.monitor.view import Phase

__all__ = ["SHOWN", "STATUS", "Names", "Ranks"]


_KINDS = 32
_PREFIX = "mesh_"
_KNOWN = {"default_pg": "world", "": "group"}


class Names:
    """Names by hash; where none was told, the hash in hexadecimal.

    Parameters
    ----------
    groups, texts
        What was told; both may grow while this is used.
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
        return (info.name if info else "") or f"{number:016x}"

    def site(self, number: int) -> str:
        """Return where a call was made; empty if that is not known."""
        return self.texts.get(number) or (f"{number:016x}" if number else "")

    def kind(self, number: int) -> str:
        """Return the kind of a group in one word, of which there are few: ``dp``, ``world``."""
        info = self.groups.get(number)
        return self.kind_word(info.kind if info else "")

    def kind_word(self, said: str) -> str:
        """Return the word for a kind as a program says it, such as ``mesh_dp``."""
        said = said.removeprefix(_PREFIX)
        word = _KNOWN.get(said, said)
        if word not in self._kinds:
            if len(self._kinds) >= _KINDS or not word.isprintable() or len(word) > 32:
                return "other"
            self._kinds.add(word)
        return word


STATUS = ("ok", "waiting", "suspect", "dead", "silent", "slow")
"""What the numbers of the column ``status`` mean."""
_OK, _WAITING, _SUSPECT, _DEAD, _SILENT, _SLOW = range(6)

WAITING_S = 1.0
"""A rank that is inside a call for so long waits."""
_AGES = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""An age counts as changed when it passes one of these, seconds: it always grows."""

SHOWN: np.dtype[Any] = np.dtype(
    [
        ("rank", "<i8"),
        ("node", "<i4"),
        ("pid", "<i8"),
        ("alive", "?"),
        ("exit_code", "<i4"),
        ("state", "S1"),
        ("phase", "<i4"),
        ("step", "<i8"),
        ("heartbeat_age_s", "<f8"),
        ("progress_age_s", "<f8"),
        ("pending_age_s", "<f8"),
        ("group", "<u8"),
        ("seq", "<i8"),
        ("op", "<u4"),
        ("self_s", "<f8"),
        ("score", "<f8"),
        ("status", "<i4"),
    ]
)
_PHASES = tuple(phase.name for phase in Phase)


class Ranks:
    """Rows of all ranks that were heard of in this generation, sorted by rank.

    Attributes
    ----------
    revision
        Rises with each `update`.
    nodes
        Names of nodes; a place keeps its name for good.
    table
        Rows of `SHOWN`.
    revisions
        At which revision each row last changed.
    """

    def __init__(self) -> None:
        self.revision = 0
        self.nodes: list[str] = []
        self._places: dict[str, int] = {}
        self.table: Array = np.zeros(0, SHOWN)
        self.revisions: Array = np.zeros(0, np.int64)

    def update(
        self,
        job: Job,
        incidents: Sequence[Incident],
        scores: Mapping[int, float],
        self_s: Mapping[int, float],
    ) -> None:
        """Take the job as it is after a round."""
        new = self._with_silent(self._rows(job, scores, self_s), job.world)
        _blame(new, incidents, self._places)
        self.revision += 1
        old = self.table
        if len(old) == len(new) and np.array_equal(old["rank"], new["rank"]):
            changed = _differs(old, new)
            self.revisions = np.where(changed, self.revision, self.revisions)
        else:
            self.revisions = np.full(len(new), self.revision)
        self.table = new

    def _rows(self, job: Job, scores: Mapping[int, float], self_s: Mapping[int, float]) -> Array:
        ranks = job.ranks[np.argsort(job.ranks["rank"], kind="stable")]
        new = np.zeros(len(ranks), SHOWN)
        for name in ("rank", "pid", "alive", "exit_code", "state", "phase", "step"):
            new[name] = ranks[name]
        place = np.array([self._place(name) for name in job.nodes], np.int32)
        new["node"] = place[ranks["node"]] if len(ranks) else 0
        new["heartbeat_age_s"], new["progress_age_s"] = ranks["heartbeat"], ranks["idle"]
        waits = (ranks["pending_group"] != 0) & (ranks["pending_age"] >= WAITING_S)
        waits &= ranks["alive"] != 0
        new["pending_age_s"] = np.where(waits, ranks["pending_age"], np.nan)
        new["group"] = np.where(waits, ranks["pending_group"], 0)
        new["seq"] = np.where(waits, ranks["pending_seq"], 0)
        new["op"] = _operations(job, new)
        new["score"], new["self_s"] = _looked_up(scores, new), _looked_up(self_s, new)
        new["status"] = np.where(new["alive"], np.where(waits, _WAITING, _OK), _DEAD)
        return new

    def _place(self, node: str) -> int:
        if node not in self._places:
            self._places[node] = len(self.nodes)
            self.nodes.append(node)
        return self._places[node]

    def _with_silent(self, new: Array, world: int) -> Array:
        """Add what is known of ranks that no longer report."""
        lost = self.table[~np.isin(self.table["rank"], new["rank"])]
        lost = lost[lost["rank"] < world] if len(new) else lost
        if not len(lost):
            return new
        lost = lost.copy()
        lost["status"] = _SILENT
        out = np.concatenate([new, lost])
        return out[np.argsort(out["rank"], kind="stable")]

    def document(self, names: Names, at: float, since: int | None = None) -> dict[str, Any]:
        """Return the columns as plain data.

        Parameters
        ----------
        names
            For what ranks wait for.
        at
            Now, seconds since 1970.
        since
            Only rows that changed after that revision; all if left out.
        """
        rows = self.table if since is None else self.table[self.revisions > since]
        waits = [_waiting(names, *key) for key in rows[["op", "group", "seq"]].tolist()]
        codes: list[int] = rows["exit_code"].tolist()
        return {
            "now": at,
            "revision": self.revision,
            "since": since,
            "nodes": self.nodes,
            "rank": rows["rank"],
            "node": rows["node"],
            "pid": [pid or None for pid in rows["pid"].tolist()],
            "alive": rows["alive"],
            "exit_code": [None if c == NO_EXIT else c for c in codes],
            "state": [letter.decode("ascii", "replace") for letter in rows["state"].tolist()],
            "phase": [phase_name(p) for p in rows["phase"].tolist()],
            "step": rows["step"],
            **{
                name: np.round(rows[name], 3)
                for name in ("heartbeat_age_s", "progress_age_s", "pending_age_s")
            },
            "pending": waits,
            "self_s": np.round(rows["self_s"], 6),
            "score": np.round(rows["score"], 3),
            "status": rows["status"],
        }


def phase_name(number: int) -> str:
    """Return the name of a phase."""
    return _PHASES[number] if 0 <= number < len(_PHASES) else "INIT"


def _waiting(names: Names, op: int, group: int, seq: int) -> str | None:
    if not group:
        return None
    what = names.op(op) if op else "a call"
    return f"{what} {names.group(group)} #{seq}"


def _operations(job: Job, new: Array) -> Array:
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


def _looked_up(values: Mapping[int, float], rows: Array) -> Array:
    if not values:
        return np.full(len(rows), np.nan)
    return np.array([values.get(rank, np.nan) for rank in rows["rank"].tolist()], float)


def _blame(rows: Array, incidents: Sequence[Incident], places: Mapping[str, int]) -> None:
    """Mark the suspects of open incidents; a dead or silent rank stays what it is."""
    for incident in incidents:
        status = _SLOW if incident.kind == Kind.SLOW_RANK else _SUSPECT
        names = [int(n) for n in incident.verdict.names() if n.isdecimal()]
        nodes = [places[n] for n in incident.verdict.names(Target.NODE) if n in places]
        # A node is named beside its ranks where most of them are meant.
        hit = np.isin(rows["rank"], names) if names else np.isin(rows["node"], nodes)
        hit &= ~np.isin(rows["status"], (_DEAD, _SILENT))
        rows["status"][hit] = status


def _differs(old: Array, new: Array) -> Array:
    out = np.zeros(len(new), bool)
    for name in (
        *("node", "pid", "alive", "exit_code", "phase", "step"),
        *("group", "seq", "op", "status"),
    ):
        out |= old[name] != new[name]
    for name in ("heartbeat_age_s", "progress_age_s", "pending_age_s"):
        out |= np.searchsorted(_AGES, old[name]) != np.searchsorted(_AGES, new[name])
    out |= _letters(old["state"]) != _letters(new["state"])
    for name, step in (("score", 0.02), ("self_s", 0.02)):
        before, after = old[name], new[name]
        same = (np.isnan(before) & np.isnan(after)) | (
            np.abs(after - before) <= step * np.abs(before)
        )
        out |= ~same
    return out


def _letters(state: Array) -> Array:
    # A rank runs or sleeps from one moment to the next, and neither means anything.
    return np.where(state == b"R", b"S", state)
