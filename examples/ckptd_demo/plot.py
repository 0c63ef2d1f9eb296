"""The plots of the demo: losses of the lives of the job, and of an elastic job."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ckptd_demo.elasticjob import TrainedRow
from ckptd_demo.judge import GAP_LIMIT, gaps
from ckptd_demo.policy import PolicyRows
from ckptd_demo.report import Elastic, Policy
from ckptd_demo.spec import StepRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Curve", "draw", "draw_elastic", "draw_policy"]

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_SMALLEST_GAP = 1e-9  # what the logarithmic axis shows for two equal losses


class Curve(NamedTuple):
    """Losses of one life; `kept` is its last step that later lives built on."""

    label: str
    rows: Sequence[StepRow]
    kept: int


def draw(path: Path, reference: Sequence[StepRow], curves: Sequence[Curve], killed: int) -> None:
    """Write the picture as PNG.

    Parameters
    ----------
    killed
        Step whose save the kill interrupted.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    above.plot(
        [row.step for row in reference],
        [row.loss for row in reference],
        color="0.75",
        linewidth=5,
        label="never interrupted",
    )
    for curve, colour in zip(curves, _COLOURS, strict=False):
        _draw_curve(above, below, curve, colour, reference)
    _mark(above, below, curves, killed)
    above.set_ylabel("loss (nats a byte)")
    above.legend(loc="upper right")
    above.set_title("Saved, killed and resumed on other layouts, against a run never interrupted")
    below.axhline(GAP_LIMIT, color="0.4", linestyle="--", linewidth=1)
    below.annotate(f"limit {GAP_LIMIT:g}", (1, GAP_LIMIT), va="bottom", fontsize=8, color="0.3")
    below.set_yscale("log")
    below.set_ylim(_SMALLEST_GAP / 2, GAP_LIMIT * 5)
    below.set_ylabel(f"relative gap (none: {_SMALLEST_GAP:g})")
    below.set_xlabel("step")
    figure.savefig(path, dpi=120)


def _draw_curve(
    above: Axes, below: Axes, curve: Curve, colour: str, reference: Sequence[StepRow]
) -> None:
    kept = [row for row in curve.rows if row.step <= curve.kept]
    lost = [row for row in curve.rows if row.step >= curve.kept]
    above.plot([r.step for r in kept], [r.loss for r in kept], color=colour, label=curve.label)
    if len(lost) > 1:
        above.plot(
            [row.step for row in lost],
            [row.loss for row in lost],
            color=colour,
            linestyle=":",
            linewidth=2,
            zorder=5,  # above the life that trained these steps again
        )
    found = gaps(curve.rows, reference)
    heights = [max(gap, _SMALLEST_GAP) for gap in found.values()]
    below.plot(list(found), heights, color=colour, marker=".", markersize=4, linewidth=1)


def _mark(above: Axes, below: Axes, curves: Sequence[Curve], killed: int) -> None:
    marks = [(killed, "killed in this save; dotted: steps trained again", "black", "-")]
    marks += [
        (before.kept, f"{after.label} resumes", colour, "--")
        for before, after, colour in zip(curves, curves[1:], _COLOURS[1:], strict=False)
    ]
    for number, (step, text, colour, style) in enumerate(marks):
        for axes in (above, below):
            axes.axvline(step, color=colour, linestyle=style, linewidth=1)
        above.annotate(
            text,
            (step, 0.7 - 0.08 * number),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=9,
            color=colour,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )


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


def draw_policy(path: Path, told: Policy, rows: PolicyRows) -> None:
    """Write the picture as PNG: versions, how old they are when they are used, and bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8), layout="constrained")
    FigureCanvasAgg(figure)
    above, middle, below = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    begun = rows.published[0].at
    for life, colour in zip((1, 2), _COLOURS, strict=False):
        mine = [r for r in rows.published if r.life == life]
        label = f"trainer: {told.lives[life - 1].layout}"
        times = [r.at - begun for r in mine]
        above.plot(times, [r.step for r in mine], "o-", ms=4, color=colour, label=label)
        taken = [r for r in rows.applied[0] if r.life == life]
        times = [r.at - begun for r in taken]
        colour = _COLOURS[life + 1]
        label = "rollout" if life == 1 else "rollout, started again"
        above.plot(times, [r.step for r in taken], "x", color=colour, label=label)
        for epoch in dict.fromkeys(r.epoch for r in taken):  # no line from trainer to trainer
            ours = [r for r in taken if r.epoch == epoch]
            middle.plot([r.at - begun for r in ours], [r.lag_s for r in ours], ".-", color=colour)
    moved = sorted((r for applied in rows.applied for r in applied), key=lambda r: r.at)
    below.bar([r.at - begun for r in moved], [r.bytes_moved / 1e3 for r in moved], width=0.15)
    gone = max(r.at for r in rows.applied[0] if r.life == 1)
    back = min(r.at for r in rows.applied[0] if r.life == 2)
    for axes in (above, middle, below):
        axes.axvspan(gone - begun, back - begun, color="0.9", zorder=0)
    above.set_ylabel("step of the weights")
    above.legend(loc="upper left", fontsize=8)
    text = (
        f"{told.equal} of {told.applied} times the rollout's logits are the trainer's, bit for bit"
    )
    above.set_title(text)
    middle.set_ylabel("lag (s)")
    below.set_ylabel("kB moved")
    below.set_xlabel("seconds; grey: a rank of the rollout is gone")
    figure.savefig(path, dpi=120)
