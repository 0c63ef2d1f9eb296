"""The checkpoint that is read: ckptd's own, or a folder of safetensors files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ckptd.engine.fetch import load_index
from ckptd.engine.places import Places, check_size
from ckptd.format.digest import DigestIndex
from ckptd.format.manifest import FileEntry
from ckptd.store.base import Store
from ckptd.types import DType

__all__ = ["OwnSource", "Source"]


class Source(Protocol):
    """Files, and where the pieces of tensors lie in them. Threads share it."""

    @property
    def store(self) -> Store:
        """Where the files are."""

    @property
    def files(self) -> Sequence[FileEntry]:
        """The data files."""

    @property
    def dtypes(self) -> Sequence[DType]:
        """Type of each tensor, by number."""

    @property
    def names(self) -> Sequence[str]:
        """Name of each tensor, by number."""

    def place(self, tensor: int, piece: int) -> tuple[int, int]:
        """Return ``(file, first byte in its data section)``; `ABSENT` for no file."""

    def open_file(self, file: int) -> None:
        """Check that a file is there and has its size, once, and get what verifies it.

        Raises
        ------
        CorruptError
            It is not there, or not what was written.
        """

    def index(self, file: int) -> DigestIndex | None:
        """Return the digests of an opened file's blocks; None where nobody wrote any."""

    def holders(self, file: int, start: int, end: int) -> str:
        """Return the names of what lies in bytes of a file, for errors."""


class OwnSource:
    """A checkpoint of ckptd."""

    def __init__(self, places: Places, store: Store) -> None:
        self.store = store
        self.files = places.manifest.files
        self.dtypes = places.filemap.dtypes
        self.names = [t.name for t in places.manifest.tensors]
        self._places = places

    def place(self, tensor: int, piece: int) -> tuple[int, int]:
        """Return where a piece lies."""
        return self._places.of(tensor, piece)

    def open_file(self, file: int) -> None:
        """Check size and digest index."""
        if file not in self._places.indexes:
            entry = self.files[file]
            check_size(self.store, entry)
            self._places.indexes[file] = load_index(self.store, entry)

    def index(self, file: int) -> DigestIndex | None:
        """Return the index."""
        return self._places.indexes[file]

    def holders(self, file: int, start: int, end: int) -> str:
        """Return tensors and chunks."""
        found = self._places.chunks_at(file, start, end)
        named = ", ".join(f"tensor {t}" + (f" (chunk {c})" if c != t else "") for t, c in found[:4])
        return f"{named} and {len(found) - 4} more" if len(found) > 4 else named
