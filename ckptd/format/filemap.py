"""Where each chunk lies, derived from the manifest alone (spec section 4.3).

Inside a file chunks are packed in canonical order: item size descending, then manifest order,
then piece order. Tensors that share grid, owners, base and item size weigh the same in every
file, so offsets are one cumulative sum over such groups and not a walk over all chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ckptd.errors import CorruptError
from ckptd.format.manifest import Manifest, TensorEntry
from ckptd.format.names import chunk_name, ranked_chunk_name
from ckptd.layout.grid import Grid, Piece
from ckptd.layout.owners import ABSENT, Owners
from ckptd.types import DType, dtype_of

__all__ = ["ChunkRef", "FileMap"]


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """One chunk of one file.

    Attributes
    ----------
    tensor
        Number of the tensor in the manifest.
    piece
        The piece of its grid.
    start, end
        Byte range in the data section of the file.
    """

    tensor: int
    piece: Piece
    start: int
    end: int


class FileMap:
    """Maps pieces to byte ranges of files, and back.

    Parameters
    ----------
    tensors, grids, owners
        The tables of a manifest, checked already by `ckptd.format.invariants`.
    ranked
        Numbers of the tensors that hold per-rank objects: their chunks are named by rank.
    ranks
        Rank of each file; file number is rank when left out.
    """

    def __init__(
        self,
        tensors: Sequence[TensorEntry],
        grids: Sequence[Grid],
        owners: Sequence[Owners],
        ranked: frozenset[int] = frozenset(),
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.ranked = ranked
        self._ranks = ranks
        self.tensors = tensors
        self.grids = grids
        self.owners = owners
        self.dtypes: list[DType] = [dtype_of(t.dtype, t.name) for t in tensors]
        groups: dict[tuple[int, int, int, int], int] = {}
        group_of = [
            groups.setdefault((t.grid, t.owners, t.base, d.itemsize), len(groups))
            for t, d in zip(tensors, self.dtypes, strict=True)
        ]
        self._groups = list(groups)
        self._group_of = np.array(group_of, dtype=np.int64)
        itemsizes = np.array([d.itemsize for d in self.dtypes], dtype=np.int64)
        self.order: NDArray[np.int64] = np.argsort(-itemsizes, kind="stable")
        """Tensor numbers in canonical order."""
        self._starts: dict[int, NDArray[np.int64]] = {}

    @staticmethod
    def of(manifest: Manifest, where: str) -> FileMap:
        """Build the map of a manifest; a broken table is a `CorruptError`."""
        per_rank = {o.tensor for o in manifest.objects if o.per_rank}
        ranked = frozenset(i for i, t in enumerate(manifest.tensors) if t.name in per_rank)
        try:
            return FileMap(
                manifest.tensors,
                manifest.grid_table(),
                manifest.owner_table(),
                ranked,
                [f.rank for f in manifest.files],
            )
        except (ValueError, OverflowError) as error:
            raise CorruptError(
                "manifest breaks a rule", kind="bad-manifest", where=where, found=str(error)[:300]
            ) from None

    def grid_of(self, tensor: int) -> Grid:
        """Grid of tensor number `tensor`."""
        return self.grids[self.tensors[tensor].grid]

    def owner(self, tensor: int, piece: int) -> int:
        """Number of the file that holds a piece, or `ABSENT`."""
        t = self.tensors[tensor]
        return self.owners[t.owners].owner(piece, t.base)

    def starts(self, file: int) -> NDArray[np.int64]:
        """Offset of each tensor's first byte in `file`, by tensor number; one more entry: the end."""
        if file not in self._starts:
            weights = np.zeros(len(self._groups) or 1, dtype=np.int64)
            for i, (grid, owners, base, itemsize) in enumerate(self._groups):
                pieces = self.owners[owners].pieces_of(file, base)
                weights[i] = itemsize * sum(self.grids[grid].piece(p).numel for p in pieces)
            ordered = weights[self._group_of[self.order]]
            ends = np.cumsum(ordered)
            starts = np.empty(len(self.tensors) + 1, dtype=np.int64)
            starts[self.order] = ends - ordered
            starts[-1] = ends[-1] if len(ends) else 0
            if len(self._starts) > 4096:
                self._starts.clear()
            self._starts[file] = starts
        return self._starts[file]

    def data_bytes(self, file: int) -> int:
        """Length of the data section of `file`, as the manifest's tables imply it."""
        return int(self.starts(file)[-1])

    def locate(self, tensor: int, piece: int) -> tuple[int, int, int]:
        """Return ``(file, start, end)`` of a piece; the file is `ABSENT` when nobody holds it."""
        t = self.tensors[tensor]
        grid, owners = self.grids[t.grid], self.owners[t.owners]
        file = owners.owner(piece, t.base)
        if file == ABSENT:
            return ABSENT, 0, 0
        start = int(self.starts(file)[tensor])
        itemsize = self.dtypes[tensor].itemsize
        for p in owners.pieces_of(file, t.base):
            numel = grid.piece(p).numel
            if p == piece:
                return file, start, start + numel * itemsize
            start += numel * itemsize
        raise AssertionError("owner map is inconsistent")

    def chunks(self, file: int) -> list[ChunkRef]:
        """Return every chunk of `file`, in file order."""
        out: list[ChunkRef] = []
        position = 0
        for tensor in map(int, self.order):
            t = self.tensors[tensor]
            for p in self.owners[t.owners].pieces_of(file, t.base):
                piece = self.grids[t.grid].piece(p)
                end = position + piece.numel * self.dtypes[tensor].itemsize
                out.append(ChunkRef(tensor, piece, position, end))
                position = end
        return out

    def header_entries(self, file: int) -> list[tuple[str, DType, tuple[int, ...]]]:
        """Return what `ckptd.format.container.build_header` needs for `file`."""
        return [
            (self.chunk_name(file, c), self.dtypes[c.tensor], c.piece.shape)
            for c in self.chunks(file)
        ]

    def chunk_name(self, file: int, chunk: ChunkRef) -> str:
        """Return the name of a chunk in the header of its file."""
        tensor = self.tensors[chunk.tensor]
        if chunk.tensor in self.ranked:
            return ranked_chunk_name(tensor.name, self._ranks[file] if self._ranks else file)
        return chunk_name(tensor.name, chunk.piece, tensor.shape)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all logical tensors, absent pieces included."""
        return sum(
            math.prod(t.shape) * d.itemsize for t, d in zip(self.tensors, self.dtypes, strict=True)
        )
