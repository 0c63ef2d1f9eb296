"""`OutputFormat`: what formats share: unfinished folder, resume, final names, replaced files.

In it: which other checkpoints in the folder are refused or replaced; element types that safetensors
does not have.

A job has a folder of its own in there, with all that is not finished. The last process gives the
files the names of the format, then writes the small files, the one that makes the folder a
checkpoint last: a folder that was left halfway is not taken for one. Parts name the files that are
complete, so that a killed process is started again, and several share the work.

- ``.ckptd-ATTEMPT/`` is the folder of a job; another job does not begin while it is there.
- ``begun`` is there from the beginning to the end of the job. A process that misses it does not
  finish: another one did, or ``--force`` dropped the job.
- ``leases/`` names the processes at work, one a share.
- ``PROCESS/`` has the files of a process: two of one share, where a lease fails, write different
  files, and a part names the one that is complete.
- ``parts/`` has a part a file.
- ``finishing`` names the files that the checkpoint replaces. From then on the job is finished, and
  only these files are removed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from ckptd.base.digest import digest_hex
from ckptd.base.grids.grid import Grid, whole
from ckptd.base.grids.owners import Owners
from ckptd.checkpoint.format.container import FileMap
from ckptd.checkpoint.format.manifest import GridEntry, ManifestTables, TensorEntry
from ckptd.checkpoint.format.names import ROOT_MARKER, CommitName
from ckptd.checkpoint.load.files import PieceLocations
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.working import Working, at_work
from ckptd.decoding import msgpack_decoder
from ckptd.errors import (
    ConflictError,
    CorruptError,
    NotFoundError,
    RefusedError,
    StoreError,
    UsageError,
)
from ckptd.readers.twin import ForeignRoot
from ckptd.reshard.execute import Budget, Executor, FileDraft
from ckptd.reshard.job import ReshardShare, Work, complete_files
from ckptd.reshard.plan import Feed, Target
from ckptd.reshard.reports import FolderNote, Resharded
from ckptd.reshard.target import Assembled
from ckptd.reshard.verify import Expected, ExpectedValues
from ckptd.store.base import check_key, innermost, is_segment
from ckptd.store.local import LocalStore
from ckptd.store.osio import reading, writing
from ckptd.types import DTYPES

_JOB = re.compile(r"\.ckptd-rs[0-9a-f]{24}/")
_BEGUN, _FINISHING = "begun", "finishing"
_PROCESS = re.compile(r"[0-9a-f]{16}/")
_WORK = CommitName(0, 1)
"""The only checkpoint of a job, for its leases."""
_OTHERS = re.compile(
    r"model(-[0-9]{5}-of-[0-9]{5})?\.safetensors(\.index\.json)?"
    r"|\.metadata|.*\.distcp"
    r"|latest|latest_universal|global_step[0-9]+_universal/|latest_checkpointed_iteration\.txt|zero/|.*model_states\.pt"
)
"""Names that a checkpoint of some format has."""
_TENSORS = re.compile(r".*\.(safetensors|distcp|pt|pth|bin|ckpt)")
_BESIDE = re.compile(
    r"(training_args|optimizer|scheduler|scaler|sampler\w*|rng_state\w*|random_states\w*)"
    r"\.(pt|pth|bin)"
)
"""Files of trainers beside a model, which are no checkpoint by themselves."""


class OutputFormat(Protocol):
    """A format: names, frames and small files of a folder."""

    @property
    def target(self) -> Target:
        """The target to write, with one file for each of its ranks."""

    @property
    def expected(self) -> ExpectedValues:
        """Values of the source's witness in it."""

    @property
    def left_out(self) -> Sequence[str]:
        """Names of what the format does not hold."""

    @property
    def simplified(self) -> Sequence[str]:
        """Names of objects that are of plainer types there than in the source."""

    @property
    def notes(self) -> Sequence[FolderNote]:
        """Notes on values that a program which loads the folder lacks, or does not take."""

    @property
    def options(self) -> str:
        """Text of all further options that change the files."""

    def name(self, number: int) -> str:
        """Name of a file when all are complete."""

    def draft(self, filemap: FileMap, number: int, key: str) -> FileDraft:
        """Return the draft of a file under a key: the bytes around the chunks."""

    def is_mine(self, name: str, beside: Collection[str]) -> bool:
        """Tell whether a file, or a folder that ends in "/", is of a checkpoint of this format.

        Parameters
        ----------
        name
            Below the folder of the checkpoint.
        beside
            The names in that folder.
        """

    def last(self) -> Sequence[tuple[str, bytes]]:
        """Return the small files in the order of writing; the last makes it a checkpoint."""


class ChosenTensors:
    """The tensors of a target that a format holds, cut and placed as it wants.

    Parameters
    ----------
    assembled, expected
        The target, and what the source's witness wants to see in it.
    """

    def __init__(self, assembled: Assembled, expected: Mapping[int, Expected]) -> None:
        self._assembled = assembled
        self._expected = expected
        self._tables = ManifestTables()
        self._entries: list[TensorEntry] = []
        self._feeds: list[Feed] = []
        self._numbers: dict[int, int] = {}
        self._names: set[str] = set()
        self.expected: dict[int, Expected] = {}

    def add(
        self,
        name: str,
        number: int,
        grid: Grid,
        owners: Owners,
        base: int = 0,
        aliases: tuple[str, ...] = (),
        feed: Feed | None = None,
        dtype: str = "",
    ) -> None:
        """Add a tensor.

        Parameters
        ----------
        number
            Of the tensor in the target; -1 for one that is none of its tensors.
        feed, dtype
            Of another tensor than the target's.

        Raises
        ------
        UsageError
            Two values of the state would have the same name.
        """
        for one in (name, *aliases):
            self.reserve(one)
        here = len(self._entries)
        if number >= 0:
            self._numbers[here] = number
            if number in self._expected and feed is None:
                self.expected[here] = self._expected[number]
        target = self._assembled.target
        self._feeds.append(feed or target.feeds[number])
        entry = TensorEntry(
            name,
            dtype or target.tensors[number].dtype,
            grid.shape,
            self._tables.grid(GridEntry.of(grid)),
            self._tables.owner(owners.runs),
            base,
            aliases,
        )
        self._entries.append(entry)

    def reserve(self, name: str) -> None:
        """Refuse a name that something has already;."""
        if name in self._names:
            raise UsageError("two tensors or objects would have one name", where=repr(name))
        self._names.add(name)

    def target(self, files: int) -> Target:
        """Return what is written, into so many files."""
        return Target(
            files,
            tuple(self._entries),
            self._tables.grids,
            self._tables.owners,
            self._feeds,
            links=self._numbers,
        )


def check_safetensors(dtype: str, where: str) -> None:
    """Refuse a type that safetensors has no code for;."""
    if DTYPES[dtype].safetensors is None:
        raise UsageError("safetensors has no such type", where=where, found=dtype)


def whole_tensor(assembled: Assembled, number: int, what: str) -> Grid:
    """Return the grid of a tensor in one piece.

    Parameters
    ----------
    what
        The format, for the error.

    Raises
    ------
    UsageError
        kind ``lay-rule``: the layout cuts it.
    """
    tensor = assembled.target.tensors[number]
    found, grid = assembled.target.grids[tensor.grid].grid, whole(tensor.shape)
    if found != grid:
        raise UsageError(
            f"{what} holds whole tensors",
            kind="lay-rule",
            where=tensor.name,
            wanted="a layout 'on none'",
            found=f"{found.npieces} pieces",
        )
    return grid


class _Finishing(msgspec.Struct, frozen=True):
    """Files that a checkpoint replaces, by name, each with its inode and time of change."""

    old: dict[str, tuple[int, int]]


_finishing = msgpack_decoder(_Finishing)


class _Job:
    """The folder of a job.

    Parameters
    ----------
    place
        What is written.
    folder
        Its name, which ends in "/".
    work_id
        Of this process's lease.
    """

    def __init__(self, place: OutputFormat, folder: str, work_id: str) -> None:
        self.folder = folder
        self.begun = f"{folder}{_BEGUN}"
        self.finishing = f"{folder}{_FINISHING}"
        self._place = place
        self._files = folder + _files_of(work_id)

    def draft(self, filemap: FileMap, number: int) -> FileDraft:
        """Return a file under its key in this process's folder."""
        return self._place.draft(filemap, number, self._files + self._place.name(number))

    def begin(self, store: LocalStore) -> None:
        """Record that the job began."""
        with suppress(ConflictError):
            store.put(self.begun, b"", create_only=True)

    def replaced(self, store: LocalStore) -> _Finishing | None:
        """Return what is replaced, once the job is being finished."""
        try:
            return _finishing.decode(store.get(self.finishing))
        except NotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise CorruptError(
                "malformed record of a reshard", where=self.finishing, found=str(error)[:200]
            ) from None

    def sweep(self, store: LocalStore, catalogue: Catalogue) -> None:
        """Remove files that killed processes left halfway."""
        alive = {_files_of(work_id) for work_id in at_work(catalogue)}
        left = [
            info.key
            for name in store.children(self.folder)
            if _PROCESS.fullmatch(name) and name not in alive
            for info in store.list(self.folder + name)
        ]
        if left:
            kept = {*complete_files(store, self.folder).values()}
            store.delete([key for key in left if key not in kept])

    def leave(self, store: LocalStore, catalogue: Catalogue) -> None:
        """Remove the folder unless something is complete, or another process is at work on it."""
        if not (at_work(catalogue) or self.replaced(store) or complete_files(store, self.folder)):
            _remove(store, self.folder)


def _files_of(work_id: str) -> str:
    """Return the folder of a process's files."""
    return f"{work_id[:16]}/"


def _remove(store: LocalStore, folder: str) -> None:
    """Remove the folder of a job; until the last step it tells how far the job is."""
    last = [f"{folder}{_BEGUN}", f"{folder}{_FINISHING}"]
    store.delete([i.key for i in store.list(folder) if i.key not in last])
    store.sweep(folder, older_than_s=0)
    for key in last:
        store.delete([key])


class FolderJob:
    """A reshard into a local folder.

    Parameters
    ----------
    source
        The source.
    place
        What is written, and how.
    folder
        Made when it is missing. Other files there stay.
    identity
        What is done, as text. Processes with the same one work together.
    force
        Replace a checkpoint of the same format that is there, and drop other jobs that are not
        finished.
    progress
        Called with ``(bytes done, bytes in all)``.
    """

    def __init__(
        self,
        source: PieceLocations,
        place: OutputFormat,
        folder: Path,
        *,
        identity: str,
        force: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._source = source
        self._place = place
        self._folder = folder
        whole = f"{identity}\n{type(place).__name__} {place.options}".encode()
        self._job_name = f".ckptd-rs{digest_hex(whole)[:24]}/"
        self._force = force
        self._progress = progress or (lambda done, total: None)
        self._all = ReshardShare().files(place.target)

    def run(self, share: ReshardShare, budget: Budget) -> Resharded:
        """Write the files of one share, and finish the folder if no other file is missing.

        Raises
        ------
        RefusedError
            Kind ``exists``: a checkpoint, or another job that is not finished, is there already.
            Nothing was changed.
        UsageError
            The job would replace what it reads. Nothing was changed.
        ConflictError
            Another process is at work on this share, or on another job in the folder. Kind
            ``superseded``: another job replaced this one.
        CorruptError
            The source is damaged, or its witness does not agree. The folder is no checkpoint.
        """
        begun = time.monotonic()
        self._refuse_source()
        with (
            LocalStore(self._folder) as store,
            LocalStore(self._folder / self._job_name) as leases,
        ):
            catalogue = Catalogue(leases)
            working = Working(catalogue, _WORK.generation, share.reason)
            job = _Job(self._place, self._job_name, working.work_id)
            self._check_names(store)
            self._clear_others(store)
            if job.replaced(store) is None:
                self._replaceable()
            try:
                working.enter(_WORK, share.overlaps)
                self._clear_others(store)  # those that began at this very moment
                job.begin(store)
                job.sweep(store, catalogue)
                return self._work(store, job, working, share, budget, begun)
            except BaseException:
                with suppress(StoreError):  # the error that ended it is the one to raise
                    working.end()
                    job.leave(store, catalogue)
                raise
            finally:
                working.end()

    def _work(
        self,
        store: LocalStore,
        job: _Job,
        working: Working,
        share: ReshardShare,
        budget: Budget,
        begun: float,
    ) -> Resharded:
        def progress(done: int, total: int) -> None:
            working.touch(_WORK)
            self._progress(done, total)

        target = self._place.target
        files = share.files(target)
        record = job.replaced(store)
        named = {f for f in files if record is not None and self._has_name(f, record)}
        left = [f for f in files if f not in named]
        executor = Executor(self._source, target, budget, self._place.expected)
        work = Work(executor, target, job, store, store, left, progress)
        reused = len(named) + work.run()
        complete = complete_files(store, job.folder)
        missing = self._missing(store, job, complete)
        if not store.exists(job.begun):
            state = self._superseded(store)
        elif missing:
            state = "waiting"
        else:
            state = self._finish(store, job, complete)
        return Resharded(
            step=0,
            generation=0,
            state=state,
            files=len(files),
            reused_files=reused,
            missing_files=len(missing) if state == "waiting" else 0,
            witness_values=work.checked,
            seconds=time.monotonic() - begun,
            **executor.spent.figures(),
        )

    # --- what is there ----------------------------------------------------------------------------

    def _refuse_source(self) -> None:
        """Refuse a folder where the job would replace what it reads."""
        target = self._folder.resolve()
        there = _entries(target)
        found = [
            f
            for f in _source_paths(self._source)
            if f == target or self._replaces(target, there, f)
        ]
        if found:
            raise UsageError(
                "the checkpoint would replace its own source",
                where=str(self._folder),
                found=str(found[0]),
                hint="name another folder",
            )

    def _replaces(self, target: Path, there: Collection[str], path: Path) -> bool:
        return path.is_relative_to(target) and self._place.is_mine(
            path.relative_to(target).as_posix(), there
        )

    def _check_names(self, store: LocalStore) -> None:
        """Refuse names that lead out of the folder, as its links may make them."""
        folders = {}
        for number in self._all:
            name = check_key(self._place.name(number))
            folders[name.rpartition("/")[0]] = name
        for name in folders.values():
            store.local_path(name)

    def _clear_others(self, store: LocalStore) -> None:
        """Refuse a folder with another job that is not finished; with ``--force``, drop that."""
        for name in _entries(self._folder):
            if not _JOB.fullmatch(name) or name == self._job_name or not any(store.list(name)):
                continue
            with LocalStore(self._folder / name) as leases:
                for lease in at_work(Catalogue(leases)).values():
                    raise ConflictError(
                        "another reshard is running in this folder",
                        where=str(self._folder / name),
                        found=lease.holder,
                        hint="wait for it, or name another folder",
                    )
            if not self._force:
                raise RefusedError(
                    "another reshard into this folder is not finished",
                    kind="exists",
                    where=str(self._folder / name),
                    hint="repeat its command to finish it; --force drops what it wrote",
                )
            _remove(store, name)

    def _replaceable(self) -> _Finishing:
        """Return what the checkpoint replaces.

        Raises
        ------
        RefusedError
            Kind ``exists``: a checkpoint is there that may not be replaced.
        """
        entries = [n for n in _entries(self._folder) if not _JOB.fullmatch(n)]
        folders = {n for n in entries if n.endswith("/") and self._place.is_mine(n, entries)}
        names = [n for n in entries if n not in folders]
        names += [below for n in sorted(folders) for below in _below(self._folder, n)]
        mine = [n for n in names if n != ROOT_MARKER and self._place.is_mine(n, entries)]
        others = [n for n in names if n not in set(mine) and _is_other(n)]
        if others:
            raise RefusedError(
                "the folder holds a checkpoint of another format",
                kind="exists",
                where=str(self._folder / others[0]),
                hint="name another folder",
            )
        if mine and not self._force:
            raise RefusedError(
                "the folder already holds a checkpoint",
                kind="exists",
                where=str(self._folder / mine[0]),
                hint="name another folder, or replace it with --force",
            )
        return _Finishing({n: i for n in mine if (i := self._identity(n)) is not None})

    def _identity(self, name: str) -> tuple[int, int] | None:
        """Return the inode and the time of change of a file; None when there is none."""
        try:
            info = os.lstat(self._folder / name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return info.st_ino, info.st_mtime_ns

    def _has_name(self, number: int, record: _Finishing) -> bool:
        """Tell whether a file is complete and has the name that the format gives it."""
        name = self._place.name(number)
        found = self._identity(name)
        if found is None or found == record.old.get(name):
            return False
        draft = self._place.draft(self._place.target.filemap, number, name)
        return (self._folder / name).stat().st_size == len(draft.header) + draft.body_bytes

    def _missing(self, store: LocalStore, job: _Job, complete: Mapping[int, str]) -> list[int]:
        """Return the files of all shares that are not complete."""
        missing = [f for f in self._all if f not in complete]
        # Another process that finishes the folder removes the parts as well.
        record = job.replaced(store) if missing else None
        return [f for f in missing if record is None or not self._has_name(f, record)]

    # --- the end ----------------------------------------------------------------------------------

    def _superseded(self, store: LocalStore) -> str:
        """Return the state of a job that another process finished.

        Raises
        ------
        ConflictError
            Kind ``superseded``: it dropped the job.
        """
        record = _Finishing({})
        last = self._place.last()
        if all(self._has_name(f, record) for f in self._all) and all(
            store.exists(name) and store.get(name) == raw for name, raw in last
        ):
            _remove(store, self._job_name)  # what this process wrote since then
            return "present"
        raise ConflictError(
            "another reshard with --force dropped this one",
            kind="superseded",
            where=str(self._folder),
            hint="name another folder",
        )

    def _begin_to_finish(self, store: LocalStore, job: _Job) -> _Finishing | None:
        """Record what is replaced; None when another process has finished the job."""
        record = job.replaced(store)
        if record is not None:
            return record
        try:
            record = self._replaceable()
        except RefusedError:
            if store.exists(job.begun):
                raise
            return None
        try:
            store.put(job.finishing, msgspec.msgpack.encode(record), create_only=True)
        except ConflictError:
            return job.replaced(store)
        if store.exists(job.begun):
            return record
        # What finished it removed `begun` before `finishing`, and its checkpoint is not old.
        store.delete([job.finishing])
        return None

    def _finish(self, store: LocalStore, job: _Job, complete: Mapping[int, str]) -> str:
        """Give the files their names; every step may have been done by another process."""
        record = self._begin_to_finish(store, job)
        if record is None:
            return self._superseded(store)
        last = self._place.last()
        old = {n for n, identity in record.old.items() if self._identity(n) == identity}
        first = [name for name, _ in reversed(last) if name in old]
        store.delete(first)
        store.delete(sorted(old.difference(first)))
        for number, key in complete.items():
            self._give_name(store, number, key, record)
        store.sync("")
        for name, raw in last:
            store.put(name, raw)
        for folder in {name.rpartition("/")[0] for name, _ in last}:
            store.sweep(f"{folder}/" if folder else "", older_than_s=0, deep=False)
        _remove(store, job.folder)
        return "committed"

    def _give_name(self, store: LocalStore, number: int, key: str, record: _Finishing) -> None:
        name = self._place.name(number)
        path = self._folder / name
        store.local_path(name)  # no link of the folder leads out of it
        with writing(str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.replace(self._folder / key, path)
            except FileNotFoundError:
                if not self._has_name(number, record):
                    raise


def _entries(folder: Path) -> list[str]:
    """Return the names in a folder, sorted; folders end in "/"."""
    try:
        with reading(str(folder)), os.scandir(folder) as entries:
            return sorted(e.name + "/" * e.is_dir(follow_symlinks=False) for e in entries)
    except NotFoundError:
        return []


def _below(top: Path, name: str) -> Iterator[str]:
    """Yield the files below a folder of a folder."""
    for entry in _entries(top / name):
        if entry.endswith("/"):
            yield from _below(top, name + entry)
        elif is_segment(entry):  # no file of a store that was left halfway
            yield name + entry


def _is_other(name: str) -> bool:
    """Tell whether a name is that of a checkpoint of some format."""
    file = name.rpartition("/")[2]
    if name == ROOT_MARKER or _OTHERS.fullmatch(name):
        return True
    return _TENSORS.fullmatch(file) is not None and _BESIDE.fullmatch(file) is None


def _source_paths(source: PieceLocations) -> Iterator[Path]:
    """Yield the local files that a source is read from, and its folder."""
    store = innermost(source.store)
    if store.capabilities.local_files and "://" not in store.url:
        yield Path(store.url).resolve()
    for file in source.files:
        if isinstance(store, ForeignRoot):
            path = store.foreign_path(file.path)
        else:
            path = store.local_path(file.path)
        if path is not None:
            yield path.resolve()
