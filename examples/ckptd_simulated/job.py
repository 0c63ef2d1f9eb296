"""Jobs that do not exist: what all ranks would show, with faults planted.

A rank runs one step of a pipeline of tensor-parallel stages in data parallel: for each
micro-batch forward, then backward, it receives, reduces in its stage and sends; then the replicas
reduce, the stage once more, and the ranks of a replica agree. The step is played until nothing
moves, so that who is stuck where follows from the program and not from what the diagnosis expects.
All ranks are played at once, in numpy; drawn only from the generator that is given.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ckptd.monitor.job import (
    CALL,
    GROUP,
    JOINED_CALL,
    JOINED_GROUP,
    NO_EXIT,
    RANK,
    JobView,
    Phase,
    RankView,
)
from ckptd.monitor.rules.slow import RankRoles
from ckptd.monitor.stats import Array, mix

__all__ = ["Fault", "Mesh", "Planted", "delays", "own_times", "play", "views"]

# Places of a rank's groups in tables of shape (ranks, SLOTS).
_TP, _DP, _MP, _FROM, _TO, _GRAD_FROM, _GRAD_TO = range(7)
SLOTS = 7
SHOWN = 8
"""Recent calls that a simulated rank shows."""
TICK_S = 0.001
"""Seconds from one round of the played step to the next."""


@dataclass(frozen=True)
class Mesh:
    """Shape of a job.

    Attributes
    ----------
    dp, pp, tp
        Replicas, stages, ranks of a stage. Rank ``(d * pp + p) * tp + t``.
    per_node
        Ranks on a node, in order.
    micro
        Micro-batches of a step.
    """

    dp: int
    pp: int = 1
    tp: int = 1
    per_node: int = 8
    micro: int = 2

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return self.dp * self.pp * self.tp

    @property
    def nodes(self) -> int:
        """Nodes of the job."""
        return -(-self.ranks // self.per_node)

    @cached_property
    def place(self) -> tuple[Array, Array, Array]:
        """Replica, stage and place in the stage of each rank."""
        rank = np.arange(self.ranks)
        return rank // (self.pp * self.tp), rank // self.tp % self.pp, rank % self.tp

    @cached_property
    def roles(self) -> RankRoles:
        """Whom each rank is compared with."""
        d, p, _ = self.place
        return RankRoles(stage=p, replica=d)

    @cached_property
    def slots(self) -> Array:
        """Dense number of each rank's group in each slot, shape (ranks, SLOTS); -1 for none."""
        d, p, t = self.place
        replica = d * self.pp + p
        channel = replica * self.tp + t  # of a rank to the next stage
        first, last = p == 0, p == self.pp - 1
        size = self.ranks
        tables = [
            np.where(self.tp > 1, replica, -1),
            np.where(self.dp > 1, size + p * self.tp + t, -1),
            np.where(self.pp * self.tp > 1, 2 * size + d, -1),
            np.where(first, -1, 3 * size + channel - self.tp),
            np.where(last, -1, 3 * size + channel),
            np.where(last, -1, 4 * size + channel),
            np.where(first, -1, 4 * size + channel - self.tp),
        ]
        return np.stack(tables, axis=1)

    @cached_property
    def sizes(self) -> Array:
        """Members of the group in each slot."""
        return np.array([self.tp, self.dp, self.pp * self.tp, 2, 2, 2, 2])

    @cached_property
    def program(self) -> Array:
        """Slot of each call of a step, shape (stages, calls); -1 behind the last one."""
        lists = []
        for p in range(self.pp):
            forward = [*[_FROM][: p > 0], _TP, *[_TO][: p < self.pp - 1]]
            backward = [*[_GRAD_FROM][: p < self.pp - 1], _TP, *[_GRAD_TO][: p > 0]]
            calls = forward * self.micro + backward * self.micro + [_DP, _TP, _MP]
            usable = {_TP: self.tp > 1, _DP: self.dp > 1, _MP: self.pp * self.tp > 1}
            lists.append([c for c in calls if usable.get(c, True)])
        width = max(len(calls) for calls in lists)
        return np.array([calls + [-1] * (width - len(calls)) for calls in lists])


class Planted(enum.StrEnum):
    """Kinds of faults that can be planted in a played step."""

    HANG = "hang"
    STOP = "stop"
    CRASH = "crash"
    SKIP = "skip"
    SIZE = "size"
    SWAP = "swap"
    LINK = "link"


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes
    ----------
    kind
        HANG, STOP and CRASH never enter the call; SKIP leaves it out; SIZE states other bytes;
        SWAP makes the stage's last two calls (in the stage, and in the replica) in the other
        order; LINK lets the rank's group enter the call and never end it.
    rank
        Global rank.
    call
        Place in the rank's program of the step.
    """

    kind: Planted
    rank: int
    call: int = 0


@dataclass
class _Played:
    """A step as it was left: places in the program, times in seconds since its start."""

    slot: Array
    seq: Array
    at: Array
    inside: Array
    entered: Array
    began: Array
    ended: Array
    now: float


def play(
    mesh: Mesh,
    faults: Sequence[Fault],
    rng: np.random.Generator,
    *,
    age: float = 60.0,
    rounds: int | None = None,
    step: int = 100,
    silent: Sequence[int] = (),
) -> JobView:
    """Return what the ranks of `mesh` show, `age` seconds after the step stood still.

    Parameters
    ----------
    mesh
        The job.
    faults
        What is wrong with it.
    rng
        Source of jitter.
    age
        Seconds since the last thing moved.
    rounds
        Stop after so many rounds, in the middle of the step; until nothing moves if left out.
    step
        Number of the step; steps before it are done.
    silent
        Nodes that do not report.
    """
    played = _run(mesh, faults, rng, step, rounds)
    played.now += age
    heard = ~np.isin(np.arange(mesh.ranks) // mesh.per_node, np.asarray(silent, np.int64))
    return _job(mesh, faults, played, step, heard)


def _run(
    mesh: Mesh, faults: Sequence[Fault], rng: np.random.Generator, step: int, rounds: int | None
) -> _Played:
    slot = mesh.program[mesh.place[1]].copy()
    hung = np.full(mesh.ranks, slot.shape[1] + 1)
    stuck: dict[int, int] = {}
    skipped = []
    for f in faults:
        if f.kind in (Planted.HANG, Planted.STOP, Planted.CRASH):
            hung[f.rank] = min(hung[f.rank], f.call)
        elif f.kind is Planted.SKIP:
            skipped.append(f)
        elif f.kind is Planted.SWAP:
            last = int((slot[f.rank] >= 0).sum())
            slot[f.rank, last - 2 : last] = slot[f.rank, last - 2 : last][::-1].copy()
    for f in skipped:
        slot[f.rank, f.call :] = np.append(slot[f.rank, f.call + 1 :], -1)
    seq = _sequence(mesh, slot, step)
    rows = np.arange(mesh.ranks)
    groups = mesh.slots[rows[:, None], np.maximum(slot, 0)]
    for f in faults:
        if f.kind is Planted.LINK:
            stuck[int(groups[f.rank, f.call])] = int(seq[f.rank, f.call])
    return _advance(mesh, slot, seq, groups, hung, stuck, rng, step, rounds)


def _sequence(mesh: Mesh, slot: Array, step: int) -> Array:
    """Return the sequence number of each call in its group."""
    seq = np.zeros(slot.shape, np.int64)
    per_step = np.stack([(mesh.program == s).sum(1) for s in range(SLOTS)], axis=1)
    for s in range(SLOTS):
        mine = slot == s
        done = (per_step[mesh.place[1], s] * step)[:, None]
        seq += np.where(mine, np.cumsum(mine, axis=1) + done, 0)
    return seq


def _advance(
    mesh: Mesh,
    slot: Array,
    seq: Array,
    groups: Array,
    hung: Array,
    stuck: dict[int, int],
    rng: np.random.Generator,
    step: int,
    rounds: int | None,
) -> _Played:
    rows, width = np.arange(mesh.ranks), slot.shape[1]
    length = (slot >= 0).sum(1)
    at, inside = np.zeros(mesh.ranks, np.int64), np.zeros(mesh.ranks, bool)
    per_step = np.stack([(mesh.program == s).sum(1) for s in range(SLOTS)], axis=1)
    entered = per_step[mesh.place[1]] * step
    began, ended = np.full(slot.shape, np.nan), np.full(slot.shape, np.nan)
    ids = mesh.slots
    known = ids >= 0
    last = np.full(5 * mesh.ranks, np.iinfo(np.int64).max)
    for g, s in stuck.items():
        last[g] = s - 1
    now = 0.0
    for _ in range(10**6 if rounds is None else rounds):
        least = last.copy()
        np.minimum.at(least, ids[known], entered[known])
        place = np.minimum(at, width - 1)
        done = inside & (least[groups[rows, place]] >= seq[rows, place])
        ended[rows[done], place[done]] = now
        at[done] += 1
        inside &= ~done
        place = np.minimum(at, width - 1)
        # Some ranks take a round longer, so that members arrive in any order.
        ready = ~inside & (at < length) & (at < hung)
        new = ready & (rng.random(mesh.ranks) < 0.7)
        entered[rows[new], slot[rows[new], place[new]]] = seq[rows[new], place[new]]
        began[rows[new], place[new]] = now + TICK_S * rng.random(int(new.sum()))
        inside |= new
        if not (ready.any() or done.any()):
            break
        now += TICK_S * 2
    return _Played(slot, seq, at, inside, entered, began, ended, now)


def _job(mesh: Mesh, faults: Sequence[Fault], played: _Played, step: int, heard: Array) -> JobView:
    ids = group_ids(mesh)
    ranks = _ranks(mesh, faults, played, step, ids)
    known = mesh.slots >= 0
    row, slot = np.nonzero(known & heard[:, None])
    groups = np.zeros(len(row), JOINED_GROUP)
    # Rows are numbered among those that report.
    number = np.cumsum(heard) - 1
    groups["row"], groups["group"] = number[row], ids[row, slot]
    groups["size"] = mesh.sizes[slot]
    groups["entered"] = played.entered[row, slot]
    pending = played.inside & (played.slot[np.arange(mesh.ranks), _place(played)] >= 0)
    open_ = pending[row] & (played.slot[row, _place(played)[row]] == slot)
    groups["completed"] = groups["entered"] - open_
    calls = _calls(mesh, faults, played, step, ids)
    calls = calls[heard[calls["row"]]]
    calls["row"] = number[calls["row"]]
    nodes = tuple(f"n{k}" for k in range(mesh.nodes))
    silent = np.argwhere(known & ~heard[:, None])
    wanted = np.unique(ids[silent[:, 0], silent[:, 1]]) if len(silent) else ()
    members = {int(g): tuple(np.nonzero(ids == g)[0].tolist()) for g in wanted[:256]}
    return JobView(mesh.ranks, nodes, ranks[heard], groups, calls, members)


def _place(played: _Played) -> Array:
    out: Array = np.minimum(played.at, played.slot.shape[1] - 1)
    return out


def group_ids(mesh: Mesh) -> Array:
    """Return the ids of the groups in each slot of each rank, (ranks, SLOTS) of uint64; 0: none."""
    ids = mix(mesh.slots.ravel()).reshape(mesh.slots.shape)
    out: Array = np.where(mesh.slots >= 0, ids, np.uint64(0))
    return out


def _ranks(mesh: Mesh, faults: Sequence[Fault], played: _Played, step: int, ids: Array) -> Array:
    rows, place = np.arange(mesh.ranks), _place(played)
    out = np.zeros(mesh.ranks, RANK)
    out["rank"], out["node"] = rows, rows // mesh.per_node
    out["alive"], out["exit_code"], out["state"] = True, NO_EXIT, b"S"
    out["answers"], out["heartbeat"] = 1, 0.1
    moved = np.fmax(np.nan_to_num(played.began).max(1), np.nan_to_num(played.ended).max(1))
    out["idle"] = played.now - moved
    out["phase"], out["step"], out["steps_done"] = Phase.TRAIN, step, step
    slot = np.maximum(played.slot[rows, place], 0)
    out["pending_group"] = np.where(played.inside, ids[rows, slot], 0)
    out["pending_seq"] = np.where(played.inside, played.seq[rows, place], 0)
    since = np.where(played.inside, played.began[rows, place], np.nan)
    out["pending_age"] = played.now - since
    for f in faults:
        if f.kind is Planted.STOP:
            out["state"][f.rank], out["heartbeat"][f.rank] = b"T", played.now
            out["answers"][f.rank] = 0
        elif f.kind is Planted.CRASH:
            out["alive"][f.rank], out["exit_code"][f.rank] = False, -9
    return out


def _calls(mesh: Mesh, faults: Sequence[Fault], played: _Played, step: int, ids: Array) -> Array:
    rows = np.arange(mesh.ranks)
    place = played.at[:, None] - np.arange(SHOWN)[::-1]
    row = np.broadcast_to(rows[:, None], place.shape)
    safe = np.clip(place, 0, played.slot.shape[1] - 1)
    shown = (place >= 0) & (place < played.slot.shape[1]) & ~np.isnan(played.began[row, safe])
    row, place = row[shown], place[shown]
    slot = played.slot[row, place]
    out = np.zeros(len(row), JOINED_CALL)
    out["row"], out["group"], out["seq"] = row, ids[row, slot], played.seq[row, place]
    # Channels share an operation; forward and backward reductions of a stage have sizes apart.
    out["op"], out["dtype"], out["root"] = np.minimum(slot, _FROM) + 1, 7, -1
    out["bytes"] = 1 << (10 + np.minimum(slot, _FROM))
    out["site"], out["step"], out["phase"] = 100 + slot, step, Phase.TRAIN
    out["start"] = played.began[row, place] - played.now
    out["end"] = played.ended[row, place] - played.now
    for f in faults:
        if f.kind is Planted.SIZE:
            out["bytes"][(row == f.rank) & (place == f.call)] += 4
    skips = [f for f in faults if f.kind is Planted.SKIP]
    # Each call of a stage has a size of its own, so that one left out shows.
    nth = np.cumsum(mesh.program == _TP, axis=1)[mesh.place[1]]
    for f in skips:
        nth[f.rank, f.call :] = np.append(nth[f.rank, f.call + 1 :], nth[f.rank, -1])
    out["bytes"] += np.where(slot == _TP, 64 * nth[row, place], 0)
    return out


def views(job: JobView) -> list[RankView]:
    """Return the views of which `job` is made: for what reads views, in jobs of small size."""
    out = []
    members = {group: tuple(ranks) for group, ranks in job.members.items()}
    for row, rank in enumerate(job.ranks):
        groups = job.groups[job.groups["row"] == row]
        calls = job.calls[job.calls["row"] == row]
        out.append(
            RankView(
                rank=int(rank["rank"]),
                world=job.world,
                node=job.nodes[rank["node"]],
                pid=int(rank["pid"]),
                at=0.0,
                alive=bool(rank["alive"]),
                exit_code=None if rank["exit_code"] == NO_EXIT else int(rank["exit_code"]),
                process_state=rank["state"].decode(),
                answers=None if rank["answers"] < 0 else bool(rank["answers"]),
                heartbeat=-float(rank["heartbeat"]),
                moved=-float(rank["idle"]),
                phase=Phase(int(rank["phase"])),
                step=int(rank["step"]),
                steps_done=int(rank["steps_done"]),
                pending_group=int(rank["pending_group"]),
                pending_seq=int(rank["pending_seq"]),
                pending_since=-float(rank["pending_age"]),
                groups=_as(groups, GROUP),
                calls=_as(calls, CALL),
                members=members,
            )
        )
    return out


def _as(table: Array, dtype: np.dtype[np.void]) -> Array:
    out = np.zeros(len(table), dtype)
    for name in dtype.names or ():
        out[name] = table[name]
    return out


# --- own time -----------------------------------------------------------------------------------


def own_times(
    mesh: Mesh,
    rng: np.random.Generator,
    steps: int,
    slow: Sequence[tuple[int, float]] = (),
    *,
    noise: float = 0.03,
    uneven: float = 0.06,
    pauses: float = 0.002,
    stages: float = 1 / 3,
    silent: Sequence[int] = (),
) -> Array:
    """Return seconds that each rank spends by itself, shape (steps, ranks).

    Parameters
    ----------
    mesh
        The job.
    rng
        Source of all noise.
    steps
        Steps.
    slow
        Ranks, and how many times longer each takes.
    noise
        Of each rank and step, relative.
    uneven
        Of each replica and step: sequences of different length.
    pauses
        Share of (step, rank) pairs with a pause, of garbage collection say, of up to a step.
    stages
        Pipeline stages take up to this share more than the quickest.
    silent
        Nodes that do not report: NaN.
    """
    d, p, _ = mesh.place
    stage = 0.1 * (1 + rng.random(mesh.pp) * stages)[p]
    shape = (steps, mesh.ranks)
    replica = np.exp(uneven * rng.standard_normal((steps, mesh.dp)))[:, d]
    out: Array = stage * replica * np.exp(noise * rng.standard_normal(shape))
    out += np.where(rng.random(shape) < pauses, 0.1 * rng.random(shape), 0)
    for rank, times in slow:
        out[:, rank] *= times
    out[:, np.isin(np.arange(mesh.ranks) // mesh.per_node, np.asarray(silent, np.int64))] = np.nan
    return out


# --- links --------------------------------------------------------------------------------------


def delays(
    nodes: int,
    rng: np.random.Generator,
    slow: Sequence[tuple[int, int, float]] = (),
    *,
    probes: int = 8,
    noise: float = 0.1,
) -> tuple[Array, Array, Array]:
    """Return probes of random links: sources, targets, seconds. Each node is probed as often.

    Parameters
    ----------
    nodes
        Nodes.
    rng
        Source of the links probed and of noise.
    slow
        (source, target, times longer); -1 means every node, so (3, -1, 2) is a slow sender.
        A link named by both ends is always probed.
    probes
        Probes by each node.
    noise
        Relative.
    """
    shifts = rng.permutation(nodes - 1)[:probes] + 1
    source = np.repeat(np.arange(nodes), len(shifts))
    to = (source + np.tile(shifts, nodes)) % nodes
    for a, b, _ in slow:
        if a >= 0 and b >= 0 and not ((source == a) & (to == b)).any():
            to[np.flatnonzero(source == a)[0]] = b
    seconds = 1e-4 * np.exp(noise * rng.standard_normal(len(source)))
    for a, b, times in slow:
        seconds[((source == a) | (a < 0)) & ((to == b) | (b < 0))] *= times
    return source, to, seconds
