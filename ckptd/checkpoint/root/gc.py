"""Garbage collection: what may be deleted and why, after which time, in which order.

In it: how long abandoned commits and leftovers are kept; guards of pins and leases.

Order is what makes it safe to die anywhere: a commit record goes first, so that a checkpoint is
whole or absent; its data goes when no commit refers to it; what is left over is found again by
the next plan. Before and after each irreversible step the guards are looked at once more, because
readers and writers on other machines do not wait.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from ckptd import events
from ckptd.checkpoint.format.lineage import line
from ckptd.checkpoint.format.manifest import OfCheckpoint
from ckptd.checkpoint.format.names import (
    ANNOTATIONS,
    COMMITS,
    DATA,
    GENERATIONS,
    LEASES,
    MARKS,
    PARTS,
    PINS,
    CommitName,
    commit_key,
    digests_key,
    generation_key,
    parse_annotation_name,
    parse_commit_name,
    parse_data_folder,
    pin_key,
)
from ckptd.checkpoint.format.records import Commit, Generation, decode_record
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.index import Index, attempts, commit_marks, put_mark, seconds_of
from ckptd.checkpoint.root.leases import expired, leases
from ckptd.checkpoint.root.policy import Keep, Selection, select, unmet
from ckptd.errors import CkptdError, ConflictError, CorruptError, NotFoundError
from ckptd.store.base import ObjectInfo, Store

ABANDONED_S = 7 * 86_400.0
"""How long a commit beside the line is kept, in seconds since it left the line."""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """A commit left the line at `since` (seconds since 1970), by the claim of `generation`.

    Attributes
    ----------
    stays
        Why no rule deletes it; empty when one may.
    another_run
        Whether it is of a run that the newest generation does not descend from.
    """

    since: float
    generation: int
    stays: str = ""
    another_run: bool = False


@dataclass(frozen=True, slots=True)
class Inventory:
    """A root at one moment, as far as retention is concerned.

    Attributes
    ----------
    newest
        The newest generation.
    line
        Commits that count, oldest first.
    abandoned
        All others.
    records
        The record of each of them.
    guards
        Pinned and leased ones: why, by name. They need not exist.
    anchor
        The newest commit of the line of which every file is there.
    broken
        What is missing of the commits after `anchor`, by name.
    """

    newest: int
    line: tuple[CommitName, ...]
    abandoned: dict[CommitName, Abandoned]
    records: dict[CommitName, Commit]
    guards: dict[CommitName, tuple[str, ...]]
    anchor: CommitName | None
    broken: dict[CommitName, str]


def take(index: Index, now: float) -> Inventory:
    """Read the state of a root.

    Parameters
    ----------
    now
        Seconds since 1970; decides which leases ran out.

    Raises
    ------
    CorruptError
        A record cannot be read: without it, it is unknown which data it refers to.
    """
    newest, names = index.survey()
    records = index.records(names)
    names = [n for n in names if n in records]
    foreign = {n: why for n in names if (why := index.foreign(records[n])) is not None}
    own = [n for n in names if n not in foreign]
    on_line = line(newest, own, index.ancestor) if newest else []
    anchor, broken = _anchor(index, [records[n] for n in on_line])
    beside = sorted(set(names) - set(on_line))
    claimed = index.generations() if beside else []
    return Inventory(
        newest=newest,
        line=tuple(on_line),
        abandoned={
            n: _abandoned(index, records[n], claimed, newest, foreign.get(n, "")) for n in beside
        },
        records=records,
        guards=guarded(index, now),
        anchor=anchor,
        broken=broken,
    )


def guarded(index: Index, now: float) -> dict[CommitName, tuple[str, ...]]:
    """Return what pins and leases protect at this moment, and why."""
    leased = leases(index)  # first: what is tagged is leased until the tag is there
    out: dict[CommitName, list[str]] = {n: ["pinned"] for n in index.pins()}
    for tag, name in index.tags().items():
        out.setdefault(name, []).append(f"tagged {tag}")
    for lease in leased.values():
        if not expired(lease, now):
            out.setdefault(lease.name, []).append(f"leased by {lease.holder or 'a reader'}")
    return {n: tuple(r) for n, r in out.items()}


def decide(
    inventory: Inventory,
    keep: Keep,
    now: float,
    grace_s: float = ABANDONED_S,
    *,
    other_runs: bool = False,
) -> Selection:
    """Return what to keep and what to drop, and why. Pure.

    Parameters
    ----------
    keep
        The rule for the line.
    now
        Seconds since 1970.
    grace_s
        How long abandoned commits are kept, in seconds.
    other_runs
        Whether those of other runs may go, too.
    """
    if inventory.anchor is None:
        why = ("the line has no complete checkpoint",)
        return Selection(dict.fromkeys((*inventory.line, *inventory.abandoned), why), {})
    chosen = select([inventory.records[n] for n in inventory.line], keep)
    kept = {n: list(r) for n, r in chosen.kept.items()}
    dropped = dict(chosen.dropped)
    for name, left in inventory.abandoned.items():
        if left.stays:
            kept[name] = [left.stays]
        elif left.another_run and not other_runs:
            kept[name] = ["of another run: gc --other-runs deletes those"]
        elif now - left.since < grace_s:
            kept[name] = [f"abandoned by generation {left.generation}, in its grace period"]
        else:
            dropped[name] = (f"abandoned by generation {left.generation}",)
    first = inventory.line.index(inventory.anchor)
    kept.setdefault(inventory.anchor, []).append("the newest complete checkpoint")
    for name in inventory.line[first + 1 :]:
        kept.setdefault(name, []).append("later than the newest complete checkpoint")
    for name, reasons in inventory.guards.items():
        if name in inventory.records:
            kept.setdefault(name, []).extend(reasons)
    return Selection(
        {n: tuple(kept[n]) for n in sorted(kept)},
        {n: dropped[n] for n in sorted(dropped) if n not in kept},
    )


# -- what is complete ------------------------------------------------------------------------------


def _anchor(index: Index, commits: list[Commit]) -> tuple[CommitName | None, dict[CommitName, str]]:
    broken: dict[CommitName, str] = {}
    for commit in reversed(commits):
        missing = missing_files(index, commit)
        if not missing:
            return commit.name, broken
        broken[commit.name] = missing
    return None, broken


def missing_files(index: Index, commit: Commit) -> str | None:
    """Say what is missing of a checkpoint, by names and sizes; None when everything is there.

    Reads the manifest and lists the folders; no data is read, so flipped bits are not found.
    """
    try:
        manifest = index.manifest_of(commit)
    except CorruptError as error:
        return f"{error.message}: {error.where}"
    sizes = {o.key: o.size for f in commit.folders for o in index.store.list(f)}
    for file in manifest.files:
        if not file.data_start:
            continue  # this rank wrote nothing
        wanted = file.data_start + file.data_bytes
        if _size(index, sizes, file.path) != wanted:
            return f"{file.path} is missing or not {wanted} bytes long"
        if not file.digests and _size(index, sizes, digests_key(file.path)) is None:
            return f"{digests_key(file.path)} is missing"
    return None


def _size(index: Index, sizes: dict[str, int], key: str) -> int | None:
    if key not in sizes and not index.store.capabilities.consistent_list:
        return index.size(key)
    return sizes.get(key)


# -- when a commit left the line -------------------------------------------------------------------


def run_of(index: Index, generation: int) -> int | None:
    """Return the generation with which a run began: the first one that others descend from.

    None where a record on the way is gone: it is unknown which run it belongs to.
    """
    while True:
        try:
            parent = index.generation(generation).parent
        except NotFoundError:
            return None
        if parent is None:
            return generation
        generation = parent.generation


def _abandoned(
    index: Index, commit: Commit, claimed: Iterable[int], newest: int, foreign: str
) -> Abandoned:
    if foreign:
        return Abandoned(0.0, commit.generation, f"of another life of the job: {foreign}")
    by = abandoned_by(commit.name, claimed, index.generation)
    since = seconds_of(commit.created, index.where(commit_key(commit.name)))
    if by is not None:  # else its generation has no record: it was removed
        # A zombie commits after the claim that abandons it: its own grace begins then.
        claim = seconds_of(index.generation(by).created, index.where(generation_key(by)))
        since = max(since, claim)
    run = run_of(index, commit.generation)
    other = run is None or run != run_of(index, newest)
    return Abandoned(since, commit.generation if by is None else by, another_run=other)


def abandoned_by(
    name: CommitName, claimed: Iterable[int], read: Callable[[int], Generation]
) -> int | None:
    """Return the generation since whose claim a commit is beside the line; None: it counts.

    A rollback can take an abandoned commit up again: only the last time it left matters.

    Parameters
    ----------
    claimed
        All generations, ascending.
    read
        Gives a generation's record.
    """
    counts = {name.generation: True}
    left: int | None = None
    for g in claimed:
        if g <= name.generation:
            continue
        parent = read(g).parent
        if parent is None or parent.generation < name.generation:
            counts[g] = False
        elif parent.generation == name.generation:
            counts[g] = name.step <= parent.step
        else:
            counts[g] = counts.get(parent.generation, False)
        left = None if counts[g] else (left or g)
    return left


LEFTOVER_S = 86_400.0
"""Age at which an attempt of the live generation counts as given up, in seconds."""
MANIFEST = "manifest."

Kind = Literal["commit", "data", "leftover", "parts", "marks", "pin", "lease", "annotation"]


class GcItem(msgspec.Struct, frozen=True):
    """One thing to delete.

    Attributes
    ----------
    kind
        ``commit``: a commit record. ``data``: the folder of such a commit. ``leftover``: the
        folder of an attempt that never committed. ``parts``: reports of a committed attempt.
        ``pin``, ``lease``, ``annotation``: one of what is gone.
    key
        Object, or folder ending in "/".
    reason
        Why, for people.
    nbytes, objects
        What it frees.
    modified
        When anything in it was last written (seconds since 1970).
    """

    kind: Kind
    key: str
    reason: str
    nbytes: int = 0
    objects: int = 1
    modified: float = 0.0

    @property
    def name(self) -> CommitName | None:
        """The checkpoint it belongs or belonged to."""
        if self.kind in ("data", "leftover", "parts"):
            parsed = parse_data_folder(self.key.split("/")[1])
            return parsed[0] if parsed else None
        last = self.key.rpartition("/")[2]
        if self.kind == "annotation":
            return found[0] if (found := parse_annotation_name(last)) else None
        return parse_commit_name(last)


class GcKept(OfCheckpoint, frozen=True):
    """A checkpoint that stays, and why."""

    reasons: tuple[str, ...]


class GcPlan(msgspec.Struct, frozen=True):
    """The deletions that `run_gc` would make, in its order; plain data.

    Attributes
    ----------
    root_id
        Identity of the root: on another one at the same place the plan is not run.
    claim
        Id of the newest generation's claim.
    annotations
        The annotations of each checkpoint, where the rule looks at metrics: no checkpoint is
        deleted once there are others.
    newest
        The newest generation at planning: a plan of another one is not run.
    items
        Items to delete.
    kept
        Checkpoints that stay, abandoned ones included.
    notes
        What a person should look at: a newest checkpoint that lost files, a metric that no
        checkpoint has.
    sweep_s
        Also remove what interrupted store calls left, at this age in seconds; None: do not look.
    """

    newest: int
    items: tuple[GcItem, ...] = ()
    kept: tuple[GcKept, ...] = ()
    notes: tuple[str, ...] = ()
    sweep_s: float | None = None
    root_id: str = ""
    claim: str = ""
    annotations: tuple[tuple[CommitName, tuple[int, ...]], ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it would free."""
        return sum(i.nbytes for i in self.items)


class GcReport(msgspec.Struct, frozen=True):
    """Result of `run_gc`.

    Attributes
    ----------
    deleted
        Items that are gone.
    skipped
        Items that stayed because something changed since the plan: the item, and why.
    swept
        Names of what interrupted store calls had left.
    """

    deleted: tuple[GcItem, ...] = ()
    skipped: tuple[tuple[GcItem, str], ...] = ()
    swept: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that were freed."""
        return sum(i.nbytes for i in self.deleted)


# -- planning --------------------------------------------------------------------------------------


def plan_gc(
    catalogue: Catalogue,
    keep: Keep | int | None = None,
    *,
    now: float | None = None,
    abandoned_s: float = ABANDONED_S,
    leftover_s: float = LEFTOVER_S,
    thorough: bool = True,
    other_runs: bool = False,
) -> GcPlan:
    """Return what may be deleted; changes nothing.

    Parameters
    ----------
    keep
        Rule for the line; None keeps all of it.
    now
        Seconds since 1970; default: the clock.
    abandoned_s
        How long commits beside the line are kept, in seconds since they left it.
    leftover_s
        Age at which an uncommitted attempt of the newest generation counts as given up, in
        seconds. Nothing can come of those of older generations, or before a step that the same
        generation committed: they go at once.
    thorough
        Also look into every checkpoint for parts, and for what interrupted store calls left.
        Without, the plan costs a few listings: what to do after each save.
    other_runs
        Also delete abandoned commits of other runs: of generations that the newest one does not
        descend from. No rule of one run deletes what another one wrote.

    Raises
    ------
    CorruptError
        A record cannot be read, so that it is unknown what it refers to: nothing is planned.
    """
    now, rule = time.time() if now is None else now, Keep.of(keep)
    catalogue.check_root()
    inventory = take(catalogue, now)
    annotations = None
    if rule.best is not None:
        annotations = catalogue.annotations(inventory.line)
        annotated = catalogue.annotated(inventory.records, annotations)
        inventory = replace(inventory, records=annotated)
    chosen = decide(inventory, rule, now, abandoned_s, other_runs=other_runs)
    waits = unmet([inventory.records[n] for n in inventory.line], rule)
    dropped = chosen.dropped
    items = [GcItem("commit", commit_key(n), "; ".join(r)) for n, r in dropped.items()]
    items += _folders(catalogue.store, inventory, set(dropped), now - leftover_s)
    if thorough:
        records = [inventory.records[n] for n in chosen.kept]
        items += _parts(catalogue.store, records, now - leftover_s)
    items += _markers(catalogue, inventory, now, now - leftover_s)
    return GcPlan(
        newest=inventory.newest,
        items=tuple(items),
        kept=tuple(GcKept(n.step, n.generation, r) for n, r in chosen.kept.items()),
        notes=(*(f"{n} is not complete: {what}" for n, what in inventory.broken.items()), *waits),
        sweep_s=leftover_s if thorough else None,
        root_id=catalogue.root_id,
        claim=catalogue.generation(inventory.newest).claim_id if inventory.newest else "",
        annotations=None if annotations is None else tuple(annotations.items()),
    )


def _folders(
    store: Store, inventory: Inventory, dropped: set[CommitName], old: float
) -> Iterator[GcItem]:
    records = inventory.records
    used = {f for n, r in records.items() if n not in dropped for f in r.folders}
    freed = {f for n in dropped for f in records[n].folders} - used
    for folder, name, _ in attempts(store):
        if folder in used:
            continue
        if folder in freed:
            yield _weigh(store, "data", folder, "no checkpoint refers to it")
        elif name in records or name not in inventory.guards:
            item = _weigh(store, "leftover", folder)
            reason = _why_left(name, item.modified, inventory, old)
            if reason is not None and item.objects:
                yield msgspec.structs.replace(item, reason=reason)


def _why_left(name: CommitName, modified: float, inventory: Inventory, old: float) -> str | None:
    """Say why an attempt without commit is given up; None: it may be in flight."""
    if name.generation < inventory.newest:
        return f"never committed, and generation {name.generation} is over"
    if name in inventory.records:
        return "another attempt committed this step"
    if any(n.generation == name.generation and n.step > name.step for n in inventory.records):
        # A job commits its saves in their order. Kept for a day, failed attempts would fill the
        # very disk that they failed on.
        return "never committed, but a later step of its generation was"
    return "never committed, and no file was written recently" if modified < old else None


def _weigh(store: Store, kind: Kind, folder: str, reason: str = "") -> GcItem:
    marks, found = _parted(store.list(folder), folder + MARKS)
    return GcItem(
        kind,
        folder,
        reason,
        nbytes=sum(o.size for o in found),
        objects=len(marks) + len(found),
        modified=max((o.modified for o in found), default=0.0),
    )


def _parted(
    objects: Iterable[ObjectInfo], folder: str
) -> tuple[list[ObjectInfo], list[ObjectInfo]]:
    """Part objects into those in a folder and all others."""
    inside: list[ObjectInfo] = []
    others: list[ObjectInfo] = []
    for o in objects:
        (inside if o.key.startswith(folder) else others).append(o)
    return inside, others


def _parts(store: Store, records: Iterable[Commit], old: float) -> Iterator[GcItem]:
    """Reports of attempts that are committed, or were once and still lend their data.

    Also marks of clean-ups that died before they deleted anything.
    """
    for folder in sorted({f for r in records for f in r.folders}):
        children = store.children(folder)
        if PARTS in children:
            yield _weigh(store, "parts", folder + PARTS, "the attempt is committed")
        if MARKS in children:
            item = _weigh(store, "marks", folder + MARKS, "the clean-up that left them is over")
            if item.objects and item.modified < old:
                yield item


def _markers(
    catalogue: Catalogue, inventory: Inventory, now: float, old: float
) -> Iterator[GcItem]:
    for info in catalogue.store.list(ANNOTATIONS):
        item = GcItem("annotation", info.key, "what it is about is gone", info.size)
        # Not at once: a record that was deleted may be put back (see `_put_back`).
        if item.name and item.name not in inventory.records and info.modified < old:
            yield item
    for name in sorted(catalogue.pins()):
        if name not in inventory.records:
            yield GcItem("pin", pin_key(name), "the pinned checkpoint is gone")
    for key, lease in leases(catalogue).items():
        if expired(lease, now):
            yield GcItem("lease", key, f"expired ({lease.holder or 'a reader'})")


# -- running ---------------------------------------------------------------------------------------


def run_gc(store: Store, plan: GcPlan) -> GcReport:
    """Delete what the plan lists and still may be deleted; durable on return.

    May be killed anywhere and run again, by this plan or another. Two at a time do no harm.

    Raises
    ------
    ConflictError
        Kind ``stale-plan``: a generation was claimed since the plan; no checkpoint was deleted.
        Kind ``other-root``: another root was made here since.
    StoreError
        Kind ``root-gone``: this is no root any more.
    """
    return _Run(store, plan).run()


class _Run:
    """One execution of a plan. Reads with a fresh catalogue, trusting nothing that is cached."""

    def __init__(self, store: Store, plan: GcPlan) -> None:
        self.store = store
        self.plan = plan
        self.catalogue = Catalogue(store)
        if plan.root_id:
            self.catalogue.expect(plan.root_id)
        self.deleted: list[GcItem] = []
        self.skipped: list[tuple[GcItem, str]] = []

    def run(self) -> GcReport:
        self._check_current()
        self._commits([i for i in self.plan.items if i.kind == "commit"])
        for item in self.plan.items:
            match item.kind:
                case "data" | "leftover":
                    self._settle(item, self._folder(item))
                case "parts" | "marks":
                    # A clean-up may have begun since the plan, and its marks count.
                    last = item.modified if item.kind == "marks" else math.inf
                    there = self.store.list(item.key)
                    self._delete([o.key for o in there if o.modified <= last])
                    self._settle(item, None)
                case "pin" | "lease" | "annotation":
                    self._settle(item, self._marker(item))
        return GcReport(tuple(self.deleted), tuple(self.skipped), tuple(self._sweep()))

    def _settle(self, item: GcItem, why_not: str | None) -> None:
        if why_not is None:
            self.deleted.append(item)
        else:
            self.skipped.append((item, why_not))

    def _delete(self, keys: list[str]) -> None:
        if keys:
            self.store.delete(keys)

    def _check_current(self) -> None:
        self.catalogue.check_root()
        newest = self.catalogue.newest_generation()
        if newest != self.plan.newest:
            raise ConflictError(
                "the plan is out of date: a generation was claimed since",
                kind="stale-plan",
                where=self.store.url,
                wanted=f"generation {self.plan.newest}",
                found=f"generation {newest}",
                hint="run gc again",
            )
        if self.plan.claim:
            self.catalogue.check_claim(newest, self.plan.claim)

    # -- commit records

    def _commits(self, items: list[GcItem]) -> None:
        """Mark what is to go, look for leases and pins, and only then delete what has none.

        Readers create a lease (or pin) first and look for marks second, see `leases`; a rollback
        holds a lease until its generation is claimed. A reader that came before the look is seen,
        and one that comes after sees the mark. So no record is deleted that was promised, whenever
        this process dies.
        """
        if not items:
            return
        latest = self.catalogue.latest()
        named: dict[CommitName, GcItem] = {}
        for item in items:
            if item.name is None or item.name == latest:
                self._settle(item, "the newest" if item.name else "not a commit")
            else:
                named[item.name] = item
        found = self.catalogue.records(named)
        gone = [name for name in named if name not in found]  # an earlier run was here
        for name in gone:
            self._settle(named[name], None)
        self._delete(self._marks_of(gone))
        marks = {n: put_mark(self.store, r.folder, commit=True) for n, r in found.items()}
        try:
            guards = guarded(self.catalogue, time.time())
            # After the guards: a rollback releases its lease when the generation is claimed.
            self._check_current()
            late = self._annotated_since(found)
            doomed = [n for n in found if n not in guards and not late]
            raw: dict[CommitName, bytes] = {}
            for name in doomed:
                with suppress(NotFoundError):  # another clean-up was faster
                    raw[name] = self.store.get(commit_key(name))
            self._delete([commit_key(n) for n in doomed])
            self.store.sync(COMMITS)
            self._check_unclaimed(raw)
            # With those that a clean-up left which died: others may refer to the folder for long.
            self._delete([k for n in doomed for k in commit_marks(self.store, found[n].folder)])
        finally:
            with suppress(CkptdError):  # they are void after a while
                self._delete(list(marks.values()))
        for name in found:
            self._settle(named[name], "; ".join(guards.get(name, ())) or late)

    def _annotated_since(self, names: Iterable[CommitName]) -> str | None:
        """Say that metrics came that the plan, which looked at some, does not know."""
        seen = self.plan.annotations
        if seen is None or not self.catalogue.annotations(names).items() - set(seen):
            return None
        return "a checkpoint was annotated since the plan"

    def _marks_of(self, names: list[CommitName]) -> list[str]:
        """Return the marks that a clean-up left which died after it had deleted these commits."""
        of = [folder for folder, name, _ in attempts(self.store) if name in names] if names else []
        return [key for folder in of for key in commit_marks(self.store, folder)]

    def _check_unclaimed(self, raw: dict[CommitName, bytes]) -> None:
        """Put records back where a generation was claimed meanwhile that may need them.

        A job that goes on from a snapshot without a commit holds what lies before it on the line,
        if that is not marked; what is marked was not promised.
        """
        try:
            self._check_current()
        except ConflictError as error:
            if error.kind == "stale-plan":
                for name, body in raw.items():
                    self._put_back(commit_key(name), body)
            raise

    def _put_back(self, key: str, raw: bytes) -> None:
        with suppress(ConflictError):  # another process did
            self.store.put(key, raw, create_only=True)
        # Another gc that saw no record deletes the data and looks for records after that.
        record = decode_record(raw, Commit, self.catalogue.where(key))
        if not all(set(self.store.children(f)) - {MARKS} for f in record.folders):
            self._delete([key])

    # -- data

    def _folder(self, item: GcItem) -> str | None:
        """Delete a data folder unless something refers to it by now; say why not."""
        why = self._still_used(item)
        if why is not None:
            return why
        marks, found = _parted(self.store.list(item.key), item.key + MARKS)
        if item.kind == "leftover" and any(o.modified > item.modified for o in found):
            return "written to since the plan"
        mark = put_mark(self.store, item.key)
        why = self._still_used(item)
        if why is not None:
            self._delete([mark])
            return why
        keys = [o.key for o in found]
        # Without its manifest a folder is nothing that anybody could commit.
        self._delete([k for k in keys if k.startswith(item.key + MANIFEST)])
        self._delete([k for k in keys if not k.startswith(item.key + MANIFEST)])
        # A writer may have committed what was taken for a leftover; it looks for marks after that.
        hollow = [n for n, r in self._records(item).items() if item.key in r.folders]
        self._delete([commit_key(n) for n in hollow])
        self._delete([*(o.key for o in marks), mark])
        return None

    def _records(self, item: GcItem) -> dict[CommitName, Commit]:
        names = set(self.catalogue.commits())
        if item.name is not None:
            names.add(item.name)  # a listing that lags may hide it: ask by name
        return self.catalogue.records(names)

    def _still_used(self, item: GcItem) -> str | None:
        records = self._records(item)
        for name, record in records.items():
            if item.key in record.folders:
                return f"{name} refers to it"
        # Without its record it is unknown which attempt a reader is at, or what else it refers to.
        # With it, it was not this.
        names = {item.name, *(i.name for i in self.plan.items if i.kind == "commit")}
        if (names - set(records)) & set(guarded(self.catalogue, time.time())):
            return "pinned or leased"
        if self.catalogue.newest_generation() != self.plan.newest:
            return "a generation was claimed"
        return None

    # -- the rest

    def _marker(self, item: GcItem) -> str | None:
        if item.kind == "lease":
            lease = leases(self.catalogue).get(item.key)
            if lease is not None and not expired(lease, time.time()):
                return "renewed"
        elif (name := item.name) is not None and self.store.exists(commit_key(name)):
            return f"{name} exists"
        self._delete([item.key])
        return None

    def _sweep(self) -> list[str]:
        age = self.plan.sweep_s
        if age is None:
            return []
        # Beside the marker of the root lie other people's files and folders, perhaps very many.
        swept = self.store.sweep("", older_than_s=age, deep=False)
        for folder in (COMMITS, GENERATIONS, DATA, PINS, LEASES, ANNOTATIONS):
            swept += self.store.sweep(folder, older_than_s=age)
        return swept


def apply_retention(catalogue: Catalogue, keep: Keep | int) -> tuple[str, ...]:
    """Delete what `keep` does not want, and what older lives of the job left over.

    For one rank, after a commit; the save is durable whatever happens here. The grace periods are
    those of `ckptd.checkpoint.root.gc.plan_gc`.

    Parameters
    ----------
    keep
        The rule for the line.

    Returns
    -------
    tuple
        What a person should look at.

    Raises
    ------
    ConflictError
        Kind ``stale-plan``: a newer life of the job began meanwhile; it is the one to delete.
    """
    with events.span("retention") as span:
        plan = plan_gc(catalogue, keep, thorough=False)
        if plan.items:
            span.nbytes = run_gc(catalogue.store, plan).nbytes
    return plan.notes
