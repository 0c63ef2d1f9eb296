"""The picture of the elastic job: its steps over time, by generation, and its losses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from ckptd.train.demo.elasticjob import TrainedRow
from ckptd.train.demo.report import Elastic

__all__ = ["draw_elastic"]

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


def draw_elastic(path: Path, told: Elastic, rows: Sequence[TrainedRow]) -> None:
    """Write the picture as PNG.

    Parameters
    ----------
    rows
        Steps that the job trained.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    begun = min(row.at for row in rows)
    for number, life in enumerate(told.lives):
        here = [row for row in rows if row.generation == life.generation]
        colour = _COLOURS[number % len(_COLOURS)]
        times = [row.at - begun for row in here]
        label = f"generation {life.generation}: {life.ranks} ranks, from step {life.resumed}"
        above.plot(times, [row.step for row in here], color=colour, label=label, linewidth=2)
        below.plot(times, [row.loss for row in here], color=colour, linewidth=1)
    for (before, after), deed in zip(pairwise(told.lives), told.deeds, strict=False):
        end = before.last_at - begun
        for axes in (above, below):
            axes.axvspan(end, after.first_at - begun, color="0.9")
        text = f"{deed.what}\n{deed.after_s:.1f} s, {after.lost} steps again"
        above.annotate(
            text, (end, before.last), xytext=(6, -22), textcoords="offset points", fontsize=8
        )
    above.set_ylabel("step")
    above.legend(loc="upper left", fontsize=8)
    above.set_title(f"Nodes go and come back; losses as uninterrupted within {told.gap:.0e}")
    below.set_ylabel("loss (nats a byte)")
    below.set_xlabel("seconds")
    figure.savefig(path, dpi=120)
