"""A reshard into a folder of another program: what all formats have in common.

Files are written under names of their own. The last process to finish gives them the names of the
format, then writes the small files, the one that makes the folder a checkpoint last: a folder that
was left halfway is not taken for one. Parts tell which files are complete, so that a killed process
is started again, and several share the work.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ckptd.errors import RefusedError, UsageError
from ckptd.format.digest import digest_hex
from ckptd.format.filemap import FileMap
from ckptd.format.manifest import GridEntry, ManifestTables, TensorEntry
from ckptd.format.names import PARTS, ROOT_MARKER
from ckptd.layout.grid import Grid, whole
from ckptd.layout.owners import Owners
from ckptd.load.files import PieceLocations
from ckptd.reshard.execute import Budget, Executor, FileDraft
from ckptd.reshard.job import ReshardShare, Work, missing_files
from ckptd.reshard.plan import Feed, Target
from ckptd.reshard.reports import Resharded
from ckptd.reshard.target import Assembled
from ckptd.reshard.verify import Expected
from ckptd.save.commit import remove_parts
from ckptd.store.local import LocalStore
from ckptd.store.osio import writing
from ckptd.types import DTYPES

__all__ = ["ChosenTensors", "FolderJob", "FolderPlace", "check_safetensors", "whole_tensor"]

_PARTIAL = ".partial"
_OTHERS = re.compile(
    r"model(-[0-9]{5}-of-[0-9]{5})?\.safetensors(\.index\.json)?"
    r"|\.metadata|.*\.distcp"
    r"|latest|latest_universal|global_step[0-9]+_universal/|latest_checkpointed_iteration\.txt|zero/|.*model_states\.pt"
)
"""Names that a checkpoint of some format has."""


class FolderPlace(Protocol):
    """A format: names, frames and small files of a folder."""

    @property
    def target(self) -> Target:
        """What is written, a "rank" a file."""

    @property
    def expected(self) -> Mapping[int, Expected]:
        """What the source's witness wants to see in it."""

    @property
    def left_out(self) -> Sequence[str]:
        """Names of what the format does not hold."""

    @property
    def options(self) -> str:
        """What else makes a difference to the files, as text."""

    def name(self, number: int) -> str:
        """Name of a file when all are complete."""

    def draft(self, filemap: FileMap, number: int, key: str) -> FileDraft:
        """Return a file that is written under a key: what stands around the chunks."""

    def is_mine(self, name: str) -> bool:
        """Tell whether a file, or a folder that ends in "/", is of a checkpoint of this format."""

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
            kind ``duplicate-name``.
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
        """Refuse a name that something has already; kind ``duplicate-name``."""
        if name in self._names:
            raise UsageError(
                "two tensors or objects would have one name",
                kind="duplicate-name",
                where=repr(name),
            )
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
    """Refuse a type that safetensors has no code for; kind ``dtype``."""
    if DTYPES[dtype].safetensors is None:
        raise UsageError("safetensors has no such type", kind="dtype", where=where, found=dtype)


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
    found, grid = assembled.target.grids[tensor.grid].grid(), whole(tensor.shape)
    if found != grid:
        raise UsageError(
            f"{what} holds whole tensors",
            kind="lay-rule",
            where=tensor.name,
            wanted="a layout 'on none'",
            found=f"{found.npieces} pieces",
        )
    return grid


class _Partial:
    """The files of a format under names that nobody takes for a checkpoint."""

    def __init__(self, place: FolderPlace, attempt: str) -> None:
        self.folder = f".ckptd-{attempt}/"
        self._place = place

    def path(self, number: int) -> str:
        """Key of a file while it is written."""
        return self._place.name(number) + _PARTIAL

    def draft(self, filemap: FileMap, number: int) -> FileDraft:
        """Return a file under that key."""
        return self._place.draft(filemap, number, self.path(number))


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
        Replace a checkpoint of the same format that is there.
    progress
        Called with ``(bytes done, bytes in all)``.
    """

    def __init__(
        self,
        source: PieceLocations,
        place: FolderPlace,
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
        self._partial = _Partial(place, f"rs{digest_hex(whole)[:24]}")
        self._force = force
        self._progress = progress or (lambda done, total: None)

    def run(self, share: ReshardShare, budget: Budget) -> Resharded:
        """Write the files of one share, and finish the folder if no other file is missing.

        Raises
        ------
        RefusedError
            Kind ``exists``: a checkpoint is there already. Nothing was changed.
        CorruptError
            The source is damaged, or its witness does not agree. The folder is no checkpoint.
        """
        begun = time.monotonic()
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._place.target
        with LocalStore(self._folder) as store:
            self._refuse_old(store)
            files = share.files(target)
            executor = Executor(self._source, target, budget, self._place.expected)
            work = Work(executor, target, self._partial, store, store, files, self._progress)
            reused = work.run()
            missing = missing_files(store, self._partial, ReshardShare().files(target))
            if not missing:
                self._finish(store)
        return Resharded(
            step=0,
            generation=0,
            state="waiting" if missing else "committed",
            files=len(files),
            reused_files=reused,
            missing_files=len(missing),
            witness_values=work.checked,
            seconds=time.monotonic() - begun,
            **executor.spent.figures(),
        )

    def _refuse_old(self, store: LocalStore) -> None:
        """Refuse a folder with a checkpoint, unless it is ours that was killed as it got names."""
        if (self._folder / self._partial.folder / PARTS).exists():
            return
        found = [
            name
            for name in store.children()
            if name == ROOT_MARKER or _OTHERS.fullmatch(name) or self._place.is_mine(name)
            # A folder of files that never got their names is no checkpoint.
            if not all(n.endswith(_PARTIAL) for n in _below(store, name))
        ]
        others = [n for n in found if n == ROOT_MARKER or not self._place.is_mine(n)]
        if others:
            raise RefusedError(
                "a checkpoint of another format is there",
                kind="exists",
                where=str(self._folder / others[0]),
                hint="name another folder",
            )
        if found and not self._force:
            raise RefusedError(
                "a checkpoint is there already",
                kind="exists",
                where=str(self._folder / found[0]),
                hint="name another folder, or replace it with --force",
            )

    def _finish(self, store: LocalStore) -> None:
        """Give the files their names; every step may have been done by another process."""
        files = ReshardShare().files(self._place.target)
        names = {self._place.name(f) for f in files}
        last = self._place.last()
        for name, _ in reversed(last):
            store.delete([name])
        mine = [n for n in store.children() if self._place.is_mine(n) and n not in names]
        old = {n for m in mine for n in _below(store, m) if self._place.is_mine(n)}
        store.delete(sorted(n for n in old - names if not n.endswith(_PARTIAL)))
        for number in files:
            path = self._folder / self._place.name(number)
            partial = self._folder / self._partial.path(number)
            with writing(str(path)):
                if partial.exists() or not path.exists():
                    os.replace(partial, path)
        store.sync("")
        for name, raw in last:
            store.put(name, raw)
        remove_parts(store, self._partial.folder)


def _below(store: LocalStore, name: str) -> list[str]:
    """Return a file, or all files of a folder."""
    return [o.key for o in store.list(name)] if name.endswith("/") else [name]
