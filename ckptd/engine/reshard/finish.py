"""From the parts of all files to a commit: by whoever finds that none is missing."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np

from ckptd.engine.catalogue import Catalogue
from ckptd.engine.reshard.parts import FilePart, load_part
from ckptd.engine.reshard.place import OwnPlace, Place
from ckptd.engine.reshard.target import Target
from ckptd.errors import CorruptError, NotFoundError
from ckptd.format.digest import digest_hex
from ckptd.format.invariants import check_files, check_manifest
from ckptd.format.manifest import FileEntry, Manifest, WitnessEntry, encode_manifest
from ckptd.format.names import PARTS, WITNESS
from ckptd.format.records import Commit
from ckptd.format.witness import SAMPLE, Witness
from ckptd.store.base import Store

__all__ = ["commit_parts", "find_commit", "missing_files", "remove_parts"]


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
    manifest = _manifest(
        place, target, [p.file for p in parts], _witness(store, place, target, parts)
    )
    name, raw = encode_manifest(manifest)
    check_files(manifest, check_manifest(manifest, place.folder + name, len(raw)))
    store.put(place.folder + name, raw)
    store.sync(place.folder)
    commit = _record(manifest, place, name, raw)
    catalogue.publish(commit)
    return commit


def remove_parts(store: Store, place: Place) -> None:
    """Remove what the processes told each other."""
    store.delete([info.key for info in store.list(place.folder + PARTS)])


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


def _witness(
    store: Store, place: OwnPlace, target: Target, parts: Sequence[FilePart]
) -> WitnessEntry | None:
    if not target.witness.total:
        return None
    witness = Witness.empty(target.witness)
    for part in parts:
        slots = np.frombuffer(part.slots, dtype="<u4").astype(np.int64)
        rows = np.frombuffer(part.values, dtype=np.uint8)
        if len(rows) != 8 * len(slots) or (len(slots) and slots.max() >= target.witness.total):
            raise CorruptError(
                "a part's witness is malformed", kind="bad-record", where=part.file.path
            )
        witness.put(slots, rows.reshape(-1, 8))
    raw = witness.encode()
    store.put(place.folder + WITNESS, raw)
    return WitnessEntry(SAMPLE, digest_hex(raw))


def _record(manifest: Manifest, place: OwnPlace, name: str, raw: bytes) -> Commit:
    return Commit(
        step=place.name.step,
        generation=place.name.generation,
        attempt=place.attempt,
        folder=place.folder,
        folders=(place.folder,),
        manifest=name,
        manifest_digest=digest_hex(raw),
        manifest_bytes=len(raw),
        write_id=uuid.uuid4().hex,
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        world_size=manifest.world_size,
        data_bytes=sum(f.data_bytes for f in manifest.files),
        metadata=manifest.metadata,
    )
