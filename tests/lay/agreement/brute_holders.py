"""Which ranks hold which cells of a layout, by the brute force."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ckptd.lay.local import BoundTensor, LocalPiece, local_tensors
from ckptd.lay.resolve import Bound
from ckptd.lay.stored import StoredForm
from ckptd.lay.syntax.tree import Alias, Average, Dim, Pad, Product, Replicas, Split, Sum
from tests.lay.agreement.brute import Brute
from tests.lay.agreement.programs_random import pair

__all__ = ["Drawn", "Holding", "drawn_layouts", "holdings", "loosened"]

_MOST_SEEDS = 1000


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
    tensor: BoundTensor
    piece: LocalPiece
    holders: Mapping[int, tuple[int, ...]]

    @property
    def common(self) -> list[int]:
        """Positions of what other ranks hold too."""
        return [p for p, ranks in self.holders.items() if len(ranks) > 1]

    @property
    def is_partial(self) -> bool:
        """Whether its parts have different holders."""
        return len(set(self.holders.values())) > 1

    @property
    def is_packed(self) -> bool:
        """Whether it lies in a buffer."""
        return self.tensor.name.startswith("flat.")


@dataclass(frozen=True)
class Drawn:
    """A random layout with a mesh; `what` shows it, and `common` is what several ranks hold."""

    what: str
    rng: random.Random
    bound: Bound
    held: list[Holding]
    common: list[Holding]

    def chosen(self) -> list[Holding]:
        """Return one of each kind: whole, with parts that others do not hold, in a buffer."""
        kinds = (
            [h for h in self.common if not h.is_partial and not h.is_packed],
            [h for h in self.common if h.is_partial],
            [h for h in self.common if h.is_packed],
        )
        return [self.rng.choice(kind) for kind in kinds if kind]


def drawn_layouts(count: int, least: int) -> Iterator[Drawn]:
    """Yield random layouts: of `count` programs, then until there are `least` of either kind.

    The kinds are tensors with parts that have different holders, and tensors in buffers.
    """
    partial = packed = 0
    for seed in range(_MOST_SEEDS):
        if seed >= count and min(partial, packed) >= least:
            return
        rng = random.Random(seed)
        drawn = pair(rng)
        for bound in (loosened(rng, drawn.source), loosened(rng, drawn.target)):
            if bound.layout.mesh is None:
                continue
            held = holdings(bound)
            common = [h for h in held if h.common]
            is_partial = any(h.is_partial for h in common)
            is_packed = any(h.is_packed for h in common)
            wanted = (is_partial and partial < least) or (is_packed and packed < least)
            if seed < count or wanted:
                partial, packed = partial + is_partial, packed + is_packed
                yield Drawn(f"seed {seed}\n{drawn}", rng, bound, held, common)
    raise AssertionError(f"{partial} with parts, {packed} in buffers")


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
        case Pad():
            return replace(dim, inner=_loosened(rng, dim.inner, inside=inside))
        case Split() if inside and rng.random() < 0.7:
            return _loosened(rng, dim.inner, inside=inside)
        # A split that stays has the length that it was made for.
    return dim
