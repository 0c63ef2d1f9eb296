"""Picture of what saves and loads cost as tensors and ranks grow, from tables that were measured.

    python bench/growth.py      # after `python bench/all.py states many scale`

Left: CPU seconds of all processes for 1,000 to 100,000 tensors of 64 bytes, of ckptd and its peers.
Right: those of rank 0 for a save of 16 to 16,384 ranks, with a real TCPStore.
"""

from __future__ import annotations

import json
from typing import Any

import common
import states

PICTURE = common.HERE.parent / "docs" / "guide" / "growth.svg"
COLOURS = {"ckptd": "#0072b2", "torch.save": "#009e73", "DCP save": "#d55e00"}
SAVES = {"first_cpu_s": ("first save", ":"), "cpu_s": ("later save", "--")}
LINES = {**SAVES, "new_cpu_s": ("load, new process", "-")}
LAYOUTS = {"fsdp2": "#0072b2", "tp.pp.fsdp": "#cc79a7"}


def result(name: str) -> dict[str, Any]:
    """Return a table that was measured, with where it comes from."""
    found: dict[str, Any] = json.loads((common.RESULTS / f"{name}.json").read_text())
    return found


def lines_by_tensors(axes: Any, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Draw a line for each engine and each thing that it does."""
    for engine, colour in COLOURS.items():
        for key, (what, line) in LINES.items():
            points = [
                (count, common.median(runs[f"{engine}: {state}"], key))
                for state, (count, _) in states.STATES.items()
                if state.endswith("tensors") and f"{engine}: {state}" in runs
            ]
            label = f"{engine}: {what}"
            axes.plot(*zip(*points, strict=True), line, marker=".", color=colour, label=label)
    axes.set_xlabel("tensors of 64 bytes")
    axes.set_ylabel("CPU of all processes (s)")


def lines_by_ranks(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draw a line for each layout and each kind of save."""
    for layout, colour in LAYOUTS.items():
        for what, line in SAVES.values():
            wanted = {"save": what.split()[0], "layout": layout, "board": "TCPStore"}
            points = [(r["ranks"], r["total s"]) for r in rows if wanted.items() <= r.items()]
            label = f"{what}, {layout}"
            axes.plot(*zip(*points, strict=True), line, marker=".", color=colour, label=label)
    axes.set_xlabel("ranks")
    axes.set_ylabel("CPU of rank 0 (s)")


def main() -> None:
    """Draw both halves."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "ckptd"  # the same file for the same figures
    figure = Figure(figsize=(9, 5), layout="constrained")
    figure.patch.set_facecolor("white")  # also where the page is dark
    FigureCanvasSVG(figure)
    left, right = figure.subplots(1, 2)
    few, many, by_ranks = (result(name) for name in ("states", "many", "scale"))
    lines_by_tensors(left, few["data"]["runs"] | many["data"]["runs"])
    lines_by_ranks(right, by_ranks["data"]["pays"])
    for axes, found in ((left, many), (right, by_ranks)):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.set_title(f"commit {found['commit'][:9]}, {found['date']}", fontsize=9)
        axes.legend(
            fontsize=8, handlelength=3, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2
        )
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
