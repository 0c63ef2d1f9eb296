"""A file that a rank writes and others read, of which nothing is believed before it is checked.

It is read with ``pread`` and never mapped, since a mapped file that shrinks kills its reader.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from ckptd.errors import CorruptError, NotFoundError, StoreError

__all__ = ["RankFile"]


class RankFile:
    """An open file of a rank; subclasses know what lies in it. Use it in a ``with`` block.

    Parameters
    ----------
    path
        The file.

    Raises
    ------
    NotFoundError
        kind ``no-ring``: there is no such file.
    CorruptError
        kind ``bad-ring``: it is not such a file, or damaged, or of another version.
    StoreError
        kind ``store``: it cannot be opened or read.
    """

    WHAT: ClassVar[str]
    """What the file is, for messages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise NotFoundError(
                f"there is no {self.WHAT}", kind="no-ring", where=str(path)
            ) from error
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            self._read_identity()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; harmless when closed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read_identity(self) -> None:
        """Check and keep what the header says, once the file is open."""
        raise NotImplementedError

    def _length(self, least: int) -> int:
        """Return the bytes of a regular file that has `least` at least."""
        info = os.fstat(self._fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size < least:
            raise self._corrupt("a regular file with a header", f"{info.st_size} bytes")
        return info.st_size

    def _pread(self, size: int, at: int) -> bytes:
        try:
            raw = os.pread(self._fd, size, at) if size else b""
        except OSError as error:
            raise self._unreadable(error) from error
        if len(raw) != size:
            raise self._corrupt(f"{size} bytes at {at}", f"{len(raw)}: the file has shrunk")
        return raw

    def _corrupt(self, wanted: str, found: str) -> CorruptError:
        return CorruptError(
            f"this is not a {self.WHAT}",
            kind="bad-ring",
            where=str(self.path),
            wanted=wanted,
            found=found,
        )

    def _unreadable(self, error: OSError) -> StoreError:
        return StoreError(
            f"a {self.WHAT} cannot be read", where=str(self.path), found=error.strerror
        )
