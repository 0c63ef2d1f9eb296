"""Real checkpoints from numpy arrays: data files, digest indexes, manifest, records."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ckptd.base.digest import BLOCK_BYTES, DigestIndex, digest, digest_hex
from ckptd.base.grids.block import Region, piece_regions
from ckptd.base.grids.grid import Axis, Grid, Piece, strides_of, whole
from ckptd.base.grids.owners import ABSENT, Owners
from ckptd.checkpoint.format.container import FileMap, build_header
from ckptd.checkpoint.format.manifest import (
    FileEntry,
    GridEntry,
    Manifest,
    ObjectEntry,
    TensorEntry,
    WitnessEntry,
    encode_manifest,
)
from ckptd.checkpoint.format.names import WITNESS, CommitName, data_folder, digests_key, file_key
from ckptd.checkpoint.format.records import Commit
from ckptd.checkpoint.format.witness import SAMPLE, Witness, WitnessPlan, gather
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.index import stamp
from ckptd.store.base import Store
from ckptd.types import DTYPES, Box

Array = np.ndarray[Any, Any]
_ids = itertools.count(1)


@dataclass(frozen=True)
class Saved:
    """One tensor: its values, how it is cut, and the file number of each piece."""

    values: Array
    grid: Grid
    owners: Sequence[int]
    dtype: str = ""
    aliases: tuple[str, ...] = ()

    @staticmethod
    def whole(values: Array, file: int = 0) -> Saved:
        return Saved(values, whole(values.shape), [file])

    @staticmethod
    def rows(values: Array, parts: int, first: int = 0) -> Saved:
        sizes = [len(x) for x in np.array_split(np.arange(values.shape[0]), parts)]
        axes = (Axis.from_sizes(sizes), *(Axis(((n, 1),)) for n in values.shape[1:]))
        grid = Grid(axes)
        return Saved(values, grid, list(range(first, first + grid.npieces)))

    def bytes_of(self, piece: Piece) -> bytes:
        index = tuple(slice(o, e) for o, e in zip(piece.box.offset, piece.box.end, strict=True))
        cell = np.ascontiguousarray(self.values[index]).reshape(-1)
        cut = cell if piece.flat is None else cell[piece.flat[0] : piece.flat[1]]
        return cut.tobytes()

    @property
    def dtype_name(self) -> str:
        return self.dtype or self.values.dtype.name


@dataclass(frozen=True)
class Built:
    manifest: Manifest
    filemap: FileMap
    commit: Commit

    @property
    def name(self) -> CommitName:
        return self.commit.name

    def number(self, tensor: str) -> int:
        return next(i for i, t in enumerate(self.manifest.tensors) if t.name == tensor)


def build(
    store: Store,
    tensors: Mapping[str, Saved],
    *,
    step: int = 1,
    generation: int = 1,
    attempt: str = "a",
    objects: Sequence[ObjectEntry] = (),
    older: Sequence[FileEntry] = (),
    witness: bool = True,
    publish: bool = True,
) -> Built:
    """Write a checkpoint of one rank a file.

    With `older` the file table begins with these entries of earlier checkpoints, and owners below
    their number refer to chunks there. With `publish` the commit record is made too.
    """
    folder = data_folder(CommitName(step, generation), attempt)
    grids, owners = _tables(tensors)
    entries = [
        TensorEntry(
            n,
            t.dtype_name,
            t.values.shape,
            grids.index(t.grid),
            owners.index(tuple(t.owners)),
            aliases=t.aliases,
        )
        for n, t in tensors.items()
    ]
    maps = [Owners.from_array(o) for o in owners]
    world = max((o.highest() for o in maps), default=0) + 1 - len(older)
    ranks = [f.rank for f in older] + list(range(max(1, world)))
    draft = Manifest(
        step=step,
        generation=generation,
        attempt=attempt,
        world_size=max(1, world),
        files=tuple(FileEntry(f"draft{i}", r) for i, r in enumerate(ranks)),
        grids=tuple(GridEntry.of(g) for g in grids),
        owners=tuple(m.runs for m in maps),
        tensors=tuple(entries),
        objects=tuple(objects),
    )
    filemap = FileMap.of(draft, "draft")
    files = [
        *older,
        *(
            _write_file(store, folder, filemap, number, ranks[number], tensors)
            for number in range(len(older), len(ranks))
        ),
    ]
    proof = _write_witness(store, folder, draft, tensors) if witness else None
    manifest = msgspec.structs.replace(draft, files=tuple(files), witness=proof)
    return _finish(store, folder, manifest, filemap, publish)


def _tables(tensors: Mapping[str, Saved]) -> tuple[list[Grid], list[tuple[int, ...]]]:
    return (
        list(dict.fromkeys(t.grid for t in tensors.values())),
        list(dict.fromkeys(tuple(t.owners) for t in tensors.values())),
    )


def _write_file(
    store: Store,
    folder: str,
    filemap: FileMap,
    number: int,
    rank: int,
    tensors: Mapping[str, Saved],
) -> FileEntry:
    header, data_bytes = build_header(filemap.header_entries(number), {"rank": str(rank)})
    names = [t.name for t in filemap.tensors]
    chunks = [tensors[names[c.tensor]].bytes_of(c.piece) for c in filemap.chunks(number)]
    data = b"".join(chunks)
    assert len(data) == data_bytes
    blocks = [digest(data[i : i + BLOCK_BYTES]) for i in range(0, len(data), BLOCK_BYTES)]
    index = DigestIndex.build(len(data), blocks, [digest(c) for c in chunks]).encode()
    key = file_key(folder, rank)
    store.put(key, header + data)
    store.put(digests_key(key), index)
    return FileEntry(key, rank, len(header), len(data), digest_hex(index))


def _write_witness(
    store: Store, folder: str, manifest: Manifest, tensors: Mapping[str, Saved]
) -> WitnessEntry:
    plan = WitnessPlan.of(manifest)
    witness = Witness.empty(plan)
    for number, entry in enumerate(manifest.tensors):
        saved = tensors[entry.name]
        for piece, file in zip(
            map(saved.grid.piece, range(saved.grid.npieces)), saved.owners, strict=True
        ):
            if file == ABSENT or not piece.numel:
                continue
            slots, elements = plan.select(number, piece_regions(piece))
            buffer = np.frombuffer(saved.bytes_of(piece), dtype=np.uint8)
            witness.put(slots, gather(buffer, DTYPES[entry.dtype].itemsize, elements))
    raw = witness.encode()
    store.put(folder + WITNESS, raw)
    return WitnessEntry(SAMPLE, digest_hex(raw))


def _finish(
    store: Store, folder: str, manifest: Manifest, filemap: FileMap, publish: bool
) -> Built:
    name, raw = encode_manifest(manifest)
    store.put(folder + name, raw)
    commit = Commit(
        step=manifest.step,
        generation=manifest.generation,
        attempt=manifest.attempt,
        folder=folder,
        folders=tuple(sorted({f.path.rpartition("/")[0] + "/" for f in manifest.files} | {folder})),
        manifest=name,
        manifest_digest=digest_hex(raw),
        manifest_bytes=len(raw),
        write_id=f"w{next(_ids)}",
        created=stamp(),
        world_size=manifest.world_size,
        data_bytes=sum(f.data_bytes for f in manifest.files),
    )
    if publish:
        catalogue = Catalogue(store)
        catalogue.create_or_open()
        while catalogue.newest_generation() < manifest.generation:
            catalogue.claim(catalogue.latest(), manifest.world_size, "start")
        catalogue.publish(commit)
    return Built(manifest, filemap, commit)


# --- random layouts and regions ------------------------------------------------------------------


def random_axis(rng: random.Random, extent: int) -> Axis:
    if extent == 0:
        return Axis(((0, 1),))
    cuts = sorted(rng.sample(range(1, extent), min(extent - 1, rng.randrange(4))))
    return Axis.from_sizes(b - a for a, b in zip([0, *cuts], [*cuts, extent], strict=True))


def random_grid(rng: random.Random, shape: tuple[int, ...]) -> Grid:
    grid = Grid(tuple(random_axis(rng, n) for n in shape))
    if rng.random() < 0.5 and all(shape):
        cells = [grid.cell_box(i).numel for i in range(grid.ncells)]
        return Grid(grid.axes, tuple(random_axis(rng, n) for n in cells))
    return grid


def random_saved(rng: random.Random, values: Array, files: int) -> Saved:
    grid = random_grid(rng, values.shape)
    return Saved(values, grid, [rng.randrange(files) for _ in range(grid.npieces)])


def random_box(rng: random.Random, shape: tuple[int, ...]) -> Box:
    offset, size = [], []
    for n in shape:
        lo = rng.randrange(n + 1)
        offset.append(lo)
        size.append(rng.randrange(n - lo + 1))
    return Box(tuple(offset), tuple(size))


def random_region(rng: random.Random, box: Box, start: int) -> tuple[Region, int]:
    """Return a region whose dimensions lie in any order in memory, with gaps; and its end."""
    order = list(range(len(box.shape)))
    rng.shuffle(order)
    strides = [0] * len(order)
    step = 1
    for d in order:
        strides[d] = step
        step *= max(1, box.shape[d]) + rng.choice([0, 0, 3])
    if rng.random() < 0.4:
        strides, step = list(strides_of(box.shape)), box.numel
    region = Region(box, start, tuple(strides))
    return region, start + step


def take(values: Array, box: Box) -> Array:
    index = tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))
    return np.asarray(values[index])


def seen_through(target: Array, region: Region) -> Array:
    """Return a region of a typed flat buffer as an array of the box's shape."""
    return np.lib.stride_tricks.as_strided(
        target[region.start :],
        region.box.shape,
        [s * target.itemsize for s in region.strides],
        writeable=False,
    )
