"""The checkpoint that is written: its tables, and how its files are dealt out to processes.

Everything here follows from the source's manifest and the two layouts, so that processes which
never speak to each other agree on every byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ckptd.format.filemap import FileMap
from ckptd.format.manifest import GridEntry, MeshEntry, ObjectEntry, Runs3, TensorEntry
from ckptd.format.witness import WitnessPlan
from ckptd.layout.owners import Owners
from ckptd.reshard.feed import Feeds

__all__ = ["Target", "share"]


@dataclass(frozen=True, eq=False)
class Target:
    """What is to be written.

    Attributes
    ----------
    world
        Number of ranks of the layout; one data file each.
    tensors, grids, owners, objects, meshes, metadata, lay
        As in the manifest.
    feeds
        What fills each piece.
    links
        Number of the link that a tensor comes from, by number of the tensor; None: they are the
        same, and what is beyond the last link comes from elsewhere.
    """

    world: int
    tensors: tuple[TensorEntry, ...]
    grids: tuple[GridEntry, ...]
    owners: tuple[Runs3, ...]
    feeds: Feeds
    objects: tuple[ObjectEntry, ...] = ()
    meshes: tuple[MeshEntry, ...] = ()
    metadata: dict[str, Any] | None = None
    lay: str = ""
    links: Mapping[int, int] | None = None

    @cached_property
    def filemap(self) -> FileMap:
        """The byte ranges that follow from the tables."""
        per_rank = {o.tensor for o in self.objects if o.per_rank}
        ranked = frozenset(i for i, t in enumerate(self.tensors) if t.name in per_rank)
        grids = [g.grid() for g in self.grids]
        return FileMap(self.tensors, grids, [Owners(r) for r in self.owners], ranked)

    @cached_property
    def sizes(self) -> list[int]:
        """Length of the data section of each file."""
        return [int(n) for n in self.filemap.all_data_bytes(self.world)]

    @cached_property
    def witness(self) -> WitnessPlan:
        """Where the witness looks."""
        return WitnessPlan.over(self.tensors, self.objects)


def share(sizes: Sequence[int], number: int, count: int) -> range:
    """Return the files of process `number` of `count`: neighbours, about as many bytes each.

    Neighbours, because they have most in common: the ranks of a tensor-parallel group read the
    same bytes.
    """
    ends = np.cumsum(np.array(sizes, dtype=np.float64) + 1.0)
    middles = ends - (np.array(sizes) + 1.0) / 2
    whose = np.minimum((middles / ends[-1] * count).astype(np.int64), count - 1)
    lo, hi = np.searchsorted(whose, (number, number + 1)).tolist()
    return range(lo, hi)
