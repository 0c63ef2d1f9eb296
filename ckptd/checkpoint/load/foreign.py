"""Interface of foreign formats, as the core uses it; the slice `readers` implements it.

In it: names of files by which a foreign checkpoint is suspected.
"""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol, cast

from ckptd.parts import part
from ckptd.store.base import ReadOnlyStore, Store

SHARD = re.compile(r"-([0-9]{5})-of-([0-9]{5})\.")
"""How names end that number the files of a model."""
_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".metadata")


class ForeignStore(ReadOnlyStore):
    """A foreign checkpoint, seen as a root with one checkpoint.

    Attributes
    ----------
    format
        Name of the reader.
    left_out
        How many values are neither tensors nor plain, and the names of the first ones.
    unread
        Tensors of kinds that are not read, in words; empty for none.
    """

    format: str
    left_out: tuple[int, Sequence[str]]
    unread: str

    @abstractmethod
    def foreign_file(self, key: str) -> tuple[str, int]:
        """Return key and size of the file that a data file represents.

        Raises
        ------
        NotFoundError
            There is no such data file.
        """

    @abstractmethod
    def foreign_range(self, key: str, start: int) -> tuple[int, int]:
        """Return which bytes of its file a piece spans that begins at `start` of a data file.

        Raises
        ------
        NotFoundError
            There is no such data file.
        CorruptError
            The file is damaged there.
        """


class ForeignFormats(Protocol):
    """The formats of other programs.

    They raise `CorruptError` and `RefusedError` for damaged and refused files, and `MismatchError`
    where a folder has checkpoints of several formats.
    """

    def names(self) -> Sequence[str]:
        """Return the names of the formats."""

    def format_of(self, store: Store) -> str:
        """Return the name of a format that a folder itself is of; empty for none."""

    def find(self, store: Store, only: str = "", step: int = 0) -> ForeignStore | None:
        """Open the checkpoint in a folder, or below; in the file `only`, if one is given."""


def foreign_formats() -> ForeignFormats:
    """Return the formats that are installed."""
    return cast("ForeignFormats", part("foreign"))


def split_file(url: str) -> tuple[str, str]:
    """Return the folder and the name of a file that a user gives; the name is empty for a folder.

    What ends like a file of a known format is one, unless a folder is called so.
    """
    if not url.endswith(_FILES) or os.path.isdir(url.removeprefix("file://")):
        return url, ""
    folder, _, name = url.rpartition("/")
    return folder or ("/" if url.startswith("/") else "."), name
