"""From the parts of all files to a commit: by whoever finds that none is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from ckptd.decoding import msgpack_decoder
from ckptd.errors import CorruptError, NotFoundError
from ckptd.format.filemap import FileMap
from ckptd.format.manifest import FileEntry, Manifest, WitnessEntry
from ckptd.format.names import PARTS, CommitName, data_folder, file_key
from ckptd.format.records import Commit
from ckptd.reshard.target import Target
from ckptd.root.catalogue import Catalogue, publish_manifest, write_witness
from ckptd.store.base import Store
from ckptd.types import DType

__all__ = [
    "FilePart",
    "FilePlace",
    "OwnPlace",
    "commit_parts",
    "find_commit",
    "load_part",
    "missing_files",
    "save_part",
]


class FilePart(msgspec.Struct, frozen=True):
    """A complete file.

    Attributes
    ----------
    file
        Its entry in the manifest.
    slots, values
        The target witness's values that lie in it: slots as little-endian uint32, 8 bytes each.
    """

    file: FileEntry
    slots: bytes = b""
    values: bytes = b""


_file_parts = msgpack_decoder(FilePart)


def _key(folder: str, number: int) -> str:
    return f"{folder}{PARTS}f{number:05d}"


def save_part(store: Store, folder: str, number: int, part: FilePart) -> None:
    """Record that a file is complete; durable on return."""
    store.put(_key(folder, number), msgspec.msgpack.encode(part))


def load_part(store: Store, folder: str, number: int) -> FilePart | None:
    """Return the part of a file when the file is complete and has the length that it says."""
    key = _key(folder, number)
    try:
        part = _file_parts.decode(store.get(key))
        size = store.stat(part.file.path).size if part.file.data_start else 0
    except NotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise CorruptError(
            "a part is not one", kind="bad-record", where=key, found=str(error)[:200]
        ) from None
    return part if size == part.file.data_start + part.file.data_bytes else None


class FilePlace(Protocol):
    """A place for files."""

    @property
    def folder(self) -> str:
        """Folder that holds ``parts/``; ends in "/"."""

    @property
    def with_digests(self) -> bool:
        """Whether each data file gets a digest index."""

    def path(self, number: int) -> str:
        """Key of a data file."""

    def header_entries(
        self, filemap: FileMap, number: int
    ) -> list[tuple[str, DType, tuple[int, ...]]]:
        """Return name, type and shape of each chunk of a file."""

    def header_metadata(self, number: int) -> dict[str, str]:
        """Return what the header says besides."""


class OwnPlace:
    """A checkpoint of ckptd: step, generation, attempt, and the folder of these."""

    with_digests = True

    def __init__(self, step: int, generation: int, attempt: str) -> None:
        self.name = CommitName(step, generation)
        self.attempt = attempt
        self.folder = data_folder(self.name, attempt)

    def path(self, number: int) -> str:
        """Key of a rank's file."""
        return file_key(self.folder, number)

    def entry(self, number: int) -> FileEntry:
        """Return the entry of a rank that writes no file."""
        return FileEntry(self.path(number), number)

    def header_entries(
        self, filemap: FileMap, number: int
    ) -> list[tuple[str, DType, tuple[int, ...]]]:
        """Return the names that the specification fixes."""
        return filemap.header_entries(number)

    def header_metadata(self, number: int) -> dict[str, str]:
        """Return a line about step and rank."""
        return {"format": "pt", "ckptd": f"step {self.name.step} rank {number}"}


def missing_files(store: Store, place: FilePlace, files: Sequence[int]) -> list[int]:
    """Return which of some files are not complete."""
    return [f for f in files if load_part(store, place.folder, f) is None]


def find_commit(catalogue: Catalogue, place: OwnPlace) -> Commit | None:
    """Return the commit that this work ends in, if it exists already."""
    try:
        commit = catalogue.commit(place.name)
    except NotFoundError:
        return None
    return commit if commit.attempt == place.attempt else None


def commit_parts(catalogue: Catalogue, place: OwnPlace, target: Target) -> Commit | None:
    """Make the checkpoint exist if all of its files do; None when one is missing.

    Any process may do this, and several at a time: they make the same bytes, and the record is
    create-only.

    Raises
    ------
    ConflictError
        Kind ``superseded``: a newer generation was claimed. Kind ``committed``: another attempt
        committed this step.
    CorruptError
        A part is not what was written.
    """
    store = catalogue.store
    parts: list[FilePart] = []
    for number in range(target.world):
        if not target.filemap.nchunks(number):
            parts.append(FilePart(place.entry(number)))
            continue
        part = load_part(store, place.folder, number)
        if part is None:
            return find_commit(catalogue, place)
        parts.append(part)
    values = ((p.file.path, p.slots, p.values) for p in parts)
    witness = write_witness(store, place.folder, target.witness, values)
    return publish_manifest(catalogue, _manifest(place, target, [p.file for p in parts], witness))


def _manifest(
    place: OwnPlace, target: Target, files: Sequence[FileEntry], witness: WitnessEntry | None
) -> Manifest:
    return Manifest(
        step=place.name.step,
        generation=place.name.generation,
        attempt=place.attempt,
        world_size=target.world,
        files=tuple(files),
        grids=target.grids,
        owners=target.owners,
        tensors=target.tensors,
        objects=target.objects,
        meshes=target.meshes,
        witness=witness,
        metadata=dict(target.metadata or {}),
        lay=target.lay,
    )
