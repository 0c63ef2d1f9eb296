"""Snapshots of simulated ranks on near stores, made by the code that drains real ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ckptd.base.grids.block import box_region
from ckptd.checkpoint.format.container import FileMap
from ckptd.checkpoint.format.manifest import Manifest
from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.load.plan import Want, read_plan
from ckptd.checkpoint.load.read import execute
from ckptd.checkpoint.root.catalogue import Catalogue, remove_parts
from ckptd.checkpoint.save.commit import commit_attempt, plan_key
from ckptd.checkpoint.save.drain import drain
from ckptd.checkpoint.save.messages import SaveRequest, Sealed
from ckptd.checkpoint.save.structure import RankPlan, SavePlan
from ckptd.store.base import Store
from ckptd.types import Box
from tests.checkpoint.save.saving import fill

TIMEOUT_S = 20.0


def save_of(name: CommitName, attempt: str, plan: SavePlan) -> SaveRequest:
    return SaveRequest(
        job=0,
        step=name.step,
        generation=name.generation,
        attempt=attempt,
        plan=plan.digest,
        extra=(),
        objects=(),
        metadata={"loss": 0.5},
        keep=None,
        timeout_s=TIMEOUT_S,
    )


def put_share(
    store: Store,
    plan: SavePlan,
    rank: int,
    arrays: Mapping[str, Any],
    name: CommitName,
    attempt: str = "0001",
    replicas: tuple[tuple[str, str], ...] = (),
) -> SaveRequest:
    """Write one rank's share of a snapshot, with the plan beside it, as a near tier holds it."""
    save = save_of(name, attempt, plan)
    data = memoryview(bytearray(plan.filemap.data_bytes(rank)))
    fill(plan, rank, arrays, data)
    store.put(plan_key(save.folder), msgspec.msgpack.encode(plan))
    drain(
        store,
        RankPlan(plan, rank),
        save,
        data,
        lambda upto: None,
        lambda: Sealed(0, replicas),
        lambda done, total: None,
    )
    return save


def put_snapshot(
    stores: Sequence[Store],
    plan: SavePlan,
    arrays: Mapping[str, Any],
    name: CommitName,
    attempt: str = "0001",
) -> SaveRequest:
    """Write the shares of all ranks, each to one of `stores` in turn."""
    saves = [
        put_share(stores[rank % len(stores)], plan, rank, arrays, name, attempt)
        for rank in range(plan.world)
    ]
    return saves[0]


def commit(
    catalogue: Catalogue,
    plan: SavePlan,
    arrays: Mapping[str, Any],
    name: CommitName,
    attempt: str = "0001",
) -> None:
    """Write a checkpoint to a root, and commit it."""
    save = put_snapshot([catalogue.store], plan, arrays, name, attempt)
    commit_attempt(catalogue, plan, save, lambda: None, TIMEOUT_S)
    remove_parts(catalogue.store, save.folder)


def read_all(store: Store, manifest: Manifest, filemap: FileMap) -> dict[str, Any]:
    """Read every tensor whole."""
    targets, wants = {}, []
    for number, entry in enumerate(manifest.tensors):
        target = np.zeros(entry.shape, dtype=filemap.dtypes[number].numpy)
        targets[entry.name] = target
        region = box_region(Box((0,) * len(entry.shape), entry.shape))
        wants.append(Want(number, (region,), target.reshape(-1)))
    execute(read_plan(manifest, filemap, wants, store=store), store)
    return targets


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two states have the same bits."""
    return a.keys() == b.keys() and all(
        np.asarray(a[n]).tobytes() == np.asarray(b[n]).tobytes() for n in a
    )
