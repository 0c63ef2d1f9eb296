"""Committing an attempt without collectives (spec section 9).

Every rank reports its part below ``parts/``. Whoever commits (rank 0, or any survivor) waits for
all parts, checks them against each other, writes the witness and the manifest, and creates the
commit record, which is the one moment at which the checkpoint begins to exist. Two committers do
no harm: both make the same bytes, and the record is create-only.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from ckptd import events
from ckptd.decoding import msgpack_decoder
from ckptd.engine.assemble import assemble, check_plans, differing_groups
from ckptd.engine.catalogue import Catalogue
from ckptd.engine.job import Part, Save
from ckptd.engine.publish import publish_manifest, write_witness
from ckptd.engine.referred import leased
from ckptd.engine.structure import SavePlan
from ckptd.engine.telling import saving
from ckptd.errors import CkptdError, CorruptError, DeadlineError, NotFoundError, SaveError
from ckptd.format.manifest import Manifest
from ckptd.format.names import PARTS, part_key
from ckptd.format.records import Commit
from ckptd.format.witness import WitnessPlan
from ckptd.store.base import Store

__all__ = [
    "blob_key",
    "commit_attempt",
    "decode_plan",
    "finish_attempt",
    "gather_parts",
    "plan_key",
    "remove_parts",
    "witness_plan",
]

_plans = msgpack_decoder(SavePlan)

_FIRST_POLL_S = 0.002
_LONGEST_POLL_S = 0.5
_ASK_S = 1.0


def blob_key(folder: str, digest: str) -> str:
    """Key of a body that several parts refer to by its digest."""
    return f"{folder}{PARTS}b-{digest}"


def plan_key(folder: str) -> str:
    """Key of the plan that an attempt was written by, a `SavePlan` as msgpack.

    Near tiers hold it beside the parts, so that whoever finds them can finish the snapshot.
    """
    return f"{folder}{PARTS}plan"


def decode_plan(raw: bytes, where: str) -> SavePlan:
    """Return the plan that was stored under `plan_key`.

    Raises
    ------
    CorruptError
        kind ``bad-record``: not a plan. kind ``digest``: not the one that its digest names.
    """
    try:
        plan = _plans.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptError(
            "not a plan", kind="bad-record", where=where, found=str(error)[:200]
        ) from None
    found = plan.stamped().digest
    if found != plan.digest:
        raise CorruptError(
            "a plan is not what was written",
            kind="digest",
            where=where,
            wanted=plan.digest,
            found=found,
        )
    return plan


def commit_attempt(
    catalogue: Catalogue,
    plan: SavePlan,
    save: Save,
    stop: Callable[[], str | None],
    timeout_s: float,
    rank: int = 0,
    heard: Callable[[Sequence[Part]], None] | None = None,
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
    heard
        Called with the parts of all ranks.

    Raises
    ------
    SaveError
        A rank failed, or ranks disagree (kinds ``structure``, ``replicas-differ``). kind
        ``base-gone``: what ranks refer to was deleted.
    DeadlineError
        kind ``parts``: names the ranks that did not report.
    ConflictError
        kind ``exists``: this checkpoint exists already, and who wrote it. kind ``superseded``:
        a newer generation runs; what this one writes is not on its line. kinds ``other-root``,
        ``claim-lost``: the root, or the generation's record, is another life's by now.
    StoreError
        kind ``root-gone``: the folder is no root any more.
    """
    with saving(catalogue.store, save.name, save.attempt, rank):
        with events.span("gather"):
            try:
                stop = _or_settled(catalogue, save, stop)
                parts = gather_parts(catalogue.store, save.folder, plan.world, stop, timeout_s)
            except _SettledError as other:
                return other.commit
        if heard is not None:
            heard(parts)
        with events.span("commit"), leased(catalogue, parts):
            store = catalogue.store
            manifest = finish_attempt(store, store, plan, save, parts)
            return publish_manifest(catalogue, manifest, root=save.root_id, claim=save.claim_id)


def finish_attempt(
    source: Store, target: Store, plan: SavePlan, save: Save, parts: Sequence[Part]
) -> Manifest:
    """Check the parts of all ranks against each other and return the manifest that they make.

    Deterministic, so that everybody who has the parts may do it.

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
        kind ``bad-record``: a part's witness is not what the plan asks for.
    """
    check_plans(parts, plan)
    _check_replicas(source, save.folder, parts)
    values = ((part_key(save.folder, p.rank), p.slots, p.values) for p in parts)
    witness = write_witness(target, save.folder, witness_plan(plan), values)
    return assemble(plan, parts, save, witness)


def remove_parts(store: Store, folder: str) -> None:
    """Remove what the ranks reported; what an error leaves behind is `ckptd.engine.gc`'s."""
    store.delete([info.key for info in store.list(folder + PARTS)])


class _SettledError(Exception):
    """Another survivor committed this attempt, and may have removed the parts already."""

    def __init__(self, commit: Commit) -> None:
        super().__init__(str(commit.name))
        self.commit = commit


def _or_settled(
    catalogue: Catalogue, save: Save, stop: Callable[[], str | None]
) -> Callable[[], str | None]:
    """Return `stop`, which now and then also looks whether the wait has become pointless."""
    asked = time.monotonic()

    def stop_or_settled() -> str | None:
        nonlocal asked
        if time.monotonic() - asked >= _ASK_S:
            asked = time.monotonic()
            with contextlib.suppress(NotFoundError):
                commit = catalogue.commit(save.name)
                if commit.attempt == save.attempt:
                    raise _SettledError(commit)
        return stop()

    return stop_or_settled


def gather_parts(
    store: Store, folder: str, world: int, stop: Callable[[], str | None], timeout_s: float
) -> list[Part]:
    """Wait for the part of every rank and return them by rank.

    On stores whose listing is consistent one listing finds all new parts; elsewhere the missing
    ones are asked for by name.
    """
    found: dict[int, Part] = {}
    end = time.monotonic() + timeout_s
    pause = _FIRST_POLL_S
    with ThreadPoolExecutor(store.capabilities.parallel) as pool:
        while len(found) < world:
            before = len(found)
            ranks = _new(store, folder, world, found)
            for part in pool.map(lambda r: _peek(store, folder, r), ranks):
                if part is not None:
                    _raise_failed(part)
                    found[part.rank] = part
            if len(found) == world:
                break
            reason = stop()
            if reason is not None:
                raise SaveError(reason, kind="aborted", where=folder)
            if time.monotonic() > end:
                raise _missing(folder, world, found, timeout_s)
            pause = _FIRST_POLL_S if len(found) > before else min(pause * 1.5, _LONGEST_POLL_S)
            time.sleep(pause)
    return [found[r] for r in range(world)]


def _new(store: Store, folder: str, world: int, found: dict[int, Part]) -> Iterable[int]:
    if not store.capabilities.consistent_list:
        return [r for r in range(world) if r not in found]
    names = store.children(folder + PARTS)
    ranks = (int(n[1:]) for n in names if n[:1] == "r" and n[1:].isdecimal())
    return [r for r in ranks if r < world and r not in found]


def _peek(store: Store, folder: str, rank: int) -> Part | None:
    key = part_key(folder, rank)
    try:
        part = Part.decode(store.get(key), key)
    except NotFoundError:
        return None
    if part.rank != rank:
        raise SaveError("a part names another rank", kind="structure", where=key, found=part.rank)
    return part


def _raise_failed(part: Part) -> None:
    if part.error is None:
        return
    cause = CkptdError.from_dict(part.error)
    raise SaveError(
        f"rank {part.rank} failed: {cause.message}",
        kind=cause.kind,
        where=cause.where,
        wanted=cause.wanted,
        found=cause.found,
        hint=cause.hint,
    )


def _missing(folder: str, world: int, found: dict[int, Part], timeout_s: float) -> DeadlineError:
    missing = [r for r in range(world) if r not in found]
    return DeadlineError(
        "ranks did not write their part in time",
        kind="parts",
        where=folder,
        wanted=f"{world} parts within {timeout_s:.0f} s",
        found=f"missing ranks {missing[:16]}{' ...' if len(missing) > 16 else ''}",
        hint="see why those ranks are slow or dead; the previous checkpoint is untouched",
    )


def _check_replicas(store: Store, folder: str, parts: Sequence[Part]) -> None:
    """Raise naming what differs between ranks that should agree."""
    for by_digest in differing_groups(parts).values():
        tables = []
        for digest in list(by_digest)[:8]:
            try:
                tables.append((by_digest[digest], json.loads(store.get(blob_key(folder, digest)))))
            except (NotFoundError, ValueError):
                tables.append((by_digest[digest], {}))
        ranks, first = tables[0]
        for others, table in tables[1:]:
            names = sorted(k for k in first | table if first.get(k) != table.get(k))
            raise SaveError(
                "replicas differ between ranks",
                kind="replicas-differ",
                where=", ".join(names[:8]) + (" ..." if len(names) > 8 else ""),
                wanted=f"what ranks {ranks[:8]} hold",
                found=f"other values on ranks {others[:8]} ({len(names)} names differ)",
                hint="values that differ on purpose are declared with ckptd.PerRank(value, "
                "on_change=...); otherwise the ranks have drifted apart",
            )


def witness_plan(plan: SavePlan) -> WitnessPlan:
    """Return where the witness looks; every rank and every reader computes the same."""
    return WitnessPlan.over(plan.tensors)
