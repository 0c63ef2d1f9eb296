"""The checkpoint that is read, described: ckptd's own, or a foreign one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptd.format.manifest import ObjectEntry
from ckptd.format.witness import Witness, WitnessPlan
from ckptd.layout.block import Block
from ckptd.layout.grid import Grid
from ckptd.load.files import PieceLocations
from ckptd.reshard.feed import Take
from ckptd.types import DType

__all__ = ["Stock", "StockTensor"]


@dataclass(frozen=True, slots=True, eq=False)
class StockTensor:
    """A stored tensor of the source.

    Attributes
    ----------
    number
        Its number in the manifest of `Stock.source`.
    encoded
        Whether it holds an encoded object.
    ranks
        Of a per-rank object: the rank that holds each piece.
    """

    number: int
    name: str
    dtype: DType
    shape: tuple[int, ...]
    grid: Grid
    aliases: tuple[str, ...] = ()
    encoded: bool = False
    ranks: Sequence[int] | None = None


@dataclass(frozen=True, eq=False)
class Stock:
    """A source, described.

    Attributes
    ----------
    source
        Its files, and where its bytes are in them.
    identity
        Text that changes when its content does.
    step, world, metadata
        As in its manifest; a foreign source is of step 0 and one rank.
    tensors
        All of them, by number.
    objects
        All of them.
    values
        Returns whole tensors by name: for numbers that follow a parameter, and scales.
    per_rank
        Returns the encoded values of a per-rank object by its name, by rank.
    witness
        Its plan and values, where it has one that can be compared value by value.
    lay
        The program that it keeps, or empty.
    sizes
        Sizes of axes that its shapes alone do not say.
    locate
        Where pieces are not files' own: returns the takes for copies out of a piece, by name of the
        tensor, number of the piece, blocks and type of the target.
    unread
        Files beside those of the source that look like weights and are not read.
    has_sections
        Whether names begin with a section of a state, as a job of ckptd saves it: what somebody
        else calls ``model.`` is a part of the names of weights.
    """

    source: PieceLocations
    identity: str
    tensors: Sequence[StockTensor]
    values: Callable[[Sequence[str]], Mapping[str, NDArray[Any]]]
    step: int = 0
    world: int = 1
    metadata: Mapping[str, Any] = field(default_factory=dict)
    objects: Sequence[ObjectEntry] = ()
    per_rank: Callable[[str], Mapping[int, bytes]] = lambda name: {}
    witness: tuple[WitnessPlan, Witness] | None = None
    witness_note: str = ""
    lay: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    locate: Callable[[str, int, Sequence[Block], DType], Sequence[Take]] | None = None
    unread: Sequence[str] = ()
    has_sections: bool = True

    @cached_property
    def by_name(self) -> Mapping[str, StockTensor]:
        """Tensors by name and by alias."""
        out = {a: t for t in self.tensors for a in t.aliases}
        return out | {t.name: t for t in self.tensors}

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of what is no encoded object, by name."""
        return {t.name: t.shape for t in self.tensors if not t.encoded}

    def read_scalars(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return the bytes of some small tensors."""
        found = self.values(names) if names else {}
        return {n: np.ascontiguousarray(found[n]).tobytes() for n in names}
