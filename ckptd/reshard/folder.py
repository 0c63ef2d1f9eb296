"""A folder of safetensors files as the source of a reshard: whole tensors under global names."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptd.errors import CorruptError, NotFoundError, UsageError
from ckptd.format.container import Chunk, header_bytes, parse_header
from ckptd.format.digest import digest_hex
from ckptd.format.filemap import FileMap, PieceTable
from ckptd.format.manifest import FileEntry, GridEntry, Manifest, ManifestTables, TensorEntry
from ckptd.layout.grid import whole
from ckptd.layout.owners import single_owner
from ckptd.load.files import PieceLocations
from ckptd.reshard.source import Stock, StockTensor
from ckptd.store.base import Store
from ckptd.types import DTYPES, ByteRange

__all__ = ["BY_CODE", "HeaderOf", "identity_of", "open_folder", "places_of", "read_headers"]

END = ".safetensors"
INDEX_END = ".safetensors.index.json"
_MAX_INDEX_BYTES = 1 << 28
_MAX_FILES = 1 << 20
BY_CODE = {d.safetensors: d for d in DTYPES.values() if d.safetensors}
"""Types by their code in a header."""

HeaderOf = tuple[FileEntry, dict[str, Chunk], str]
"""A file, its chunks by name, and a digest of its header. A name that the header calls tied to a
chunk is a chunk with the same bytes."""


def places_of(store: Store, headers: Sequence[HeaderOf], names: Sequence[str]) -> PieceLocations:
    """Return where the chunks of some files are: each is a tensor of one piece.

    Parameters
    ----------
    store
        The folder.
    headers
        Of all files.
    names
        Of the chunks, in the order of files and headers.
    """
    tables = ManifestTables()
    chunks = [(f, c) for f, (_, chunks, _) in enumerate(headers) for c in chunks.values()]
    tensors = [
        TensorEntry(
            name,
            BY_CODE[chunk.code].name,
            chunk.shape,
            tables.grid(GridEntry.of(whole(chunk.shape))),
            tables.owner(single_owner(0).runs),
            file,
        )
        for name, (file, chunk) in zip(names, chunks, strict=True)
    ]
    manifest = Manifest(
        step=0,
        generation=1,
        attempt="foreign",
        world_size=len(headers),
        files=tuple(entry for entry, _, _ in headers),
        grids=tables.grids,
        owners=tables.owners,
        tensors=tuple(tensors),
    )
    table = PieceTable([(chunk.start,) for _, chunk in chunks])
    return PieceLocations(manifest, FileMap.of(manifest, store.url), store, table)


def identity_of(store: Store, step: int, headers: Sequence[HeaderOf]) -> str:
    """Return text that is the same as long as nobody changes a file, for a `Stock`."""
    return "\n".join([store.url, f"step {step}", *(found for _, _, found in headers)])


def read_headers(store: Store, keys: Sequence[str] | None = None) -> list[HeaderOf]:
    """Read the headers of the safetensors files of a folder: those of its index, if it has one.

    Parameters
    ----------
    store
        The folder.
    keys
        These files, whatever an index says.

    Raises
    ------
    NotFoundError
        kind ``no-root``: there is none. kind ``no-tensors``: they hold nothing.
    CorruptError
        One is missing, or is no safetensors file. kind ``missing-tensor``: the index names a tensor
        that its file has not.
    """
    weights: dict[str, str] = {}
    if keys is None:
        files, _, where, weights = _listed(store)
    else:
        files, where = list(keys), ""
    if not files:
        raise NotFoundError(
            "no safetensors files here", kind="no-root", where=store.url, wanted=f"*{END}"
        )
    headers = [_header(store, key) for key in files]
    by_file = {entry.path: chunks for entry, chunks, _ in headers}
    for name, path in weights.items():
        if name not in by_file[path]:
            elsewhere = next((p for p, chunks in by_file.items() if name in chunks), None)
            raise CorruptError(
                "an index names a tensor that its file has not",
                kind="missing-tensor",
                where=f"{where}: {name}",
                wanted=f"in {path}",
                found=f"in {elsewhere}" if elsewhere else "in no file",
            )
    if not any(chunks for _, chunks, _ in headers):
        raise NotFoundError(
            "the files of the source hold no tensor",
            kind="no-tensors",
            where=store.url,
            found=f"{len(headers)} empty files",
        )
    return headers


def _listed(store: Store) -> tuple[list[str], list[str], str, dict[str, str]]:
    """Return the files that count and those that do not, the index, and what is in which file."""
    names = store.children("")
    indexes = [n for n in names if n.endswith(INDEX_END)]
    files = sorted(n for n in names if n.endswith(END))
    if len(files) > _MAX_FILES:
        raise CorruptError(
            "too many files", kind="limits", where=store.url, wanted=_MAX_FILES, found=len(files)
        )
    if len(indexes) != 1:
        return files, [], "", {}
    if store.stat(indexes[0]).size > _MAX_INDEX_BYTES:
        raise CorruptError("an index is too large", kind="limits", where=indexes[0])
    try:
        weights = {
            str(k): str(v) for k, v in json.loads(store.get(indexes[0]))["weight_map"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(
            "not an index of safetensors files",
            kind="bad-json",
            where=indexes[0],
            found=str(error)[:200],
        ) from None
    wanted = sorted(set(weights.values()))
    for name in wanted:
        if name not in files:
            raise _missing(name)
    return wanted, [f for f in files if f not in weights.values()], indexes[0], weights


def _missing(path: str) -> CorruptError:
    return CorruptError("a file of the source is missing", kind="missing-file", where=path)


def _header(store: Store, key: str) -> HeaderOf:
    info = store.stat(key)
    prefix = store.get(key, ByteRange(0, min(8, info.size)))
    length = header_bytes(prefix, key, info.size)
    raw = store.get(key, ByteRange(0, length))
    chunks, metadata = parse_header(raw, key, info.size - length)
    for name, tied in metadata.items():
        # As safetensors.torch.save_model notes the names of tied tensors that it does not write.
        if tied in chunks and name not in chunks and name != "format":
            chunks[name] = dataclasses.replace(chunks[tied], name=name)
    entry = FileEntry(key, 0, length, info.size - length)
    return entry, chunks, f"{digest_hex(raw)} {info.size} {info.modified}"


def open_folder(store: Store, step: int) -> Stock:
    """Describe a folder whose tensors are whole.

    Parameters
    ----------
    store
        The folder.
    step
        Of the checkpoint that it becomes.

    Raises
    ------
    NotFoundError, CorruptError
        As `read_headers`; kind ``bad-header``: two files have one tensor.
    """
    headers = read_headers(store)
    seen: dict[str, str] = {}
    for entry, chunks, _ in headers:
        for name in chunks:
            if name in seen:
                raise CorruptError(
                    "two files have one tensor",
                    kind="bad-header",
                    where=f"{entry.path}: {name}",
                    found=seen[name],
                )
            seen[name] = entry.path
    source = places_of(store, headers, list(seen))
    tensors = [
        StockTensor(n, t.name, source.filemap.dtypes[n], t.shape, source.filemap.grid_of(n))
        for n, t in enumerate(source.manifest.tensors)
    ]
    return Stock(
        source,
        identity=identity_of(store, step, headers),
        tensors=tensors,
        values=lambda names: _values(source, tensors, names),
        step=step,
        witness_note="the source has no witness",
        unread=_listed(store)[1],
        has_sections=False,
    )


def _values(
    source: PieceLocations, tensors: Sequence[StockTensor], names: Sequence[str]
) -> Mapping[str, NDArray[Any]]:
    by_name = {t.name: t for t in tensors}
    out: dict[str, NDArray[Any]] = {}
    for name in names:
        t = by_name[name]
        file, start = source.of(t.number, 0)
        entry = source.files[file]
        count = t.grid.piece(0).numel * t.dtype.itemsize
        at = entry.data_start + start
        if count > _MAX_INDEX_BYTES:
            raise UsageError("a small tensor was expected", where=name, found=f"{count} bytes")
        raw = source.store.get(entry.path, ByteRange(at, at + count))
        out[name] = np.frombuffer(raw, dtype=t.dtype.numpy).reshape(t.shape)
    return out
