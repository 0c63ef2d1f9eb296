"""Where the target's files go, and what their headers say."""

from __future__ import annotations

from typing import Protocol

from ckptd.format.filemap import FileMap
from ckptd.format.manifest import FileEntry
from ckptd.format.names import CommitName, data_folder, file_key
from ckptd.types import DType

__all__ = ["OwnPlace", "Place"]


class Place(Protocol):
    """A place for files."""

    @property
    def folder(self) -> str:
        """Folder that holds ``parts/``; ends in "/"."""

    @property
    def with_digests(self) -> bool:
        """Whether each data file gets a digest index."""

    def path(self, number: int) -> str:
        """Key of a data file."""

    def header_entries(
        self, filemap: FileMap, number: int
    ) -> list[tuple[str, DType, tuple[int, ...]]]:
        """Return name, type and shape of each chunk of a file."""

    def header_metadata(self, number: int) -> dict[str, str]:
        """Return what the header says besides."""


class OwnPlace:
    """A checkpoint of ckptd: step, generation, attempt, and the folder of these."""

    with_digests = True

    def __init__(self, step: int, generation: int, attempt: str) -> None:
        self.name = CommitName(step, generation)
        self.attempt = attempt
        self.folder = data_folder(self.name, attempt)

    def path(self, number: int) -> str:
        """Key of a rank's file."""
        return file_key(self.folder, number)

    def entry(self, number: int) -> FileEntry:
        """Return the entry of a rank that writes no file."""
        return FileEntry(self.path(number), number)

    def header_entries(
        self, filemap: FileMap, number: int
    ) -> list[tuple[str, DType, tuple[int, ...]]]:
        """Return the names that the specification fixes."""
        return filemap.header_entries(number)

    def header_metadata(self, number: int) -> dict[str, str]:
        """Return a line about step and rank."""
        return {"format": "pt", "ckptd": f"step {self.name.step} rank {number}"}
