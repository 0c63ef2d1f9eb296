"""Checks of a manifest before anything is allocated: limits of dims, pieces, chunks, paths.

A manifest comes from a file that anybody may have written. `check_manifest` runs in time that
grows with the manifest and never with the number of pieces it names; afterwards paths stay
below the root, every number fits int64, and arrays of pieces are in proportion to the file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from ckptd.base.digest import MAX_CHUNKS, DigestIndex, digest_hex, is_digest
from ckptd.base.grids.grid import Grid
from ckptd.base.grids.owners import ABSENT, Owners
from ckptd.checkpoint.format.codec import MAX_METADATA_BYTES
from ckptd.checkpoint.format.container import ALIGNMENT, MAX_HEADER_BYTES, FileMap, is_home
from ckptd.checkpoint.format.manifest import (
    INLINE_BYTES,
    SUBCLASS,
    UNDIGESTED,
    FileEntry,
    GridEntry,
    Manifest,
    MeshEntry,
    in_one_piece,
)
from ckptd.checkpoint.format.names import (
    MAX_GENERATION,
    MAX_RANK,
    MAX_STEP,
    are_names,
    check_name,
    is_attempt,
    is_data_path,
)
from ckptd.checkpoint.format.witness import DATA, KINDS
from ckptd.errors import CkptdError, CorruptError
from ckptd.types import DTYPES

MAX_DIMS = 64
MAX_BYTES = 1 << 62
MAX_LAY_CHARS = 1 << 20
FREE_PIECES = 1 << 20
PIECES_PER_BYTE = 64
MAX_PIECES = 1 << 26
FREE_CHUNKS = 1 << 20
CHUNK_BYTES = 48
"""The header of a file has at least so many bytes for each of its chunks."""
PER_RANK = frozenset({"", "error", "drop", "reseed", "reduce"})
OBJECT_KINDS = frozenset({"value", "groups", SUBCLASS})


def check_manifest(
    manifest: Manifest,
    where: str,
    manifest_bytes: int,
    known: tuple[Manifest, FileMap] | None = None,
) -> FileMap:
    """Check everything that a manifest says about itself.

    Parameters
    ----------
    manifest
        As `ckptd.checkpoint.format.manifest.decode_manifest` gives it.
    where
        Names it in errors.
    manifest_bytes
        Its length as stored: bounds the number of pieces (spec 3.6).
    known
        Another manifest that was checked, and its tables: they are this one's as well where it has
        the same tensors, cut and stored alike.

    Raises
    ------
    CorruptError
        What is there breaks a rule of the format.
    """
    _check_identity(manifest, where)
    _check_file_table(manifest.files, where, digested=UNDIGESTED not in manifest.requires)
    if known is not None and _are_tables_of(manifest, known[0]):
        filemap = known[1]
        _check_pieces(manifest, filemap, where, manifest_bytes)
    else:
        filemap = check_tensors(manifest, len(manifest.files), where, manifest_bytes)
    _check_names([o.name for o in manifest.objects], where, "objects")
    _check_objects(manifest, filemap.grids, where)
    _check_extras(manifest, where)
    return filemap


def _are_tables_of(manifest: Manifest, other: Manifest) -> bool:
    """Tell whether two manifests have all alike that `check_tensors` looks at."""
    ours, theirs = (
        (m.grids, m.owners, [f.rank for f in m.files], {o.tensor for o in m.objects if o.per_rank})
        for m in (manifest, other)
    )
    return ours == theirs and manifest.tensors == other.tensors


def check_tensors(manifest: Manifest, files: int, where: str, manifest_bytes: int) -> FileMap:
    """Check tensors, grids and owners of a manifest that has so many files; as `check_manifest`."""
    _check_dims(manifest.grids, where)
    _check_numbers(manifest, files, where)
    filemap = FileMap.of(manifest, where)
    _check_names(
        [n for t in manifest.tensors for n in (t.name, *t.aliases)], where, "tensors or aliases"
    )
    _check_tensors(manifest, filemap, files, where)
    _check_pieces(manifest, filemap, where, manifest_bytes)
    return filemap


def _bad(what: str, where: str, wanted: object = None, found: object = None) -> CkptdError:
    text = None if found is None else str(found)[:200]
    return CorruptError(what, where=where, wanted=wanted, found=text)


def _check_identity(m: Manifest, where: str) -> None:
    good = (
        0 <= m.step <= MAX_STEP
        and 0 <= m.generation <= MAX_GENERATION
        and is_attempt(m.attempt)
        and 1 <= m.world_size <= MAX_RANK + 1
    )
    if not good:
        raise _bad("step, generation, attempt or world size out of range", where)


def _check_file_table(files: Sequence[FileEntry], where: str, *, digested: bool) -> None:
    for number, file in enumerate(files):
        if not is_data_path(file.path):
            raise _bad(
                "a data file must lie directly in a folder below data/",
                f"{where}: files[{number}]",
                "data/<step>-g<generation>-<attempt>/<name>.safetensors",
                repr(file.path[:200]),
            )
        if not _is_plausible(file, digested):
            raise _bad("impossible sizes, rank or digest", f"{where}: {file.path}")
    if len({f.path for f in files}) != len(files):
        raise _bad("two entries name one file", where)


def _is_plausible(file: FileEntry, digested: bool) -> bool:
    if not 0 <= file.rank <= MAX_RANK:
        return False
    if file.digests and digest_hex(file.digests) != file.index:
        return False
    if file.data_start == 0:
        return file.data_bytes == 0 and file.index == ""
    return (
        file.data_start % ALIGNMENT == 0
        and 0 < file.data_start <= MAX_HEADER_BYTES + ALIGNMENT
        and 0 <= file.data_bytes < MAX_BYTES
        and (is_digest(file.index) if digested else file.index == "")
    )


def _check_dims(grids: Sequence[GridEntry], where: str) -> None:
    """Refuse what would be slow to multiply, before any `Grid` is made."""
    for number, grid in enumerate(grids):
        if len(grid.axes) > MAX_DIMS:
            place = f"{where}: grids[{number}]"
            raise _bad("too many dimensions", place, f"at most {MAX_DIMS}", len(grid.axes))


def _check_names(names: Sequence[str], where: str, what: str) -> None:
    if are_names(names) and len({*names}) == len(names):
        return
    seen: set[str] = set()
    for name in names:
        check_name(name, where)
        if name in seen:
            raise _bad(f"two {what} have one name", where, found=repr(name[:80]))
        seen.add(name)


def _check_numbers(manifest: Manifest, files: int, where: str) -> None:
    """Check what `FileMap` takes for granted."""
    grids, owners = range(len(manifest.grids)), range(len(manifest.owners))
    for t in manifest.tensors:
        if t.dtype in DTYPES and t.grid in grids and t.owners in owners and 0 <= t.base <= files:
            continue
        place = f"{where}: {t.name[:200]}"
        if t.dtype not in DTYPES:
            raise _bad("unknown dtype", place, f"one of {', '.join(DTYPES)}", t.dtype)
        raise _bad(
            "grid, owners or base out of range",
            place,
            f"below {len(grids)}, below {len(owners)}, at most {files}",
            (t.grid, t.owners, t.base),
        )


def _check_tensors(manifest: Manifest, filemap: FileMap, files: int, where: str) -> None:
    highest = [o.highest() for o in filemap.owners]
    seen: set[tuple[object, ...]] = set()
    for t, dtype in zip(manifest.tensors, filemap.dtypes, strict=True):
        form = (t.shape, t.dtype, t.grid, t.owners, t.base)
        if form in seen:
            continue
        seen.add(form)
        grid, owners = filemap.grids[t.grid], filemap.owners[t.owners]
        place = f"{where}: {t.name[:200]}"
        if t.shape != grid.shape:
            raise _bad("not the shape of its grid", place, grid.shape, t.shape)
        if math.prod(n or 1 for n in t.shape) * dtype.itemsize >= MAX_BYTES:
            raise _bad("too large", place, f"below {MAX_BYTES} bytes", t.shape)
        if owners.npieces != grid.npieces:
            wanted, found = f"{grid.npieces} pieces", f"{owners.npieces} owners"
            raise _bad("not one owner for each piece", place, wanted, found)
        if highest[t.owners] != ABSENT and highest[t.owners] + t.base >= files:
            last = highest[t.owners] + t.base
            raise _bad("an owner that is not a file", place, f"below {files}", last)


def _check_pieces(manifest: Manifest, filemap: FileMap, where: str, manifest_bytes: int) -> None:
    """Bound the pieces of all distinct (grid, owners, base): what tables of pieces may hold."""
    limit = min(MAX_PIECES, FREE_PIECES + PIECES_PER_BYTE * manifest_bytes)
    distinct = {(t.grid, t.owners, t.base) for t in manifest.tensors}
    total = sum(filemap.grids[grid].npieces for grid, _, _ in distinct)
    if total > limit:
        raise _bad("more pieces than elements", where, limit, total)


def check_chunks(filemap: FileMap, header_bytes: int, where: str) -> None:
    """Bound the chunks of all tensors by what the headers of the files can name.

    Tensors share tables of pieces, so that a short manifest can speak of very many chunks; each of
    them stands in the header of a file.

    Parameters
    ----------
    filemap
        The map of the manifest.
    header_bytes
        Length of the headers of all files together, as it is claimed or as it is.
    where
        Names the manifest in errors.

    Raises
    ------
    CorruptError
        A file asks for more memory than its size justifies.
    """
    limit = FREE_CHUNKS + header_bytes // CHUNK_BYTES
    if filemap.total_chunks > limit:
        text = "more chunks than the headers of its files can name"
        raise _bad(text, where, f"at most {limit}", filemap.total_chunks)


def _check_objects(manifest: Manifest, grids: Sequence[Grid], where: str) -> None:
    stored = {o.tensor for o in manifest.objects}
    tensors = {t.name: t for t in manifest.tensors if t.name in stored}
    for o in manifest.objects:
        place = f"{where}: {o.name[:200]}"
        if o.per_rank not in PER_RANK or o.kind not in OBJECT_KINDS:
            raise _bad("unknown per_rank or kind", place, found=(o.per_rank, o.kind))
        if not o.tensor:
            if o.per_rank:
                raise _bad("a per-rank object must lie in a tensor", place)
            continue
        tensor = tensors.get(o.tensor)
        if tensor is None or tensor.dtype != "uint8" or len(tensor.shape) != 1:
            raise _bad("not in a 1-d uint8 tensor", place, found=o.tensor)
        if o.value is not None:
            raise _bad("both a value and a tensor", place)
        if o.per_rank and (
            grids[tensor.grid].flat or grids[tensor.grid].ncells > manifest.world_size
        ):
            raise _bad("its cells are not one a rank", place)


def _check_extras(manifest: Manifest, where: str) -> None:
    for mesh in manifest.meshes:
        if not _is_mesh(mesh, manifest.world_size):
            raise _bad("a mesh breaks a rule", where, found=mesh.names)
    w = manifest.witness
    if w is not None and (w.kind not in KINDS or (w.kind == DATA) == is_digest(w.digest)):
        raise _bad("unknown kind of witness, or no digest", where, found=w.kind)
    if w is not None and w.kind == DATA and not _is_one_small_file(manifest):
        raise _bad("a witness of this kind needs one small file with tensors in one piece", where)
    if len(manifest.lay) > MAX_LAY_CHARS:
        raise _bad("layout program too long", where, MAX_LAY_CHARS, len(manifest.lay))
    try:
        length = len(msgspec.json.encode(manifest.metadata))
    except (RecursionError, ValueError, msgspec.MsgspecError) as error:
        raise _bad("metadata is not JSON", where, found=error) from None
    if length > MAX_METADATA_BYTES:
        raise _bad("metadata too large", where, MAX_METADATA_BYTES, length)


def _is_one_small_file(manifest: Manifest) -> bool:
    file = manifest.files[0] if len(manifest.files) == 1 else FileEntry("", 0)
    small = bool(file.digests) and file.data_bytes <= INLINE_BYTES
    return small and is_home(file.path, manifest.folder) and in_one_piece(manifest.owners)


def _is_mesh(mesh: MeshEntry, world: int) -> bool:
    dims = len(mesh.shape)
    if dims != len(mesh.names) or dims > MAX_DIMS or any(n < 1 for n in mesh.shape):
        return False
    try:
        ranks = Owners(mesh.ranks)
    except ValueError:
        return False
    size = math.prod(mesh.shape)
    return size == ranks.npieces <= world and not ranks.has_absent and ranks.highest() < world


def check_files(manifest: Manifest, filemap: FileMap, where: str = "manifest") -> None:
    """Check that the chunks of each file fill it: at commit, and when a checkpoint is verified.

    Files of older folders hold chunks that this manifest does not refer to as well, so there the
    chunks must fit only.

    Raises
    ------
    CorruptError
        Names the first file and both lengths.
    """
    folder = manifest.folder
    stated = np.array([f.data_bytes for f in manifest.files], dtype=np.int64)
    home = np.array([is_home(f.path, folder) for f in manifest.files], dtype=np.bool_)
    implied = filemap.all_data_bytes(len(manifest.files))
    wrong = np.flatnonzero(np.where(home, implied != stated, implied > stated))
    if len(wrong):
        i = int(wrong[0])
        raise _bad(
            f"{len(wrong)} files have another length than their chunks, the first is",
            f"{where}: {manifest.files[i].path}",
            f"{implied[i]} bytes of data",
            f"{stated[i]} bytes",
        )


class Absence(msgspec.Struct, frozen=True):
    """Pieces of a tensor that no file holds.

    Attributes
    ----------
    tensor
        Its name.
    runs
        ``(first piece, number of pieces)``, rising.
    elements
        Number of elements that are missing.
    """

    tensor: str
    runs: tuple[tuple[int, int], ...]
    elements: int


def check_coverage(manifest: Manifest, filemap: FileMap) -> list[Absence]:
    """List what is absent, in manifest order.

    A checked manifest names exactly one owner for every piece, so that a tensor is covered
    exactly once but for the pieces that are absent on purpose.
    """
    known: dict[tuple[int, int], tuple[tuple[tuple[int, int], ...], int]] = {}
    out = []
    for t in manifest.tensors:
        if not filemap.owners[t.owners].has_absent:
            continue
        key = (t.grid, t.owners)
        if key not in known:
            runs = _absent_runs(filemap.owners[t.owners])
            numels = filemap.numels(t.grid)
            known[key] = (runs, sum(int(numels[i : i + n].sum()) for i, n in runs))
        out.append(Absence(t.name, *known[key]))
    return out


def _absent_runs(owners: Owners) -> tuple[tuple[int, int], ...]:
    out: list[tuple[int, int]] = []
    start = 0
    for first, _, count in owners.runs:
        if first == ABSENT:
            out.append((start, count))
        start += count
    return tuple(out)


def check_index(
    file: FileEntry, index: DigestIndex, nchunks: int | None = None, where: str | None = None
) -> None:
    """Check that a digest index belongs to a data file.

    Parameters
    ----------
    file
        The file's entry.
    index
        The decoded index.
    nchunks
        Number of chunks in the file: `FileMap.nchunks` for a home file, the length of its header
        for one of an older folder. Not checked when left out.
    where
        Names the index in errors; the file's path when left out.

    Raises
    ------
    CorruptError
        A digest index does not belong to its data file, or does not decode.
    """
    where = where or file.path
    if index.data_bytes != file.data_bytes:
        raise _bad(
            "digest index of a file of another length", where, file.data_bytes, index.data_bytes
        )
    if index.nchunks > MAX_CHUNKS or (nchunks is not None and index.nchunks != nchunks):
        raise _bad("digest index of other chunks", where, nchunks, f"{index.nchunks} chunks")
