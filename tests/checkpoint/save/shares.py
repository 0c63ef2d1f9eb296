"""Shares of snapshots in real slots, without processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.save.arena import Slot
from ckptd.checkpoint.save.drain import StagedShard, stage_shard
from ckptd.checkpoint.save.messages import SaveRequest, Sealed
from ckptd.checkpoint.save.structure import RankPlan, SavePlan
from ckptd.store.base import Store
from tests.checkpoint.save.saving import fill, plan_of, values
from tests.checkpoint.save.snapshotting import save_of

__all__ = ["content", "save_for", "shard_in", "slot_for"]


def slot_for(plan: SavePlan, rank: int = 0, number: int = 0) -> Slot:
    return Slot(number, plan.filemap.data_bytes(rank))


def save_for(
    plan: SavePlan, job: int, near: Sequence[str] = ("memory",), *, root: bool = False
) -> SaveRequest:
    """Return the save whose step is its job."""
    save = save_of(CommitName(job, 1), f"{job:04d}", plan)
    return msgspec.structs.replace(save, job=job, near=tuple(near), root=root)


def shard_in(
    slot: Slot,
    save: SaveRequest,
    plan: SavePlan | None = None,
    rank: int = 0,
    arrays: Mapping[str, Any] | None = None,
) -> StagedShard:
    """Copy a state into a slot, seal it, and return the share."""
    plan = plan or plan_of()
    slot.begin(save.job)
    slot.staged = fill(plan, rank, arrays or values(save.job), slot.data)
    slot.seal()
    return stage_shard(
        RankPlan(plan, rank), save, slot, lambda nbytes: None, lambda: Sealed(save.job)
    )


def content(store: Store, prefix: str = "data/") -> dict[str, bytes]:
    """Return everything that a store holds."""
    return {info.key: store.get(info.key) for info in store.list(prefix)}
