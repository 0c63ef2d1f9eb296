"""Whether a job whose nodes came and went trained what it would have trained alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise

import msgspec

from ckptd.train.demo.elasticjob import RankRow, TrainedRow

__all__ = ["CLASS_C", "Life", "largest_gap", "lives_of", "violations"]

CLASS_C = 1e-6
"""Relative difference of losses that native all-reduce over other ranks may make: fp32, and the
reference model, over 100 steps."""


class Life(msgspec.Struct, frozen=True):
    """What one generation trained.

    Attributes
    ----------
    generation, ranks
        Which one, on how many ranks.
    resumed
        Step of the state that it began with.
    first, last
        Steps trained, both included.
    lost
        Steps that were trained before it and had to be trained again.
    first_at, last_at
        When its first and its last step were done, seconds of ``CLOCK_MONOTONIC``.
    """

    generation: int
    ranks: int
    resumed: int
    first: int
    last: int
    lost: int
    first_at: float
    last_at: float


def lives_of(rows: Sequence[TrainedRow], ranks: Sequence[RankRow]) -> list[Life]:
    """Return the generations that trained a step at least, in their order.

    Parameters
    ----------
    rows, ranks
        All lines of ``steps.jsonl`` and ``ranks.jsonl``.
    """
    resumed = {row.generation: row.resumed for row in ranks}
    found: list[Life] = []
    before = 0
    for generation, group in groupby(_by_generation(rows), key=lambda row: row.generation):
        here = list(group)
        begin = resumed.get(generation, here[0].step - 1)
        found.append(
            Life(
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


def largest_gap(rows: Sequence[TrainedRow], reference: Mapping[int, TrainedRow]) -> float:
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
    """Return what must never be and was; empty if all is well.

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


def _missing(lives: Sequence[Life], until: int) -> Iterator[str]:
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
    gap = largest_gap(rows, reference)
    if rows and gap > tolerance:
        yield f"losses differ by {gap:.1e}, more than {tolerance:.0e}"
