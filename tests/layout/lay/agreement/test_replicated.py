"""What several ranks hold, of random programs: all of it is found, and with exactly its holders."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ckptd.layout.block import flat_regions
from ckptd.layout.lay.replicated import ReplicatedParts
from ckptd.layout.lay.resolve import Bound
from ckptd.layout.lay.stored import StoredForm
from ckptd.layout.lay.syntax import Replicas
from tests.layout.lay.agreement.brute_holders import Holding, holdings, loosened
from tests.layout.lay.agreement.programs_random import pair

PROGRAMS = 120


def found(parts: ReplicatedParts, held: Holding) -> dict[int, tuple[int, ...]]:
    """Return the holders of what other ranks hold too, by position in the rank's buffer."""
    piece, form = held.piece, parts.form
    rule = form.rules[piece.rule]
    who = rule.who(form.mesh.coordinates(held.rank))
    numbers = np.arange(np.prod(rule.local_shape(who), dtype=int)).reshape(rule.local_shape(who))
    out: dict[int, tuple[int, ...]] = {}
    for part in parts.of_rank((piece.rule, piece.indexes, held.tensor.state), held.rank):
        for region in flat_regions(parts.boxes(rule, who)[part.cell], part.lo, part.hi):
            box = region.box
            where = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            for position in numbers[where].reshape(-1).tolist():
                assert piece.lo <= position < piece.hi
                assert position - piece.lo + piece.at not in out
                out[position - piece.lo + piece.at] = tuple(part.ranks.tolist())
    return out


def compare(bound: Bound) -> tuple[int, int]:
    """Compare a layout with the brute force.

    Returns how many elements have several holders, and how many tensors parts with others.
    """
    parts = ReplicatedParts(StoredForm(bound))
    several = partial = 0
    for held in holdings(bound):
        mine = found(parts, held)
        modifiers = bound.layout.equations[held.piece.rule].modifiers
        assert not mine or not any(m == Replicas("any") for m in modifiers)
        for position, holders in held.holders.items():
            several += len(holders) > 1
            assert mine.get(position, (held.rank,)) == holders, (held, position)
        partial += len(set(held.holders.values())) > 1
    return several, partial


@pytest.mark.slow
def test_all_that_several_ranks_hold_is_found() -> None:
    several = partial = 0
    for seed in range(PROGRAMS):
        rng = random.Random(seed)
        drawn = pair(rng)
        try:
            for bound in (drawn.source, drawn.target, loosened(rng, drawn.source)):
                counts = compare(bound)
                several, partial = several + counts[0], partial + counts[1]
        except AssertionError as error:
            error.add_note(f"seed {seed}\n{drawn}")
            raise
    assert several > 1000
    assert partial > 100
