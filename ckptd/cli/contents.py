"""What ``ckptd inspect`` prints: tensors, chunks, objects, files and meshes of a checkpoint."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from ckptd.cli.output import Document
from ckptd.errors import NotFoundError, UsageError
from ckptd.format.filemap import FileMap
from ckptd.format.invariants import check_manifest
from ckptd.format.manifest import Manifest
from ckptd.format.names import CommitName
from ckptd.format.records import Commit
from ckptd.layout.owners import ABSENT, Owners
from ckptd.load.places import Places
from ckptd.root.catalogue import Catalogue
from ckptd.tools.inspect import Layout, Layouts, object_tensors, object_text, ranks_text

__all__ = [
    "ChunkRow",
    "FileRow",
    "InspectDocument",
    "MeshRow",
    "ObjectRow",
    "TensorRow",
    "describe",
    "matches",
    "no_tensor",
]

_MOST_CHUNKS = 100_000
_MOST_NEAR = 5


class ChunkRow(msgspec.Struct, frozen=True):
    """One chunk.

    Attributes
    ----------
    offset, shape
        Its cell, in elements of the tensor.
    flat
        First element and end of the range inside the cell, row-major; null for the whole cell.
    file, rank
        Where it lies and who wrote it; null when it is absent.
    start, end
        Bytes of the file's data section.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    flat: tuple[int, int] | None
    file: str | None
    rank: int | None
    start: int
    end: int


class TensorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One logical tensor.

    Attributes
    ----------
    name, aliases
        Its name, and those of tensors that are the same one.
    bytes
        Of the whole tensor, absent chunks included.
    layout
        How it is cut: words, cells, flat, chunks, absent, ranks.
    chunk_list
        With ``--chunks``; else null.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    layout: Layout
    aliases: tuple[str, ...] = ()
    chunk_list: tuple[ChunkRow, ...] | None = None


class ObjectRow(msgspec.Struct, frozen=True):
    """One value that is no tensor.

    Attributes
    ----------
    kind
        ``value``, or ``groups`` for an optimizer's groups.
    per_rank
        What happens to it when the world changes; empty for a value that all ranks share.
    text
        The value in few words.
    value
        The value in the encoding of the format (spec section 7); null when it lies in a file.
    bytes
        Bytes in a file, 0 when it lies in the manifest.
    """

    name: str
    kind: str
    per_rank: str
    text: str
    value: Any
    bytes: int


class FileRow(msgspec.Struct, frozen=True):
    """One data file: path below the root, the rank that wrote it, length of data and header."""

    path: str
    rank: int
    bytes: int
    header_bytes: int


class MeshRow(msgspec.Struct, frozen=True):
    """One device mesh of the job that saved."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: str


class InspectDocument(Document, frozen=True, kw_only=True, tag="inspect"):
    """What ``ckptd inspect --json`` prints.

    Attributes
    ----------
    root, step, generation, attempt, created, world_size, data_bytes, folder, metadata
        As in ``ckptd ls``.
    tensors
        In the order of the checkpoint; with ``--tensor`` only those that match.
    objects, files, meshes
        The rest of the checkpoint.
    witness
        Kind of the witness; null when there is none.
    """

    root: str
    step: int
    generation: int
    attempt: str
    created: str
    world_size: int
    data_bytes: int
    folder: str
    metadata: dict[str, Any]
    tensors: tuple[TensorRow, ...]
    objects: tuple[ObjectRow, ...]
    files: tuple[FileRow, ...]
    meshes: tuple[MeshRow, ...]
    witness: str | None


def matches(name: str, pattern: str) -> bool:
    """Tell whether a tensor is meant by a pattern: a shell pattern, or the beginning of names."""
    return not pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def no_tensor(pattern: str, names: Sequence[str], where: str) -> NotFoundError:
    """Return the error for a pattern that no tensor matches."""
    near = difflib.get_close_matches(pattern, names, _MOST_NEAR, 0.3) or list(names[:_MOST_NEAR])
    return NotFoundError(
        "no tensor matches",
        kind="no-tensor",
        where=where,
        wanted=pattern,
        found=f"{len(names)} tensors, such as {', '.join(near)}" if near else "no tensor at all",
    )


def describe(
    catalogue: Catalogue, name: CommitName, pattern: str, with_chunks: bool
) -> InspectDocument:
    """Return what a checkpoint holds.

    Parameters
    ----------
    pattern
        Only tensors that match it (`matches`); "" is all of them.
    with_chunks
        Also say where each chunk lies.

    Raises
    ------
    NotFoundError
        Kind ``no-tensor``.
    UsageError
        There are too many chunks to list.
    """
    commit = catalogue.commit(name)
    manifest = catalogue.manifest_of(commit)
    filemap = check_manifest(manifest, commit.folder + commit.manifest, commit.manifest_bytes)
    layouts = Layouts(manifest, filemap)
    hidden = object_tensors(manifest)
    chosen = [
        i
        for i, t in enumerate(manifest.tensors)
        if t.name not in hidden and any(matches(n, pattern) for n in (t.name, *t.aliases))
    ]
    if pattern and not chosen:
        names = [t.name for t in manifest.tensors if t.name not in hidden]
        raise no_tensor(pattern, names, catalogue.where(commit.folder))
    rows = [_tensor(filemap, layouts, i) for i in chosen]
    if with_chunks:
        lists = _chunk_lists(catalogue, manifest, filemap, chosen)
        rows = [msgspec.structs.replace(r, chunk_list=c) for r, c in zip(rows, lists, strict=True)]
    return _around(catalogue, commit, manifest, rows, _objects(manifest, filemap, layouts))


def _around(
    catalogue: Catalogue,
    commit: Commit,
    manifest: Manifest,
    tensors: list[TensorRow],
    objects: list[ObjectRow],
) -> InspectDocument:
    return InspectDocument(
        root=catalogue.store.url,
        step=commit.step,
        generation=commit.generation,
        attempt=commit.attempt,
        created=commit.created,
        world_size=commit.world_size,
        data_bytes=commit.data_bytes,
        folder=commit.folder,
        metadata=manifest.metadata,
        tensors=tuple(tensors),
        objects=tuple(objects),
        files=tuple(
            FileRow(f.path, f.rank, f.data_bytes, f.data_start)
            for f in manifest.files
            if f.data_start
        ),
        meshes=tuple(
            MeshRow(m.names, m.shape, ranks_text(sorted(Owners(m.ranks).array().tolist())))
            for m in manifest.meshes
        ),
        witness=manifest.witness.kind if manifest.witness else None,
    )


def _tensor(filemap: FileMap, layouts: Layouts, number: int) -> TensorRow:
    entry = filemap.tensors[number]
    return TensorRow(
        name=entry.name,
        dtype=entry.dtype,
        shape=entry.shape,
        bytes=math.prod(entry.shape) * filemap.dtypes[number].itemsize,
        layout=layouts.of(number),
        aliases=entry.aliases,
    )


def _objects(manifest: Manifest, filemap: FileMap, layouts: Layouts) -> list[ObjectRow]:
    numbers = {t.name: i for i, t in enumerate(manifest.tensors)}
    rows = []
    for entry in manifest.objects:
        nbytes, ranks = 0, ""
        if entry.tensor:
            stored = _tensor(filemap, layouts, numbers[entry.tensor])
            nbytes, ranks = stored.bytes, stored.layout.ranks
        text = object_text(entry, nbytes, ranks)
        rows.append(ObjectRow(entry.name, entry.kind, entry.per_rank, text, entry.value, nbytes))
    return rows


def _chunk_lists(
    catalogue: Catalogue, manifest: Manifest, filemap: FileMap, tensors: list[int]
) -> list[tuple[ChunkRow, ...]]:
    total = sum(filemap.grid_of(t).npieces for t in tensors)
    if total > _MOST_CHUNKS:
        raise UsageError(
            "too many chunks to list",
            wanted=f"at most {_MOST_CHUNKS}",
            found=total,
            hint="choose tensors with --tensor PATTERN",
        )
    places = Places(manifest, filemap, catalogue.store)
    return [tuple(_chunks(manifest, filemap, places, t)) for t in tensors]


def _chunks(manifest: Manifest, filemap: FileMap, places: Places, tensor: int) -> list[ChunkRow]:
    grid, itemsize = filemap.grid_of(tensor), filemap.dtypes[tensor].itemsize
    rows = []
    for number in range(grid.npieces):
        piece = grid.piece(number)
        file, start = places.of(tensor, number)
        here = None if file == ABSENT else manifest.files[file]
        rows.append(
            ChunkRow(
                offset=piece.box.offset,
                shape=piece.box.shape,
                flat=piece.flat,
                file=here.path if here else None,
                rank=here.rank if here else None,
                start=start,
                end=start + (piece.numel * itemsize if here else 0),
            )
        )
    return rows
