"""What one rank writes: its part of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptd.format.filemap import ChunkRef
from ckptd.format.witness import gather
from ckptd.layout.region import piece_regions
from ckptd.save.commit import witness_plan
from ckptd.save.structure import SavePlan

__all__ = ["RankPlan"]


class RankPlan:
    """What one rank writes under a plan: chunks, header entries, witness slots; computed once."""

    def __init__(self, plan: SavePlan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self.chunks: Sequence[ChunkRef] = plan.filemap.chunks(rank)
        self.entries = plan.filemap.header_entries(rank)
        self.data_bytes = self.chunks[-1].end if self.chunks else 0
        self.sizes: NDArray[np.int64] = np.array(
            [c.end - c.start for c in self.chunks], dtype=np.int64
        )
        self._witness: list[tuple[int, int, int, Any, Any]] | None = None

    def witness(self, data: memoryview) -> tuple[bytes, bytes]:
        """Return the slots this rank sees and their values, for a complete data section."""
        if self._witness is None:
            self._witness = self._select()
        buffer = np.frombuffer(data, dtype=np.uint8)
        slots: list[NDArray[np.uint32]] = []
        values: list[NDArray[np.uint8]] = []
        for itemsize, start, end, where, elements in self._witness:
            slots.append(where)
            values.append(gather(buffer[start:end], itemsize, elements))
        if not slots:
            return b"", b""
        return np.concatenate(slots).tobytes(), np.concatenate(values).tobytes()

    def _select(self) -> list[tuple[int, int, int, Any, Any]]:
        witness = witness_plan(self.plan)
        out = []
        for chunk in self.chunks:
            slots, elements = witness.select(chunk.tensor, piece_regions(chunk.piece))
            if len(slots):
                itemsize = self.plan.filemap.dtypes[chunk.tensor].itemsize
                out.append((itemsize, chunk.start, chunk.end, slots.astype("<u4"), elements))
        return out
