"""DCP's `StorageReader` over a root of ckptd: any cut of a checkpoint into any other."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as words
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.futures import Future

from ckptd.errors import ConflictError, UsageError
from ckptd.readers import batches
from ckptd.types import Box
from ckptd_dcp.atroot import AtRoot

__all__ = ["CkptdReader"]

_log = logging.getLogger(__name__)

_READ_BYTES = 256 << 20
"""So much is read at a time, if a tensor is not larger."""


class CkptdReader(AtRoot, dcp.StorageReader):
    """Loads a checkpoint of ckptd, however it was saved, by ``dcp.load``.

    Every block is compared with its digest before its bytes reach a tensor. A lease keeps the
    checkpoint until it is loaded. Values that each rank has of its own (`ckptd.PerRank`, random
    streams) are not offered: DCP has no such thing.

    The first save of this process continues from the checkpoint of the last load that took
    everything on offer. A load of a part, such as some weights to compare, changes nothing there.

    Parameters
    ----------
    url, store_options
        As for `ckptd_dcp.CkptdWriter`.
    step
        Which checkpoint, the newest one by default. DCP's ``checkpoint_id`` may say it instead.
    """

    def __init__(
        self,
        url: str,
        step: int | None = None,
        *,
        store_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(url, step, store_options)
        self._held = ExitStack()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Close a checkpoint that was opened; see `AtRoot.reset`."""
        self._held.close()
        super().reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Open the checkpoint; return names, shapes and types of what it offers."""
        self._held.close()
        self._reader = self._held.enter_context(self.root.open(self._step))
        found: dict[str, Any] = {}
        self._canonical: dict[str, str] = {}
        for name, info in self._reader.infos.items():
            shape = torch.Size(info.shape)
            # One chunk a tensor: a box is read below, however the checkpoint is cut.
            chunk = words.ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
            properties = words.TensorProperties(dtype=_dtype(info))
            entry = words.TensorStorageMetadata(properties, shape, [chunk])
            found |= dict.fromkeys((name, *info.aliases), entry)
            self._canonical |= dict.fromkeys((name, *info.aliases), name)
        self._objects = {o.name: o for o in self._reader.entries if not o.per_rank}
        found |= {name: words.BytesStorageMetadata() for name in self._objects}
        self._canonical |= {name: name for name in self._objects}
        return dcp.Metadata(found, planner_data={name: (name,) for name in found})

    def set_up_storage_reader(
        self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Note which rank coordinates; `read_metadata` has opened the checkpoint."""
        self._coordinator = is_coordinator

    def prepare_local_plan(self, plan: dcp.LoadPlan) -> dcp.LoadPlan:
        """Note which checkpoint this rank reads."""
        plan.storage_data = self._reader.title
        return plan

    def prepare_global_plan(self, plans: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        """Check that all ranks read one checkpoint; see whether they take all of it."""
        found = sorted({str(plan.storage_data) for plan in plans})
        if len(found) > 1:
            raise ConflictError(
                "a checkpoint was committed while ranks looked for the newest one",
                kind="busy",
                where=self._url,
                found=", ".join(found[:4]),
                hint="load again, or choose one: CkptdReader(url, step=...)",
            )
        taken = {self._canonical[i.storage_index.fqn] for plan in plans for i in plan.items}
        whole = taken >= set(self._canonical.values())
        return [replace(plan, storage_data=whole) for plan in plans]

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        """Fill what the planner gives, tensor by tensor and value by value."""
        with self._held:
            tensors: list[tuple[ReadItem, Box]] = []
            for item in plan.items:
                if item.type is LoadItemType.BYTE_IO:
                    body = io.BytesIO()
                    torch.save(self._reader.object(self._objects[item.storage_index.fqn]), body)
                    body.seek(0)
                    planner.load_bytes(item, body)
                else:
                    tensors.append((item, Box(tuple(item.storage_offsets), tuple(item.lengths))))
            for batch in batches(tensors, self._nbytes, _READ_BYTES):
                self._load_tensors(batch, planner)
            if plan.storage_data:
                self._continue_from()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _nbytes(self, wanted: tuple[ReadItem, Box]) -> int:
        item, box = wanted
        return box.numel * self._reader.info(item.storage_index.fqn).dtype.itemsize

    def _continue_from(self) -> None:
        """Make saves continue from the checkpoint, which was loaded whole."""
        self.root.loaded(self._reader)
        if not self._coordinator:  # one listing of the root, and not one a rank
            return
        step, newest = self._reader.commit.name.step, self.root.latest()
        if newest is not None and newest > step:
            _log.warning(
                "step %d is loaded and %d is the newest one in %s: if the first save of this "
                "process comes now, it continues from %d and leaves the later steps behind",
                step,
                newest,
                self._url,
                step,
            )

    def _load_tensors(self, batch: list[tuple[ReadItem, Box]], planner: dcp.LoadPlanner) -> None:
        read = self._reader.read([(item.storage_index.fqn, box) for item, box in batch])
        for (item, box), values in zip(batch, read, strict=True):
            dtype = _dtype(self._reader.info(item.storage_index.fqn))
            raw = torch.from_numpy(values.reshape(-1).view(np.uint8))
            tensor = planner.resolve_tensor(item)
            tensor.detach().copy_(raw.view(dtype).reshape(box.shape))
            planner.commit_tensor(item, tensor)


def _dtype(info: Any) -> torch.dtype:
    dtype = getattr(torch, info.dtype.name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError("this PyTorch lacks a dtype", where=info.name)
    return dtype
