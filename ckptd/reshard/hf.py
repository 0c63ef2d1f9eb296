"""Resharding into a Hugging Face folder: whole tensors in few files, and an index.

Files are written under other names; the last process to finish gives them their names and writes
the index, so that a folder that was left halfway is not taken for a model.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from ckptd.errors import RefusedError, UsageError
from ckptd.format.digest import digest_hex
from ckptd.format.filemap import FileMap
from ckptd.format.manifest import GridEntry, ManifestTables, TensorEntry
from ckptd.format.names import PARTS
from ckptd.layout.grid import whole
from ckptd.layout.owners import single_owner
from ckptd.load.files import PieceLocations
from ckptd.reshard.execute import Budget, Executor
from ckptd.reshard.job import ReshardShare, Work, missing_files
from ckptd.reshard.plan import Feed, Target
from ckptd.reshard.reports import Resharded
from ckptd.reshard.target import Assembled
from ckptd.reshard.verify import Expected
from ckptd.save.commit import remove_parts
from ckptd.store.local import LocalStore
from ckptd.store.osio import writing
from ckptd.types import DTYPES, DType

__all__ = ["HfJob", "hf_target"]

INDEX = "model.safetensors.index.json"
_OURS = re.compile(r"model(-[0-9]{5}-of-[0-9]{5})?\.safetensors(\.index\.json)?")
_PARTIAL = ".partial"


def hf_target(
    assembled: Assembled,
    expected: Mapping[int, Expected],
    max_shard_bytes: int,
    *,
    untie: bool = True,
) -> tuple[Target, dict[int, Expected], list[str]]:
    """Return the parameters of a target as whole tensors in files of bounded size.

    Parameters
    ----------
    assembled, expected
        What is written, and what the source's witness wants to see.
    max_shard_bytes
        A file ends before it would hold more; a larger tensor has a file of its own.
    untie
        Write a tensor under each of its names, as whoever reads the folder may ask for any.

    Returns
    -------
    target
        One "rank" a file.
    expected
        As given, by number in this target.
    left_out
        Names of what is no parameter: states, numbers, objects; and further names that are not
        written.

    Raises
    ------
    UsageError
        ``lay-rule``: the layout cuts a tensor.
    """
    tables = ManifestTables()
    entries: list[TensorEntry] = []
    feeds: list[Feed] = []
    wanted: dict[int, Expected] = {}
    links = assembled.composed.links
    left_out: list[str] = [o.name for o in assembled.target.objects]
    by_number: dict[int, int] = {}
    seen: set[str] = set()
    file, held = 0, 0
    for number, tensor in enumerate(assembled.target.tensors):
        is_parameter = number < len(links) and not links[number].key[2]
        if not is_parameter and number not in assembled.scales:
            left_out += [tensor.name, *tensor.aliases]
            continue
        grid = whole(tensor.shape)
        if assembled.target.grids[tensor.grid].grid() != grid:
            raise UsageError(
                "a Hugging Face folder holds whole tensors",
                kind="lay-rule",
                where=tensor.name,
                wanted="a layout 'on none'",
                found=f"{assembled.target.grids[tensor.grid].grid().npieces} pieces",
            )
        size = grid.piece(0).numel * DTYPES[tensor.dtype].itemsize
        names = (tensor.name, *tensor.aliases) if untie else (tensor.name,)
        left_out += () if untie else tensor.aliases
        for name in names:
            if name in seen:
                raise UsageError(
                    "two tensors would have one name", kind="duplicate-name", where=repr(name)
                )
            seen.add(name)
            if held and held + size > max_shard_bytes:
                file, held = file + 1, 0
            held += size
            here = len(entries)
            feeds.append(assembled.target.feeds[number])
            by_number[here] = number
            if number in expected:
                wanted[here] = expected[number]
            entry = TensorEntry(
                name,
                tensor.dtype,
                tensor.shape,
                tables.grid(GridEntry.of(grid)),
                tables.owner(single_owner(0).runs),
                file,
                () if untie else tensor.aliases,
            )
            entries.append(entry)
    target = Target(
        file + 1,
        tuple(entries),
        tables.grids,
        tables.owners,
        feeds,
        links=by_number,
    )
    return target, wanted, left_out


class _HfPlace:
    """Files of a Hugging Face folder, under names that nobody takes for a model."""

    with_digests = False

    def __init__(self, attempt: str, target: Target) -> None:
        self.folder = f".ckptd-{attempt}/"
        self._count = target.world
        self._tied: dict[int, dict[str, str]] = {}
        for tensor in target.tensors:
            for alias in tensor.aliases:
                self._tied.setdefault(tensor.base, {})[alias] = tensor.name

    def name(self, number: int) -> str:
        """Name of a file when all are complete."""
        if self._count == 1:
            return "model.safetensors"
        return f"model-{number + 1:05d}-of-{self._count:05d}.safetensors"

    def path(self, number: int) -> str:
        """Key of a file while it is written."""
        return self.name(number) + _PARTIAL

    def header_entries(
        self, filemap: FileMap, number: int
    ) -> list[tuple[str, DType, tuple[int, ...]]]:
        """Return the tensors by their own names."""
        return [
            (filemap.tensors[c.tensor].name, filemap.dtypes[c.tensor], c.piece.shape)
            for c in filemap.chunks(number)
        ]

    def header_metadata(self, number: int) -> dict[str, str]:
        """Return what transformers looks for, and names of tied tensors that are not written."""
        return {**self._tied.get(number, {}), "format": "pt"}


class HfJob:
    """A reshard into a local folder.

    Parameters
    ----------
    source, target, expected
        As for `ckptd.reshard.job.ReshardJob`; the target is that of `hf_target`.
    folder
        Made when it is missing. Other files there stay.
    identity
        What is done, as text.
    force
        Replace a model that is there.
    progress
        Called with ``(bytes done, bytes in all)``.
    """

    def __init__(
        self,
        source: PieceLocations,
        target: Target,
        expected: Mapping[int, Expected],
        folder: Path,
        *,
        identity: str,
        force: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._source = source
        self._target = target
        self._expected = expected
        self._folder = folder
        self._attempt = f"rs{digest_hex(identity.encode())[:24]}"
        self._force = force
        self._progress = progress or (lambda done, total: None)

    def run(self, share: ReshardShare, budget: Budget) -> Resharded:
        """Write the files of one share, and the index if no other file is missing.

        Raises
        ------
        RefusedError
            Kind ``exists``: a model is there already. Nothing was changed.
        CorruptError
            The source is damaged, or its witness does not agree. No index was written.
        """
        begun = time.monotonic()
        self._folder.mkdir(parents=True, exist_ok=True)
        place = _HfPlace(self._attempt, self._target)
        self._refuse_old(place)
        with LocalStore(self._folder) as store:
            files = share.files(self._target)
            executor = Executor(self._source, self._target, budget, self._expected)
            work = Work(executor, self._target, place, store, store, files, self._progress)
            reused = work.run()
            missing = missing_files(store, place, ReshardShare().files(self._target))
            if not missing:
                self._finish(store, place)
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

    def _old(self) -> list[str]:
        return sorted(n for n in os.listdir(self._folder) if _OURS.fullmatch(n))

    def _refuse_old(self, place: _HfPlace) -> None:
        """Refuse a folder with a model, unless it is ours that was killed while it got names."""
        old = self._old()
        if old and not self._force and not (self._folder / place.folder / PARTS).exists():
            raise RefusedError(
                "a model is there already",
                kind="exists",
                where=str(self._folder / old[0]),
                hint="name another folder, or replace it with --force",
            )

    def _finish(self, store: LocalStore, place: _HfPlace) -> None:
        """Give the files their names; every step may have been done by another process."""
        names = [place.name(f) for f in range(self._target.world)]
        store.delete([INDEX])
        store.delete([n for n in self._old() if n not in names])
        for number in range(self._target.world):
            with writing(str(self._folder / place.name(number))):
                partial = self._folder / place.path(number)
                if partial.exists():
                    os.replace(partial, self._folder / place.name(number))
        store.sync("")
        store.put(INDEX, _index(self._target, names))
        remove_parts(store, place.folder)


def _index(target: Target, names: Sequence[str]) -> bytes:
    weights = {t.name: names[t.base] for t in target.tensors}
    total = sum(target.sizes)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
