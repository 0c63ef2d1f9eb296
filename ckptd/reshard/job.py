"""One process's share of a reshard into a root: complete files recorded, resumed, committed.

In it: how files are shared out (``--shard 3/16``); what makes a file complete; how long a reshard
tries again after errors of a store.

Everything about the target follows from the source and the two layouts, so that any number of
processes, on any machines, started together or one after the other, work at one result without
speaking to each other. A killed one is started again: files with a part are complete.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from ckptd.base.digest import DigestIndex, digest_hex
from ckptd.checkpoint.format.container import FileMap, build_header
from ckptd.checkpoint.format.manifest import FileEntry, Manifest, WitnessEntry
from ckptd.checkpoint.format.names import (
    PARTS,
    ROOT_MARKER,
    CommitName,
    data_folder,
    digests_key,
    file_key,
)
from ckptd.checkpoint.format.records import Commit
from ckptd.checkpoint.load.files import PieceLocations
from ckptd.checkpoint.load.opening import begin_root
from ckptd.checkpoint.root.catalogue import Catalogue, publish_manifest, remove_parts, write_witness
from ckptd.checkpoint.root.working import Working, refuse_behind
from ckptd.decoding import msgpack_decoder
from ckptd.errors import CorruptError, NotFoundError, TransientStoreError, UsageError
from ckptd.reshard.execute import Budget, Executor, FileDraft
from ckptd.reshard.plan import Target, share
from ckptd.reshard.reports import Resharded
from ckptd.reshard.verify import ExpectedValues, FileSamples
from ckptd.store.base import RetrySpec, Store
from ckptd.store.wrap import Backoff
from ckptd.types import DType


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
_PART = re.compile(r"f[0-9]{5,12}")


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
        raise CorruptError("a malformed part", where=key, found=str(error)[:200]) from None
    return part if size == part.file.data_start + part.file.data_bytes else None


def complete_files(store: Store, folder: str) -> dict[int, str]:
    """Return the keys of all complete files, by number."""
    numbers = [int(n[1:]) for n in store.children(folder + PARTS) if _PART.fullmatch(n)]
    return {n: part.file.path for n in numbers if (part := load_part(store, folder, n)) is not None}


class FilePlace(Protocol):
    """A place for files."""

    @property
    def folder(self) -> str:
        """Folder that holds ``parts/``; ends in "/"."""

    def draft(self, filemap: FileMap, number: int) -> FileDraft:
        """Return a data file: its key, and what stands around the chunks."""


def safetensors_draft(
    filemap: FileMap,
    number: int,
    key: str,
    entries: Sequence[tuple[str, DType, tuple[int, ...]]],
    metadata: Mapping[str, str],
    *,
    digests: bool = False,
) -> FileDraft:
    """Return a file of safetensors.

    Parameters
    ----------
    entries
        Name, type and shape of each chunk of the file.
    metadata
        What the header says besides.
    digests
        Whether it gets a digest index.
    """
    header, data_bytes = build_header(entries, metadata)
    ends = [c.end for c in filemap.chunks(number)] if digests else None
    return FileDraft(number, key, header, data_bytes, ends)


class OwnPlace:
    """A checkpoint of ckptd: step, generation, attempt, and the folder of these."""

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

    def draft(self, filemap: FileMap, number: int) -> FileDraft:
        """Return the file of a rank, chunks under the names that the specification fixes."""
        metadata = {"format": "pt", "ckptd": f"step {self.name.step} rank {number}"}
        entries = filemap.header_entries(number)
        key = self.path(number)
        return safetensors_draft(filemap, number, key, entries, metadata, digests=True)


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
        Kind ``superseded``: a newer generation was claimed. Another attempt committed this step.
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
    witness = write_witness(store, place.folder, target.witness, parts, lambda p: p.file.path)
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
        requires=target.requires,
        meshes=target.meshes,
        witness=witness,
        metadata=dict(target.metadata or {}),
        lay=target.lay,
    )


class Work:
    """The files of one share.

    Parameters
    ----------
    executor
        Fills them.
    target
        The target.
    place
        Where they go.
    store
        For digest indexes and parts.
    bulk
        For data files, without a `Retry` around it.
    files
        The share.
    progress
        Called with the bytes written, and those of all files.
    """

    def __init__(
        self,
        executor: Executor,
        target: Target,
        place: FilePlace,
        store: Store,
        bulk: Store,
        files: Sequence[int],
        progress: Callable[[int, int], None],
    ) -> None:
        self._executor = executor
        self._target = target
        self._place = place
        self._store = store
        self._bulk = bulk
        self._files = files
        self._progress = progress
        self._total = self._bytes(files)
        self._written = 0
        self._lock = threading.Lock()
        self.checked = 0
        """Values of the source's witness that were found."""

    def run(self) -> int:
        """Write what is missing; return how many files were complete already."""
        todo = missing_files(self._store, self._place, self._files)
        reused = len(self._files) - len(todo)
        backoff = Backoff(RetrySpec())
        while todo:
            self._written = self._total - self._bytes(todo)
            drafts = {f: self._place.draft(self._target.filemap, f) for f in todo}
            try:
                self._executor.run(self._bulk, drafts, self._done, self._count)
                break
            except TransientStoreError as error:
                backoff.wait(error)
                todo = missing_files(self._store, self._place, todo)
        return reused

    def _bytes(self, files: Sequence[int]) -> int:
        return sum(self._target.sizes[f] for f in files)

    def _done(self, draft: FileDraft, index: DigestIndex | None, samples: FileSamples) -> None:
        digest = ""
        if index is not None:
            raw = index.encode()
            digest = digest_hex(raw)
            self._store.put(digests_key(draft.key), raw)
            self._store.sync(draft.key.rpartition("/")[0] + "/" if "/" in draft.key else "")
        # A folder of others is synced once, before it is a checkpoint: until then a file whose name
        # got lost is a missing one, part or not.
        slots, values = samples.taken()
        entry = FileEntry(draft.key, draft.number, len(draft.header), draft.body_bytes, digest)
        # Last: a process that finds the part knows that the file is complete.
        part = FilePart(entry, slots, values)
        save_part(self._store, self._place.folder, draft.number, part)
        with self._lock:
            self.checked += samples.checked

    def _count(self, nbytes: int) -> None:
        self._written += nbytes
        self._progress(self._written, self._total)


REASON = "reshard"
"""Begins the reason of generations that are claimed for this."""


class ReshardShare(msgspec.Struct, frozen=True):
    """The files of process `number` (from 1) of `count`."""

    number: int = 1
    count: int = 1

    @property
    def reason(self) -> str:
        """Reason in a lease on the work."""
        return f"{REASON}-{self.number}/{self.count}"

    def overlaps(self, reason: str) -> bool:
        """Tell whether a lease is for work on some file of this share."""
        found = re.fullmatch(rf"{REASON}-([0-9]+)/([0-9]+)", reason, re.ASCII)
        return found is not None and (int(found[2]) != self.count or int(found[1]) == self.number)

    def files(self, target: Target) -> list[int]:
        """Return the target files that this process writes: those with chunks."""
        mine = share(target.sizes, self.number - 1, self.count)
        return [f for f in mine if target.filemap.nchunks(f)]


class ReshardJob:
    """A reshard into a root.

    Parameters
    ----------
    source, target
        Both sides.
    catalogue
        The root that is written to; made when it is none yet.
    step
        Of the target.
    identity
        What is done, as text: source, layouts, options. Processes with the same one work together.
    bulk
        The root's store without a `Retry` around it.
    expected
        What the source's witness wants to see, by target tensor.
    progress
        Called with ``(bytes done, bytes in all)`` of this process.
    """

    def __init__(
        self,
        source: PieceLocations,
        target: Target,
        catalogue: Catalogue,
        *,
        step: int,
        identity: str,
        bulk: Store,
        expected: ExpectedValues,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._source = source
        self._target = target
        self._catalogue = catalogue
        self._step = step
        self._attempt = f"rs{digest_hex(identity.encode())[:24]}"
        self._bulk = bulk
        self._expected = expected
        self._progress = progress

    def run(self, share: ReshardShare, budget: Budget) -> Resharded:
        """Write the files of one share, and commit if no other is missing.

        Raises
        ------
        CorruptError
            The source is damaged, or its witness does not agree. Nothing was committed.
        RefusedError
            Kind ``behind``: the target has this step, or a later one, and it is another one. Kind
            ``exists``: a foreign checkpoint is there.
        ConflictError
            Another process is at work on this share, or on one of another count.
        """
        begun = time.monotonic()
        begin_root(self._catalogue)
        self._bulk.anchor(ROOT_MARKER)  # a store of its own, which has opened no root
        done = self._present(share)
        if done is not None:
            return done
        generation = self._catalogue.join(f"{REASON} {self._attempt}").generation
        place = OwnPlace(self._step, generation, self._attempt)
        working = Working(self._catalogue, generation, share.reason)
        try:
            working.enter(place.name, share.overlaps)
            return self._work(place, working, share, budget, begun)
        finally:
            working.end()

    def _work(
        self, place: OwnPlace, working: Working, share: ReshardShare, budget: Budget, begun: float
    ) -> Resharded:
        def progress(done: int, total: int) -> None:
            working.touch(place.name)
            if self._progress is not None:
                self._progress(done, total)

        store = self._catalogue.store
        files = share.files(self._target)
        executor = Executor(self._source, self._target, budget, self._expected)
        work = Work(executor, self._target, place, store, self._bulk, files, progress)
        reused = work.run()
        known = find_commit(self._catalogue, place)
        commit = known or commit_parts(self._catalogue, place, self._target)
        if commit is not None:
            remove_parts(store, place.folder)
        missing = [] if commit else missing_files(store, place, ReshardShare().files(self._target))
        return Resharded(
            step=place.name.step,
            generation=place.name.generation,
            state="present" if known else "committed" if commit else "waiting",
            files=len(files),
            reused_files=reused,
            missing_files=len(missing),
            witness_values=work.checked,
            seconds=time.monotonic() - begun,
            **executor.spent.figures(),
        )

    def _present(self, share: ReshardShare) -> Resharded | None:
        """Return a report when the target's line has the result already."""
        line = self._catalogue.line()
        for name in line:
            if name.step == self._step and self._catalogue.commit(name).attempt == self._attempt:
                # The process that committed may have been killed before it tidied up.
                place = OwnPlace(name.step, name.generation, self._attempt)
                remove_parts(self._catalogue.store, place.folder)
                return Resharded(
                    step=self._step,
                    generation=name.generation,
                    state="present",
                    files=len(share.files(self._target)),
                )
        refuse_behind(self._catalogue, line, self._step)
        return None


def check_share(text: str) -> ReshardShare:
    """Parse ``3/16``.

    Raises
    ------
    UsageError
        It is none.
    """
    number, slash, count = text.partition("/")
    good = slash and number.isdecimal() and count.isdecimal()
    if not good or not 1 <= int(number) <= int(count) <= 1 << 20:
        raise UsageError("invalid --shard", where="--shard", wanted="1/16 to 16/16", found=text)
    return ReshardShare(int(number), int(count))
