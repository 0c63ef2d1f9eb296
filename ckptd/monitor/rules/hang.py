"""Hangs: ranks that stand still and why, circles of waits, calls that do not end, silent agents.

In it: after which time a heartbeat is stale; how many suspects are named; words for a process that
is stopped, spins, holds the GIL or waits on a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ckptd.monitor.job import CallFlag, JobView
from ckptd.monitor.rules.differing import outvoted, strayed
from ckptd.monitor.rules.limits import ENGINE_S, CallLoops, HangLimits, Learned
from ckptd.monitor.rules.mismatch import P2P
from ckptd.monitor.rules.naming import rank_suspects
from ckptd.monitor.stats import Array
from ckptd.monitor.verdict import Suspect, SuspectKind, Verdict, VerdictKind

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Waits:
    """Ranks that stand still, and why; one element a row of ``JobView.ranks``.

    Attributes
    ----------
    inside
        The rank is inside a call.
    complete
        The rank is inside a call that all members have entered.
    awaited
        Another rank waits for the rank.
    root
        Awaited, and not waiting itself.
    unheard
        What the rank waits for leads to members that do not report, and to no root.
    circle
        The rank waits in a circle, or between two.
    code
        Place of the rank's group in ``JobView.group_ids``; -1 if it is in no call.
    missing
        Members that do not report, one element a group.
    """

    inside: Array
    complete: Array
    awaited: Array
    root: Array
    unheard: Array
    circle: Array
    code: Array
    missing: Array


def waits(job: JobView, gone: Array) -> Waits:
    """Return which rank waits for which in `job`.

    Parameters
    ----------
    job
        The moment.
    gone
        Ranks that are explained already (crashed, or in a mismatch): roots, whatever they show.
    """
    ranks, rows, groups = job.ranks, job.groups, len(job.group_ids)
    code = job.code_of(ranks["pending_group"])
    inside = (code >= 0) & ranks["alive"] & ~gone
    code = np.where(inside, code, -1)
    seq = ranks["pending_seq"]
    entered = rows["entered"]
    least = _least(job, np.ones(len(ranks), bool))
    missing = absent(job)
    behind = inside & (least[code] < seq)
    unsure = inside & ~behind & (missing[code] > 0)
    complete = inside & ~behind & ~unsure
    wanted = np.zeros(groups, np.int64)
    np.maximum.at(wanted, code[inside], seq[inside])
    awaited = np.zeros(len(ranks), bool)
    awaited[rows["row"][entered < wanted[job.group_codes]]] = True
    explained = _reach(job, ~inside | complete, behind, code)
    unheard = behind & ~explained & (missing[code] > 0) | unsure
    lost = _reach(job, unheard, behind & ~explained, code)
    circle = _core(job, behind & ~explained & ~lost, code)
    return Waits(inside, complete, awaited, awaited & ~inside, lost, circle, code, missing)


def held_up(job: JobView, wait: Waits, seconds: float) -> Array:
    """Return the ranks for which a rank that runs has waited for longer than `seconds`."""
    runs = ~np.isin(job.ranks["state"], np.array([b"T", b"t", b"Z"]))
    return _awaited_in(job, wait, wait.inside & runs & (job.ranks["pending_age"] > seconds))


def _awaited_in(job: JobView, wait: Waits, some: Array) -> Array:
    """Return the ranks for which one of `some` waits in its call."""
    wanted = np.zeros(max(len(job.group_ids), 1), np.int64)
    np.maximum.at(wanted, wait.code[some], job.ranks["pending_seq"][some])
    out = np.zeros(len(job.ranks), bool)
    out[job.groups["row"][job.groups["entered"] < wanted[job.group_codes]]] = True
    return out


def _least(job: JobView, some: Array) -> Array:
    """Return the least sequence number that `some` ranks have entered, of each group."""
    out = np.full(max(len(job.group_ids), 1), _NEVER)
    kept = some[job.groups["row"]]
    np.minimum.at(out, job.group_codes[kept], job.groups["entered"][kept])
    return out


def absent(job: JobView) -> Array:
    """Return how many members of each group do not report."""
    groups = len(job.group_ids)
    sizes = np.zeros(max(groups, 1), np.int64)
    np.maximum.at(sizes, job.group_codes, job.groups["size"].astype(np.int64))
    seen = np.bincount(job.group_codes, minlength=max(groups, 1))
    out: Array = np.maximum(sizes - seen, 0)
    return out


def _reach(job: JobView, start: Array, waiting: Array, code: Array) -> Array:
    """Return `start` and all of `waiting` that wait, directly or not, for one of it."""
    reached: Array = start.copy()
    seq = job.ranks["pending_seq"]
    while True:
        more = waiting & ~reached & (_least(job, reached)[code] < seq)
        if not more.any():
            return reached
        reached |= more


def _core(job: JobView, waiting: Array, code: Array) -> Array:
    """Return those of `waiting` for which one of them waits, and which wait for one of them."""
    rows, seq = job.groups, job.ranks["pending_seq"]
    core: Array = waiting.copy()
    while core.any():
        wanted = np.zeros(max(len(job.group_ids), 1), np.int64)
        np.maximum.at(wanted, code[core], seq[core])
        awaited = np.zeros(len(core), bool)
        awaited[rows["row"][rows["entered"] < wanted[job.group_codes]]] = True
        kept = core & awaited & (_least(job, core)[code] < seq)
        if (kept == core).all():
            break
        core = kept
    return core


STALE_S = 2.0
"""A Python heartbeat older than this has stopped; it beats several times a second."""

MOST_NAMED = 64
"""Most suspects of one verdict that are named."""


def hangs(
    job: JobView,
    limits: HangLimits,
    learned: Learned,
    gone: Array,
    stopped: Array | None = None,
    loops: CallLoops | None = None,
) -> Iterator[Verdict]:
    """Yield what is to be said of ranks that stand still.

    Parameters
    ----------
    job
        The moment.
    limits, learned
        How long is too long.
    gone
        Ranks that another verdict explains; ranks that wait for them are explained too.
    stopped
        Ranks that the kernel has shown as stopped for long: that is no pause of the program.
    loops
        Where the job goes round.
    """
    if not len(job.ranks):
        return
    stopped = np.zeros(len(job.ranks), bool) if stopped is None else stopped
    if not len(job.groups):
        yield from _held_up_unseen(job, limits, gone, stopped)
        return
    wait = waits(job, gone)
    going = wait.inside & (loops or CallLoops()).held(job, limits)
    awaited = _awaited_in(job, wait, going)
    outside = learned.limit(job, limits, in_call=False, started=awaited)
    within = learned.limit(job, limits, in_call=True, started=going)
    if stopped.any():
        missed = stopped & held_up(job, wait, limits.stopped_s)
        outside = np.where(missed, np.minimum(outside, limits.stopped_s), outside)
        # One may be stopped in a call that has let the others go: they wait in the next.
        halted = _beside(job, wait, stopped) | (missed & wait.complete)
        within = np.where(halted, np.minimum(within, limits.stopped_s), within)
    found = [
        *_roots(job, wait, gone, outside, stopped),
        *_circles(job, wait, within),
        *_complete(job, wait, within, learned.knows(job)),
    ]
    yield from found
    if not found and not gone.any():
        # Beside a known culprit, ranks that wait for silent ones may wait for it through them.
        unheard = tuple(_silent(job, wait, within)) or tuple(
            _held_up_unseen(job, limits, gone, stopped)
        )
        yield from unheard or _all_unseen(job, np.maximum(outside, within))


# --- outside communication ----------------------------------------------------------------------


def _roots(
    job: JobView, wait: Waits, gone: Array, limit: Array, stopped: Array
) -> Iterator[Verdict]:
    idle = job.ranks["idle"]
    late = wait.root & ~gone & (idle > limit)
    late &= _held(job, wait, late, limit)
    # A rank that sleeps in no call may wait for a stopped one where nothing is recorded: for a key
    # of the job store, which is a thread of that process.
    halted = stopped & job.ranks["alive"] & ~gone
    asleep = late & (job.ranks["state"] == _ASLEEP) & halted.any()
    rows = np.flatnonzero(late & ~asleep | halted & asleep.any())
    if not len(rows):
        return
    rows = rows[np.argsort(-idle[rows], kind="stable")]
    details = [_subtype(job, int(row)) for row in rows[:MOST_NAMED]]
    waiting = int((wait.inside & ~wait.complete).sum())
    unseen = int(_ends_unseen(job)[rows].sum())
    evidence = [
        f"{waiting} ranks wait for {len(rows)} rank{'s' * (len(rows) != 1)} in no call",
        f"the first has not moved for {idle[rows[0]]:.1f} s: {details[0]}",
    ]
    if unseen:
        evidence.append(f"{unseen} of them may still be in their last call: {_UNSEEN}")
    if asleep.any():
        names = job.ranks["rank"][asleep][:MOST_NAMED].tolist()
        evidence.append(f"asleep in no call, as if they waited for one that is stopped: {names}")
    sure = 0.5 if unseen else 0.7 if asleep.any() else 0.95
    yield Verdict(
        kind=VerdictKind.HANG,
        suspects=rank_suspects(job, rows[:MOST_NAMED], sure, details),
        evidence=tuple(evidence),
        rules_out=()
        if unseen
        else (
            "a broken link: these ranks have not entered the call",
            "a deadlock: these ranks do not wait for others",
        ),
        refuted_by="a counter of a named rank moves, or the rank is inside a call after all",
        action="take stacks, flush the snapshot, restart; isolate a stopped or unkillable process",
        numbers={
            "hung": len(rows),
            "cannot run": sum(not d.startswith(_RUNS) for d in details),
            "waiting": waiting,
            "runs": _running(job, rows),
            "idle s": float(idle[rows[0]]),
            "limit s": float(limit[rows[0]]),
            "engine s": _engine_s(job, wait.code[wait.inside & ~wait.complete]),
        },
        place=place_of(job, int(rows[0])),
    )


_RUNS = ("Python runs", "the GIL is held", "nothing is known")
"""Of these it is the program that stands still, as far as anybody knows, and not the process."""
_BUSY, _ASLEEP = b"R", b"S"
"""States of a process that does something, and of one that waits, for whatever it is."""


def _held(job: JobView, wait: Waits, late: Array, limit: Array) -> Array:
    """Return the ranks for which another rank waits that does nothing else.

    A call that does not hold its caller up may be open while the rank makes others, and a receive
    that was begun early while it computes.
    """
    least = float(limit[late].min()) / 2 if late.any() else 0.0
    moves = (_not_waiting(job) | _in_message(job)) & (job.ranks["idle"] <= least)
    return _awaited_in(job, wait, wait.inside & ~moves & ~_elsewhere(job))


def _elsewhere(job: JobView) -> Array:
    """Return ranks whose open call need not hold them up, and that do something meanwhile."""
    out: Array = _in_message(job) & (job.ranks["state"] == _BUSY)
    return out


def _in_message(job: JobView) -> Array:
    """Return ranks whose oldest open call is a message: nothing shows whether they wait for it."""
    calls = job.calls
    out = np.zeros(len(job.ranks), bool)
    out[calls["row"][_pending(job) & np.isin(calls["op"], P2P)]] = True
    return out


def _running(job: JobView, rows: Array) -> int:
    """Return how many of `rows` do something: those are slow, perhaps, and not dead."""
    return int((job.ranks["state"][rows] == _BUSY).sum())


def _engine_s(job: JobView, codes: Array) -> float:
    """Return after how long the backend gives up what is waited for in groups, in seconds."""
    stated = [job.timeouts.get(int(job.group_ids[code]), 0.0) for code in np.unique(codes)]
    return min((seconds for seconds in stated if seconds > 0), default=ENGINE_S)


def place_of(job: JobView, row: int) -> str:
    """Return where in the program a rank made its last call; empty if it has made none.

    A thread that only runs PyTorch, as those of a backward pass, has no line: it is a call then.
    """
    last = int(job.last_call[row])
    if last < 0:
        return ""
    call = job.calls[last]
    if call["site"]:
        return job.text(int(call["site"]))
    return f"{job.text(int(call['op']))} in {job.group_name(int(call['group']))}"


def _subtype(job: JobView, row: int) -> str:
    """Say what kind of standing still a rank shows: kernel state, heartbeat and ping together."""
    rank = job.ranks[row]
    state = rank["state"].decode()
    if state in ("T", "t"):
        return "stopped by a signal or a debugger"
    if state == "D":
        return "in the kernel, not interruptible: storage, network file system or driver"
    if state == "Z":
        return "a zombie: ended and not collected"
    if not state and np.isnan(rank["heartbeat"]):
        return "the state of its process is unknown"
    if state == "R":
        return "Python runs: it computes, reads or writes"
    if not rank["heartbeat"] > STALE_S:
        return "Python runs: it computes, sleeps or spins"
    if rank["answers"] == 1:
        return "the GIL is held, or the interpreter is frozen"
    return "frozen: neither Python nor its server answers" if rank["answers"] == 0 else "frozen"


def _frozen(job: JobView) -> Array:
    """Return ranks whose process cannot take part in a call that it has entered."""
    return np.isin(job.ranks["state"], np.array([b"T", b"t", b"Z"]))


def _beside(job: JobView, wait: Waits, stopped: Array) -> Array:
    """Return ranks in a call that all have entered, one of `stopped` and one that runs as well."""
    runs = wait.complete & ~_frozen(job)
    codes = np.intersect1d(wait.code[wait.complete & stopped], wait.code[runs])
    return wait.complete & np.isin(wait.code, codes)


# --- circles ------------------------------------------------------------------------------------


def _circles(job: JobView, wait: Waits, limit: Array) -> Iterator[Verdict]:
    rows = np.flatnonzero(wait.circle)
    age = job.ranks["pending_age"]
    if not len(rows):
        return
    codes = np.unique(wait.code[rows])
    if _elsewhere(job)[rows].any():
        # Two that wait for each other's messages and compute meanwhile are no circle yet.
        limit = np.maximum(limit, _engine_s(job, codes))
    if not (age[rows] > limit[rows]).all():
        return
    free = _not_waiting(job)
    unsure = int(free[rows].sum())
    odd, why = _one_apart(job, rows)
    if free[odd].any():
        odd, why = rows[:0], ""  # it may as well hang elsewhere
    named = odd if len(odd) else rows
    sure = 0.6 if unsure else 0.9
    details = [_where(job, int(r), free) for r in named[:MOST_NAMED]]
    groups = _groups(job, codes, 0.5 if unsure or len(odd) else 0.9)
    ranks = rank_suspects(job, named[:MOST_NAMED], sure / len(odd) if len(odd) else 0.5, details)
    yield Verdict(
        kind=VerdictKind.DEADLOCK,
        suspects=(*ranks, *groups) if len(odd) else (*groups, *ranks[:MOST_NAMED]),
        evidence=(
            *([why] if why else []),
            f"{len(rows)} ranks wait for each other in {len(codes)} groups",
            f"for {age[rows].min():.1f} s at least",
            *([f"{unsure} of them may hang elsewhere: {_ELSEWHERE}"] if unsure else []),
        ),
        rules_out=(
            "a hung rank: everyone awaited waits itself",
            "a broken link: no call of the circle has all its members",
        ),
        refuted_by="a counter of any rank in the circle moves",
        action="take stacks; the program orders its calls differently on different ranks",
        numbers={
            "ranks": len(rows),
            "groups": len(codes),
            "runs": _running(job, rows),
            "age s": float(age[rows].min()),
            "limit s": float(limit[rows].max()),
            "engine s": _engine_s(job, codes),
        },
        place=place_of(job, int(named[0])),
        groups=tuple(int(g) for g in job.group_ids[codes][:MOST_NAMED]),
    )


def _one_apart(job: JobView, circle: Array) -> tuple[Array, str]:
    """Return those of a circle that explain it, and why; none where nothing tells."""
    odd = strayed(job, circle)
    if len(odd):
        row = int(odd[0])
        before = job.calls[job.last_call[row] - 1]
        came = job.text(int(before["site"])) if before["site"] else job.text(int(before["op"]))
        return odd, (
            f"rank {job.ranks['rank'][row]} went from the call at {came} to the one at "
            f"{place_of(job, row)}, which is new: it left calls out, or made others"
        )
    odd = outvoted(job, circle)
    return odd, "a strict majority of each group is at another call than the named" if len(
        odd
    ) else ""


_ELSEWHERE = "the call does not hold its caller up"


def _where(job: JobView, row: int, free: Array) -> str:
    rank = job.ranks[row]
    group = job.group_name(int(rank["pending_group"]))
    text = f"in call {rank['pending_seq']} of {group}"
    call = job.calls[job.last_call[row]] if job.last_call[row] >= 0 else None
    if call is not None and call["site"] and call["group"] == rank["pending_group"]:
        text += f" at {job.text(int(call['site']))}"
    return f"{text}; {_ELSEWHERE}" if free[row] else text


def _not_waiting(job: JobView) -> Array:
    """Return ranks whose oldest open call is asynchronous: they may wait for it, or do other work.

    A receive that was begun early, in a rank that then hangs, closes a circle as well.
    """
    calls, ranks = job.calls, job.ranks
    out = np.zeros(len(ranks), bool)
    out[calls["row"][_pending(job) & ((calls["flags"] & CallFlag.ASYNC) != 0)]] = True
    return out


def _pending(job: JobView) -> Array:
    """Return which calls are the oldest open one of their rank."""
    calls, ranks = job.calls, job.ranks
    out: Array = (calls["group"] == ranks["pending_group"][calls["row"]]) & (
        calls["seq"] == ranks["pending_seq"][calls["row"]]
    )
    return out


def _groups(job: JobView, codes: Array, confidence: float) -> tuple[Suspect, ...]:
    named = codes[:MOST_NAMED]
    share = confidence / max(len(named), 1)
    return tuple(
        Suspect(SuspectKind.GROUP, f"{int(g):016x}", round(share, 3), job.group_name(int(g)))
        for g in job.group_ids[named]
    )


# --- communication ------------------------------------------------------------------------------


def _complete(job: JobView, wait: Waits, limit: Array, known: Array) -> Iterator[Verdict]:
    """Yield calls that all members entered and that do not end.

    The clock starts when the last member came: ageing from a rank's own call made every pause of
    one member a fault of the network.

    Parameters
    ----------
    known
        Ranks for which a call like theirs has ended before.
    """
    for code, last in _overdue(job, wait, limit).items():
        rows = np.flatnonzero(wait.complete & (wait.code == code))
        frozen = rows[_frozen(job)[rows]]
        queued = rows[_queued(job)[rows]]
        engine = _engine_s(job, np.array([code]))
        longest = float(limit[rows].max())
        if len(frozen):
            yield _frozen_inside(job, frozen, last)
        elif not len(queued):
            yield _stuck(job, rows, int(job.group_ids[code]), last, longest, engine)
        elif len(queued) == len(rows) or not known[queued].all():
            # No rank is held up, or nothing shows how much work such a call usually comes behind: a
            # first one behind the replays of graphs comes minutes after it was enqueued.
            if last > max(longest, engine):
                yield _before(job, queued, len(rows), last, longest, engine)
        else:
            moves = (_since_an_end(job)[queued] <= longest) & (last <= max(longest, engine))
            if not moves.all():
                yield _before(job, queued[~moves], len(rows), last, longest, engine)


def _overdue(job: JobView, wait: Waits, limit: Array) -> Mapping[int, float]:
    """Return groups in a complete call, with seconds since its last arrival, if too many."""
    rows = np.flatnonzero(wait.complete)
    groups = len(job.group_ids)
    last = np.full(groups, np.inf)
    np.minimum.at(last, wait.code[rows], job.ranks["pending_age"][rows])
    longest = np.zeros(groups)
    np.maximum.at(longest, wait.code[rows], limit[rows])
    out = {}
    for code in np.flatnonzero(np.isfinite(last) & (last > longest))[:MOST_NAMED]:
        arrived = min(float(last[code]), _last_start(job, wait, int(code)))
        if arrived > longest[code]:
            out[int(code)] = arrived
    return out


def _last_start(job: JobView, wait: Waits, code: int) -> float:
    """Return the age of the latest arrival among members whom the call has let go already."""
    inside = wait.complete & (wait.code == code)
    seq = int(job.ranks["pending_seq"][inside].max())
    calls = job.calls
    here = (calls["group"] == job.group_ids[code]) & (calls["seq"] == seq)
    return float(-calls["start"][here].max()) if here.any() else np.inf


def _frozen_inside(job: JobView, rows: Array, last: float) -> Verdict:
    return Verdict(
        kind=VerdictKind.HANG,
        suspects=rank_suspects(job, rows, 0.9, [_subtype(job, int(r)) for r in rows]),
        evidence=(
            f"all members entered the call {last:.1f} s ago; {len(rows)} of them cannot run",
        ),
        rules_out=("a deadlock: all members are in the same call",),
        refuted_by="the named processes run",
        action="take stacks, flush the snapshot, restart; isolate a stopped process",
        numbers={"hung": len(rows), "cannot run": len(rows), "since last arrival s": last},
    )


def _since_an_end(job: JobView) -> Array:
    """Return for each rank how long no call of it has been seen to end; infinite for none."""
    calls = job.calls
    out = np.full(len(job.ranks), np.inf)
    ended = ~np.isnan(calls["end"]) & ((calls["flags"] & CallFlag.UNSEEN) == 0)
    np.minimum.at(out, calls["row"][ended], -calls["end"][ended])
    return out


def _queued(job: JobView) -> Array:
    """Return ranks whose device has not come to the oldest open call.

    The rank itself looks, by the thread of its heartbeat: what it wrote before that stopped says
    nothing of now.
    """
    calls, ranks = job.calls, job.ranks
    out = np.zeros(len(ranks), bool)
    out[calls["row"][_pending(job) & ((calls["flags"] & CallFlag.QUEUED) != 0)]] = True
    return out & (ranks["heartbeat"] <= STALE_S)


def _before(
    job: JobView, rows: Array, members: int, last: float, limit: float, engine: float
) -> Verdict:
    """Return what is to be said of a call that some devices have not come to.

    Where none has, no rank waits for another: their work is long, or stands still on all of them.
    """
    detail = "its device has not reached the call: work enqueued before it still runs"
    named = rows[:MOST_NAMED]
    inside = members - len(rows)
    kind, confidence = VerdictKind.HANG, 0.9
    if not inside:
        kind, confidence = VerdictKind.CANNOT_SAY, round(0.5 / len(named), 3)
    return Verdict(
        kind=kind,
        suspects=rank_suspects(job, named, confidence, [detail] * len(named)),
        evidence=(
            f"all members have enqueued the call, the last one {last:.1f} s ago",
            f"{len(rows)} devices have not reached it; {inside} are in it and wait",
        ),
        rules_out=(
            "a broken link: the call has not begun on the devices of these ranks",
            "a hung program: these ranks have enqueued the call",
        ),
        refuted_by="the device of a named rank reaches the call",
        action="take stacks; look at the kernels of these devices and their errors (dmesg, the "
        "vendor's tool); restart, and isolate a device that hangs again",
        numbers={
            "hung": len(rows),
            "inside": inside,
            "runs": _running(job, rows),
            "since last arrival s": last,
            "limit s": limit,
            "engine s": engine,
        },
        place=place_of(job, int(rows[0])),
    )


def _stuck(
    job: JobView, rows: Array, group: int, last: float, limit: float, engine: float
) -> Verdict:
    suspects: tuple[Suspect, ...] = (
        Suspect(SuspectKind.GROUP, f"{group:016x}", 0.9, job.group_name(group)),
    )
    if len(rows) <= MOST_NAMED:
        suspects += rank_suspects(job, rows, round(0.9 / len(rows), 3))
    return Verdict(
        kind=VerdictKind.COMM_HANG,
        suspects=suspects,
        evidence=(
            f"all members entered call {job.ranks['pending_seq'][rows[0]]}",
            f"the last came {last:.1f} s ago, and {len(rows)} are still in it",
        ),
        rules_out=(
            "a hung rank outside communication: all members came",
            "a deadlock: the call does not wait for other ranks",
        ),
        refuted_by="the call ends, or a member turns out not to have entered it",
        action="probe the links of the group; isolate the link or node found, or else the group",
        numbers={
            "still inside": len(rows),
            "runs": _running(job, rows),
            "since last arrival s": last,
            "limit s": limit,
            "engine s": engine,
        },
        place=place_of(job, int(rows[0])),
        groups=(group,),
    )


# --- where no call shows which ranks wait --------------------------------------------------------


def _held_up_unseen(
    job: JobView, limits: HangLimits, gone: Array, stopped: Array
) -> Iterator[Verdict]:
    """Yield ranks that are stopped while no other moves or does anything, and none is in a call.

    Ranks also wait where nothing is recorded: for a key of the job store, in a library's own
    sockets.
    """
    if not stopped.any():
        return
    ranks = job.ranks
    others = ranks["alive"] & ~_frozen(job)
    still = (ranks["idle"] > limits.still_s) & (ranks["state"] != _BUSY)
    if not others.any() or not still[others].all() or gone.any():
        return
    rows = np.flatnonzero(stopped & (ranks["idle"] > limits.still_s))
    if not len(rows):
        return
    yield Verdict(
        kind=VerdictKind.HANG,
        suspects=rank_suspects(
            job, rows[:MOST_NAMED], 0.7, [_subtype(job, int(r)) for r in rows[:MOST_NAMED]]
        ),
        evidence=(
            f"{len(rows)} ranks are stopped, and none of the other {int(others.sum())} moves",
            "no call shows that they wait",
        ),
        rules_out=("a long computation: no rank computes, reads or writes",),
        refuted_by="another rank moves while the named are stopped",
        action="let the named ranks continue, or restart",
        numbers={
            "hung": len(rows),
            "cannot run": len(rows),
            "idle s": float(ranks["idle"][others].min()),
            "limit s": limits.still_s,
        },
        place=place_of(job, int(rows[0])),
    )


_UNSEEN = "the recorder cannot see when calls end on its device"


def _ends_unseen(job: JobView) -> Array:
    """Return ranks that may still be in their last call, though it counts as ended."""
    out = np.zeros(len(job.ranks), bool)
    known = job.last_call >= 0
    flags = job.calls["flags"][job.last_call[known]]
    out[known] = (flags & CallFlag.UNSEEN) != 0
    return out


def _all_unseen(job: JobView, limit: Array) -> Iterator[Verdict]:
    """Yield that no rank moves, where their last calls may go on unseen.

    A program that computes for long looks the same: this names no rank, and waits for the time
    after which the backend itself gives up.
    """
    ranks = job.ranks
    unseen = _ends_unseen(job) & ranks["alive"]
    if not unseen.any():
        return
    last = job.last_call[unseen]
    engine = _engine_s(job, np.unique(job.code_of(job.calls["group"][last])))
    still = ranks["idle"] > np.maximum(limit, engine)
    if not still[ranks["alive"]].all():
        return
    idle = float(ranks["idle"][ranks["alive"]].min())
    rows = np.flatnonzero(unseen)[:MOST_NAMED]
    yield Verdict(
        kind=VerdictKind.CANNOT_SAY,
        suspects=rank_suspects(job, rows, round(0.5 / len(rows), 3), [_UNSEEN] * len(rows)),
        evidence=(
            f"no rank has moved for {idle:.1f} s",
            f"{int(unseen.sum())} ranks may still be in their last call: {_UNSEEN}",
        ),
        rules_out=(),
        refuted_by="a rank moves",
        action="take stacks: they show which ranks wait for a device; the backend's log names the "
        "call",
        numbers={
            "unseen": int(unseen.sum()),
            "age s": idle,
            "engine s": engine,
        },
        place=place_of(job, int(rows[0])),
    )


_AGENT = {
    None: "its agent is silent",
    True: "its agent is silent, and its machine answers another node: frozen, or without its agent",
    False: "its agent is silent, and no other node reaches it",
}

# --- ranks that cannot be asked -----------------------------------------------------------------


def _silent(job: JobView, wait: Waits, limit: Array) -> Iterator[Verdict]:
    age = job.ranks["pending_age"]
    rows = np.flatnonzero(wait.unheard & (age > limit))
    if not len(rows):
        return
    codes = np.unique(wait.code[rows])
    codes = codes[wait.missing[codes] > 0]
    reporting = set(job.ranks["rank"].tolist())
    silent = sorted(
        {
            rank
            for group in job.group_ids[codes[:MOST_NAMED]]
            for rank in job.members.get(int(group), ())
            if rank not in reporting
        }
    )
    nodes = job.agents[:MOST_NAMED]
    share = round(0.5 / (len(silent) + len(nodes)), 3)
    yield Verdict(
        kind=VerdictKind.CANNOT_SAY,
        suspects=(
            *(Suspect(SuspectKind.NODE, n.node, share, "its agent is silent") for n in nodes),
            *(
                Suspect(SuspectKind.RANK, str(r), share, "does not report")
                for r in silent[:MOST_NAMED]
            ),
        ),
        evidence=(
            f"{len(rows)} ranks wait, in the end for members that do not report",
            *(f"node {n.node}: {_AGENT[n.reachable]}" for n in nodes),
        ),
        rules_out=("a deadlock among those that report",),
        refuted_by="the silent ranks report",
        action="look at the agents of the silent ranks first",
        numbers={
            "waiting": len(rows),
            "silent": len(silent),
            "age s": float(age[rows].max()),
        },
        groups=tuple(int(g) for g in job.group_ids[codes[:MOST_NAMED]]),
    )
