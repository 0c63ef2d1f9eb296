"""What ``ckptd inspect`` prints: tensors, chunks, objects, files and meshes of a checkpoint."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from ckptd.cli.output import Document
from ckptd.errors import NotFoundError, UsageError
from ckptd.format.manifest import ObjectEntry
from ckptd.format.names import CommitName
from ckptd.layout.owners import ABSENT, Owners
from ckptd.load.reader import CkptdReader
from ckptd.readers.reader import TensorInfo
from ckptd.readers.words import TensorLayout, object_text, ranks_text
from ckptd.root.catalogue import Catalogue

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
    layout: TensorLayout
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
    reader = CkptdReader(catalogue, name, listed=False)
    chosen = [
        info
        for info in reader.infos.values()
        if any(matches(n, pattern) for n in (info.name, *info.aliases))
    ]
    if pattern and not chosen:
        raise no_tensor(pattern, reader.names, catalogue.where(reader.commit.folder))
    total = sum(reader.grid(info.name).npieces for info in chosen) if with_chunks else 0
    if total > _MOST_CHUNKS:
        raise UsageError(
            "too many chunks to list",
            wanted=f"at most {_MOST_CHUNKS}",
            found=total,
            hint="choose tensors with --tensor PATTERN",
        )
    commit, manifest = reader.commit, reader.manifest
    return InspectDocument(
        root=reader.url,
        step=commit.step,
        generation=commit.generation,
        attempt=commit.attempt,
        created=commit.created,
        world_size=commit.world_size,
        data_bytes=commit.data_bytes,
        folder=commit.folder,
        metadata=manifest.metadata,
        tensors=tuple(_tensor(reader, info, with_chunks=with_chunks) for info in chosen),
        objects=tuple(_object(reader, entry) for entry in reader.entries),
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


def _tensor(reader: CkptdReader, info: TensorInfo, *, with_chunks: bool) -> TensorRow:
    return TensorRow(
        name=info.name,
        dtype=info.dtype.name,
        shape=info.shape,
        bytes=info.nbytes,
        layout=reader.layout(info.name),
        aliases=info.aliases,
        chunk_list=tuple(_chunks(reader, info)) if with_chunks else None,
    )


def _object(reader: CkptdReader, entry: ObjectEntry) -> ObjectRow:
    nbytes = reader.nbytes(entry.tensor) if entry.tensor else 0
    ranks = reader.layout(entry.tensor).ranks if entry.tensor else ""
    text = object_text(entry, nbytes, ranks)
    return ObjectRow(entry.name, entry.kind, entry.per_rank, text, entry.value, nbytes)


def _chunks(reader: CkptdReader, info: TensorInfo) -> Iterator[ChunkRow]:
    tensor, grid = reader.number(info.name), reader.grid(info.name)
    for number in range(grid.npieces):
        piece = grid.piece(number)
        file, start = reader.places.of(tensor, number)
        here = None if file == ABSENT else reader.manifest.files[file]
        yield ChunkRow(
            offset=piece.box.offset,
            shape=piece.box.shape,
            flat=piece.flat,
            file=here.path if here else None,
            rank=here.rank if here else None,
            start=start,
            end=start + (piece.numel * info.dtype.itemsize if here else 0),
        )
