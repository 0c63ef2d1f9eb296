"""Folders that ``torch.distributed.checkpoint.load`` reads: a file a rank, and ``.metadata``.

Each part of a tensor is an item of its own, a file of torch.save in the file of its rank. A tied
tensor has an entry under each of its names, which share the items.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

from ckptd.format.filemap import FileMap
from ckptd.layout.block import piece_regions
from ckptd.layout.owners import Owners
from ckptd.reshard.execute import FileDraft
from ckptd.reshard.reports import FolderNote
from ckptd.reshard.target import Assembled
from ckptd.reshard.verify import Expected
from ckptd.reshard.writers.folder import ChosenTensors
from ckptd.reshard.writers.pickling import Global, Made, dump
from ckptd.reshard.writers.states import KeyPath, StateKeys, StateObjects, objects_of, plain_names
from ckptd.reshard.writers.torchzip import (
    ALIGN,
    TorchFrame,
    TorchJoints,
    tensor_frame,
    torch_file,
)
from ckptd.types import Box

__all__ = ["COMMON", "MARK", "DcpPlace"]

_METADATA = ".metadata"
_END = ".distcp"
_OBJECTS = f"__0_1{_END}"
MARK, COMMON = "metadata.json", "common.pt"
"""What Megatron-core puts beside."""
_VERSION = "1.0.0"
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
    """What stands between and behind the items of a file; satisfies `Joints`."""

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
        kind ``duplicate-name``: two tensors, or further names of them, are called alike.
    """

    def __init__(
        self,
        assembled: Assembled,
        expected: Mapping[int, Expected],
        objects: StateObjects | None = None,
        *,
        keys: bool = True,
    ) -> None:
        whole = assembled.target
        layout = assembled.composed.composition.target.bound.layout
        encoded = {o.tensor for o in whole.objects}
        chosen, plain = ChosenTensors(assembled, expected), plain_names(assembled)
        for number, t in enumerate(whole.tensors):
            if t.name not in encoded:
                grid, owners = whole.grids[t.grid].grid(), Owners(whole.owners[t.owners])
                aliases = tuple(map(plain, t.aliases))
                chosen.add(plain(t.name), number, grid, owners, t.base, aliases)
        objects = objects or objects_of(assembled, layout.state_names)
        for path in objects.values:
            chosen.reserve(".".join(map(str, path)))
        self.target = chosen.target(whole.world)
        self.expected: Mapping[int, Expected] = chosen.expected
        self.left_out, self.simplified = objects.left_out, objects.simplified
        self.notes: Sequence[FolderNote] = ()
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

    def is_mine(self, name: str) -> bool:
        """Tell whether a file is of such a folder, or what Megatron puts beside."""
        return name == _METADATA or name.endswith(_END) or name in (MARK, COMMON)

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
