"""`FormatReader`, `Foreign`, `Listing`: a format's interface; files that changed while read.

In it: limits of names and values kept; file systems whose inodes are not trusted; step from a
folder's name; values as JSON.

A format is one module with one `FormatReader`. It reads metadata and never a tensor's bytes;
`ckptd.readers.twin` makes a checkpoint of its table, and everything that works on a checkpoint
works on that. Readers of other packages are found by the entry point ``ckptd.readers``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Protocol

from ckptd.base.runtime.host import filesystem_of
from ckptd.base.runtime.pool import run_all
from ckptd.checkpoint.format import codec
from ckptd.checkpoint.format.container import Chunk, header_bytes, parse_header
from ckptd.checkpoint.format.names import MAX_STEP
from ckptd.errors import CorruptError, MismatchError, NotFoundError, UsageError
from ckptd.readers.pickles import PickledObject, numpy_value, walk_values
from ckptd.readers.zips import Extent, ReadRange
from ckptd.store.base import ObjectInfo, Store
from ckptd.types import DTYPES, Box, ByteRange

MAX_NAMES = 1 << 20
MAX_VALUES = 1 << 14
_MAX_CHARS = 1 << 16
_LOOKING = 8
_STALL_S = 300.0
_MAKE_UP_INODES = ("fuse", "cifs", "smb")
"""File systems that give a file another inode once the kernel has forgotten it."""
_STEP = re.compile(r"(?:^|[_.-])(?:global_?step|step|iter|checkpoint)[_=-]?([0-9]{1,12})(?![0-9])")
CODES = {d.safetensors: d.name for d in DTYPES.values() if d.safetensors}
"""Types by their code in a safetensors header."""


@dataclass(frozen=True, slots=True)
class ForeignPiece:
    """A part of a tensor, and where it lies.

    Attributes
    ----------
    name, dtype, shape
        Of the whole tensor; the type as in `ckptd.types.DTYPES`.
    box
        Where the part lies in the tensor.
    file
        Key of the file that holds it.
    at
        Where it lies in the file; a function, for what costs a read to find out.
    flat
        The part is only this range of the box's row-major elements.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    file: str
    at: Extent | Callable[[], Extent]
    flat: tuple[int, int] | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.box.numel if self.flat is None else self.flat[1] - self.flat[0]


@dataclass(frozen=True, slots=True)
class Foreign:
    """A checkpoint as a reader found it.

    Attributes
    ----------
    pieces
        The table. Two pieces of one place are replicas: the first one counts.
    objects
        Values that JSON has, by name.
    left_out
        Names of values that JSON has not.
    unread_tensors
        Tensors of kinds that the reader does not read, by name: what each is. Nothing that is
        asked for one of them goes on without it.
    unread
        Files that look like a part of it and are none.
    step
        Of training; None where nothing tells.
    lay
        A hint: the layout program of its names, as a checkpoint keeps one; empty for none. It is
        used where the user names no layout.
    sizes
        Hints as well: sizes of axes that shapes alone do not tell.
    has_sections
        Whether names may begin with a section of a state; else ``model.`` is a part of weights'
        own names.
    """

    pieces: Iterable[ForeignPiece]
    objects: Mapping[str, Any] = field(default_factory=dict)
    left_out: Sequence[str] = ()
    unread: Sequence[str] = ()
    step: int | None = None
    lay: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    has_sections: bool = True
    unread_tensors: Mapping[str, str] = field(default_factory=dict)


class SeenFiles:
    """The files of a folder that a reader has looked at: as they were before it read a byte.

    Another program may write a file again under its name at any time, also one that only says what
    the others hold. So `check` looks again behind the last byte that was wanted.

    Parameters
    ----------
    store
        The folder.

    Attributes
    ----------
    read
        Keys of those of which bytes were taken.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.read: set[str] = set()
        self._infos: dict[str, ObjectInfo] = {}

    def look(self, key: str) -> ObjectInfo:
        """Return what a file was when it was looked at first.

        Raises
        ------
        CorruptError
            A commit refers to a manifest or data file that is gone.
        """
        if key not in self._infos:
            self._infos[key] = self._stat(key)
        return self._infos[key]

    def get(self, key: str, start: int, end: int) -> bytes:
        """Return a range of a file; raises as `Store.get`, and as `look`."""
        self.look(key)
        self.read.add(key)
        return self.store.get(key, ByteRange(start, end))

    def check(self, key: str) -> None:
        """Compare a file with what it was.

        Raises
        ------
        CorruptError
            kind ``replaced`` among others.
        """
        before, now = self.look(key), self._stat(key)
        if now.size != before.size:
            raise CorruptError(
                "a file has changed while it was read",
                where=key,
                wanted=f"{before.size} bytes",
                found=f"{now.size} bytes",
            )
        if self._is_another(key, before, now):
            raise CorruptError(
                "a file was replaced while it was read",
                kind="replaced",
                where=key,
                wanted=f"what was written at {time_text(before.modified)}",
                found=f"what was written at {time_text(now.modified)}",
                hint="try again once no program writes there",
            )

    def check_read(self) -> None:
        """Compare all files of which bytes were taken; raises as `check`."""
        keys = sorted(self.read)
        if keys:
            run_all(
                keys,
                self.check,
                threads=min(len(keys), _LOOKING),
                stall_s=_STALL_S,
                what="looking whether files have changed",
            )

    def _stat(self, key: str) -> ObjectInfo:
        try:
            return self.store.stat(key)
        except NotFoundError:
            raise missing(key) from None

    def _is_another(self, key: str, before: ObjectInfo, now: ObjectInfo) -> bool:
        # A tag that is the same says more than a time that is not: object stores move what is read
        # to another class of storage, and Google's counts that as a change of the object.
        if before.tag and now.tag == before.tag:
            return False
        return now.modified != before.modified or (now.tag != before.tag and self._tells(key))

    def _tells(self, key: str) -> bool:
        """Whether another tag is another file: some file systems make inodes up as they go."""
        path = self.store.local_path(key)
        if path is None:
            return True
        kind = filesystem_of(os.stat(path).st_dev) or ""
        return not kind.startswith(_MAKE_UP_INODES)


class Listing:
    """The names in a folder, and in the folders directly below.

    Parameters
    ----------
    store
        Where it is.
    prefix
        The folder; "" or ending in "/".
    only
        Look at these names alone.
    seen
        The files that were looked at.
    """

    def __init__(
        self,
        store: Store,
        prefix: str = "",
        only: Sequence[str] = (),
        seen: SeenFiles | None = None,
    ) -> None:
        self.store = store
        self.prefix = prefix
        self._only = only
        self.seen = SeenFiles(store) if seen is None else seen

    @property
    def is_chosen(self) -> bool:
        """Whether a user named what to look at, a part of a whole perhaps."""
        return bool(self._only)

    @cached_property
    def names(self) -> list[str]:
        """Names, sorted; folders end in "/"."""
        found = list(self._only) or self.store.children(self.prefix)
        if len(found) > MAX_NAMES:
            raise CorruptError(
                "too many files", where=self.where, wanted=f"at most {MAX_NAMES}", found=len(found)
            )
        return found

    @property
    def where(self) -> str:
        """The folder, for errors."""
        return f"{self.store.url.rstrip('/')}/{self.prefix}".rstrip("/")

    def ending(self, *ends: str) -> list[str]:
        """Return the names that end so."""
        return [n for n in self.names if n.endswith(ends)]

    @property
    def folders(self) -> list[str]:
        """The folders directly below, with their "/"."""
        return self.ending("/")

    def inside(self, folder: str) -> Listing:
        """Return the listing of a folder directly below."""
        return Listing(self.store, self.prefix + folder, seen=self.seen)

    def key(self, name: str) -> str:
        """Return the key of a file."""
        return self.prefix + name

    def size(self, name: str) -> int:
        """Return the length of a file; `CorruptError`, for none."""
        return self.seen.look(self.key(name)).size

    def reads(self, name: str) -> ReadRange:
        """Return a function that reads ranges of a file."""
        key = self.key(name)
        return lambda start, end: self.seen.get(key, start, end)

    def read(self, name: str, most: int) -> bytes:
        """Return a small file; `CorruptError`, for one above `most` bytes."""
        size = self.size(name)
        if size > most:
            raise CorruptError(
                "a file is too large",
                where=self.key(name),
                wanted=f"at most {most} bytes",
                found=size,
            )
        return self.seen.get(self.key(name), 0, size)

    def header(self, name: str) -> tuple[dict[str, Chunk], Mapping[str, str], int]:
        """Return chunks and metadata of a safetensors file, and the length of its header.

        Raises
        ------
        CorruptError
            kind ``truncated`` among others.
        """
        size, read, key = self.size(name), self.reads(name), self.key(name)
        length = header_bytes(read(0, min(8, size)), key, size)
        return *parse_header(read(0, length), key, size - length), length


class FormatReader(Protocol):
    """Reads one format.

    Attributes
    ----------
    name
        What users call it: ``dcp``, ``hf``.
    """

    name: str

    def recognise(self, names: Listing) -> int:
        """Return how surely a folder is of this format, from names alone: 0 is not at all."""

    def open(self, names: Listing) -> Foreign:
        """Read metadata and describe the checkpoint.

        Raises
        ------
        CorruptError, MismatchError, RefusedError
            It is damaged, incomplete, or of a kind that is not read.
        """


def step_of(names: Listing, *others: str) -> int | None:
    """Return the step that the name of the folder, or another one, says; None for none."""
    for name in (names.where.rpartition("/")[2], *others):
        found = _STEP.search(name)
        if found:
            return int(found[1])
    return None


def step_or(value: object, other: int | None) -> int | None:
    """Return a value that can be a step of training, or else another one."""
    return value if type(value) is int and 0 <= value <= MAX_STEP else other


def time_text(modified: float) -> str:
    """Return a time of a file as records have it."""
    text = datetime.fromtimestamp(modified, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def missing(path: str, hint: str | None = None) -> CorruptError:
    """Return the error for a file that the checkpoint needs and the folder lacks."""
    return CorruptError("a file of the checkpoint is missing", where=path, hint=hint)


def damaged(what: str, where: str, error: object) -> CorruptError:
    """Return the error for metadata whose reading raised another one."""
    text = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)
    return CorruptError(what, where=where, found=text[:200])


class KeptValues:
    """Values of a checkpoint by name, as far as JSON has them and files agree.

    Parameters
    ----------
    objects, left_out
        What is kept already, and the names of what is not.

    Attributes
    ----------
    left_out
        Names of what is not kept, in order.
    """

    def __init__(self, objects: Mapping[str, Any] = {}, left_out: Iterable[str] = ()) -> None:
        self._found = dict(objects)
        self.left_out = dict.fromkeys(left_out)

    def add(self, name: str, value: Any) -> None:
        """Keep a value, or its name: where two files differ nothing says which one counts."""
        try:
            kept = json_value(value)
            found = self._found.setdefault(name, kept)
            if found is not kept and repr(found) != repr(kept):
                self.left_out[name] = None
        except MismatchError:
            self.left_out[name] = None

    def objects(self) -> dict[str, Any]:
        """Return the values that are kept."""
        return {name: v for name, v in self._found.items() if name not in self.left_out}


def json_value(value: Any) -> Any:
    """Return a value of a pickle as a manifest keeps it (spec section 7).

    Raises
    ------
    MismatchError
        It holds what is no number, text, list, tuple, dict or small array of numpy, or too much.
    """
    left = MAX_VALUES
    for path, leaf in walk_values(value):
        left -= 1
        good = leaf is None or isinstance(leaf, bool | int | float | str)
        good = good or numpy_value(leaf) is not None
        size = len(leaf) if isinstance(leaf, str) else 0
        size = leaf.bit_length() * 8 if isinstance(leaf, int) else size
        if left < 0 or not good or size > _MAX_CHARS:
            found = leaf.cls if isinstance(leaf, PickledObject) else type(leaf).__name__
            raise MismatchError("not a plain value, or too large", where=path[:200], found=found)
    try:
        return codec.encode(_plain(value))
    except UsageError as error:
        raise MismatchError("not a plain value", found=error.message) from None


def _plain(value: Any) -> Any:
    """Return a value without the types of this module."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, dict):
        return {_plain(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(v) for v in value)
    return numpy_value(value) if isinstance(value, PickledObject) else value
