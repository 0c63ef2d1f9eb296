"""Chunks that did not change since a committed checkpoint: which are referred to. Pure data.

A rank remembers the digests of the chunks that it saved and where they lie. At its next save a
chunk with the same digest and length is not written again: the manifest refers to the file that
holds it (spec 4.4). What is too small to look for, what would keep a file of which little is still
needed, and what lies in too many folders is written afresh.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.format.digest import DIGEST_BYTES
from ckptd.format.manifest import FileEntry
from ckptd.format.names import CommitName

__all__ = [
    "LEAST_BYTES",
    "MOST_FOLDERS",
    "Announced",
    "Base",
    "Digests",
    "Held",
    "Refer",
    "Switch",
    "after",
    "digest_table",
    "folder_of",
    "refers",
    "runs_of",
    "same_as",
    "worth_keeping",
]

LEAST_BYTES = 64 << 10
"""Chunks below this size are always written: a reader would seek for them."""
MOST_FOLDERS = 8
"""Data folders that one checkpoint may refer to, its own included."""
LEAST_SHARE = 0.5
"""Of the bytes of an old file or folder so much must still be needed, or it is not referred to."""
LEAST_RATE = 0.02
"""Share of a rank's bytes that must be found unchanged for the search to pay."""
PATIENCE = 3
"""Searches in a row below that rate after which the search is off for a while."""
FIRST_OFF, LONGEST_OFF = 8, 64
"""Saves for which it is off, the first time and at most."""

Digests = NDArray[np.uint64]
"""One row of two words for each chunk."""


class Base(msgspec.Struct, frozen=True):
    """The committed checkpoint that a save refers to."""

    step: int
    generation: int
    attempt: str

    @property
    def name(self) -> CommitName:
        """The checkpoint."""
        return CommitName(self.step, self.generation)


class Announced(msgspec.Struct, frozen=True):
    """What rank 0 tells the others at the start of a save.

    Attributes
    ----------
    base
        Leased by rank 0 until the save ends; None: everything is written.
    folders
        Those of its data folders that may be referred to.
    """

    base: Base | None = None
    folders: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Return msgpack."""
        return msgspec.msgpack.encode(self)


class Refer(msgspec.Struct, frozen=True):
    """Chunks of a rank that lie in a file of an older folder.

    Attributes
    ----------
    file
        As it stands in the manifest.
    runs
        ``(first, count)`` of chunk numbers in the canonical order of all chunks that the plan
        gives to the rank; rising.
    """

    file: FileEntry
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Held:
    """Where the chunks of one rank lie under one checkpoint.

    Attributes
    ----------
    plan
        Digest of the plan whose canonical order counts the chunks.
    files
        The files.
    where
        Number of the file that holds each chunk, -1 for unknown.
    digests
        Of each chunk.
    shared
        Whether other ranks may need these files as well: the number of ranks has changed.
    """

    plan: str
    files: tuple[FileEntry, ...]
    where: NDArray[np.int64]
    digests: Digests
    shared: bool = False


def digest_table(digests: bytes) -> Digests:
    """Return joined 16-byte digests as a table."""
    return np.frombuffer(digests, dtype=np.uint64).reshape(-1, DIGEST_BYTES // 8)


def folder_of(path: str) -> str:
    """Return the data folder of a file."""
    return path.rpartition("/")[0] + "/"


def same_as(
    held: Held,
    digests: Digests,
    sizes: NDArray[np.int64],
    folders: Collection[str],
) -> NDArray[np.bool_]:
    """Tell for each chunk whether it is referred to.

    A file of which less than half is needed is let go. How much is needed of one that is shared is
    looked at by folder (`worth_keeping`).

    Parameters
    ----------
    held
        What an older checkpoint holds.
    digests, sizes
        Of this save's chunks, sizes in bytes.
    folders
        Those that may be referred to.
    """
    same = (held.where >= 0) & (sizes >= LEAST_BYTES)
    same &= (held.digests == digests).all(axis=1)
    for number, file in enumerate(held.files):
        here = same & (held.where == number)
        needed = int(sizes[here].sum())
        thin = not held.shared and needed < LEAST_SHARE * file.data_bytes
        if thin or folder_of(file.path) not in folders:
            same &= ~here
    return same


def refers(held: Held, same: NDArray[np.bool_]) -> tuple[Refer, ...]:
    """Return what a part says of the chunks that are referred to, by path."""
    found = []
    for number, file in enumerate(held.files):
        numbers = np.flatnonzero(same & (held.where == number))
        if len(numbers):
            found.append(Refer(file, runs_of(numbers)))
    return tuple(sorted(found, key=lambda r: r.file.path))


def runs_of(numbers: NDArray[Any]) -> tuple[tuple[int, int], ...]:
    """Return rising numbers as ``(first, count)``."""
    if not len(numbers):
        return ()
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    starts = np.concatenate(([0], breaks))
    ends = np.concatenate((breaks, [len(numbers)]))
    return tuple(
        (int(numbers[a]), int(b - a)) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)
    )


def worth_keeping(folders: Sequence[tuple[str, int, int]], own: str) -> tuple[str, ...]:
    """Return the folders of a checkpoint that the next one may refer to.

    Parameters
    ----------
    folders
        Each with the bytes that the checkpoint refers to and those that it holds.
    own
        The checkpoint's own folder.
    """
    kept = [f for f in folders if f[0] == own or f[1] >= LEAST_SHARE * f[2]]
    # The largest first: letting go of them would cost the most.
    kept.sort(key=lambda f: (-f[1], f[0]))
    return tuple(sorted(name for name, _, _ in kept[: MOST_FOLDERS - 1]))


class Switch:
    """Whether to search at all: a dense model never finds anything."""

    def __init__(self) -> None:
        self._misses = 0
        self._left = 0
        self._pause = FIRST_OFF

    def take(self) -> bool:
        """Tell whether this save searches; counts the saves that do not."""
        if self._left:
            self._left -= 1
            return False
        return True

    @property
    def on(self) -> bool:
        """Whether the next save searches."""
        return not self._left

    def told(self, found: int, total: int) -> None:
        """Learn how many of a save's bytes were found unchanged."""
        if found >= LEAST_RATE * total:
            self._misses, self._pause = 0, FIRST_OFF
            return
        self._misses += 1
        if self._misses >= PATIENCE:
            # From now on one more miss is enough.
            self._left, self._pause = self._pause, min(2 * self._pause, LONGEST_OFF)


def after(
    plan: str,
    own: FileEntry,
    digests: Digests,
    held: Held | None = None,
    same: NDArray[np.bool_] | None = None,
) -> Held:
    """Return where everything lies after a save.

    Parameters
    ----------
    own
        The file that it wrote.
    held, same
        What was there before, and which of it the save refers to; None: to nothing.
    """
    where = np.zeros(len(digests), dtype=np.int64)
    files = [own]
    shared = False
    if held is not None and same is not None:
        for number, file in enumerate(held.files):
            here = same & (held.where == number)
            if here.any():
                where[here] = len(files)
                files.append(file)
                shared = held.shared
    return Held(plan, tuple(files), where, digests, shared)
