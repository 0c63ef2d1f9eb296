"""Mismatched collectives: members that make different calls at one number; sizes, shifted calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ckptd.monitor.job import JOINED_GROUP, CallFlag, JobView
from ckptd.monitor.ring import RingShape, text_hash
from ckptd.monitor.rules.limits import HangLimits
from ckptd.monitor.rules.naming import rank_suspects
from ckptd.monitor.stats import Array, mix
from ckptd.monitor.verdict import Verdict, VerdictKind


def with_newcomers(job: JobView) -> JobView:
    """Return `job` with a row, nothing entered, for each such member that reports.

    A rank whose ring has no room for more groups may have come unseen, and gets no row.
    """
    if not len(job.groups):
        return job
    order = np.argsort(job.group_codes, kind="stable")
    seen = np.bincount(job.group_codes, minlength=len(job.group_ids))
    sizes = np.zeros(len(job.group_ids), np.int64)
    np.maximum.at(sizes, job.group_codes, job.groups["size"].astype(np.int64))
    ends = np.cumsum(seen)
    room = np.bincount(job.groups["row"], minlength=len(job.ranks)) < RingShape().groups
    found = [job.groups]
    by_rank = np.argsort(job.ranks["rank"], kind="stable")
    for code in np.flatnonzero(seen < sizes):
        group = int(job.group_ids[code])
        members = np.asarray(job.members.get(group, ()), np.int64)
        have = job.groups["row"][order[ends[code] - seen[code] : ends[code]]]
        found.append(_rows(group, int(sizes[code]), _reporting(job, by_rank, members, have, room)))
    return replace(job, groups=np.concatenate(found)) if len(found) > 1 else job


def _reporting(job: JobView, by_rank: Array, members: Array, have: Array, room: Array) -> Array:
    """Return the rows of `members` that report, have room for groups, and are not in `have`."""
    ranks = job.ranks["rank"]
    at = np.minimum(np.searchsorted(ranks, members, sorter=by_rank), len(ranks) - 1)
    rows = by_rank[at]
    rows = rows[(ranks[rows] == members) & room[rows]]
    return np.setdiff1d(rows, have)


def _rows(group: int, size: int, rows: Array) -> Array:
    out = np.zeros(len(rows), JOINED_GROUP)
    out["row"], out["group"], out["size"] = rows, group, size
    return out


P2P = np.array([text_hash("p2p"), text_hash("p2p_any")], np.uint32)
"""Operations between two ranks, as the recorder names them.

Their ends are two lines of a program, often in two branches of one `if`, and a stage of a pipeline
is a step ahead of the next. A receiver may have room for more than is sent.
"""
_SHIFTED = 3
"""Calls in a row that one member makes as the others make their next, or the one before."""
_FURTHEST = 8
"""So many calls at most may have been left out, or be one too many."""

_Calls = dict[int, tuple[int, int]]
"""Calls by number: each with its line, as one number, and its step."""

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


def mismatches(job: JobView, limits: HangLimits) -> Iterator[Verdict]:
    """Yield a verdict for each group whose members' calls differ, at the first such call.

    Different signatures are a mismatch; the same signature in different steps is a desync, if the
    program itself says in which step it is. Else a rank may rightly be in another one: the first
    optimizer's steps are counted then, and trainers have one where generators have none. What
    shows there that a call was left out is that the group stands still, and that one member makes
    its calls as the others make their next. A line apart is nothing by itself: `if rank == 0:
    barrier() else: barrier()` is a rightful program. Calls between two ranks are not compared.
    """
    calls = job.calls
    order, starts = job.cohorts
    order, starts = _collectives(calls, order, starts)
    if not len(order):
        return
    rows = calls[order]
    sizes = np.diff(np.append(starts, len(order)))
    signature = _signatures(rows, starts, sizes)
    said = (rows["step"] >= 0) & ((rows["flags"] & CallFlag.COUNTED) == 0)
    where = mix(rows["site"], rows["step"].astype(np.uint64))
    reported: set[int] = set()
    for kind, values, low, high in (
        (VerdictKind.MISMATCH, signature, signature, signature),
        # A rank that does not say in which step it is agrees with all others.
        (VerdictKind.DESYNC, rows["step"], *_among(rows["step"], said)),
        (VerdictKind.DESYNC, where, where, where),
    ):
        apart = np.minimum.reduceat(low, starts) < np.maximum.reduceat(high, starts)
        if values is where:
            # Right programs have such calls too, and many: none is looked at one by one.
            apart &= np.isin(rows["group"][starts], _standing(job, limits))
        for cohort in np.flatnonzero(apart):
            here = slice(starts[cohort], starts[cohort] + sizes[cohort])
            group = int(rows["group"][here.start])
            if group in reported or len(reported) >= MOST:
                continue
            some, kinds = rows[here], values[here]
            if values is where and not _is_shifted(job, some, kinds):
                continue
            mine = said[here] if values is not where and kind is VerdictKind.DESYNC else slice(None)
            verdict = _verdict(job, limits, kind, some[mine], kinds[mine])
            if verdict is not None:
                reported.add(group)
                yield verdict


def _collectives(calls: Array, order: Array, starts: Array) -> tuple[Array, Array]:
    """Return the cohorts of calls that all members of a group make alike."""
    if not len(order):
        return order, starts
    kept = ~np.isin(calls["op"][order], P2P)
    if kept.all():
        return order, starts
    cohort = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(order))))[kept]
    return order[kept], np.flatnonzero(np.append(True, cohort[1:] != cohort[:-1])[: len(cohort)])


def _among(values: Array, some: Array) -> tuple[Array, Array]:
    """Return `values` for a least and for a greatest one that only `some` have a part in."""
    ends = np.iinfo(values.dtype)
    return np.where(some, values, ends.max), np.where(some, values, ends.min)


def _standing(job: JobView, limits: HangLimits) -> Array:
    """Return the groups in which a rank has waited for longer than a pause of the machine."""
    ranks = job.ranks
    long = (ranks["pending_group"] != 0) & (ranks["pending_age"] > limits.still_s)
    return np.unique(ranks["pending_group"][long])


def _is_shifted(job: JobView, cohort: Array, where: Array) -> bool:
    """Whether one member has made its calls since as another has made its later, or earlier, ones.

    So it is after a call that was left out, or was one too many: of lines from which both have come
    together before. Members that take turns repeat one another too, and come together from no line
    of a turn.
    """
    rows = cohort["row"]
    kinds, codes, counts = np.unique(where, return_inverse=True, return_counts=True)
    if len(kinds) < 2:
        return False
    # Two of one kind are not compared: a program's rounds repeat themselves.
    fewest = int(np.argmin(counts))
    counts[fewest] = 0
    odd, usual = rows[codes == fewest], rows[codes == int(np.argmax(counts))]
    (before, mine), (others, theirs) = (
        _calls_of(job, int(row), cohort[0]) for row in (odd[0], usual[0])
    )
    together = {what[0] for seq, what in before.items() if others.get(seq) == what}
    for by in range(1, _FURTHEST + 1):
        for one, other in ((mine, theirs), (theirs, mine)):
            pairs = [(v, other.get(seq + by)) for seq, v in one.items() if seq + by in other]
            if len(pairs) >= _SHIFTED and all(a == b for a, b in pairs):
                lines = {line for (line, _), _ in pairs}
                return len({a for a, _ in pairs}) > 1 and lines <= together
    return False


def _calls_of(job: JobView, row: int, first: np.void) -> tuple[_Calls, _Calls]:
    """Return a rank's calls of a group, by their numbers: those before `first`, and the others."""
    calls = job.calls
    mine = calls[(calls["row"] == row) & (calls["group"] == first["group"])]
    line = mix(mine["op"], mine["bytes"], mine["site"]).tolist()
    what = zip(line, mine["step"].tolist(), strict=True)
    found = list(zip(mine["seq"].tolist(), what, strict=True))
    begin = int(first["seq"])
    return {n: w for n, w in found if n < begin}, {n: w for n, w in found if n >= begin}


def _signatures(rows: Array, starts: Array, sizes: Array) -> Array:
    variable = np.logical_or.reduceat((rows["flags"] & CallFlag.VARIABLE) != 0, starts)
    whole = mix(rows["op"], rows["dtype"], rows["bytes"], rows["root"])
    return np.where(np.repeat(variable, sizes), rows["op"].astype(np.uint64), whole)


def _verdict(
    job: JobView, limits: HangLimits, kind: VerdictKind, calls: Array, values: Array
) -> Verdict | None:
    size = _size(job, int(calls["group"][0]), len(calls))
    voting = size - _passed(job, calls)
    odd = minority(values, voting)
    age = float(-calls["start"].min())
    if odd is None and len(calls) < voting and age < limits.majority_wait:
        return None  # the right call is not known before most have come
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


def _passed(job: JobView, calls: Array) -> int:
    """Return members that made the call too long ago for it to be reported: no vote comes."""
    group, seq = calls["group"][0], int(calls["seq"][0])
    rows = job.groups[(job.groups["group"] == group) & (job.groups["entered"] >= seq)]
    return int((~np.isin(rows["row"], calls["row"])).sum())


def _size(job: JobView, group: int, seen: int) -> int:
    known = job.groups["size"][job.groups["group"] == group]
    return max(int(known.max()) if len(known) else 0, seen)


def _call(job: JobView, call: Array) -> str:
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
