"""Proofs from the runs' reports: losses, samples and states compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise

from ckptd_demo.elasticjob import RankRow, TrainedRow
from ckptd_demo.report import Check, Generation, LifeReport, Pace, Relaid
from ckptd_demo.spec import StateRow, StepRow

__all__ = [
    "CLASS_C",
    "GAP_LIMIT",
    "checks_of",
    "gaps",
    "largest_difference",
    "largest_gap",
    "lives_of",
    "same_samples",
    "state_differences",
    "violations",
]

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
    lives: Sequence[LifeReport],
    kill_landed: bool,
    relaid: Relaid | None,
    pace: Pace | None,
    steps: int,
) -> list[Check]:
    """Return what has to hold for the demo to succeed, of what was done."""
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
            Check(
                f"{life.name}: state bit-exact after the load",
                life.state_exact is True and life.tensors > 0,
            ),
        ]
        if life.tensors_by_diff is not None:
            what = f"{life.name}: ckptd diff finds all {life.tensors} tensors bit-exact"
            found.append(Check(what, life.tensors_by_diff == life.tensors))
    if relaid is not None:
        what = (
            f"step {relaid.step} resharded to {relaid.layout} and back: ckptd diff says identical"
        )
        found.append(Check(what, relaid.identical and relaid.tensors > 0))
    if pace is not None:
        what = f"a save at every step: all {pace.saves} snapshots whole on every rank"
        found.append(Check(what, pace.complete == pace.saves > 0))
    return found


def _number(gap: float) -> float:
    return gap if gap == gap else float("inf")


CLASS_C = 1e-6
"""Relative difference of losses that native all-reduce over other ranks may make: fp32, and the
reference model, over 100 steps."""


def lives_of(rows: Sequence[TrainedRow], ranks: Sequence[RankRow]) -> list[Generation]:
    """Return the generations that trained a step at least, in their order.

    Parameters
    ----------
    rows, ranks
        All lines of ``steps.jsonl`` and ``ranks.jsonl``.
    """
    resumed = {row.generation: row.resumed for row in ranks}
    found: list[Generation] = []
    before = 0
    for generation, group in groupby(_by_generation(rows), key=lambda row: row.generation):
        here = list(group)
        begin = resumed.get(generation, here[0].step - 1)
        found.append(
            Generation(
                generation=generation,
                ranks=here[0].ranks,
                resumed=begin,
                first=here[0].step,
                last=here[-1].step,
                lost=max(0, before - begin),
                first_at=here[0].at,
                last_at=here[-1].at,
            )
        )
        before = max(before, here[-1].step)
    return found


def largest_difference(rows: Sequence[TrainedRow], reference: Mapping[int, TrainedRow]) -> float:
    """Return the largest relative difference of a loss from the uninterrupted run's."""
    gaps = [
        abs(row.loss - reference[row.step].loss) / abs(reference[row.step].loss)
        for row in rows
        if row.step in reference
    ]
    return max(gaps, default=float("inf"))


def violations(
    rows: Sequence[TrainedRow],
    ranks: Sequence[RankRow],
    reference: Mapping[int, TrainedRow],
    *,
    until: int,
    promised: Mapping[int, int],
    tolerance: float = CLASS_C,
) -> list[str]:
    """Return what must never be and was; empty if no problems found.

    Parameters
    ----------
    rows, ranks
        All lines of ``steps.jsonl`` and ``ranks.jsonl``.
    reference
        Steps of the uninterrupted run.
    until
        The last step that the job has to have trained.
    promised
        Last step that was committed before each generation, as the membership log says.
    tolerance
        Relative, of the losses.
    """
    lives = lives_of(rows, ranks)
    return [
        *_missing(lives, until),
        *_wrong_samples(rows, reference),
        *_overlaps(rows),
        *_lost(ranks, promised),
        *_wrong_losses(rows, reference, tolerance),
    ]


def _by_generation(rows: Sequence[TrainedRow]) -> list[TrainedRow]:
    return sorted(rows, key=lambda row: (row.generation, row.step))


def _missing(lives: Sequence[Generation], until: int) -> Iterator[str]:
    for before, after in pairwise(lives):
        if after.resumed > before.last:
            yield f"generation {after.generation} began at {after.resumed}, beyond {before.last}"
    for life in lives:
        if life.first != life.resumed + 1:
            yield f"generation {life.generation} loaded {life.resumed} and trained {life.first}"
    last = lives[-1].last if lives else 0
    if last != until:
        yield f"the last step is {last}, not {until}"


def _wrong_samples(
    rows: Sequence[TrainedRow], reference: Mapping[int, TrainedRow]
) -> Iterator[str]:
    for row in rows:
        if row.step in reference and row.ids != reference[row.step].ids:
            yield f"step {row.step} of generation {row.generation} took other samples"


def _overlaps(rows: Sequence[TrainedRow]) -> Iterator[str]:
    for before, after in pairwise(sorted(rows, key=lambda row: row.at)):
        if after.generation < before.generation:
            yield (
                f"generation {after.generation} trained step {after.step} after generation "
                f"{before.generation} had begun to"
            )


def _lost(ranks: Sequence[RankRow], promised: Mapping[int, int]) -> Iterator[str]:
    for generation, group in groupby(
        sorted(ranks, key=lambda row: row.generation), key=lambda row: row.generation
    ):
        steps = {row.resumed for row in group}
        if len(steps) > 1:
            yield f"ranks of generation {generation} began at steps {sorted(steps)}"
        if min(steps) < promised.get(generation, 0):
            yield (
                f"generation {generation} began at {min(steps)}, and {promised[generation]} was "
                "committed"
            )


def _wrong_losses(
    rows: Sequence[TrainedRow], reference: Mapping[int, TrainedRow], tolerance: float
) -> Iterator[str]:
    gap = largest_difference(rows, reference)
    if rows and gap > tolerance:
        yield f"losses differ by {gap:.1e}, more than {tolerance:.0e}"
