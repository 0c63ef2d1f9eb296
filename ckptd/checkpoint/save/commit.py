"""Commit: waits for the parts of all ranks, compares them, writes manifest and record; errors.

In it: replicas or values that differ between ranks; how often parts are looked for; parts joined.

Every rank reports its part below ``parts/``. The committer (rank 0, or any survivor) waits for all
parts, checks them against each other, writes the witness and the manifest, and creates the commit
record, which is the one moment at which the checkpoint begins to exist. Two committers do
no harm: both make the same bytes, and the record is create-only.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd import events
from ckptd.base.digest import unlike
from ckptd.base.grids.grid import Axis, Grid
from ckptd.base.grids.owners import Owners
from ckptd.checkpoint.format.codec import shares
from ckptd.checkpoint.format.container import is_home
from ckptd.checkpoint.format.invariants import check_tensors
from ckptd.checkpoint.format.manifest import (
    INLINE,
    SHARING,
    SUBCLASS,
    SUBCLASSES,
    FileEntry,
    GridEntry,
    Manifest,
    ManifestTables,
    ObjectEntry,
    TensorEntry,
    WitnessEntry,
)
from ckptd.checkpoint.format.names import PARTS, file_key, is_data_path
from ckptd.checkpoint.format.records import Commit
from ckptd.checkpoint.format.witness import DATA
from ckptd.checkpoint.root.catalogue import Catalogue, publish_manifest, write_witness
from ckptd.checkpoint.root.index import saving
from ckptd.checkpoint.root.leases import hold
from ckptd.checkpoint.save.dedup import MOST_FOLDERS
from ckptd.checkpoint.save.messages import Base, RankPart, Refer, SaveRequest, decoded
from ckptd.checkpoint.save.structure import SavePlan
from ckptd.decoding import msgpack_decoder
from ckptd.errors import CkptdError, DeadlineError, NotFoundError, SaveError, first_few
from ckptd.store.base import Store

if TYPE_CHECKING:
    from ckptd.checkpoint.root.signing import CommitSigner

MOST_REFERS = 1024
"""Files that one part may refer to."""

I64 = NDArray[np.int64]


def refer(
    plan: SavePlan,
    parts: Sequence[RankPart],
    folder: str,
    tensors: list[TensorEntry],
    tables: ManifestTables,
) -> list[FileEntry]:
    """Enter what the parts refer to into `tensors` and `tables`; return the files it lies in.

    Their numbers come after those of the ranks' own files. Deterministic.

    Parameters
    ----------
    folder
        Of this attempt.
    tensors, tables
        The plan's, which are changed.

    Raises
    ------
    SaveError
        kind ``structure``: a part names chunks that the plan does not give to its rank, one of
        them twice, too many files, or files that are no older checkpoint's.
    """
    files = _files(parts, folder)
    numbers = {f.path: plan.world + i for i, f in enumerate(files)}
    moved = _moved(plan, parts, numbers)
    bounds = np.flatnonzero(np.diff(moved[0], prepend=-1, append=-1))
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        number = int(moved[0][start])
        entry = tensors[number]
        where = Owners(plan.owners[entry.owners]).array(entry.base)
        where[moved[1][start:end]] = moved[2][start:end]
        owners, base = tables.placed(where)
        tensors[number] = msgspec.structs.replace(entry, owners=owners, base=base)
    return files


def _files(parts: Sequence[RankPart], folder: str) -> list[FileEntry]:
    found: dict[str, FileEntry] = {}
    for part in parts:
        if len(part.refers) > MOST_REFERS:
            raise _bad(part, "too many files", len(part.refers))
        for file in (r.file for r in part.refers):
            if not is_data_path(file.path) or is_home(file.path, folder) or not file.data_start:
                raise _bad(part, "a file that belongs to no older checkpoint", file.path)
            if found.setdefault(file.path, file) != file:
                raise _bad(part, "another file of the same name", file.path)
    if len({file.folder for file in found.values()}) >= MOST_FOLDERS:
        raise SaveError("parts refer to too many folders", kind="structure", wanted=MOST_FOLDERS)
    return [found[path] for path in sorted(found)]


def _moved(
    plan: SavePlan, parts: Sequence[RankPart], numbers: dict[str, int]
) -> tuple[I64, I64, I64]:
    """Return tensor, piece and new file of everything that is referred to, by tensor."""
    tensors: list[I64] = []
    pieces: list[I64] = []
    files: list[I64] = []
    for part in parts:
        if not part.refers:
            continue
        tensor, piece = plan.filemap.chunk_numbers(part.rank)
        seen = np.zeros(len(tensor), dtype=np.bool_)
        for refer in part.refers:
            numbered = _numbers(part, refer, len(tensor))
            if seen[numbered].any():
                raise _bad(part, "a chunk twice", refer.file.path)
            seen[numbered] = True
            tensors.append(tensor[numbered])
            pieces.append(piece[numbered])
            files.append(np.full(len(numbered), numbers[refer.file.path], dtype=np.int64))
    joined = np.concatenate(tensors), np.concatenate(pieces), np.concatenate(files)
    order = np.argsort(joined[0], kind="stable")
    return joined[0][order], joined[1][order], joined[2][order]


def _numbers(part: RankPart, refer: Refer, chunks: int) -> I64:
    """Return the chunk numbers of runs that are in range, and rise."""
    end = 0
    for first, count in refer.runs:
        if first < end or count < 1 or first + count > chunks:
            raise _bad(part, "chunks that it does not have, or one twice", (first, count))
        end = first + count
    runs = np.array(refer.runs, dtype=np.int64).reshape(-1, 2)
    counts = runs[:, 1]
    skipped = runs[:, 0] - (np.cumsum(counts) - counts)
    return np.repeat(skipped, counts) + np.arange(int(counts.sum()))


def _bad(part: RankPart, what: str, found: object) -> SaveError:
    return SaveError(
        f"a rank's part refers to {what}",
        kind="structure",
        where=f"rank {part.rank}",
        found=str(found)[:200],
    )


@contextlib.contextmanager
def leased(catalogue: Catalogue, parts: Sequence[RankPart]) -> Iterator[None]:
    """Hold what the parts refer to while a checkpoint is published that refers to it as well.

    Raises
    ------
    SaveError
        It was deleted meanwhile. kind ``structure``: ranks refer to different checkpoints, or to
        files that theirs does not keep.
    """
    bases = {p.base for p in parts if p.base is not None}
    if len(bases) > 1:
        raise SaveError(
            "ranks refer to different checkpoints",
            kind="structure",
            found=", ".join(sorted(f"{b.name} attempt {b.attempt}" for b in bases)[:4]),
        )
    if not bases:
        _check_folders(parts, ())
        yield
        return
    base = bases.pop()
    try:
        held = hold(catalogue, base.name, holder="commit")
    except NotFoundError:
        raise _gone(base, "nothing") from None
    try:
        if held.commit.attempt != base.attempt:
            raise _gone(base, f"attempt {held.commit.attempt}")
        _check_folders(parts, held.commit.folders)
        yield
    finally:
        held.release()


def _check_folders(parts: Sequence[RankPart], folders: Sequence[str]) -> None:
    for part in [p for p in parts if p.refers]:
        strange = sorted({r.file.folder for r in part.refers} - set(folders))
        if strange:
            raise _bad(part, "what its checkpoint does not keep", strange[0])


def _gone(base: Base, found: str) -> SaveError:
    return SaveError(
        "the checkpoint that this save refers to was deleted during the save",
        wanted=f"{base.name}, attempt {base.attempt}",
        found=found,
        hint="the next save writes everything",
    )


def check_plans(parts: Sequence[RankPart], plan: SavePlan) -> None:
    """Every rank must have written by the same plan.

    Raises
    ------
    SaveError
        kind ``structure``: names the ranks whose state has another structure.
    """
    others = [p.rank for p in parts if p.plan != plan.digest]
    if others:
        raise SaveError(
            "ranks disagree on the structure of the state",
            kind="structure",
            wanted=f"plan {plan.digest} of rank 0",
            found=f"another plan on ranks [{first_few(others, 16)}]",
            hint="the state must gain and lose tensors on every rank at the same save; the next "
            "save makes a new plan",
        )


def differing_groups(parts: Sequence[RankPart]) -> dict[str, dict[str, list[int]]]:
    """Return the replica groups whose ranks do not agree: group, then digest, then ranks."""
    seen: dict[str, dict[str, list[int]]] = {}
    for part in parts:
        for group, digest in part.replicas:
            seen.setdefault(group, {}).setdefault(digest, []).append(part.rank)
    return {g: by_digest for g, by_digest in seen.items() if len(by_digest) > 1}


def assemble(
    plan: SavePlan, parts: Sequence[RankPart], save: SaveRequest, witness: WitnessEntry | None
) -> Manifest:
    """Return the manifest of an attempt of which every rank has reported.

    Deterministic: two committers with the same parts make the same bytes.

    Raises
    ------
    SaveError
        kind ``replicas-differ``: groups of ranks hold different values of one object. kind
        ``structure``: a part refers to chunks that it cannot mean.
    """
    tables = ManifestTables(plan.grids, plan.owners)
    tensors = list(plan.tensors)
    folder = save.folder
    files = [
        FileEntry(file_key(folder, p.rank), p.rank, p.data_start, p.data_bytes, p.index, p.digests)
        for p in parts
    ]
    if any(p.refers for p in parts):
        files += refer(plan, parts, folder, tensors, tables)
    objects = merge_objects(parts)
    extras = _extras(parts)
    _check_per_rank(extras, plan, objects)
    for name, holders in extras:
        grid = GridEntry.of(Grid((Axis.from_sizes([n for _, n, _ in holders]),)))
        shape, number = (sum(n for _, n, _ in holders),), tables.grid(grid)
        placed = tables.placed(np.array([rank for rank, _, _ in holders]))
        tensors.append(TensorEntry(name, "uint8", shape, number, *placed))
        objects[name] = ObjectEntry(name, tensor=name, per_rank=holders[0][2])
    wrapping = any(o.kind == SUBCLASS for o in objects.values())
    shared = any(e.shares for p in parts for e in p.extra)
    inline = any(f.digests for f in files)
    shared = shared or shares(msgspec.json.encode([*objects.values()]))
    return Manifest(
        step=save.step,
        generation=save.generation,
        attempt=save.attempt,
        world_size=plan.world,
        files=tuple(files),
        grids=tables.grids,
        owners=tables.owners,
        tensors=tuple(tensors),
        objects=tuple(objects[n] for n in sorted(objects)),
        meshes=plan.meshes,
        witness=witness,
        metadata=parts[0].metadata,
        lay=plan.lay,
        requires=(SHARING,) * shared + (SUBCLASSES,) * wrapping + (INLINE,) * inline,
    )


def _extras(parts: Sequence[RankPart]) -> list[tuple[str, list[tuple[int, int, str]]]]:
    """Return chunks of private size: per-rank objects by name, then large replicated ones.

    This is also their order inside each file (`SaveRequest.extra` has it already).
    """
    found: dict[tuple[bool, str], list[tuple[int, int, str]]] = {}
    for part in parts:
        for extra in part.extra:
            key = (not extra.on_change, extra.name)
            found.setdefault(key, []).append((part.rank, extra.nbytes, extra.on_change))
    return [(name, found[late, name]) for late, name in sorted(found)]


def _check_per_rank(
    extras: Sequence[tuple[str, list[tuple[int, int, str]]]],
    plan: SavePlan,
    objects: Mapping[str, ObjectEntry],
) -> None:
    """Raise where a value of each rank's own is something else on another rank.

    A checkpoint could hold both, and a load would have to pick.
    """
    tensors = {n for t in plan.tensors for n in (t.name, *t.aliases)} if extras else set()
    for name, holders in extras:
        rank, _, declared = holders[0]
        other = next((h for h in holders if h[2] != declared), None)
        if other is not None:
            found = f"{_declared(other[2])} on rank {other[0]}"
        elif name in tensors:
            found = "a tensor on another rank"
        elif declared and (name in objects or name in plan.homes):
            found = "a value that ranks have in common on another rank"
        else:
            continue
        raise SaveError(
            "a name means different things on different ranks",
            kind="structure",
            where=name,
            wanted=f"{_declared(declared)} on every rank that has it, as on rank {rank}",
            found=found,
            hint="declare it alike on every rank",
        )


def _declared(on_change: str) -> str:
    return f'PerRank(on_change="{on_change}")' if on_change else "a value in common"


def merge_objects(parts: Sequence[RankPart]) -> dict[str, ObjectEntry]:
    """Join the objects that group leaders report; pipeline stages share some of them."""
    merged: dict[str, ObjectEntry] = {}
    groups: dict[str, _Groups] = {}
    for part in parts:
        for entry in part.objects:
            seen = merged.setdefault(entry.name, entry)
            alike = seen is entry or _exact(seen) == _exact(entry)
            if seen.kind == entry.kind == "groups":
                if entry.name not in groups and not alike:
                    groups[entry.name] = _Groups(entry.name, seen.value)
                if entry.name in groups:
                    groups[entry.name].add(entry.value, part.rank)
            elif not alike:
                raise SaveError(
                    "ranks hold different values of a replicated object",
                    kind="replicas-differ",
                    where=entry.name,
                    found=f"{str(seen.value)[:80]} and, on rank {part.rank}, "
                    f"{str(entry.value)[:80]}",
                    hint="declare it per rank: ckptd.PerRank(value, on_change=...)",
                )
    for name, joined in groups.items():
        merged[name] = msgspec.structs.replace(merged[name], value=joined.value())
    return merged


class _Groups:
    """Optimizer groups of several stages: those with equal hyperparameters become one."""

    def __init__(self, name: str, groups: list[Any]) -> None:
        self._name = name
        self._groups: list[tuple[dict[str, Any], set[str]]] = []
        self._numbers: dict[bytes, list[int]] = {}
        self._of: dict[str, int] = {}
        for group in groups:
            # As they stand: one rank's groups may be alike and yet be several.
            self._numbers.setdefault(_hyper(group), []).append(len(self._groups))
            self._put(group)

    def _put(self, group: dict[str, Any]) -> None:
        self._of.update(dict.fromkeys(group["params"], len(self._groups)))
        self._groups.append((group, set(group["params"])))

    def add(self, groups: list[Any], rank: int) -> None:
        """Add the groups of another rank.

        Raises
        ------
        SaveError
            kind ``replicas-differ``: it has a parameter under other hyperparameters.
        """
        for group in groups:
            same = self._numbers.setdefault(_hyper(group), [])
            for name in group["params"]:
                if name in self._of and self._of[name] not in same:
                    raise self._differ(name, self._groups[self._of[name]][0], group, rank)
            if same:
                self._groups[same[0]][1].update(n for n in group["params"] if n not in self._of)
                self._of.update({n: same[0] for n in group["params"] if n not in self._of})
            else:
                same.append(len(self._groups))
                self._put(group)

    def value(self) -> list[dict[str, Any]]:
        """Return all groups."""
        return [{**group, "params": sorted(names)} for group, names in self._groups]

    def _differ(
        self, param: str, one: dict[str, Any], other: dict[str, Any], rank: int
    ) -> SaveError:
        keys = sorted({*one, *other} - {"params"})
        keys = [k for k in keys if one.get(k) != other.get(k)]
        return SaveError(
            "ranks have different hyperparameters for one parameter",
            kind="replicas-differ",
            where=f"{self._name}: {param}",
            wanted=", ".join(f"{k}={str(one.get(k))[:40]}" for k in keys[:4]),
            found=", ".join(f"{k}={str(other.get(k))[:40]}" for k in keys[:4]) + f" on rank {rank}",
            hint="build the optimizer and its scheduler alike on every rank",
        )


def _hyper(group: dict[str, Any]) -> bytes:
    return _exact({k: v for k, v in group.items() if k != "params"})


def _exact(value: Any) -> bytes:
    """Return what differs where Python's ``==`` does not: 0 and 0.0, False and 0."""
    return msgspec.msgpack.encode(value, order="sorted")


_plans = msgpack_decoder(SavePlan)

_FIRST_POLL_S = 0.002
_LONGEST_POLL_S = 0.5
_ASK_S = 1.0
_DIRECT_S = 5.0
"""Seconds without a new part after which single, unjoined parts are looked for."""

TOGETHER = 128
"""So many ranks in a row have their parts joined by the first of them, but those of rank 0."""


def blob_key(folder: str, digest: str) -> str:
    """Key of a body that several parts refer to by its digest."""
    return f"{folder}{PARTS}b-{digest}"


def plan_key(folder: str) -> str:
    """Key of the plan that an attempt was written by, a `SavePlan` as msgpack.

    Near tiers hold it beside the parts, so that a load that finds them can finish the snapshot.
    """
    return f"{folder}{PARTS}plan"


def decode_plan(raw: bytes, where: str) -> SavePlan:
    """Return the plan that was stored under `plan_key`.

    Raises
    ------
    CorruptError
        Not a plan, or its tables break a rule. kind ``digest``: not the one that its digest names.
    """
    plan = decoded(_plans, raw, "a plan", where)
    found = plan.stamped().digest
    if found != plan.digest:
        raise unlike("a plan", where, plan.digest, found)
    tables = Manifest(0, 0, "", plan.world, (), plan.grids, plan.owners, plan.tensors)
    check_tensors(tables, plan.world, where, len(raw))
    return plan


def commit_attempt(
    catalogue: Catalogue,
    plan: SavePlan,
    save: SaveRequest,
    stop: Callable[[], str | None],
    timeout_s: float,
    rank: int = 0,
    gathered: Callable[[Sequence[RankPart]], None] | None = None,
    parts: Sequence[RankPart] = (),
    beside: Mapping[str, bytes] | None = None,
) -> Commit:
    """Wait for every rank's part, check them, and make the checkpoint exist.

    Returns once the commit record is durable; `remove_parts` is left to do. Where another
    committer of this attempt was faster, its commit is returned.

    Parameters
    ----------
    stop
        Asked while waiting; a text ends the wait as a `SaveError`.
    timeout_s
        For the missing parts, in seconds.
    rank
        Whose writing process this is, for the events.
    gathered
        Called with the parts of all ranks.
    parts
        These, where they need not be waited for.
    beside
        Small files that are still to be written, by key.

    Raises
    ------
    SaveError
        A rank failed, or ranks disagree (kinds ``structure``, ``replicas-differ``). What ranks
        refer to was deleted.
    DeadlineError
        Names the ranks that did not report.
    ConflictError
        kind ``exists``: this checkpoint exists already, and its writer. kind ``superseded``: a
        newer generation runs; what this one writes is not on its line. kind ``other-root``: the
        root, or the generation's record, is another life's by now.
    StoreError
        kind ``root-gone``: the folder is no root any more.
    """
    with saving(catalogue.store, save.name, save.attempt, rank):
        with events.span("gather"):
            try:
                stop = _or_settled(catalogue, save, stop)
                signer, ranks = signer_of(catalogue.store, save), range(plan.world)
                store = signer or catalogue.store
                parts = parts or gather_parts(store, save.folder, ranks, stop, timeout_s)
            except _SettledError as other:
                return other.commit
        if gathered is not None:
            gathered(parts)
        with events.span("commit"), leased(catalogue, parts):
            if signer is not None:
                for part in parts:
                    signer.hashes |= part.hashes
            manifest = finish_attempt(store, store, plan, save, parts)
            root, claim = save.root_id, save.claim_id
            return publish_manifest(
                catalogue, manifest, root=root, claim=claim, beside=beside, signer=signer
            )


def signer_of(store: Store, save: SaveRequest) -> CommitSigner | None:
    """Return what a signed save reads, writes and signs through; None: it is not signed.

    Raises
    ------
    UsageError
        As of `ckptd.base.signatures.read_private`; `NotFoundError` where the key is gone.
    """
    if not save.sign:
        return None
    from ckptd.base.signatures import read_private
    from ckptd.checkpoint.root.signing import CommitSigner

    return CommitSigner(store, read_private(save.sign), save.root_id)


def finish_attempt(
    source: Store, target: Store, plan: SavePlan, save: SaveRequest, parts: Sequence[RankPart]
) -> Manifest:
    """Check the parts of all ranks against each other and return the manifest that they make.

    Deterministic, so that every process that has the parts may do it.

    Parameters
    ----------
    source
        Holds the tables that parts refer to by digest.
    target
        Gets the witness.

    Raises
    ------
    SaveError
        kinds ``structure``, ``replicas-differ``: ranks disagree.
    CorruptError
        A part's witness is not what the plan asks for.
    """
    folder = save.folder
    check_plans(parts, plan)
    _check_replicas(source, folder, parts)
    if parts[0].digests:
        witness = WitnessEntry(DATA, "") if plan.witness.total else None
    else:
        witness = write_witness(target, folder, plan.witness, parts, lambda p: f"rank {p.rank}")
    return assemble(plan, parts, save, witness)


class _SettledError(Exception):
    """Another survivor committed this attempt, and may have removed the parts already."""

    def __init__(self, commit: Commit) -> None:
        super().__init__(str(commit.name))
        self.commit = commit


def _or_settled(
    catalogue: Catalogue, save: SaveRequest, stop: Callable[[], str | None]
) -> Callable[[], str | None]:
    """Return `stop`, which now and then also looks whether the wait has become pointless.

    That is so when the attempt is committed, or when a newer life of the job has begun: what was
    then left without the part of a rank that is gone is refused whenever it would be complete.
    """
    asked = time.monotonic()

    def stop_or_settled() -> str | None:
        nonlocal asked
        if time.monotonic() - asked >= _ASK_S:
            asked = time.monotonic()
            with contextlib.suppress(NotFoundError):
                commit = catalogue.commit(save.name)
                if commit.attempt == save.attempt:
                    raise _SettledError(commit)
            catalogue.check_not_superseded(save.generation)
        return stop()

    return stop_or_settled


def _below(folder: str, rank: int) -> str:
    first = rank - rank % TOGETHER
    return f"{folder}{PARTS}more/{first:05d}/" if first else folder + PARTS


def reported_key(folder: str, rank: int) -> str:
    """Key of a rank's part at the root: in a folder of those that another rank joins."""
    return f"{_below(folder, rank)}r{rank:05d}"


def joined_key(folder: str, rank: int) -> str:
    """Key of the parts of `TOGETHER` ranks, of which this is one, that the first of them joins."""
    return f"{folder}{PARTS}j{rank - rank % TOGETHER:05d}"


def join_parts(
    store: Store, folder: str, first: int, world: int, stop: Callable[[], str | None], wait_s: float
) -> None:
    """Wait for the parts of a block of ranks, and put one object in their place.

    Does nothing where `first` is not the first rank of a block. Raises what `gather_parts` does.
    """
    if first % TOGETHER == 0:
        ranks = range(world)[first : first + TOGETHER]
        parts = gather_parts(store, folder, ranks, stop, wait_s)
        store.put(joined_key(folder, first), RankPart.join(parts))
        store.delete([reported_key(folder, rank) for rank in ranks])


def gather_parts(
    store: Store, folder: str, ranks: range, stop: Callable[[], str | None], timeout_s: float
) -> list[RankPart]:
    """Wait for the part of every rank and return them by rank.

    Those of the first `TOGETHER` ranks are read one by one, and those of so many others as they
    were joined. Where that is not done though they are all there, the process that should do it
    may be gone: they are read one by one as well. On stores whose listing is consistent one listing
    finds all that is new; elsewhere what is missing is asked for by name.

    Parameters
    ----------
    ranks
        All, or at most `TOGETHER` of which the first is to join the parts.
    """
    found: dict[int, RankPart] = {}
    quiet = time.monotonic()
    end, pause, patience = quiet + timeout_s, _FIRST_POLL_S, _DIRECT_S
    with ThreadPoolExecutor(store.capabilities.parallel) as pool:
        while True:
            before, now = len(found), time.monotonic()
            keys = _new(store, folder, ranks, found)
            if now > min(end, quiet + patience):
                quiet, patience = now, 2 * patience
                keys += _unjoined(store, folder, ranks, found, partly=now > end)
            for part in chain.from_iterable(pool.map(partial(_peek, store), keys)):
                if part.error is not None:
                    raise _failed(part.rank, CkptdError.from_dict(part.error))
                found[part.rank] = part
            if len(found) == len(ranks):
                return [found[r] for r in ranks]
            reason = stop()
            if reason is not None:
                raise SaveError(reason, kind="aborted", where=folder)
            if now > end:
                raise _missing(folder, ranks, found, timeout_s)
            pause = min(pause * 1.5, _LONGEST_POLL_S)
            if len(found) > before:
                quiet, pause, patience = now, _FIRST_POLL_S, _DIRECT_S
            time.sleep(pause)


def _new(store: Store, folder: str, ranks: range, found: Mapping[int, RankPart]) -> list[str]:
    """Return where parts of `ranks` may be found that are new: of one rank, or of several."""
    if store.capabilities.consistent_list:
        at = _below(folder, ranks.start)
        names = [n for n in store.children(at) if n[:1] in "rj" and n[1:].isdecimal()]
        return [at + n for n in names if int(n[1:]) in ranks and int(n[1:]) not in found]
    alone = [reported_key(folder, r) for r in ranks[:TOGETHER] if r not in found]
    return alone + [joined_key(folder, r) for r in ranks[TOGETHER::TOGETHER] if r not in found]


def _unjoined(
    store: Store, folder: str, ranks: range, found: Mapping[int, RankPart], *, partly: bool
) -> list[str]:
    """Return where the parts are that should have been joined, if all of them are there."""
    later = range(TOGETHER, ranks.stop, TOGETHER)
    blocks = [ranks[r : r + TOGETHER] for r in later if r not in found and ranks.start == 0]
    there = [(_new(store, folder, block, found), len(block)) for block in blocks]
    return [key for keys, size in there if partly or len(keys) == size for key in keys]


def _peek(store: Store, key: str) -> Sequence[RankPart]:
    """Return the parts in an object; none where it is not there."""
    try:
        parts = RankPart.split(store.get(key), key)
    except NotFoundError:
        return ()
    first = int(key.rpartition("/")[2][1:])
    if any(part.rank != rank for rank, part in enumerate(parts, first)):
        raise SaveError("a part names another rank", kind="structure", where=key, wanted=first)
    return parts


def _failed(rank: int, cause: CkptdError) -> CkptdError:
    message = f"rank {rank} failed: {cause.message}"
    return CkptdError.from_dict({**cause.to_dict(), "class": "SaveError", "message": message})


def _missing(
    folder: str, ranks: range, found: Mapping[int, RankPart], timeout_s: float
) -> DeadlineError:
    missing = [r for r in ranks if r not in found]
    return DeadlineError(
        "ranks did not write their part in time",
        where=folder,
        wanted=f"{len(ranks)} parts within {timeout_s:.0f} s",
        found=f"missing ranks [{first_few(missing, 16)}]",
        hint="check the logs of those ranks; the previous checkpoint is intact",
    )


def _check_replicas(store: Store, folder: str, parts: Sequence[RankPart]) -> None:
    """Raise naming what differs between ranks that should agree."""
    for shared, by_digest in differing_groups(parts).items():
        hint = (
            "if the values differ on purpose, as statistics of norm layers do, write `any` in the "
            "layout's rule to save one rank's; otherwise the ranks have diverged"
            if shared.startswith("lay:")
            else "if the values differ on purpose, declare them with ckptd.PerRank(value, "
            "on_change=...); otherwise the ranks have diverged. Values that look alike differ in "
            "types, flags such as requires_grad, or what is one object in several places"
        )
        tables: list[tuple[list[int], dict[str, Any]]] = []
        for digest in list(by_digest)[:8]:
            tables.append((by_digest[digest], {}))
            with contextlib.suppress(NotFoundError, ValueError):
                tables[-1][1].update(json.loads(store.get(blob_key(folder, digest))))
        ranks, first = tables[0]
        for others, table in tables[1:]:
            names = sorted(k for k in first | table if first.get(k) != table.get(k))
            raise SaveError(
                "replicas differ between ranks",
                kind="replicas-differ",
                where=first_few(names),
                wanted=f"the values of ranks {ranks[:8]}",
                found=f"other values on ranks {others[:8]} ({len(names)} names differ)",
                hint=hint,
            )
