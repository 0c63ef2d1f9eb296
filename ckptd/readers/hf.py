"""Reads safetensors of Hugging Face: index, whole tensors, DCP's shards, files of ranks.

Shards that DCP wrote for Hugging Face say in their header where in the whole each tensor lies, and
not how large the whole is: shapes follow from the files that are there. A file that is missing
between others is noticed, the last one is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptd.checkpoint.format.codec import parse_json
from ckptd.checkpoint.format.container import Chunk
from ckptd.errors import CorruptError, RefusedError
from ckptd.readers.base import CODES, Foreign, ForeignPiece, Listing, damaged, missing, step_of
from ckptd.readers.hints import config_hints
from ckptd.readers.pickles import MAX_PICKLE_BYTES, read_pickle
from ckptd.readers.torchfiles import METADATA, PART, candidates, check_shards, file_index
from ckptd.readers.zips import Extent
from ckptd.types import Box

END = ".safetensors"
_ITEM = re.compile(r".+_(0|[1-9][0-9]{0,5})\.safetensors")
_SHARDING = "DCP_SHARDING_INFO"
_SHAPES = "shapes are computed from all files: copy those of all ranks"


class HfReader:
    """Reads safetensors: one file, or those of an index, or all of a folder."""

    name = "hf"

    def recognise(self, names: Listing) -> int:
        """Return 100 for a model or an adapter, 60 for other files of safetensors."""
        files = names.ending(END)
        if not files:
            return 0
        model = any(f.startswith(("model", "adapter_model")) for f in files)
        return 100 if model or names.ending(f"{END}.index.json") else 60

    def open(self, names: Listing) -> Foreign:
        """Read the headers of all files, and ``config.json``."""
        where, weights = file_index(names, END)
        files = sorted(set(weights.values())) or sorted(names.ending(END))
        if not weights:
            check_shards(names, files)
            _check_items(names, files)
            _check_parts(names, files)
        headers = {file: read_header_of(names, file) for file in files}
        _check_index(names, where, weights, headers)
        unread = [f for f in names.ending(END) if f not in headers] if weights else []
        lay, sizes = config_hints(names)
        return Foreign(
            list(_pieces(names, headers)),
            unread=[*unread, *candidates(names)],
            step=step_of(names),
            lay=lay,
            sizes=sizes,
            has_sections=False,
        )


_Header = tuple[Mapping[str, Chunk], int, Mapping[str, Any]]
"""Chunks by name, the length of the header, and where they lie in the whole."""


def read_header_of(names: Listing, file: str) -> _Header:
    """Return the chunks of a file; a name that is tied to another's is a chunk with its bytes.

    Raises
    ------
    CorruptError
        kind ``truncated`` among others.
    """
    chunks, metadata, length = names.header(file)
    for name, tied in metadata.items():
        # As safetensors.torch.save_model notes the names of tied tensors that it does not write.
        # Any other note may happen to be the name of a tensor: theirs are of modules.
        if tied in chunks and name not in chunks and "." in name:
            chunks[name] = chunks[tied]
    try:
        info = parse_json(metadata[_SHARDING].encode()) if _SHARDING in metadata else {}
        offsets = {str(k): tuple(v["saved_offsets"]) for k, v in info.items()}
        if not all(type(n) is int and 0 <= n < 1 << 62 for v in offsets.values() for n in v):
            raise ValueError("an offset that is not a count")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"{_SHARDING} of a header is damaged"
        raise damaged(what, names.key(file), error) from None
    return chunks, length, offsets


def local_pieces(names: Listing, file: str) -> Iterator[ForeignPiece]:
    """Yield the tensors of one file of a rank, as they are there."""
    chunks, length, _ = read_header_of(names, file)
    for name, chunk in chunks.items():
        at, box = Extent(length + chunk.start), Box.whole(chunk.shape)
        yield ForeignPiece(name, CODES[chunk.code], chunk.shape, box, names.key(file), at)


def _check_items(names: Listing, files: Sequence[str]) -> None:
    """Refuse parts of ranks as torch_checkpointing writes them: their headers do not say which."""
    parts = [f for f in files if _ITEM.fullmatch(f)]
    if not parts or METADATA not in names.names:
        return
    where = names.key(METADATA)
    found = read_pickle(names.read(METADATA, MAX_PICKLE_BYTES), where)
    if not isinstance(found, dict) or found.get("world_size") != 1:
        raise RefusedError(
            "safetensors files of ranks whose headers do not say which parts they hold",
            kind="unreadable-format",
            where=names.key(parts[0]),
            hint="join them with torch_checkpointing.hf; files that it writes with torch.save are "
            "supported",
        )


def _check_parts(names: Listing, files: Sequence[str]) -> None:
    """Check that no rank's file is missing between others; after the last one nothing tells."""
    found = {int(match[1]) for file in files if (match := PART.match(file))}
    gone = set(range(min(1, *found), max(found))) - found if found else found
    if gone:
        raise missing(names.key(f"shard-{min(gone):05d}-*"), _SHAPES)


def _check_index(
    names: Listing, where: str, weights: Mapping[str, str], headers: Mapping[str, _Header]
) -> None:
    for name, file in weights.items():
        if name not in headers[file][0]:
            elsewhere = next((f for f, (chunks, _, _) in headers.items() if name in chunks), None)
            raise CorruptError(
                "an index names a tensor that its file lacks",
                where=f"{names.key(where)}: {name}",
                wanted=f"in {file}",
                found=f"in {elsewhere}" if elsewhere else "in no file",
            )


def _pieces(names: Listing, headers: Mapping[str, _Header]) -> Iterator[ForeignPiece]:
    shapes: dict[str, tuple[int, ...]] = {}
    seen: dict[str, dict[tuple[int, ...] | None, str]] = {}
    for file, (chunks, _, offsets) in headers.items():
        for name, chunk in chunks.items():
            offset = offsets.get(name)
            boxes = seen.setdefault(name, {})
            if boxes and (offset is None or None in boxes or offset in boxes) and chunk.numel:
                raise CorruptError(
                    "two files have one tensor, or the same part of one",
                    where=f"{names.key(file)}: {name}",
                    found=next(iter(boxes.values())),
                )
            if chunk.numel or not boxes:
                boxes[offset] = file
            offset = offset or (0,) * len(chunk.shape)
            if len(offset) != len(chunk.shape) or len(shapes.get(name, offset)) != len(offset):
                raise CorruptError(
                    f"{_SHARDING} and shapes disagree",
                    where=f"{names.key(file)}: {name}",
                    found=offset,
                )
            ends = tuple(o + n for o, n in zip(offset, chunk.shape, strict=True))
            shapes[name] = tuple(map(max, ends, shapes.get(name, ends)))
    for file, (chunks, length, offsets) in headers.items():
        key = names.key(file)
        for name, chunk in chunks.items():
            box = Box(offsets.get(name) or (0,) * len(chunk.shape), chunk.shape)
            at = Extent(length + chunk.start)
            yield ForeignPiece(name, CODES[chunk.code], shapes[name], box, key, at)
