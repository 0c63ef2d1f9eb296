"""DCP's `StorageWriter`: what it saves is an ordinary checkpoint of ckptd."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ckptd.checkpoint.save import BoxSave, BoxTensor
from ckptd.errors import UsageError
from ckptd.types import Box
from ckptd_dcp.atroot import AtRoot

__all__ = ["CkptdWriter"]


class CkptdWriter(AtRoot, dcp.StorageWriter):
    """Saves to a root of ckptd, by ``dcp.save`` and ``dcp.async_save``.

    The checkpoint exists once the coordinator has committed it, after every rank's file is durable;
    a death at any moment before leaves the root as it was. The first save of a process continues
    the line from what a `CkptdReader` loaded before; from then on an older life of the job, should
    it still run, cannot commit.

    Parameters
    ----------
    url
        The root: a path, ``s3://bucket/prefix``, any fsspec URL.
    step
        Completed steps; later than the last one saved. DCP's ``checkpoint_id`` may give it instead.
    metadata
        JSON values for the commit record; the coordinator's count.
    new_run
        Of the first save of a process that has loaded nothing, in a root that has checkpoints: True
        begins a line of its own, False continues the newest one, None is refused (``not-loaded``).
    store_options
        For the store: endpoint, keys, region.
    """

    def __init__(
        self,
        url: str,
        step: int | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        new_run: bool | None = None,
        store_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(url, step, store_options)
        self._metadata = metadata
        self._new_run = new_run
        self._save: BoxSave | None = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse a save without collectives."""
        if not kwargs.get("use_collectives", True):
            raise _unusable("a save without collectives", "one process that plans and commits")

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Begin the save and send it to every rank in its plan; on the coordinator."""
        if self._step is None:
            raise _unusable("a save without a step", "CkptdWriter(url, step=...)")
        if not all(plan.usable for plan in plans):
            raise _unusable("a cached plan", "a planner with enable_plan_caching=False")
        boxes: dict[str, list[tuple[int, Box]]] = {}
        tensors: dict[str, BoxTensor] = {}
        for rank, plan in enumerate(plans):
            for item in plan.items:
                if item.tensor_data is None:
                    continue
                name, data = item.index.fqn, item.tensor_data
                boxes.setdefault(name, []).append((rank, _box(item)))
                dtype = str(data.properties.dtype).removeprefix("torch.")
                new = BoxTensor(dtype, tuple(data.size), boxes[name])
                if tensors.setdefault(name, new) != new:
                    raise UsageError(
                        "ranks disagree on dtype or shape of a tensor",
                        kind="structure",
                        where=name,
                        found=f"{dtype}{list(data.size)} on rank {rank}",
                    )
        self._save = self.root.begin(self._step, len(plans), tensors, self._metadata, self._new_run)
        return [replace(plan, storage_data=(self._save, i)) for i, plan in enumerate(plans)]

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file; it is durable on return."""
        save, rank = plan.storage_data
        objects: dict[str, Any] = {}
        items: dict[str, list[WriteItem]] = {}
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                objects[item.index.fqn] = _object(planner, item)
            else:
                items.setdefault(item.index.fqn, []).append(item)

        def values(name: str, box: Box) -> NDArray[np.uint8]:
            return _bytes(planner, items.get(name, ()), box)

        part = self.root.write(save, rank, values, objects)
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(""), len(part), part)])
        return future

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Commit; on the coordinator."""
        if self._save is None:
            raise _unusable("finish() alone", "prepare_global_plan() before, on the same process")
        self.root.commit(self._save, [r.storage_data for some in results for r in some])


def _unusable(found: str, wanted: str) -> UsageError:
    return UsageError(
        "this use of DCP is not supported",
        where="CkptdWriter",
        wanted=wanted,
        found=found,
    )


def _box(item: WriteItem) -> Box:
    """Return where the data of an item lies in its tensor."""
    if item.tensor_data is None:
        raise UsageError("a plan's item has no tensor", kind="structure", where=item.index.fqn)
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


def _bytes(planner: dcp.SavePlanner, items: Sequence[WriteItem], box: Box) -> NDArray[np.uint8]:
    """Return the bytes of a box that one of the items holds."""
    for item in items:
        held = _box(item)
        if box.intersect(held) == box:
            part: Any = planner.resolve_data(item)
            for dim, (at, first, size) in enumerate(
                zip(box.offset, held.offset, box.shape, strict=True)
            ):
                part = part.narrow(dim, at - first, size)
            part = part.detach().resolve_conj().resolve_neg().cpu().contiguous()
            found: NDArray[np.uint8] = part.reshape(-1).view(torch.uint8).numpy()
            return found
    raise UsageError(
        "a plan assigns an item to a rank that does not hold it", kind="structure", found=str(box)
    )


def _object(planner: dcp.SavePlanner, item: WriteItem) -> Any:
    """Return a value that is no tensor. What another planner pickles is not trusted."""
    if isinstance(planner, dcp.DefaultSavePlanner):
        return planner.lookup_object(item.index)
    body: Any = planner.resolve_data(item)
    try:
        return torch.load(body, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UsageError(
            "a planner returned bytes that are not a plain value",
            kind="unsavable",
            where=item.index.fqn,
            wanted="bytes that torch.load(..., weights_only=True) can read",
            found=str(error)[:200],
        ) from error
