"""The data file: a safetensors file with a padded header (spec section 4).

``8-byte little-endian length | JSON header padded with spaces | data``. The data section begins
at a multiple of 4096 bytes, so that it can be written and read with direct I/O, and holds the
chunks packed without gaps in canonical order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ckptd.checkpoint.format.strictjson import parse_json
from ckptd.errors import CorruptError, UsageError
from ckptd.types import DTYPES, DType

__all__ = [
    "ALIGNMENT",
    "Chunk",
    "build_header",
    "foreign_start",
    "header_bytes",
    "parse_header",
]

ALIGNMENT = 4096
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library; a larger header would lock strangers out."""

_STORED_ITEMSIZE = {d.stored_code: d.itemsize for d in DTYPES.values() if d.safetensors}


@dataclass(frozen=True, slots=True)
class Chunk:
    """One entry of a data file.

    Attributes
    ----------
    name
        Chunk name, see `ckptd.checkpoint.format.names.chunk_name`.
    code
        Safetensors dtype code, as stored.
    shape
        Shape as stored.
    start, end
        Byte range in the data section.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def build_header(
    chunks: Sequence[tuple[str, DType, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, int]:
    """Return the header (length prefix and padding included) and the size of the data section.

    Parameters
    ----------
    chunks
        ``(name, dtype, logical shape)`` in file order: item size descending.
    metadata
        Strings for safetensors' own ``__metadata__``.

    Raises
    ------
    UsageError
        Two chunks have one name, or the header would exceed safetensors' limit.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape in chunks:
        end = offset + math.prod(shape) * dtype.itemsize
        if name in header:
            raise UsageError("two chunks have one name", kind="duplicate-chunk", where=name)
        header[name] = {
            "dtype": dtype.stored_code,
            "shape": dtype.stored_shape(shape),
            "data_offsets": (offset, end),
        }
        offset = end
    text = msgspec.json.encode(header)
    padded = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8
    if padded > MAX_HEADER_BYTES:
        raise UsageError(
            "too many chunks for one file",
            kind="header-too-large",
            wanted=f"a header of at most {MAX_HEADER_BYTES} bytes",
            found=f"{padded} bytes for {len(header) - 1} chunks",
        )
    return padded.to_bytes(8, "little") + text.ljust(padded, b" "), offset


_STARTS = {
    b"version ": "this looks like a git-lfs pointer: git lfs pull fetches the file",
    b"\x1f\x8b": "this is compressed by gzip: gunzip it",
    b"\x28\xb5\x2f\xfd": "this is compressed by zstd: unzstd it",
    b"PK\x03\x04": "this is a zip, as torch.save writes: name it .pt",
    b"<": "this looks like a web page: was the download an error page?",
}
"""How files begin that often have the name of another format, and what to do."""


def foreign_start(prefix: bytes) -> str | None:
    """Return what a file seems to be that is not of the wanted format; None for anything else."""
    return next((hint for start, hint in _STARTS.items() if prefix.startswith(start)), None)


def header_bytes(prefix: bytes, where: str, file_bytes: int) -> int:
    """Return the full header length (prefix included) from the first 8 bytes of a file.

    Raises
    ------
    CorruptError
        The length is impossible for a file of `file_bytes` bytes.
    """
    length = int.from_bytes(prefix[:8], "little")
    if len(prefix) < 8 or length > MAX_HEADER_BYTES or 8 + length > file_bytes or length < 2:
        raise CorruptError(
            "not a safetensors file: impossible header length",
            kind="bad-header",
            where=where,
            wanted=f"at most {min(MAX_HEADER_BYTES, max(0, file_bytes - 8))}",
            found=str(length) if len(prefix) >= 8 else "a file shorter than 8 bytes",
            hint=foreign_start(prefix),
        )
    return 8 + length


def parse_header(
    raw: bytes, where: str, data_bytes: int
) -> tuple[dict[str, Chunk], dict[str, str]]:
    """Parse a whole header (prefix included) and check it against the data section's length.

    Returns
    -------
    chunks
        By name, in offset order.
    metadata
        The ``__metadata__`` strings.

    Raises
    ------
    CorruptError
        Duplicate names, unknown dtypes, negative sizes, gaps, overlaps, or a wrong total.
    """
    try:
        document = parse_json(raw[8:])
    except (ValueError, RecursionError) as error:
        raise _bad(where, f"header is not JSON: {str(error)[:200]}") from None
    if not isinstance(document, dict) or raw[8:9] != b"{":
        raise _bad(where, "header is not a JSON object")
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _bad(where, "__metadata__ is not a table of strings")
    chunks = sorted(
        (_chunk(name, entry, where) for name, entry in document.items()),
        key=lambda c: (c.start, c.end),
    )
    position = 0
    for chunk in chunks:
        if chunk.start != position:
            raise _bad(where, f"gap or overlap before chunk {chunk.name[:200]!r}")
        position = chunk.end
    if position != data_bytes:
        raise CorruptError(
            "data section has the wrong length",
            kind="truncated" if data_bytes < position else "bad-header",
            where=where,
            wanted=f"{position} bytes",
            found=f"{data_bytes} bytes",
        )
    return {c.name: c for c in chunks}, metadata


def _bad(where: str, what: str) -> CorruptError:
    return CorruptError(what, kind="bad-header", where=where)


def _natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _chunk(name: str, entry: object, where: str) -> Chunk:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _bad(where, f"bad entry for chunk {name[:200]!r}")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if (
        not isinstance(code, str)
        or code not in _STORED_ITEMSIZE
        or not isinstance(shape, list)
        or len(shape) > 64
        or not all(_natural(n) for n in shape)
        or not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(_natural(n) for n in offsets)
    ):
        raise _bad(where, f"bad dtype, shape or offsets of chunk {name[:200]!r}")
    start, end = offsets
    if end - start != math.prod(shape) * _STORED_ITEMSIZE[code]:
        raise _bad(where, f"shape and offsets of chunk {name[:200]!r} disagree")
    return Chunk(name, code, tuple(shape), start, end)
