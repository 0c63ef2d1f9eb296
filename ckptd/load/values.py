"""Values of a checkpoint as numpy arrays and Python objects: for diff, export and scripts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import product
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.errors import CorruptError, NotFoundError
from ckptd.format import codec
from ckptd.format.invariants import check_manifest
from ckptd.format.manifest import ObjectEntry
from ckptd.format.names import CommitName
from ckptd.layout.owners import ABSENT
from ckptd.layout.region import box_region
from ckptd.load.places import Places, check_headers
from ckptd.load.read import execute
from ckptd.load.wants import Want, read_plan
from ckptd.root.index import Index
from ckptd.types import Box, DType

__all__ = ["PerRankValues", "Reader", "cut_box"]

Array = NDArray[Any]
MAX_OBJECT_BYTES = 1 << 30
_FREE_BYTES = 16 << 20
"""So much is allocated before anybody looks whether files can hold it."""


class PerRankValues(dict[int, Any]):
    """The values of a per-rank object, by the rank that saved them."""


class Reader:
    """Reads one checkpoint; everything it returns has been compared with its digests.

    Parameters
    ----------
    index
        The root's catalogue.
    name
        The checkpoint. Hold a lease on it (`ckptd.root.leases.hold`) where others delete.

    Raises
    ------
    NotFoundError, CorruptError
        No such checkpoint, or its record or manifest is bad.
    """

    def __init__(self, index: Index, name: CommitName) -> None:
        self.store = index.store
        self.commit = index.commit(name)
        self.manifest = index.manifest_of(self.commit)
        where = index.where(self.commit.folder + self.commit.manifest)
        self.filemap = check_manifest(self.manifest, where, self.commit.manifest_bytes)
        check_headers(self.store, self.manifest, self.filemap)
        self.places = Places(self.manifest, self.filemap, self.store)
        self._encoded = {o.tensor for o in self.manifest.objects if o.tensor}
        self._numbers: dict[str, int] = {}
        for number, tensor in enumerate(self.manifest.tensors):
            for alias in (tensor.name, *tensor.aliases):
                self._numbers[alias] = number

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in manifest order, without aliases and encoded objects."""
        return [t.name for t in self.manifest.tensors if t.name not in self._encoded]

    def number(self, name: str) -> int:
        """Return the number of a tensor in the manifest, by name or alias.

        Raises
        ------
        NotFoundError
            kind ``no-tensor``.
        """
        if name not in self._numbers:
            raise NotFoundError(
                "the checkpoint has no such tensor", kind="no-tensor", where=name[:200]
            )
        return self._numbers[name]

    def find(self, *names: str) -> str:
        """Return the name under which one of these names or aliases is stored, or ""."""
        known = next((self._numbers[n] for n in names if n in self._numbers), None)
        if known is None or self.manifest.tensors[known].name in self._encoded:
            return ""
        return self.manifest.tensors[known].name

    def aliases(self, name: str) -> tuple[str, ...]:
        """Other names of a tensor that is stored once."""
        return self.manifest.tensors[self.number(name)].aliases

    def dtype(self, name: str) -> DType:
        """Logical type of a tensor."""
        return self.filemap.dtypes[self.number(name)]

    def byte_count(self, name: str) -> int:
        """Bytes of a tensor."""
        number = self.number(name)
        numel = Box((), self.manifest.tensors[number].shape).numel
        return numel * self.filemap.dtypes[number].itemsize

    def tensor(self, name: str, *, allow_absent: bool = False) -> Array:
        """Return a whole tensor; types that numpy lacks are those of ml_dtypes.

        Raises
        ------
        NotFoundError
            kind ``no-tensor``.
        MismatchError
            kind ``absent``, unless `allow_absent`: then absent pieces are zeros.
        CorruptError
            As of `ckptd.load.read.execute`.
        """
        return self.tensors([name], allow_absent=allow_absent)[name]

    def tensors(self, names: Iterable[str], *, allow_absent: bool = False) -> dict[str, Array]:
        """Return several whole tensors in one read; as `tensor`."""
        asked = {name: self.number(name) for name in names}
        boxes = [(n, _whole(self.manifest.tensors[n].shape)) for n in asked.values()]
        return dict(zip(asked, self._read(boxes, allow_absent), strict=True))

    def slabs(
        self, name: str, max_bytes: int, *, allow_absent: bool = False
    ) -> Iterator[tuple[Box, Array]]:
        """Yield a tensor in parts of at most `max_bytes` bytes, row-major: ``(box, values)``.

        One element is the least that a part can be. Raises as `tensor`.
        """
        number = self.number(name)
        shape = self.manifest.tensors[number].shape
        limit = max(1, max_bytes // self.filemap.dtypes[number].itemsize)
        for box in cut_box(shape, limit):
            yield box, self._read([(number, box)], allow_absent)[0]

    @cached_property
    def _bytes_there(self) -> int:
        """Bytes of the files that are there: what a manifest claims is not allocated beyond."""
        folders = {f.path.rpartition("/")[0] + "/" for f in self.manifest.files}
        return sum(info.size for folder in folders for info in self.store.list(folder))

    def _read(self, wanted: Sequence[tuple[int, Box]], allow_absent: bool) -> list[Array]:
        size = sum(box.numel * self.filemap.dtypes[n].itemsize for n, box in wanted)
        if not allow_absent and size > _FREE_BYTES and size > self._bytes_there * len(wanted):
            raise CorruptError(
                "tensors are larger than all files of the checkpoint together",
                kind="truncated",
                where=self.commit.folder,
                wanted=f"{size} bytes",
                found=f"{self._bytes_there} bytes in its files",
            )
        targets = [
            np.zeros(box.numel * self.filemap.dtypes[n].itemsize, dtype=np.uint8)
            for n, box in wanted
        ]
        wants = [
            Want(n, (box_region(box),), target)
            for (n, box), target in zip(wanted, targets, strict=True)
            if box.numel
        ]
        plan = read_plan(
            self.manifest,
            self.filemap,
            wants,
            store=self.store,
            allow_absent=allow_absent,
            places=self.places,
        )
        execute(plan, self.store)
        return [
            target.view(self.filemap.dtypes[n].numpy).reshape(box.shape)
            for (n, box), target in zip(wanted, targets, strict=True)
        ]

    def absent_elements(self, name: str) -> int:
        """Number of elements of a tensor that no file holds."""
        number = self.number(name)
        entry = self.manifest.tensors[number]
        owners = self.filemap.owners[entry.owners]
        if not owners.has_absent:
            return 0
        gone = owners.array(entry.base) == ABSENT
        return int(self.filemap.numels(entry.grid)[gone].sum())

    # -- objects -------------------------------------------------------------------------------

    def raw_objects(self) -> dict[str, Any]:
        """Return all objects as JSON data, undecoded (spec section 7), by name.

        Per-rank objects are `PerRankValues`. Needs no type to be registered.
        """
        return {o.name: self.raw_object(o) for o in self.manifest.objects}

    def objects(self) -> dict[str, Any]:
        """Return all objects by name; per-rank objects are `PerRankValues`.

        Raises
        ------
        UsageError
            kind ``unregistered``: this program has not registered a type that is used.
        CorruptError
            kind ``bad-object``.
        """
        out: dict[str, Any] = {}
        for name, raw in self.raw_objects().items():
            if isinstance(raw, PerRankValues):
                out[name] = PerRankValues((r, codec.decode(v, name)) for r, v in raw.items())
            else:
                out[name] = codec.decode(raw, name)
        return out

    def raw_object(self, entry: ObjectEntry) -> Any:
        """Return one object as `raw_objects` does."""
        if not entry.tensor:
            return entry.value
        number = self.number(entry.tensor)
        if self.byte_count(entry.tensor) > MAX_OBJECT_BYTES:
            raise CorruptError("an object is too large", kind="limits", where=entry.name)
        if not entry.per_rank:
            box = _whole(self.manifest.tensors[number].shape)
            return _parse(self._read([(number, box)], False)[0], entry.name)
        cells = self._cells(number)
        values = self._read([(number, box) for _, box in cells], False)
        return PerRankValues(
            (rank, _parse(value, entry.name))
            for (rank, _), value in zip(cells, values, strict=True)
        )

    def _cells(self, number: int) -> list[tuple[int, Box]]:
        """Return ``(rank, box)`` of each cell of a per-rank object."""
        entry, grid = self.manifest.tensors[number], self.filemap.grid_of(number)
        files = self.filemap.owners[entry.owners].array(entry.base).tolist()
        return [
            (self.manifest.files[file].rank, grid.piece(i).box)
            for i, file in enumerate(files)
            if file != ABSENT
        ]


def _parse(raw: Array, where: str) -> Any:
    try:
        return msgspec.json.decode(raw.tobytes())
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorruptError(
            "an encoded object is not JSON", kind="bad-object", where=where, found=str(error)[:200]
        ) from None


def _whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def cut_box(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Cut a tensor into boxes of at most `most` elements, in row-major order.

    Inner dimensions stay whole as far as they fit, one dimension is cut, outer ones are single.
    """
    if not Box((), shape).numel:
        return
    inner, d = 1, len(shape)
    while d and inner * shape[d - 1] <= most:
        d -= 1
        inner *= shape[d]
    if not d:
        yield _whole(shape)
        return
    step = max(1, most // inner)
    for outer in product(*map(range, shape[: d - 1])):
        for start in range(0, shape[d - 1], step):
            size = min(step, shape[d - 1] - start)
            yield Box(
                (*outer, start, *(0,) * (len(shape) - d)), (*(1,) * (d - 1), size, *shape[d:])
            )
