"""A job that does not exist, fed to a daemon as real sheets: for a look, for tests, for benches.

Its ranks, groups and calls come from `ckptd_simulated.job`; so do the faults, which begin some
seconds after its start. What a real agent would find on orders is made up, and says so. Its saves
are events as checkpointers record them, with times that are made up.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ckptd.errors import CkptdError, UsageError
from ckptd.events.event import AnyEvent, SaveBegun, SaveDurable, SaveId, SaveStaged, Span, now_ns
from ckptd.events.sink import JsonlSink
from ckptd.monitor.collectives import COLLECTIVE, SIZES, TIMES, TIMES_S, bus_factor
from ckptd.monitor.job import JobView, Phase
from ckptd.monitor.report import (
    REPORT_RANK,
    STEP,
    USAGE,
    AgentOrders,
    AgentState,
    EvidenceReport,
    GroupInfo,
    LinkProbe,
    NodeReport,
    ProbeResult,
    Stack,
    pack,
)
from ckptd.monitor.stats import Array, mix
from ckptd_simulated.job import TICK_S, Fault, Mesh, Planted, own_times, play

__all__ = [
    "Feeder",
    "PlantedAt",
    "SimulatedSaves",
    "Simulation",
    "mesh_for",
    "parse_fault",
    "simulate",
]

EVERY_STEPS = 50
"""Steps from one save to the next."""
RANKS = 64
"""Most ranks that record: more of them would show nothing else."""
_REMOTE_EVERY = 4
_BYTES = 1 << 30
_SECOND = 10**9
_SEED = 20
# Phase, tier, seconds after the begin of the save, and usual seconds.
_SPANS = (
    ("call", "", 0.0, 0.06),
    ("gate_wait", "", 0.35, 0.02),
    ("copy", "", 0.06, 0.3),
    ("write", "local", 0.4, 0.9),
    ("sync", "local", 1.3, 0.2),
    ("commit", "local", 1.5, 0.05),
)
_UPLOAD = (("upload", "remote", 1.6, 1.4), ("commit", "remote", 3.0, 0.1))


class SimulatedSaves:
    """Records a save every `EVERY_STEPS` steps; to be closed.

    Parameters
    ----------
    folder
        Where events go; it exists.
    ranks
        Of the job.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        self._sink = JsonlSink(folder)
        self._ranks = min(ranks, RANKS)
        self._rng = np.random.default_rng(_SEED)
        self._last = 0

    def reach(self, step: int, generation: int) -> None:
        """Take note of the step that the job has reached: the save that was due is recorded."""
        due = step // EVERY_STEPS * EVERY_STEPS
        if due == self._last:
            return
        self._last = due
        for event in self._events(due, generation):
            self._sink.write(event)

    def close(self) -> None:
        """Close the file."""
        self._sink.close()

    def _events(self, step: int, generation: int) -> Iterator[AnyEvent]:
        remote = step // EVERY_STEPS % _REMOTE_EVERY == 0
        spans = (*_SPANS, *_UPLOAD[: 2 * remote])
        begun = now_ns() - 4 * _SECOND  # it is reported when all of it is over
        slowest = int(self._rng.integers(self._ranks))
        for rank in range(self._ranks):
            who = SaveId(step, generation, f"{generation}-{step}", rank).fields()
            yield SaveBegun(**who, at_ns=begun)
            for name, tier, after_s, usual_s in spans:
                times = float(np.exp(0.15 * self._rng.standard_normal())) * (1 + (rank == slowest))
                took = int(usual_s * times * _SECOND)
                yield Span(
                    **who,
                    name=name,
                    tier=tier,
                    start_ns=begun + int(after_s * _SECOND),
                    duration_ns=took,
                    busy_ns=took,
                    bytes=_BYTES if name in ("copy", "write", "upload") and tier != "remote" else 0,
                )
            yield SaveStaged(**who, at_ns=begun + _SECOND // 2, bytes=_BYTES)
            yield SaveDurable(**who, tier="local", at_ns=begun + 2 * _SECOND, bytes=_BYTES)
            if remote:
                yield SaveDurable(**who, tier="remote", at_ns=begun + 4 * _SECOND, bytes=_BYTES)


SLOW, SILENT, WIRE, RESTART = "slow", "silent", "wire", "restart"
_KINDS = (*(str(p) for p in Planted), SLOW, SILENT, WIRE, RESTART)
_SLOTS = ("tp", "dp", "replica", "p2p", "p2p", "p2p", "p2p")
_OPS = ("all_reduce", "all_reduce", "barrier", "send", "send", "send", "send")
_OF_KIND = {"mesh_tp": "all_reduce", "mesh_dp": "all_reduce", "p2p": "p2p"}
_FIRST_STEP = 100
_USAGE_EVERY = 5
_USUAL_S = 1e-4
_STEPS = 4
"""Steps that the job makes in a second, and in a sheet."""
_INSIDE_S, _WIRE_S = 0.05, 0.2
"""Seconds of a step in calls beyond waiting for others; what slow links add."""
_DOWN_S = 8.0
"""From a crash until the job runs again."""
_NODE_SHEETS, _JOINED_NODES = 64, 32
"""Nodes up to which each sends its own sheet; nodes in a joined one beyond that."""
_NODE, _SMALL_NODE, _SMALL = 8, 4, 32
"""Ranks of a node; of a job of so few ranks, so that there are links to compare."""


@dataclass(frozen=True)
class PlantedAt:
    """One fault of a simulated job.

    Attributes
    ----------
    kind
        One of the simulator's, or ``slow`` (own time), ``silent`` (the node's agent), ``wire``
        (all links of the node), ``restart`` (a crash, after which the job begins again from its
        last save).
    rank
        The rank.
    after_s
        Seconds after the start.
    """

    kind: str
    rank: int
    after_s: float = 10.0


def parse_fault(text: str) -> PlantedAt:
    """Return the fault that ``KIND:RANK`` or ``KIND:RANK@SECONDS`` names.

    Raises
    ------
    UsageError
        It names none.
    """
    found = re.fullmatch(r"([a-z]+):(\d{1,7})(?:@(\d{1,5}(?:\.\d{1,3})?))?", text)
    if found is None or found[1] not in _KINDS:
        raise UsageError(
            "not a fault",
            where="--fault",
            wanted=f"KIND:RANK or KIND:RANK@SECONDS, with one of {', '.join(_KINDS)}",
            found=text,
        )
    return PlantedAt(found[1], int(found[2]), float(found[3] or 10.0))


def mesh_for(ranks: int) -> Mesh:
    """Return the shape of a job of so many ranks: pipeline and tensor parallel where they fit.

    Raises
    ------
    UsageError
        There are none, or too many.
    """
    if not 1 <= ranks <= 1 << 16:
        raise UsageError(
            "no job of that size", where="--simulate", wanted="1 to 65536 ranks", found=ranks
        )
    node = _SMALL_NODE if ranks <= _SMALL else _NODE
    for pp, tp in ((8, 8), (4, 8), (2, 4), (2, 2), (1, 2)):
        if ranks % (pp * tp) == 0 and ranks // (pp * tp) >= 2:
            return Mesh(ranks // (pp * tp), pp, tp, per_node=node)
    return Mesh(ranks, per_node=node)


class Simulation:
    """Makes the sheets of a simulated job, second by second.

    Parameters
    ----------
    job
        Name in the sheets.
    mesh
        Its shape.
    faults
        What is wrong with it.
    nodes_per_sheet
        Above 1, sheets are as forwarders send them.
    """

    def __init__(
        self, job: str, mesh: Mesh, faults: Sequence[PlantedAt] = (), nodes_per_sheet: int = 1
    ) -> None:
        self.mesh = mesh
        self._job = job
        self._faults = faults
        self._rng = np.random.default_rng(_SEED)
        self.step = _FIRST_STEP
        """The step that the job is in."""
        self.generation = 0
        """Restarts so far."""
        self._number = 0
        self._told_s = 0.0
        self._left: Array | None = None
        self._per_sheet = nodes_per_sheet
        names = [f"n{k}" for k in range(mesh.nodes)]
        self._parts = [
            names[i : i + nodes_per_sheet] for i in range(0, len(names), nodes_per_sheet)
        ]
        self.sources = [secrets.token_hex(8) for _ in self._parts]
        self._groups, self._texts = _told(mesh)
        self._to_tell = set(self.sources)
        self._told_last: dict[str, int] = {}

    def sheets(self, elapsed_s: float) -> Iterator[tuple[str, bytes]]:
        """Yield source and packed sheet of each source, `elapsed_s` after the start."""
        begun = [f for f in self._faults if f.after_s <= elapsed_s]
        self._restart(begun, elapsed_s)
        stops = [f for f in begun if f.kind in set(Planted) or _is_down(f, elapsed_s)]
        job = self._with_ends(self._play(stops, elapsed_s), elapsed_s)
        steps = self._steps(begun) if not stops else None
        silent = {f.rank // self.mesh.per_node for f in begun if f.kind == SILENT}
        self._number += 1
        ranks = _ranks(job, elapsed_s, self.generation)
        for part, source in enumerate(self.sources):
            first = part * self._per_sheet * self.mesh.per_node
            nodes = range(part * self._per_sheet, part * self._per_sheet + len(self._parts[part]))
            if set(nodes) & silent:
                continue
            last = min(first + len(nodes) * self.mesh.per_node, self.mesh.ranks)
            yield source, pack(self._sheet(part, source, job, ranks, steps, first, last))

    def _restart(self, begun: Sequence[PlantedAt], elapsed_s: float) -> None:
        over = [f for f in begun if f.kind == RESTART and not _is_down(f, elapsed_s)]
        if len(over) > self.generation:
            self.generation = len(over)
            self.step = self.step // EVERY_STEPS * EVERY_STEPS
            self._left = None
            self._to_tell.update(self.sources)

    def _with_ends(self, job: JobView, elapsed_s: float) -> JobView:
        """Return `job` with the ends of calls that the second before had left open."""
        left, since = self._left, elapsed_s - self._told_s
        open_ = job.calls[np.isnan(job.calls["end"])]
        self._left, self._told_s = open_.copy(), elapsed_s
        if left is None or not len(left):
            return job
        if len(open_) and open_["step"].max() <= left["step"].max():
            self._left = left  # it stands still: these do not end
            return job
        left["start"] -= since
        left["end"] = np.minimum(left["start"] + TICK_S * (1 + len(_SLOTS)), 0.0)
        return replace(job, calls=np.concatenate([left, job.calls]))

    def _play(self, stops: Sequence[PlantedAt], elapsed_s: float) -> JobView:
        if not stops:
            self.step += _STEPS
            rounds = int(self._rng.integers(20, 60))
            return play(self.mesh, (), self._rng, rounds=rounds, step=self.step, age=0.0)
        faults = [Fault(_planted(f), f.rank % self.mesh.ranks, 2) for f in stops]
        # The same draw each second: what stands still shows the same place each time.
        rng = np.random.default_rng(_SEED)
        age = elapsed_s - min(f.after_s for f in stops)
        return play(self.mesh, faults, rng, step=self.step + 1, age=age)

    def _steps(self, begun: Sequence[PlantedAt]) -> tuple[Array, Array]:
        """Return own seconds, and seconds in calls, of the last steps."""
        own = self._own(begun)
        wire = any(f.kind == WIRE for f in begun)
        # Ranks that are done wait for the last: calls end together.
        return own, own.max(1, keepdims=True) - own + _INSIDE_S + wire * _WIRE_S

    def _own(self, begun: Sequence[PlantedAt]) -> Array:
        slow = [(f.rank % self.mesh.ranks, 1.6) for f in begun if f.kind == SLOW]
        # Stages are drawn first: one seed keeps them from second to second.
        rng = np.random.default_rng([_SEED, self.step])
        return own_times(self.mesh, rng, _STEPS, slow, uneven=0.02)

    def _sheet(
        self,
        part: int,
        source: str,
        job: JobView,
        ranks: Array,
        steps: tuple[Array, Array] | None,
        first: int,
        last: int,
    ) -> NodeReport:
        mine = ranks[first:last].copy()
        mine["node"] -= part * self._per_sheet
        told = source in self._to_tell
        self._to_tell.discard(source)
        after = self._told_last.get(source, 0)
        self._told_last[source] = self._number
        return NodeReport(
            job=self._job,
            source=source,
            number=self._number,
            nodes=tuple(self._parts[part]),
            agents=tuple(
                AgentState(address=f"{n}:1", cpu_s=0.001 * self._number) for n in self._parts[part]
            ),
            ranks=mine.tobytes(),
            groups=_slice(job.groups, first, last).tobytes(),
            calls=_slice(job.calls, first, last).tobytes(),
            steps=b"" if steps is None else _steps(*steps, first, last, self.step).tobytes(),
            collectives=b"" if steps is None else self._collectives(first, last).tobytes(),
            usage=self._usage(last - first).tobytes() if self._number % _USAGE_EVERY == 1 else b"",
            after=after,
            members=self._told_by(first, last) if told else {},
            texts=self._texts if told else {},
        )

    def _usage(self, ranks: int) -> Array:
        """Return what the processes of these ranks use, made up."""
        out = np.zeros(ranks, USAGE)
        out["row"], out["threads"] = np.arange(ranks), 48
        out["cpu"] = 1.0 + 0.3 * self._rng.random(ranks)
        out["memory"] = (12 << 30) + (self._rng.random(ranks) * (1 << 28)).astype(np.int64)
        return out

    def _collectives(self, first: int, last: int) -> Array:
        """Return rows of what groups of these ranks did in a step, with times that are made up."""
        led = Counter(
            (op, info.kind, info.size)
            for info in self._told_by(first, last).values()
            for op in [_OF_KIND.get(info.kind)]
            if op is not None
        )
        out = np.zeros(len(led), COLLECTIVE)
        for row, ((op, kind, size), groups) in zip(out, led.items(), strict=True):
            nbytes = 1 << 24 if op == "all_reduce" else 1 << 20
            seconds = 2e-3 * np.exp(0.2 * self._rng.standard_normal())
            row["op"], row["kind"] = op, kind
            row["size"] = np.searchsorted(SIZES, nbytes)
            row["values"][:TIMES] = 1, nbytes, nbytes * bus_factor(op, size), seconds
            row["values"][TIMES + np.searchsorted(TIMES_S, seconds)] = 1
            row["values"] *= groups
        return out

    def _told_by(self, first: int, last: int) -> dict[int, GroupInfo]:
        """Return the groups whose first member is among these ranks."""
        return {k: info for k, info in self._groups.items() if first <= info.ranks()[0] < last}

    def tell(self, source: str) -> None:
        """Have a source tell its groups and texts again."""
        self._to_tell.add(source)

    def found(self, source: str, orders: AgentOrders, elapsed_s: float) -> bytes | None:
        """Return the packed findings that answer `orders`; None if nothing was ordered."""
        if not orders.stacks and not orders.probes:
            return None
        begun = [f for f in self._faults if f.after_s <= elapsed_s]
        slow, lost = (
            {f"n{f.rank // self.mesh.per_node}" for f in begun if f.kind == kind}
            for kind in (WIRE, Planted.LINK)
        )
        self._number += 1
        return pack(
            EvidenceReport(
                job=self._job,
                source=source,
                number=self._number,
                stacks={r: Stack(text=_STACK.format(rank=r), how="py-spy") for r in orders.stacks},
                probes=tuple(self._probed(p, slow, lost) for p in orders.probes),
            )
        )

    def _probed(self, probe: LinkProbe, slow: set[str], lost: set[str]) -> ProbeResult:
        ends = {probe.from_node, probe.to_node}
        seconds = _USUAL_S * float(np.exp(0.1 * self._rng.standard_normal()))
        if ends & lost:
            seconds = float("inf")
        elif ends & slow:
            seconds *= 16
        return ProbeResult(
            nonce=probe.nonce,
            src=probe.from_node,
            dst=probe.to_node,
            seconds=seconds,
            error="timed out" if ends & lost else "",
        )


def _is_down(fault: PlantedAt, elapsed_s: float) -> bool:
    return fault.kind == RESTART and elapsed_s < fault.after_s + _DOWN_S


def _planted(fault: PlantedAt) -> Planted:
    return Planted.CRASH if fault.kind == RESTART else Planted(fault.kind)


_STACK = """Thread 1 (MainThread), of simulated rank {rank}:
    all_reduce (torch/distributed/distributed_c10d.py:2810)
    backward (train.py:211)
    main (train.py:340)
"""


def _told(mesh: Mesh) -> tuple[dict[int, GroupInfo], dict[int, str]]:
    ids = mix(mesh.slots.ravel()).reshape(mesh.slots.shape)
    groups: dict[int, GroupInfo] = {}
    for slot, kind in enumerate(_SLOTS):
        rows = np.flatnonzero(mesh.slots[:, slot] >= 0)
        order = rows[np.argsort(mesh.slots[rows, slot], kind="stable")]
        edges = np.flatnonzero(np.diff(mesh.slots[order, slot])) + 1
        for members in np.split(order, edges) if len(order) else []:
            ident = int(ids[members[0], slot])
            before = groups.get(ident)
            if kind == "p2p" and before is not None:
                continue
            word = kind if kind in ("tp", "dp") else ""
            groups[ident] = GroupInfo.of(
                members.tolist(), f"{kind}_{members[0]}", f"mesh_{word}" if word else kind
            )
        if kind == "tp" and mesh.pp > 1:
            groups |= _stages(mesh)
    texts = {min(slot, 3) + 1: op for slot, op in enumerate(_OPS[:4])}
    texts |= {100 + slot: f"train.py:{200 + 10 * slot}" for slot in range(len(_SLOTS))}
    return groups, texts


def _stages(mesh: Mesh) -> dict[int, GroupInfo]:
    """Return the groups of ranks along the pipeline: they make no calls, and tell the mesh."""
    rank = np.arange(mesh.ranks).reshape(mesh.dp, mesh.pp, mesh.tp)
    out = {}
    for d in range(mesh.dp):
        for t in range(mesh.tp):
            members = rank[d, :, t].tolist()
            ident = int(mix(np.array([6 * mesh.ranks + members[0]]))[0])
            out[ident] = GroupInfo.of(members, f"pp_{members[0]}", "mesh_pp")
    return out


def _ranks(job: JobView, elapsed_s: float, generation: int) -> Array:
    out = np.zeros(len(job.ranks), REPORT_RANK)
    for name in job.ranks.dtype.names or ():
        out[name] = job.ranks[name]
    out["world"], out["generation"] = job.world, generation
    out["pid"] = 1000 + out["rank"] + generation * job.world
    out["lived"], out["recorder"], out["written"] = elapsed_s + 60.0, 1, 1000
    return out


def _slice(table: Array, first: int, last: int) -> Array:
    rows = table["row"]
    order = table[np.argsort(rows, kind="stable")] if (np.diff(rows) < 0).any() else table
    low, high = np.searchsorted(order["row"], [first, last])
    out: Array = order[low:high].copy()
    out["row"] -= first
    return out


def _steps(own: Array, inside: Array, first: int, last: int, step: int) -> Array:
    count, ranks = len(own), last - first
    out = np.zeros(count * ranks, STEP)
    out["row"] = np.tile(np.arange(ranks), count)
    out["step"] = np.repeat(np.arange(step - count, step), ranks)
    out["phase"] = Phase.TRAIN
    out["self_s"] = own[:, first:last].ravel()
    out["inside_s"] = inside[:, first:last].ravel()
    out["wall_s"] = out["self_s"] + out["inside_s"]
    return out


class Feeder:
    """Hands a simulation's messages to a daemon in this process, once a second. To be closed."""

    def __init__(
        self,
        simulation: Simulation,
        hand_in: Callable[[str, bytes], Future[AgentOrders]],
        saves: SimulatedSaves | None = None,
    ) -> None:
        self._simulation = simulation
        self._saves = saves
        self._hand_in = hand_in
        self._ended = threading.Event()
        self.failed: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._work, name="simulation", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End."""
        self._ended.set()
        self._thread.join(10.0)
        if self._saves is not None:
            self._saves.close()

    def _work(self) -> None:
        began = time.monotonic()
        while not self._ended.is_set():
            due = time.monotonic() + 1.0
            elapsed = time.monotonic() - began
            for source, body in self._simulation.sheets(elapsed):
                self._exchange(source, body, elapsed)
            if self._saves is not None:
                self._saves.reach(self._simulation.step, self._simulation.generation)
            self._ended.wait(max(due - time.monotonic(), 0.05))

    def _exchange(self, source: str, body: bytes, elapsed: float) -> None:
        try:
            orders = self._hand_in("sheet", body).result(30.0)
            if orders.tell:
                self._simulation.tell(source)
            found = self._simulation.found(source, orders, elapsed)
            if found is not None:
                self._hand_in("found", found).result(30.0)
        except CkptdError as error:
            self.failed[error.kind] += 1
        except (TimeoutError, CancelledError):
            self.failed["late"] += 1


def simulate(
    job: str,
    ranks: int,
    faults: Sequence[str],
    events: Path | None,
    hand_in: Callable[[str, bytes], Future[AgentOrders]],
) -> Feeder:
    """Feed a daemon with a job of `ranks` ranks until the returned object is closed.

    Parameters
    ----------
    job
        Its name.
    faults
        Each as `parse_fault` reads it.
    events
        Folder that events of saves are recorded in; None for no saves.
    hand_in
        Takes a kind of message and its body.

    Raises
    ------
    UsageError
        No such fault, or no job of that size.
    """
    mesh = mesh_for(ranks)
    per_sheet = 1 if mesh.nodes <= _NODE_SHEETS else _JOINED_NODES
    planted = [parse_fault(text) for text in faults]
    simulation = Simulation(job, mesh, planted, nodes_per_sheet=per_sheet)
    saves = SimulatedSaves(events, ranks) if events is not None else None
    return Feeder(simulation, hand_in, saves)
