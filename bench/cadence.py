"""Cost of a save for a training loop, and the share of time that is lost for each interval.

    python bench/cadence.py            # measure, write the table and docs/guide/cadence.svg
    python bench/cadence.py --draw     # draw the last results again

A network trains on one core, with saves every so many steps and, in turn, without any; `Auto`
measures one save in the same loop. The curves are Daly's model with that cost and three failure
rates; the dots are what the loop really lost, which is all that is lost while nothing fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import common
import msgspec

PICTURE = common.HERE.parent / "docs" / "guide" / "cadence.svg"
EVERY = (1, 2, 4, 8)
PAIRS, BLOCK = 8, 8
WIDTH, LAYERS, BATCH = 1024, 14, 384
WARM = 6
HOURS = {
    "2048 nodes (3.1 h)": 54 * 24 / 419,
    "a spot machine (30 min)": 0.5,
    "a bad day (5 min)": 1 / 12,
}


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


def lost(loop: Loop, folder: str, every: int) -> dict[str, Any]:
    """Train a few steps without saves and as many with, in turn, and compare each such pair."""
    import ckptd

    common.remove(folder)
    common.settle()
    shares, seconds = [], []
    with ckptd.Checkpointer(folder, every=every, keep=2) as ck:
        step = 0
        for _ in range(PAIRS + 1):
            took = []
            for save in (False, True):
                start = time.perf_counter()
                for _ in range(BLOCK):
                    loop.step()
                    step += save
                    if save:
                        ck.save(step, loop.state)
                took.append(time.perf_counter() - start)
                ck.wait()
            shares.append(1.0 - took[0] / took[1])
            seconds.append(took[1] / BLOCK * every)
    # The first saves touch fresh memory.
    return {"interval_s": statistics.median(seconds[1:]), "shares": shares[1:]}


def cost(loop: Loop, folder: str, saves: int) -> dict[str, float]:
    """Return what `Auto` measures, with a failure rate at which it saves every few seconds."""
    import ckptd

    common.remove(folder)
    common.settle()
    handles = []
    with ckptd.Checkpointer(folder, every=ckptd.Auto(mtbf_hours=0.02), keep=2) as ck:
        step = 0
        while len(handles) < saves:
            step += 1
            loop.step()
            if handle := ck.save(step, loop.state):
                handles.append(handle)
        handles[-1].durable()
        ck.save(step + 1, loop.state)
        choice = ck.cadence
    assert choice is not None
    return msgspec.structs.asdict(choice.cost)


def one(folder: str) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    loop = Loop()
    for _ in range(WARM):
        loop.step()
    start = time.perf_counter()
    for _ in range(WARM):
        loop.step()
    step_s = (time.perf_counter() - start) / WARM
    found = {
        "step_s": step_s,
        "bytes": 3 * 4 * sum(p.numel() for p in loop.model.parameters()),
        "cost": cost(loop, folder, 7),
        "every": {n: lost(loop, folder, n) for n in EVERY},
    }
    common.remove(folder)
    return found


def main() -> None:
    parser_options = argparse.ArgumentParser(add_help=False)
    parser_options.add_argument("--draw", action="store_true")
    draw_only, _ = parser_options.parse_known_args()
    if draw_only.draw:
        draw(json.loads((common.RESULTS / "cadence.json").read_text())["data"])
        return
    options = common.arguments(__doc__)
    folder = f"{options.dir}/case"
    if options.case:
        Path(folder).mkdir(parents=True, exist_ok=True)
        print(json.dumps(one(folder)))
        return
    case = ["--case", "loop", "--dir", options.dir]
    runs = [common.in_fresh_process(__file__, case) for _ in range(options.reps)]
    report(runs)


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over the repetitions."""
    return {
        "step_s": common.median(runs, "step_s"),
        "bytes": runs[0]["bytes"],
        "cost": {k: statistics.median(r["cost"][k] for r in runs) for k in runs[0]["cost"]},
        "every": {n: joined([r["every"][n] for r in runs]) for n in runs[0]["every"]},
        "runs": runs,
    }


def joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median interval, and median and quarters of what all pairs lost."""
    shares = [share for one in found for share in one["shares"]]
    interval = statistics.median(one["interval_s"] for one in found)
    return {"interval_s": interval, "lost": statistics.quantiles(shares, n=4)}


def report(runs: list[dict[str, Any]]) -> None:
    from ckptd.checkpoint.root.auto import Auto, Cost, Mtbf, choose

    found = middle(runs)
    measured = Cost(**found["cost"])
    text = (
        f"A step of {found['step_s']:.2f} s on one core, {found['bytes'] / 1e6:.0f} MB of state;"
        f" medians of {len(runs)} runs. A save costs {measured.blocked_s:.3f} s in the call and"
        f" {measured.inflation_s:.3f} s in slower steps, and is durable after"
        f" {measured.durable_s:.2f} s.\n\n"
    )
    rows = []
    for n, row in found["every"].items():
        low, half, high = (100 * q for q in row["lost"])
        model = 100 * measured.total_s / row["interval_s"]
        rows.append([n, row["interval_s"], half, f"{low:.1f} to {high:.1f}", model])
    head = ["every steps", "interval s", "lost %, median", "lost %, quarters", "cost / interval %"]
    text += common.table(head, rows)
    rows = []
    for name, hours in HOURS.items():
        chosen = choose(Auto(), measured, Mtbf(3600 * hours, name))
        rows.append([name, chosen.optimum_s, chosen.interval_s, 100 * chosen.waste])
    head = ["a failure every", "optimum s", "chosen s", "expected waste %"]
    text += "\n\n" + common.table(head, rows)
    common.publish("cadence", "python bench/cadence.py", text, found)
    draw(found)


def draw(found: dict[str, Any]) -> None:
    """Write the picture that the guide shows."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    from ckptd.checkpoint.root.auto import Auto, Cost, Mtbf, choose, waste

    matplotlib.rcParams["svg.hashsalt"] = "ckptd"  # the same file for the same figures
    measured = Cost(**found["cost"])
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    figure.patch.set_facecolor("white")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    low, high = min(measured.durable_s, found["step_s"]) / 2, 3600.0
    grid = [low * (high / low) ** (i / 300) for i in range(301)]
    for (name, hours), colour in zip(HOURS.items(), ("#0072b2", "#d55e00", "#cc79a7"), strict=True):
        lost_by = [100 * waste(t, measured.total_s, measured.durable_s, 3600 * hours) for t in grid]
        axes.plot(grid, lost_by, color=colour, label=f"failures: {name}")
        chosen = choose(Auto(), measured, Mtbf(3600 * hours, name))
        axes.plot([chosen.interval_s], [100 * chosen.waste], "o", color=colour, markersize=9)
        axes.annotate(
            f"{chosen.interval_s:.0f} s: {100 * chosen.waste:.2g} %",
            (chosen.interval_s, 100 * chosen.waste),
            xytext=(0, 9),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=colour,
        )
    rows = list(found["every"].values())
    floor = 0.05  # what the logarithmic axis shows for nothing
    low_half_high = [[max(floor, 100 * q) for q in r["lost"]] for r in rows]
    axes.errorbar(
        [r["interval_s"] for r in rows],
        [half for _, half, _ in low_half_high],
        yerr=[
            [half - lower for lower, half, _ in low_half_high],
            [upper - half for _, half, upper in low_half_high],
        ],
        fmt="kx",
        elinewidth=1,
        capsize=3,
        label="measured in the loop, without failures: median, quarters",
    )
    axes.axvspan(low, measured.durable_s, color="0.9", label="shorter than a save takes")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(floor, 100)
    axes.set_xlim(low, high)
    axes.set_xlabel("time between two saves (s)")
    axes.set_ylabel("time lost (%)")
    axes.set_title(
        f"{found['bytes'] / 1e6:.0f} MB of state: a save costs {1000 * measured.total_s:.0f} ms,"
        f" is durable after {measured.durable_s:.1f} s",
        fontsize=11,
    )
    figure.legend(fontsize=8, loc="outside lower center", ncols=2)
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
