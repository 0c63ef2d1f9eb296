"""Cost of a save for a training loop on each tier, and how often to save to which.

    python bench/tiers.py            # measure, write the table and docs/guide/tiers.svg
    python bench/tiers.py --draw     # draw the last results again

Two ranks train alike, a core each, as two nodes of one machine (``CKPTD_NODE``), so the peer tier
goes over loopback. Blocks of steps with saves and without alternate. What a save costs is the
difference in time of processors, of the rank and of the process that writes for it: what the loop
loses where no core is idle, and an upper bound elsewhere; unlike the time that passes it hardly
depends on what else the machine does. The curves are Daly's model (`ckptd.checkpoint.root.auto`)
with that cost, for what kills a process, a node's processes, a node and the job; how often that
happens is an assumption, in `KINDS`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from typing import Any

import common

PICTURE = common.HERE.parent / "docs" / "guide" / "tiers.svg"
CASES = ("memory", "peer", "local", "root")
WIDTH, LAYERS, BATCH = 1024, 14, 64
PAIRS, BLOCK, EVERY = 5, 8, 4
ALONE = 5
KINDS = {
    "a process dies: memory": ("memory", 6.0),
    "a node's processes are killed: local": ("local", 24.0),
    "a node is lost: peer": ("peer", 24.0),
    "the whole job is lost: root": ("root", 30 * 24.0),
}
"""Failures, with the tier that brings the state back, and the hours between two of the kind."""


class Loop:
    """A network whose state is `LAYERS` square matrices and two moments of each."""

    def __init__(self) -> None:
        import torch

        torch.manual_seed(0)
        layers: list[Any] = []
        for _ in range(LAYERS):
            layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        self.input = torch.randn(BATCH, WIDTH)
        self.state = {"model": self.model, "optim": self.optimizer}

    def step(self) -> None:
        loss = (self.model(self.input) - self.input).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def cpu_s(pid: int | None) -> float:
    """Return the time of processors that this process and another have used."""
    import psutil

    own = time.process_time()
    if pid is None or pid < 0:
        return own
    used = psutil.Process(pid).cpu_times()
    return own + used.user + used.system


def rank(folder: str, case: str) -> dict[str, Any]:
    """Measure one tier on one rank."""
    import torch
    import torch.distributed as dist

    import ckptd

    torch.set_num_threads(1)
    os.environ["CKPTD_NODE"] = f"node-{dist.get_rank()}"
    tiers = {
        "memory": [ckptd.Memory(every=1, agent_ttl_s=1)],
        "peer": [ckptd.Peer(every=1, agent_ttl_s=1)],
        "local": [ckptd.Local(f"{folder}/near-{dist.get_rank()}", every=1)],
        "root": [],
    }[case]
    every = 1 if case == "root" else 1 << 30
    loop = Loop()
    costs, alone, calls, steps = [], [], [], []
    with ckptd.Checkpointer(f"{folder}/root", every=every, tiers=tiers, keep=2) as ck:
        loop.step()
        step = 0
        ck.save(step, loop.state, force=True)
        ck.wait()  # the agent is there
        for pair in range(PAIRS + 1):
            took = []
            for save in (False, True):
                dist.barrier()
                begin, used = time.perf_counter(), cpu_s(ck.writer_pid)
                for i in range(BLOCK):
                    loop.step()
                    step += 1
                    if save and i % EVERY == 0:
                        start = time.perf_counter()
                        handle = ck.save(step, loop.state)
                        calls.append(time.perf_counter() - start)
                if not save:
                    steps.append((time.perf_counter() - begin) / BLOCK)
                ck.wait()
                took.append(cpu_s(ck.writer_pid) - used)
            costs.append((took[1] - took[0]) / (BLOCK // EVERY))
            if pair == 0:  # the first saves touch fresh memory
                costs.clear()
                calls.clear()
        for _ in range(ALONE):
            dist.barrier()
            loop.step()
            step += 1
            start = time.perf_counter()
            handle = ck.save(step, loop.state)
            assert handle is not None
            handle.durable(tier=None if case == "root" else case)
            alone.append(time.perf_counter() - start)
    return {
        "cost_s": statistics.median(costs),
        "costs": costs,
        "call_s": statistics.median(calls),
        "complete_s": statistics.median(alone),
        "step_s": statistics.median(steps),
        "bytes": 3 * 4 * sum(p.numel() for p in loop.model.parameters()) // dist.get_world_size(),
    }


def one(folder: str, case: str) -> dict[str, Any]:
    """Measure one tier; the slower rank counts."""
    from ckptd.testing.ranks import run_ranks

    common.remove(folder)
    common.settle()
    with tempfile.TemporaryDirectory(prefix="ckptd-run-") as run:
        env = {"CKPTD_RUN_DIR": run, "OMP_NUM_THREADS": "1"}
        ranks = run_ranks(2, rank, folder, case, deadline_s=500, env=env)
    common.remove(folder)
    worst = max(ranks, key=lambda r: r["cost_s"])
    return worst | {"complete_s": max(r["complete_s"] for r in ranks)}


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--draw", action="store_true")
    if parser.parse_known_args()[0].draw:
        draw(json.loads((common.RESULTS / "tiers.json").read_text())["data"])
        return
    options = common.arguments(__doc__)
    if options.case:
        print(json.dumps(one(f"{options.dir}/case", options.case)))
        return
    runs: dict[str, list[Any]] = {case: [] for case in CASES}
    for _ in range(options.reps):
        for case, found in runs.items():
            arguments = ["--case", case, "--dir", options.dir]
            found.append(common.in_fresh_process(__file__, arguments))
    report(runs)


def report(runs: dict[str, list[Any]]) -> None:
    from ckptd.checkpoint.root.auto import Auto, Cost, Mtbf, choose, waste

    figures = ("cost_s", "call_s", "complete_s", "step_s", "bytes")
    data = {case: {k: common.median(found, k) for k in figures} for case, found in runs.items()}
    for case, found in runs.items():
        data[case]["costs"] = [c for one in found for c in one["costs"]]
    step_s = statistics.median(one["step_s"] for one in data.values())
    text = (
        f"Two ranks of {data['root']['bytes'] / 1e6:.0f} MB each, a core each, steps of"
        f" {step_s:.2f} s; medians of {len(runs['root'])} runs.\n\n"
    )
    rows = []
    for case, one in data.items():
        low, _, high = statistics.quantiles(one["costs"], n=4)
        quarters = f"{low:.2f} to {high:.2f}"
        rows.append([case, one["call_s"], one["cost_s"], quarters, one["complete_s"]])
    head = ["tier", "in the call s", "a save costs s of a core", "quarters", "complete after s"]
    text += common.table(head, rows)
    rows = []
    for name, (case, hours) in KINDS.items():
        mtbf = Mtbf(3600 * hours, name)
        row: list[Any] = [name, f"{hours:g} h"]
        for tier in (case, "root"):
            cost = _cost(Cost, data[tier])
            best = choose(Auto(max_minutes=1440), cost, mtbf)
            row += [f"{best.interval_s:.0f} s", f"{100 * best.waste:.3f} %"]
        cost = _cost(Cost, data["root"])
        row.append(f"{100 * waste(1800.0, cost.total_s, cost.durable_s, mtbf.seconds):.2f} %")
        rows.append(row)
    head = ["what happens: what brings it back", "every", "best interval", "lost"]
    head += ["the root alone: interval", "lost", "the root every 30 min"]
    text += "\n\n" + common.table(head, rows)
    common.publish("tiers", "python bench/tiers.py", text, data)
    draw(data)


def _cost(kind: Any, one: dict[str, float]) -> Any:
    """Return what was measured as the model wants it; noise may make a save cost nothing."""
    blocked = max(0.0, one["call_s"])
    slower = max(0.0, one["cost_s"] - one["call_s"])
    return kind(blocked_s=blocked, inflation_s=slower, durable_s=one["complete_s"])


def draw(data: dict[str, Any]) -> None:
    """Write the picture that the guide shows."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    from ckptd.checkpoint.root.auto import Auto, Cost, Mtbf, choose, waste

    matplotlib.rcParams["svg.hashsalt"] = "ckptd"  # the same file for the same figures
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    figure.patch.set_facecolor("white")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    colours = ("#0072b2", "#009e73", "#cc79a7", "#d55e00")
    for (name, (case, hours)), colour in zip(KINDS.items(), colours, strict=True):
        cost, mtbf = _cost(Cost, data[case]), Mtbf(3600 * hours, name)
        low, high = min(one["complete_s"] for one in data.values()) / 2, 6 * 3600.0
        grid = [low * (high / low) ** (i / 300) for i in range(301)]
        grid = [t for t in grid if t >= cost.durable_s]
        lost = [100 * waste(t, cost.total_s, cost.durable_s, mtbf.seconds) for t in grid]
        axes.plot(grid, lost, color=colour, label=f"{name}, once in {hours:g} h")
        best = choose(Auto(max_minutes=1440), cost, mtbf)
        axes.plot([best.interval_s], [100 * best.waste], "o", color=colour, markersize=8)
        axes.annotate(
            f"{best.interval_s:.0f} s",
            (best.interval_s, 100 * best.waste),
            xytext=(0, -14),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=colour,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(0.01, 100)
    axes.set_xlabel("time between two saves to the tier (s)")
    axes.set_ylabel("time lost (%)")
    axes.set_title(
        "What each failure costs, saves included, by the tier that answers it", fontsize=11
    )
    figure.legend(fontsize=8, loc="outside lower center", ncols=2)
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
