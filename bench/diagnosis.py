"""What the diagnosis finds in simulated jobs of 1,024 to 32,768 ranks, and what a round costs.

    python bench/diagnosis.py [--reps 10]

Faults are planted in played steps (dp x pp x tp meshes, 8 ranks a node), in ranks' own times and
in matrices of probe delays. Thresholds are the defaults of the code: they were chosen without the
seeds of the second set, and are scored on it. A case is right if the class is right and the
suspects are exactly the planted ones.

One rule was changed after a first look at the second set: beside a known culprit silent ranks are
not suspected. Its rows with silent nodes are no fresh evidence for that rule.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import common
import numpy as np

from ckptd.monitor.diagnose import diagnose
from ckptd.monitor.job import Job
from ckptd.monitor.links import effects
from ckptd.monitor.simulator import Fault, Mesh, Planted, delays, own_times, play
from ckptd.monitor.slow import SlowLimits, slow_ranks
from ckptd.monitor.verdict import Kind, Target, Verdict

MESHES = {1024: Mesh(16, 8, 8), 10240: Mesh(160, 8, 8), 32768: Mesh(512, 8, 8)}
SETS = {"chosen on": 0, "scored on": 1_000_000}
RATIOS = (1.05, 1.08, 1.1, 1.15, 1.2, 1.5)
LINK_RATIOS = (1.25, 1.5, 2.0, 3.0, 10.0)


@dataclass
class Score:
    """Cases of one kind: found, and named wrongly."""

    cases: int = 0
    found: int = 0
    wrong: int = 0
    planted: int = 0
    cpu: list[float] = field(default_factory=list)

    def add(self, wanted: set[str], named: set[str], cpu: float) -> None:
        self.cases += 1
        self.planted += len(wanted)
        self.found += len(wanted & named)
        self.wrong += len(named - wanted)
        self.cpu.append(cpu)

    def row(self, **head: Any) -> dict[str, Any]:
        named = self.found + self.wrong
        return {
            **head,
            "cases": self.cases,
            "recall": self.found / self.planted if self.planted else None,
            "precision": self.found / named if named else None,
            "wrong": self.wrong,
            "cpu ms": float(np.median(self.cpu)) * 1e3,
            "cpu max ms": max(self.cpu) * 1e3,
        }


# --- what stands still --------------------------------------------------------------------------

Case = tuple[Job, set[str]]


def _length(mesh: Mesh, rank: int) -> int:
    """Calls that a rank makes in a step."""
    return int((mesh.program[mesh.place[1][rank]] >= 0).sum())


def _ranks(mesh: Mesh, rng: np.random.Generator, count: int) -> list[int]:
    return [int(r) for r in rng.choice(mesh.ranks, count, replace=False)]


def _faults(mesh: Mesh, rng: np.random.Generator, kind: Planted, count: int) -> list[Fault]:
    ranks = _ranks(mesh, rng, count)
    return [Fault(kind, r, int(rng.integers(_length(mesh, r)))) for r in ranks]


def _wanted(kind: Kind, faults: list[Fault]) -> set[str]:
    return {f"{kind} {f.rank}" for f in faults}


def clean(mesh: Mesh, rng: np.random.Generator) -> Case:
    return play(mesh, [], rng, age=0.01, rounds=int(rng.integers(1, 60))), set()


def hang(mesh: Mesh, rng: np.random.Generator) -> Case:
    faults = _faults(mesh, rng, Planted.HANG, 1)
    return play(mesh, faults, rng), _wanted(Kind.HANG, faults)


def stop(mesh: Mesh, rng: np.random.Generator) -> Case:
    faults = _faults(mesh, rng, Planted.STOP, 1)
    return play(mesh, faults, rng), _wanted(Kind.HANG, faults)


def two_hangs(mesh: Mesh, rng: np.random.Generator) -> Case:
    """Both at a step's first call: of two, one may never come to the place where it would hang."""
    faults = [Fault(Planted.HANG, r, 0) for r in _ranks(mesh, rng, 2)]
    return play(mesh, faults, rng), _wanted(Kind.HANG, faults)


def node_hang(mesh: Mesh, rng: np.random.Generator) -> Case:
    node = int(rng.integers(mesh.nodes))
    faults = [Fault(Planted.HANG, node * mesh.per_node + k, 0) for k in range(mesh.per_node)]
    return play(mesh, faults, rng), _wanted(Kind.HANG, faults)


def hang_unheard(mesh: Mesh, rng: np.random.Generator) -> Case:
    """One node in a hundred does not report; the culprit's does."""
    faults = _faults(mesh, rng, Planted.HANG, 1)
    others = np.setdiff1d(np.arange(mesh.nodes), [faults[0].rank // mesh.per_node])
    silent = rng.choice(others, max(mesh.nodes // 100, 1), replace=False)
    return play(mesh, faults, rng, silent=silent.tolist()), _wanted(Kind.HANG, faults)


def crash(mesh: Mesh, rng: np.random.Generator) -> Case:
    faults = _faults(mesh, rng, Planted.CRASH, 1)
    return play(mesh, faults, rng, age=1.0), _wanted(Kind.CRASH, faults)


def size(mesh: Mesh, rng: np.random.Generator) -> Case:
    """In the replicas' reduction."""
    rank = _ranks(mesh, rng, 1)[0]
    faults = [Fault(Planted.SIZE, rank, _length(mesh, rank) - 3)]
    return play(mesh, faults, rng, age=1.0), _wanted(Kind.MISMATCH, faults)


def skip(mesh: Mesh, rng: np.random.Generator) -> Case:
    """The stage's reduction in the last backward pass; the first stage sends nothing after it."""
    rank = _ranks(mesh, rng, 1)[0]
    back = 4 if mesh.place[1][rank] == 0 else 5
    faults = [Fault(Planted.SKIP, rank, _length(mesh, rank) - back)]
    return play(mesh, faults, rng, age=1.0), _wanted(Kind.MISMATCH, faults)


def deadlock(mesh: Mesh, rng: np.random.Generator) -> Case:
    faults = [Fault(Planted.SWAP, _ranks(mesh, rng, 1)[0])]
    stage = mesh.tp * (faults[0].rank // mesh.tp)
    return play(mesh, faults, rng), {f"{Kind.DEADLOCK} {stage + k}" for k in range(mesh.tp)}


def communication(mesh: Mesh, rng: np.random.Generator) -> Case:
    """The group is what is to be named."""
    rank = _ranks(mesh, rng, 1)[0]
    job = play(mesh, [Fault(Planted.LINK, rank, _length(mesh, rank) - 2)], rng)
    stage = mesh.tp * (rank // mesh.tp)
    return job, {f"{Kind.COMM_HANG} {stage + k}" for k in range(mesh.tp)}


CASES: dict[str, Callable[[Mesh, np.random.Generator], Case]] = {
    "clean, in mid-step": clean,
    "hang": hang,
    "stopped": stop,
    "two hangs": two_hangs,
    "node hangs": node_hang,
    "hang, 1 % of nodes silent": hang_unheard,
    "crash": crash,
    "other size": size,
    "call left out": skip,
    "deadlock": deadlock,
    "communication hang": communication,
}


def _named(verdicts: tuple[Verdict, ...]) -> set[str]:
    return {f"{v.kind} {name}" for v in verdicts for name in v.names()}


def standing(ranks: int, case: str, base: int, reps: int) -> dict[str, Any]:
    score = Score()
    for k in range(reps):
        job, wanted = CASES[case](MESHES[ranks], np.random.default_rng(base + k))
        start = time.process_time()
        verdicts = diagnose(job)
        score.add(wanted, _named(verdicts), time.process_time() - start)
    return score.row(ranks=ranks, case=case)


# --- slow ranks, slow links ---------------------------------------------------------------------


def slowness(ranks: int, ratio: float, base: int, reps: int) -> dict[str, Any]:
    """Three ranks are slower by the same ratio; 1 is a clean job."""
    mesh, limits, score = MESHES[ranks], SlowLimits(), Score()
    job = play(mesh, [], np.random.default_rng(0), rounds=0)
    for k in range(reps):
        rng = np.random.default_rng(base + k)
        slow = _ranks(mesh, rng, 3) if ratio > 1 else []
        times = own_times(mesh, rng, limits.steps * limits.windows, [(r, ratio) for r in slow])
        start = time.process_time()
        verdicts = tuple(slow_ranks(job, times, mesh.roles, limits))
        cpu = time.process_time() - start
        score.add({f"{Kind.SLOW_RANK} {r}" for r in slow}, _named(verdicts), cpu)
    return score.row(ranks=ranks, case="slow rank" if ratio > 1 else "clean", ratio=ratio)


LINKS = {"sender": (1, 0), "receiver": (0, 1), "node": (1, 1), "link": (2, 2), "clean": (0, 0)}


def links(nodes: int, case: str, ratio: float, base: int, reps: int) -> dict[str, Any]:
    score = Score()
    for k in range(reps):
        rng = np.random.default_rng(base + k)
        a, b = (int(n) for n in rng.choice(nodes, 2, replace=False))
        kind = LINKS[case]
        slow = [(a, b, ratio)] if kind == (2, 2) else []
        slow += [(a, -1, ratio)] if kind[0] == 1 else []
        slow += [(-1, a, ratio)] if kind[1] == 1 else []
        source, to, seconds = delays(nodes, rng, slow)
        start = time.process_time()
        found = effects(source, to, seconds, nodes)
        cpu = time.process_time() - start
        target = {"sender": (a, -1), "receiver": (-1, a), "node": (a, a), "link": (a, b)}
        wanted = {f"{Target(case)} {target[case]}"} if slow else set()
        score.add(wanted, {f"{e.target} {(e.source, e.to)}" for e in found if not e.echo}, cpu)
    return score.row(nodes=nodes, case=case, ratio=ratio)


# --- all ----------------------------------------------------------------------------------------


def measure(base: int, reps: int) -> dict[str, list[dict[str, Any]]]:
    few = {1024: reps, 10240: reps, 32768: max(reps // 3, 1)}
    return {
        "standing": [standing(n, case, base, few[n]) for n in MESHES for case in CASES],
        "slow ranks": [slowness(n, r, base, few[n]) for n in MESHES for r in (1.0, *RATIOS)],
        "slow links": [
            links(nodes, case, ratio, base, 4 * reps)
            for nodes in (128, 1280)
            for case in LINKS
            for ratio in (LINK_RATIOS if case != "clean" else (1.0,))
        ],
    }


def _shown(value: Any) -> Any:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else value


def main() -> None:
    options = common.arguments(__doc__)
    reps = 2 * options.reps
    start = time.monotonic()
    sets = {name: measure(base, reps) for name, base in SETS.items()}
    text = (
        "Thresholds were chosen on other seeds than these. One rule, that silent ranks are not\n"
        "suspected beside a known culprit, was added after a first run on these seeds (8 ranks\n"
        "wrongly suspected in 1 of 10 cases with silent nodes at 10,240 ranks).\n"
    )
    for title, rows in sets["scored on"].items():
        head = list(rows[0])
        body = [[_shown(r[k]) for k in head] for r in rows]
        text += f"\n{title.capitalize()}:\n\n{common.table(head, body)}\n"
    common.publish("diagnosis", "python bench/diagnosis.py", text.rstrip("\n"), sets)
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
