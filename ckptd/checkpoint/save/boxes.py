"""`BoxRoot`: saves for frameworks with boxes and ranks of their own.

In it: the most cells; what is refused of boxes.

`ckptd.checkpoint.torch.Checkpointer` finds out how a state is cut, and has processes that write. A
framework with a checkpoint protocol of its own knows its cuts and runs its own collectives: one
process plans, every rank writes its file, one process commits.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.base.closing import Closing
from ckptd.base.grids.grid import Axis, Grid
from ckptd.base.grids.owners import ABSENT, Owners
from ckptd.checkpoint.format import codec
from ckptd.checkpoint.format.codec import checked_metadata
from ckptd.checkpoint.format.manifest import (
    GridEntry,
    ManifestTables,
    ObjectEntry,
    Runs3,
    TensorEntry,
)
from ckptd.checkpoint.format.names import (
    CommitName,
    attempt_name,
    check_name,
    check_step,
    commit_key,
)
from ckptd.checkpoint.format.records import Commit, Generation
from ckptd.checkpoint.load.opening import begin_beside
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.checkpoint.root.catalogue import Catalogue, publish_manifest
from ckptd.checkpoint.root.index import saving
from ckptd.checkpoint.root.leases import hold_step, reading
from ckptd.checkpoint.root.opening import root_spec, trusting
from ckptd.checkpoint.save.commit import finish_attempt
from ckptd.checkpoint.save.drain import data_file, remove_file, share_part, write_file
from ckptd.checkpoint.save.messages import INLINE_OBJECT_BYTES, Extra, RankPart, SaveRequest, Sealed
from ckptd.checkpoint.save.structure import RankPlan, SavePlan
from ckptd.errors import CorruptError, NotFoundError, RefusedError, SaveError, UsageError
from ckptd.types import Box, dtype_of

_log = logging.getLogger("ckptd")

U8 = NDArray[np.uint8]

_MOST_CELLS = 1 << 22
_Cut: TypeAlias = tuple[int, tuple[int, ...], tuple[tuple[int, Box], ...]]
"""The inputs that determine a grid and its owners: world, shape and boxes."""


@dataclass(frozen=True)
class BoxTensor:
    """A tensor, and which rank writes which box of it.

    Attributes
    ----------
    dtype
        The format's name of it, which is torch's.
    boxes
        The boxes cover the tensor. Of equal boxes the first counts; others do not overlap.
    """

    dtype: str
    shape: tuple[int, ...]
    boxes: Sequence[tuple[int, Box]]

    def owners(self, name: str) -> tuple[Grid, NDArray[np.int64]]:
        """Return the coarsest grid that has all boxes as unions of cells, and each cell's rank.

        Raises
        ------
        UsageError
            Boxes overlap, leave a hole, or are no boxes of this tensor.
        """
        ranks: dict[Box, int] = {}
        for rank, box in self.boxes:
            if not len(box.offset) == len(box.shape) == len(self.shape):
                raise _misplaced(name, f"boxes of {len(self.shape)} dimensions", str(box))
            if min(box.shape, default=0) < 0:
                raise _misplaced(name, "boxes of zero elements or more", str(box))
            if box.numel or 0 in self.shape:
                ranks.setdefault(box, rank)
        cuts = []
        for dim, extent in enumerate(self.shape):
            ends = {x for box in ranks for x in (box.offset[dim], box.offset[dim] + box.shape[dim])}
            cuts.append(np.array(sorted(ends | {0, extent}), dtype=np.int64))
            if cuts[-1][0] < 0 or cuts[-1][-1] > extent:
                raise _misplaced(name, f"boxes within {list(self.shape)}", "a box outside")
        grid = Grid(tuple(Axis.from_sizes(np.diff(c).tolist()) for c in cuts))
        if 0 in self.shape:
            return grid, np.full(grid.ncells, min(ranks.values(), default=0), dtype=np.int64)
        if grid.ncells > _MOST_CELLS:
            raise _misplaced(name, f"at most {_MOST_CELLS} cells", f"{grid.ncells} cells")
        cells = np.full(tuple(len(c) - 1 for c in cuts), ABSENT, dtype=np.int64)
        for box, rank in ranks.items():
            part = tuple(
                slice(*np.searchsorted(c, (o, o + n)).tolist())
                for c, o, n in zip(cuts, box.offset, box.shape, strict=True)
            )
            if (cells[part] != ABSENT).any():
                raise _misplaced(
                    name, "boxes apart from each other, or equal", f"an overlap: {box}"
                )
            cells[part] = rank
        if (cells == ABSENT).any():
            raise _misplaced(name, "boxes that cover the tensor", "a hole")
        return grid, cells.reshape(-1)


def _misplaced(name: str, wanted: str, found: str) -> UsageError:
    return UsageError(
        "the boxes of a tensor do not cover it exactly",
        where=name,
        wanted=wanted,
        found=found,
        hint="the boxes of all ranks together must cover the tensor",
    )


@dataclass(frozen=True)
class BoxSave:
    """A save under way, the same on all ranks; one process sends it to the others (by pickle).

    Attributes
    ----------
    plan
        Which rank writes what.
    request
        The name of the attempt.
    """

    plan: SavePlan
    request: SaveRequest


class BoxRoot(Closing):
    """A root of checkpoints; each process has one for as long as it trains. Thread-safe.

    The first `begin` claims a generation, which continues from what was `loaded` before. From then
    on saves of an older life of the job fail.

    Parameters
    ----------
    url, store_options, compress
        As of `ckptd.checkpoint.torch.Checkpointer`.
    """

    def __init__(
        self, url: str, store_options: Mapping[str, Any] | None = None, compress: int | None = None
    ) -> None:
        spec = root_spec(url, store_options, compress=compress)
        trusted = trusting(spec)
        self._store = spec.open()
        self._catalogue = self._reading = Catalogue(self._store)
        if trusted is not spec:
            self._reading = Catalogue(trusted.open())
        self._lock = threading.Lock()
        self._plans = _Plans()
        self._loaded: Commit | None = None
        self._claimed: Generation | None = None
        self._attempts = 0
        self._last = -1

    def close(self) -> None:
        """Close the store. Idempotent."""
        self._store.close()

    # -- saving ----------------------------------------------------------------------------------

    def begin(
        self,
        step: int,
        world: int,
        tensors: Mapping[str, BoxTensor],
        metadata: Mapping[str, Any] | None = None,
        new_run: bool | None = None,
    ) -> BoxSave:
        """Plan a save; on one process.

        Parameters
        ----------
        world
            Number of ranks, each of which calls `write`.
        tensors
            All tensors, by name.
        metadata
            JSON values for the commit record.
        new_run
            Of the first save of a process that has loaded nothing, in a root that has checkpoints:
            True begins a line of its own, False continues the newest one, None is refused.

        Raises
        ------
        UsageError
            A tensor cannot be saved so.
        RefusedError
            kind ``behind``: the step is not later than what was loaded or committed, or earlier
            than one that was begun; one that was not committed may be begun again. kind
            ``not-loaded``: nothing was loaded, the root has checkpoints, and `new_run` is not
            given.
        ConflictError
            kind ``superseded``: a newer life of the job saves here. kind ``other-root``: another
            root was made at this place.
        StoreError
            kind ``root-gone``: the root of the earlier saves, or of what was loaded, is gone.
        """
        step = check_step(step)
        checked = checked_metadata(dict(metadata or {}))
        with self._lock:
            plan = self._plans.plan(world, tensors)
            claimed = self._claim(step, world, new_run)
            self._attempts += 1
            self._last = step
            attempt = attempt_name(self._attempts, claimed.claim_id)
        request = SaveRequest(
            job=0,
            step=step,
            generation=claimed.generation,
            attempt=attempt,
            plan=plan.digest,
            metadata=checked,
            root_id=claimed.root,
            claim_id=claimed.claim_id,
        )
        return BoxSave(plan, request)

    def _claim(self, step: int, world: int, new_run: bool | None) -> Generation:
        catalogue, claimed, loaded = self._catalogue, self._claimed, self._loaded
        if claimed is not None:
            self._catalogue.check_root(claimed.root)
            catalogue.check_not_superseded(claimed.generation)
            if step < self._last:
                raise _behind(step, self._last)
            name = CommitName(step, claimed.generation)
            if step == self._last and self._store.exists(commit_key(name)):
                raise _behind(step, step + 1)
            return claimed
        if loaded is not None and loaded.root:
            self._catalogue.check_root(loaded.root)
        else:
            begin_beside(catalogue)
        parent = loaded.name if loaded else catalogue.continue_line(step, new_run)
        if parent is not None and step <= parent.step:
            raise _behind(step, parent.step + 1)
        reason = "load" if loaded else "start" if parent is None else "continue"
        self._claimed = catalogue.claim(parent, world, reason)
        return self._claimed

    def write(
        self, save: BoxSave, rank: int, values: Callable[[str, Box], U8], objects: Mapping[str, Any]
    ) -> bytes:
        """Write what the plan gives to a rank, durably; return its part for `commit`.

        Parameters
        ----------
        values
            Returns the bytes of a box that lies within one of this rank's, row-major.
        objects
            What this rank saves besides tensors; no other rank gives the same name.

        Raises
        ------
        UsageError
            kind ``unsavable``: an object cannot be saved.
        StoreError
            As the store says; what was written is removed as far as that is possible. kind
            ``root-gone``: the save's root is gone.
        ConflictError
            kind ``other-root``: another root was made at this place.
        """
        self._catalogue.check_root(save.request.root_id)
        entries, bodies = _encoded(objects)
        extra = tuple(Extra(name, len(body), shares=codec.shares(body)) for name, body in bodies)
        request = msgspec.structs.replace(save.request, extra=extra, objects=entries)
        rank_plan = RankPlan(save.plan, rank)
        file = data_file(rank_plan, request)
        if file is None:
            metadata = request.metadata
            return RankPart(rank, save.plan.digest, objects=entries, metadata=metadata).encode()
        data = memoryview(mmap.mmap(-1, max(1, file.data_bytes)))[: file.data_bytes]
        chunks = iter(rank_plan.chunks)
        done = 0

        def fill(upto: int) -> None:
            """Copy chunk after chunk, while the store writes those before it."""
            nonlocal done
            while done < min(upto, rank_plan.data_bytes):
                chunk = next(chunks)
                if chunk.end > chunk.start:
                    name = save.plan.tensors[chunk.tensor].name
                    data[chunk.start : chunk.end] = values(name, chunk.piece.box).data
                done = chunk.end

        at = rank_plan.data_bytes
        for _, body in bodies:
            data[at : at + len(body)] = body
            at += len(body)
        try:
            with saving(self._store, request.name, request.attempt, rank):
                wrote = write_file(self._store, request, rank, file, data, fill)
        except BaseException:
            remove_file(self._store, rank, request)
            raise
        return share_part(rank_plan, request, data, wrote, Sealed(0)).encode()

    def commit(self, save: BoxSave, parts: Sequence[bytes]) -> CommitName:
        """Make the checkpoint exist, when every rank has returned from `write`; on one process.

        Returns once the commit is durable.

        Raises
        ------
        SaveError
            kind ``structure``: a rank's part is missing, ranks gave one object twice, or an
            object has the name of a tensor.
        StoreError
            kind ``root-gone``: the save's root is gone.
        ConflictError
            kind ``superseded``: a newer life of the job saves here. kind ``other-root``: another
            root was made at this place.
        """
        self._catalogue.check_root(save.request.root_id)
        found = sorted((RankPart.decode(p, "a rank's part") for p in parts), key=lambda p: p.rank)
        if [p.rank for p in found] != list(range(save.plan.world)):
            raise SaveError(
                "a commit needs exactly one part of each rank",
                kind="structure",
                wanted=f"{save.plan.world} parts",
                found=f"parts of ranks {[p.rank for p in found][:16]}",
            )
        names = Counter(n for t in save.plan.tensors for n in (t.name, *t.aliases))
        for part in found:
            names.update([o.name for o in part.objects] + [e.name for e in part.extra])
        if twice := sorted(name for name, count in names.items() if count > 1):
            raise SaveError(
                "several ranks gave the same object, or an object has a tensor's name",
                kind="structure",
                where=twice[0],
            )
        request = save.request
        manifest = finish_attempt(self._store, self._store, save.plan, request, found)
        publish_manifest(self._catalogue, manifest, root=request.root_id, claim=request.claim_id)
        return request.name

    # -- loading ---------------------------------------------------------------------------------

    def latest(self) -> int | None:
        """Return the step of the newest checkpoint, or None."""
        name = self._reading.newest()
        return None if name is None else name.step

    @contextmanager
    def open(self, step: int | None = None) -> Iterator[CkptdReader]:
        """Read a checkpoint, the newest one by default, under a lease that keeps it.

        Where no lease can be written, the checkpoint is read without one, which is logged.

        Raises
        ------
        NotFoundError
            There is none, or not this one.
        ConflictError
            kind ``busy``: each checkpoint was deleted before it could be leased.
        CorruptError
            Its metadata is damaged.
        """
        catalogue = self._reading
        catalogue.open()
        lease = hold_step(catalogue, None if step is None else check_step(step))
        if lease is None:
            raise NotFoundError("the root has no checkpoint", where=self._store.url)
        with reading(lease, _log.warning) as commit:
            yield CkptdReader(catalogue, commit)

    def loaded(self, checkpoint: CkptdReader) -> None:
        """Make the first `begin` continue from a checkpoint, which the job has loaded."""
        with self._lock:
            self._loaded = checkpoint.commit


def _behind(step: int, least: int) -> RefusedError:
    return RefusedError(
        "the step is not later than the newest one of this run",
        kind="behind",
        wanted=f"a step from {least} on",
        found=step,
        hint="to go back, load the older step in a new process, or ckptd rollback first",
    )


class _Plans:
    """Makes the plans of saves.

    A tensor of a thousand boxes takes 12 ms. Most tensors have the boxes of another, and most saves
    the tensors of the last: what they have in common is made once.
    """

    def __init__(self) -> None:
        self._cuts: dict[_Cut, tuple[GridEntry, Runs3, int]] = {}
        self._last: SavePlan | None = None

    def plan(self, world: int, tensors: Mapping[str, BoxTensor]) -> SavePlan:
        """Return a plan: the last one, where nothing has changed."""
        cuts: dict[_Cut, tuple[GridEntry, Runs3, int]] = {}
        tables, entries = ManifestTables(), []
        for name, tensor in tensors.items():
            with _usage():
                check_name(name, repr(name[:80]))
                dtype_of(tensor.dtype, name)
            shape = tuple(tensor.shape)
            cut = (world, shape, tuple(tensor.boxes))
            found = cuts.get(cut)
            if found is None:
                found = cuts[cut] = self._cuts.get(cut) or _entries(name, tensor, world)
            grid, runs, base = found
            numbers = tables.grid(grid), tables.owner(runs)
            entries.append(TensorEntry(name, tensor.dtype, shape, *numbers, base))
        plan = SavePlan(world, tables.grids, tables.owners, tuple(entries), ())
        self._cuts = cuts
        # Compared first: to digest a plan of thousands of tensors is most of the work.
        if self._last is None or msgspec.structs.replace(self._last, digest="") != plan:
            self._last = plan.stamped()
        return self._last


def _entries(name: str, tensor: BoxTensor, world: int) -> tuple[GridEntry, Runs3, int]:
    """Return the grid and the owners of a tensor for the plan, and what is added to the owners."""
    for rank, _ in tensor.boxes:
        if not 0 <= rank < world:
            raise _misplaced(name, f"ranks below {world}", f"a box of rank {rank}")
    grid, ranks = tensor.owners(name)
    base = int(ranks.min())
    return GridEntry.of(grid), Owners.from_array(ranks - base).runs, base


@contextmanager
def _usage() -> Iterator[None]:
    """Raise what is wrong with an argument as such: no file has it yet."""
    try:
        yield
    except CorruptError as error:
        raise UsageError(
            error.message, where=error.where, wanted=error.wanted, found=error.found
        ) from None


def _encoded(objects: Mapping[str, Any]) -> tuple[tuple[ObjectEntry, ...], list[tuple[str, bytes]]]:
    """Return the objects for the manifest, and those that get a chunk."""
    entries, bodies = [], []
    for name in sorted(objects):
        with _usage():
            check_name(name, repr(name[:80]))
        raw = codec.encode(objects[name], name)
        body = msgspec.json.encode(raw)
        if len(body) > INLINE_OBJECT_BYTES:
            bodies.append((name, body))
        else:
            entries.append(ObjectEntry(name, raw))
    return tuple(entries), bodies
