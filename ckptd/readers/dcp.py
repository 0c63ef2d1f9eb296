"""Reads torch.distributed.checkpoint (DCP): ``.metadata`` and files of items.

In it: largest small value that is kept; types; reformulated shapes of flat tensors.

The metadata says of each part of a tensor its box, its file, and the span of its item there. An
item is a zip of torch.save, whose head is read when the part is, or a safetensors file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptd.checkpoint.format.container import Chunk
from ckptd.errors import CorruptError, MismatchError, RefusedError
from ckptd.readers.base import CODES, Foreign, ForeignPiece, Listing, json_value, step_of
from ckptd.readers.pickles import (
    MAX_PICKLE_BYTES,
    GlobalName,
    PickledObject,
    PickledTensor,
    check_read,
    counts,
    read_pickle,
    short_text,
)
from ckptd.readers.zips import Extent, ReadRange, extent_of, open_zip
from ckptd.types import DTYPES, Box

METADATA = ".metadata"
_ZIP = b"PK\x03\x04"
_SMALL_ITEM = 1 << 16
_END_BYTES = 1536
_ORIGINAL = "nd_reformulated_orig_global_shape"
_MOST_OBJECTS = 4096
_Header = tuple[Mapping[str, Chunk], int]
"""Chunks of a safetensors file, and the length of its header."""


class DcpReader:
    """Reads what ``torch.distributed.checkpoint.save`` wrote."""

    name = "dcp"

    def recognise(self, names: Listing) -> int:
        """Return 100 where the metadata file is."""
        return 100 if METADATA in names.names else 0

    def open(self, names: Listing) -> Foreign:
        """Read the metadata file."""
        return read_items(names)


def read_items(names: Listing, is_object: Callable[[str], bool] = lambda name: True) -> Foreign:
    """Return the table of a folder of DCP.

    Parameters
    ----------
    is_object
        Tells which values that are no tensors are read.

    Raises
    ------
    CorruptError
        kind ``truncated`` among others.
    RefusedError
        kind ``unreadable-format``: items are compressed; kind ``unsafe-pickle``.
    """
    where = names.key(METADATA)
    found = read_pickle(names.read(METADATA, MAX_PICKLE_BYTES), where)
    items = _Items(names, found, where)
    objects: dict[str, Any] = {}
    left_out: list[str] = []
    pieces: list[ForeignPiece] = []
    for name, entry in items.tensors.items():
        if entry.short == "TensorStorageMetadata":
            pieces += items.pieces(name, entry)
        elif entry.short == "BytesStorageMetadata" and is_object(name):
            value = items.value(name, len(objects) + len(left_out))
            if value is None:
                left_out.append(name)
            else:
                objects[name] = value[0]
        else:
            left_out.append(name)
    return Foreign(pieces, objects, left_out, step=step_of(names))


class _Items:
    """Contents of a metadata file."""

    def __init__(self, names: Listing, found: Any, where: str) -> None:
        self._names = names
        self._where = where
        try:
            self.tensors: Mapping[str, Any] = dict(found.fields["state_dict_metadata"])
            stored = found.fields["storage_data"]
            self._infos = {_index(key.fields): info for key, info in stored.items()}
            more = found.fields.get("mcore_data") or {}
            self._originals = {
                name: counts(about[_ORIGINAL]) for name, about in more.items() if _ORIGINAL in about
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._bad(f"{type(error).__name__}: {error}") from None
        if not all(
            type(k) is str and isinstance(v, PickledObject) for k, v in self.tensors.items()
        ):
            raise self._bad("an entry that is not an object, or has no name")
        self._sizes: dict[str, int] = {}
        self._headers: dict[str, _Header] = {}

    def _bad(self, found: str, name: str = "") -> CorruptError:
        return CorruptError(
            "invalid metadata of a distributed checkpoint",
            where=f"{self._where}: {name}" if name else self._where,
            found=found[:200],
        )

    def pieces(self, name: str, entry: PickledObject) -> Iterator[ForeignPiece]:
        """Yield the parts of a tensor."""
        try:
            shape = counts(entry.fields["size"])
            dtype = _dtype_of(entry.fields["properties"])
            chunks = [
                Box(counts(c.fields["offsets"]), counts(c.fields["sizes"]))
                for c in entry.fields["chunks"]
            ]
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise self._bad(f"{type(error).__name__}: {error}", name) from None
        if any(len(box.shape) != len(shape) or len(box.offset) != len(shape) for box in chunks):
            raise self._bad("a part of another number of dimensions", name)
        original = self._originals.get(name)
        for box in chunks:
            if not box.numel and 0 not in shape:
                continue
            file, start, end = self._span(name, box.offset, len(chunks) == 1)
            at = _Item(self._names, file, start, end, name, box.shape, dtype, self._headers)
            key = self._names.key(file)
            if original is None:
                yield ForeignPiece(name, dtype, shape, box, key, at)
            else:
                whole, flat = self._fragment(name, shape, original, box)
                yield ForeignPiece(name, dtype, original, whole, key, at, flat)

    def _fragment(
        self, name: str, shape: tuple[int, ...], original: tuple[int, ...], box: Box
    ) -> tuple[Box, tuple[int, int]]:
        """Return which range of which box a part is that Megatron-core before 0.15 flattened.

        Such a tensor was saved in the shape ``[parts along each dimension, elements of a part]``.
        """
        parts = shape[:-1]
        good = len(parts) == len(original) and all(
            n and o % n == 0 for o, n in zip(original, parts, strict=True)
        )
        sides = tuple(o // n for o, n in zip(original, parts, strict=True)) if good else ()
        if not good or shape[-1:] != (math.prod(sides),) or set(box.shape[:-1]) - {1}:
            raise self._bad(f"parts {box} of {shape}, which were of {original}", name)
        offset = tuple(i * n for i, n in zip(box.offset[:-1], sides, strict=True))
        return Box(offset, sides), (box.offset[-1], box.offset[-1] + box.shape[-1])

    def _span(
        self, name: str, offset: tuple[int, ...] | None, whole: bool = True
    ) -> tuple[str, int, int]:
        """Return ``(file, first byte, end)`` of an item; one without offset is a whole tensor."""
        info = self._infos.get((name, offset))
        if info is None and whole:
            info = self._infos.get((name, None))
        if info is None:
            raise CorruptError(
                "the metadata does not say where a part of a tensor lies",
                where=f"{self._where}: {name}",
                wanted=f"an item at {offset}",
            )
        fields = info.fields if isinstance(info, PickledObject) else {}
        file, start, length = (fields.get(k) for k in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or type(start) is not int or type(length) is not int:
            raise self._bad("an item without file, offset or length", name)
        if fields.get("transform_descriptors"):
            raise RefusedError(
                "compressed or otherwise transformed items are not supported",
                kind="unreadable-format",
                where=f"{file}: {name}",
                found=_transforms(fields["transform_descriptors"]),
                hint="save without extensions of FileSystemWriter",
            )
        if file not in self._sizes:
            self._sizes[file] = self._names.size(file)
        if max(start, length).bit_length() > 62 or min(start, length) < 0:
            raise self._bad("an offset or length that is not a count", name)
        if start + length > self._sizes[file]:
            raise CorruptError(
                "a file is shorter than the metadata says",
                kind="truncated",
                where=f"{file}: {name}",
                wanted=f"{start + length} bytes",
                found=f"{self._sizes[file]} bytes",
            )
        return file, start, start + length

    def value(self, name: str, number: int) -> tuple[Any] | None:
        """Return a small value that is no tensor; None for one that JSON does not have."""
        file, start, end = self._span(name, None)
        if number >= _MOST_OBJECTS or end - start > _SMALL_ITEM:
            return None
        read = self._names.reads(file)
        try:
            if read(start, min(end, start + 4)) == _ZIP:
                return (json_value(open_zip(read, start, end, f"{file}: {name}").value),)
            return (json_value(read_pickle(read(start, end), f"{file}: {name}")),)
        except RefusedError as error:
            if error.kind == "unsafe-pickle":
                raise
            return None
        except MismatchError:
            return None
        except CorruptError as error:
            if error.kind == "bad-zip":  # it begins like torch's files: damage, and no other form
                raise
            return None


@dataclass(frozen=True, slots=True)
class _Item:
    """Finds a part of a tensor in its item, when it is wanted."""

    names: Listing
    file: str
    start: int
    end: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    headers: dict[str, _Header]

    def __call__(self) -> Extent:
        where = f"{self.file}: {self.name}"
        read = _with_ends(self.names.reads(self.file), self.start, self.end)
        head = read(self.start, min(self.end, self.start + 8))
        if head[:4] == _ZIP:
            file = open_zip(read, self.start, self.end, where)
            tensor = file.value
            # Before its length is judged: a subclass may take less room than what it represents.
            check_read(tensor, where)
            if not isinstance(tensor, PickledTensor):
                raise CorruptError("an item is not a tensor", where=where)
            found, extent = (tensor.dtype, tensor.shape), extent_of(file, tensor, where)
        else:
            chunk, start = self._chunk(where)
            found = CODES.get(chunk.code, ""), chunk.shape
            extent = Extent(start + chunk.start)
        size = math.prod(self.shape) * DTYPES[self.dtype].itemsize
        if head[:4] == _ZIP and self.end - self.start < size:
            raise CorruptError(
                "an item is shorter than its part of the tensor",
                kind="truncated",
                where=where,
                wanted=f"{size} bytes",
                found=f"{self.end - self.start} bytes",
            )
        if found != (self.dtype, self.shape):
            raise CorruptError(
                "an item holds another tensor than the metadata says",
                where=where,
                wanted=f"{self.dtype} {self.shape}",
                found=f"{found[0]} {found[1]}",
            )
        return extent

    def _chunk(self, where: str) -> tuple[Chunk, int]:
        """Return the chunk of a safetensors file, all of whose items are one file."""
        header = self.headers.get(self.file)
        if header is None:
            chunks, _, length = self.names.header(self.file)
            header = self.headers[self.file] = chunks, length
        if self.name not in header[0]:
            raise CorruptError("a file lacks a tensor", where=where)
        return header[0][self.name], header[1]


def _with_ends(read: ReadRange, start: int, end: int) -> ReadRange:
    """Return `read` for an item whose ends are read once, and a small one whole.

    All that a zip of one tensor has beside the tensor lies there: two requests instead of eight.
    """
    size = end - start if end - start <= _SMALL_ITEM else _END_BYTES
    known: dict[int, bytes] = {}

    def found(lo: int, hi: int) -> bytes:
        for first in (start, end - size):
            if first <= lo and hi <= first + size:
                if first not in known:
                    known[first] = read(first, first + size)
                return known[first][lo - first : hi - first]
        return read(lo, hi)

    return found


def _index(fields: Mapping[str, Any]) -> tuple[str, tuple[int, ...] | None]:
    name, offset = fields["fqn"], fields.get("offset")
    if type(name) is not str:
        raise TypeError("an item without a name")
    return name, None if offset is None else counts(offset)


def _transforms(found: Any) -> str:
    each = found[:4] if isinstance(found, list | tuple) else (found,)
    return ", ".join(map(short_text, each))


def _dtype_of(properties: Any) -> str:
    """Return the type of a tensor: the first value of what `TensorProperties` pickles."""
    state = properties.fields.get("state")
    found = state[0] if isinstance(state, tuple) else properties.fields["dtype"]
    name = found.removeprefix("torch.") if isinstance(found, GlobalName) else ""
    if name not in DTYPES:
        raise ValueError(f"unknown type {name[:80]}")
    return name
