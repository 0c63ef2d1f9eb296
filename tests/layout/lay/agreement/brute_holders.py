"""Which ranks hold which cells of a layout, by the brute force."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckptd.layout.lay.local import LaidTensor, LocalPiece, local_tensors
from ckptd.layout.lay.resolve import Bound
from ckptd.layout.lay.stored import StoredForm
from ckptd.layout.lay.syntax import Alias, Average, Dim, Pad, Product, Replicas, Split, Sum
from tests.layout.lay.agreement.brute import Brute

__all__ = ["Holding", "holdings", "loosened"]


@dataclass(frozen=True)
class Holding:
    """What a rank holds of one tensor.

    Attributes
    ----------
    rank, tensor, piece
        Where it is.
    holders
        By position in the rank's tensor or buffer: the ranks that must hold the same value there,
        itself among them. Fills have none, nor has what may differ from rank to rank.
    """

    rank: int
    tensor: LaidTensor
    piece: LocalPiece
    holders: Mapping[int, tuple[int, ...]]


def holdings(bound: Bound) -> list[Holding]:
    """Return what all ranks of a layout hold."""
    brute, form = Brute(bound), StoredForm(bound)
    held: dict[object, set[int]] = defaultdict(set)
    found = []
    for rank in range(form.mesh.world):
        place = form.mesh.coordinates(rank)
        for tensor in local_tensors(form, rank):
            cells = brute.local(rank)[tensor.name][1].reshape(-1)
            for piece in tensor.pieces:
                modifiers = bound.layout.equations[piece.rule].modifiers
                own: dict[int, object] = {}
                if not any(isinstance(m, Replicas) and m.kind == "any" for m in modifiers):
                    apart = [place[m.axis] for m in modifiers if isinstance(m, Average)]
                    kind = (tensor.state, _kind(bound, piece.rule), *apart)
                    where = range(piece.at, piece.at + piece.hi - piece.lo)
                    own = {p: (kind, int(cells[p])) for p in where if cells[p] >= 0}
                for cell in own.values():
                    held[cell].add(rank)
                found.append((rank, tensor, piece, own))
    return [
        Holding(rank, tensor, piece, {p: tuple(sorted(held[c])) for p, c in own.items()})
        for rank, tensor, piece, own in found
    ]


def _kind(bound: Bound, rule: int) -> int:
    """Return -1, or the number of an alias that is only compared with itself: one cut otherwise."""
    equation = bound.layout.equations[rule]
    if not any(isinstance(m, Alias) for m in equation.modifiers):
        return -1
    same = (
        other
        for other in bound.layout.equations
        if not any(isinstance(m, Alias) for m in other.modifiers)
        and (other.dims, other.families, other.pinned)
        == (equation.dims, equation.families, equation.pinned)
    )
    original = next(same, None)
    if original is None or any(
        isinstance(m, Average) or m == Replicas("any")
        for m in (*equation.modifiers, *original.modifiers)
    ):
        return rule
    return -1


def loosened(rng: random.Random, bound: Bound) -> Bound:
    """Return a layout without most splits in the branches of sums: ranks hold those parts alike."""
    equations = (
        replace(e, dims=tuple(_loosened(rng, d, inside=False) for d in e.dims))
        for e in bound.layout.equations
    )
    return replace(bound, layout=replace(bound.layout, equations=tuple(equations)))


def _loosened(rng: random.Random, dim: Dim, *, inside: bool) -> Dim:
    match dim:
        case Product():
            return replace(dim, parts=tuple(_loosened(rng, p, inside=inside) for p in dim.parts))
        case Sum():
            return replace(
                dim,
                branches=tuple(
                    replace(b, dim=_loosened(rng, b.dim, inside=True)) for b in dim.branches
                ),
            )
        case Pad() | Split():
            inner = _loosened(rng, dim.inner, inside=inside)
            if isinstance(dim, Split) and inside and rng.random() < 0.7:
                return inner
            return replace(dim, inner=inner)
    return dim
