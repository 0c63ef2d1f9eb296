"""Whom the monitor names when real ranks fail, and after how long.

    python bench/faults.py                        # 5 seeds of each kind; table, results, picture
    python bench/faults.py --out FILE...   # publish what `python -m tests.monitor.faults.run` wrote

Four gloo ranks, the real agent and daemon, a fault at a random rank, step and place in the step;
what is planted and what counts as right: `tests.monitor.faults.kinds`. Times are from the fault to
the incident, of hangs less the floor. Beside the ranks two processes compute.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import common
import msgspec
import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from tests.monitor.faults.judge import NOTHING, Outcome, table  # noqa: E402
from tests.monitor.faults.kinds import KINDS  # noqa: E402

PICTURE = ROOT / "docs/guide/faults.svg"
LATENCY = ("crash", "mismatch", "non-communication hang", "deadlock", "communication hang")


class Run(msgspec.Struct):
    """Output of ``python -m tests.monitor.faults.run --out``."""

    summary: dict[str, Any]
    outcomes: list[Outcome]


def measure(seeds: int, first: int) -> Path:
    """Run the campaign; return its output."""
    out = Path(tempfile.mkdtemp(prefix="ckptd-bench-")) / "faults.json"
    command = [sys.executable, "-m", "tests.monitor.faults.run", "--seeds", str(seeds)]
    command += ["--first", str(first), "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=False)  # 1 says that some case was not right
    return out


def text(outcomes: list[Outcome], floor: float, load: int) -> str:
    faults = [o for o in outcomes if KINDS[o.case.kind].wanted]
    clean = len(outcomes) - len(faults)
    both = sum(o.right_class and o.right_culprit for o in faults)
    alarms = sum(o.false_alarms for o in outcomes)
    replayed = sum(o.replay is not None for o in outcomes)
    same = sum(
        o.replay == tuple(" ".join([h.kind, *h.names]) for h in o.heard)
        for o in outcomes
        if o.replay is not None
    )
    said = (
        f"Hang floor {floor:g} s, {load} computing processes beside; seeds "
        f"{min(o.case.seed for o in outcomes)} to {max(o.case.seed for o in outcomes)}. "
        f"{len(faults)} faults: class right in {sum(o.right_class for o in faults)}, class and "
        f"culprit in {both}; {clean} cases without a fault; {alarms} false alarms. Recordings say "
        f"the same when they are replayed: {same} of {replayed}."
    )
    lines = [
        said,
        "",
        *pipes(table(outcomes)),
        "",
        *latencies(outcomes),
    ]
    return "\n".join(lines)


def pipes(lines: list[str]) -> list[str]:
    return [f"| {' | '.join(line.split('|'))} |" for line in lines]


def latencies(outcomes: list[Outcome]) -> list[str]:
    """Return the table of times by class."""
    lines = ["| class | cases | p50 (s) | p95 (s) | max (s) |", "|---|---|---|---|---|"]
    for kind, seconds in by_class(outcomes).items():
        p50, p95 = np.percentile(seconds, [50, 95])
        lines.append(f"| {kind} | {len(seconds)} | {p50:.2f} | {p95:.2f} | {max(seconds):.2f} |")
    return lines


def by_class(outcomes: list[Outcome]) -> dict[str, list[float]]:
    out: dict[str, list[float]] = {}
    for o in outcomes:
        if o.right_class and o.latency_s is not None:
            out.setdefault(o.verdict, []).append(o.latency_s)
    return dict(sorted(out.items(), key=lambda item: float(np.median(item[1]))))


def draw(outcomes: list[Outcome]) -> None:
    """Write the picture that the guide shows: the confusion matrix, and the times."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "ckptd"  # the same file for the same figures
    figure = Figure(figsize=(12, 6), layout="constrained")
    figure.patch.set_facecolor("white")
    FigureCanvasSVG(figure)
    matrix, times = figure.subplots(1, 2, width_ratios=(1.4, 1))
    confusion(matrix, outcomes)
    for kind, seconds in by_class(outcomes).items():
        values = np.sort(seconds)
        share = 100 * np.arange(1, len(values) + 1) / len(values)
        times.step(values, share, where="post", label=kind)
    times.set_xlabel("seconds from the fault (hangs: from the end of the floor)")
    times.set_ylabel("found (%)")
    times.set_title("How soon", fontsize=11)
    times.legend(fontsize=8, loc="lower right")
    figure.savefig(PICTURE, metadata={"Date": None})


def confusion(axes: Any, outcomes: list[Outcome]) -> None:
    kinds = [k for k in KINDS if any(o.case.kind == k for o in outcomes)]
    said = Counter((o.case.kind, o.verdict) for o in outcomes)
    classes = [*sorted({v for _, v in said} - {NOTHING}), NOTHING]
    grid = np.array([[said[k, c] for c in classes] for k in kinds], float)
    axes.imshow(grid / grid.sum(1, keepdims=True), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for row, column in zip(*np.nonzero(grid), strict=True):
        dark = grid[row, column] / grid[row].sum() > 0.5
        axes.text(
            column,
            row,
            f"{int(grid[row, column])}",
            ha="center",
            va="center",
            color="white" if dark else "black",
            fontsize=8,
        )
    axes.set_xticks(range(len(classes)), classes, rotation=30, ha="right", fontsize=8)
    axes.set_yticks(range(len(kinds)), kinds, fontsize=8)
    axes.set_ylabel("what was done")
    axes.set_title("What was said first", fontsize=11)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=11)
    parser.add_argument("--out", type=Path, nargs="+", help="outputs of a campaign that has run")
    options = parser.parse_args()
    paths = options.out or [measure(options.seeds, options.first)]
    runs = [msgspec.json.decode(path.read_bytes(), type=Run) for path in paths]
    outcomes = [o for run in runs for o in run.outcomes]
    said = runs[0].summary
    rows = [
        {
            "kind": o.case.kind,
            "seed": o.case.seed,
            "loop": o.case.loop,
            "said": o.verdict,
            "right": o.right,
            "latency s": o.latency_s,
        }
        for o in outcomes
    ]
    command = f"python bench/faults.py --seeds {options.seeds} --first {options.first}"
    common.publish("faults", command, text(outcomes, said["floor s"], said["load"]), rows)
    draw(outcomes)


if __name__ == "__main__":
    main()
