"""`load`: boxes of a checkpoint into the tensors of a sharded state, however both are cut."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing import utils
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    extract_matching_values,
    merge,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from ckptd.checkpoint.save import BoxRoot
from ckptd.errors import MismatchError, NotFoundError
from ckptd_dcp import CkptdReader
from ckptd_megatron.agreed import agreed
from ckptd_megatron.parts import Part, is_shard, objects_of, parts_of

__all__ = ["latest", "load", "load_common_state_dict"]

_log = logging.getLogger(__name__)


def latest(url: str, *, store_options: Mapping[str, Any] | None = None) -> int | None:
    """Return the step of the newest checkpoint of a root, or None."""
    with BoxRoot(url, dict(store_options or {})) as root:
        return root.latest()


def load_common_state_dict(
    url: str, step: int | None = None, *, store_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return what a checkpoint has that is the same on all ranks, as Megatron's function does.

    It is on this rank alone, and changes nothing: from what a rank then makes its model of,
    `load` goes on.
    """
    with BoxRoot(url, dict(store_options or {})) as root, root.open(step) as reader:
        found = [o for o in reader.entries if not o.per_rank and not is_shard(o.name)]
        return {o.name: reader.object(o) for o in found}


def load(
    url: str,
    sharded_state_dict: dict[str, Any],
    step: int | None = None,
    *,
    strict: bool = True,
    continues: bool = True,
    store_options: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load a sharded state, as ``dist_checkpointing.load`` does; on every rank.

    Tensors are filled in place, in any cut that the parallel sizes of this job give; blocks are
    compared with their digests before.

    Parameters
    ----------
    url, store_options
        As of `ckptd_dcp.CkptdReader`.
    sharded_state_dict
        What ``sharded_state_dict()`` of model and optimizer return (``is_loading=True``). It is not
        changed, its tensors are.
    step
        Which checkpoint, the newest one by default.
    strict
        Whether it is an error if the checkpoint lacks something. If not, that is left out of the
        result and logged, and so is all that a factory makes of several tensors if one is lacking.
    continues
        Whether the first save of this process continues the line from this checkpoint, as a run
        that is resumed does. False is for a part of another run's.
    process_group
        Whose ranks load.

    Returns
    -------
    dict
        The state with its values, and what is common to all ranks, for ``load_state_dict``.

    Raises
    ------
    torch.distributed.checkpoint.CheckpointException
        A rank could not load; it names the ranks and their errors (`ckptd.errors`).
    """
    with agreed("prepare a load", process_group):
        # As Megatron's own load does, where it has that: tensors of Transformer Engine in fp8.
        getattr(utils, "force_all_tensors_to_non_fp8", _leave)(sharded_state_dict)
        built, result, factories = load_preprocess(sharded_state_dict)
        sharded, _ = utils.extract_sharded_base(built)
        for tensor in nested_values(sharded):
            if isinstance(tensor, ShardedTensor):
                tensor.init_data("cpu")
        planner = _Planner(sharded, strict)
        reader = _Reader(url, step, store_options=store_options)
    reader.continues = continues
    dcp.load({}, storage_reader=reader, planner=planner, process_group=process_group)
    if planner.narrowed:
        _log.warning(
            "values are rounded to the types of the state, and become inf past their range: %s",
            ", ".join(sorted(planner.narrowed)[:16]),
        )
    if planner.missing:
        _log.warning("the checkpoint lacks %s", ", ".join(sorted(planner.missing)[:16]))
        left = set(_without(planner.missing, factories, built))
        _, sharded = extract_matching_values(
            sharded, lambda v: id(v) in left or _name(v) in planner.missing
        )

    def loaded(value: ShardedTensor | ShardedObject) -> Any:
        return value.data if isinstance(value, ShardedTensor) else planner.objects[_name(value)]

    dict_list_map_inplace(loaded, sharded)
    common = {name: value for name, value in planner.objects.items() if not is_shard(name)}
    found: dict[str, Any] = merge(merge(common, result), sharded)
    apply_factory_merges(found, factories)
    return found


def _without(missing: set[str], factories: dict[Any, Any], built: Any) -> Iterator[int]:
    """Take out the factories that lack a part; yield the ids of what they have built.

    Parameters
    ----------
    factories
        Nested, lists as dicts: what is left without a factory is taken out as well.
    built
        The state with what the factories built in their places.
    """
    for key, factory in list(factories.items()):
        parts = built[key]
        if isinstance(factory, dict):
            yield from _without(missing, factory, parts)
            if not factory:
                del factories[key]
            continue
        values = list(nested_values(parts)) if isinstance(parts, dict | list) else [parts]
        if any(_name(v) in missing for v in values):
            del factories[key]
            yield from map(id, values)


def _leave(state: Any) -> None:
    """Leave a state as it is."""


def _name(value: ShardedTensor | ShardedObject) -> str:
    found: str = value.unique_key if isinstance(value, ShardedObject) else value.key
    return found


class _Reader(CkptdReader):
    """Lets saves continue from a checkpoint of which only a part is loaded.

    A job of other parallel sizes leaves the random streams of the ranks that saved behind.
    """

    continues = True

    def prepare_global_plan(self, plans: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        plans = super().prepare_global_plan(plans)
        return [replace(plan, storage_data=self.continues) for plan in plans]


class _Planner(dcp.DefaultLoadPlanner):
    """Plans which boxes and objects a rank reads."""

    def __init__(self, sharded: Any, strict: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        tensors = (v for v in nested_values(sharded) if isinstance(v, ShardedTensor))
        self._parts = list(parts_of(tensors))
        self._own = {item.unique_key for item in objects_of(sharded)}
        self._strict = strict
        self.objects: dict[str, Any] = {}
        self.missing: set[str] = set()
        self.narrowed: set[str] = set()

    def create_local_plan(self) -> dcp.LoadPlan:
        """Look for every box of this rank, its objects and the common ones."""
        stored = self.metadata.state_dict_metadata if self.metadata else {}
        items, self._into = list[ReadItem](), list[torch.Tensor]()
        for part in self._parts:
            entry = stored.get(part.name)
            if isinstance(entry, TensorStorageMetadata):
                self._check_type(part, entry.properties.dtype)
                items += self._items(part, tuple(entry.size))
            else:
                self.missing.add(part.name)
        values = {n for n, e in stored.items() if isinstance(e, BytesStorageMetadata)}
        self.missing |= self._own - values
        if self.missing and self._strict:
            raise NotFoundError(
                "the checkpoint lacks a part of the state",
                found=f"no {', '.join(sorted(self.missing)[:4])} ({len(self.missing)} in all)",
                hint="load with strict=False, or a state of what is there: ckptd inspect",
            )
        for name in sorted(n for n in values if n in self._own or not is_shard(n)):
            none = torch.Size([0])
            index = MetadataIndex(name)
            items.append(ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none))
        return dcp.LoadPlan(items)

    def _check_type(self, part: Part, stored: torch.dtype) -> None:
        """Refuse a type that gives other numbers; note one that rounds."""
        mine = part.values.dtype
        if mine is stored:
            return
        if mine.is_floating_point and stored.is_floating_point:
            here, there = torch.finfo(mine), torch.finfo(stored)
            if here.max < there.max or here.eps > there.eps:
                self.narrowed.add(f"{part.name} ({stored} to {mine})")
        elif not torch.can_cast(stored, mine) or (
            not mine.is_floating_point and mine.itemsize < stored.itemsize
        ):
            raise MismatchError(
                "a tensor has another type in the checkpoint",
                where=part.name,
                wanted=str(mine),
                found=str(stored),
                hint="create the state's tensor with the checkpoint's dtype, and convert it "
                "afterwards",
            )

    def _items(self, part: Part, shape: tuple[int, ...]) -> list[ReadItem]:
        if len(shape) != len(part.shape) or (shape != part.shape and not part.padded):
            raise MismatchError(
                "a tensor has another shape in the checkpoint",
                where=part.name,
                wanted=list(part.shape),
                found=list(shape),
            )
        found = part.within(shape)
        if found is None or not found.box.numel:
            return []
        self._into.append(found.values)
        offset, size = torch.Size(found.box.offset), torch.Size(found.box.shape)
        here = MetadataIndex(str(len(self._into) - 1))
        there = MetadataIndex(part.name)
        begin = torch.Size([0] * len(size))
        return [ReadItem(LoadItemType.TENSOR, here, begin, there, offset, size)]

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the tensor that a box fills."""
        return self._into[int(read_item.dest_index.fqn)]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take an object, which the reader has decoded from data in this process."""
        self.objects[read_item.dest_index.fqn] = torch.load(value, weights_only=False)
