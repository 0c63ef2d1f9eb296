"""From the parts of all files to a commit: by whoever finds that none is missing."""

from __future__ import annotations

from collections.abc import Sequence

from ckptd.engine.catalogue import Catalogue
from ckptd.engine.publish import publish_manifest, write_witness
from ckptd.engine.reshard.parts import FilePart, load_part
from ckptd.engine.reshard.place import OwnPlace, Place
from ckptd.engine.reshard.target import Target
from ckptd.errors import NotFoundError
from ckptd.format.manifest import FileEntry, Manifest, WitnessEntry
from ckptd.format.records import Commit
from ckptd.store.base import Store

__all__ = ["commit_parts", "find_commit", "missing_files"]


def missing_files(store: Store, place: Place, files: Sequence[int]) -> list[int]:
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
