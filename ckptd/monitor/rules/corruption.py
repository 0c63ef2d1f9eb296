"""Silent corruption: replicas whose checksums differ, gradient norms out of line; steps.

In it: how many steps a rank must be out of line; how long late checksums are awaited.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from ckptd.monitor.report import SUM
from ckptd.monitor.rules.mismatch import MOST, minority
from ckptd.monitor.stats import MAD_TO_SIGMA, Array
from ckptd.monitor.verdict import Suspect, SuspectKind, Verdict, VerdictKind

CHUNK = 1 << 20
"""Bytes that are hashed at once."""

_ALL = (1 << 64) - 1


def checksum(tensors: Iterable[tuple[str, Any]], salt: int = 0) -> int:
    """Return one 64-bit checksum of named tensors.

    Each chunk of each tensor is hashed with a salt of its own, so that two values that change
    places, within a tensor or between two, change the sum; the order in which the tensors are
    given does not.

    Parameters
    ----------
    tensors
        Name, and the bytes (anything with the buffer interface, contiguous).
    salt
        The same on all replicas; a new one for each check, so that no collision lasts.
    """
    total = 0
    for name, data in tensors:
        view = memoryview(data).cast("B")
        seed = xxhash.xxh3_64_intdigest(name.encode(), salt & _ALL)
        total += xxhash.xxh3_64_intdigest(len(view).to_bytes(8, "little"), seed)
        for k in range(0, len(view), CHUNK):
            total += xxhash.xxh3_64_intdigest(view[k : k + CHUNK], (seed + k + 1) & _ALL)
    return total & _ALL


def replica_differences(
    replica_set: Sequence[int] | Array,
    ranks: Sequence[int] | Array,
    sums: Sequence[int] | Array,
    step: int,
) -> Iterator[Verdict]:
    """Yield a verdict for each set of replicas whose checksums after the same step differ.

    Parameters
    ----------
    replica_set
        Which ranks hold the same values: one number a rank, equal for replicas.
    ranks
        Global ranks.
    sums
        Their checksums.
    step
        The step after which all were taken.
    """
    sets, who = np.asarray(replica_set), np.asarray(ranks)
    values = np.asarray(sums, np.uint64)
    if not len(sets):
        return
    order = np.argsort(sets, kind="stable")
    sets, who, values = sets[order], who[order], values[order]
    starts = np.flatnonzero(np.append(True, sets[1:] != sets[:-1]))
    ends = np.append(starts[1:], len(sets))
    apart = np.minimum.reduceat(values, starts) != np.maximum.reduceat(values, starts)
    for k in np.flatnonzero(apart)[:MOST]:
        here = slice(starts[k], ends[k])
        yield _differing(who[here], values[here], int(sets[starts[k]]), step)


def _differing(ranks: Array, values: Array, replica_set: int, step: int) -> Verdict:
    odd = minority(values, len(values)) if len(values) >= 3 else None
    named = ranks if odd is None else ranks[odd]
    share = 0.95 if odd is not None else 1 / len(ranks)
    return Verdict(
        kind=VerdictKind.CORRUPTION,
        suspects=tuple(Suspect(SuspectKind.RANK, str(r), share, "checksum differs") for r in named),
        evidence=(
            f"{len(np.unique(values))} checksums among {len(ranks)} replicas after step {step}",
            "a strict majority agrees" if odd is not None else "no majority: compute it again",
        ),
        rules_out=("a fault before the gradients' reduction: that reaches all replicas alike",),
        refuted_by="the named ranks show the majority's checksum when it is taken again",
        action="quarantine, and go back to the last checkpoint on which all agreed",
        numbers={"replicas": len(ranks), "step": step, "replica set": replica_set},
    )


def norm_outliers(
    ranks: Sequence[int] | Array, norms: Array, z: float = 8.0, ratio: float = 3.0
) -> Iterator[Verdict]:
    """Yield a verdict on ranks whose gradients, before the reduction, are out of line.

    Parameters
    ----------
    ranks
        Global ranks that see data of one kind, in data parallel.
    norms
        Gradient norms, shape (steps, ranks), oldest first. Out of line in each of the steps is
        what counts: one hard batch is not a fault.
    z
        Robust standard deviations of the logarithms.
    ratio
        Times the median, or below it.
    """
    table = np.atleast_2d(np.asarray(norms, float))
    who = np.asarray(ranks)
    if len(who) < 4 or not len(table):
        return
    bad = ~np.isfinite(table)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(bad, np.nan, np.log(np.maximum(table, 1e-300)))
    usual = np.array([np.nanmedian(r) if np.isfinite(r).any() else np.nan for r in logs])
    away = np.abs(logs - usual[:, None])
    spread = np.array([np.nanmedian(r) if np.isfinite(r).any() else np.nan for r in away])
    limit = np.maximum(z * MAD_TO_SIGMA * spread, np.log(ratio))
    out = bad | (away > limit[:, None])
    # Not finite on every rank, or far on most, is the model and not a rank.
    rows = np.flatnonzero(out.all(0))
    if not len(rows) or 2 * len(rows) >= len(who):
        return
    worst = float(np.exp(np.nan_to_num(away[:, rows], nan=0.0).max()))
    yield Verdict(
        kind=VerdictKind.CORRUPTION,
        suspects=tuple(
            Suspect(SuspectKind.RANK, str(who[r]), 0.6, "gradient norm out of line") for r in rows
        ),
        evidence=(f"norms of {len(rows)} of {len(who)} ranks out of line in {len(table)} steps",),
        rules_out=("a fault of the model: the other ranks' gradients are in line",),
        refuted_by="the named rank repeats the step on another device with the same norm",
        action="compute the step again elsewhere; quarantine the device if it differs",
        numbers={"out of line": len(rows), "ranks": len(who), "worst ratio": worst},
    )


CHECKSUM, NORM = 0, 1
STEPS = 8
"""Steps that are waited for at a time, and steps of norms that are looked at together."""
NORM_STEPS = 3
"""A rank must be out of line in so many steps in a row: one hard batch is not a fault."""
NORMS_LATE = 64
"""Norms come of every step. No rank is so many steps late: then steps are made again."""
LATE_S = 3.0
"""Seconds after the last report of a step, after which missing ranks are not waited for."""


class SumTable:
    """Checksums of the last steps; no clock."""

    def __init__(self) -> None:
        self.mismatches = 0
        """Steps and sets of replicas whose checksums were not the same."""
        self.forget()

    def forget(self) -> None:
        """Begin again."""
        self._sums: dict[int, list[tuple[Array, Array]]] = {}
        self._seen_at: dict[int, float] = {}
        self._norms: dict[int, list[tuple[Array, Array]]] = {}
        self._judged = -1
        self._judged_norm = -1
        self._lately: deque[int] = deque(maxlen=8 * STEPS)
        self._behind: set[int] = set()

    def add(self, rows: Array, ranks: Array, now: float) -> None:
        """Take rows of `ckptd.monitor.report.SUM`; `ranks` are the ranks of the report's rows."""
        if self._went_back(rows):
            self.forget()
        for step in np.unique(rows["step"]).tolist():
            here = rows[rows["step"] == step]
            for what, book, done in (
                (CHECKSUM, self._sums, self._judged),
                (NORM, self._norms, self._judged_norm),
            ):
                mine = here[here["what"] == what]
                if len(mine) and step > done:
                    book.setdefault(step, []).append((mine, ranks[mine["row"]]))
                    self._seen_at[step] = now
        for book in (self._sums, self._norms):
            for step in sorted(book)[: -2 * STEPS]:
                del book[step]

    def _went_back(self, rows: Array) -> bool:
        """Whether steps are made again, or the last that was judged was a lie or a damage.

        Then two checks come of steps before it that were not judged lately, only late; or norms
        come of steps long ago.
        """
        norms = rows["step"][rows["what"] == NORM]
        if len(norms) and int(norms.max()) < self._judged_norm - NORMS_LATE:
            return True
        steps = set(rows["step"][rows["what"] == CHECKSUM].tolist())
        self._behind |= {s for s in steps if s <= self._judged} - set(self._lately)
        return len(self._behind) > 1

    def judge(self, now: float) -> Iterator[Verdict]:
        """Yield verdicts on steps of which nothing further is to be expected."""
        for step in sorted(self._sums):
            if self._complete(step, self._sums, now):
                rows, ranks = _whole(self._sums.pop(step))
                self._judged = max(self._judged, step)
                self._lately.append(step)
                self.mismatches += _count_differing(rows)
                yield from replica_differences(rows["set"], ranks, rows["value"], step)
        self._seen_at = {
            s: t for s, t in self._seen_at.items() if s in self._sums or s in self._norms
        }
        yield from self._judge_norms(now)

    def _complete(self, step: int, book: dict[int, list[tuple[Array, Array]]], now: float) -> bool:
        # A later step of all ranks, or silence: a rank that has not reported by then does not.
        later = max(book) > step and now - self._seen_at.get(step, now) > LATE_S / 3
        return later or now - self._seen_at.get(step, now) > LATE_S

    def _judge_norms(self, now: float) -> Iterator[Verdict]:
        ready = [s for s in sorted(self._norms) if self._complete(s, self._norms, now)]
        if len(ready) < NORM_STEPS or ready[-1] <= self._judged_norm:
            return
        self._judged_norm = ready[-1]
        last = ready[-NORM_STEPS:]
        tables = [_whole(self._norms[s]) for s in last]
        for s in ready[: -NORM_STEPS + 1]:
            del self._norms[s]
        for group in np.unique(tables[-1][0]["set"]).tolist():
            yield from _outliers(tables, group)


def _outliers(tables: list[tuple[Array, Array]], group: int) -> Iterator[Verdict]:
    told = [
        dict(zip(ranks[mine].tolist(), rows["value"][mine].view("<f8").tolist(), strict=True))
        for rows, ranks in tables
        for mine in [rows["set"] == group]
    ]
    ranks = sorted(set.intersection(*(set(t) for t in told)))
    if len(ranks) >= 3:
        yield from norm_outliers(ranks, np.array([[t[r] for r in ranks] for t in told]))


def _count_differing(rows: Array) -> int:
    """Return in how many sets not all values are the same."""
    sets = np.unique(np.unique(rows[["set", "value"]])["set"], return_counts=True)[1]
    return int((sets > 1).sum())


def _whole(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    rows = np.frombuffer(b"".join(r.tobytes() for r, _ in parts), SUM)
    return rows, np.concatenate([ranks for _, ranks in parts])
