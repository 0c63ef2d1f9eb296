"""The checkpoint that is read: ckptd's own, or a folder of safetensors files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ckptd.format.digest import DigestIndex
from ckptd.format.manifest import FileEntry, ObjectEntry
from ckptd.format.witness import Witness, WitnessPlan
from ckptd.layout.block import Block
from ckptd.layout.grid import Grid
from ckptd.load.files import PieceLocations, check_size, load_index
from ckptd.reshard.feed import Take
from ckptd.store.base import Store
from ckptd.types import DType

__all__ = ["OwnSource", "ReshardSource", "Stock", "StockTensor"]


class ReshardSource(Protocol):
    """Files, and where the pieces of tensors lie in them. Threads share it."""

    @property
    def store(self) -> Store:
        """Where the files are."""

    @property
    def files(self) -> Sequence[FileEntry]:
        """The data files."""

    @property
    def dtypes(self) -> Sequence[DType]:
        """Type of each tensor, by number."""

    @property
    def names(self) -> Sequence[str]:
        """Name of each tensor, by number."""

    def place(self, tensor: int, piece: int) -> tuple[int, int]:
        """Return ``(file, first byte in its data section)``; `ABSENT` for no file."""

    def open_file(self, file: int) -> None:
        """Check that a file is there and has its size, once, and get what verifies it.

        Raises
        ------
        CorruptError
            It is not there, or not what was written.
        """

    def index(self, file: int) -> DigestIndex | None:
        """Return the digests of an opened file's blocks; None where nobody wrote any."""

    def holders(self, file: int, start: int, end: int) -> str:
        """Return the names of what lies in bytes of a file, for errors."""


class OwnSource:
    """A checkpoint of ckptd."""

    def __init__(self, places: PieceLocations, store: Store) -> None:
        self.store = store
        self.files = places.manifest.files
        self.dtypes = places.filemap.dtypes
        self.names = [t.name for t in places.manifest.tensors]
        self._places = places

    def place(self, tensor: int, piece: int) -> tuple[int, int]:
        """Return where a piece lies."""
        return self._places.of(tensor, piece)

    def open_file(self, file: int) -> None:
        """Check size and digest index."""
        if file not in self._places.indexes:
            entry = self.files[file]
            check_size(self.store, entry)
            self._places.indexes[file] = load_index(self.store, entry)

    def index(self, file: int) -> DigestIndex | None:
        """Return the index."""
        return self._places.indexes[file]

    def holders(self, file: int, start: int, end: int) -> str:
        """Return tensors and chunks."""
        found = self._places.chunks_at(file, start, end)
        named = ", ".join(f"tensor {t}" + (f" (chunk {c})" if c != t else "") for t, c in found[:4])
        return f"{named} and {len(found) - 4} more" if len(found) > 4 else named


@dataclass(frozen=True, slots=True, eq=False)
class StockTensor:
    """A stored tensor of the source.

    Attributes
    ----------
    number
        Its number for `ckptd.reshard.source.ReshardSource`.
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
        Where its bytes are.
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

    source: ReshardSource
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
