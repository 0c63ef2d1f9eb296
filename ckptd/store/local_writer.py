"""The writer of `LocalStore`: large aligned blocks, several in flight, past the page cache.

One thread reaches about half of what a disk can take, and a page cache that fills up stalls the
whole machine; so blocks go to a few threads, with O_DIRECT where the file system allows it. The
caller's bytes are written from where they are when their address is aligned as their place in the
file is; else they are gathered in aligned blocks first.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from ckptd.errors import TransientStoreError, UsageError
from ckptd.store.osio import O_DIRECT, Os, start_writeback, writing
from ckptd.store.writing import SizedWriter

__all__ = ["ALIGN", "LocalWriter", "address"]

ALIGN = 4096
_WORTH_ALIGNING = 1 << 20


class LocalWriter(SizedWriter):
    """Writes the file in place; see `Writer`. `path` is free or gets a new file."""

    def __init__(
        self,
        path: str,
        size: int,
        *,
        system: Os,
        pool: ThreadPoolExecutor,
        threads: int,
        block_bytes: int,
        stall_s: float,
        buffered_devices: set[int],
        direct: bool,
    ) -> None:
        super().__init__(path, size)
        self._system = system
        self._pool = pool
        self._most = 2 * threads
        self._block_bytes = block_bytes
        self._stall_s = stall_s
        self._buffered_devices = buffered_devices
        self._flying: deque[tuple[Future[None], mmap.mmap | None]] = deque()
        self._free: list[mmap.mmap] = []
        self._gather: mmap.mmap | None = None
        self._gathered = 0
        self._sent = 0  # bytes handed to threads; the file offset of what is gathered
        self._is_cut = False
        self._fd = -1
        self._open(direct)

    def _open(self, direct: bool) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            self._fd = self._system.open(self.key, flags)
        except FileExistsError:
            # A new file, never a truncated old one: somebody may have the old one mapped.
            self._system.unlink(self.key)
            self._fd = self._system.open(self.key, flags)
        self._device = os.fstat(self._fd).st_dev
        self._direct = False
        try:
            self._system.fallocate(self._fd, self.size, self.key)
        except BaseException:
            self.abort()
            raise
        if direct and self.size >= ALIGN and self._device not in self._buffered_devices:
            self._direct = self._set_direct(True)

    def _set_direct(self, on: bool) -> bool:
        """Switch O_DIRECT; returns whether it is on."""
        if not O_DIRECT:
            return False
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        wanted = flags | O_DIRECT if on else flags & ~O_DIRECT
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, wanted)
        except OSError:
            self._buffered_devices.add(self._device)
            return False
        return on

    # -- the caller's thread -------------------------------------------------------------------

    def _append(self, view: memoryview) -> None:
        with writing(self.key, self.size):
            while len(view):
                taken = self._send_in_place(view) or self._send_gathered(view)
                view = view[taken:]

    def _send_in_place(self, view: memoryview) -> int:
        """Send a block straight from the caller's memory; 0 when alignment forbids it."""
        count = min(len(view), self._block_bytes) // ALIGN * ALIGN
        if count == 0 or self._gathered or (self._direct and address(view) % ALIGN):
            return 0
        self._send(view[:count], None)
        return count

    def _send_gathered(self, view: memoryview) -> int:
        """Copy bytes into the block under way, and send that when it is full; 0 when only sent."""
        room = self._block_bytes - self._gathered
        gap = -self._gathered % ALIGN
        # When the caller's memory is aligned like the file, a few bytes bring both to a boundary,
        # and the rest goes without a copy.
        in_step = not self._direct or (address(view) + gap) % ALIGN == 0
        if in_step and self._gathered and len(view) >= _WORTH_ALIGNING:
            room = gap
        count = min(len(view), room)
        if count:
            if self._gather is None:
                self._gather = self._free.pop() if self._free else mmap.mmap(-1, self._block_bytes)
            self._gather[self._gathered : self._gathered + count] = view[:count]
            self._gathered += count
        if count == room:
            self._send_block()
        return count

    def _send_block(self) -> None:
        block, self._gather = self._gather, None
        count, self._gathered = self._gathered, 0
        if block is not None:
            self._send(memoryview(block)[:count], block)

    def _send(self, view: memoryview, block: mmap.mmap | None) -> None:
        while len(self._flying) >= self._most:
            self._land()
        offset, self._sent = self._sent, self._sent + len(view)
        try:
            future = self._pool.submit(self._write_block, view, offset)
        except RuntimeError:
            raise UsageError("the store is closed", kind="closed", where=self.key) from None
        self._flying.append((future, block))

    def _land(self) -> None:
        """Wait for the oldest block and raise what it met."""
        future, block = self._flying[0]
        if not wait([future], self._stall_s).done:
            raise TransientStoreError(
                f"no progress for {self._stall_s:g} s", kind="stalled", where=self.key
            )
        self._flying.popleft()
        future.result()
        if block is not None:
            self._free.append(block)

    def _shorten(self) -> None:
        self._is_cut = True  # once nothing is in flight any more

    def _finish(self) -> None:
        with writing(self.key, self.size):
            tail = b""
            if self._gather is not None:
                aligned = self._gathered // ALIGN * ALIGN
                tail = self._gather[aligned : self._gathered]
                self._gathered = aligned
                self._send_block()
            while self._flying:
                self._land()
            self._go_buffered()  # O_DIRECT refuses a length that is not a multiple of ALIGN
            self._write_block(memoryview(tail), self._sent)
            if self._is_cut:
                os.ftruncate(self._fd, self.size)
            self._system.fdatasync(self._fd, self.key)
            self._release()

    def _release(self) -> None:
        self._free.clear()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _drop(self) -> None:
        # Those that were cancelled in time are no longer anybody's: a wait would not see them end.
        flying = [future for future, _ in self._flying if not future.cancel()]
        # A thread that hangs in a write keeps the descriptor: closing it would let the thread
        # write into whatever file gets that number next.
        if not wait(flying, self._stall_s).not_done:
            self._release()
        self._flying.clear()
        self._system.unlink(self.key)

    # -- the store's threads -------------------------------------------------------------------

    def _write_block(self, view: memoryview, offset: int) -> None:
        while len(view):
            direct = self._direct
            try:
                count = self._system.pwrite(self._fd, view, offset, self.key)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                self._buffered_devices.add(self._device)
                self._go_buffered()
                continue
            if count == 0:
                raise OSError(errno.EIO, "the file system takes no bytes")
            if direct and count < len(view):
                # A short write (the disk fills up): what remains must be aligned again.
                count = count // ALIGN * ALIGN
                if count == 0:
                    self._go_buffered()
            if not self._direct:
                start_writeback(self._fd, offset, count)
            view = view[count:]
            offset += count

    def _go_buffered(self) -> None:
        if self._direct:
            self._direct = self._set_direct(False)


def address(view: memoryview) -> int:
    """Return the memory address of the first byte."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
