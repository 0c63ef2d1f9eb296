"""Deduplication: chunks that an older checkpoint holds; when the search stops; limits.

In it: least size of a chunk, folders that one may refer to, share that must still be needed, how
long the search is off.

Rank 0's writing process chooses the newest committed checkpoint at the start of each save, leases
it until the save ends, and names it by an object beside the parts of the other ranks. So all ranks
refer to one checkpoint, and it is not deleted between their decision and the commit. The committer
leases it once more and checks that it is still the same: that alone makes it safe, also where rank
0's process died and another commits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from ckptd import events
from ckptd.base.digest import DIGEST_BYTES
from ckptd.base.grids.owners import ABSENT
from ckptd.checkpoint.format.container import ChunkRef
from ckptd.checkpoint.format.manifest import FileEntry, Manifest
from ckptd.checkpoint.format.names import PARTS, CommitName
from ckptd.checkpoint.format.records import Commit
from ckptd.checkpoint.load.files import PieceLocations, load_index
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.leases import Hold, hold
from ckptd.checkpoint.save.messages import Base, RankPart, Refer, SaveRequest, decoded
from ckptd.checkpoint.save.structure import RankPlan
from ckptd.decoding import msgpack_decoder
from ckptd.errors import CorruptError, NotFoundError

LEAST_BYTES = 64 << 10
"""Chunks below this size are always written: a reader would seek for them."""
MOST_FOLDERS = 8
"""Data folders that one checkpoint may refer to, its own included."""
LEAST_SHARE = 0.5
"""Of the bytes of an old file or folder so much must still be needed, or it is not referred to."""
LEAST_RATE = 0.02
"""Share of a rank's bytes that must be found unchanged for the search to pay."""
PATIENCE = 3
"""Searches in a row below that rate after which the search is off for a while."""
FIRST_OFF, LONGEST_OFF = 8, 64
"""Saves for which it is off, the first time and at most."""

Digests = NDArray[np.uint64]
"""One row of two words for each chunk."""


class Announced(msgspec.Struct, frozen=True):
    """Announcement of rank 0 at the start of a save.

    Attributes
    ----------
    base
        The checkpoint to refer to, leased by rank 0 until the save ends; None: write everything.
    folders
        Those of its data folders that may be referred to.
    """

    base: Base | None = None
    folders: tuple[str, ...] = ()


class ChunkDigests(msgspec.Struct, frozen=True):
    """Where the chunks of one rank lie under one checkpoint.

    Attributes
    ----------
    plan
        Digest of the plan whose canonical order counts the chunks.
    files
        The files.
    where
        Number of the file that holds each chunk, -1 for unknown.
    digests
        Of each chunk.
    shared
        Whether other ranks may need these files as well: the number of ranks has changed.
    """

    plan: str
    files: tuple[FileEntry, ...]
    where: NDArray[np.int64]
    digests: Digests
    shared: bool = False


def digest_table(digests: bytes) -> Digests:
    """Return joined 16-byte digests as a table."""
    return np.frombuffer(digests, dtype=np.uint64).reshape(-1, DIGEST_BYTES // 8)


SLICE_BYTES = 8 << 20
"""Bytes digested and written at a time; a multiple of the block and of the direct-I/O unit."""


def digest_chunks(
    data: memoryview,
    chunks: Sequence[ChunkRef],
    wait: Callable[[int], None],
    activity: events.Activity,
) -> Digests:
    """Return the digests of the chunks that are large enough to be looked for; of others zeros.

    Parameters
    ----------
    data
        Where they lie, which may still be filling up.
    wait
        Called with an offset; returns when the data before it is in place, or raises.
    activity
        Counts the time, without that of waiting.
    """
    table = np.zeros((len(chunks), 2), dtype=np.uint64)
    for number, chunk in enumerate(chunks):
        if chunk.end - chunk.start < LEAST_BYTES:
            continue
        state = xxhash.xxh3_128()
        for start in range(chunk.start, chunk.end, SLICE_BYTES):
            end = min(start + SLICE_BYTES, chunk.end)
            wait(end)
            with activity.piece(end - start):
                state.update(data[start:end])
        table[number] = np.frombuffer(state.digest(), dtype=np.uint64)
    return table


def same_as(
    held: ChunkDigests, digests: Digests, sizes: NDArray[np.int64], folders: Collection[str]
) -> NDArray[np.bool_]:
    """Tell for each chunk whether it is referred to.

    A file of which less than half is needed is not referred to. Of one that is shared the need is
    weighed by folder (`worth_keeping`).

    Parameters
    ----------
    held
        What an older checkpoint holds.
    digests, sizes
        Of this save's chunks, sizes in bytes.
    folders
        Those that may be referred to.
    """
    same = (held.where >= 0) & (sizes >= LEAST_BYTES)
    same &= (held.digests == digests).all(axis=1)
    for number, file in enumerate(held.files):
        here = same & (held.where == number)
        needed = int(sizes[here].sum())
        thin = not held.shared and needed < LEAST_SHARE * file.data_bytes
        if thin or file.folder not in folders:
            same &= ~here
    return same


def refers(held: ChunkDigests, same: NDArray[np.bool_]) -> tuple[Refer, ...]:
    """Return the chunks that are referred to as a part names them, by path."""
    found = []
    for number, file in enumerate(held.files):
        numbers = np.flatnonzero(same & (held.where == number))
        if len(numbers):
            found.append(Refer(file, runs_of(numbers)))
    return tuple(sorted(found, key=lambda r: r.file.path))


def runs_of(numbers: NDArray[Any]) -> tuple[tuple[int, int], ...]:
    """Return rising numbers as ``(first, count)``."""
    if not len(numbers):
        return ()
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    starts = np.concatenate(([0], breaks))
    ends = np.concatenate((breaks, [len(numbers)]))
    return tuple(
        (int(numbers[a]), int(b - a)) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)
    )


def worth_keeping(folders: Sequence[tuple[str, int, int]], own: str) -> tuple[str, ...]:
    """Return the folders of a checkpoint that the next one may refer to.

    Parameters
    ----------
    folders
        Each with the bytes that the checkpoint refers to and those that it holds.
    own
        The checkpoint's own folder.
    """
    kept = [f for f in folders if f[0] == own or f[1] >= LEAST_SHARE * f[2]]
    # The largest first: letting go of them would cost the most.
    kept.sort(key=lambda f: (-f[1], f[0]))
    return tuple(sorted(name for name, _, _ in kept[: MOST_FOLDERS - 1]))


class Switch:
    """Whether to search at all: a dense model never finds anything."""

    def __init__(self) -> None:
        self._misses = 0
        self._left = 0
        self._pause = FIRST_OFF

    def take(self) -> bool:
        """Tell whether this save searches; counts the saves that do not."""
        if self._left:
            self._left -= 1
            return False
        return True

    @property
    def on(self) -> bool:
        """Whether the next save searches."""
        return not self._left

    def found(self, found: int, total: int) -> None:
        """Learn how many of a save's bytes were found unchanged."""
        if found >= LEAST_RATE * total:
            self._misses, self._pause = 0, FIRST_OFF
            return
        self._misses += 1
        if self._misses >= PATIENCE:
            # From now on one more miss is enough.
            self._left, self._pause = self._pause, min(2 * self._pause, LONGEST_OFF)


def after(
    plan: str,
    own: FileEntry,
    digests: Digests,
    held: ChunkDigests | None = None,
    same: NDArray[np.bool_] | None = None,
) -> ChunkDigests:
    """Return where everything lies after a save.

    Parameters
    ----------
    own
        The file that it wrote.
    held, same
        What was there before, and which of it the save refers to; None: to nothing.
    """
    where = np.zeros(len(digests), dtype=np.int64)
    files = [own]
    shared = False
    if held is not None and same is not None:
        for number, file in enumerate(held.files):
            here = same & (held.where == number)
            if here.any():
                where[here] = len(files)
                files.append(file)
                shared = held.shared
    return ChunkDigests(plan, tuple(files), where, digests, shared)


_announced = msgpack_decoder(Announced)

ANNOUNCE_S = 10.0
"""How long a rank waits for rank 0's word, in seconds: then it writes everything."""
MOST_FILES = 64
"""Files of which a new life reads header and digests."""
_MOST_HELD = 8
_POLL_S = 0.01

_log = logging.getLogger("ckptd")


class Search(msgspec.Struct, frozen=True):
    """The checkpoint that a save is compared with.

    Attributes
    ----------
    base
        The checkpoint that is referred to.
    folders
        Those of its data folders that may be referred to.
    held
        Digests of the chunks that it holds of this rank.
    """

    base: Base
    folders: frozenset[str]
    held: ChunkDigests


class ChunkDedup:
    """One rank's memory of its saves to one store, and its agreement with others on references.

    Parameters
    ----------
    catalogue
        The root.
    rank, world
        The rank of this writing process, and the number of ranks.
    """

    def __init__(self, catalogue: Catalogue, rank: int, world: int) -> None:
        self._catalogue = catalogue
        self._rank = rank
        self._world = world
        self.switch = Switch()
        self._others_seek = True
        self._last: CommitName | None = None
        self._held: dict[Base, ChunkDigests] = {}
        self._recalled: tuple[Base, str] | None = None
        self._holds: dict[int, Hold] = {}
        self._sizes: dict[str, int] = {}
        self._skip_once = False
        """The last save with references failed, for whatever reason: the next has none."""

    def seeks(self, plan: RankPlan) -> bool:
        """Tell whether the next save will look for something to refer to."""
        return self.switch.on and bool((plan.sizes >= LEAST_BYTES).any())

    def begin(self, save: SaveRequest, plan: RankPlan, alive: Callable[[], None]) -> Search | None:
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
        large = plan.plan.largest >= LEAST_BYTES  # the same on every rank
        if not (save.refer and lists and large):
            return None
        seeks = bool((plan.sizes >= LEAST_BYTES).any()) and self.switch.take()
        announced = Announced()
        if self._rank == 0:
            if seeks or (self._others_seek and self._world > 1):
                announced = self._choose(save)
            if self._world > 1:
                self._catalogue.store.put(_key(save), msgspec.msgpack.encode(announced))
        elif seeks:
            announced = self._read_announced(save, alive)
        if not seeks or announced.base is None:
            return None
        held = self._of(announced.base, plan)
        return None if held is None else Search(announced.base, frozenset(announced.folders), held)

    def wrote(self, save: SaveRequest, held: ChunkDigests) -> None:
        """Remember a save, which counts when it is committed."""
        self._held[Base(save.step, save.generation, save.attempt)] = held
        while len(self._held) > _MOST_HELD:
            del self._held[next(iter(self._held))]

    def gathered(self, parts: Sequence[RankPart]) -> None:
        """Note from the parts of all ranks whether another rank searches at the next save."""
        self._others_seek = any(p.seeks for p in parts if p.rank != self._rank)

    def end(self, save: SaveRequest, commit: Commit | None = None) -> None:
        """Release the lease on the checkpoint that a save referred to: the save has ended."""
        if commit is not None:
            self._last = commit.name
        held = self._holds.pop(save.job, None)
        if held is not None:
            self._skip_once = commit is None
            held.release()

    # -- agreeing ------------------------------------------------------------------------------

    def _choose(self, save: SaveRequest) -> Announced:
        if self._skip_once:
            self._skip_once = False
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
            _log.warning("step %d is not reused: %s", commit.step, error.message)
            return Announced()

    def _folders(self, commit: Commit) -> tuple[str, ...]:
        if len(commit.folders) == 1:
            return commit.folders
        manifest, filemap = self._catalogue.tables_of(commit)
        needed = filemap.all_data_bytes(len(manifest.files))
        by_folder = dict.fromkeys(commit.folders, 0)
        for file, nbytes in zip(manifest.files, needed.tolist(), strict=True):
            folder = file.folder
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

    def _read_announced(self, save: SaveRequest, alive: Callable[[], None]) -> Announced:
        end = time.monotonic() + min(ANNOUNCE_S, save.timeout_s)
        pause = _POLL_S
        while time.monotonic() < end:
            alive()
            try:
                raw = self._catalogue.store.get(_key(save))
            except NotFoundError:
                time.sleep(pause)
                pause = min(2 * pause, 0.5)
                continue
            return decoded(_announced, raw, "the announcement of rank 0", _key(save))
        _log.info("step %d: rank 0 is late, so rank %d writes everything", save.step, self._rank)
        self.switch.found(0, 1)
        return Announced()

    # -- remembering ---------------------------------------------------------------------------

    def _of(self, base: Base, plan: RankPlan) -> ChunkDigests | None:
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
            _log.warning("step %d is not reused: %s", base.step, error.message)
            return None
        if held is not None:
            self._held[base] = held
        return held


def recall(catalogue: Catalogue, base: Base, plan: RankPlan) -> ChunkDigests | None:
    """Return what a checkpoint holds of a rank's chunks, from its manifest, headers and digests.

    For a process that did not write it itself, or by another plan: chunks of tensors that are cut
    alike are found by name, whichever rank wrote them. None when there are none.

    Raises
    ------
    CorruptError, NotFoundError
        It cannot be read, or is gone.
    """
    commit = catalogue.commit(base.name)
    if commit.attempt != base.attempt:
        return None
    manifest, filemap = catalogue.tables_of(commit)
    places = PieceLocations(manifest, filemap, catalogue.store)
    where = np.full(len(plan.chunks), -1, dtype=np.int64)
    digests = np.zeros((len(plan.chunks), 2), dtype=np.uint64)
    files: list[FileEntry] = []
    for file, chunks in _by_file(places, manifest, plan):
        header = places.header(file)
        number = {name: i for i, name in enumerate(header)}
        index = load_index(catalogue.store, manifest.files[file])
        if index is None or len(table := digest_table(index.chunks)) != len(header):
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
    return ChunkDigests(plan.plan.digest, tuple(files), where, digests, shared)


def _by_file(
    places: PieceLocations, manifest: Manifest, plan: RankPlan
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
    return sorted(sorted(found.items(), key=lambda i: (-len(i[1]), i[0]))[:MOST_FILES])


def _key(save: SaveRequest) -> str:
    return f"{save.folder}{PARTS}base"
