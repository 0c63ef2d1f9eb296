"""What the runs' reports prove: losses, samples and states compared."""

from __future__ import annotations

from collections.abc import Sequence

from ckptd.train.demo.relaid import Relaid
from ckptd.train.demo.report import Check, LifeReport, Pace
from ckptd.train.demo.spec import StateRow, StepRow

__all__ = ["GAP_LIMIT", "checks_of", "gaps", "largest_gap", "same_samples", "state_differences"]

GAP_LIMIT = 1e-3


def gaps(rows: Sequence[StepRow], reference: Sequence[StepRow]) -> dict[int, float]:
    """Return ``|loss - reference| / reference`` by step, for the steps that both have."""
    wanted = {row.step: row.loss for row in reference}
    return {
        row.step: abs(row.loss - wanted[row.step]) / abs(wanted[row.step])
        for row in rows
        if row.step in wanted
    }


def largest_gap(
    rows: Sequence[StepRow], reference: Sequence[StepRow], steps: range
) -> float | None:
    """Return the largest gap over `steps`; None when one of them is missing on either side.

    A gap that is not a number (a loss is) counts as infinite.
    """
    found = gaps(rows, reference)
    if any(step not in found for step in steps):
        return None
    return max((_number(found[step]) for step in steps), default=None)


def same_samples(rows: Sequence[StepRow], reference: Sequence[StepRow]) -> bool:
    """Whether each step of `rows` saw exactly the samples that the same step of `reference` saw."""
    wanted = {row.step: row.ids for row in reference}
    return bool(rows) and all(wanted.get(row.step) == row.ids for row in rows)


def state_differences(saved: StateRow | None, loaded: StateRow | None) -> list[str]:
    """Return what is not bit for bit alike in two states; empty when all is."""
    if saved is None or loaded is None:
        return ["no report of the saved state" if saved is None else "no report of a load"]
    names = saved.tensors.keys() | loaded.tensors.keys()
    differing = sorted(n for n in names if saved.tensors.get(n) != loaded.tensors.get(n))
    if saved.plain != loaded.plain:
        differing.append("schedule, hyperparameters or data position")
    if not saved.tensors:
        differing.append("no tensors at all")
    return differing


def checks_of(
    lives: Sequence[LifeReport], kill_landed: bool, relaid: Relaid, pace: Pace, steps: int
) -> list[Check]:
    """Return what has to hold for the demo to succeed."""
    found = [
        Check("killed between the first data byte and the commit", kill_landed),
        Check("training reached the last step", bool(lives) and lives[-1].last_step == steps),
    ]
    for life in lives:
        found.append(Check(f"{life.name}: sample ids equal at every step", life.ids_equal))
        if life.expected_from is None:
            continue
        small = life.gap is not None and life.gap <= GAP_LIMIT
        found += [
            Check(f"{life.name}: resumed from step {life.expected_from}", life.resumed_as_expected),
            Check(f"{life.name}: loss gap at most {GAP_LIMIT:g}", small),
            Check(f"{life.name}: state bit-exact after the load", life.state_exact is True),
            Check(
                f"{life.name}: ckptd diff finds all {life.tensors} tensors bit-exact",
                life.tensors_by_diff == life.tensors > 0,
            ),
        ]
    found.append(
        Check(
            f"step {relaid.step} resharded to {relaid.layout} and back: ckptd diff says identical",
            relaid.identical and relaid.tensors > 0,
        )
    )
    found.append(
        Check(
            f"a save at every step: all {pace.saves} snapshots whole on every rank",
            pace.complete == pace.saves > 0,
        )
    )
    return found


def _number(gap: float) -> float:
    return gap if gap == gap else float("inf")
