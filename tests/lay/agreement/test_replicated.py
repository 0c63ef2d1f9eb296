"""What several ranks hold, of random programs: all of it is found, and with exactly its holders."""

from __future__ import annotations

import numpy as np
import pytest

from ckptd.base.grids.block import flat_regions
from ckptd.lay.replicated import ReplicatedParts
from ckptd.lay.resolve import Bound
from ckptd.lay.stored import StoredForm
from ckptd.lay.syntax.tree import Replicas
from tests.lay.agreement.brute_holders import Holding, drawn_layouts

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


def compare(bound: Bound, held: list[Holding]) -> None:
    """Compare a layout with the brute force."""
    parts = ReplicatedParts(StoredForm(bound))
    for one in held:
        mine = found(parts, one)
        modifiers = bound.layout.equations[one.piece.rule].modifiers
        assert not mine or not any(m == Replicas("any") for m in modifiers)
        for position, holders in one.holders.items():
            assert mine.get(position, (one.rank,)) == holders, (one, position)


@pytest.mark.slow
def test_all_that_several_ranks_hold_is_found() -> None:
    for drawn in drawn_layouts(PROGRAMS, least=10):
        try:
            compare(drawn.bound, drawn.held)
        except AssertionError as error:
            error.add_note(drawn.what)
            raise
