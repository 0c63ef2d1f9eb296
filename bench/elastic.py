"""From a fault to the first committed step, split by state; ours beside stock torchrun.

One command a question: ``--case kill-worker --system ckptd-torchrun --reps 20``. Without
``--system`` all systems that can have the fault take turns; without ``--case`` all faults. Every
repetition is a job of its own. Raw runs and the load are kept in ``results/elastic.json``, one
list for each case and system; measuring one leaves the others of this very commit as they are.

``--peers`` writes a table of its own: six faults of `PEERS`, ours beside torchrun, NVRx's launcher
and torchft, in one run. Those two are installed beside the environment::

    pip install --no-deps --target DIR torchft-nightly nvidia-resiliency-ext
    pip install --target DIR opentelemetry-sdk opentelemetry-exporter-otlp-proto-http \\
        defusedxml nvidia-ml-py pyyaml
    BENCH_PEERS=DIR python bench/elastic.py --peers
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from common import RESULTS, command, provenance, publish, table
from elastic_systems import SYSTEMS, Run

_START_S = 120.0
_WITHIN_S = 75.0
_RATE_S = 2.0
_STANDS_S = 20.0
OURS = ("ckptd-torchrun", "ckptd-run", "ckptd-session")
STOCK = ("torchrun", "torchrun-tuned")
OTHERS = (*STOCK, "nvrx", "torchft")
ALL = ("ckptd-run-watched", "ckptd-session", "torchrun", "nvrx", "torchft")
PEERS = {
    "a rank is killed": "kill-worker",
    "a rank hangs": "stop-worker",
    "a rank is out of memory": "out-of-memory",
    "a node is lost": "lose-node",
    "the controller is lost": "lose-controller",
    "a node is pre-empted": "preempt",
}


@dataclass(frozen=True)
class Case:
    """A fault.

    Attributes
    ----------
    nodes, after
        Before it, and how many ranks may train after it.
    strike
        Does it; returns the moment from which time counts.
    systems
        That can have it.
    environ
        For the job.
    most
        Nodes at most, if not `nodes`.
    past
        Steps before it: a slow rank is found by its own past, and one of two by nothing.
    stands
        Whether the job may go on as it is, so that its longest pause counts.
    """

    nodes: int
    after: tuple[int, ...]
    strike: Callable[[Run], float]
    systems: Sequence[str] = (*OURS, *STOCK)
    environ: tuple[tuple[str, str], ...] = ()
    most: int = 0
    past: int = 12
    stands: bool = False


def _kill_worker(run: Run) -> float:
    pid = run.worker(1)
    now = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return now


def _lose(node: int) -> Callable[[Run], float]:
    def strike(run: Run) -> float:
        now = time.monotonic()
        run.kill_node(node)
        return now

    return strike


def _kill_agent(run: Run) -> float:
    now = time.monotonic()
    run.nodes.pop(1).kill()
    return now


def _starve(run: Run) -> float:
    """Have the kernel end a rank that takes more memory than it may."""
    run.limit_memory(run.worker(1))
    now = time.monotonic()
    (run.folder / "hungry").touch()
    return now


def _lose_controller(run: Run) -> float:
    now = time.monotonic()
    run.kill_controller()
    return now


def _preempt(run: Run) -> float:
    """Tell a node by SIGTERM that it goes, as schedulers do."""
    now = time.monotonic()
    run.nodes[1].terminate()
    return now


def _stop_worker(run: Run) -> float:
    now = time.monotonic()
    os.kill(run.worker(1), signal.SIGSTOP)
    return now


def _stop_and_order(run: Run) -> float:
    os.kill(run.worker(1), signal.SIGSTOP)
    now = time.monotonic()
    run.order("restart")
    return now


def _order(*words: str) -> Callable[[Run], float]:
    def strike(run: Run) -> float:
        now = time.monotonic()
        run.order(*words)
        return now

    return strike


def _grow(run: Run) -> float:
    now = time.monotonic()
    run.start(len(run.nodes))
    return now


def _nothing(_: Run) -> float:
    return time.monotonic()


def _touch(name: str) -> Callable[[Run], float]:
    def strike(run: Run) -> float:
        now = time.monotonic()
        (run.folder / name).touch()
        return now

    return strike


_PG = (("BENCH_TIMEOUT_S", "10"),)
_OPTIMIZER = (("BENCH_OPTIMIZER", "1"),)
_WATCHED = ("ckptd-run-watched",)
_SESSION = ("ckptd-session",)
CASES: dict[str, Case] = {
    "kill-worker": Case(2, (2,), _kill_worker, (*OURS, *STOCK, *ALL)),
    "lose-node": Case(2, (1,), _lose(1), (*OURS, *STOCK, *ALL)),
    "lose-controller": Case(2, (1, 2), _lose_controller, ALL, stands=True),
    "out-of-memory": Case(2, (2,), _starve, ALL),
    "preempt": Case(2, (1,), _preempt, ALL),
    "lose-store-host": Case(2, (1,), _lose(0)),
    "agent-dies": Case(2, (1,), _kill_agent),
    "stop-worker": Case(2, (1, 2), _stop_worker, (*STOCK, *ALL), _PG),
    "stop-worker-ordered": Case(2, (2,), _stop_and_order, OURS),
    "mismatch": Case(2, (2,), _touch("mismatch"), (*STOCK, *_WATCHED), _PG),
    "slow-swapped": Case(5, (4,), _touch("slow-1"), _WATCHED, _OPTIMIZER, most=4, past=120),
    "restart": Case(2, (2,), _order("restart"), OURS),
    "shrink": Case(2, (1,), _order("exclude", "node1"), OURS),
    "grow": Case(1, (2,), _grow, most=2),
    "l0-4-3": Case(4, (3,), _lose(3), _SESSION),
    "l0-3-4": Case(3, (4,), _grow, _SESSION, most=4),
    "ideal-1": Case(1, (1,), _nothing),
    "ideal-2": Case(2, (2,), _nothing),
    "ideal-3": Case(3, (3,), _nothing, _SESSION),
    "ideal-4": Case(4, (4,), _nothing, _SESSION),
}
"""``stop-worker`` and ``mismatch`` are noticed by nobody but the daemon and the time-out, 10 s.
``ideal-N``: no fault; the steps per second of N ranks that began as N."""


def once(name: str, system: str) -> dict[str, Any]:
    """Run one job through one fault, and return what it took."""
    case = CASES[name]
    run = Run(system, 1, case.most or case.nodes, dict(case.environ))
    try:
        for node in range(case.nodes):
            run.start(node)
            if node == 0 and system not in OTHERS and not run.has_controller(_START_S):
                return {"failed": "no controller", "logs": run.logs()}
        world = min(case.nodes, run.most)
        before = run.wait(
            lambda e: e["what"] == "step" and e["world"] == world and e["step"] >= case.past,
            _START_S,
        )
        if before is None:
            return {"failed": "the job did not start", "logs": run.logs()}
        if name.startswith("ideal"):
            time.sleep(_RATE_S)
            return {"total": None, "load_avg": os.getloadavg()[0], "rate": _rate(run, before)}
        struck = case.strike(run)
        return _stood(run, struck) if case.stands else _measured(run, case, struck)
    finally:
        run.end()


def _measured(run: Run, case: Case, struck: float) -> dict[str, Any]:
    old = [e for e in run.events() if e["what"] == "step" and e["t"] <= struck]
    pids, generation = {e["pid"] for e in old}, max(e["generation"] for e in old)

    def first(event: dict[str, Any]) -> bool:
        new = event["pid"] not in pids or event.get("generation", 0) > generation
        return bool(event["what"] == "step" and event["world"] in case.after and new)

    step = run.wait(first, _WITHIN_S)
    load = os.getloadavg()[0]
    if step is None:
        return {"total": None, "load_avg": load, "logs": run.logs()[-1500:]}
    rows = run.events()
    reached = max((e["step"] for e in rows if e["what"] == "step" and e["t"] < struck), default=0)
    out = {"total": step["t"] - struck, "load_avg": load, "steps_lost": reached - step["step"] + 1}
    out |= _split(rows, step, struck)
    time.sleep(_RATE_S)
    if run.system in OURS:
        recoveries = run.operator().status().recoveries
        out["controller"] = msgspec.to_builtins(recoveries[-1]) if recoveries else None
    out["rate"], out["world"] = _rate(run, step), step["world"]
    return out


def _stood(run: Run, struck: float) -> dict[str, Any]:
    """Return the longest time without a step from the fault on; none if it still lasts."""
    time.sleep(_STANDS_S)
    moments = sorted(e["t"] for e in run.events() if e["what"] == "step" and e["t"] > struck)
    load, end = os.getloadavg()[0], time.monotonic()
    if not moments or end - moments[-1] > _STANDS_S / 4:
        return {"total": None, "load_avg": load, "logs": run.logs()[-1500:]}
    longest = max(b - a for a, b in zip([struck, *moments], moments, strict=False))
    return {"total": longest, "load_avg": load}


def _rate(run: Run, first: dict[str, Any]) -> float | None:
    """Return the steps per second of one process, from one of its steps on."""
    moments = [
        e["t"]
        for e in run.events()
        # A process that goes on may have made this step before the fault as well.
        if e["what"] == "step" and e["pid"] == first["pid"] and e["t"] >= first["t"]
    ]
    return (len(moments) - 1) / (moments[-1] - moments[0]) if len(moments) > 2 else None


def _split(rows: list[dict[str, Any]], step: dict[str, Any], struck: float) -> dict[str, float]:
    """Return the seconds of each part, those of the rank that came last to the first step."""
    last: dict[str, float] = {}
    world = [e for e in rows if e["t"] <= step["t"] and e["world"] == step["world"]]
    for what in ("born", "imported", "initialised", "loaded"):
        newest = {e["rank"]: e for e in world if e["what"] == what and e["t"] > struck}
        if newest:
            last[what] = max(e.get("at", e["t"]) for e in newest.values())
    moments = [struck, *last.values(), step["t"]]
    names = {"born": "agree", "imported": "import", "initialised": "init", "loaded": "load"}
    # A process that goes on is not started again: in any case the first part is to agree.
    parts = ["agree", *[names[what] for what in last][1:], "step"]
    return {part: b - a for part, a, b in zip(parts, moments, moments[1:], strict=False)}


# --- telling --------------------------------------------------------------------------------------


def _kept() -> dict[str, Any]:
    """Return the runs on this very commit: the table says one commit for all."""
    path = RESULTS / "elastic.json"
    body = json.loads(path.read_text()) if path.exists() else {}
    return dict(body["data"]) if body.get("commit") == provenance()["commit"] else {}


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _median(runs: Sequence[dict[str, Any]], key: str) -> float:
    values = [r[key] for r in runs if r.get(key) is not None]
    return statistics.median(values) if values else float("nan")


def report(data: dict[str, Any]) -> None:
    """Write what was measured so far."""
    rows = []
    for key in sorted(data):
        name, _, system = key.partition(" ")
        runs = [r for r in data[key] if "failed" not in r]
        good = [r for r in runs if r["total"] is not None]
        totals = [r["total"] for r in good]
        row: list[Any] = [name, system, f"{len(good)}/{len(data[key])}"]
        nan = float("nan")
        row.append(statistics.median(totals) if totals else nan)
        row.append(_percentile(totals, 0.95) if totals else nan)
        parts = ("agree", "import", "init", "load", "step", "steps_lost")
        rate = _median(runs, "rate")
        row += [*(_median(good, part) for part in parts), rate]
        row.append(
            rate / _median(data.get(f"ideal-{good[0]['world']} {system}", []), "rate")
            if good and "world" in good[0]
            else nan
        )
        told = [r["controller"] for r in good if system == "ckptd-session"]
        pauses = [recovery["total"] for recovery in told if recovery]
        row.append(statistics.median(pauses) if pauses else nan)
        loads = [r["load_avg"] for r in runs]
        rows.append([*row, statistics.median(loads) if loads else nan])
    head = ["case", "system", "recovered", "median s", "p95 s", "agree", "import", "init", "load"]
    head += ["first step", "steps lost", "steps/s after", "of ideal", "pause", "load average"]
    text = (
        "From the fault to the first step of all ranks after it; seconds, medians of the runs that "
        f"recovered within {_WITHIN_S:.0f} s. A step takes 0.1 s, the state is 100 MiB, each rank "
        "one core of a machine of 2 that others use as well; raw runs in results/elastic.json. "
        "Growing counts from the start of another launcher, which imports torch while the others "
        "train on. Pause: what training stood still by the controller's account, where a script "
        "tells of its steps.\n\n"
    )
    publish("elastic", command(), text + table(head, rows), data)


def report_peers(data: dict[str, Any]) -> None:
    """Write the table of six faults beside others."""
    rows = []
    for words, name in PEERS.items():
        row: list[Any] = [words]
        for system in ALL:
            runs = data.get(f"{name} {system}", [])
            totals = [run["total"] for run in runs if run.get("total") is not None]
            shown = f"{statistics.median(totals):.1f}" if totals else "not"
            row.append(f"{shown} ({len(totals)}/{len(runs)})" if runs else "–")
        runs = [run for system in ALL for run in data.get(f"{name} {system}", [])]
        loads = [run["load_avg"] for run in runs if "load_avg" in run]
        row.append(f"{min(loads):.0f} to {max(loads):.0f}" if loads else "–")
        rows.append(row)
    text = (
        f"Seconds from the fault to the first step of those that are to train after it, medians; "
        f"in brackets how many of how many runs came to it within {_WITHIN_S:.0f} s. Two nodes of "
        f"one rank, steps of 0.1 s, a state of 100 MiB, on a machine that others use as well: see "
        f"its load average. A hang: torchrun and torchft have a time-out of 10 s, "
        f"NVRx heartbeats of 5 s, ckptd nothing set; ckptd-session has no watch here. The "
        f"controller of torchrun and NVRx is the launcher that serves their store, killed alone, "
        f"torchft's the lighthouse; counted is the longest pause in {_STANDS_S:.0f} s. A node is "
        f"pre-empted by SIGTERM to its launcher. torchft's ranks that are left go on with the next "
        f"step; where two are to train, it counts from the first step of both.\n\n"
    )
    how = "BENCH_PEERS=DIR python bench/elastic.py --peers"
    publish("elastic_peers", how, text + table(["fault", *ALL, "load average"], rows), data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--system", choices=SYSTEMS, action="append")
    parser.add_argument("--reps", type=int, default=0, help="default: 20 of ckptd, 5 of torchrun")
    parser.add_argument("--peers", action="store_true", help="six faults beside other systems")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    options = parser.parse_args()
    # So that a time-out around this leaves nothing behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    data = {} if options.peers else _kept()
    if options.peers:
        options.case = options.case or list(PEERS.values())
        options.system = options.system or ALL
    pairs = [
        (name, system)
        for name in options.case or CASES
        for system in options.system or SYSTEMS
        if system in CASES[name].systems
    ]
    found: dict[str, list[Any]] = {}
    for rep in range(options.reps or 20):
        for name, system in pairs:
            if not options.reps and rep >= 5 and system in STOCK:
                continue
            run = once(name, system)
            found.setdefault(f"{name} {system}", []).append(run)
            print(f"{rep + 1} {name} {system}: {run}", file=sys.stderr, flush=True)
            if not options.dry:
                report_peers(found) if options.peers else report(data | found)


if __name__ == "__main__":
    main()
