"""What a load may try, newest first: commits of the line, and complete snapshots that are on it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

from ckptd.engine.index import Index
from ckptd.engine.snapshots import Snapshot, complete_snapshots
from ckptd.engine.union import UnionStore
from ckptd.errors import CorruptError, NotFoundError, StoreError
from ckptd.format.lineage import line
from ckptd.format.names import CommitName

__all__ = ["Candidate", "Candidates", "find_candidates"]

_log = logging.getLogger("ckptd")


class Candidate(msgspec.Struct, frozen=True):
    """A checkpoint to try: a snapshot, or where there is none the commit."""

    step: int
    generation: int
    snapshot: Snapshot | None = None

    @property
    def name(self) -> CommitName:
        """The checkpoint's identity."""
        return CommitName(self.step, self.generation)


class Candidates(msgspec.Struct, frozen=True):
    """What to try, in this order; plain data, so that one rank can tell the others.

    Attributes
    ----------
    rooted
        Whether the root could be read; else only near tiers are.
    """

    items: tuple[Candidate, ...]
    rooted: bool = True


def find_candidates(
    index: Index,
    near: UnionStore | None = None,
    *,
    step: int | None = None,
    without_root: bool = False,
) -> Candidates:
    """Return what can be loaded, newest first.

    A snapshot counts when a commit of its step and generation would. Where a commit of that name
    exists, only the snapshot of the attempt that was committed does. It comes first: a commit may
    refer to older files for what its snapshot has anew.

    Parameters
    ----------
    near
        The near tiers.
    step
        Only this step.
    without_root
        Where the root cannot be reached, take the snapshots of the newest generation that the near
        tiers know of; none if they are of several roots.

    Raises
    ------
    NotFoundError
        Kinds ``no-root``, ``not-a-root``; ``no-step``: there is nothing of that step.
    StoreError
        The root fails, and nothing else was asked for or is there.
    """
    # Before the line is looked at: a zombie's snapshot, found later, could pass for one of it.
    snapshots = _snapshots(near)
    try:
        items = _on_line(index, snapshots, step)
    except StoreError as error:
        newest = max((s.generation for s in snapshots), default=0)
        found = [s for s in snapshots if s.generation == newest and step in (None, s.step)]
        if not without_root or not found:
            raise
        if len({s.root for s in snapshots if s.root}) > 1:
            # A folder of another run, an agent on the address of one that is gone: the wrong state
            # would be trained on, and nobody would notice.
            error.add_note("near tiers hold snapshots of several roots; only the root tells whose")
            raise
        _log.warning("the root cannot be read, only near tiers are looked at: %s", error)
        items = [Candidate(s.step, s.generation, s) for s in sorted(found, reverse=True)]
        return Candidates(tuple(items), rooted=False)
    if not items and step is not None:
        items = [_committed(index.find(step))]
    return Candidates(tuple(items))


def _snapshots(near: UnionStore | None) -> list[Snapshot]:
    if near is None:
        return []
    try:
        return complete_snapshots(near)
    except StoreError as error:
        _log.warning("no near tier can be read: %s", error)
        return []


def _on_line(index: Index, snapshots: list[Snapshot], step: int | None) -> list[Candidate]:
    marker = index.open()
    newest, commits = index.survey()
    if not newest:
        return []
    # A folder may hold what another run left, and a root may be another one than it was.
    ours = [s for s in snapshots if s.root in ("", marker.root_id)]
    counting = [s for s in ours if _may_count(index, s, newest)]
    names = line(newest, {*commits, *(s.name for s in counting)}, index.ancestor)
    out: list[Candidate] = []
    for name in reversed(names):
        if step not in (None, name.step):
            continue
        same = sorted((s for s in counting if s.name == name), reverse=True)
        if name in commits and same:
            same = _same_attempt(index, name, same)
        out += [Candidate(s.step, s.generation, s) for s in same]
        if name in commits:
            out.append(_committed(name))
    # Further down the load itself finds out, and goes on to an older one.
    while out and out[0].snapshot is None and not index.counts(out[0].name):
        del out[0]
    return out


def _committed(name: CommitName) -> Candidate:
    return Candidate(name.step, name.generation)


def _may_count(index: Index, snapshot: Snapshot, newest: int) -> bool:
    """Tell whether a commit of that name could have been made (spec 9.2)."""
    if not 0 < snapshot.generation <= newest:
        return False
    try:
        parent = index.generation(snapshot.generation).parent
    except NotFoundError:
        return False
    return parent is None or snapshot.step > parent.step


def _same_attempt(index: Index, name: CommitName, found: Iterable[Snapshot]) -> list[Snapshot]:
    try:
        attempt = index.commit(name).attempt
    except NotFoundError:
        return []  # deleted since the listing, so it was not wanted any more
    except CorruptError:
        return list(found)  # nobody knows which one it was
    return [s for s in found if s.attempt == attempt]
