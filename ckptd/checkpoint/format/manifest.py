"""`Manifest`: tables of files, grids, tensors, objects; version, ``requires``, compression, size.

Tables are shared: grids and owner maps are stored once and tensors name them by number, so that
the manifest grows with tensors plus files and never with their product.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.base.grids.grid import Axis, Grid
from ckptd.base.grids.owners import ABSENT, Owners
from ckptd.checkpoint.format.codec import parse_json
from ckptd.checkpoint.format.names import CommitName, data_folder
from ckptd.decoding import converter
from ckptd.errors import CorruptError

T = TypeVar("T")

FORMAT = "ckptd"
VERSION = 1
OPTIMIZER_CLASS = "ckptd.class"
"""Key of a group of an object of the kind ``groups`` that says whose groups they are."""
UNDIGESTED = "undigested"
"""Feature of a manifest that represents foreign files: of them no digests are known."""
SUBCLASSES = "subclasses"
"""Feature of a manifest some of whose tensors are parts of others, which wrap them."""
SUBCLASS = "subclass"
"""Kind of the object that says what wraps the tensors below its name."""
SHARING = "sharing"
"""Feature of a manifest some of whose objects hold what `codec.shares` finds."""
INLINE = "inline"
"""Feature of a manifest that has digest indexes, or its witness, in itself and in its data file."""
INLINE_BYTES = 4 << 20
"""Most bytes of a state that one rank writes so."""
SUPPORTED = frozenset({UNDIGESTED, SUBCLASSES, SHARING, INLINE})
"""Features of ``requires`` that this reader knows."""
FOREIGN = "ckptd.foreign"
"""Key of the metadata under which a manifest says what it was made from."""
UNORDERED = "ckptd.order"
"""Key of the metadata of what was read out of buffers that do not say which tensor lies where."""

COMPRESS_ABOVE_BYTES = 1 << 20
MAX_MANIFEST_BYTES = 1 << 30
MAX_RATIO = 64
"""Largest compression of a manifest; one that shrinks more is stored as it is, so that a file that
does is a decompression bomb."""

Runs2 = tuple[tuple[int, int], ...]
Runs3 = tuple[tuple[int, int, int], ...]


class FileEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One data file. Its number in the table is what owner maps speak of.

    Attributes
    ----------
    path
        Relative to the root; in a folder below ``data/``, possibly an older checkpoint's.
    rank
        The rank that wrote it.
    data_start
        Length of the header; a multiple of 4096. Zero: this rank wrote no file.
    data_bytes
        Length of the data section.
    index
        XXH3-128 of the digest index file, as hexadecimal digits. Empty: the file has no digests,
        and only its size can be checked (see `UNDIGESTED`).
    digests
        That index; empty: it is a file.
    """

    path: str
    rank: int
    data_start: int = 0
    data_bytes: int = 0
    index: str = ""
    digests: bytes = b""

    @property
    def folder(self) -> str:
        """The folder in which it lies, with a slash at its end."""
        return self.path.rpartition("/")[0] + "/"


class GridEntry(msgspec.Struct, frozen=True, omit_defaults=True, dict=True):
    """Runs ``[cell size, count]`` per dimension; `flat` likewise: none, one, or one a cell."""

    axes: tuple[Runs2, ...]
    flat: tuple[Runs2, ...] = ()

    @staticmethod
    def of(grid: Grid) -> GridEntry:
        """Return the entry that represents `grid`."""
        return GridEntry(tuple(a.runs for a in grid.axes), tuple(a.runs for a in grid.flat))

    @cached_property
    def grid(self) -> Grid:
        """Return the grid; raises ValueError when it breaks a rule."""
        return Grid(tuple(Axis(r) for r in self.axes), tuple(Axis(r) for r in self.flat))


class TensorEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One logical tensor: `grid` and `owners` number into the tables, `base` shifts the owners."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    grid: int
    owners: int
    base: int = 0
    aliases: tuple[str, ...] = ()


class ObjectEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One object: a replicated value inline, or encoded bytes in the uint8 tensor `tensor`.

    `per_rank` is the declared behaviour when the world changes; each cell of the tensor is then
    one rank's value, and the rank is that of the file that holds the cell. `kind` is ``value``,
    ``groups`` for optimizer groups, or ``subclass`` for what wraps the tensors below `name`.
    """

    name: str
    value: Any = None
    tensor: str = ""
    per_rank: str = ""
    kind: str = "value"


class MeshEntry(msgspec.Struct, frozen=True):
    """A device mesh of the writer: documentation, never needed to read."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: Runs3


class WitnessEntry(msgspec.Struct, frozen=True):
    """The witness: its `kind`, and the XXH3-128 of the file's bytes where it is a file."""

    kind: str
    digest: str


class OfCheckpoint(msgspec.Struct, frozen=True):
    """Fields of what speaks of one checkpoint; they come first."""

    step: int
    generation: int

    @property
    def name(self) -> CommitName:
        """The checkpoint."""
        return CommitName(self.step, self.generation)


class OfAttempt(OfCheckpoint, frozen=True):
    """Fields of what speaks of one attempt to make a checkpoint."""

    attempt: str

    @property
    def folder(self) -> str:
        """Its data folder; ends in "/". Only for a checked step and generation."""
        return data_folder(self.name, self.attempt)


class Manifest(OfAttempt, frozen=True, omit_defaults=True):
    """Everything a reader needs, besides the bytes."""

    world_size: int
    files: tuple[FileEntry, ...]
    grids: tuple[GridEntry, ...]
    owners: tuple[Runs3, ...]
    tensors: tuple[TensorEntry, ...]
    objects: tuple[ObjectEntry, ...] = ()
    meshes: tuple[MeshEntry, ...] = ()
    witness: WitnessEntry | None = None
    metadata: dict[str, Any] = {}
    lay: str = ""
    requires: tuple[str, ...] = ()
    format: str = msgspec.field(default="")
    version: int = 0


def in_one_piece(owners: Iterable[Runs3]) -> bool:
    """Tell whether every tensor that has one of these owner maps lies in one piece."""
    return all(sum(count for _, _, count in runs) == 1 for runs in owners)


class ManifestTables:
    """Grids and owner maps under construction, each stored once; those given come first."""

    def __init__(self, grids: Iterable[GridEntry] = (), owners: Iterable[Runs3] = ()) -> None:
        self._grids = {grid: number for number, grid in enumerate(grids)}
        self._owners = {runs: number for number, runs in enumerate(owners)}
        self._placed: dict[bytes, tuple[int, int]] = {}

    def grid(self, grid: GridEntry) -> int:
        """Return the number of a grid."""
        return self._grids.setdefault(grid, len(self._grids))

    def owner(self, owners: Runs3) -> int:
        """Return the number of an owner map."""
        return self._owners.setdefault(owners, len(self._owners))

    def placed(self, files: NDArray[np.int64]) -> tuple[int, int]:
        """Return number and base of the map of these files; maps that differ by a base are one."""
        key = files.tobytes()
        if key not in self._placed:
            held = files != ABSENT
            base = int(files[held].min())
            runs = Owners.from_array(np.where(held, files - base, ABSENT)).runs
            self._placed[key] = self.owner(runs), base
        return self._placed[key]

    @property
    def grids(self) -> tuple[GridEntry, ...]:
        """All grids."""
        return tuple(self._grids)

    @property
    def owners(self) -> tuple[Runs3, ...]:
        """All owner maps."""
        return tuple(self._owners)


# Made now, and not by the first thread that reads one.
CONVERTERS: dict[type, Callable[[Any], Any]] = {Manifest: converter(Manifest)}
"""Converter from plain values to each type of record."""


def encode_manifest(manifest: Manifest) -> tuple[str, bytes]:
    """Return ``(file name, bytes)``: JSON, or zstd of it when that is large. Deterministic."""
    raw = msgspec.json.encode(msgspec.structs.replace(manifest, format=FORMAT, version=VERSION))
    if len(raw) <= COMPRESS_ABOVE_BYTES:
        shown = len(raw) < 1 << 18 and INLINE not in manifest.requires
        return "manifest.json", msgspec.json.format(raw, indent=1) if shown else raw
    import zstandard  # of large ones alone

    packed = zstandard.ZstdCompressor(level=3).compress(raw)
    if len(raw) > _justified(len(packed)):
        return "manifest.json", raw
    return "manifest.json.zst", packed


def _justified(stored: int) -> int:
    """Return how much a compressed manifest of `stored` bytes may become."""
    return min(MAX_MANIFEST_BYTES, stored * MAX_RATIO + (1 << 16))


def decode_manifest(raw: bytes, where: str, like: Manifest | None = None) -> Manifest:
    """Parse a manifest; `where` names it in errors and its suffix tells compression.

    Cross-references are checked by `ckptd.checkpoint.format.invariants.check_manifest`, not here.
    The table of tensors is that of `like` itself where it is the same.

    Raises
    ------
    CorruptError
        Not JSON, duplicate keys, wrong types, wrong version, or a decompression bomb.
    """
    if where.endswith(".zst"):
        raw = _decompress(raw, where)
    if len(raw) > MAX_MANIFEST_BYTES:
        raise CorruptError("manifest too large", where=where)
    table = msgspec.json.encode(like.tensors) if like is not None else b""
    head, same, tail = raw.partition(table) if len(table) > 2 else (raw, b"", b"")
    # In place of an array of objects, which begins and ends no string around it, one value as well.
    mark = uuid.uuid4().hex
    if like is not None and same and mark.encode() not in raw:
        with suppress(CorruptError):
            document = decode_json(head + b'"%s"' % mark.encode() + tail, where)
            if document.get("tensors") == mark:
                _check_version(document, where)
                bare = convert({**document, "tensors": []}, Manifest, where)
                return msgspec.structs.replace(bare, tensors=like.tensors)
    document = decode_json(raw, where)
    _check_version(document, where)
    found = convert(document, Manifest, where)
    alike = like is not None and like.tensors == found.tensors  # a short one has blanks
    return msgspec.structs.replace(found, tensors=like.tensors) if like and alike else found


def decode_json(raw: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object in UTF-8.

    Raises
    ------
    CorruptError
        Something else, a repeated key, NaN, infinity, a lone surrogate, or nesting without end.
    """
    try:
        document = parse_json(raw)
    except (ValueError, RecursionError) as error:
        raise CorruptError("not JSON", where=where, found=str(error)[:200]) from None
    if not isinstance(document, dict):
        raise CorruptError("not a JSON object", where=where)
    return document


def convert(document: dict[str, Any], kind: type[T], where: str) -> T:
    """Turn parsed JSON into a struct, or raise `CorruptError` naming the field."""
    try:
        found: T = CONVERTERS[kind](document)
        return found
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        raise CorruptError(f"not a {kind.__name__}", where=where, found=str(error)[:300]) from None


def _check_version(document: dict[str, Any], where: str) -> None:
    version = document.get("version")
    if document.get("format") != FORMAT or type(version) is not int or version < 1:
        raise CorruptError("not a ckptd manifest", where=where)
    requires = document.get("requires", [])
    unknown = (
        sorted(str(r)[:80] for r in requires if not isinstance(r, str) or r not in SUPPORTED)
        if isinstance(requires, list)
        else ["?"]
    )
    if version > VERSION or unknown:
        raise newer(where, VERSION, f"version {version}, requires {unknown[:8]}")


def newer(where: str, known: int, found: str) -> CorruptError:
    """Return the error for what a newer version wrote than the `known` one."""
    return CorruptError(
        "written by a newer ckptd",
        kind="version",
        where=where,
        wanted=f"version {known}",
        found=found,
        hint="pip install --upgrade ckptd",
    )


def _content_size(raw: bytes, where: str) -> int:
    import zstandard

    try:
        size = zstandard.get_frame_parameters(raw).content_size
    except zstandard.ZstdError as error:
        raise _not_zstd(where, error) from None
    if size == zstandard.CONTENTSIZE_UNKNOWN or size > _justified(len(raw)):
        raise CorruptError("manifest decompresses to too much", where=where)
    return size


def _decompress(raw: bytes, where: str) -> bytes:
    import zstandard

    size = _content_size(raw, where)
    try:
        return zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(
            raw, max_output_size=size, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise _not_zstd(where, error) from None


def _not_zstd(where: str, error: Exception) -> CorruptError:
    return CorruptError("not zstd", where=where, found=str(error)[:200])


def about_foreign(manifest: Manifest) -> dict[str, Any]:
    """Return what a manifest says of the foreign checkpoint whose tensors it has; or {}.

    A copy has them as they were. What is made from it under other names has none of this.
    """
    found = manifest.metadata.get(FOREIGN)
    return found if isinstance(found, dict) else {}


def foreign_unread(manifest: Manifest) -> dict[str, str]:
    """Return the tensors of a foreign checkpoint that its reader does not read: what each is.

    None for what was made from one: it was not made with such a tensor.
    """
    found = about_foreign(manifest).get("unread_tensors")
    known = UNDIGESTED in manifest.requires and isinstance(found, dict)
    return {str(k): str(v) for k, v in found.items()} if known and found else {}


def wrapped_tensors(manifest: Manifest) -> dict[str, str]:
    """Return the tensors of wrapper subclasses, whose parts are below their names: each's class."""
    found = {o.name: o.value for o in manifest.objects if o.kind == SUBCLASS}
    return {
        name: str(value.get("class") if isinstance(value, dict) else value).replace(":", ".")[:200]
        for name, value in found.items()
    }


def foreign_sizes(manifest: Manifest) -> dict[str, int]:
    """Return the sizes of axes that a foreign checkpoint hints at; metadata is anybody's."""
    found = about_foreign(manifest).get("sizes")
    pairs = found.items() if isinstance(found, dict) else ()
    return {str(k): v for k, v in pairs if type(v) is int and v > 0}
