"""A simulated month of large jobs, with published failure rates: where the time goes.

    python bench/elastic_month.py            # simulate; table, results, docs/guide/goodput.svg
    python bench/elastic_month.py --draw     # draw the last results again

See `elastic_model.py` for what is real and what is assumed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from typing import Any

import common

PICTURE = common.HERE.parent / "docs" / "guide" / "goodput.svg"
GUIDE = common.HERE.parent / "docs" / "guide" / "goodput.md"
RANKS = (512, 1024, 2048, 4096, 9984, 16384, 32768)
SEEDS = 8
SHOWN = 9984
"""Ranks of the first table; the nearest that was simulated."""
_T95 = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36, 10: 2.26}
COLOURS = ("#999999", "#000000", "#d55e00", "#0072b2", "#009e73")


def interval(samples: list[float]) -> tuple[float, float]:
    """Return the mean, and half of its 95 % confidence interval."""
    mean = statistics.fmean(samples)
    if len(samples) < 2:
        return mean, 0.0
    error = statistics.stdev(samples) / math.sqrt(len(samples))
    return mean, _T95.get(len(samples), 2.0) * error


def simulate(ranks: tuple[int, ...], seeds: int) -> list[dict[str, Any]]:
    from elastic_model import SYSTEMS, month

    rows = []
    for size in ranks:
        for system in SYSTEMS:
            began = time.process_time()
            runs = [month(system, size, seed) for seed in range(seeds)]
            kinds = sorted({k for run in runs for k in run.seconds})
            rows.append(
                {
                    "system": system.name,
                    "ranks": size,
                    "goodput": [run.goodput for run in runs],
                    "faults": [sum(run.faults.values()) for run in runs],
                    "interval_s": runs[0].interval_s,
                    "recovery_s": statistics.fmean([r for run in runs for r in run.recoveries]),
                    "share": {
                        k: statistics.fmean(
                            [r.seconds.get(k, 0.0) / sum(r.seconds.values()) for r in runs]
                        )
                        for k in kinds
                    },
                    "levels": {
                        str(level): sum(run.levels[level] for run in runs)
                        for level in sorted({k for run in runs for k in run.levels})
                    },
                    "cpu_s": time.process_time() - began,
                }
            )
            print(size, system.name, *interval(rows[-1]["goodput"]), flush=True)
    return rows


def tables(rows: list[dict[str, Any]]) -> str:
    head = [
        "with",
        "goodput %",
        "±",
        "saving %",
        "lost %",
        "restarting %",
        "a restart s",
        "save every s",
    ]
    shown = []
    size = min((r["ranks"] for r in rows), key=lambda ranks: abs(ranks - SHOWN))
    for row in (r for r in rows if r["ranks"] == size):
        mean, error = interval(row["goodput"])
        share = row["share"]
        parts = [100 * share.get(k, 0.0) for k in ("saving", "lost")]
        waits = 100 * (share.get("restarting", 0.0) + share.get("waiting", 0.0))
        shown.append(
            [
                row["system"],
                100 * mean,
                100 * error,
                *parts,
                waits,
                row["recovery_s"],
                row["interval_s"],
            ]
        )
    names = list(dict.fromkeys(r["system"] for r in rows))
    every = list(dict.fromkeys(r["ranks"] for r in rows))
    by = {(r["system"], r["ranks"]): interval(r["goodput"]) for r in rows}
    curve = [
        [f"{r:,}", *[f"{100 * by[n, r][0]:.2f} ± {100 * by[n, r][1]:.2f}" for n in names]]
        for r in every
    ]
    seeds = len(rows[0]["goodput"])
    return (
        f"{size:,} ranks, a month, {seeds} runs (seeds 0 to {seeds - 1}); ± is half of the 95 % "
        f"confidence interval of the mean.\n\n{common.table(head, shown)}\n\n"
        f"Goodput in % by ranks:\n\n{common.table(['ranks', *names], curve)}"
    )


def assumptions() -> str:
    from elastic_model import ASSUMED, KINDS

    rows = [[m, f"{v:.3g}", source] for v, m, source in ASSUMED.values()]
    kinds = [[k, count, text] for k, (count, text) in KINDS.items()]
    return (
        common.table(["kind", "of 419", "causes, and what they do"], kinds)
        + "\n\n"
        + common.table(["what", "value", "source"], rows)
    )


def write_guide(text: str) -> None:
    """Put the tables between their marks in the guide."""
    page = GUIDE.read_text()
    for name, body in (("results", text), ("assumptions", assumptions())):
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        head, _, rest = page.partition(begin)
        page = f"{head}{begin}\n\n{body}\n\n{end}{rest.partition(end)[2]}"
    GUIDE.write_text(page)


def draw(rows: list[dict[str, Any]]) -> None:
    """Write the picture that the guide shows."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "ckptd"  # the same file for the same figures
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    figure.patch.set_facecolor("white")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    names = list(dict.fromkeys(r["system"] for r in rows))
    for name, colour in zip(names, COLOURS, strict=True):
        mine = [r for r in rows if r["system"] == name]
        spread = [interval(r["goodput"]) for r in mine]
        axes.errorbar(
            [r["ranks"] for r in mine],
            [100 * mean for mean, _ in spread],
            yerr=[100 * error for _, error in spread],
            color=colour,
            marker="o",
            markersize=4,
            capsize=3,
            label=name,
        )
    axes.set_xscale("log", base=2)
    sizes = sorted({r["ranks"] for r in rows})
    axes.set_xticks(sizes, [f"{s:,}" for s in sizes])
    axes.minorticks_off()
    axes.set_xlabel("ranks")
    axes.set_ylabel("goodput (%)")
    axes.set_title("A simulated month with Llama 3's failure rate", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--ranks", type=int, nargs="*", default=list(RANKS))
    options = parser.parse_args()
    file = common.RESULTS / "elastic_month.json"
    if options.draw:
        rows = json.loads(file.read_text())["data"]
    else:
        rows = simulate(tuple(options.ranks), options.seeds)
        common.publish("elastic_month", "python bench/elastic_month.py", tables(rows), rows)
    write_guide(tables(rows))
    draw(rows)


if __name__ == "__main__":
    main()
