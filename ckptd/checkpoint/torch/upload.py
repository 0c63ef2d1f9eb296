"""Copies to devices while a checkpoint is read: ring of pinned buffers, sizes, stall.

Threads that read fill buffers of the ring; the copy of each is enqueued on a stream of ckptd's own,
and the buffer is used again once an event says that it has been copied. What a load holds on the
host is the ring, whatever the size of the state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from ckptd.base.grids.block import Block, Fill
from ckptd.base.grids.grid import is_packed
from ckptd.base.runtime.host import available_bytes
from ckptd.base.torch.device import kind_of
from ckptd.base.torch.tensors import WORDS, flat_memory
from ckptd.errors import CkptdError, DeadlineError
from ckptd.types import DType

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]

BUFFER_BYTES = 8 << 20
"""Of one buffer: at least what one move of a read spans, 4 MiB; 0.2 ms of a link of 50 GB/s."""
MOST_BUFFERS = 16
STALL_S = 300.0
"""A device that copies nothing for so long hangs, in seconds."""
_ALIGN = 64
_POLL_S = 0.0001

_log = logging.getLogger("ckptd")


class BufferRing:
    """Buffers of the host that values pass through; page-locked where that can be had. Thread-safe.

    Parameters
    ----------
    nbytes
        Of one buffer. There are 16 at most, made as they are needed; fewer, and two at least, where
        16 would take more than a thirty-second of the memory that is available.

    Attributes
    ----------
    locked
        Whether the buffers are page-locked, so that devices copy from them by themselves.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.locked = True
        self._most = max(2, min(MOST_BUFFERS, available_bytes() // 32 // nbytes))
        self._lock = threading.Lock()
        self._made = 0
        self._idle: list[torch.Tensor] = []
        self._sent: deque[tuple[torch.Event, torch.Tensor]] = deque()

    def take(self) -> torch.Tensor:
        """Wait for an idle buffer, and return it.

        Raises
        ------
        DeadlineError
            kind ``stalled``.
        """
        until = time.monotonic() + STALL_S
        while True:
            with self._lock, _failures():
                self._collect()
                if self._idle:
                    return self._idle.pop()
                if self._made < self._most:
                    self._made += 1
                    return self._make()
            if time.monotonic() > until:
                raise _stalled(STALL_S)
            time.sleep(_POLL_S)

    def _make(self) -> torch.Tensor:
        if self.locked:
            try:
                return torch.empty(self.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                _log.info("no page-locked memory: each copy to a device is synchronous (%s)", error)
                self.locked = False
        return torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")

    def _collect(self) -> None:
        """Take back what has been copied; of several devices each has a pace of its own."""
        for _ in range(len(self._sent)):
            event, buffer = self._sent.popleft()
            if event.query():
                self._idle.append(buffer)
            else:
                self._sent.append((event, buffer))

    def give(self, buffer: torch.Tensor, copied: torch.Event | None) -> None:
        """Take a buffer back, which is idle once `copied` has happened; None: it is already."""
        with self._lock:
            if copied is None:
                self._idle.append(buffer)
            else:
                self._sent.append((copied, buffer))


class Upload:
    """Writes to one device. See `ckptd.checkpoint.load.target.DeviceWriter`.

    Where a device has streams, copies are enqueued on one of ckptd's own, behind what the program
    had enqueued when `begin` was called. Elsewhere each is waited for.

    Attributes
    ----------
    device
        The device.
    ring
        What all uploads of a load share.
    """

    def __init__(self, device: torch.device, ring: BufferRing) -> None:
        self.device = device
        self.ring = ring
        self._kind = kind_of(device)
        self._stream = self._kind.make_stream(device) if self._kind.has_streams else None

    @property
    def limit(self) -> int:
        """See `DeviceWriter`."""
        return self.ring.nbytes

    def begin(self) -> None:
        """Order all copies after the work that the current stream holds by now."""
        if self._stream is not None:
            with _failures():
                ready = self._kind.make_event()
                ready.record(self._kind.current_stream(self.device))
                self._stream.wait_event(ready)

    @contextmanager
    def order(self) -> Iterator[None]:
        """Order this thread's work on the device after the copies, within the context.

        Captures of graphs in other threads are not broken by events and locks made within.
        """
        stream = self._stream
        on = nullcontext() if stream is None else self._kind.on_stream(self.device, stream)
        with _failures(), self._kind.captures_ignored(), on, torch.no_grad():
            yield

    def batch(self) -> _Batch:
        """See `DeviceWriter`."""
        return _Batch(self)

    def mark(self) -> torch.Event | None:
        """Return what happens once everything that was sent has been copied; None: it has been."""
        if self._stream is None:
            return None
        with _failures():
            event = self._kind.make_event()
            event.record(self._stream)
        return event

    @property
    def is_lazy(self) -> bool:
        """Whether a copy from page-locked memory may be enqueued and need not be waited for."""
        return self._stream is not None

    def settle(self, timeout_s: float) -> None:
        """See `DeviceWriter`."""
        until = time.monotonic() + timeout_s
        with _failures(), self._kind.captures_ignored():
            mark = self.mark()
            while mark is not None and not mark.query():
                if time.monotonic() > until:
                    raise _stalled(timeout_s)
                time.sleep(_POLL_S)

    def values(self, wanted: Sequence[tuple[DeviceBuffer, int, I64]]) -> list[U8]:
        """Bring elements of the device's targets to the host, behind what was sent.

        Parameters
        ----------
        wanted
            Targets, bytes of their elements, and numbers of elements.

        Returns
        -------
        list of numpy.ndarray
            The bytes of each target's elements, end to end.
        """
        cuts = np.cumsum([0, *(len(elements) for _, _, elements in wanted)]).tolist()
        with self.order():
            every = np.concatenate([elements for _, _, elements in wanted])
            index = torch.from_numpy(every).to(self.device)
            parts = [
                target.words(size).index_select(0, index[a:b]).view(torch.uint8)
                for (target, size, _), a, b in zip(wanted, cuts, cuts[1:], strict=False)
            ]
            raw = torch.cat(parts).cpu().numpy()
        sizes = [len(elements) * size for _, size, elements in wanted]
        return np.split(raw, np.cumsum(sizes)[:-1])


class _Batch:
    """See `ckptd.checkpoint.load.target.DeviceBatch`. One buffer of the ring at a time."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        self._ring = upload.ring
        self._buffer: torch.Tensor | None = None
        self._used = 0
        self._order = ExitStack()
        self._order.enter_context(upload.order())

    @property
    def locked(self) -> bool:
        return self._ring.locked

    def room(self, nbytes: int) -> U8:
        start = -(-self._used // _ALIGN) * _ALIGN
        if self._buffer is None or start + nbytes > self._ring.nbytes:
            self._give()
            start, self._buffer = 0, self._ring.take()
        self._used = start + nbytes
        return self._buffer.numpy()[start : self._used]

    def _give(self) -> None:
        if self._buffer is not None:
            # Also where the ring has meanwhile run out of page-locked memory: this one is locked.
            self._ring.give(self._buffer, self._upload.mark())
        self._buffer, self._used = None, 0

    def close(self) -> None:
        try:
            self._give()
        finally:
            self._order.close()


class DeviceBuffer:
    """The memory below a tensor of a device. See `ckptd.checkpoint.load.target.DeviceTarget`.

    Parameters
    ----------
    tensor
        No two of its elements may lie at one place; gaps between them are no part of it, and are
        not written.
    writer
        Writes to its device.
    """

    def __init__(self, tensor: torch.Tensor, writer: Upload) -> None:
        self._bytes = flat_memory(tensor.detach()).view(torch.uint8)
        self.nbytes = self._bytes.numel()
        self.writer = writer

    def words(self, itemsize: int) -> torch.Tensor:
        """Return the memory as elements of so many bytes."""
        kind = WORDS[itemsize]
        return self._bytes if kind == torch.uint8 else self._bytes.view(kind)

    def place(self, block: Block, itemsize: int) -> torch.Tensor:
        """Return the places that a block writes to, in its shape."""
        if is_packed(block.shape, block.target_strides):
            start = block.target_start * itemsize
            return self._bytes[start : start + block.numel * itemsize]
        words = self.words(itemsize)
        at = words.storage_offset() + block.target_start
        return words.as_strided(block.shape, block.target_strides, at)

    def send(self, block: Block, itemsize: int, values: U8, *, locked: bool) -> None:
        """See `DeviceTarget`."""
        place, source = self.place(block, itemsize), torch.from_numpy(values)
        if place.dtype != torch.uint8:
            source = source.view(place.dtype)
        with _failures():
            place.copy_(source.view(place.shape), non_blocking=locked and self.writer.is_lazy)

    def fill(self, fill: Fill, dtype: DType) -> None:
        """Write one value to some places, behind what was sent."""
        value = torch.from_numpy(np.full(1, fill.value, dtype.numpy).view(np.uint8))
        words = self.words(dtype.itemsize)
        at = words.storage_offset() + fill.start
        shape, strides = tuple(n for n, _ in fill.steps), tuple(s for _, s in fill.steps)
        with self.writer.order():
            words.as_strided(shape, strides, at).fill_(value.view(words.dtype)[0].item())


@contextmanager
def _failures() -> Iterator[None]:
    """Name what a device raises, so that all ranks learn that the state may be half written.

    Raises
    ------
    CkptdError
        A device raised an error, or had no memory, while values were copied to it.
    """
    try:
        yield
    except RuntimeError as error:
        raise CkptdError(
            "a device failed while a checkpoint was copied to it",
            found=f"{type(error).__name__}: {error}",
            hint="if memory ran out, free some and load again; otherwise restart the process: most "
            "device errors last until it ends",
        ) from error


def _stalled(timeout_s: float) -> DeadlineError:
    return DeadlineError(
        "a copy to a device did not finish in time",
        kind="stalled",
        wanted=f"a copy within {timeout_s:.0f} s",
        hint="a kernel that never ends may block the stream; the state is half written",
    )
