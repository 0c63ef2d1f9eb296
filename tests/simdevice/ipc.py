"""Blocks of a simulated device that other processes open, as CUDA IPC has it.

`SimSharing` has `ckptd.publish.torch.devices.DeviceCarrier` share them. What this cannot show: a
driver, peer access, and rates.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, NamedTuple

import torch

from ckptd.base.runtime.memory import anonymous_file
from tests.simdevice.loading import installed
from tests.simdevice.tensors import DeviceMemory, SimTensor, index_of

__all__ = ["IpcBlock", "IpcHandle", "SimSharing"]


class IpcHandle(NamedTuple):
    """Names a block of a device to other processes of the host."""

    pid: int
    fd: int
    nbytes: int


class IpcBlock:
    """Memory of a simulated device that processes share.

    Attributes
    ----------
    tensor
        The block, as bytes on the device.
    handle
        What another process opens it by.
    """

    def __init__(self, fd: int, nbytes: int, device: int) -> None:
        self._map = mmap.mmap(fd, nbytes)
        raw = torch.frombuffer(self._map, dtype=torch.uint8)
        queue = installed().current(device)
        self.tensor = SimTensor(raw, DeviceMemory(raw, queue, shared=True))
        self.handle = IpcHandle(os.getpid(), fd, nbytes)
        self._fd = fd

    @staticmethod
    def of_size(nbytes: int, device: int) -> IpcBlock:
        """Return a new block."""
        fd = anonymous_file("ckptd-ipc")
        os.ftruncate(fd, nbytes)
        return IpcBlock(fd, nbytes, device)

    @staticmethod
    def opened(handle: IpcHandle, device: int) -> IpcBlock:
        """Return the block of another process.

        Raises
        ------
        OSError
            That process is gone.
        """
        fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return IpcBlock(fd, handle.nbytes, device)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Let no other process open it by this one any more; who has it keeps it. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class SimSharing:
    """See `ckptd.publish.torch.devices.BlockSharing`."""

    def __init__(self) -> None:
        self.made: dict[tuple[int, ...], IpcBlock] = {}

    def make(self, nbytes: int, device: torch.device) -> tuple[torch.Tensor, list[Any]]:
        """Return a new block of a device, and its handle."""
        block = IpcBlock.of_size(nbytes, index_of(device))
        self.made[block.handle] = block
        return block.tensor, [index_of(device), *block.handle]

    def open(self, handle: list[Any]) -> torch.Tensor:
        """Return the block of another process, or raise `OSError`."""
        device, *rest = handle
        block = IpcBlock.opened(IpcHandle(*rest), device)
        block.close()  # it is mapped
        return block.tensor

    def end(self, handle: list[Any]) -> None:
        """Let nobody open it any more."""
        self.made.pop(tuple(handle[1:])).close()
