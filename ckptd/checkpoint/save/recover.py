"""Candidates of a load: commits and complete snapshots, newest first; finishes a snapshot.

In it: largest plan or part; snapshots that could not have been commits.
"""

from __future__ import annotations

import logging
import uuid
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import zstandard

from ckptd.checkpoint.format.container import FileMap
from ckptd.checkpoint.format.invariants import check_manifest
from ckptd.checkpoint.format.lineage import line
from ckptd.checkpoint.format.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    OfAttempt,
    OfCheckpoint,
    decode_manifest,
)
from ckptd.checkpoint.format.names import DATA, PARTS, CommitName, parse_data_folder, part_key
from ckptd.checkpoint.load.files import blame
from ckptd.checkpoint.load.union import UnionSource, UnionStore
from ckptd.checkpoint.root.catalogue import write_manifest
from ckptd.checkpoint.root.index import Index
from ckptd.checkpoint.save.commit import decode_plan, finish_attempt, plan_key
from ckptd.checkpoint.save.messages import RankPart, SaveRequest
from ckptd.checkpoint.save.structure import SavePlan
from ckptd.errors import CkptdError, CorruptError, NotFoundError, StoreError
from ckptd.store.base import Store
from ckptd.store.memory import MemoryStore, forget_memory

T = TypeVar("T")

_MOST_BYTES = 1 << 30

_log = logging.getLogger("ckptd")


class FoundSnapshot(OfAttempt, frozen=True, order=True):
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

    plan: str
    world: int
    root: str = ""


def complete_snapshots(near: UnionStore | Sequence[Store | UnionSource]) -> list[FoundSnapshot]:
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
    out: list[FoundSnapshot] = []
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
                    at = of.step, of.generation, attempt
                    out.append(FoundSnapshot(*at, plan.digest, plan.world, root))
            except CkptdError as error:
                _log.warning("skipping the snapshot %s: %s", folder, error)
    return sorted(out)


def _root_of(parts: Sequence[RankPart], folder: str) -> str:
    roots = {part.root for part in parts}
    if len(roots) > 1:
        raise CorruptError("snapshot parts of several roots", where=folder, found=", ".join(roots))
    return roots.pop()


def _plan(union: UnionStore, folder: str, sizes: Mapping[str, int]) -> SavePlan | None:
    """Return the plan of an attempt whose parts are all there, and none too large to be one."""
    big = [name for name, size in sizes.items() if size > MAX_MANIFEST_BYTES]
    if big:
        raise CorruptError("snapshot part too large", where=folder + PARTS + big[0], found=big[0])
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


def _parts(
    union: UnionStore, pool: ThreadPoolExecutor, folder: str, plan: SavePlan
) -> list[RankPart]:
    """Return the parts of all ranks, by rank.

    Raises
    ------
    CorruptError
        A part is another rank's, tells of a failure, or is of another plan.
    NotFoundError, StoreError
        It cannot be read.
    """

    def read(rank: int) -> RankPart:
        def decode(raw: bytes, where: str) -> RankPart:
            return _checked(RankPart.decode(raw, where), rank, plan, where)

        return _read(union, part_key(folder, rank), decode)

    return list(pool.map(read, range(plan.world)))


def _checked(part: RankPart, rank: int, plan: SavePlan, where: str) -> RankPart:
    """Check that a part is one of the snapshot; another tier may have a good one instead."""
    if part.error is not None:
        cause = CkptdError.from_dict(part.error)
        raise CorruptError("a rank failed to write its share", where=where, found=cause.message)
    if (part.rank, part.plan) != (rank, plan.digest):
        raise CorruptError(
            "a part belongs to another rank or plan than the snapshot's",
            where=where,
            wanted=f"rank {rank} by plan {plan.digest}",
            found=f"rank {part.rank} by plan {part.plan}",
        )
    return part


def finish_snapshot(union: UnionStore, scratch: Store, snapshot: FoundSnapshot) -> Manifest:
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
        Ranks disagree, see `ckptd.checkpoint.save.commit.finish_attempt`.
    StoreError
        The farthest source fails.
    """
    # As far as a manifest depends on it.
    save = SaveRequest(snapshot.step, snapshot.generation, snapshot.attempt, 0, snapshot.plan)
    try:
        plan = _read(union, plan_key(save.folder), decode_plan)
        if (plan.digest, plan.world) != (snapshot.plan, snapshot.world):
            raise CorruptError(
                "the plan of a snapshot has changed",
                where=plan_key(save.folder),
                wanted=snapshot.plan,
                found=plan.digest,
            )
        with ThreadPoolExecutor(union.capabilities.parallel) as pool:
            parts = _parts(union, pool, save.folder, plan)
    except NotFoundError as error:
        raise CorruptError("a part of a snapshot is missing", where=error.where) from None
    manifest = finish_attempt(union, scratch, plan, save, parts)
    write_manifest(scratch, manifest, Index(scratch))
    return manifest


def finished_files(union: UnionStore, snapshot: FoundSnapshot) -> dict[str, str]:
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
            if not 0 <= zstandard.frame_content_size(packed) <= _MOST_BYTES:
                raise CorruptError("a file of a snapshot is too large", where=key)
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


class LoadCandidate(OfCheckpoint, frozen=True):
    """A checkpoint to try: a snapshot, or where there is none the commit."""

    snapshot: FoundSnapshot | None = None


def find_candidates(
    index: Index,
    near: UnionStore | None = None,
    *,
    step: int | str | None = None,
) -> list[LoadCandidate]:
    """Return what can be loaded, newest first.

    A snapshot counts when a commit of its step and generation would. Where a commit of that name
    exists, only the snapshot of the attempt that was committed does. It comes first: a commit may
    refer to older files for what its snapshot has again.

    Parameters
    ----------
    near
        The near tiers.
    step
        Only this step, or the commit that this tag names.

    Raises
    ------
    NotFoundError
        Kind ``no-root``; or there is nothing of that step.
    StoreError
        The root fails.
    """
    if isinstance(step, str):
        index.open()
        return [_committed(index.find(step))]
    # Before the line is looked at: a zombie's snapshot, found later, could pass for one of it.
    found = _on_line(index, _snapshots(near), step)
    return found if found or step is None else [_committed(index.find(step))]


def _snapshots(near: UnionStore | None) -> list[FoundSnapshot]:
    if near is None:
        return []
    try:
        return complete_snapshots(near)
    except StoreError as error:
        _log.warning("no near tier can be read: %s", error)
        return []


def _on_line(index: Index, snapshots: list[FoundSnapshot], step: int | None) -> list[LoadCandidate]:
    marker = index.open()
    newest, commits = index.survey()
    if not newest:
        return []
    # A folder may hold what another run left, and a root may be another one than it was.
    ours = [s for s in snapshots if s.root in ("", marker.root_id)]
    counting = [s for s in ours if _may_count(index, s, newest)]
    names = line(newest, {*commits, *(s.name for s in counting)}, index.ancestor)
    out: list[LoadCandidate] = []
    for name in reversed(names):
        if step not in (None, name.step):
            continue
        same = sorted((s for s in counting if s.name == name), reverse=True)
        if name in commits and same:
            same = _same_attempt(index, name, same)
        out += [LoadCandidate(s.step, s.generation, s) for s in same]
        if name in commits:
            out.append(_committed(name))
    # Further down the load itself finds out, and goes on to an older one.
    while out and out[0].snapshot is None and not index.counts(out[0].name):
        del out[0]
    return out


def _committed(name: CommitName) -> LoadCandidate:
    return LoadCandidate(name.step, name.generation)


def _may_count(index: Index, snapshot: FoundSnapshot, newest: int) -> bool:
    """Tell whether a commit of that name could have been made (spec 9.2)."""
    if not 0 < snapshot.generation <= newest:
        return False
    try:
        parent = index.generation(snapshot.generation).parent
    except NotFoundError:
        return False
    return parent is None or snapshot.step > parent.step


def _same_attempt(
    index: Index, name: CommitName, found: Iterable[FoundSnapshot]
) -> list[FoundSnapshot]:
    try:
        attempt = index.commit(name).attempt
    except NotFoundError:
        return []  # deleted since the listing, so it was not wanted any more
    except CorruptError:
        return list(found)  # which one it was is not known
    return [s for s in found if s.attempt == attempt]
