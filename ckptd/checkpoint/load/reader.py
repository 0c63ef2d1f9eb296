"""`CkptdReader`: ckptd's own format, read tensor by tensor; largest object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ckptd.base.grids.block import box_region
from ckptd.base.grids.grid import Grid
from ckptd.base.grids.owners import ABSENT
from ckptd.checkpoint.format.codec import parse_object
from ckptd.checkpoint.format.manifest import (
    UNDIGESTED,
    ObjectEntry,
    TensorEntry,
    about_foreign,
    foreign_unread,
    wrapped_tensors,
)
from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.format.records import Commit
from ckptd.checkpoint.format.words import Layouts, TensorLayout
from ckptd.checkpoint.load.files import PieceLocations, check_headers
from ckptd.checkpoint.load.plan import Want, read_plan
from ckptd.checkpoint.load.read import execute
from ckptd.checkpoint.load.source import Array, CheckpointReader, PerRankValues, TensorInfo
from ckptd.checkpoint.root.index import Index
from ckptd.errors import CorruptError
from ckptd.types import Box

MAX_OBJECT_BYTES = 1 << 30
_FREE_BYTES = 16 << 20
"""So much is allocated without a look at what the files can hold."""


class CkptdReader(CheckpointReader):
    """Reads one checkpoint of a root; all data is compared with its digests.

    Parameters
    ----------
    index
        The root's catalogue.
    checkpoint
        Its name, or its commit record. Hold a lease on it (`ckptd.checkpoint.root.leases.hold`)
        where others delete.
    listed
        Bound what the manifest claims by the files that are there, which may cost a listing of its
        folders. False where no file is read.

    Attributes
    ----------
    store
        The root's.
    commit, manifest, filemap
        The record, the manifest, and the files that follow from it.
    places
        Where each piece lies.

    Raises
    ------
    NotFoundError, CorruptError
        No such checkpoint, or its record or manifest is bad.
    """

    def __init__(
        self, index: Index, checkpoint: CommitName | Commit, *, listed: bool = True
    ) -> None:
        self._index, self.store = index, index.store
        self.commit = checkpoint if isinstance(checkpoint, Commit) else index.commit(checkpoint)
        self.manifest, self.filemap = index.tables_of(self.commit)
        self.manifest_path = self.commit.folder + self.commit.manifest
        if listed:
            check_headers(self.store, self.manifest, self.filemap)
        self.places = PieceLocations(self.manifest, self.filemap, self.store)
        self.url = self.store.url
        self.title = str(self.commit.name)
        self.program = self.manifest.lay
        self.entries = self.manifest.objects
        self.has_sections = about_foreign(self.manifest).get("has_sections") is not False
        self.is_foreign = UNDIGESTED in self.manifest.requires
        self.unread = foreign_unread(self.manifest)
        self.wrapped = wrapped_tensors(self.manifest)
        self._encoded = {o.tensor for o in self.manifest.objects if o.tensor}

    @cached_property
    def metadata(self) -> Mapping[str, Any]:
        """The user's metadata of the save, and annotations added since."""
        added = self._index.annotated({self.commit.name: self.commit})[self.commit.name].metadata
        return {**self.manifest.metadata, **added}  # a foreign one's commit has none

    @cached_property
    def infos(self) -> Mapping[str, TensorInfo]:
        """The tensors by name, in the order of the manifest."""
        return {
            t.name: TensorInfo(t.name, self.filemap.dtypes[number], t.shape, t.aliases)
            for number, t in enumerate(self.manifest.tensors)
            if t.name not in self._encoded
        }

    @cached_property
    def _numbers(self) -> Mapping[str, int]:
        tensors = enumerate(self.manifest.tensors)
        return {alias: number for number, t in tensors for alias in (t.name, *t.aliases)}

    def number(self, name: str) -> int:
        """Return the number of a tensor in the manifest, by name or alias.

        Raises
        ------
        NotFoundError
            No tensor has that name, or matches that pattern.
        """
        return self._numbers[name] if name in self._numbers else self._numbers[self.info(name).name]

    def _entry(self, name: str) -> TensorEntry:
        return self.manifest.tensors[self._numbers[name]]

    def nbytes(self, name: str) -> int:
        """Return the bytes of a stored tensor, also of one that holds an object."""
        number = self.number(name)
        shape = self.manifest.tensors[number].shape
        return Box.whole(shape).numel * self.filemap.dtypes[number].itemsize

    def grid(self, name: str) -> Grid:
        """Return the pieces in which a tensor is stored."""
        return self.filemap.grid_of(self._numbers[name])

    @cached_property
    def _layouts(self) -> Layouts:
        return Layouts(self.manifest, self.filemap)

    def layout(self, name: str) -> TensorLayout:
        """Return how a tensor is cut, and which ranks wrote it."""
        return self._layouts.of(self._numbers[name])

    def absent_elements(self, name: str) -> int:
        """Return the number of elements of a tensor that no file holds."""
        entry = self._entry(name)
        owners = self.filemap.owners[entry.owners]
        if not owners.has_absent:
            return 0
        return int(self.filemap.numels(entry.grid)[owners.array(entry.base) == ABSENT].sum())

    @cached_property
    def _bytes_there(self) -> int:
        """Bytes of the files that are there: what a manifest claims is not allocated beyond."""
        folders = {f.folder for f in self.manifest.files}
        return sum(info.size for folder in folders for info in self.store.list(folder))

    def read(
        self, wanted: Sequence[tuple[str, Box]], *, allow_absent: bool = False
    ) -> Sequence[Array]:
        """Return boxes of tensors; raises as `ckptd.checkpoint.load.read.execute` besides."""
        places = [(self.number(name), box) for name, box in wanted]
        sizes = [box.numel * self.filemap.dtypes[n].itemsize for n, box in places]
        total = sum(sizes)
        if not allow_absent and total > _FREE_BYTES and total > self._bytes_there * len(wanted):
            raise CorruptError(
                "tensors are larger than all files of the checkpoint together",
                kind="truncated",
                where=self.commit.folder,
                wanted=f"{total} bytes",
                found=f"{self._bytes_there} bytes in its files",
            )
        targets = [np.zeros(size, dtype=np.uint8) for size in sizes]
        wants = [
            Want(n, (box_region(box),), target)
            for (n, box), target in zip(places, targets, strict=True)
            if box.numel
        ]
        plan = read_plan(
            self.manifest, self.filemap, wants, allow_absent=allow_absent, places=self.places
        )
        execute(plan, self.store)
        return [
            target.view(self.filemap.dtypes[n].numpy).reshape(box.shape)
            for (n, box), target in zip(places, targets, strict=True)
        ]

    # -- objects -------------------------------------------------------------------------------

    def raw_object(self, entry: ObjectEntry) -> Any:
        """Return an object as JSON data; per-rank objects are `PerRankValues`."""
        if not entry.tensor:
            return entry.value
        tensor = self._entry(entry.tensor)
        if self.nbytes(entry.tensor) > MAX_OBJECT_BYTES:
            raise CorruptError("an object is too large", where=entry.name)
        if not entry.per_rank:
            return parse_object(self.read([(entry.tensor, Box.whole(tensor.shape))])[0], entry.name)
        grid = self.grid(entry.tensor)
        files = self.filemap.owners[tensor.owners].array(tensor.base).tolist()
        there = [i for i, file in enumerate(files) if file != ABSENT]
        values = self.read([(entry.tensor, grid.piece(i).box) for i in there])
        return PerRankValues(
            (self.manifest.files[files[i]].rank, parse_object(value, entry.name))
            for i, value in zip(there, values, strict=True)
        )
