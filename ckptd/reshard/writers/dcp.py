"""Writes folders of torch.distributed.checkpoint (DCP): a ``.distcp`` a rank, and ``.metadata``.

In it: steps of optimizers; notes on what torch's load asks for and does not find.

Each part of a tensor is an item of its own, a file of torch.save in the file of its rank. A tied
tensor has an entry under each of its names, which share the items.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ckptd.base.grids.block import piece_regions
from ckptd.base.grids.grid import whole
from ckptd.base.grids.owners import Owners, single_owner
from ckptd.checkpoint.format.container import FileMap
from ckptd.reshard.compose import TensorLink
from ckptd.reshard.execute import FileDraft
from ckptd.reshard.groups import are_torchs, groups_name, settings_above
from ckptd.reshard.plan import ChunkFeed, Feed
from ckptd.reshard.reports import FolderNote
from ckptd.reshard.target import Assembled
from ckptd.reshard.verify import Expected, ExpectedValues
from ckptd.reshard.writers.folder import ChosenTensors
from ckptd.reshard.writers.pickling import Global, Made, dump
from ckptd.reshard.writers.states import KeyPath, StateKeys, StateObjects, objects_of, plain_names
from ckptd.reshard.writers.torchzip import ALIGN, TorchFrame, TorchJoints, tensor_frame, torch_file
from ckptd.types import Box

_METADATA = ".metadata"
_END = ".distcp"
_OBJECTS = f"__0_1{_END}"
MARK, COMMON = "metadata.json", "common.pt"
"""Further files of Megatron-core's checkpoints."""
_VERSION = "1.0.0"
_STEP, _MOMENT = "step", "exp_avg"
_GROUP_STEP = re.compile(r"(?:.+\.)?param_groups\.[0-9]+\.step", re.ASCII)
_CLASSES, _FILES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
)
_SIZE = Global("torch", "Size")


@dataclass(frozen=True, slots=True)
class _Item:
    """A part of a tensor, and where its file of torch.save begins in the file of its rank."""

    tensor: int
    box: Box
    frame: TorchFrame
    start: int

    @property
    def end(self) -> int:
        """One past its last byte."""
        return self.start + self.frame.nbytes


def _aligned(position: int) -> int:
    return -(-position // ALIGN) * ALIGN


class _Items:
    """Bytes between and after the items of a file; satisfies `Joints`."""

    def __init__(self, items: Sequence[_Item]) -> None:
        self._items = items
        self._after = list(pairwise([*items, None]))
        self.ends: Sequence[int] = list(accumulate(i.frame.ends[0] for i in items))
        self.nbytes = items[-1].end - len(items[0].frame.head) - self.ends[-1]

    def after(self, number: int, crc: int) -> bytes:
        """Return the end of an item, and the head of the next one."""
        item, following = self._after[number]
        if item is None:
            return b""
        end = TorchJoints(item.frame).after(0, crc)
        if following is None:
            return end
        return end + bytes(following.start - item.end) + following.frame.head


class DcpPlace:
    """All of a target, as its layout cuts and names it.

    Parameters
    ----------
    assembled, expected
        What is written, and what the source's witness wants to see.
    objects
        Values beside the tensors; those of the target if left out.
    keys
        Say in the metadata where each name is in the nested state dict.

    Raises
    ------
    UsageError
        Two tensors, or further names of them, are called alike.
    """

    def __init__(
        self,
        assembled: Assembled,
        expected: Mapping[int, Expected],
        objects: StateObjects | None = None,
        *,
        keys: bool = True,
    ) -> None:
        made = assembled.target
        layout = assembled.composed.composition.target.bound.layout
        encoded = {o.tensor for o in made.objects}
        chosen, plain = ChosenTensors(assembled, expected), plain_names(assembled)
        for number, t in enumerate(made.tensors):
            if t.name not in encoded:
                grid, owners = made.grids[t.grid].grid, Owners(made.owners[t.owners])
                aliases = tuple(map(plain, t.aliases))
                chosen.add(plain(t.name), number, grid, owners, t.base, aliases)
        stepless = list(_without_steps(assembled)) if keys else []
        steps = _steps_of_groups(assembled) if stepless else []
        if len(steps) == 1:
            raw = np.float32(steps[0]).tobytes()
            for name, link in stepless:
                owners = single_owner(max(0, link.tensor.owners.owner(0)))
                base = link.tensor.base
                chosen.add(plain(name), -1, whole(()), owners, base, (), _literal(raw), "float32")
        objects = objects or objects_of(assembled, layout.state_names)
        for path in objects.values:
            chosen.reserve(".".join(map(str, path)))
        self.target = chosen.target(made.world)
        self.expected: ExpectedValues = chosen.expected
        self.left_out, self.simplified = objects.left_out, objects.simplified
        self.notes: Sequence[FolderNote] = (
            list(_gaps(assembled, objects, stepless, steps)) if keys else ()
        )
        self.options = ""
        self._spans, self._objects = _objects_file(objects.values)
        self._keys = StateKeys(layout) if keys else None

    def name(self, number: int) -> str:
        """Return the name of a rank's file."""
        return f"__{number}_0{_END}"

    def draft(self, filemap: FileMap, number: int, key: str) -> FileDraft:
        """Return the file of a rank."""
        items = list(self._items(number))
        if not items:
            return FileDraft(number, key, bytes(ALIGN), 0)
        data_bytes = sum(i.frame.ends[0] for i in items)
        return FileDraft(number, key, items[0].frame.head, data_bytes, joints=_Items(items))

    def _items(self, number: int) -> Iterator[_Item]:
        """Yield the items of a rank's file, in order."""
        filemap, at = self.target.filemap, 0
        for chunk in filemap.chunks(number):
            tensor = self.target.tensors[chunk.tensor]
            boxes = [r.box for r in piece_regions(chunk.piece)]
            if 0 in tensor.shape and not chunk.piece.index:
                boxes = [Box.whole(tensor.shape)]  # it has no elements, and must not get lost
            for box in boxes:
                frame = tensor_frame(tensor.dtype, box.shape)
                yield _Item(chunk.tensor, box, frame, at)
                at = _aligned(at + frame.nbytes)

    def is_mine(self, name: str, beside: Collection[str]) -> bool:
        """Tell whether a file is of such a folder, or what Megatron puts beside.

        Other programs give their files such names as well: Megatron's do not stand alone.
        """
        if name in (MARK, COMMON):
            return COMMON in beside and any(map(_is_dcp, beside))
        return _is_dcp(name)

    def last(self) -> Sequence[tuple[str, bytes]]:
        """Return the objects, and the metadata."""
        last = [(_OBJECTS, self._objects)] if self._objects else []
        return [*last, (_METADATA, self._metadata())]

    def _metadata(self) -> bytes:
        entries: dict[str, Any] = {}
        stored: dict[Made, Made] = {}
        paths: dict[str, KeyPath] = {}
        chunks: dict[int, list[Made]] = {}
        for number in range(self.target.world):
            for item in self._items(number):
                tensor = self.target.tensors[item.tensor]
                offset, shape = _size(item.box.offset), _size(item.box.shape)
                parts = chunks.setdefault(item.tensor, [])
                info = _stored(self.name(number), item.start, item.frame.nbytes)
                for name in (tensor.name, *tensor.aliases):
                    stored[_index(name, offset, len(parts))] = info
                parts.append(_record("ChunkStorageMetadata", offsets=offset, sizes=shape))
        for here, tensor in enumerate(self.target.tensors):
            entry = _record(
                "TensorStorageMetadata",
                properties=_properties(tensor.dtype),
                size=_size(tensor.shape),
                chunks=chunks.get(here, []),
            )
            for name in (tensor.name, *tensor.aliases):
                entries[name] = entry
                if self._keys is not None:
                    paths[name] = self._keys.path(name)
        for path, (start, length) in self._spans.items():
            name = ".".join(map(str, path))
            entries[name] = Made(Global(_CLASSES, "BytesStorageMetadata"))
            stored[_index(name, None, None)] = _stored(_OBJECTS, start, length)
            if self._keys is not None:
                paths[name] = path
        about = _record("StorageMeta", checkpoint_id=None, save_id=None, load_id=None, modules=[])
        found = _record(
            "Metadata",
            state_dict_metadata=entries,
            planner_data=paths or None,
            storage_data=stored,
            storage_meta=about,
            version=_VERSION,
        )
        return dump(found)


def _is_dcp(name: str) -> bool:
    return name == _METADATA or name.endswith(_END)


def _literal(raw: bytes) -> Feed:
    """Return what fills a tensor of one piece with some bytes."""
    feed = ChunkFeed(literal=lambda: raw)
    return lambda piece: feed


def _without_steps(assembled: Assembled) -> Iterator[tuple[str, TensorLink]]:
    """Yield the names that counters of steps would have, for parameters of torch's Adam without.

    Megatron and Apex count the steps of a group, torch's own optimizers those of a parameter.
    """
    layout = assembled.composed.composition.target.bound.layout
    if not are_torchs(groups_name(layout.state_names)):
        return
    rules = assembled.composed.composition.target.rules
    names = {t.name for t in assembled.target.tensors}
    for link in assembled.composed.links:
        if link.key[2]:
            continue
        param = rules[link.key[0]].global_name(link.key[1])
        step = layout.state_name(param, _STEP)
        if step not in names and layout.state_name(param, _MOMENT) in names:
            yield step, link


def _steps_of_groups(assembled: Assembled) -> Sequence[float]:
    """Return the different counts of steps that groups of the source's optimizer have."""
    found = {
        o.value
        for o in assembled.composed.stock.objects
        if _GROUP_STEP.fullmatch(o.name)
        and type(o.value) in (int, float)
        and 0 <= o.value < 1 << 53
    }
    return sorted(found)


def _gaps(
    assembled: Assembled,
    objects: StateObjects,
    stepless: Sequence[tuple[str, TensorLink]],
    steps: Sequence[float],
) -> Iterator[FolderNote]:
    """Yield notes on what torch's load may ask for and does not find."""
    if stepless and len(steps) != 1:
        found = f"groups of the source count {', '.join(map(str, steps))}, and do not say whose"
        text = found if steps else "the source does not record its optimizer's step count"
        names = tuple(n for n, _ in stepless)
        yield FolderNote(f"{text}: set them in the new job; counters that are missing", names)
    composed = assembled.composed
    if composed.left_out:
        yield FolderNote(
            "the layout has rules that the source has no tensors for: dcp.load does not find what"
            " the model has of them; a tied weight gets its other name from a rule of --to, beside"
            " 'use names.dcp', such as -e 'lm_head.weight = alias E'",
            tuple(composed.left_out),
        )
    states = composed.composition.target.bound.layout.state_names
    groups = groups_name(states)
    above = settings_above(groups)
    has_groups = any(".".join(map(str, p)).startswith(above) for p in objects.values)
    if are_torchs(groups) and not has_groups and any(link.key[2] for link in composed.links):
        name = above.rstrip(".")
        yield FolderNote(
            f"{name} is not there, as the source has no settings of groups that name their"
            " parameters: dcp.load(..., planner=DefaultLoadPlanner(allow_partial_load=True)) keeps"
            " those of the job"
        )


def _objects_file(objects: Mapping[KeyPath, Any]) -> tuple[dict[KeyPath, tuple[int, int]], bytes]:
    """Return where each object lies in the file of the objects, and the file."""
    spans: dict[KeyPath, tuple[int, int]] = {}
    known: dict[bytes, tuple[int, int]] = {}
    file = bytearray()
    for path, value in objects.items():
        raw = torch_file(value)
        if raw not in known:  # settings of a group are often the same for all parameters
            known[raw] = len(file), len(raw)
            file += raw.ljust(_aligned(len(raw)), b"\0")
        spans[path] = known[raw]
    return spans, bytes(file)


def _record(name: str, **state: Any) -> Made:
    return Made(Global(_CLASSES, name), (), state)


@lru_cache(1 << 16)
def _size(shape: tuple[int, ...]) -> Made:
    return Made(_SIZE, (shape,))


def _index(name: str, offset: Made | None, index: int | None) -> Made:
    return _record("MetadataIndex", fqn=name, index=index, offset=offset)


def _stored(file: str, start: int, length: int) -> Made:
    state = {"relative_path": file, "offset": start, "length": length}
    return Made(Global(_FILES, "_StorageInfo"), (), state)


@lru_cache
def _properties(dtype: str) -> Made:
    strided = Made(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = Made(Global(_CLASSES, "_MEM_FORMAT_ENCODING"), (0,))
    state = (Global("torch", dtype), strided, False, contiguous, False)
    return Made(Global(_CLASSES, "TensorProperties"), (), state)
