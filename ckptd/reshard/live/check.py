"""Samples of what moves between live ranks, checked on arrival; how many go along.

The giver picks elements of its tensors, works out where each must be on the taker, and sends
place and value along. The taker looks there when everything has arrived. A wrong plan, on either
end, then shows, as a wrong layout does in a checkpoint's witness.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ckptd.checkpoint.format.witness import splitmix64
from ckptd.lay.live import Transfers
from ckptd.lay.local import BoundTensor, LocalPiece, local_tensors
from ckptd.lay.ruleform import RuleForm
from ckptd.lay.syntax.tree import Average, Replicas
from ckptd.reshard.elements import follow
from ckptd.reshard.live.plan import Outgoing

I64 = NDArray[np.int64]

MOST_SAMPLES = 256
"""Elements that are sent along by one rank to another."""
_TRIES = 8
_Key = tuple[int, tuple[int, ...], str]


class Sample(NamedTuple):
    """An element of a segment: where it is on the giver, and must be on the taker."""

    segment: int
    source: int
    target: int


@dataclass(eq=False)
class Sampler:
    """Picks samples of what one rank of the source gives.

    Parameters
    ----------
    transfers
        The two layouts.
    rank
        Of the source.
    """

    transfers: Transfers
    rank: int
    _taken: dict[int, Mapping[_Key, tuple[BoundTensor, LocalPiece]]] = field(default_factory=dict)

    def pick(self, taker: int, outgoing: Sequence[Outgoing]) -> list[Sample]:
        """Return samples of what goes to one rank of the target; at most `MOST_SAMPLES`."""
        present = [i for i, o in enumerate(outgoing) if o.memory is not None]
        if not present:
            return []
        each = max(1, MOST_SAMPLES // len(present))
        step = max(1, len(present) // MOST_SAMPLES)
        out: list[Sample] = []
        for number in present[::step]:
            found = outgoing[number]
            pairs = list(self._places(taker, found, each * _TRIES))
            chosen = pairs[:: max(1, len(pairs) // each)][:each]  # all over the tensor
            out += [Sample(number, s, t) for s, t in chosen]
        return out[:MOST_SAMPLES]

    def _places(self, taker: int, found: Outgoing, tries: int) -> Iterator[tuple[int, int]]:
        """Yield places of elements on both ends."""
        pieces = found.tensor.pieces[:: max(1, len(found.tensor.pieces) // tries)]
        tries = -(-tries // max(1, len(pieces)))
        for piece in pieces:
            rule = self.transfers.composition.source.rules[piece.rule]
            if piece.hi == piece.lo or _differ(rule):
                continue
            key = (found.segment.target, found.segment.source, piece.rule, piece.indexes)
            seed = xxhash.xxh3_64_intdigest(repr(key).encode())
            ramp = np.arange(tries, dtype=np.uint64) + np.uint64(seed)
            drawn = splitmix64(ramp) % np.uint64(piece.hi - piece.lo)
            at = np.unique(drawn.astype(np.int64)) + piece.lo
            yield from self._follow(taker, found, piece, rule, at)

    def _follow(
        self, taker: int, found: Outgoing, piece: LocalPiece, rule: RuleForm, at: I64
    ) -> Iterator[tuple[int, int]]:
        composition = self.transfers.composition
        source, target = composition.source, composition.target
        mine, theirs = source.mesh.coordinates(self.rank), target.mesh.coordinates(taker)
        for hit in follow(
            rule,
            piece.indexes,
            at,
            source.scope,
            composition.takers,
            target.scope,
            at=mine,
            target_at=theirs,
        ):
            known = self._of(taker).get((hit.rule.number, hit.indexes, found.tensor.state))
            if known is None or known[0].name != found.segment.target:
                continue
            rows, other = at[hit.which] - piece.lo + piece.at, known[1]
            for row, position in zip(rows.tolist(), hit.positions.tolist(), strict=True):
                if other.lo <= position < other.hi:
                    yield row, position - other.lo + other.at

    def _of(self, taker: int) -> Mapping[_Key, tuple[BoundTensor, LocalPiece]]:
        """Return what a rank of the target holds, by what it is of."""
        if taker not in self._taken:
            self._taken[taker] = {
                (p.rule, p.indexes, t.state): (t, p)
                for t in local_tensors(self.transfers.composition.target, taker)
                for p in t.pieces
            }
        return self._taken[taker]


def _differ(rule: RuleForm) -> bool:
    """Whether ranks may hold other values than the one whose value is taken."""
    return any(
        isinstance(m, Average) or (isinstance(m, Replicas) and m.kind == "any")
        for m in rule.equation.modifiers
    )
