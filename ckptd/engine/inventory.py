"""The inventory of a root, and which of it may go: the user's rule, and above it what never goes.

Never deleted are the newest complete checkpoint of the line and all that came after it, and what
is pinned or leased. Where the line has no complete checkpoint (a fresh line that has not saved
yet, a newest checkpoint that lost files) nothing at all is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ckptd.engine.clock import seconds_of
from ckptd.engine.index import Index
from ckptd.engine.leases import expired, leases
from ckptd.engine.policy import Keep, Selection, select
from ckptd.errors import CorruptError, NotFoundError
from ckptd.format.lineage import line
from ckptd.format.names import CommitName, commit_key, digests_key, generation_key
from ckptd.format.records import Commit, Generation

__all__ = [
    "Abandoned",
    "Inventory",
    "abandoned_by",
    "decide",
    "guarded",
    "missing_files",
    "run_of",
    "take",
]

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


def take(index: Index, now: float, whole: CommitName | None = None) -> Inventory:
    """Read the state of a root.

    Parameters
    ----------
    now
        Seconds since 1970; tells which leases ran out.
    whole
        A commit that the caller knows to be complete: its files are not looked for.

    Raises
    ------
    CorruptError
        A record cannot be read: without it nobody knows which data it refers to.
    """
    newest, names = index.survey()
    records = index.records(names)
    names = [n for n in names if n in records]
    foreign = {n: why for n in names if (why := index.foreign(records[n])) is not None}
    own = [n for n in names if n not in foreign]
    on_line = line(newest, own, index.ancestor) if newest else []
    anchor, broken = _anchor(index, [records[n] for n in on_line], whole)
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
    out: dict[CommitName, list[str]] = {n: ["pinned"] for n in index.pins()}
    for lease in leases(index).values():
        if not expired(lease, now):
            name = CommitName(lease.step, lease.generation)
            out.setdefault(name, []).append(f"leased by {lease.holder or 'a reader'}")
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


def _anchor(
    index: Index, commits: list[Commit], whole: CommitName | None
) -> tuple[CommitName | None, dict[CommitName, str]]:
    broken: dict[CommitName, str] = {}
    for commit in reversed(commits):
        missing = None if commit.name == whole else missing_files(index, commit)
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
        if _size(index, sizes, digests_key(file.path)) is None:
            return f"{digests_key(file.path)} is missing"
    return None


def _size(index: Index, sizes: dict[str, int], key: str) -> int | None:
    if key not in sizes and not index.store.capabilities.consistent_list:
        return index.size(key)
    return sizes.get(key)


# -- when a commit left the line -------------------------------------------------------------------


def run_of(index: Index, generation: int) -> int | None:
    """Return the generation with which a run began: the first one that others descend from.

    None where a record on the way is gone: nobody knows whose it is.
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
    left = _left(index, commit, claimed)
    run = run_of(index, commit.generation)
    return replace(left, another_run=run is None or run != run_of(index, newest))


def _left(index: Index, commit: Commit, claimed: Iterable[int]) -> Abandoned:
    by = abandoned_by(commit.name, claimed, index.generation)
    if by is None:  # its generation was never claimed: somebody removed the record
        key = commit_key(commit.name)
        return Abandoned(seconds_of(commit.created, index.where(key)), commit.generation)
    key = generation_key(by)
    since = seconds_of(index.generation(by).created, index.where(key))
    # A zombie commits after the claim that abandons it: its own grace begins then.
    created = seconds_of(commit.created, index.where(commit_key(commit.name)))
    return Abandoned(max(since, created), by)


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
