"""The last steps of every way to a checkpoint: the witness, the manifest, the commit record."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from datetime import UTC, datetime

import numpy as np

from ckptd.engine.catalogue import Catalogue
from ckptd.errors import CorruptError
from ckptd.format.digest import digest_hex
from ckptd.format.invariants import check_files, check_manifest
from ckptd.format.manifest import Manifest, WitnessEntry, encode_manifest
from ckptd.format.names import WITNESS
from ckptd.format.records import Commit
from ckptd.format.witness import SAMPLE, Witness, WitnessPlan
from ckptd.store.base import Store

__all__ = ["publish_manifest", "write_manifest", "write_witness"]


def write_witness(
    store: Store, folder: str, plan: WitnessPlan, parts: Iterable[tuple[str, bytes, bytes]]
) -> WitnessEntry | None:
    """Write the witness of a checkpoint into its data folder; None when it has no values.

    Parameters
    ----------
    parts
        Where each part comes from, its slots as little-endian uint32, and 8 bytes for each.

    Raises
    ------
    CorruptError
        kind ``bad-record``: a part is not what the plan asks for.
    """
    if not plan.total:
        return None
    witness = Witness.empty(plan)
    for where, raw_slots, raw_values in parts:
        slots = np.frombuffer(raw_slots, dtype="<u4").astype(np.int64)
        rows = np.frombuffer(raw_values, dtype=np.uint8)
        if len(rows) != 8 * len(slots) or (len(slots) and int(slots.max()) >= plan.total):
            raise CorruptError("a part's witness is malformed", kind="bad-record", where=where)
        witness.put(slots, rows.reshape(-1, 8))
    raw = witness.encode()
    store.put(folder + WITNESS, raw)
    return WitnessEntry(SAMPLE, digest_hex(raw))


def write_manifest(store: Store, manifest: Manifest) -> tuple[str, bytes]:
    """Write a manifest into its data folder; return its name there and what was written.

    Raises
    ------
    CorruptError
        The manifest breaks a rule of the format.
    """
    name, raw = encode_manifest(manifest)
    where = manifest.folder + name
    check_files(manifest, check_manifest(manifest, where, len(raw)))
    store.put(where, raw)
    return name, raw


def publish_manifest(
    catalogue: Catalogue,
    manifest: Manifest,
    *,
    write_id: str = "",
    created: str = "",
    root: str = "",
    claim: str = "",
) -> Commit:
    """Write a manifest, and the commit record by which the checkpoint begins to exist.

    All other files are durable already.

    Parameters
    ----------
    write_id, created
        As in the record; a new id, and now, when empty.
    root, claim
        As in the record: of whom it is. When empty, the root that was opened, and the claim of the
        generation as the catalogue knows it.

    Raises
    ------
    CorruptError
        The manifest breaks a rule of the format.
    ConflictError
        See `ckptd.engine.catalogue.Catalogue.publish`.
    """
    folder, store = manifest.folder, catalogue.store
    name, raw = write_manifest(store, manifest)
    store.sync(folder)
    folders = {f.path.rpartition("/")[0] + "/" for f in manifest.files if f.data_start}
    commit = Commit(
        step=manifest.step,
        generation=manifest.generation,
        attempt=manifest.attempt,
        folder=folder,
        folders=tuple(sorted(folders | {folder})),
        manifest=name,
        manifest_digest=digest_hex(raw),
        manifest_bytes=len(raw),
        write_id=write_id or uuid.uuid4().hex,
        created=created or datetime.now(UTC).isoformat(timespec="milliseconds"),
        world_size=manifest.world_size,
        data_bytes=sum(f.data_bytes for f in manifest.files),
        metadata=manifest.metadata,
        root=root or catalogue.root_id,
        claim=claim or catalogue.generation(manifest.generation).claim_id,
    )
    catalogue.publish(commit)
    return commit
