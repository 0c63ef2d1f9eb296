"""What every writer does alike: count bytes, know its state, never raise from abort."""

from __future__ import annotations

import contextlib
from abc import abstractmethod

from ckptd.errors import CkptdError, UsageError
from ckptd.store.base import Writer
from ckptd.store.buffers import as_bytes_view

__all__ = ["SizedWriter"]


class SizedWriter(Writer):
    """A writer of exactly `size` bytes; stores fill in the three steps below."""

    def __init__(self, key: str, size: int) -> None:
        if size < 0:
            raise UsageError("a size is not negative", kind="size", where=key, found=size)
        self.key = key
        self.size = size
        self.written = 0
        self._state = "open"

    def write(self, data: memoryview) -> None:
        """Append all of `data`."""
        self._check_open()
        view = as_bytes_view(data)
        if self.written + len(view) > self.size:
            raise self._size_error(self.written + len(view))
        try:
            self._append(view)
        except BaseException:
            self._state = "failed"
            raise
        self.written += len(view)

    def cut(self) -> None:
        """End the object at what was written."""
        self._check_open()
        self.size = self.written
        self._shorten()

    def commit(self) -> None:
        """Return when every byte is durable."""
        self._check_open()
        if self.written != self.size:
            raise self._size_error(self.written)
        self._state = "failed"
        self._finish()
        self._state = "committed"

    def abort(self) -> None:
        """Give up; remove what can be removed."""
        if self._state in ("committed", "aborted"):
            return
        self._state = "aborted"
        # The caller is on its way out with the error that matters; a second one would hide it.
        with contextlib.suppress(CkptdError, OSError):
            self._drop()

    def _check_open(self) -> None:
        if self._state != "open":
            raise UsageError(
                "the writer is done",
                kind="closed",
                where=self.key,
                found=self._state,
                hint="begin a new one with Store.writer",
            )

    def _size_error(self, found: int) -> UsageError:
        return UsageError(
            "a writer takes exactly the bytes that were announced",
            kind="size",
            where=self.key,
            wanted=f"{self.size} bytes",
            found=f"{found} bytes",
        )

    @abstractmethod
    def _append(self, view: memoryview) -> None:
        """Take `view`, which fits into the announced size."""

    def _shorten(self) -> None:
        """Give up what was set aside beyond `size`, by now or in `_finish`."""

    @abstractmethod
    def _finish(self) -> None:
        """Make all bytes durable."""

    @abstractmethod
    def _drop(self) -> None:
        """Release everything and remove what was written; may raise."""
