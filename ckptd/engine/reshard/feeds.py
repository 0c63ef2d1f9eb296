"""Feeds of a whole target: each tensor by the way that its values come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptd.engine.reshard.feed import Feed, Feeds, Take
from ckptd.layout.grid import Grid
from ckptd.layout.plan import plan_once
from ckptd.layout.region import piece_regions

__all__ = ["Literal", "MixedFeeds", "Recut"]


@dataclass(frozen=True, eq=False)
class Recut:
    """The values of one source tensor, cut another way.

    Attributes
    ----------
    tensor
        Number of the source tensor.
    source, target
        Its grid there, and here.
    """

    tensor: int
    source: Grid
    target: Grid

    def feed(self, tensor: int, piece: int) -> Feed:
        """Return what fills a piece."""
        copies = plan_once(self.source, piece_regions(self.target.piece(piece)))
        return Feed(tuple(Take(self.tensor, c.piece, c.blocks) for c in copies))


@dataclass(frozen=True, eq=False)
class Literal:
    """An object that was made anew: the bytes of each piece."""

    pieces: Sequence[bytes]

    def feed(self, tensor: int, piece: int) -> Feed:
        """Return what fills a piece."""
        return Feed(literal=lambda: self.pieces[piece])


@dataclass(frozen=True, eq=False)
class MixedFeeds:
    """Feeds by target tensor."""

    by_tensor: Mapping[int, Feeds]

    def feed(self, tensor: int, piece: int) -> Feed:
        """Return what fills a piece."""
        return self.by_tensor[tensor].feed(tensor, piece)
