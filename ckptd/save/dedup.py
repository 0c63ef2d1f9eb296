"""Referring to what an older checkpoint holds: which one, under whose lease, and where it lies.

Rank 0's writing process chooses the newest committed checkpoint at the start of each save, leases
it until the save ends, and tells the other ranks by an object beside their parts. So all ranks
refer to one checkpoint, and nobody deletes it between their decision and the commit. Whoever
commits leases it once more and looks that it is still the same: that alone makes it safe, also
where rank 0's process died and another commits.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from ckptd.decoding import msgpack_decoder
from ckptd.errors import CorruptError, NotFoundError
from ckptd.format.invariants import check_manifest
from ckptd.format.manifest import FileEntry, Manifest
from ckptd.format.names import PARTS, CommitName
from ckptd.format.records import Commit
from ckptd.layout.owners import ABSENT
from ckptd.load.files import Places, load_index
from ckptd.root.catalogue import Catalogue
from ckptd.root.leases import Hold, hold
from ckptd.save.messages import Part, Save
from ckptd.save.rankplan import RankPlan
from ckptd.save.structure import SavePlan
from ckptd.save.unchanged import (
    LEAST_BYTES,
    Announced,
    Base,
    Held,
    Switch,
    digest_table,
    folder_of,
    worth_keeping,
)

__all__ = ["Search", "Unchanged"]

_announced = msgpack_decoder(Announced)

HEAR_S = 10.0
"""How long a rank waits for rank 0's word, in seconds: then it writes everything."""
MOST_FILES = 64
"""Files of which a new life reads header and digests."""
_MOST_HELD = 8
_POLL_S = 0.01

_log = logging.getLogger("ckptd")


@dataclass(frozen=True, slots=True)
class Search:
    """What a save is compared with.

    Attributes
    ----------
    base
        The checkpoint that is referred to.
    folders
        Those of its data folders that may be referred to.
    held
        What it holds of this rank.
    """

    base: Base
    folders: frozenset[str]
    held: Held


class Unchanged:
    """What one rank remembers of its saves to one store, and how ranks agree on what to refer to.

    Parameters
    ----------
    catalogue
        The root.
    rank, world
        Whose writing process this is, and of how many.
    """

    def __init__(self, catalogue: Catalogue, rank: int, world: int) -> None:
        self._catalogue = catalogue
        self._rank = rank
        self._world = world
        self._switch = Switch()
        self._others_seek = True
        self._last: CommitName | None = None
        self._held: dict[Base, Held] = {}
        self._recalled: tuple[Base, str] | None = None
        self._holds: dict[int, Hold] = {}
        self._sizes: dict[str, int] = {}
        self._shy = False
        """The last save that referred to something failed: whatever it was, once without."""

    def seeks(self, plan: RankPlan) -> bool:
        """Tell whether the next save will look for something to refer to."""
        return self._switch.on and bool((plan.sizes >= LEAST_BYTES).any())

    def begin(self, save: Save, plan: RankPlan, alive: Callable[[], None]) -> Search | None:
        """Return what to compare a save with; None: everything is written.

        Parameters
        ----------
        alive
            Raises when the save was given up.

        Raises
        ------
        StoreError
            As the store says.
        """
        lists = self._catalogue.store.capabilities.consistent_list
        # A listing that lags could hide a commit from a clean-up that looks for what refers.
        if not (save.refer and lists and _has_large(plan.plan)):
            return None
        seeks = bool((plan.sizes >= LEAST_BYTES).any()) and self._switch.take()
        told = Announced()
        if self._rank == 0:
            if seeks or (self._others_seek and self._world > 1):
                told = self._choose(save)
            if self._world > 1:
                self._catalogue.store.put(_key(save), told.encode())
        elif seeks:
            told = self._hear(save, alive)
        if not seeks or told.base is None:
            return None
        held = self._of(told.base, plan)
        return None if held is None else Search(told.base, frozenset(told.folders), held)

    def wrote(self, save: Save, held: Held) -> None:
        """Remember a save, which counts when it is committed."""
        self._held[Base(save.step, save.generation, save.attempt)] = held
        while len(self._held) > _MOST_HELD:
            del self._held[next(iter(self._held))]

    def found(self, nbytes: int, total: int) -> None:
        """Learn how many of this rank's bytes a search found unchanged."""
        self._switch.told(nbytes, total)

    def gathered(self, parts: Sequence[Part]) -> None:
        """Learn from the parts of all ranks who will look for something at the next save."""
        self._others_seek = any(p.seeks for p in parts if p.rank != self._rank)

    def end(self, save: Save, commit: Commit | None = None) -> None:
        """Let go of what the save referred to: it ended, by a commit or without one."""
        if commit is not None:
            self._last = commit.name
        held = self._holds.pop(save.job, None)
        if held is not None:
            self._shy = commit is None
            held.release()

    # -- agreeing ------------------------------------------------------------------------------

    def _choose(self, save: Save) -> Announced:
        if self._shy:
            self._shy = False
            return Announced()
        name = self._last
        if name is None or name.generation != save.generation:
            name = self._catalogue.latest()
        if name is None or name.step >= save.step or name.generation > save.generation:
            return Announced()
        try:
            held = hold(self._catalogue, name, holder="save")
        except NotFoundError:
            self._last = None
            return Announced()
        self._holds[save.job] = held
        commit = held.commit
        base = Base(commit.step, commit.generation, commit.attempt)
        try:
            return Announced(base, self._folders(commit))
        except (CorruptError, NotFoundError) as error:
            _log.warning("step %d is not referred to: %s", commit.step, error.message)
            return Announced()

    def _folders(self, commit: Commit) -> tuple[str, ...]:
        if len(commit.folders) == 1:
            return commit.folders
        manifest = self._catalogue.manifest_of(commit)
        where = commit.folder + commit.manifest
        needed = check_manifest(manifest, where, commit.manifest_bytes).all_data_bytes(
            len(manifest.files)
        )
        by_folder = dict.fromkeys(commit.folders, 0)
        for file, nbytes in zip(manifest.files, needed.tolist(), strict=True):
            folder = folder_of(file.path)
            by_folder[folder] = by_folder.get(folder, 0) + nbytes
        weighed = [(f, n, self._size(f)) for f, n in by_folder.items()]
        self._sizes = {f: size for f, _, size in weighed}
        return worth_keeping(weighed, commit.folder)

    def _size(self, folder: str) -> int:
        """Return the bytes of a folder's data files: they never change."""
        if folder not in self._sizes:
            files = self._catalogue.store.list(folder)
            self._sizes[folder] = sum(o.size for o in files if o.key.endswith(".safetensors"))
        return self._sizes[folder]

    def _hear(self, save: Save, alive: Callable[[], None]) -> Announced:
        end = time.monotonic() + min(HEAR_S, save.timeout_s)
        pause = _POLL_S
        while time.monotonic() < end:
            alive()
            try:
                raw = self._catalogue.store.get(_key(save))
            except NotFoundError:
                time.sleep(pause)
                pause = min(2 * pause, 0.5)
                continue
            try:
                return _announced.decode(raw)
            except msgspec.MsgspecError as error:
                raise CorruptError(
                    "not what rank 0 announces",
                    kind="bad-record",
                    where=_key(save),
                    found=str(error)[:200],
                ) from None
        _log.info("step %d: rank 0 is late, so rank %d writes everything", save.step, self._rank)
        self._switch.told(0, 1)
        return Announced()

    # -- remembering ---------------------------------------------------------------------------

    def _of(self, base: Base, plan: RankPlan) -> Held | None:
        held = self._held.get(base)
        for old in [b for b in self._held if b.step < base.step]:
            del self._held[old]
        if held is not None and held.plan == plan.plan.digest:
            return held
        if self._recalled == (base, plan.plan.digest):
            return None  # tried before, and nothing was written since
        self._recalled = (base, plan.plan.digest)
        try:
            held = recall(self._catalogue, base, plan)
        except (CorruptError, NotFoundError) as error:
            _log.warning("step %d is not referred to: %s", base.step, error.message)
            return None
        if held is not None:
            self._held[base] = held
        return held


def recall(catalogue: Catalogue, base: Base, plan: RankPlan) -> Held | None:
    """Return what a checkpoint holds of a rank's chunks, from its manifest, headers and digests.

    For a process that did not write it itself, or by another plan: chunks of tensors that are cut
    alike are found by name, whoever wrote them. None when there are none.

    Raises
    ------
    CorruptError, NotFoundError
        It cannot be read, or is gone.
    """
    commit = catalogue.commit(base.name)
    if commit.attempt != base.attempt:
        return None
    manifest = catalogue.manifest_of(commit)
    filemap = check_manifest(manifest, commit.folder + commit.manifest, commit.manifest_bytes)
    places = Places(manifest, filemap, catalogue.store)
    where = np.full(len(plan.chunks), -1, dtype=np.int64)
    digests = np.zeros((len(plan.chunks), 2), dtype=np.uint64)
    files: list[FileEntry] = []
    for file, chunks in _by_file(places, manifest, plan):
        header = places.header(file)
        number = {name: i for i, name in enumerate(header)}
        table = digest_table(load_index(catalogue.store, manifest.files[file]).chunks)
        if len(table) != len(header):
            continue
        for mine, name in chunks:
            chunk, dtype = header.get(name), plan.plan.filemap.dtypes[plan.chunks[mine].tensor]
            shape = dtype.stored_shape(plan.chunks[mine].piece.shape)
            if chunk is not None and (chunk.code, chunk.shape) == (dtype.stored_code, shape):
                where[mine] = len(files)
                digests[mine] = table[number[name]]
        files.append(manifest.files[file])
    if not files or (where < 0).all():
        return None
    shared = manifest.world_size != plan.plan.world
    return Held(plan.plan.digest, tuple(files), where, digests, shared)


def _by_file(
    places: Places, manifest: Manifest, plan: RankPlan
) -> list[tuple[int, list[tuple[int, str]]]]:
    """Return the files with chunks of this rank, and these: number, and name in the header."""
    named = {t.name: i for i, t in enumerate(manifest.tensors)}
    found: dict[int, list[tuple[int, str]]] = {}
    for mine, (chunk, entry) in enumerate(zip(plan.chunks, plan.entries, strict=True)):
        if chunk.end - chunk.start < LEAST_BYTES:
            continue
        wanted = plan.plan.tensors[chunk.tensor]
        number = named.get(wanted.name)
        if number is None:
            continue
        there = manifest.tensors[number]
        alike = there.dtype == wanted.dtype and there.shape == wanted.shape
        if alike and manifest.grids[there.grid] == plan.plan.grids[wanted.grid]:
            file = places.filemap.owner(number, chunk.piece.index)
            if file != ABSENT:
                found.setdefault(file, []).append((mine, entry[0]))
    most = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    return sorted(most[:MOST_FILES])


def _has_large(plan: SavePlan) -> bool:
    """Tell whether any chunk can be worth looking for; the same on every rank."""
    sized = zip(plan.tensors, plan.filemap.dtypes, strict=True)
    return any(math.prod(t.shape) * d.itemsize >= LEAST_BYTES for t, d in sized)


def _key(save: Save) -> str:
    return f"{save.folder}{PARTS}base"
