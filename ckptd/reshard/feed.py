"""What fills a chunk of the target: copies out of source chunks, fills, or bytes as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ckptd.layout.block import Block, Fill, piece_regions
from ckptd.layout.grid import Grid
from ckptd.layout.plan import plan_once
from ckptd.load.plan import Change

__all__ = ["ChunkFeed", "Feeds", "Literal", "MixedFeeds", "Recut", "Take"]


@dataclass(frozen=True, slots=True, eq=False)
class Take:
    """Copies out of one source piece.

    Attributes
    ----------
    tensor, piece
        Of the source.
    blocks
        Source positions are relative to the piece, target positions to the chunk that is filled.
    change
        None: bytes as they are.
    turn
        Takes of a later turn come when those of all earlier ones are done: what multiplies or
        adds to a value must come after it.
    """

    tensor: int
    piece: int
    blocks: tuple[Block, ...]
    change: Change | None = None
    turn: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ChunkFeed:
    """Everything that fills one chunk.

    Attributes
    ----------
    takes
        Copies; those of one turn never write one element twice.
    fills
        Elements that no source has: padding.
    literal
        Gives the chunk's bytes, where they are made anew: objects, scales.
    """

    takes: tuple[Take, ...] = ()
    fills: tuple[Fill, ...] = ()
    literal: Callable[[], bytes] | None = None


class Feeds(Protocol):
    """Where feeds come from: a composition of two layouts."""

    def feed(self, tensor: int, piece: int) -> ChunkFeed:
        """Return what fills a piece of target tensor number `tensor`."""


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

    def feed(self, tensor: int, piece: int) -> ChunkFeed:
        """Return what fills a piece."""
        copies = plan_once(self.source, piece_regions(self.target.piece(piece)))
        return ChunkFeed(tuple(Take(self.tensor, c.piece, c.blocks) for c in copies))


@dataclass(frozen=True, eq=False)
class Literal:
    """An object that was made anew: the bytes of each piece."""

    pieces: Sequence[bytes]

    def feed(self, tensor: int, piece: int) -> ChunkFeed:
        """Return what fills a piece."""
        return ChunkFeed(literal=lambda: self.pieces[piece])


@dataclass(frozen=True, eq=False)
class MixedFeeds:
    """Feeds by target tensor."""

    by_tensor: Mapping[int, Feeds]

    def feed(self, tensor: int, piece: int) -> ChunkFeed:
        """Return what fills a piece."""
        return self.by_tensor[tensor].feed(tensor, piece)
