"""`save` and `async_save`: boxes of every rank become one checkpoint of ckptd."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ckptd_dcp import CkptdWriter
from ckptd_megatron.parts import Part, objects_of, parts_of, storable

__all__ = ["async_save", "save"]


def save(
    url: str,
    step: int,
    sharded_state_dict: dict[str, Any],
    *,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
    content_metadata: dict[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    fresh_line: bool | None = None,
    store_options: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save a sharded state, as ``dist_checkpointing.save`` does; on every rank.

    The checkpoint exists on return, and before that not: a rank that dies meanwhile costs this
    save. Of ranks that hold the same box, the one with least to write writes it.

    Parameters
    ----------
    url, metadata, fresh_line, store_options
        As of `ckptd_dcp.CkptdWriter`.
    step
        Completed steps; later than the last one saved.
    sharded_state_dict
        What ``sharded_state_dict()`` of model and optimizer return, and values that are the same on
        all ranks, of which the first rank's are saved. Factories are resolved in place.
    validate_access_integrity, preprocess_common_before_consistancy_check, content_metadata
        As of ``dist_checkpointing.save``.
    process_group
        Whose ranks save.

    Raises
    ------
    torch.distributed.checkpoint.CheckpointException
        A rank could not save; it names the ranks and their errors (`ckptd.errors`).
    """
    local, planner = _prepared(
        sharded_state_dict,
        validate_access_integrity,
        preprocess_common_before_consistancy_check,
        content_metadata,
    )
    writer = CkptdWriter(
        url, step, metadata=metadata, fresh_line=fresh_line, store_options=store_options
    )
    dcp.save(local, storage_writer=writer, planner=planner, process_group=process_group)


def async_save(
    url: str,
    step: int,
    sharded_state_dict: dict[str, Any],
    *,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
    content_metadata: dict[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    fresh_line: bool | None = None,
    store_options: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Future[Any]:
    """Copy a sharded state to host memory and save it in the background; see `save`.

    Wait for the future, on which the checkpoint exists, before the next save, since two at a time
    mix up their collectives. The process group has a backend for the CPU:
    ``new_group(backend="gloo")``.
    """
    local, planner = _prepared(
        sharded_state_dict,
        validate_access_integrity,
        preprocess_common_before_consistancy_check,
        content_metadata,
    )
    writer = CkptdWriter(
        url, step, metadata=metadata, fresh_line=fresh_line, store_options=store_options
    )
    found: Any = dcp.async_save(
        local, storage_writer=writer, planner=planner, process_group=process_group
    )
    future: Future[Any] = found
    return future


def _prepared(
    state: dict[str, Any],
    validate: bool,
    preprocess: Callable[[Any], Any] | None,
    content: dict[str, Any] | None,
) -> tuple[dict[str, Any], _Planner]:
    """Return what this rank may have to write, by number, and what plans it."""
    if content is not None:
        state["content_metadata"] = content
    sharded, common = save_preprocess(state, validate, preprocess)
    tensors = (v for v in nested_values(sharded) if isinstance(v, ShardedTensor))
    planner = _Planner({str(i): part for i, part in enumerate(parts_of(tensors))})
    for item in objects_of(sharded):
        if is_main_replica(item.replica_id):
            planner.own[item.unique_key] = storable(item.data, item.unique_key)
    planner.common = {name: storable(value, name) for name, value in common.items()}
    return {name: part.values.detach() for name, part in planner.parts.items()}, planner


class _Planner(dcp.DefaultSavePlanner):
    """Plans the boxes of a rank, and its objects."""

    def __init__(self, parts: dict[str, Part]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.parts = parts
        self.own: dict[str, Any] = {}
        self.common: dict[str, Any] = {}

    def create_local_plan(self) -> dcp.SavePlan:
        """Name every box and object that this rank has; equal ones of others are left out later."""
        items, self._at = [], dict[MetadataIndex, str]()
        for name, part in self.parts.items():
            index = MetadataIndex(part.name, torch.Size(part.box.offset))
            self._at[index] = name
            chunk = ChunkStorageMetadata(torch.Size(part.box.offset), torch.Size(part.box.shape))
            properties = TensorProperties(dtype=part.values.dtype)
            data = TensorWriteData(chunk, properties, torch.Size(part.shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self._objects = self.own | (self.common if self.is_coordinator else {})
        items += [WriteItem(MetadataIndex(n), WriteItemType.BYTE_IO) for n in self._objects]
        self.plan = dcp.SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return a box's values, or an object."""
        if index.offset is None:
            return self._objects[index.fqn]
        return self.state_dict[self._at[index]]
