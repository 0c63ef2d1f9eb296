"""The writer of `Pack`: cuts frames, packs them in threads, writes them in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from ckptd.errors import TransientStoreError, UsageError
from ckptd.store.base import Writer
from ckptd.store.pack_container import HEADER, frame_end, lead_of, table_bytes
from ckptd.store.pack_frame import Frame, encode_frame
from ckptd.store.writing import SizedWriter

__all__ = ["STALL_S", "PackWriter", "result_of"]

_T = TypeVar("_T")

STALL_S = 600.0
"""One frame takes milliseconds; a thread that has no turn for so long has none at all."""


def result_of(future: Future[_T], where: str) -> _T:
    """Return what a thread found, raise what it met, or tell that there are no threads any more."""
    try:
        return future.result(STALL_S)
    except CancelledError:
        raise UsageError("the store is closed", kind="closed", where=where) from None
    except TimeoutError:
        raise TransientStoreError(
            f"no progress for {STALL_S:g} s", kind="stalled", where=where
        ) from None


class PackWriter(SizedWriter):
    """Packs what it gets into `inner`; see `Writer`.

    Holds at most two frames a thread. A frame that lies in one buffer of the caller's is not
    copied.

    Parameters
    ----------
    key
        The logical name, for errors.
    size
        Logical bytes.
    inner
        A writer of at least `ckptd.store.pack_container.bound` bytes.
    committed
        Called when the packed object stands.
    """

    def __init__(
        self,
        key: str,
        size: int,
        inner: Writer,
        *,
        level: int,
        pool: ThreadPoolExecutor,
        threads: int,
        committed: Callable[[], None],
    ) -> None:
        super().__init__(key, size)
        self._inner = inner
        self._level = level
        self._pool = pool
        self._most = 2 * threads
        self._committed = committed
        self._views: deque[memoryview] = deque()
        self._held = 0
        self._at = 0  # where the next frame begins
        self._lead = -1  # until the first eight bytes are there
        self._flying: deque[Future[Frame]] = deque()
        self._rows: list[tuple[int, int, int, int]] = []
        try:
            inner.write(memoryview(HEADER))
        except BaseException:
            self.abort()
            raise

    def _append(self, view: memoryview) -> None:
        if len(view):
            self._views.append(view)
            self._held += len(view)
            self._cut_frames(last=False)

    def _cut_frames(self, *, last: bool) -> None:
        if self._lead < 0:
            if self._held < 8 and not last:
                return
            first = self._take(min(8, self._held))
            self._lead = lead_of(bytes(first), self.size)
            self._give_back(first)
        while self._held:
            wanted = frame_end(self._at, self._lead, self.size) - self._at
            if self._held < wanted:
                return
            self._send(self._take(wanted))
            self._at += wanted

    def _take(self, count: int) -> memoryview:
        """Return the next `count` bytes; a copy only where they lie in several buffers."""
        self._held -= count
        pieces = []
        while count:
            view = self._views.popleft()
            pieces.append(view[:count])
            if len(view) > count:
                self._views.appendleft(view[count:])
            count -= len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    def _give_back(self, view: memoryview) -> None:
        if len(view):
            self._views.appendleft(view)
            self._held += len(view)

    def _send(self, view: memoryview) -> None:
        while len(self._flying) >= self._most:
            self._land()
        try:
            self._flying.append(self._pool.submit(encode_frame, view, self._level))
        except RuntimeError:
            raise UsageError("the store is closed", kind="closed", where=self.key) from None

    def _land(self) -> None:
        """Write the oldest frame, as soon as it is packed."""
        frame = result_of(self._flying[0], self.key)
        self._flying.popleft()
        self._inner.write(memoryview(frame.data))
        self._rows.append((len(frame.data), frame.codec, frame.width, frame.check))

    def _finish(self) -> None:
        self._cut_frames(last=True)
        while self._flying:
            self._land()
        self._inner.write(memoryview(table_bytes(self.size, self._lead, self._rows)))
        self._inner.cut()
        self._inner.commit()
        self._committed()

    def _drop(self) -> None:
        # A thread that still reads the caller's memory must end before that may change.
        wait([f for f in self._flying if not f.cancel()], STALL_S)
        self._flying.clear()
        self._views.clear()
        self._inner.abort()
