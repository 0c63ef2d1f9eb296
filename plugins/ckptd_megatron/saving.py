"""`save` and `async_save`: boxes of every rank become one checkpoint of ckptd."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing import utils
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

from ckptd.checkpoint.torch import sample_digest
from ckptd.errors import UsageError
from ckptd_dcp import CkptdWriter
from ckptd_megatron.agreed import agreed
from ckptd_megatron.parts import Part, is_shard, objects_of, parts_of, storable

__all__ = ["async_save", "save"]

_log = logging.getLogger(__name__)


def save(
    url: str,
    step: int,
    sharded_state_dict: dict[str, Any],
    *,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
    content_metadata: dict[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    new_run: bool | None = None,
    store_options: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save a sharded state, as ``dist_checkpointing.save`` does; on every rank.

    The checkpoint exists on return, and before that not: a rank that dies meanwhile costs this
    save. Of ranks that hold the same box, the one with least to write writes it, if samples of the
    values are equal; otherwise that is logged, and the main replica's values are saved. An error on
    any rank ends the save on all of them.

    Parameters
    ----------
    url, metadata, new_run, store_options
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
        process_group,
    )
    writer = CkptdWriter(url, step, metadata=metadata, new_run=new_run, store_options=store_options)
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
    new_run: bool | None = None,
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
        process_group,
    )
    with agreed("copy non-tensor values", process_group):
        # DCP copies the tensors; the planner's values are of the training's own memory until here.
        planner.own, planner.common = copy.deepcopy((planner.own, planner.common))
    writer = CkptdWriter(url, step, metadata=metadata, new_run=new_run, store_options=store_options)
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
    group: dist.ProcessGroup | None,
) -> tuple[dict[str, Any], _Planner]:
    """Return what this rank may have to write, by number, and what plans it."""
    with agreed("prepare a save", group):
        if content is not None:
            state["content_metadata"] = content
        if "content_metadata" in state:
            state["content_metadata"] = _cleaned(state["content_metadata"])
        sharded, common = save_preprocess(state, False)
        tensors = (v for v in nested_values(sharded) if isinstance(v, ShardedTensor))
        planner = _Planner({str(i): part for i, part in enumerate(parts_of(tensors))})
        for item in objects_of(sharded):
            if is_main_replica(item.replica_id):
                planner.own[item.unique_key] = storable(item.data, item.unique_key)
        compared = preprocess(common) if preprocess and validate else common
        for name in common:
            if not isinstance(name, str) or is_shard(name):
                raise UsageError(
                    "a non-tensor value has a name that no checkpoint can hold",
                    kind="unsavable",
                    where=repr(name),
                    wanted="a string, not one that ends as those of a ShardedObject's shards",
                    found=type(name).__name__,
                    hint="put it into a dict under another name",
                )
        planner.common = {name: storable(value, name) for name, value in common.items()}
        if validate:
            pickle.dumps(compared)  # the first rank sends it to the others
    if validate:
        with agreed("validate a sharded state", group):
            save_preprocess(state, True, lambda _: compared)
    return {name: part.values.detach() for name, part in planner.parts.items()}, planner


def _cleaned(content: Any) -> Any:
    """Leave out what Megatron does not save of its own metadata: process groups."""
    clean = getattr(utils, "_clean_metadata_for_serialization", None)
    return content if clean is None else clean(content)


class _Planner(dcp.DefaultSavePlanner):
    """Plans the boxes of a rank, and its objects."""

    def __init__(self, parts: dict[str, Part]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.parts = parts
        self.own: dict[str, Any] = {}
        self.common: dict[str, Any] = {}

    def create_local_plan(self) -> dcp.SavePlan:
        """Name every box and object that this rank has; equal ones of others are left out later."""
        items, self._at = dict[MetadataIndex, WriteItem](), dict[MetadataIndex, str]()
        held = dict[MetadataIndex, _Held]()
        for name, part in self.parts.items():
            index = MetadataIndex(part.name, torch.Size(part.box.offset))
            mine = _Held(part.main, sample_digest(self.state_dict[name]), part.box.shape)
            if index in held:
                if mine[1:] != held[index][1:]:
                    _log.warning(
                        "replicas on one rank differ, the main one is saved: %s", index.fqn
                    )
                if held[index].main or not mine.main:
                    continue
            self._at[index], held[index] = name, mine
            chunk = ChunkStorageMetadata(torch.Size(part.box.offset), torch.Size(part.box.shape))
            properties = TensorProperties(dtype=part.values.dtype)
            data = TensorWriteData(chunk, properties, torch.Size(part.shape))
            items[index] = WriteItem(index, WriteItemType.SHARD, tensor_data=data)
        self._objects = self.own | (self.common if self.is_coordinator else {})
        objects = [WriteItem(MetadataIndex(n), WriteItemType.BYTE_IO) for n in self._objects]
        self.plan = dcp.SavePlan([*items.values(), *objects], planner_data=held)
        return self.plan

    def create_global_plan(
        self, all_plans: list[dcp.SavePlan]
    ) -> tuple[list[dcp.SavePlan], dcp.Metadata]:
        """Compare what several ranks hold, and let one of them write it; on the coordinator."""
        holders = dict[MetadataIndex, dict[int, _Held]]()
        tensors, objects = set[str](), set[str]()
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                (tensors if item.tensor_data else objects).add(item.index.fqn)
            for index, mine in plan.planner_data.items():
                holders.setdefault(index, {})[rank] = mine
        if both := sorted(tensors & objects):
            raise UsageError(
                "a tensor and a non-tensor value have the same name",
                kind="structure",
                where=both[0],
                found=f"{len(both)} such names",
                hint="put the value into a dict under another name",
            )
        # Of equal ones, the rank with least to write writes one; of others Megatron's main one.
        writers = dict[MetadataIndex, int]()
        for index, ranks in holders.items():
            if len({each[1:] for each in ranks.values()}) > 1:
                writers[index] = next((r for r, each in ranks.items() if each.main), min(ranks))
        if writers:
            _log.warning(
                "replicas differ between ranks, the main one's values are saved: %s. If it is all"
                " of them: with overlap_param_gather, the save comes after the model's"
                " disable_forward_pre_hook()",
                ", ".join(sorted({index.fqn for index in writers})[:8]),
            )
        plans = []
        for rank, plan in enumerate(all_plans):
            items = [item for item in plan.items if writers.get(item.index, rank) == rank]
            plans.append(replace(plan, items=items, planner_data=None))
        return super().create_global_plan(plans)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return a box's values, or an object."""
        if index.offset is None:
            return self._objects[index.fqn]
        return self.state_dict[self._at[index]]


class _Held(NamedTuple):
    """A rank's copy of a box."""

    main: bool
    digest: str
    shape: tuple[int, ...]
