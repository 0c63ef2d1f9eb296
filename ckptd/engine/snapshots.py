"""Snapshots: attempts of which near tiers hold every rank's part, with no commit or before it.

A part is written last and tells of one rank's files; whoever has the parts of all ranks can make
the manifest that a commit would have made. An attempt that was given up lacks a part for ever.
"""

from __future__ import annotations

import logging
import uuid
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import zstandard

from ckptd.engine.commit import decode_plan, finish_attempt, plan_key
from ckptd.engine.job import Part, Save
from ckptd.engine.places import blame
from ckptd.engine.publish import write_manifest
from ckptd.engine.structure import SavePlan
from ckptd.engine.union import Source, UnionStore
from ckptd.errors import CkptdError, CorruptError, NotFoundError
from ckptd.format.filemap import FileMap
from ckptd.format.invariants import check_manifest
from ckptd.format.manifest import MAX_MANIFEST_BYTES, Manifest, decode_manifest
from ckptd.format.names import (
    DATA,
    PARTS,
    CommitName,
    data_folder,
    parse_data_folder,
    part_key,
)
from ckptd.store.base import Store
from ckptd.store.memory import MemoryStore, forget_memory

__all__ = [
    "Snapshot",
    "complete_snapshots",
    "finish_snapshot",
    "finished_files",
    "unpacked",
]

T = TypeVar("T")

_MOST_BYTES = 1 << 30

_log = logging.getLogger("ckptd")


class Snapshot(msgspec.Struct, frozen=True, order=True):
    """An attempt of which all parts were found.

    Attributes
    ----------
    plan
        Digest of the plan that every rank wrote by.
    world
        Number of ranks.
    root
        Identity of the root that it is of; empty where the parts do not say.
    """

    step: int
    generation: int
    attempt: str
    plan: str
    world: int
    root: str = ""

    @property
    def name(self) -> CommitName:
        """The checkpoint that it is."""
        return CommitName(self.step, self.generation)

    @property
    def folder(self) -> str:
        """Its data folder."""
        return data_folder(self.name, self.attempt)


def complete_snapshots(near: UnionStore | Sequence[Store | Source]) -> list[Snapshot]:
    """Return the snapshots of which `near` holds every part, rising by step.

    One listing of each store, and one read for each part and plan. Snapshots with a part that says
    that its rank failed, or that cannot be read, are left out; the log says so.

    Raises
    ------
    StoreError
        No store could be listed.
    """
    if not near:
        return []
    union = near if isinstance(near, UnionStore) else UnionStore(near)
    folders: dict[str, dict[str, int]] = {}
    for info in union.list(DATA):
        head, found, name = info.key.partition("/" + PARTS)
        if found:
            folders.setdefault(head + "/", {})[name] = info.size
    out: list[Snapshot] = []
    with ThreadPoolExecutor(union.capabilities.parallel) as pool:
        for folder, sizes in folders.items():
            named = parse_data_folder(folder.removeprefix(DATA))
            if named is None or "plan" not in sizes:
                continue
            of, attempt = named
            try:
                plan = _plan(union, folder, sizes)
                if plan is not None:
                    root = _root_of(_parts(union, pool, folder, plan), folder)
                    out.append(
                        Snapshot(of.step, of.generation, attempt, plan.digest, plan.world, root)
                    )
            except CkptdError as error:
                _log.warning("the snapshot %s is not used: %s", folder, error)
    return sorted(out)


def _root_of(parts: Sequence[Part], folder: str) -> str:
    roots = {part.root for part in parts}
    if len(roots) > 1:
        raise CorruptError(
            "parts of several roots", kind="bad-record", where=folder, found=", ".join(roots)
        )
    return roots.pop()


def _plan(union: UnionStore, folder: str, sizes: Mapping[str, int]) -> SavePlan | None:
    """Return the plan of an attempt whose parts are all there, and none too large to be one."""
    big = [name for name, size in sizes.items() if size > MAX_MANIFEST_BYTES]
    if big:
        raise CorruptError(
            "too large for a part", kind="limits", where=folder + PARTS + big[0], found=big[0]
        )
    ranks = sum(name[:1] == "r" for name in sizes)
    plan = _read(union, plan_key(folder), decode_plan)
    if plan.world > ranks:
        return None
    there = all(part_key("", r).removeprefix(PARTS) in sizes for r in range(plan.world))
    return plan if there else None


def _read(union: UnionStore, key: str, decode: Callable[[bytes, str], T]) -> T:
    """Read and decode an object from the nearest source whose copy is good."""
    while True:
        try:
            return decode(union.get(key), key)
        except CorruptError as error:
            if not union.distrust(key):
                raise blame(error, key) from error.__cause__


def _parts(union: UnionStore, pool: ThreadPoolExecutor, folder: str, plan: SavePlan) -> list[Part]:
    """Return the parts of all ranks, by rank.

    Raises
    ------
    CorruptError
        kind ``bad-record``: a part is another rank's, tells of a failure, or is of another plan.
    NotFoundError, StoreError
        It cannot be read.
    """

    def read(rank: int) -> Part:
        def decode(raw: bytes, where: str) -> Part:
            return _checked(Part.decode(raw, where), rank, plan, where)

        return _read(union, part_key(folder, rank), decode)

    return list(pool.map(read, range(plan.world)))


def _checked(part: Part, rank: int, plan: SavePlan, where: str) -> Part:
    """Check that a part is one of the snapshot; another tier may have a good one instead."""
    if part.error is not None:
        cause = CkptdError.from_dict(part.error)
        raise CorruptError(
            "a rank's share of a snapshot failed",
            kind="bad-record",
            where=where,
            found=cause.message,
        )
    if (part.rank, part.plan) != (rank, plan.digest):
        raise CorruptError(
            "not a part of the snapshot",
            kind="bad-record",
            where=where,
            wanted=f"rank {rank} by plan {plan.digest}",
            found=f"rank {part.rank} by plan {part.plan}",
        )
    return part


def finish_snapshot(union: UnionStore, scratch: Store, snapshot: Snapshot) -> Manifest:
    """Make what a commit of the snapshot would have made: its manifest, and the witness.

    Deterministic: every rank that does it gets the same.

    Parameters
    ----------
    union
        Holds the parts.
    scratch
        Gets manifest and witness.

    Raises
    ------
    CorruptError
        A part is gone, damaged, or of another plan; or the manifest breaks a rule of the format.
    SaveError
        Ranks disagree, see `ckptd.engine.commit.finish_attempt`.
    StoreError
        The farthest source fails.
    """
    save = _save_of(snapshot)
    try:
        plan = _read(union, plan_key(save.folder), decode_plan)
        if (plan.digest, plan.world) != (snapshot.plan, snapshot.world):
            raise CorruptError(
                "the plan of a snapshot is another one",
                kind="bad-record",
                where=plan_key(save.folder),
                wanted=snapshot.plan,
                found=plan.digest,
            )
        with ThreadPoolExecutor(union.capabilities.parallel) as pool:
            parts = _parts(union, pool, save.folder, plan)
    except NotFoundError as error:
        raise CorruptError(
            "a part of a snapshot is gone", kind="missing-file", where=error.where
        ) from None
    manifest = finish_attempt(union, scratch, plan, save, parts)
    write_manifest(scratch, manifest)
    return manifest


def _save_of(snapshot: Snapshot) -> Save:
    """Return the save that the attempt was, as far as a manifest depends on it."""
    return Save(
        job=0,
        step=snapshot.step,
        generation=snapshot.generation,
        attempt=snapshot.attempt,
        plan=snapshot.plan,
        extra=(),
        objects=(),
        metadata={},
        keep=None,
        timeout_s=0.0,
    )


def finished_files(union: UnionStore, snapshot: Snapshot) -> dict[str, str]:
    """Finish a snapshot; return manifest and witness by key, zstd in base 64: for all ranks.

    Raises what `finish_snapshot` does.
    """
    with _scratch() as scratch:
        finish_snapshot(union, scratch, snapshot)
        packer = zstandard.ZstdCompressor(level=3)
        found = [(i.key, scratch.get(i.key)) for i in scratch.list(snapshot.folder)]
        return {key: b64encode(packer.compress(raw)).decode() for key, raw in found}


@contextmanager
def unpacked(files: Mapping[str, str]) -> Iterator[tuple[Store, Manifest, FileMap]]:
    """Give what `finished_files` returned as a store, until the block ends; and the manifest.

    Raises
    ------
    CorruptError
        The manifest breaks a rule of the format.
    """
    with _scratch() as scratch:
        for key, text in files.items():
            packed = b64decode(text)
            raw = zstandard.ZstdDecompressor().decompress(packed, max_output_size=_MOST_BYTES)
            scratch.put(key, raw)
            if "/manifest." in key:
                manifest = decode_manifest(raw, key)
                filemap = check_manifest(manifest, key, len(raw))
        yield scratch, manifest, filemap


@contextmanager
def _scratch() -> Iterator[Store]:
    name = f"snapshot-{uuid.uuid4().hex}"
    try:
        yield MemoryStore(name)
    finally:
        forget_memory(name)
