"""Memory into which blocks of a remote store are read: private, or shared by the ranks of a host.

Blocks that are neighbours in a file are neighbours here, so that pass 2 copies straight from it.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import tempfile
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ckptd.engine.blocks import BlockLine, Runs
from ckptd.errors import StoreError, UsageError
from ckptd.format.digest import BLOCK_BYTES

__all__ = ["HostBuffer", "SharedMemory"]

SHM_FOLDER = "/dev/shm"


class HostBuffer:
    """A buffer, and which blocks lie where in it.

    Parameters
    ----------
    line
        Positions of blocks.
    memory
        The bytes; as many blocks as the largest wave has.
    """

    def __init__(self, line: BlockLine, memory: NDArray[np.uint8]) -> None:
        self._line = line
        self.memory = memory
        self.lay_out(np.empty((0, 2), dtype=np.int64))

    def lay_out(self, runs: Runs) -> None:
        """Let the buffer hold these blocks from now on; what it held is forgotten."""
        lengths = runs[:, 1] - runs[:, 0]
        self._starts = runs[:, 0]
        self._ends = runs[:, 1]
        self._at = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        if int(self._at[-1]) * BLOCK_BYTES > len(self.memory):
            raise UsageError(
                "a wave does not fit the host buffer",
                wanted=f"{int(self._at[-1]) * BLOCK_BYTES} bytes",
                found=f"{len(self.memory)} bytes",
            )

    def offset(self, file: int, start: int, end: int) -> int:
        """Return where bytes ``[start, end)`` of the data section of `file` lie in the buffer.

        Raises
        ------
        UsageError
            The buffer does not hold them all.
        """
        lo, hi = self._line.positions(file, start, end)
        run = int(np.searchsorted(self._starts, lo, side="right")) - 1
        if run < 0 or hi > int(self._ends[run]):
            raise UsageError("the host buffer does not hold these bytes", found=(file, start, end))
        block = int(self._at[run]) + lo - int(self._starts[run])
        return block * BLOCK_BYTES + start % BLOCK_BYTES

    def view(self, file: int, start: int, end: int) -> memoryview:
        """Return these bytes of `file`, writable."""
        at = self.offset(file, start, end)
        return self.memory.data[at : at + end - start]


class SharedMemory:
    """A named file of memory that several processes of a host map.

    It lies in /dev/shm where that has room, else in the folder for temporary files. Its blocks
    are reserved when it is made, so that touching it never fails (a sparse file without room
    behind it kills with SIGBUS). The owner unlinks it as soon as everybody has it open, so a
    killed job leaves nothing.
    """

    def __init__(self, path: str, fd: int, size: int, *, owner: bool) -> None:
        self.path = path
        self._owner = owner
        try:
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self.array: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    @staticmethod
    def create(size: int, folder: str | None = None) -> SharedMemory:
        """Make and map `size` bytes, mode 0600.

        Raises
        ------
        StoreError
            kind ``no-space``: neither memory nor the temporary folder has room.
        """
        found = []
        for place in [folder] if folder else [SHM_FOLDER, tempfile.gettempdir()]:
            path = os.path.join(place, f"ckptd-{os.getpid()}-{secrets.token_hex(8)}")
            try:
                return SharedMemory._create(path, size)
            except OSError as error:
                found.append(f"{place}: {error.strerror}")
        raise StoreError(
            "no room for a buffer that the ranks of this host share",
            kind="no-space",
            wanted=f"{size} bytes",
            found="; ".join(found),
            hint="give load() a smaller budget_bytes, or point TMPDIR at a larger disk",
        )

    @staticmethod
    def _create(path: str, size: int) -> SharedMemory:
        if not hasattr(os, "posix_fallocate"):
            raise OSError(errno.ENOTSUP, "this system cannot reserve memory")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
        except BaseException:
            os.close(fd)
            os.unlink(path)
            raise
        return SharedMemory(path, fd, size, owner=True)

    @staticmethod
    def open(path: str, size: int) -> SharedMemory:
        """Map what another rank of this user made.

        Raises
        ------
        StoreError
            It is not there (another container), not ours, or has another size.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise StoreError(
                "cannot open the host's shared buffer", where=path, found=error.strerror
            ) from None
        info = os.fstat(fd)
        if info.st_uid != os.geteuid() or info.st_size != size:
            os.close(fd)
            raise StoreError(
                "the host's shared buffer is somebody else's",
                where=path,
                wanted=f"{size} bytes of user {os.geteuid()}",
                found=f"{info.st_size} bytes of user {info.st_uid}",
            )
        return SharedMemory(path, fd, size, owner=False)

    def unlink(self) -> None:
        """Take the name away; the memory lives while somebody has it mapped. Idempotent."""
        if self._owner:
            self._owner = False
            os.unlink(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.unlink()
