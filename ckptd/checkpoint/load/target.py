"""Where a read puts values: host memory, or a device behind a writer."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ckptd.base.grids.block import Block

U8 = NDArray[np.uint8]


class DeviceBatch(Protocol):
    """Batch of one thread's writes to a device: memory of the host, filled and then sent."""

    @property
    def locked(self) -> bool:
        """Whether that memory is page-locked."""

    def room(self, nbytes: int) -> U8:
        """Return some of it, at most `DeviceWriter.limit` bytes."""

    def close(self) -> None:
        """Give it back, as soon as what was sent has been copied. Comes last."""


class DeviceWriter(Protocol):
    """Writes to one device, from any number of threads."""

    @property
    def limit(self) -> int:
        """Most bytes that a batch has room for at a time."""

    def batch(self) -> DeviceBatch:
        """Return a batch for the calling thread."""

    def settle(self, timeout_s: float) -> None:
        """Wait until everything that was sent has been copied.

        Raises
        ------
        DeadlineError
            kind ``stalled``: it took longer than `timeout_s`.
        """


class DeviceTarget(Protocol):
    """A buffer in the memory of a device; positions in it count elements from its first byte."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""

    @property
    def writer(self) -> DeviceWriter:
        """The writer to the device; all targets of one device share it."""

    def send(self, block: Block, itemsize: int, values: U8, *, locked: bool) -> None:
        """Begin the copy of a block's values to their places, inside a batch of this thread.

        Parameters
        ----------
        block
            Whose `target_start` and `target_strides` say where the values go.
        itemsize
            Bytes of an element of the buffer.
        values
            The values, row-major, end to end: what the batch had room for, or other memory.
        locked
            `values` is page-locked, and stays as it is until the writer has settled; or until the
            batch gets it back.
        """


Target = U8 | DeviceTarget
