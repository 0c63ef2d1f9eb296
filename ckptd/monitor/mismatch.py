"""Members of a group that make different calls at the same sequence number."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckptd.monitor.job import Job
from ckptd.monitor.limits import Limits
from ckptd.monitor.naming import rank_suspects
from ckptd.monitor.stats import Array, mix
from ckptd.monitor.verdict import Kind, Verdict
from ckptd.monitor.view import CallFlag

__all__ = ["MOST", "minority", "mismatches"]

MOST = 64
"""Most groups told of in one round: what is wrong with more is one fault of the program."""


def minority(values: Array, size: int) -> Array | None:
    """Return which of `values` differ from the strict majority's; None where there is none.

    The majority is one of all `size` that vote, also of those that have not voted yet.
    """
    kinds, codes, counts = np.unique(values, return_inverse=True, return_counts=True)
    best = int(np.argmax(counts))
    if len(kinds) < 2 or 2 * counts[best] <= size:
        return None
    out: Array = codes != best
    return out


def mismatches(job: Job, limits: Limits) -> Iterator[Verdict]:
    """Yield a verdict for each group whose members' calls differ, at the first such call.

    Different signatures are a mismatch; the same signature in different steps is a desync. Where
    steps are not marked, call sites are compared instead, but not of calls with a root: `if rank
    == 0: broadcast() else: broadcast()` is a rightful program.
    """
    calls = job.calls
    if not len(calls):
        return
    order, starts = job.cohorts
    rows = calls[order]
    sizes = np.diff(np.append(starts, len(order)))
    signature = _signatures(rows, starts, sizes)
    moment = np.where(
        rows["step"] >= 0,
        rows["step"].astype(np.uint64),
        np.where(rows["root"] < 0, rows["site"], np.uint64(0)),
    )
    told: set[int] = set()
    for kind, values in ((Kind.MISMATCH, signature), (Kind.DESYNC, moment)):
        apart = np.minimum.reduceat(values, starts) != np.maximum.reduceat(values, starts)
        for cohort in np.flatnonzero(apart):
            here = slice(starts[cohort], starts[cohort] + sizes[cohort])
            group = int(rows["group"][here.start])
            if group in told or len(told) >= MOST:
                continue
            verdict = _verdict(job, limits, kind, rows[here], values[here])
            if verdict is not None:
                told.add(group)
                yield verdict


def _signatures(rows: Array, starts: Array, sizes: Array) -> Array:
    variable = np.logical_or.reduceat((rows["flags"] & CallFlag.VARIABLE) != 0, starts)
    whole = mix(rows["op"], rows["dtype"], rows["bytes"], rows["root"])
    out: Array = np.where(np.repeat(variable, sizes), rows["op"].astype(np.uint64), whole)
    return out


def _verdict(job: Job, limits: Limits, kind: Kind, calls: Array, values: Array) -> Verdict | None:
    size = _size(job, int(calls["group"][0]), len(calls))
    voting = size - _passed(job, calls)
    odd = minority(values, voting)
    age = float(-calls["start"].min())
    if odd is None and len(calls) < voting and age < limits.majority_wait:
        return None  # who is right is not known before most have come
    named = calls if odd is None else calls[odd]
    share = 1 / len(np.unique(values)) if odd is None else 0.95 * voting / size
    return Verdict(
        kind=kind,
        suspects=rank_suspects(job, named["row"], share, [_call(job, c) for c in named]),
        evidence=(
            f"{len(calls)} of {size} members came, with {len(np.unique(values))} different calls",
            "a strict majority agrees against the named" if odd is not None else "no majority",
        ),
        rules_out=("a slow or broken link: the calls themselves differ",),
        refuted_by="all members show the same operation, type, size, root and step at this call",
        action="dump and restart without isolation; if it comes again it is the program",
        numbers={
            "sequence number": int(calls["seq"][0]),
            "members that came": len(calls),
            "members": size,
            "differing": int(odd.sum()) if odd is not None else len(calls),
            "age s": age,
        },
        groups=(int(calls["group"][0]),),
    )


def _passed(job: Job, calls: Array) -> int:
    """Return members who made the call so long ago that it is not told any more: no vote comes."""
    group, seq = calls["group"][0], int(calls["seq"][0])
    rows = job.groups[(job.groups["group"] == group) & (job.groups["entered"] >= seq)]
    return int((~np.isin(rows["row"], calls["row"])).sum())


def _size(job: Job, group: int, seen: int) -> int:
    known = job.groups["size"][job.groups["group"] == group]
    return max(int(known.max()) if len(known) else 0, seen)


def _call(job: Job, call: Array) -> str:
    parts = [job.text(int(call["op"])), f"{int(call['bytes'])} bytes"]
    if call["dtype"]:
        parts[-1] += f" of {job.text(int(call['dtype']))}"
    if call["root"] >= 0:
        parts.append(f"root {int(call['root'])}")
    if call["step"] >= 0:
        parts.append(f"step {int(call['step'])}")
    if site := job.texts.get(int(call["site"])):
        parts.append(f"at {site}")
    return ", ".join(parts)
